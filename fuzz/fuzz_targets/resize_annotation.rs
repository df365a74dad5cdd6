//! The resize annotation: any text is parsed or refused, and a resize changes only the containers that it names.
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
    let Ok(requests) = read(text) else { return };
    let Ok(after) = apply(&before, &requests) else { return };
    for (old, new) in before.grants.iter().zip(&after.grants) {
        let named = requests.iter().any(|request| request.container.as_ref() == Some(&old.container));
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
