//! Metrics under the names of the systems that Partage replaces, for existing dashboards.

use crate::report::{ContainerReport, NodeReport};
use partage_core::model::{Cores, Share};
use partage_enforce::metrics::{MetricFamilies, MetricLabels};
use partage_enforce::report::GpuStatus;
use partage_region::GpuUsage;
use std::collections::BTreeMap;
use std::fmt;

/// The label that these systems put on every metric.
const ZONE: (&str, &str) = ("zone", "vGPU");
const MIB: f64 = (1u64 << 20) as f64;

/// Writes all metric families that have names of other systems.
pub(super) fn write(report: &NodeReport, to: &mut MetricFamilies<'_, '_>) -> fmt::Result {
    write_gpus(report, to)?;
    write_containers(report, to)?;
    write_vcuda(report, to)
}

/// Writes GPU metrics under the names of Volcano and older HAMi, and of newer HAMi. Volcano's label sets are subsets of HAMi's.
fn write_gpus(report: &NodeReport, to: &mut MetricFamilies<'_, '_>) -> fmt::Result {
    const VOLCANO_LABELS: [&str; 4] = ["nodeid", "deviceidx", "deviceuuid", "devicetype"];
    const HAMI_LABELS: [&str; 4] = ["node", "device_index", "device_uuid", "device_type"];
    let mut gauge = |name, names: [&'static str; 4], help, value: fn(&GpuStatus) -> Option<f64>| {
        let each = report.gpus.iter().enumerate().map(|(index, of)| {
            let values = [
                report.node.to_string(),
                index.to_string(),
                of.gpu.uuid.to_string(),
                format!("NVIDIA-{}", of.gpu.model),
            ];
            (zoned(names, values), value(of))
        });
        to.gauge(name, None, help, each)
    };
    let memory = |of: &GpuStatus| Some(of.sample.as_ref()?.memory_used?.0 as f64);
    let busy = |of: &GpuStatus| Some(f64::from(of.sample.as_ref()?.utilization?));
    gauge("HostGPUMemoryUsage", VOLCANO_LABELS, "GPU memory in use (bytes).", memory)?;
    gauge("HostCoreUtilization", VOLCANO_LABELS, "GPU utilization (percent).", busy)?;
    gauge("hami_host_gpu_memory_used_bytes", HAMI_LABELS, "GPU memory in use (bytes).", memory)?;
    let help = "GPU utilization (percent, despite the name, as in HAMi).";
    gauge("hami_host_gpu_utilization_ratio", HAMI_LABELS, help, busy)?;
    gauge("hami_host_gpu_temperature_celsius", HAMI_LABELS, "GPU temperature (degrees Celsius).", |of| {
        Some(f64::from(of.sample.as_ref()?.temperature?))
    })?;
    gauge("hami_host_gpu_power_usage_watts", HAMI_LABELS, "Power draw of the GPU (watts).", |of| {
        Some(f64::from(of.sample.as_ref()?.power_milliwatts?) / 1e3)
    })
}

/// One share with its container and its usage.
struct ShareView<'a> {
    report: &'a NodeReport,
    of: &'a ContainerReport,
    at: usize,
    share: &'a Share,
    usage: Option<&'a GpuUsage>,
}

fn used(part: &ShareView<'_>) -> Option<f64> {
    Some(part.report.bounded(part.share, part.usage?.used) as f64)
}

/// Returns the memory limit; all memory of the GPU if the share has none, because dashboards divide by it.
fn limit(part: &ShareView<'_>) -> Option<f64> {
    part.report.memory_of(part.share).map(|bytes| bytes as f64)
}

fn busy(part: &ShareView<'_>) -> Option<f64> {
    Some(f64::from(part.of.observed_at(part.at)?.busy))
}

/// Returns the seconds since the last work on the GPU.
fn idle_seconds(part: &ShareView<'_>) -> Option<f64> {
    let worked = part.of.observed_at(part.at)?.worked?;
    Some(part.report.at.saturating_sub(worked) as f64 / 1e9)
}

