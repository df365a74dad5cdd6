//! Any text as a wish for other amounts is a change or words, and a change never touches what it does not name.
#![no_main]

use libfuzzer_sys::fuzz_target;
use partage_core::model::{Bytes, Cores, Grant, PodGrant, Share};
use partage_core::resize::{apply, read};

fuzz_target!(|text: &str| {
    let share = Share {
        gpu: "GPU-1".into(),
        memory_bytes: Some(Bytes(1 << 30)),
        cores: Cores::percent(30),
        ceiling: None,
        whole: false,
    };
    let grant =
        |container: &str, init| Grant { container: container.into(), init, shares: vec![share.clone()] };
    let grants = vec![grant("fetch", true), grant("main", false), grant("side", false)];
    let before = PodGrant { node: "n1".into(), grants };
    let Ok(changes) = read(text) else { return };
    let Ok(after) = apply(&before, &changes) else { return };
    for (old, new) in before.grants.iter().zip(&after.grants) {
        let named = changes.iter().any(|change| change.container.as_ref() == Some(&old.container));
        assert!(named || old == new);
        assert_eq!(
            (&old.container, old.init, old.shares.len()),
            (&new.container, new.init, new.shares.len())
        );
        assert!(
            new.shares
                .iter()
                .all(|share| share.gpu == old.shares[0].gpu && share.memory_bytes > Some(Bytes(0)))
        );
    }
});
