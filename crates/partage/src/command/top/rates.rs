//! What happened between two reports.

use partage_workstation::report::{PartReport, Report, ShareReport};
use std::collections::HashMap;

/// What a share made of a GPU in the time between two reports, in percent of that time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Rate {
    /// GPU time it got.
    pub(super) got: f64,
    /// Time in which it was kept waiting and did not have the GPU: a launch that waits behind the share's own work loses
    /// nothing.
    pub(super) throttled: f64,
}

/// The rates of all shares' parts.
pub(super) struct Rates {
    /// Nanoseconds between the reports; zero where there is only one.
    pub(super) nanos: u64,
    /// In the order of the shares and their parts.
    pub(super) shares: Vec<Vec<Rate>>,
    /// What shares got of each GPU, in percent and in the order of the GPUs.
    pub(super) gpus: Vec<f64>,
}

impl Rates {
    pub(super) fn between(before: Option<&Report>, now: &Report) -> Rates {
        let nanos = before.map_or(0, |before| now.at.saturating_sub(before.at));
        let earlier: HashMap<&str, &ShareReport> = before
            .iter()
            .flat_map(|before| &before.shares)
            .map(|share| (share.name.as_str(), share))
            .collect();
        let shares: Vec<Vec<Rate>> = now
            .shares
            .iter()
            .map(|share| {
                // One that only has the same name is another.
                let earlier = earlier.get(share.name.as_str()).filter(|earlier| earlier.since == share.since);
                share.parts.iter().map(|part| rate(earlier.copied(), part, nanos)).collect()
            })
            .collect();
        let gpus = now.gpus.iter().map(|gpu| {
            let parts =
                now.shares.iter().zip(&shares).flat_map(|(share, rates)| share.parts.iter().zip(rates));
            // An empty sum of fractions is less than zero, and shown so.
            let got = parts
                .filter(|(part, _)| part.uuid == gpu.uuid)
                .map(|(_, rate)| rate.got)
                .fold(0.0, |sum, got| sum + got);
            got.min(100.0)
        });
        Rates { nanos, gpus: gpus.collect(), shares }
    }

    /// Whether there is anything to compare with.
    pub(super) fn are_known(&self) -> bool {
        self.nanos > 0
    }
}

fn rate(earlier: Option<&ShareReport>, part: &PartReport, nanos: u64) -> Rate {
    let then = earlier.and_then(|share| share.parts.iter().find(|then| then.uuid == part.uuid));
    let since =
        |now: u64, then: Option<u64>| percent(now.checked_sub(then.unwrap_or(0)).unwrap_or(now), nanos);
    let got = since(part.spent_nanos, then.map(|then| then.spent_nanos));
    let waited = since(part.throttled_nanos, then.map(|then| then.throttled_nanos));
    Rate { got, throttled: waited.min((100.0 - got).max(0.0)) }
}

/// In tenths. Several processes may be kept waiting at the same time; more than all of it is not shown.
fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        return 0.0;
    }
    let tenths = u128::from(part) * 1000 / u128::from(whole);
    tenths.min(1000) as f64 / 10.0
}
