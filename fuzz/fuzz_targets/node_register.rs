//! Any text of a node's registration is read or refused, and what is read is written the same again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use partage_core::dialect::Settings;
use partage_core::dialect::grants::node_register::{decode, encode};

fuzz_target!(|data: (u32, &str)| {
    let (factor, text) = data;
    let settings = Settings { volcano_memory_factor: factor, ..Settings::default() };
    let name = "n1".into();
    let Ok(node) = decode(&name, text, &settings) else { return };
    let again = decode(&name, &encode(&node, &settings), &settings);
    let again = again.expect("what was written is read");
    assert_eq!(encode(&again, &settings), encode(&node, &settings));
});
