//! Manifests as YAML or JSON text: no text causes a panic or unbounded memory use, and JSON is parsed as serde_json parses
//! it.
#![no_main]

#[path = "../../crates/partage/src/yaml.rs"]
mod yaml;

use libfuzzer_sys::fuzz_target;
use partage_core::check::CheckReport;
use partage_core::dialect::DialectSettings;
use partage_core::manifest;
use serde_json::Value;

fuzz_target!(|text: &str| {
    let documents = yaml::parse_documents(text);
    assert!(documents.errors.len() <= 20);
    if text.starts_with('{')
        && documents.errors.is_empty()
        && let Ok(value) = serde_json::from_str::<Value>(text)
    {
        assert_eq!(documents.values, [value]);
    }
    let _ = CheckReport::of(&manifest::read(&documents.values).workloads, &DialectSettings::default());
});
