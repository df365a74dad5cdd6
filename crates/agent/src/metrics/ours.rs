//! The names that are ours.

use crate::report::{ContainerReport, GpuReport, Report, Times};
use partage_core::dialect::Dialect;
use partage_core::model::{Bytes, Share};
use partage_host::openmetrics::{self, BYTES, Families, GpuFigures, Labels, RATIO, SECONDS, ratio, seconds};
use partage_region::GpuUsage;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use std::fmt;

pub(super) fn tell(report: &Report, to: &mut Families<'_, '_>) -> fmt::Result {
    agent(report, to)?;
    gpus(report, to)?;
    containers(report, to)?;
    shares(report, to)
}

fn agent(report: &Report, to: &mut Families<'_, '_>) -> fmt::Result {
    let labels = vec![
        ("version", env!("CARGO_PKG_VERSION").to_string()),
        ("driver", report.driver.clone()),
        ("simulated", report.simulated.to_string()),
    ];
    to.single("partage", "What shares the GPUs of this node.", &Info::new(labels))?;
    let counts = &report.counts;
    times("partage_allocate", "Time to answer kubelet which device a container gets.", &counts.answers, to)?;
    let help = "Time to make a container ready: its grant, its region, its devices.";
    times("partage_start", help, &counts.starts, to)?;
    for (name, help, count) in [
        (
            "partage_refused",
            "Starts of containers that were refused; kubelet tries again, and each time counts.",
            counts.refused,
        ),
        ("partage_bypass", "Ways around limits that were suspected.", counts.bypasses),
        ("partage_quarantined", "Records that could not be read and were put aside.", counts.quarantined),
    ] {
        to.single(name, help, &ConstCounter::new(count))?;
    }
    let help = "What the ledger, kubelet and the regions do not agree on now.";
    to.single("partage_ledger_mismatch", help, &ConstGauge::new(counts.mismatches))?;
    let of = |dialect: Dialect| report.containers.iter().filter(|one| one.dialect == dialect).count();
    to.gauge(
        "partage_containers",
        None,
        "Containers that hold shares, by how they asked.",
        Dialect::ALL.iter().map(|dialect| (vec![("dialect", dialect.to_string())], Some(of(*dialect)))),
    )
}

fn times(name: &str, help: &str, times: &Times, to: &mut Families<'_, '_>) -> fmt::Result {
    let bounds = Times::BOUNDS.iter().map(|milliseconds| *milliseconds as f64 / 1e3);
    let buckets: Vec<(f64, u64)> =
        bounds.chain(std::iter::once(f64::INFINITY)).zip(times.counts.iter().copied()).collect();
    to.histogram(name, help, &buckets, seconds(times.nanos))
}

fn gpus(report: &Report, to: &mut Families<'_, '_>) -> fmt::Result {
    openmetrics::gpus(to, || report.gpus.iter().enumerate().map(|(index, of)| figures(index, of)))
}

fn figures(index: usize, of: &GpuReport) -> GpuFigures<'_> {
    let look = of.look.as_ref();
    GpuFigures {
        index,
        uuid: &of.gpu.uuid,
        model: &of.gpu.model,
        memory: of.gpu.memory_bytes,
        memory_promised: Bytes(of.promised_memory),
        memory_used: look.and_then(|look| look.memory_used),
        cores_promised: of.promised_cores,
        utilisation: look.and_then(|look| look.utilisation),
        temperature: look.and_then(|look| look.temperature),
        power_milliwatts: look.and_then(|look| look.power_milliwatts),
        healthy: of.gpu.withheld.is_none() && look.is_none_or(|look| look.health.is_none()),
        strangers: of.strangers,
        shares: of.shares as usize,
    }
}

fn containers(report: &Report, to: &mut Families<'_, '_>) -> fmt::Result {
    let suspected = |of: &ContainerReport| Some(u32::from(of.bypass_suspected));
    to.gauge(
        "partage_container_bypass_suspected",
        None,
        "1 if a bypass of its limits was found within the last five minutes, else 0.",
        report.containers.iter().map(|of| (labels(of), suspected(of))),
    )
}

fn shares(report: &Report, to: &mut Families<'_, '_>) -> fmt::Result {
    let each = || {
        report.containers.iter().flat_map(|of| {
            of.shares.iter().enumerate().map(move |(at, (share, usage))| {
                let mut labels = labels(of);
                labels.push(("share", at.to_string()));
                labels.push(("gpu", report.index(&share.gpu).map_or_else(String::new, |at| at.to_string())));
                labels.push(("uuid", share.gpu.to_string()));
                (labels, of.seen_at(at), share, usage.as_ref())
            })
        })
    };
    let mut gauge = |name: &str, unit, help: &str, value: &dyn Fn(&Share) -> Option<f64>| {
        let name = format!("partage_container_{name}");
        to.gauge(&name, unit, help, each().map(|(labels, _, share, _)| (labels, value(share))))
    };
    gauge("memory_limit", BYTES, "Memory it may use.", &|share| Some(share.memory_bytes?.0 as f64))?;
    gauge("cores_promised", RATIO, "Compute it was promised.", &|share| share.cores.map(ratio))?;
    gauge("cores_ceiling", RATIO, "Compute it may reach.", &|share| {
        share.ceiling.or(share.cores).map(ratio)
    })?;
    for (name, help, value) in [
        ("memory_used", "Memory it uses, as its limit counts it.", (|of| of.used) as fn(&GpuUsage) -> u64),
        ("memory_peak", "The most memory it ever used.", |of| of.peak),
    ] {
        let name = format!("partage_container_{name}");
        let bounded = |share, usage: Option<&GpuUsage>| Some(report.bounded(share, value(usage?)));
        to.gauge(
            &name,
            BYTES,
            help,
            each().map(|(labels, _, share, usage)| (labels, bounded(share, usage))),
        )?;
    }
    let seen = || each().map(|(labels, seen, ..)| (labels, seen));
    to.gauge(
        "partage_container_memory_seen",
        BYTES,
        "Memory its processes hold, as the driver says.",
        seen().map(|(labels, seen)| (labels, seen.map(|seen| seen.memory.0))),
    )?;
    to.gauge(
        "partage_container_utilisation",
        RATIO,
        "Part of the last moments in which it worked, as the driver says.",
        seen().map(|(labels, seen)| (labels, seen.map(|seen| f64::from(seen.busy) / 100.0))),
    )?;
    let mut counter = |name: &str, unit, help: &str, value: fn(&GpuUsage) -> f64| {
        let name = format!("partage_container_{name}");
        to.counter(&name, unit, help, each().map(|(labels, .., usage)| (labels, usage.map(value))))
    };
    counter("gpu", SECONDS, "Time of the GPU it used.", |of| seconds(of.spent))?;
    counter("throttled", SECONDS, "Time its threads were kept waiting for their turn.", |of| {
        seconds(of.throttled)
    })?;
    counter("refusals", None, "Allocations that its own limit refused.", |of| of.refusals as f64)
}

/// Two pods of one name may be there for a while, the old one and the new one: their UIDs tell them apart.
fn labels(of: &ContainerReport) -> Labels {
    vec![
        ("namespace", of.pod.namespace.to_string()),
        ("pod", of.pod.name.to_string()),
        ("pod_uid", of.pod.uid.to_string()),
        ("container", of.container.to_string()),
    ]
}
