//! The report of `partage check`: the GPU requests and problems of workloads, as text and as JSON.

use crate::dialect::asks::{self, ContainerReading};
use crate::dialect::{Dialect, DialectSettings};
use crate::manifest::WorkloadManifest;
use crate::model::{
    Bytes, Colocation, Constraints, ContainerRole, Cores, CoresAsk, MemoryAsk, PodAsk, ShareAsk,
    TurnPreferences, WantedGpus,
};
use crate::pod::Problem;
use crate::truncate::{self, shorten};
use serde::{Serialize, Serializer};
use std::collections::BTreeSet;

/// The report on all checked workloads.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CheckReport {
    /// One entry per workload, in the order of the input.
    pub workloads: Vec<WorkloadReport>,
}

/// The report on one workload.
#[derive(Clone, Debug, Serialize)]
pub struct WorkloadReport {
    /// Kind of the object.
    pub kind: String,
    /// Namespace, if the manifest names one.
    pub namespace: Option<String>,
    /// Name, if the manifest has one.
    pub name: Option<String>,
    /// Containers of the pod, init containers first.
    pub containers: Vec<ContainerReport>,
    /// Whether allocations above the memory limits are placed in host memory; absent in JSON if false.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub oversubscribe: bool,
    /// How the pod takes turns on shared GPUs; absent in JSON without preferences.
    #[serde(skip_serializing_if = "TurnPreferences::is_default")]
    pub turns: TurnPreferences,
    /// Constraints on the GPUs, as text.
    #[serde(skip)]
    pub conditions: Vec<String>,
    /// Problems of the workload.
    pub problems: Vec<Problem>,
}

/// The report on one container.
#[derive(Clone, Debug, Serialize)]
pub struct ContainerReport {
    /// Name of the container.
    pub name: String,
    /// Whether it is an init container that ends before the app containers start, which a sidecar does not.
    pub init: bool,
    /// Dialect of its resources.
    #[serde(serialize_with = "dialect_name")]
    pub dialect: Option<Dialect>,
    /// Requested GPUs; `None` if none are requested or the request is unclear.
    pub ask: Option<AskReport>,
    /// Whether the request is unclear, so that there is no ask. A problem gives the reason.
    #[serde(skip)]
    pub unclear: bool,
    /// The request as text, with the container's role and dialect.
    #[serde(skip)]
    pub text: String,
}

/// The GPUs that a container requests, in numbers. Absent numbers mean unspecified, unlimited or everything.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AskReport {
    /// Number of requested GPUs.
    pub count: u32,
    /// Whether the GPUs are exclusive.
    pub whole: bool,
    /// Memory of each GPU in bytes.
    pub memory_bytes: Option<Bytes>,
    /// Memory of each GPU in percent.
    pub memory_percent: Option<u32>,
    /// Compute of each GPU in percent.
    pub cores: Option<Percent>,
    /// Upper limit of compute while a GPU is otherwise idle, in percent.
    pub cores_limit: Option<Percent>,
}

/// A percentage in thousandths, serialized as a JSON number in percent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Percent(u64);

impl Serialize for Percent {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_multiple_of(1000) {
            serializer.serialize_u64(self.0 / 1000)
        } else {
            // The fraction is for display only.
            serializer.serialize_f64(self.0 as f64 / 1000.0)
        }
    }
}

impl Percent {
    /// Returns the percentage in thousandths.
    pub fn as_millipercent(self) -> u64 {
        self.0
    }
}

impl From<Cores> for Percent {
    fn from(cores: Cores) -> Percent {
        Percent(cores.as_millipercent().into())
    }
}

impl CheckReport {
    /// Checks all of these workloads.
    pub fn of(workloads: &[WorkloadManifest], settings: &DialectSettings) -> CheckReport {
        CheckReport { workloads: workloads.iter().map(|w| WorkloadReport::of(w, settings)).collect() }
    }

    /// Returns the total number of problems.
    pub fn problems(&self) -> usize {
        self.workloads.iter().map(|workload| workload.problems.len()).sum()
    }

