//! Metrics as OpenMetrics text: the text itself, and the families that both daemons serve.
//!
//! Names and labels are an interface: dashboards depend on them.

use partage_core::model::{Bytes, Cores, GpuUuid};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeLabelSet, EncodeMetric, NoLabelSet, text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use std::collections::HashMap;
use std::fmt;

/// The unit of amounts of memory.
pub const BYTES: Option<&str> = Some("bytes");
/// The unit of parts of a whole, which is 1.
pub const RATIO: Option<&str> = Some("ratio");
/// The unit of times.
pub const SECONDS: Option<&str> = Some("seconds");

/// Label names with their values.
pub type MetricLabels = Vec<(&'static str, String)>;

/// Renders what `write` writes as `application/openmetrics-text; version=1.0.0; charset=utf-8`.
pub fn render(write: impl Fn(&mut MetricFamilies<'_, '_>) -> fmt::Result + Send + Sync + 'static) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(FnCollector(write)));
    let mut text = String::new();
    // Writing to a String does not fail, and neither does formatting a number.
    let _ = text::encode(&mut text, &registry);
    text
}

struct FnCollector<F>(F);

impl<F> fmt::Debug for FnCollector<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FnCollector")
    }
}

impl<F> Collector for FnCollector<F>
where
    F: Fn(&mut MetricFamilies<'_, '_>) -> fmt::Result + Send + Sync + 'static,
{
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.0(&mut MetricFamilies { encoder: &mut encoder })
    }
}

/// Writes metrics, family by family.
#[derive(Debug)]
pub struct MetricFamilies<'a, 'b> {
    encoder: &'a mut DescriptorEncoder<'b>,
}

impl MetricFamilies<'_, '_> {
    /// Writes a family of one metric without labels.
    pub fn single(&mut self, name: &str, help: &str, metric: &impl EncodeMetric) -> fmt::Result {
        metric.encode(self.encoder.encode_descriptor(name, help, None, metric.metric_type())?)
    }

