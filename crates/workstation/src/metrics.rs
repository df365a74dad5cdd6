//! A report as OpenMetrics text, for Prometheus.

use crate::report::{GpuReport, PartReport, Report, ShareReport};
use partage_host::openmetrics::{self, BYTES, Families, GpuFigures, RATIO, SECONDS, ratio, seconds};
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use std::fmt;

/// What is to be served as `application/openmetrics-text; version=1.0.0; charset=utf-8`.
pub fn text(report: &Report) -> String {
    let report = report.clone();
    openmetrics::text(move |to| {
        machine(&report, to)?;
        gpus(&report, to)?;
        shares(&report, to)?;
        parts(&report, to)
    })
}

fn machine(report: &Report, to: &mut Families<'_, '_>) -> fmt::Result {
    let simulated = if report.driver.simulated { "true" } else { "false" };
    let labels = vec![
        ("version", report.keeper.version.clone()),
        ("driver", report.driver.version.clone()),
        ("simulated", simulated.to_string()),
    ];
    to.single("partage", "What keeps the shares of this machine.", &Info::new(labels))?;
    let waiting = ConstGauge::new(count(report.waiting.len()));
    to.single("partage_waiting", "Commands that wait for a share.", &waiting)
}

fn gpus(report: &Report, to: &mut Families<'_, '_>) -> fmt::Result {
    openmetrics::gpus(to, || report.gpus.iter().map(|gpu| figures(gpu, report)))
}

fn figures<'a>(gpu: &'a GpuReport, report: &Report) -> GpuFigures<'a> {
    let parts = report.shares.iter().flat_map(|share| &share.parts);
    GpuFigures {
        index: gpu.index as usize,
        uuid: &gpu.uuid,
        model: &gpu.model,
        memory: gpu.memory_bytes,
        memory_promised: gpu.promised_memory_bytes,
        memory_used: gpu.used_memory_bytes,
        cores_promised: gpu.promised_cores.as_millipercent(),
        utilisation: gpu.utilisation,
        temperature: gpu.temperature,
        power_milliwatts: gpu.power_milliwatts,
        healthy: gpu.unhealthy.is_none(),
        strangers: gpu.strangers.len(),
        shares: parts.filter(|part| part.uuid == gpu.uuid).count(),
    }
}

fn shares(report: &Report, to: &mut Families<'_, '_>) -> fmt::Result {
    let each = || {
        let shares = report.shares.iter();
        shares.map(|share| ([("share", share.name.as_str()), ("user", share.user.as_str())], share))
    };
    to.gauge(
        "partage_share_processes",
        None,
        "Processes of the share.",
        each().map(|(labels, share)| (labels, Some(count(share.members)))),
    )?;
    to.gauge(
        "partage_share_bypass_suspected",
        None,
        "1 where something looks like a way around its limits.",
        each().map(|(labels, share)| (labels, Some(flag(!share.bypass_suspected.is_empty())))),
    )
}

fn parts(report: &Report, to: &mut Families<'_, '_>) -> fmt::Result {
    let each = || {
        let all = report.shares.iter().flat_map(|share| share.parts.iter().map(move |part| (share, part)));
        all.map(|(share, part)| (labels_of_part(share, part), part))
    };
    macro_rules! family {
        ($kind:ident, $name:literal, $unit:expr, $help:literal, $value:expr) => {
            to.$kind(
                concat!("partage_share_", $name),
                $unit,
                $help,
                each().map(|(labels, part)| (labels, $value(part))),
            )?
        };
    }
    family!(gauge, "memory_limit", BYTES, "Memory it may use.", |part: &PartReport| part
        .memory_bytes
        .map(|bytes| bytes.0));
    family!(gauge, "memory_used", BYTES, "Memory it uses.", |part: &PartReport| Some(part.used_bytes.0));
    family!(gauge, "memory_peak", BYTES, "The most memory it ever used.", |part: &PartReport| Some(
        part.peak_bytes.0
    ));
    family!(gauge, "cores_promised", RATIO, "Compute it was promised.", |part: &PartReport| part
        .cores
        .map(ratio));
    family!(gauge, "cores_ceiling", RATIO, "Compute it may reach.", |part: &PartReport| part
        .ceiling
        .or(part.cores)
        .map(ratio));
    family!(counter, "gpu", SECONDS, "Time of the GPU it used.", |part: &PartReport| Some(seconds(
        part.spent_nanos
    )));
    family!(
        counter,
        "throttled",
        SECONDS,
        "Time its processes were kept waiting for their turn.",
        |part: &PartReport| Some(seconds(part.throttled_nanos))
    );
    family!(counter, "refusals", None, "Allocations that its own limit refused.", |part: &PartReport| Some(
        part.refusals
    ));
    Ok(())
}

fn labels_of_part(share: &ShareReport, part: &PartReport) -> [(&'static str, String); 3] {
    [("share", share.name.clone()), ("user", share.user.clone()), ("gpu", part.gpu.to_string())]
}

fn flag(is: bool) -> u64 {
    u64::from(is)
}

fn count(of: usize) -> u64 {
    u64::try_from(of).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
