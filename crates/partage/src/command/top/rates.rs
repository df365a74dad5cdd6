//! Rates of GPU time between two reports.

use partage_workstation::report::{GpuShareReport, MachineReport, ShareReport};
use std::collections::HashMap;

/// Use of one GPU by one share between two reports, in percent of that time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct ShareRate {
    /// GPU time that the share used.
    pub(super) used: f64,
    /// Time in which the share was throttled and did not use the GPU. A launch that waits for the share's own work is not throttled.
    pub(super) throttled: f64,
}

/// The rates of all shares and GPUs.
pub(super) struct UsageRates {
    /// Nanoseconds between the reports; zero if there is only one.
    pub(super) nanos: u64,
    /// Rates of each share on each of its GPUs, in the order of the report.
    pub(super) shares: Vec<Vec<ShareRate>>,
    /// GPU time that all shares used together on each GPU, in percent, in the order of the report.
    pub(super) gpus: Vec<f64>,
}

impl UsageRates {
    pub(super) fn between(before: Option<&MachineReport>, now: &MachineReport) -> UsageRates {
        let nanos = before.map_or(0, |before| now.at.saturating_sub(before.at));
        let earlier: HashMap<&str, &ShareReport> = before
            .iter()
            .flat_map(|before| &before.shares)
            .map(|share| (share.name.as_str(), share))
            .collect();
        let shares: Vec<Vec<ShareRate>> = now
            .shares
            .iter()
            .map(|share| {
                // A share with the same name but another start time is a different share.
                let earlier = earlier.get(share.name.as_str()).filter(|earlier| earlier.since == share.since);
                share.gpu_shares.iter().map(|gpu_share| rate(earlier.copied(), gpu_share, nanos)).collect()
            })
            .collect();
        let gpus = now.gpus.iter().map(|gpu| {
            let gpu_shares =
                now.shares.iter().zip(&shares).flat_map(|(share, rates)| share.gpu_shares.iter().zip(rates));
            // `sum()` of no floats is -0.0 and would be shown with its sign.
            let used = gpu_shares
                .filter(|(gpu_share, _)| gpu_share.uuid == gpu.uuid)
                .map(|(_, rate)| rate.used)
                .fold(0.0, |sum, used| sum + used);
            used.min(100.0)
        });
        UsageRates { nanos, gpus: gpus.collect(), shares }
    }

    /// Returns whether there was an earlier report.
    pub(super) fn are_known(&self) -> bool {
        self.nanos > 0
    }
}

fn rate(earlier: Option<&ShareReport>, gpu_share: &GpuShareReport, nanos: u64) -> ShareRate {
    let then = earlier.and_then(|share| share.gpu_shares.iter().find(|then| then.uuid == gpu_share.uuid));
    let since =
        |now: u64, then: Option<u64>| percent(now.checked_sub(then.unwrap_or(0)).unwrap_or(now), nanos);
    let used = since(gpu_share.spent_nanos, then.map(|then| then.spent_nanos));
    let waited = since(gpu_share.throttled_nanos, then.map(|then| then.throttled_nanos));
    ShareRate { used, throttled: waited.min((100.0 - used).max(0.0)) }
}

/// Returns the percentage rounded down to tenths, at most 100: several processes may be throttled at the same time.
fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        return 0.0;
    }
    let tenths = u128::from(part) * 1000 / u128::from(whole);
    tenths.min(1000) as f64 / 10.0
}
