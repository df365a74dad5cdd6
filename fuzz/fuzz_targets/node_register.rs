//! Volcano node registrations: any text is decoded or refused, and a decoded node encodes to the same text again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use partage_core::dialect::DialectSettings;
use partage_core::dialect::grants::node_register::{decode, encode};

fuzz_target!(|data: (u32, &str)| {
    let (factor, text) = data;
    let settings = DialectSettings { volcano_memory_factor: factor, ..DialectSettings::default() };
    let name = "n1".into();
    let Ok(node) = decode(&name, text, &settings) else { return };
    let again = decode(&name, &encode(&node, &settings), &settings);
    let again = again.expect("an encoded registration can be decoded");
    assert_eq!(encode(&again, &settings), encode(&node, &settings));
});
