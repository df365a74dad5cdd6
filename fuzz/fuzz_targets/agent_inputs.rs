//! Texts that the node agent parses: its settings file and the cgroup paths of arbitrary processes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use partage_agent::settings::AgentSettings;
use partage_host::container_of_pid::container_of;

fuzz_target!(|text: &str| {
    let _ = AgentSettings::parse(text, &"node".into());
    if let Some(id) = container_of(text) {
        assert!(text.contains(id.as_str()), "a container ID is always part of the cgroup path");
    }
});
