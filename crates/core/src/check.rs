//! What a workload asks and what is wrong with it: in plain words, and as JSON.

use crate::dialect::asks::{self, ContainerReading};
use crate::dialect::{Dialect, Settings};
use crate::manifest::Workload;
use crate::model::{
    Bytes, Constraints, ContainerRole, Cores, CoresAsk, MemoryAsk, PodAsk, ShareAsk, Together, WantedGpus,
};
use crate::pod::Problem;
use crate::quote::{self, short};
use serde::{Serialize, Serializer};
use std::collections::BTreeSet;

/// Everything that was checked.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// One entry per workload, in the order they were read.
    pub workloads: Vec<WorkloadReport>,
}

/// One workload.
#[derive(Clone, Debug, Serialize)]
pub struct WorkloadReport {
    /// Its kind.
    pub kind: String,
    /// Its namespace, where it says one.
    pub namespace: Option<String>,
    /// Its name.
    pub name: Option<String>,
    /// Its containers, init containers first.
    pub containers: Vec<ContainerReport>,
    /// Whether memory beyond the limits is placed on the host; absent in JSON where it is not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub oversubscribe: bool,
    /// What must hold for their GPUs, in plain words.
    #[serde(skip)]
    pub conditions: Vec<String>,
    /// Everything that is wrong with it.
    pub problems: Vec<Problem>,
}

/// One container.
#[derive(Clone, Debug, Serialize)]
pub struct ContainerReport {
    /// Its name.
    pub name: String,
    /// True where it ends before the containers start; a sidecar does not.
    pub init: bool,
    /// The dialect it asks in.
    #[serde(serialize_with = "dialect_name")]
    pub dialect: Option<Dialect>,
    /// What it asks.
    pub ask: Option<AskReport>,
    /// A problem says why there is no ask here.
    #[serde(skip)]
    pub unclear: bool,
    /// The same in plain words, with the container's role and dialect.
    #[serde(skip)]
    pub words: String,
}

/// What a container asks, in numbers; absent = not said, not limited, or all there is.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AskReport {
    /// How many GPUs.
    pub count: u32,
    /// Nobody else on them.
    pub whole: bool,
    /// Memory of each, in bytes.
    pub memory_bytes: Option<Bytes>,
    /// Memory of each, in percent.
    pub memory_percent: Option<u32>,
    /// Compute of each, in percent.
    pub cores: Option<Percent>,
    /// How far that may stretch, in percent.
    pub cores_limit: Option<Percent>,
}

/// Thousandths of a percent, written as a JSON number of percents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Percent(u64);

impl Serialize for Percent {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_multiple_of(1000) {
            serializer.serialize_u64(self.0 / 1000)
        } else {
            // For people and scripts only; nothing is counted with it.
            serializer.serialize_f64(self.0 as f64 / 1000.0)
        }
    }
}

impl Percent {
    /// The amount in thousandths of a percent.
    pub fn as_millipercent(self) -> u64 {
        self.0
    }
}

impl From<Cores> for Percent {
    fn from(cores: Cores) -> Percent {
        Percent(cores.as_millipercent().into())
    }
}

impl Report {
    /// Checks workloads one after the other.
    pub fn of(workloads: &[Workload], settings: &Settings) -> Report {
        Report { workloads: workloads.iter().map(|w| WorkloadReport::of(w, settings)).collect() }
    }

    /// How many problems there are in all.
    pub fn problems(&self) -> usize {
        self.workloads.iter().map(|workload| workload.problems.len()).sum()
    }

    /// One line about everything: `1 workload, 1 container asks for GPUs, no problems`.
    pub fn summary(&self) -> String {
        let containers = || self.workloads.iter().flat_map(|w| &w.containers);
        let asking = containers().filter(|c| c.ask.is_some()).count();
        let unclear = containers().filter(|c| c.ask.is_none() && c.unclear).count();
        let ask = |count: usize| if count == 1 { "asks" } else { "ask" };
        let asks = match (asking, unclear) {
            (_, 0) => format!("{} {} for GPUs", number(asking, "container"), ask(asking)),
            (0, _) => format!("{} {} unclearly", number(unclear, "container"), ask(unclear)),
            _ => format!(
                "{} {} for GPUs, {unclear} {} unclearly",
                number(asking, "container"),
                ask(asking),
                ask(unclear)
            ),
        };
        let workloads = number(self.workloads.len(), "workload");
        format!("{workloads}, {asks}, {}", number(self.problems(), "problem"))
    }
}

impl WorkloadReport {
    /// Checks one workload.
    pub fn of(workload: &Workload, settings: &Settings) -> WorkloadReport {
        WorkloadReport::with_ask(workload, settings).0
    }

