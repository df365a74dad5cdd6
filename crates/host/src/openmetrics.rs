//! Figures as OpenMetrics text: how families of them are written, and those of a GPU, which everybody here tells alike.

use partage_core::model::{Bytes, Cores, GpuUuid};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeLabelSet, EncodeMetric, NoLabelSet, text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use std::collections::HashMap;
use std::fmt;

/// Units of figures.
pub const BYTES: Option<&str> = Some("bytes");
/// A part of one.
pub const RATIO: Option<&str> = Some("ratio");
/// Time.
pub const SECONDS: Option<&str> = Some("seconds");

/// Names with values.
pub type Labels = Vec<(&'static str, String)>;

/// What is told, as `application/openmetrics-text; version=1.0.0; charset=utf-8`.
pub fn text(tell: impl Fn(&mut Families<'_, '_>) -> fmt::Result + Send + Sync + 'static) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Told(tell)));
    let mut text = String::new();
    // A String takes everything, and every figure has a spelling.
    let _ = text::encode(&mut text, &registry);
    text
}

struct Told<F>(F);

impl<F> fmt::Debug for Told<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Told")
    }
}

impl<F> Collector for Told<F>
where
    F: Fn(&mut Families<'_, '_>) -> fmt::Result + Send + Sync + 'static,
{
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.0(&mut Families { encoder: &mut encoder })
    }
}

/// Where figures are told, family by family.
#[derive(Debug)]
pub struct Families<'a, 'b> {
    encoder: &'a mut DescriptorEncoder<'b>,
}

impl Families<'_, '_> {
    /// A figure of its own.
    pub fn single(&mut self, name: &str, help: &str, metric: &impl EncodeMetric) -> fmt::Result {
        metric.encode(self.encoder.encode_descriptor(name, help, None, metric.metric_type())?)
    }

    /// A family of figures that go up and down. What is not known is left out: zero would be a figure.
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

    /// A family of sums; the text calls them `…_total`.
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

    /// How long something took: upper bounds in seconds with how often it took at most that and more than the one before, and all
    /// times together.
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

/// How a GPU is, and what was given of it.
#[derive(Clone, Copy, Debug)]
pub struct GpuFigures<'a> {
    /// Its number in the driver's order.
    pub index: usize,
    /// Its UUID.
    pub uuid: &'a GpuUuid,
    /// Its model.
    pub model: &'a str,
    /// Its memory.
    pub memory: Bytes,
    /// Memory that shares were given.
    pub memory_promised: Bytes,
    /// Memory in use, as the driver says.
    pub memory_used: Option<Bytes>,
    /// Compute that shares were promised, in thousandths of a percent; more than all is possible.
    pub cores_promised: u32,
    /// Percent of the last moments in which it worked, as the driver says.
    pub utilisation: Option<u32>,
    /// Degrees Celsius.
    pub temperature: Option<u32>,
    /// Thousandths of a watt.
    pub power_milliwatts: Option<u32>,
    /// Whether shares are given of it.
    pub healthy: bool,
    /// Processes on it that belong to no share.
    pub strangers: usize,
    /// Shares that were given of it.
    pub shares: usize,
}

/// Tells of GPUs.
pub fn gpus<'a, I>(to: &mut Families<'_, '_>, gpus: impl Fn() -> I) -> fmt::Result
where
    I: Iterator<Item = GpuFigures<'a>>,
{
    let mut gauge = |name: &str, unit, help: &str, value: &dyn Fn(GpuFigures<'_>) -> Option<f64>| {
        let labels = |of: GpuFigures<'_>| -> Labels {
            vec![
                ("gpu", of.index.to_string()),
                ("uuid", of.uuid.to_string()),
                ("model", of.model.to_string()),
            ]
        };
        to.gauge(&format!("partage_gpu_{name}"), unit, help, gpus().map(|of| (labels(of), value(of))))
    };
    let bytes = |bytes: Bytes| bytes.0 as f64;
    gauge("memory", BYTES, "Memory of the GPU.", &|of| Some(bytes(of.memory)))?;
    gauge("memory_promised", BYTES, "Memory that shares were given.", &|of| Some(bytes(of.memory_promised)))?;
    gauge("memory_used", BYTES, "Memory in use, as the driver says.", &|of| of.memory_used.map(bytes))?;
    gauge("cores_promised", RATIO, "Compute that shares were promised.", &|of| {
        Some(f64::from(of.cores_promised) / 1e5)
    })?;
    gauge("utilisation", RATIO, "Part of the last moments in which it worked, as the driver says.", &|of| {
        of.utilisation.map(|percent| f64::from(percent) / 100.0)
    })?;
    gauge("temperature", Some("celsius"), "Temperature.", &|of| of.temperature.map(f64::from))?;
    gauge("power", Some("watts"), "Power it takes.", &|of| {
        of.power_milliwatts.map(|milliwatts| f64::from(milliwatts) / 1e3)
    })?;
    gauge("healthy", None, "1 where shares are given of it, 0 where it is withheld or not well.", &|of| {
        Some(f64::from(u8::from(of.healthy)))
    })?;
    gauge("strangers", None, "Processes on it that belong to no share.", &|of| Some(of.strangers as f64))?;
    gauge("shares", None, "Shares that were given of it.", &|of| Some(of.shares as f64))
}

/// Compute as a part of a whole GPU.
pub fn ratio(cores: Cores) -> f64 {
    f64::from(cores.as_millipercent()) / 1e5
}

/// Nanoseconds in seconds.
pub fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}
