//! Manifests as text, YAML or JSON: no text makes the reader panic or grow beyond bounds, and JSON that serde_json
//! reads is read the same.
#![no_main]

#[path = "../../crates/partage/src/documents.rs"]
mod documents;

use libfuzzer_sys::fuzz_target;
use partage_core::check::Report;
use partage_core::dialect::Settings;
use partage_core::manifest;
use serde_json::Value;

fuzz_target!(|text: &str| {
    let read = documents::read(text);
    assert!(read.errors.len() <= 20);
    if text.starts_with('{')
        && read.errors.is_empty()
        && let Ok(value) = serde_json::from_str::<Value>(text)
    {
        assert_eq!(read.values, [value]);
    }
    let _ = Report::of(&manifest::read(&read.values).workloads, &Settings::default());
});