    /// Checks one workload, and gives what its pods ask as well.
    pub fn with_ask(workload: &Workload, settings: &Settings) -> (WorkloadReport, PodAsk) {
        let reading = asks::read(&workload.pod, settings);
        let problems: Vec<Problem> = workload.problems.iter().cloned().chain(reading.problems).collect();
        let troubled: BTreeSet<&str> = problems.iter().filter_map(|p| p.container.as_deref()).collect();
        let containers = reading.containers.iter();
        let containers =
            containers.map(|c| ContainerReport::of(c, troubled.contains(c.name.as_str()), settings));
        let containers = containers.collect();
        let report = WorkloadReport {
            kind: workload.kind.clone(),
            namespace: workload.namespace.clone(),
            name: workload.name.clone(),
            containers,
            oversubscribe: reading.ask.oversubscribe,
            conditions: conditions(&reading.ask.constraints),
            problems,
        };
        (report, reading.ask)
    }

    /// What people call it: `Deployment default/web`.
    pub fn title(&self) -> String {
        let namespace = quote::field(self.namespace.as_deref().unwrap_or("default"));
        let name = quote::field(self.name.as_deref().unwrap_or("(no name)"));
        format!("{} {namespace}/{name}", self.kind)
    }
}

impl ContainerReport {
    fn of(reading: &ContainerReading, troubled: bool, settings: &Settings) -> ContainerReport {
        let role = match reading.role {
            ContainerRole::Init => Some("init"),
            ContainerRole::Sidecar => Some("sidecar"),
            ContainerRole::App => None,
        };
        let notes: Vec<&str> = role.into_iter().chain(reading.dialect.map(Dialect::name)).collect();
        let notes = if notes.is_empty() { String::new() } else { format!(" ({})", notes.join(", ")) };
        let what = match reading.want {
            Some(want) => words(&want, settings),
            None if troubled => "not clear, see below".to_string(),
            None => "no GPU".to_string(),
        };
        ContainerReport {
            name: reading.name.to_string(),
            init: reading.role == ContainerRole::Init,
            dialect: reading.dialect,
            ask: reading.want.map(|want| AskReport::of(&want, settings)),
            unclear: reading.want.is_none() && (troubled || reading.dialect.is_some()),
            words: format!("{}{notes}: {what}", short(reading.name.as_str())),
        }
    }
}

impl AskReport {
    /// The numbers of an ask.
    pub fn of(want: &WantedGpus, settings: &Settings) -> AskReport {
        let ShareAsk { memory, cores, whole, ceiling } = want.part;
        AskReport {
            count: gpus(want, settings),
            whole,
            memory_bytes: match memory {
                MemoryAsk::Exactly(bytes) | MemoryAsk::AtMost(bytes) => Some(bytes),
                MemoryAsk::Unlimited | MemoryAsk::All | MemoryAsk::Percent(_) => None,
            },
            memory_percent: match memory {
                MemoryAsk::Percent(percent) => Some(percent),
                _ => None,
            },
            cores: match cores {
                CoresAsk::Uncounted => None,
                CoresAsk::Exactly(cores) => Some(cores.into()),
                CoresAsk::Slots(taken) => Some(slots_percent(taken, settings.aws_slots)),
            },
            cores_limit: ceiling.map(Percent::from),
        }
    }
}

/// What an ask means, in plain words.
pub fn words(want: &WantedGpus, settings: &Settings) -> String {
    let ShareAsk { memory, cores, whole, ceiling } = want.part;
    let count = gpus(want, settings);
    let head = number(count as usize, if whole { "whole GPU" } else { "GPU" });
    let each = count > 1;
    let all_cores = cores == CoresAsk::Exactly(Cores::WHOLE);
    match memory {
        MemoryAsk::All if whole && all_cores => return head,
        MemoryAsk::AtMost(bytes) if whole && all_cores => {
            return format!("{head}{} held to {}", if each { ", each" } else { "" }, exact(bytes));
        }
        _ => {}
    }
    let memory = match memory {
        MemoryAsk::Unlimited => "no memory limit".to_string(),
        MemoryAsk::All => "all of its memory".to_string(),
        MemoryAsk::Exactly(bytes) => format!("{} of memory", exact(bytes)),
        MemoryAsk::Percent(percent) => format!("{percent} % of its memory"),
        MemoryAsk::AtMost(bytes) => format!("at most {} of memory", exact(bytes)),
    };
    let stretch = match (ceiling, cores) {
        (None, _) => String::new(),
        (Some(limit), CoresAsk::Exactly(cores)) if limit == cores => ", never more".to_string(),
        (Some(limit), _) => format!(", up to {limit} while nobody else wants them"),
    };
    let cores = match cores {
        CoresAsk::Uncounted => ", no core limit".to_string(),
        CoresAsk::Exactly(cores) => format!(" and {cores} of the cores"),
        CoresAsk::Slots(taken) => {
            let slots = slots_words(taken, count, settings.aws_slots);
            let limited = want.part.memory != MemoryAsk::Unlimited;
            let alone = if whole { ", nobody else there" } else { "" };
            return format!(
                "{slots}, {memory}{}{stretch}{alone}",
                if each && limited { " on each" } else { "" }
            );
        }
    };
    format!("{head}{} {memory}{cores}{stretch}", if each { ", each" } else { ":" })
}

