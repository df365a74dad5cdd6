//! What became of shares: asked, got, refused.

use super::workloads::{Started, Workload};
use partage_core::model::Bytes;
use partage_workstation::report::{PartReport, Report, ShareReport};
use std::collections::BTreeMap;

/// What shares did, as of the last time they were seen.
#[derive(Default)]
pub(super) struct Summary {
    shares: BTreeMap<String, Seen>,
}

struct Seen {
    /// When it was first and last seen, on the machine's clock.
    first: u64,
    last: u64,
    /// What it had used of each GPU when it was first seen.
    before: Vec<u64>,
    share: ShareReport,
}

impl Summary {
    pub(super) fn see(&mut self, report: &Report) {
        for share in &report.shares {
            let seen = self.shares.entry(share.name.clone()).or_insert_with(|| Seen {
                first: report.at,
                last: report.at,
                before: share.parts.iter().map(|part| part.spent_nanos).collect(),
                share: share.clone(),
            });
            seen.last = report.at;
            seen.share = share.clone();
        }
    }

    /// A table of those that were started here.
    pub(super) fn lines(&self, started: &Started) -> Vec<String> {
        let mut rows =
            vec![["share", "asked", "got", "memory at most", "refused", "waited"].map(String::from)];
        for workload in started.workloads() {
            match self.shares.get(&workload.name) {
                Some(seen) => rows.extend(
                    seen.share
                        .parts
                        .iter()
                        .zip(&seen.before)
                        .map(|(part, &before)| row(workload, seen, part, before)),
                ),
                None => rows.push([
                    workload.name.clone(),
                    asked(workload),
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

fn asked(workload: &Workload) -> String {
    let memory =
        workload.memory.clone().or_else(|| workload.memory_percent.map(|percent| format!("{percent} %")));
    let memory = memory.unwrap_or_else(|| "all memory".into());
    match (workload.whole, workload.cores) {
        (true, _) => "a whole GPU".into(),
        (false, Some(cores)) => format!("{memory}, {cores} % of a GPU"),
        (false, None) => format!("{memory}, what is left of a GPU"),
    }
}

fn row(workload: &Workload, seen: &Seen, part: &PartReport, before: u64) -> [String; 6] {
    let time = seen.last.saturating_sub(seen.first).max(1);
    let tenths = u128::from(part.spent_nanos.saturating_sub(before)) * 1000 / u128::from(time);
    let refused = match part.refusals {
        0 => "nothing".to_string(),
        1 => "1 allocation, by its own limit".to_string(),
        many => format!("{many} allocations, by its own limit"),
    };
    [
        workload.name.clone(),
        asked(workload),
        format!("{}.{} % of GPU {}", tenths / 10, tenths % 10, part.gpu),
        match part.memory_bytes {
            Some(limit) => format!("{} of {limit}", whole(part.peak_bytes)),
            None => whole(part.peak_bytes).to_string(),
        },
        refused,
        format!("{:.1} s", part.throttled_nanos as f64 / 1e9),
    ]
}

/// Memory to the MiB: the rest is nobody's business.
fn whole(bytes: Bytes) -> Bytes {
    Bytes(bytes.0 >> 20 << 20)
}
