//! Manifests: no document makes the check panic, and every ask it reports is within range.
#![no_main]

use libfuzzer_sys::fuzz_target;
use partage_core::check::Report;
use partage_core::dialect::Settings;
use partage_core::manifest;
use serde_json::{Value, json};

fuzz_target!(|text: &str| {
    let Ok(document) = serde_json::from_str::<Value>(text) else { return };
    // Most inputs are no workload yet; as the parts of a pod they reach the dialects.
    let pod = json!({
        "kind": "Pod",
        "metadata": {"name": "p", "annotations": document["annotations"], "labels": document["labels"]},
        "spec": {"containers": [{"name": "main", "resources": {"limits": document}}]},
    });
    let report = Report::of(&manifest::read(&[document, pod]).workloads, &Settings::default());
    for container in report.workloads.iter().flat_map(|workload| &workload.containers) {
        assert!(container.ask.as_ref().is_none_or(|ask| (1..=1024).contains(&ask.count)));
    }
    assert!(serde_json::to_string(&report).is_ok());
});
