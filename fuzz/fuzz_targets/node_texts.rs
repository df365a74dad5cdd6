//! Texts that the node agent reads: its settings, and the cgroups of processes that it did not start.
#![no_main]

use libfuzzer_sys::fuzz_target;
use partage_agent::processes::container_of;
use partage_agent::settings::Settings;

fuzz_target!(|text: &str| {
    let _ = Settings::parse(text, &"node".into());
    if let Some(id) = container_of(text) {
        assert!(text.contains(id.as_str()), "an id is never made up");
    }
});
