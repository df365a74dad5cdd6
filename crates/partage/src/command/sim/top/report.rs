//! What happened between two looks at a node, for people and for programs.

use crate::command::sim::counted;
use partage_sim_node::node::NodeDir;
use partage_sim_node::state::{Counter, Process, State, UNIT, Usage};
use serde::Serialize;

/// A node over an interval.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    /// Its folder.
    node: String,
    driver: &'static str,
    /// Whether the kernel driver is loaded.
    loaded: bool,
    /// What shares are taken over.
    interval_seconds: f64,
    gpus: Vec<Gpu>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Gpu {
    index: usize,
    uuid: String,
    /// The card as NVML names it.
    name: String,
    /// What processes hold, contexts included.
    used_bytes: u64,
    /// What programs can have of it.
    usable_bytes: u64,
    /// All of it, as NVML says.
    total_bytes: u64,
    /// The part of the interval during which anything ran.
    busy_percent: f64,
    /// The same as NVML shows it: whole percents of its last whole window.
    nvml_percent: u64,
    /// How long anything ran since the node was made.
    busy_seconds: f64,
    lost: bool,
    /// Whether it is in MIG mode.
    mig: bool,
    /// How many times as long as usual everything takes.
    slowness: f64,
    /// Memory errors since the GPU was last started.
    corrected_errors: u64,
    uncorrected_errors: u64,
    /// The last XID, if it is remembered still.
    last_xid: Option<u64>,
    processes: Vec<OnGpu>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct OnGpu {
    pid: u32,
    name: String,
    contexts: u32,
    used_bytes: u64,
    /// The part of the interval during which this process had the GPU.
    share_percent: f64,
    /// The GPU time it got, as a card that is not slow would need for its work.
    gpu_seconds: f64,
}

impl Report {
    pub(super) fn new(node: &NodeDir, state: &State, before: &[Usage], after: &[Usage]) -> Report {
        let config = node.config();
        let xids = last_xids(state);
        let looks = before.iter().zip(after).zip(&config.gpus).enumerate();
        let gpus = looks.map(|(index, ((before, after), gpu))| {
            let profile = config.profile(index);
            let slowness = state.slowness(index);
            let interval = after.at.saturating_sub(before.at);
            let processes = after.processes.iter().map(|(process, served)| {
                let work = served_since(before, process, *served);
                OnGpu {
                    pid: process.pid,
                    name: process.name.clone(),
                    contexts: process.contexts,
                    used_bytes: process.used * UNIT,
                    share_percent: percent(work.saturating_mul(u64::from(slowness)) / 1000, interval),
                    gpu_seconds: seconds(*served),
                }
            });
            Gpu {
                index,
                uuid: gpu.uuid.clone(),
                name: profile.map_or_else(|| gpu.model.clone(), |profile| profile.name.to_string()),
                used_bytes: state.used_memory(index) * UNIT,
                usable_bytes: state.memory(index) * UNIT,
                total_bytes: profile.map_or(0, |profile| profile.memory.total),
                busy_percent: percent(after.busy.saturating_sub(before.busy), interval),
                nvml_percent: state.utilisation(index).0.min(1000) / 10,
                busy_seconds: seconds(after.busy),
                lost: state.is_lost(index),
                mig: node.is_split(state, index),
                slowness: f64::from(slowness) / 1000.0,
                corrected_errors: state.counter(index, Counter::CorrectedVolatile),
                uncorrected_errors: state.counter(index, Counter::UncorrectedVolatile),
                last_xid: xids[index],
                processes: processes.collect(),
            }
        });
        let interval = before.iter().zip(after).map(|(before, after)| after.at.saturating_sub(before.at));
        Report {
            node: node.path().display().to_string(),
            driver: config.driver.version(),
            loaded: state.is_loaded(),
            interval_seconds: interval.max().map_or(0.0, seconds),
            gpus: gpus.collect(),
        }
    }

    /// Lines for people.
    pub(super) fn lines(&self) -> Vec<String> {
        let loaded = if self.loaded { "" } else { ", not loaded" };
        let gpus = counted(self.gpus.len(), "GPU", "GPUs");
        let mut lines = vec![
            format!("{}: driver {}{loaded}, {gpus}", self.node, self.driver),
            String::new(),
            format!(
                "{:>3}  {:<22} {:>17} {:>7} {:>7}  {}",
                "GPU", "NAME", "MEMORY MIB", "BUSY %", "NVML %", "HEALTH"
            ),
        ];
        lines.extend(self.gpus.iter().map(|gpu| {
            let memory = format!("{} / {}", gpu.used_bytes >> 20, gpu.total_bytes >> 20);
            format!(
                "{:>3}  {:<22} {memory:>17} {:>7.1} {:>7}  {}",
                gpu.index,
                gpu.name,
                gpu.busy_percent,
                gpu.nvml_percent,
                gpu.health()
            )
        }));
        lines.push(String::new());
        let rows = self.gpus.iter().flat_map(|gpu| gpu.processes.iter().map(|process| (gpu.index, process)));
        let rows: Vec<String> = rows
            .map(|(gpu, process)| {
                format!(
                    "{gpu:>3}  {:>7} {:>11} {:>8.1} {:>12.3}  {}",
                    process.pid,
                    process.used_bytes >> 20,
                    process.share_percent,
                    process.gpu_seconds,
                    process.name
                )
            })
            .collect();
        if rows.is_empty() {
            lines.push("no process uses a GPU".into());
        } else {
            lines.push(format!(
                "{:>3}  {:>7} {:>11} {:>8} {:>12}  {}",
                "GPU", "PID", "MEMORY MIB", "SHARE %", "GPU SECONDS", "PROCESS"
            ));
            lines.extend(rows);
        }
        lines
    }
}

impl Gpu {
    fn health(&self) -> String {
        let mut words = Vec::new();
        if self.lost {
            words.push("lost".to_string());
        }
        if self.mig {
            words.push("MIG mode".to_string());
        }
        if self.slowness > 1.0 {
            words.push(format!("{} times slower", self.slowness));
        }
        for (errors, kind) in [(self.corrected_errors, "corrected"), (self.uncorrected_errors, "uncorrected")]
        {
            if errors > 0 {
                words.push(format!("{errors} {kind} error{}", if errors == 1 { "" } else { "s" }));
            }
        }
        words.extend(self.last_xid.map(|xid| format!("last XID {xid}")));
        if words.is_empty() { "ok".into() } else { words.join(", ") }
    }
}

/// What a process was served since the first look; all of it if it came, or began anew, after that.
fn served_since(before: &Usage, process: &Process, served: u64) -> u64 {
    let same = |earlier: &Process| earlier.slot == process.slot && earlier.pid == process.pid;
    let then = before.processes.iter().find(|(earlier, _)| same(earlier)).map_or(0, |(_, served)| *served);
    served.checked_sub(then).unwrap_or(served)
}

fn last_xids(state: &State) -> Vec<Option<u64>> {
    let mut xids = vec![None; state.gpus()];
    let mut number = 0;
    while let Some(event) = state.event_after(number) {
        number = event.number;
        if let (Some(xid), Some(last)) = (event.xid(), xids.get_mut(event.gpu)) {
            *last = Some(xid);
        }
    }
    xids
}

/// In tenths.
fn percent(part: u64, whole: u64) -> f64 {
    let tenths = u128::from(part) * 1000 / u128::from(whole.max(1));
    tenths.min(1000) as f64 / 10.0
}

fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}
