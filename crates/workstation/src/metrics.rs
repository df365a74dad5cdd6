//! Renders a report as OpenMetrics text, for Prometheus.

use crate::report::{GpuReport, GpuShareReport, MachineReport, ShareReport};
use partage_enforce::metrics::{
    GpuMetrics, MetricFamilies, MetricLabels, ShareMetrics, UsageMetrics, render, write_gpus, write_info,
    write_shares, write_suspected,
};
use prometheus_client::metrics::gauge::ConstGauge;
use std::fmt;

/// The prefix of the metric families of shares.
const PREFIX: &str = "partage_share";

/// Renders a report as `application/openmetrics-text; version=1.0.0; charset=utf-8`.
pub fn text(report: &MachineReport) -> String {
    let report = report.clone();
    render(move |to| {
        machine(&report, to)?;
        write_gpus(to, || report.gpus.iter().map(|gpu| gpu_metrics(gpu, &report)))?;
        shares(&report, to)?;
        write_shares(to, PREFIX, || {
            let parts =
                report.shares.iter().flat_map(|share| share.parts.iter().map(move |part| (share, part)));
            parts.map(|(share, part)| (part_labels(share, part), part_metrics(part)))
        })
    })
}

fn machine(report: &MachineReport, to: &mut MetricFamilies<'_, '_>) -> fmt::Result {
    write_info(to, &report.daemon.version, &report.driver.version, report.driver.simulated)?;
    let waiting = ConstGauge::new(count(report.waiting.len()));
    to.single("partage_waiting", "Number of requests that wait for capacity.", &waiting)
}

fn gpu_metrics<'a>(gpu: &'a GpuReport, report: &MachineReport) -> GpuMetrics<'a> {
    let parts = report.shares.iter().flat_map(|share| &share.parts);
    GpuMetrics {
        index: gpu.index as usize,
        uuid: &gpu.uuid,
        model: &gpu.model,
        memory: gpu.memory_bytes,
        granted_memory: gpu.granted_memory_bytes,
        used_memory: gpu.used_memory_bytes,
        granted_millipercent: gpu.guaranteed_cores.as_millipercent(),
        utilization_percent: gpu.utilization,
        temperature: gpu.temperature,
        power_milliwatts: gpu.power_milliwatts,
        healthy: gpu.unhealthy.is_none(),
        unowned_processes: gpu.unowned_processes.len(),
        shares: parts.filter(|part| part.uuid == gpu.uuid).count(),
    }
}

fn shares(report: &MachineReport, to: &mut MetricFamilies<'_, '_>) -> fmt::Result {
    let each = || {
        let shares = report.shares.iter();
        shares.map(|share| ([("share", share.name.as_str()), ("user", share.user.as_str())], share))
    };
    to.gauge(
        &format!("{PREFIX}_processes"),
        None,
        "Number of processes of the share.",
        each().map(|(labels, share)| (labels, Some(count(share.members)))),
    )?;
    write_suspected(to, PREFIX, each().map(|(labels, share)| (labels, !share.bypass_suspected.is_empty())))
}

fn part_metrics(part: &GpuShareReport) -> ShareMetrics {
    ShareMetrics {
        memory_limit: part.memory_bytes.map(|bytes| bytes.0),
        cores: part.cores,
        ceiling: part.ceiling,
        usage: Some(UsageMetrics {
            used_bytes: part.used_bytes.0,
            peak_bytes: part.peak_bytes.0,
            gpu_nanos: part.spent_nanos,
            throttled_nanos: part.throttled_nanos,
            refusals: part.refusals,
        }),
    }
}

fn part_labels(share: &ShareReport, part: &GpuShareReport) -> MetricLabels {
    vec![("share", share.name.clone()), ("user", share.user.clone()), ("gpu", part.gpu.to_string())]
}

fn count(of: usize) -> u64 {
    u64::try_from(of).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
