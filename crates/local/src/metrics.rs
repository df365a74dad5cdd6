//! A report as OpenMetrics text, for Prometheus.

use crate::report::{GpuReport, PartReport, Report, ShareReport};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeLabelSet, EncodeMetric, text,
};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::{MetricType, info::Info};
use prometheus_client::registry::{Registry, Unit};
use std::fmt;

/// What is to be served as `application/openmetrics-text; version=1.0.0; charset=utf-8`.
pub fn text(report: &Report) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Snapshot(report.clone())));
    let mut text = String::new();
    // A String takes everything, and every figure of a report has a spelling.
    let _ = text::encode(&mut text, &registry);
    text
}

/// A report, in the order in which it is told.
#[derive(Debug)]
struct Snapshot(Report);

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut to = Families { encoder: &mut encoder };
        machine(&self.0, &mut to)?;
        gpus(&self.0, &mut to)?;
        shares(&self.0, &mut to)?;
        parts(&self.0, &mut to)
    }
}

struct Families<'a, 'b> {
    encoder: &'a mut DescriptorEncoder<'b>,
}

impl Families<'_, '_> {
    /// A family of figures that go up and down.
    fn gauge<L: EncodeLabelSet, N: EncodeGaugeValue>(
        &mut self,
        name: &str,
        unit: Option<&str>,
        help: &str,
        values: impl Iterator<Item = (L, Option<N>)>,
    ) -> fmt::Result {
        let unit = unit.map(|unit| Unit::Other(unit.into()));
        let mut family = self.encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
        for (labels, value) in values {
            // What is not known is left out: zero would be a figure.
            if let Some(value) = value {
                ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    /// A family of sums; the text calls them `…_total`.
    fn counter<L: EncodeLabelSet, N: EncodeCounterValue>(
        &mut self,
        name: &str,
        unit: Option<&str>,
        help: &str,
        values: impl Iterator<Item = (L, N)>,
    ) -> fmt::Result {
        let unit = unit.map(|unit| Unit::Other(unit.into()));
        let mut family = self.encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Counter)?;
        for (labels, value) in values {
            ConstCounter::new(value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

const BYTES: Option<&str> = Some("bytes");
const RATIO: Option<&str> = Some("ratio");
const SECONDS: Option<&str> = Some("seconds");

fn machine(report: &Report, to: &mut Families<'_, '_>) -> fmt::Result {
    let simulated = if report.driver.simulated { "true" } else { "false" };
    let labels = vec![
        ("version", report.keeper.version.clone()),
        ("driver", report.driver.version.clone()),
        ("simulated", simulated.to_string()),
    ];
    let info = to.encoder.encode_descriptor(
        "partage",
        "What keeps the shares of this machine.",
        None,
        MetricType::Info,
    )?;
    Info::new(labels).encode(info)?;
    let waiting = to.encoder.encode_descriptor(
        "partage_waiting",
        "Commands that wait for a share.",
        None,
        MetricType::Gauge,
    )?;
    ConstGauge::new(count(report.waiting.len())).encode(waiting)
}

fn gpus(report: &Report, to: &mut Families<'_, '_>) -> fmt::Result {
    let each = || report.gpus.iter().map(|gpu| (labels_of_gpu(gpu), gpu));
    macro_rules! gauge {
        ($name:literal, $unit:expr, $help:literal, $value:expr) => {
            to.gauge(
                concat!("partage_gpu_", $name),
                $unit,
                $help,
                each().map(|(labels, gpu)| (labels, $value(gpu))),
            )?
        };
    }
    gauge!("memory", BYTES, "Memory of the GPU.", |gpu: &GpuReport| Some(gpu.memory_bytes.0));
    gauge!("memory_promised", BYTES, "Memory that shares were given.", |gpu: &GpuReport| Some(
        gpu.promised_memory_bytes.0
    ));
    gauge!("memory_used", BYTES, "Memory in use, as the driver says.", |gpu: &GpuReport| gpu
        .used_memory_bytes
        .map(|bytes| bytes.0));
    gauge!("cores_promised", RATIO, "Compute that shares were promised.", |gpu: &GpuReport| Some(ratio(
        gpu.promised_cores.as_millipercent()
    )));
    gauge!(
        "utilisation",
        RATIO,
        "Part of the last moments in which it worked, as the driver says.",
        |gpu: &GpuReport| gpu.utilisation.map(|percent| f64::from(percent) / 100.0)
    );
    gauge!("temperature", Some("celsius"), "Temperature.", |gpu: &GpuReport| gpu.temperature);
    gauge!("power", Some("watts"), "Power it takes.", |gpu: &GpuReport| gpu
        .power_milliwatts
        .map(|milliwatts| f64::from(milliwatts) / 1000.0));
    gauge!("healthy", None, "1 where shares are given of it, 0 where it is not well.", |gpu: &GpuReport| {
        Some(flag(gpu.unhealthy.is_none()))
    });
    gauge!("strangers", None, "Processes on it that belong to no share.", |gpu: &GpuReport| Some(count(
        gpu.strangers.len()
    )));
    Ok(())
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
        .map(|cores| ratio(cores.as_millipercent())));
    family!(gauge, "cores_ceiling", RATIO, "Compute it may reach.", |part: &PartReport| part
        .ceiling
        .or(part.cores)
        .map(|cores| ratio(cores.as_millipercent())));
    family!(counter, "gpu", SECONDS, "Time of the GPU it used.", |part: &PartReport| seconds(
        part.spent_nanos
    ));
    family!(
        counter,
        "throttled",
        SECONDS,
        "Time its processes were kept waiting for their turn.",
        |part: &PartReport| seconds(part.throttled_nanos)
    );
    family!(counter, "refusals", None, "Allocations that its own limit refused.", |part: &PartReport| part
        .refusals);
    Ok(())
}

fn labels_of_gpu(gpu: &GpuReport) -> [(&'static str, String); 3] {
    [("gpu", gpu.index.to_string()), ("uuid", gpu.uuid.to_string()), ("model", gpu.model.clone())]
}

fn labels_of_part(share: &ShareReport, part: &PartReport) -> [(&'static str, String); 3] {
    [("share", share.name.clone()), ("user", share.user.clone()), ("gpu", part.gpu.to_string())]
}

fn ratio(millipercent: u32) -> f64 {
    f64::from(millipercent) / 100_000.0
}

fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

fn flag(is: bool) -> u64 {
    u64::from(is)
}

fn count(of: usize) -> u64 {
    u64::try_from(of).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
