//! The summary that `partage up --start` prints at the end: requested and used resources of each share.

use super::workloads::{StartedWorkloads, Workload};
use partage_core::model::Bytes;
use partage_workstation::report::{GpuShareReport, MachineReport, ShareReport};
use std::collections::BTreeMap;

/// Usage of all shares, as of their last report.
#[derive(Default)]
pub(super) struct UsageSummary {
    shares: BTreeMap<String, ShareHistory>,
}

struct ShareHistory {
    /// Times of the first and the last report, in nanoseconds.
    first: u64,
    last: u64,
    /// GPU time used on each GPU at the first report, in nanoseconds.
    before: Vec<u64>,
    share: ShareReport,
}

impl UsageSummary {
    pub(super) fn record(&mut self, report: &MachineReport) {
        for share in &report.shares {
            let seen = self.shares.entry(share.name.clone()).or_insert_with(|| ShareHistory {
                first: report.at,
                last: report.at,
                before: share.gpu_shares.iter().map(|gpu_share| gpu_share.spent_nanos).collect(),
                share: share.clone(),
            });
            seen.last = report.at;
            seen.share = share.clone();
        }
    }

    /// Returns a table of the workloads that were started.
    pub(super) fn lines(&self, started: &StartedWorkloads) -> Vec<String> {
        let mut rows =
            vec![["SHARE", "REQUESTED", "USED", "PEAK MEMORY", "REFUSED", "THROTTLED"].map(String::from)];
        for workload in started.workloads() {
            match self.shares.get(&workload.name) {
                Some(seen) => rows.extend(
                    seen.share
                        .gpu_shares
                        .iter()
                        .zip(&seen.before)
                        .map(|(gpu_share, &before)| row(workload, seen, gpu_share, before)),
                ),
                None => rows.push([
                    workload.name.clone(),
                    requested(workload),
                    "no share".into(),
                    "-".into(),
                    "-".into(),
                    "-".into(),
                ]),
            }
        }
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..6).map(width).collect();
        let line = |row: &[String; 6]| {
            let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}"));
            cells.collect::<Vec<_>>().join("  ").trim_end().to_string()
        };
        rows.iter().map(line).collect()
    }
}

fn requested(workload: &Workload) -> String {
    let memory =
        workload.memory.clone().or_else(|| workload.memory_percent.map(|percent| format!("{percent} %")));
    let memory = memory.unwrap_or_else(|| "all memory".into());
    match workload.cores {
        _ if workload.whole => "a whole GPU".into(),
        Some(cores) => format!("{memory}, {cores} % of a GPU"),
        None => format!("{memory}, idle time of a GPU"),
    }
}

fn row(workload: &Workload, seen: &ShareHistory, gpu_share: &GpuShareReport, before: u64) -> [String; 6] {
    let time = seen.last.saturating_sub(seen.first).max(1);
    let tenths = u128::from(gpu_share.spent_nanos.saturating_sub(before)) * 1000 / u128::from(time);
    let refused = match gpu_share.refusals {
        0 => "none".to_string(),
        1 => "1 allocation above the limit".to_string(),
        many => format!("{many} allocations above the limit"),
    };
    [
        workload.name.clone(),
        requested(workload),
        format!("{}.{} % of GPU {}", tenths / 10, tenths % 10, gpu_share.gpu),
        match gpu_share.memory_bytes {
            Some(limit) => format!("{} of {limit}", to_mib(gpu_share.peak_bytes)),
            None => to_mib(gpu_share.peak_bytes).to_string(),
        },
        refused,
        format!("{:.1} s", gpu_share.throttled_nanos as f64 / 1e9),
    ]
}

/// Rounds down to whole MiB, for display.
fn to_mib(bytes: Bytes) -> Bytes {
    Bytes(bytes.0 >> 20 << 20)
}