/// Slots are counted in all, and the node says how many a GPU has.
fn slots_words(taken: u32, gpus: u32, slots: u32) -> String {
    let head = number(taken as usize, "slot");
    if gpus > 1 {
        return format!("{head} ({slots} per GPU): at least {gpus} GPUs");
    }
    format!("{head} of a GPU split in {slots} ({} of its cores)", Cores::of_slots(taken, slots))
}

/// What must hold for the GPUs of a pod, in plain words.
fn conditions(constraints: &Constraints) -> Vec<String> {
    let Constraints { models, uuids, together, policy } = constraints;
    let listed = |words: &[String], text: &str| {
        (!words.is_empty()).then(|| quote::message(&format!("{text} {}", words.join(" or "))))
    };
    let together = match together {
        Together::Required => Some("all containers on one GPU".to_string()),
        Together::Preferred | Together::Anywhere => None,
    };
    [
        listed(&models.only, "only models with"),
        listed(&models.never, "no models with"),
        listed(&uuids.only, "only GPU"),
        listed(&uuids.never, "never GPU"),
        together,
        policy.map(|policy| format!("placed by {policy}")),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Memory in the largest unit that shows all of it: `7.5 GiB`, but `3000 MiB`, as it was asked.
fn exact(bytes: Bytes) -> String {
    const UNITS: [(&str, u32); 3] = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    // In quarters, which take at most two decimals.
    let fits = |&(_, shift): &(&str, u32)| bytes.0 >> shift > 0 && bytes.0.trailing_zeros() >= shift - 2;
    match UNITS.iter().find(|unit| fits(unit)) {
        Some(&(unit, shift)) => {
            let quarters = ["", ".25", ".5", ".75"][(bytes.0 >> (shift - 2) & 3) as usize];
            with_short_form(bytes, format!("{}{quarters} {unit}", bytes.0 >> shift))
        }
        None => with_short_form(bytes, format!("{} bytes", bytes.0)),
    }
}

/// Nobody reads seven digits: such an amount is rounded beside it.
fn with_short_form(bytes: Bytes, exactly: String) -> String {
    let digits = exactly.bytes().take_while(u8::is_ascii_digit).count();
    if digits > 6 { format!("{exactly} (about {bytes})") } else { exactly }
}

/// How many GPUs an ask takes at the least: more slots than one GPU has come from several.
fn gpus(want: &WantedGpus, settings: &Settings) -> u32 {
    match want.part.cores {
        CoresAsk::Slots(taken) => want.count.max(taken.div_ceil(settings.aws_slots.max(1))),
        _ => want.count,
    }
}

fn slots_percent(taken: u32, slots: u32) -> Percent {
    // More slots than a GPU has are so many whole GPUs and the rest.
    let slots = slots.max(1);
    let whole = u64::from(taken / slots) * u64::from(Cores::WHOLE.as_millipercent());
    Percent(whole + u64::from(Cores::of_slots(taken % slots, slots).as_millipercent()))
}

fn number(count: usize, noun: &str) -> String {
    match count {
        0 => format!("no {noun}s"),
        1 => format!("1 {noun}"),
        _ => format!("{count} {noun}s"),
    }
}

// The signature is serde's.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn dialect_name<S: Serializer>(dialect: &Option<Dialect>, serializer: S) -> Result<S::Ok, S::Error> {
    dialect.map(Dialect::name).serialize(serializer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::asks::whole_gpu;
    use crate::manifest;
    use serde_json::{Value, json};

    fn said(count: u32, memory: MemoryAsk, cores: CoresAsk) -> String {
        words(
            &WantedGpus { count, part: ShareAsk { memory, cores, whole: false, ceiling: None } },
            &Settings::default(),
        )
    }

    #[test]
    fn says_asks_in_plain_words() {
        let half = CoresAsk::Exactly(Cores::percent(50).unwrap());
        assert_eq!(
            said(2, MemoryAsk::Exactly(Bytes::mib(3000).unwrap()), half),
            "2 GPUs, each 3000 MiB of memory and 50 % of the cores"
        );
        assert_eq!(said(1, MemoryAsk::All, CoresAsk::Uncounted), "1 GPU: all of its memory, no core limit");
        assert_eq!(
            said(1, MemoryAsk::Unlimited, CoresAsk::Slots(1)),
            "1 slot of a GPU split in 10 (10 % of its cores), no memory limit"
        );
        assert_eq!(
            said(1, MemoryAsk::Percent(30), CoresAsk::Slots(11)),
            "11 slots (10 per GPU): at least 2 GPUs, 30 % of its memory on each"
        );
        assert_eq!(
            said(1, MemoryAsk::Unlimited, CoresAsk::Slots(15)),
            "15 slots (10 per GPU): at least 2 GPUs, no memory limit"
        );
        let mut want = WantedGpus { count: 2, part: whole_gpu(MemoryAsk::AtMost(Bytes::gib(15).unwrap())) };
        assert_eq!(words(&want, &Settings::default()), "2 whole GPUs, each held to 15 GiB");
        want.count = 1;
        assert_eq!(words(&want, &Settings::default()), "1 whole GPU held to 15 GiB");
        want.part.memory = MemoryAsk::All;
        assert_eq!(words(&want, &Settings::default()), "1 whole GPU");
    }

    #[test]
    fn json_has_the_documented_shape() {
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "p"},
            "spec": {
                "initContainers": [{"name": "fetch"}],
                "containers": [{"name": "main", "resources": {"limits": {"k8s.amazonaws.com/vgpu": 1}}}],
            },
        });
        let settings = Settings { aws_slots: 48, ..Settings::default() };
        let report = Report::of(&manifest::read(&[pod]).workloads, &settings);
        let ask = json!({"count": 1, "whole": false, "memoryBytes": null, "memoryPercent": null, "cores": 2.083, "coresLimit": null});
        assert_eq!(
            serde_json::to_value(&report).unwrap(),
            json!({"workloads": [{
                "kind": "Pod", "namespace": null, "name": "p",
                "containers": [
                    {"name": "fetch", "init": true, "dialect": null, "ask": null},
                    {"name": "main", "init": false, "dialect": "aws", "ask": ask},
                ],
                "problems": [],
            }]})
        );
        assert_eq!(report.summary(), "1 workload, 1 container asks for GPUs, no problems");
    }

    #[test]
    fn unclear_asks_are_not_counted_as_none() {
        let pod = |limits: &[Value]| {
            let containers = limits.iter().enumerate();
            let containers: Vec<Value> = containers
                .map(|(n, limits)| json!({"name": format!("c{n}"), "resources": {"limits": limits}}))
                .collect();
            json!({"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": containers}})
        };
        let (clear, unclear) = (json!({"partage.dev/gpu": 1}), json!({"partage.dev/gpu": "x"}));
        for (limits, said) in [
            (vec![unclear.clone()], "1 workload, 1 container asks unclearly, 1 problem"),
            (vec![unclear.clone(); 2], "1 workload, 2 containers ask unclearly, 2 problems"),
            (vec![clear, unclear], "1 workload, 1 container asks for GPUs, 1 asks unclearly, 1 problem"),
        ] {
            let report = Report::of(&manifest::read(&[pod(&limits)]).workloads, &Settings::default());
            assert_eq!(report.summary(), said);
        }
    }

    #[test]
    fn memory_is_shown_exactly() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (8 << 30, "8 GiB"),
            (15 << 29, "7.5 GiB"),
            (3000 << 20, "3000 MiB"),
            (5 << 28, "1.25 GiB"),
            (1 << 40, "1024 GiB"),
            (8_000_000_000, "7812500 KiB (about 7.45 GiB)"),
            ((1 << 20) + 1, "1048577 bytes (about 1 MiB)"),
        ] {
            assert_eq!(exact(Bytes(bytes)), text);
        }
    }

    #[test]
    fn slots_beyond_one_gpu_add_up() {
        assert_eq!(slots_percent(15, 10), Percent(150_000));
        assert_eq!(slots_percent(10, 10), Percent(100_000));
        assert_eq!(slots_percent(3, 10), Percent(30_000));
        let part = ShareAsk {
            memory: MemoryAsk::Unlimited,
            cores: CoresAsk::Slots(15),
            whole: false,
            ceiling: None,
        };
        let ask = AskReport::of(&WantedGpus { count: 1, part }, &Settings::default());
        assert_eq!((ask.count, ask.cores), (2, Some(Percent(150_000))));
    }
}
