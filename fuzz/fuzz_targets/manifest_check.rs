//! `partage check` on parsed manifests: no document causes a panic, and every reported ask is within range.
#![no_main]

use libfuzzer_sys::fuzz_target;
use partage_core::check::CheckReport;
use partage_core::dialect::DialectSettings;
use partage_core::manifest;
use serde_json::{Value, json};

fuzz_target!(|text: &str| {
    let Ok(document) = serde_json::from_str::<Value>(text) else { return };
    // Few inputs are workloads. Wrapped in a pod, any object reaches the dialects.
    let pod = json!({
        "kind": "Pod",
        "metadata": {"name": "p", "annotations": document["annotations"], "labels": document["labels"]},
        "spec": {"containers": [{"name": "main", "resources": {"limits": document}}]},
    });
    let report = CheckReport::of(&manifest::read(&[document, pod]).workloads, &DialectSettings::default());
    for container in report.workloads.iter().flat_map(|workload| &workload.containers) {
        let Some(ask) = &container.ask else { continue };
        assert!((1..=1024).contains(&ask.count));
        assert!(ask.memory_bytes.is_none_or(|memory| (1 << 20..=1 << 50).contains(&memory.0)));
        assert!(ask.memory_percent.is_none_or(|percent| (1..=100).contains(&percent)));
        // More slots than one GPU has are counted over all GPUs that they occupy.
        let max_cores = 100_000 * u64::from(ask.count);
        let cores = ask.cores.map(|cores| cores.as_millipercent());
        assert!(cores.is_none_or(|cores| (1..=max_cores).contains(&cores)));
        let limit = ask.cores_limit.map(|limit| limit.as_millipercent());
        assert!(limit.is_none_or(|limit| limit <= 100_000 && cores.is_none_or(|cores| cores <= limit)));
    }
    assert!(serde_json::to_string(&report).is_ok());
});