    /// Returns a summary in one line: `1 workload, 1 container requests GPUs, no problems`.
    pub fn summary(&self) -> String {
        let containers = || self.workloads.iter().flat_map(|w| &w.containers);
        let asking = containers().filter(|c| c.ask.is_some()).count();
        let unclear = containers().filter(|c| c.ask.is_none() && c.unclear).count();
        let verb = |count: usize| if count == 1 { "requests" } else { "request" };
        let asks = match (asking, unclear) {
            (_, 0) => format!("{} {} GPUs", number(asking, "container"), verb(asking)),
            (0, _) => format!("unclear GPU requests of {}", number(unclear, "container")),
            _ => format!(
                "{} {} GPUs, unclear GPU requests of {}",
                number(asking, "container"),
                verb(asking),
                number(unclear, "more container")
            ),
        };
        let workloads = number(self.workloads.len(), "workload");
        format!("{workloads}, {asks}, {}", number(self.problems(), "problem"))
    }
}

impl WorkloadReport {
    /// Checks one workload and returns its report.
    pub fn of(workload: &WorkloadManifest, settings: &DialectSettings) -> WorkloadReport {
        WorkloadReport::with_ask(workload, settings).0
    }

    /// Checks one workload, and returns the ask of its pods as well.
    pub fn with_ask(workload: &WorkloadManifest, settings: &DialectSettings) -> (WorkloadReport, PodAsk) {
        let reading = asks::read(&workload.pod, settings);
        let problems: Vec<Problem> = workload.problems.iter().cloned().chain(reading.problems).collect();
        let with_problems: BTreeSet<&str> = problems.iter().filter_map(|p| p.container.as_deref()).collect();
        let containers = reading.containers.iter();
        let containers =
            containers.map(|c| ContainerReport::of(c, with_problems.contains(c.name.as_str()), settings));
        let containers = containers.collect();
        let report = WorkloadReport {
            kind: workload.kind.clone(),
            namespace: workload.namespace.clone(),
            name: workload.name.clone(),
            containers,
            oversubscribe: reading.ask.oversubscribe,
            turns: reading.ask.turns,
            conditions: conditions(&reading.ask.constraints),
            problems,
        };
        (report, reading.ask)
    }

    /// Returns the title: `Deployment default/web`.
    pub fn title(&self) -> String {
        let namespace = truncate::shorten_field(self.namespace.as_deref().unwrap_or("default"));
        let name = truncate::shorten_field(self.name.as_deref().unwrap_or("(no name)"));
        format!("{} {namespace}/{name}", self.kind)
    }
}

impl ContainerReport {
    fn of(reading: &ContainerReading, has_problems: bool, settings: &DialectSettings) -> ContainerReport {
        let role = match reading.role {
            ContainerRole::Init => Some("init"),
            ContainerRole::Sidecar => Some("sidecar"),
            ContainerRole::App => None,
        };
        let notes: Vec<&str> = role.into_iter().chain(reading.dialect.map(Dialect::name)).collect();
        let notes = if notes.is_empty() { String::new() } else { format!(" ({})", notes.join(", ")) };
        let what = match reading.want {
            Some(want) => describe(&want, settings),
            None if has_problems => "unclear, see below".to_string(),
            None => "no GPU".to_string(),
        };
        ContainerReport {
            name: reading.name.to_string(),
            init: reading.role == ContainerRole::Init,
            dialect: reading.dialect,
            ask: reading.want.map(|want| AskReport::of(&want, settings)),
            unclear: reading.want.is_none() && (has_problems || reading.dialect.is_some()),
            text: format!("{}{notes}: {what}", shorten(reading.name.as_str())),
        }
    }
}

