//! Usage of a simulated node between two samples, as text and as JSON.

use crate::command::sim::counted;
use partage_sim_node::node::NodeDir;
use partage_sim_node::state::{GpuActivity, GpuCounter, SimGpuProcess, SimNodeState, UNIT};
use serde::Serialize;

/// Usage of a node over an interval.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SimReport {
    /// Directory of the node.
    node: String,
    driver: &'static str,
    /// Whether the kernel driver is loaded.
    loaded: bool,
    /// The interval over which percentages are computed.
    interval_seconds: f64,
    gpus: Vec<SimGpuUsage>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SimGpuUsage {
    index: usize,
    uuid: String,
    /// Name of the model, as NVML reports it.
    name: String,
    /// Memory used by processes, including their contexts.
    used_bytes: u64,
    /// Memory that programs can allocate.
    usable_bytes: u64,
    /// Total memory, as NVML reports it.
    total_bytes: u64,
    /// Percentage of the interval in which any kernel ran.
    busy_percent: f64,
    /// Utilization as NVML reports it: whole percent of its last complete sampling period.
    nvml_percent: u64,
    /// Time in which any kernel ran since the node was created.
    busy_seconds: f64,
    lost: bool,
    /// Whether MIG mode is enabled.
    mig: bool,
    /// Factor by which the GPU is slower than normal.
    slowness: f64,
    /// Corrected memory errors since the driver was loaded.
    corrected_errors: u64,
    /// Uncorrected memory errors since the driver was loaded.
    uncorrected_errors: u64,
    /// The last XID, if it is still in the event log.
    last_xid: Option<u64>,
    processes: Vec<SimProcessUsage>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SimProcessUsage {
    pid: u32,
    name: String,
    contexts: u32,
    used_bytes: u64,
    /// Percentage of the interval in which this process used the GPU.
    share_percent: f64,
    /// GPU time of the process's work at normal speed.
    gpu_seconds: f64,
}

impl SimReport {
    pub(super) fn new(
        node: &NodeDir,
        state: &SimNodeState,
        before: &[GpuActivity],
        after: &[GpuActivity],
    ) -> SimReport {
        let config = node.config();
        let xids = last_xids(state);
        let samples = before.iter().zip(after).zip(&config.gpus).enumerate();
        let gpus = samples.map(|(index, ((before, after), gpu))| {
            let profile = config.profile(index);
            let slowness = state.slowness(index);
            let interval = after.at.saturating_sub(before.at);
            let processes = after.processes.iter().map(|(process, served)| {
                let work = served_since(before, process, *served);
                SimProcessUsage {
                    pid: process.pid,
                    name: process.name.clone(),
                    contexts: process.contexts,
                    used_bytes: process.used * UNIT,
                    share_percent: percent(work.saturating_mul(u64::from(slowness)) / 1000, interval),
                    gpu_seconds: seconds(*served),
                }
            });
            SimGpuUsage {
                index,
                uuid: gpu.uuid.clone(),
                name: profile.map_or_else(|| gpu.model.clone(), |profile| profile.name.to_string()),
                used_bytes: state.used_memory(index) * UNIT,
                usable_bytes: state.memory(index) * UNIT,
                total_bytes: profile.map_or(0, |profile| profile.memory.total),
                busy_percent: percent(after.busy.saturating_sub(before.busy), interval),
                nvml_percent: state.utilization(index).0.min(1000) / 10,
                busy_seconds: seconds(after.busy),
                lost: state.is_lost(index),
                mig: node.is_mig_enabled(state, index),
                slowness: f64::from(slowness) / 1000.0,
                corrected_errors: state.counter(index, GpuCounter::CorrectedVolatile),
                uncorrected_errors: state.counter(index, GpuCounter::UncorrectedVolatile),
                last_xid: xids[index],
                processes: processes.collect(),
            }
        });
        let interval = before.iter().zip(after).map(|(before, after)| after.at.saturating_sub(before.at));
        SimReport {
            node: node.path().display().to_string(),
            driver: config.driver.version(),
            loaded: state.is_loaded(),
            interval_seconds: interval.max().map_or(0.0, seconds),
            gpus: gpus.collect(),
        }
    }

    /// Returns the report as text.
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

impl SimGpuUsage {
    fn health(&self) -> String {
        let mut notes = Vec::new();
        if self.lost {
            notes.push("lost".to_string());
        }
        if self.mig {
            notes.push("MIG mode".to_string());
        }
        if self.slowness > 1.0 {
            notes.push(format!("{} times slower", self.slowness));
        }
        for (errors, kind) in [(self.corrected_errors, "corrected"), (self.uncorrected_errors, "uncorrected")]
        {
            if errors > 0 {
                notes.push(format!("{errors} {kind} error{}", if errors == 1 { "" } else { "s" }));
            }
        }
        notes.extend(self.last_xid.map(|xid| format!("last XID {xid}")));
        if notes.is_empty() { "ok".into() } else { notes.join(", ") }
    }
}

/// Returns the GPU time of a process since the first sample; all of it if the process started, or restarted, after that.
fn served_since(before: &GpuActivity, process: &SimGpuProcess, served: u64) -> u64 {
    let same = |earlier: &SimGpuProcess| earlier.slot == process.slot && earlier.pid == process.pid;
    let then = before.processes.iter().find(|(earlier, _)| same(earlier)).map_or(0, |(_, served)| *served);
    served.checked_sub(then).unwrap_or(served)
}

fn last_xids(state: &SimNodeState) -> Vec<Option<u64>> {
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

/// Returns the percentage rounded down to tenths.
fn percent(part: u64, whole: u64) -> f64 {
    let tenths = u128::from(part) * 1000 / u128::from(whole.max(1));
    tenths.min(1000) as f64 / 10.0
}

fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}
