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
            let gpu_shares = report
                .shares
                .iter()
                .flat_map(|share| share.gpu_shares.iter().map(move |gpu_share| (share, gpu_share)));
            gpu_shares
                .map(|(share, gpu_share)| (gpu_share_labels(share, gpu_share), gpu_share_metrics(gpu_share)))
        })
    })
}

fn machine(report: &MachineReport, to: &mut MetricFamilies<'_, '_>) -> fmt::Result {
    write_info(to, &report.daemon.version, &report.driver.version, report.driver.simulated)?;
    let waiting = ConstGauge::new(count(report.waiting.len()));
    to.single("partage_waiting", "Number of requests that wait for capacity.", &waiting)
}

fn gpu_metrics<'a>(gpu: &'a GpuReport, report: &MachineReport) -> GpuMetrics<'a> {
    let gpu_shares = report.shares.iter().flat_map(|share| &share.gpu_shares);
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
        shares: gpu_shares.filter(|gpu_share| gpu_share.uuid == gpu.uuid).count(),
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

fn gpu_share_metrics(gpu_share: &GpuShareReport) -> ShareMetrics {
    ShareMetrics {
        memory_limit: gpu_share.memory_bytes.map(|bytes| bytes.0),
        cores: gpu_share.cores,
        ceiling: gpu_share.ceiling,
        usage: Some(UsageMetrics {
            used_bytes: gpu_share.used_bytes.0,
            peak_bytes: gpu_share.peak_bytes.0,
            gpu_nanos: gpu_share.spent_nanos,
            throttled_nanos: gpu_share.throttled_nanos,
            refusals: gpu_share.refusals,
        }),
    }
}

fn gpu_share_labels(share: &ShareReport, gpu_share: &GpuShareReport) -> MetricLabels {
    vec![("share", share.name.clone()), ("user", share.user.clone()), ("gpu", gpu_share.gpu.to_string())]
}

fn count(of: usize) -> u64 {
    u64::try_from(of).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