/// Writes container metrics under the names of Volcano and older HAMi, and of newer HAMi.
fn write_containers(report: &NodeReport, to: &mut MetricFamilies<'_, '_>) -> fmt::Result {
    const VOLCANO_LABELS: [&str; 5] = ["podnamespace", "podname", "ctrname", "vdeviceid", "deviceuuid"];
    const HAMI_LABELS: [&str; 5] = ["namespace", "pod", "container", "vdevice_index", "device_uuid"];
    let mut gauge = |name,
                     names: [&'static str; 5],
                     help,
                     value: fn(&ShareView<'_>) -> Option<f64>,
                     meet: MergeValues| {
        let parts = report.containers.iter().flat_map(|of| {
            of.shares.iter().enumerate().filter_map(move |(at, (share, usage))| {
                let key = [
                    of.pod.namespace.to_string(),
                    of.pod.name.to_string(),
                    of.container.to_string(),
                    at.to_string(),
                    share.gpu.to_string(),
                ];
                Some((key, value(&ShareView { report, of, at, share, usage: usage.as_ref() })?))
            })
        });
        let each = merged(parts, meet).into_iter().map(|(key, value)| (zoned(names, key), Some(value)));
        to.gauge(name, None, help, each)
    };
    const USED: &str = "GPU memory that the container uses (bytes).";
    const LIMIT: &str = "GPU memory that the container may use (bytes).";
    const BUSY: &str = "GPU utilization by the container (percent).";
    const IDLE: &str = "Time since the container last worked on the GPU (seconds).";
    gauge("vGPU_device_memory_usage_in_bytes", VOLCANO_LABELS, USED, used, sum)?;
    gauge("vGPU_device_memory_limit_in_bytes", VOLCANO_LABELS, LIMIT, limit, sum)?;
    gauge("Device_memory_desc_of_container", VOLCANO_LABELS, USED, used, sum)?;
    gauge("Device_utilization_desc_of_container", VOLCANO_LABELS, BUSY, busy, sum)?;
    gauge("Device_last_kernel_of_container", VOLCANO_LABELS, IDLE, idle_seconds, f64::min)?;
    gauge("hami_vgpu_memory_used_bytes", HAMI_LABELS, USED, used, sum)?;
    gauge("hami_vgpu_memory_limit_bytes", HAMI_LABELS, LIMIT, limit, sum)?;
    gauge("hami_container_device_memory_bytes", HAMI_LABELS, USED, used, sum)?;
    let help = "GPU utilization by the container (percent, despite the name, as in HAMi).";
    gauge("hami_container_device_utilization_ratio", HAMI_LABELS, help, busy, sum)?;
    gauge("hami_container_last_kernel_elapsed_seconds", HAMI_LABELS, IDLE, idle_seconds, f64::min)
}

/// Writes container metrics under the names of gpu-manager.
fn write_vcuda(report: &NodeReport, to: &mut MetricFamilies<'_, '_>) -> fmt::Result {
    let mut gauge =
        |name, last: &'static str, help, values: fn(&NodeReport, &ContainerReport) -> CardValues| {
            let all = report.containers.iter().flat_map(|of| {
                values(report, of).into_iter().map(|(card, value)| {
                    let key = [
                        of.pod.name.to_string(),
                        of.pod.namespace.to_string(),
                        report.node.to_string(),
                        of.container.to_string(),
                        card,
                    ];
                    (key, value)
                })
            });
            let names = ["pod_name", "namespace", "node", "container_name", last];
            let each = merged(all, sum).into_iter().map(|(key, value)| (labeled(names, key), Some(value)));
            to.gauge(name, None, help, each)
        };
    gauge(
        "container_gpu_utilization",
        "gpu",
        "GPU utilization by the container (percent).",
        |report, of| by_card(report, of, |seen| f64::from(seen.busy)),
    )?;
    gauge(
        "container_gpu_memory_total",
        "gpu_memory",
        "GPU memory that the container uses (MiB).",
        |report, of| by_card(report, of, |seen| seen.memory.0 as f64 / MIB),
    )?;
    gauge(
        "container_request_gpu_utilization",
        "req_of_gpu",
        "GPU compute that the container requests (ratio of the GPU).",
        |_, of| {
            let whole = |share: &Share| share.whole.then_some(Cores::WHOLE);
            let cores = of.shares.iter().filter_map(|(share, _)| share.cores.or_else(|| whole(share)));
            total(cores.map(|cores| f64::from(cores.as_millipercent()) / 1e5).sum())
        },
    )?;
    gauge(
        "container_request_gpu_memory",
        "req_of_gpu_memory",
        "GPU memory that the container requests (MiB).",
        |report, of| {
            total(
                of.shares
                    .iter()
                    .filter_map(|(share, _)| report.memory_of(share))
                    .map(|of| of as f64 / MIB)
                    .sum(),
            )
        },
    )
}

/// Values by card, and the total of all cards.
type CardValues = Vec<(String, f64)>;

fn total(value: f64) -> CardValues {
    vec![("total".into(), value)]
}

/// Returns what the driver reports of a container, if it was polled already.
fn by_card(
    report: &NodeReport,
    of: &ContainerReport,
    value: fn(&partage_enforce::monitor::ObservedUsage) -> f64,
) -> CardValues {
    if of.observed.is_empty() {
        return Vec::new();
    }
    let card = |uuid| report.index(uuid).map(|index| format!("gpu{index}"));
    let cards = of.observed.iter().filter_map(|(uuid, seen)| Some((card(uuid)?, value(seen))));
    cards.chain(total(of.observed.values().map(value).sum())).collect()
}

/// Merges two values under one name.
type MergeValues = fn(f64, f64) -> f64;

fn sum(one: f64, other: f64) -> f64 {
    one + other
}

/// Merges values with the same labels. A force-deleted pod and its successor of the same name may both exist, and these metrics
/// have no UID: a duplicate sample would make the whole exposition invalid.
fn merged<const N: usize>(
    values: impl Iterator<Item = ([String; N], f64)>,
    meet: MergeValues,
) -> BTreeMap<[String; N], f64> {
    let mut all: BTreeMap<[String; N], f64> = BTreeMap::new();
    for (key, value) in values {
        all.entry(key).and_modify(|known| *known = meet(*known, value)).or_insert(value);
    }
    all
}

fn labeled<const N: usize>(names: [&'static str; N], values: [String; N]) -> MetricLabels {
    names.into_iter().zip(values).collect()
}

fn zoned<const N: usize>(names: [&'static str; N], values: [String; N]) -> MetricLabels {
    let mut labels = labeled(names, values);
    labels.push((ZONE.0, ZONE.1.into()));
    labels
}