    /// Writes a family of values that go up and down. An unknown value is left out: zero would be a value.
    pub fn gauge<L: EncodeLabelSet, N: EncodeGaugeValue>(
        &mut self,
        name: &str,
        unit: Option<&str>,
        help: &str,
        values: impl Iterator<Item = (L, Option<N>)>,
    ) -> fmt::Result {
        let unit = unit.map(|unit| Unit::Other(unit.into()));
        let mut family = self.encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
        for (labels, value) in known(values) {
            ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    /// Writes a family of sums that only grow; the text calls them `…_total`.
    pub fn counter<L: EncodeLabelSet, N: EncodeCounterValue>(
        &mut self,
        name: &str,
        unit: Option<&str>,
        help: &str,
        values: impl Iterator<Item = (L, Option<N>)>,
    ) -> fmt::Result {
        let unit = unit.map(|unit| Unit::Other(unit.into()));
        let mut family = self.encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Counter)?;
        for (labels, value) in known(values) {
            ConstCounter::new(value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    /// Writes a histogram of durations. Each bucket is an upper bound in seconds with the number of durations that are
    /// at most that and above the bound before; `sum` is all durations together, in seconds.
    pub fn histogram(&mut self, name: &str, help: &str, buckets: &[(f64, u64)], sum: f64) -> fmt::Result {
        let unit = Some(&Unit::Seconds);
        let mut family = self.encoder.encode_descriptor(name, help, unit, MetricType::Histogram)?;
        let none: Option<&HashMap<usize, Exemplar<NoLabelSet, f64>>> = None;
        family.encode_histogram(sum, buckets.iter().map(|(_, count)| count).sum(), buckets, none)
    }
}

fn known<L, N>(values: impl Iterator<Item = (L, Option<N>)>) -> impl Iterator<Item = (L, N)> {
    values.filter_map(|(labels, value)| Some((labels, value?)))
}

/// Writes `partage_info`: the versions of Partage and of the driver.
pub fn write_info(
    to: &mut MetricFamilies<'_, '_>,
    version: &str,
    driver_version: &str,
    simulated: bool,
) -> fmt::Result {
    let labels: MetricLabels = vec![
        ("version", version.into()),
        ("driver", driver_version.into()),
        ("simulated", simulated.to_string()),
    ];
    to.single("partage", "Version of Partage and of the GPU driver.", &Info::new(labels))
}

/// The metrics of a GPU.
#[derive(Clone, Copy, Debug)]
pub struct GpuMetrics<'a> {
    /// The index in the driver's order.
    pub index: usize,
    /// The UUID of the GPU.
    pub uuid: &'a GpuUuid,
    /// The model name of the GPU.
    pub model: &'a str,
    /// The memory that programs can allocate.
    pub memory: Bytes,
    /// The memory granted to shares.
    pub granted_memory: Bytes,
    /// The memory in use, from NVML.
    pub used_memory: Option<Bytes>,
    /// The compute guaranteed to shares, in thousandths of a percent; it can exceed a whole GPU.
    pub granted_millipercent: u32,
    /// The utilization over the last sampling period, from NVML, in percent.
    pub utilization_percent: Option<u32>,
    /// The temperature in degrees Celsius.
    pub temperature: Option<u32>,
    /// The power draw in milliwatts.
    pub power_milliwatts: Option<u32>,
    /// Whether shares of the GPU can be granted.
    pub healthy: bool,
    /// The number of processes on the GPU that belong to no share.
    pub unowned_processes: usize,
    /// The number of shares granted of the GPU.
    pub shares: usize,
}

/// Writes the families `partage_gpu_…`.
pub fn write_gpus<'a, I>(to: &mut MetricFamilies<'_, '_>, gpus: impl Fn() -> I) -> fmt::Result
where
    I: Iterator<Item = GpuMetrics<'a>>,
{
    let mut gauge = |name: &str, unit, help: &str, value: &dyn Fn(GpuMetrics<'_>) -> Option<f64>| {
        let labels = |of: GpuMetrics<'_>| -> MetricLabels {
            vec![
                ("gpu", of.index.to_string()),
                ("uuid", of.uuid.to_string()),
                ("model", of.model.to_string()),
            ]
        };
        to.gauge(&format!("partage_gpu_{name}"), unit, help, gpus().map(|of| (labels(of), value(of))))
    };
    let bytes = |bytes: Bytes| bytes.0 as f64;
    gauge("memory", BYTES, "GPU memory that programs can allocate (bytes).", &|of| Some(bytes(of.memory)))?;
    gauge("memory_granted", BYTES, "GPU memory granted to shares (bytes).", &|of| {
        Some(bytes(of.granted_memory))
    })?;
    gauge("memory_used", BYTES, "GPU memory in use, from NVML (bytes).", &|of| of.used_memory.map(bytes))?;
    gauge("cores_guaranteed", RATIO, "Compute guaranteed to shares (ratio of the GPU).", &|of| {
        Some(f64::from(of.granted_millipercent) / 1e5)
    })?;
    gauge(
        "utilization",
        RATIO,
        "GPU utilization over the last sampling period, from NVML (ratio).",
        &|of| of.utilization_percent.map(|percent| f64::from(percent) / 100.0),
    )?;
    gauge("temperature", Some("celsius"), "GPU temperature, from NVML (degrees Celsius).", &|of| {
        of.temperature.map(f64::from)
    })?;
    gauge("power", Some("watts"), "GPU power draw, from NVML (watts).", &|of| {
        of.power_milliwatts.map(|milliwatts| f64::from(milliwatts) / 1e3)
    })?;
    gauge("healthy", None, "1 if the GPU is healthy and shares of it can be granted, else 0.", &|of| {
        Some(f64::from(u8::from(of.healthy)))
    })?;
    gauge("unowned_processes", None, "Number of processes on the GPU that belong to no share.", &|of| {
        Some(of.unowned_processes as f64)
    })?;
    gauge("shares", None, "Number of shares granted of the GPU.", &|of| Some(of.shares as f64))
}

/// The metrics of a share of one GPU: its limits and its usage.
#[derive(Clone, Copy, Debug, Default)]
pub struct ShareMetrics {
    /// The memory limit in bytes; absent without one.
    pub memory_limit: Option<u64>,
    /// The guaranteed compute; absent if none is guaranteed.
    pub cores: Option<Cores>,
    /// The compute limit; absent if the guarantee is also the limit.
    pub ceiling: Option<Cores>,
    /// The usage that its processes report; absent if it cannot be read.
    pub usage: Option<UsageMetrics>,
}

/// The usage that the processes of a share report in its region.
#[derive(Clone, Copy, Debug, Default)]
pub struct UsageMetrics {
    /// The memory in use, in bytes.
    pub used_bytes: u64,
    /// The highest memory use so far, in bytes.
    pub peak_bytes: u64,
    /// The GPU time used so far, in nanoseconds.
    pub gpu_nanos: u64,
    /// The time that threads waited for their turn, in nanoseconds.
    pub throttled_nanos: u64,
    /// The number of allocations that the memory limit refused.
    pub refusals: u64,
}

/// Writes the families of shares. `prefix` is the front end's: `partage_share` or `partage_container`.
pub fn write_shares<I>(to: &mut MetricFamilies<'_, '_>, prefix: &str, shares: impl Fn() -> I) -> fmt::Result
where
    I: Iterator<Item = (MetricLabels, ShareMetrics)>,
{
    let name = |name: &str| format!("{prefix}_{name}");
    let bytes =
        |value: fn(ShareMetrics) -> Option<u64>| shares().map(move |(labels, share)| (labels, value(share)));
    to.gauge(&name("memory_limit"), BYTES, "GPU memory limit (bytes).", bytes(|share| share.memory_limit))?;
    to.gauge(
        &name("memory_used"),
        BYTES,
        "GPU memory in use that counts against the limit (bytes).",
        bytes(|share| Some(share.usage?.used_bytes)),
    )?;
    to.gauge(
        &name("memory_peak"),
        BYTES,
        "Highest GPU memory use so far (bytes).",
        bytes(|share| Some(share.usage?.peak_bytes)),
    )?;
    let cores = |value: fn(ShareMetrics) -> Option<Cores>| {
        shares().map(move |(labels, share)| (labels, value(share).map(ratio)))
    };
    to.gauge(
        &name("cores_guaranteed"),
        RATIO,
        "Guaranteed compute (ratio of the GPU).",
        cores(|share| share.cores),
    )?;
    to.gauge(
        &name("cores_ceiling"),
        RATIO,
        "Compute ceiling (ratio of the GPU).",
        cores(|share| share.ceiling.or(share.cores)),
    )?;
    let times = |value: fn(UsageMetrics) -> u64| {
        shares().map(move |(labels, share)| (labels, share.usage.map(|usage| seconds(value(usage)))))
    };
    to.counter(&name("gpu"), SECONDS, "GPU time used (seconds).", times(|usage| usage.gpu_nanos))?;
    to.counter(
        &name("throttled"),
        SECONDS,
        "Time that threads waited for their turn (seconds).",
        times(|usage| usage.throttled_nanos),
    )?;
    to.counter(
        &name("refusals"),
        None,
        "Number of allocations refused because of the memory limit.",
        bytes(|share| Some(share.usage?.refusals)),
    )
}

/// Writes the family of tenants that the bypass audit suspects.
pub fn write_suspected<L: EncodeLabelSet>(
    to: &mut MetricFamilies<'_, '_>,
    prefix: &str,
    tenants: impl Iterator<Item = (L, bool)>,
) -> fmt::Result {
    to.gauge(
        &format!("{prefix}_bypass_suspected"),
        None,
        "1 if the bypass audit suspects that the tenant circumvents its limits, else 0.",
        tenants.map(|(labels, suspected)| (labels, Some(u32::from(suspected)))),
    )
}

/// Converts compute into a ratio of a whole GPU.
pub fn ratio(cores: Cores) -> f64 {
    f64::from(cores.as_millipercent()) / 1e5
}

/// Converts nanoseconds into seconds.
pub fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_values_are_left_out() {
        let text = render(|to| {
            let rows = || {
                let limited = ShareMetrics { memory_limit: Some(7), ..ShareMetrics::default() };
                [("a", limited), ("b", ShareMetrics::default())]
                    .into_iter()
                    .map(|(share, metrics)| (vec![("share", share.to_string())], metrics))
            };
            write_shares(to, "partage_share", rows)
        });
        assert!(text.contains("partage_share_memory_limit_bytes{share=\"a\"} 7\n"), "{text}");
        assert!(!text.contains("share=\"b\""), "{text}");
        assert!(text.contains("# TYPE partage_share_gpu_seconds counter\n"), "{text}");
    }

    #[test]
    fn share_without_a_ceiling_reaches_its_guarantee() {
        let text = render(|to| {
            let usage = UsageMetrics { gpu_nanos: 1_500_000_000, refusals: 2, ..UsageMetrics::default() };
            let share =
                ShareMetrics { cores: Cores::percent(30), usage: Some(usage), ..ShareMetrics::default() };
            write_shares(to, "partage_container", || std::iter::once((vec![("gpu", "0".into())], share)))
        });
        for line in [
            "partage_container_cores_guaranteed_ratio{gpu=\"0\"} 0.3",
            "partage_container_cores_ceiling_ratio{gpu=\"0\"} 0.3",
            "partage_container_gpu_seconds_total{gpu=\"0\"} 1.5",
            "partage_container_refusals_total{gpu=\"0\"} 2",
        ] {
            assert!(text.lines().any(|is| is == line), "{line} is not in {text}");
        }
    }
}
