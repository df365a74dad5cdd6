//! A report for programs, with what happened in an interval.

use super::rates::Rates;
use partage_workstation::report::Report;
use serde_json::{Value, json};

/// The report, where GPUs have `gotPercent` and shares' parts have `gotPercent` and `throttledPercent` besides.
pub(super) fn document(before: &Report, now: &Report) -> serde_json::Result<Value> {
    let rates = Rates::between(Some(before), now);
    let mut document = serde_json::to_value(now)?;
    document["intervalSeconds"] = json!(rates.nanos as f64 / 1e9);
    for (gpu, got) in items(document.get_mut("gpus")).zip(&rates.gpus) {
        gpu["gotPercent"] = json!(got);
    }
    for (share, rates) in items(document.get_mut("shares")).zip(&rates.shares) {
        for (part, rate) in items(share.get_mut("parts")).zip(rates) {
            part["gotPercent"] = json!(rate.got);
            part["throttledPercent"] = json!(rate.throttled);
        }
    }
    Ok(document)
}

fn items(list: Option<&mut Value>) -> impl Iterator<Item = &mut Value> {
    list.and_then(Value::as_array_mut).into_iter().flatten()
}
