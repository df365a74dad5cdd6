//! Metrics under Partage's own names.

use crate::report::{ContainerReport, DurationHistogram, NodeReport};
use partage_core::dialect::Dialect;
use partage_core::model::Share;
use partage_enforce::metrics::{
    BYTES, MetricFamilies, MetricLabels, RATIO, ShareMetrics, UsageMetrics, seconds, write_gpus, write_info,
    write_shares, write_suspected,
};
use partage_region::GpuUsage;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use std::fmt;

/// The beginning of the names of container families.
const PREFIX: &str = "partage_container";

/// Writes all metric families that have Partage's own names.
pub(super) fn write(report: &NodeReport, to: &mut MetricFamilies<'_, '_>) -> fmt::Result {
    agent(report, to)?;
    gpus(report, to)?;
    containers(report, to)?;
    shares(report, to)
}

fn agent(report: &NodeReport, to: &mut MetricFamilies<'_, '_>) -> fmt::Result {
    write_info(to, env!("CARGO_PKG_VERSION"), &report.driver, report.simulated)?;
    let counts = &report.counts;
    times(
        "partage_allocate",
        "Time to respond to kubelet's Allocate request (seconds).",
        &counts.allocations,
        to,
    )?;
    let help = "Time to prepare a container (grant, region, CDI spec) in PreStartContainer (seconds).";
    times("partage_start", help, &counts.starts, to)?;
    for (name, help, count) in [
        (
            "partage_refused",
            "Number of refused container starts, including kubelet's retries.",
            counts.refused,
        ),
        ("partage_bypass", "Number of suspected limit bypasses reported.", counts.bypasses),
        ("partage_quarantined", "Number of unreadable records quarantined.", counts.quarantined),
    ] {
        to.single(name, help, &ConstCounter::new(count))?;
    }
    let help = "Current mismatches between the ledger, the records, kubelet and the regions.";
    to.single("partage_ledger_mismatch", help, &ConstGauge::new(counts.mismatches))?;
    let of = |dialect: Dialect| report.containers.iter().filter(|one| one.dialect == dialect).count();
    to.gauge(
        "partage_containers",
        None,
        "Number of containers that hold shares, by dialect.",
        Dialect::ALL.iter().map(|dialect| (vec![("dialect", dialect.to_string())], Some(of(*dialect)))),
    )
}

fn times(name: &str, help: &str, times: &DurationHistogram, to: &mut MetricFamilies<'_, '_>) -> fmt::Result {
    let bounds = DurationHistogram::BOUNDS.iter().map(|milliseconds| *milliseconds as f64 / 1e3);
    let buckets: Vec<(f64, u64)> =
        bounds.chain(std::iter::once(f64::INFINITY)).zip(times.counts.iter().copied()).collect();
    to.histogram(name, help, &buckets, seconds(times.nanos))
}

fn gpus(report: &NodeReport, to: &mut MetricFamilies<'_, '_>) -> fmt::Result {
    write_gpus(to, || report.gpus.iter().enumerate().map(|(index, gpu)| gpu.metrics(index)))
}

fn containers(report: &NodeReport, to: &mut MetricFamilies<'_, '_>) -> fmt::Result {
    let containers = report.containers.iter().map(|of| (labels(of), of.bypass_suspected));
    write_suspected(to, PREFIX, containers)
}

fn shares(report: &NodeReport, to: &mut MetricFamilies<'_, '_>) -> fmt::Result {
    let each = || {
        report.containers.iter().flat_map(|of| {
            of.shares.iter().enumerate().map(move |(at, (share, usage))| {
                let mut labels = labels(of);
                labels.push(("share", at.to_string()));
                labels.push(("gpu", report.index(&share.gpu).map_or_else(String::new, |at| at.to_string())));
                labels.push(("uuid", share.gpu.to_string()));
                (labels, of.observed_at(at), share, usage.as_ref())
            })
        })
    };
    write_shares(to, PREFIX, || {
        each().map(|(labels, _, share, usage)| (labels, share_metrics(report, share, usage)))
    })?;
    let seen = || each().map(|(labels, seen, ..)| (labels, seen));
    to.gauge(
        &format!("{PREFIX}_memory_seen"),
        BYTES,
        "GPU memory that the container's processes hold, from NVML (bytes).",
        seen().map(|(labels, seen)| (labels, seen.map(|seen| seen.memory.0))),
    )?;
    to.gauge(
        &format!("{PREFIX}_utilization"),
        RATIO,
        "GPU utilization by the container over the last sampling period, from NVML (ratio).",
        seen().map(|(labels, seen)| (labels, seen.map(|seen| f64::from(seen.busy) / 100.0))),
    )
}

fn share_metrics(report: &NodeReport, share: &Share, usage: Option<&GpuUsage>) -> ShareMetrics {
    ShareMetrics {
        memory_limit: share.memory_bytes.map(|bytes| bytes.0),
        cores: share.cores,
        ceiling: share.ceiling,
        usage: usage.map(|usage| UsageMetrics {
            used_bytes: report.bounded(share, usage.used),
            peak_bytes: report.bounded(share, usage.peak),
            gpu_nanos: usage.spent,
            throttled_nanos: usage.throttled,
            refusals: usage.refusals,
        }),
    }
}

/// Returns the labels of a container. The UID distinguishes a pod that was force-deleted from its successor of the same name.
fn labels(of: &ContainerReport) -> MetricLabels {
    vec![
        ("namespace", of.pod.namespace.to_string()),
        ("pod", of.pod.name.to_string()),
        ("pod_uid", of.pod.uid.to_string()),
        ("container", of.container.to_string()),
    ]
}