impl AskReport {
    /// Converts a request into numbers.
    pub fn of(want: &WantedGpus, settings: &DialectSettings) -> AskReport {
        let ShareAsk { memory, cores, whole, ceiling } = want.share;
        AskReport {
            count: min_gpus(want, settings),
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

/// Describes a request as text.
pub fn describe(want: &WantedGpus, settings: &DialectSettings) -> String {
    let ShareAsk { memory, cores, whole, ceiling } = want.share;
    let count = min_gpus(want, settings);
    let head = number(count as usize, if whole { "whole GPU" } else { "GPU" });
    let each = count > 1;
    let all_cores = cores == CoresAsk::Exactly(Cores::WHOLE);
    match memory {
        MemoryAsk::All if whole && all_cores => return head,
        MemoryAsk::AtMost(bytes) if whole && all_cores => {
            return format!("{head}{} limited to {}", if each { ", each" } else { "" }, exact(bytes));
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
    let ceiling = match (ceiling, cores) {
        (None, _) => String::new(),
        (Some(limit), CoresAsk::Exactly(cores)) if limit == cores => ", never more".to_string(),
        (Some(limit), _) => format!(", up to {limit} while the GPU is otherwise idle"),
    };
    let cores = match cores {
        CoresAsk::Uncounted => ", no core limit".to_string(),
        CoresAsk::Exactly(cores) => format!(" and {cores} of the cores"),
        CoresAsk::Slots(taken) => {
            let slots = describe_slots(taken, count, settings.aws_slots);
            let limited = want.share.memory != MemoryAsk::Unlimited;
            let exclusive = if whole { ", exclusive" } else { "" };
            return format!(
                "{slots}, {memory}{}{ceiling}{exclusive}",
                if each && limited { " on each" } else { "" }
            );
        }
    };
    format!("{head}{} {memory}{cores}{ceiling}", if each { ", each" } else { ":" })
}

/// Describes slots. The number of slots per GPU depends on the node.
fn describe_slots(taken: u32, gpus: u32, slots: u32) -> String {
    let head = number(taken as usize, "slot");
    if gpus > 1 {
        return format!("{head} ({slots} per GPU): at least {gpus} GPUs");
    }
    format!("{head} of a GPU split in {slots} ({} of its cores)", Cores::of_slots(taken, slots))
}

/// Describes the constraints on the GPUs of a pod.
fn conditions(constraints: &Constraints) -> Vec<String> {
    let Constraints { models, uuids, colocation, policy } = constraints;
    let listed = |words: &[String], text: &str| {
        (!words.is_empty()).then(|| truncate::shorten_message(&format!("{text} {}", words.join(" or "))))
    };
    let colocation = match colocation {
        Colocation::Required => Some("all containers on one GPU".to_string()),
        Colocation::Preferred | Colocation::Anywhere => None,
    };
    [
        listed(&models.only, "only models with"),
        listed(&models.never, "no models with"),
        listed(&uuids.only, "only GPU"),
        listed(&uuids.never, "never GPU"),
        colocation,
        policy.map(|policy| format!("placement policy {policy}")),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Formats memory exactly, with the largest suitable unit: `7.5 GiB`, but `3000 MiB`, as requested.
fn exact(bytes: Bytes) -> String {
    const UNITS: [(&str, u32); 3] = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    // Quarters of a unit need at most two decimals.
    let fits = |&(_, shift): &(&str, u32)| bytes.0 >> shift > 0 && bytes.0.trailing_zeros() >= shift - 2;
    match UNITS.iter().find(|unit| fits(unit)) {
        Some(&(unit, shift)) => {
            let quarters = ["", ".25", ".5", ".75"][(bytes.0 >> (shift - 2) & 3) as usize];
            with_short_form(bytes, format!("{}{quarters} {unit}", bytes.0 >> shift))
        }
        None => with_short_form(bytes, format!("{} bytes", bytes.0)),
    }
}

/// Appends a rounded amount if the exact one has more than six digits.
fn with_short_form(bytes: Bytes, exactly: String) -> String {
    let digits = exactly.bytes().take_while(u8::is_ascii_digit).count();
    if digits > 6 { format!("{exactly} (about {bytes})") } else { exactly }
}

/// Returns the minimum number of GPUs of a request: more slots than one GPU has come from several GPUs.
fn min_gpus(want: &WantedGpus, settings: &DialectSettings) -> u32 {
    match want.share.cores {
        CoresAsk::Slots(taken) => want.count.max(taken.div_ceil(settings.aws_slots.max(1))),
        _ => want.count,
    }
}

fn slots_percent(taken: u32, slots: u32) -> Percent {
    // Divide the slots into whole GPUs and the rest.
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

// serde requires this signature.
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

    fn description(count: u32, memory: MemoryAsk, cores: CoresAsk) -> String {
        describe(
            &WantedGpus { count, share: ShareAsk { memory, cores, whole: false, ceiling: None } },
            &DialectSettings::default(),
        )
    }

    #[test]
    fn requests_are_described_as_text() {
        let half = CoresAsk::Exactly(Cores::percent(50).unwrap());
        assert_eq!(
            description(2, MemoryAsk::Exactly(Bytes::mib(3000).unwrap()), half),
            "2 GPUs, each 3000 MiB of memory and 50 % of the cores"
        );
        assert_eq!(
            description(1, MemoryAsk::All, CoresAsk::Uncounted),
            "1 GPU: all of its memory, no core limit"
        );
        assert_eq!(
            description(1, MemoryAsk::Unlimited, CoresAsk::Slots(1)),
            "1 slot of a GPU split in 10 (10 % of its cores), no memory limit"
        );
        assert_eq!(
            description(1, MemoryAsk::Percent(30), CoresAsk::Slots(11)),
            "11 slots (10 per GPU): at least 2 GPUs, 30 % of its memory on each"
        );
        assert_eq!(
            description(1, MemoryAsk::Unlimited, CoresAsk::Slots(15)),
            "15 slots (10 per GPU): at least 2 GPUs, no memory limit"
        );
        let mut want = WantedGpus { count: 2, share: whole_gpu(MemoryAsk::AtMost(Bytes::gib(15).unwrap())) };
        assert_eq!(describe(&want, &DialectSettings::default()), "2 whole GPUs, each limited to 15 GiB");
        want.count = 1;
        assert_eq!(describe(&want, &DialectSettings::default()), "1 whole GPU limited to 15 GiB");
        want.share.memory = MemoryAsk::All;
        assert_eq!(describe(&want, &DialectSettings::default()), "1 whole GPU");
    }

    #[test]
    fn json_has_the_documented_fields() {
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "p"},
            "spec": {
                "initContainers": [{"name": "fetch"}],
                "containers": [{"name": "main", "resources": {"limits": {"k8s.amazonaws.com/vgpu": 1}}}],
            },
        });
        let settings = DialectSettings { aws_slots: 48, ..DialectSettings::default() };
        let report = CheckReport::of(&manifest::read(&[pod]).workloads, &settings);
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
        assert_eq!(report.summary(), "1 workload, 1 container requests GPUs, no problems");
    }

    #[test]
    fn unclear_requests_are_counted_separately() {
        let pod = |limits: &[Value]| {
            let containers = limits.iter().enumerate();
            let containers: Vec<Value> = containers
                .map(|(n, limits)| json!({"name": format!("c{n}"), "resources": {"limits": limits}}))
                .collect();
            json!({"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": containers}})
        };
        let (clear, unclear) = (json!({"partage.dev/gpu": 1}), json!({"partage.dev/gpu": "x"}));
        for (limits, summary) in [
            (vec![unclear.clone()], "1 workload, unclear GPU requests of 1 container, 1 problem"),
            (vec![unclear.clone(); 2], "1 workload, unclear GPU requests of 2 containers, 2 problems"),
            (
                vec![clear, unclear],
                "1 workload, 1 container requests GPUs, unclear GPU requests of 1 more container, 1 problem",
            ),
        ] {
            let report =
                CheckReport::of(&manifest::read(&[pod(&limits)]).workloads, &DialectSettings::default());
            assert_eq!(report.summary(), summary);
        }
    }

    #[test]
    fn memory_is_formatted_exactly() {
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
    fn slots_of_several_gpus_are_added() {
        assert_eq!(slots_percent(15, 10), Percent(150_000));
        assert_eq!(slots_percent(10, 10), Percent(100_000));
        assert_eq!(slots_percent(3, 10), Percent(30_000));
        let share = ShareAsk {
            memory: MemoryAsk::Unlimited,
            cores: CoresAsk::Slots(15),
            whole: false,
            ceiling: None,
        };
        let ask = AskReport::of(&WantedGpus { count: 1, share }, &DialectSettings::default());
        assert_eq!((ask.count, ask.cores), (2, Some(Percent(150_000))));
    }
}
