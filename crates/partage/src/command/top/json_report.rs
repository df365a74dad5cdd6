//! The JSON output of `partage top`: the report with the rates of one interval.

use super::rates::UsageRates;
use partage_workstation::report::MachineReport;
use serde_json::{Value, json};

/// Returns the report; GPUs also have `usedPercent`, and shares of GPUs `usedPercent` and `throttledPercent`.
pub(super) fn json_report(before: &MachineReport, now: &MachineReport) -> serde_json::Result<Value> {
    let rates = UsageRates::between(Some(before), now);
    let mut document = serde_json::to_value(now)?;
    document["intervalSeconds"] = json!(rates.nanos as f64 / 1e9);
    for (gpu, used) in items(document.get_mut("gpus")).zip(&rates.gpus) {
        gpu["usedPercent"] = json!(used);
    }
    for (share, rates) in items(document.get_mut("shares")).zip(&rates.shares) {
        for (gpu_share, rate) in items(share.get_mut("gpuShares")).zip(rates) {
            gpu_share["usedPercent"] = json!(rate.used);
            gpu_share["throttledPercent"] = json!(rate.throttled);
        }
    }
    Ok(document)
}

fn items(list: Option<&mut Value>) -> impl Iterator<Item = &mut Value> {
    list.and_then(Value::as_array_mut).into_iter().flatten()
}
