//! Requests that any local user may send to the workstation daemon: none causes a panic, and every grant fits the machine.
#![no_main]

use libfuzzer_sys::fuzz_target;
use partage_core::model::{Bytes, Gpu, Node};
use partage_workstation::admission;
use partage_workstation::protocol::{ConfinedNotice, DaemonRequest, MAX_REQUEST_BYTES, read_message};
use partage_workstation::settings::WorkstationSettings;
use partage_workstation::users::UserIdentity;

const MEMORY: u64 = 40 << 30;

fn node() -> Node {
    let gpu = |minor: u32| Gpu {
        uuid: format!("GPU-{minor:08}-0000-0000-0000-000000000000").as_str().into(),
        minor,
        model: "NVIDIA A100-SXM4-40GB".into(),
        memory_bytes: Bytes(MEMORY),
        numa: None,
        pci: None,
        withheld: None,
    };
    Node::new("this machine", vec![gpu(0), gpu(1)])
}

fuzz_target!(|bytes: &[u8]| {
    let _ = read_message::<ConfinedNotice>(&mut &bytes[..], MAX_REQUEST_BYTES);
    let Ok(Some(message)) = read_message::<DaemonRequest>(&mut &bytes[..], MAX_REQUEST_BYTES) else {
        return;
    };
    let who = UserIdentity { uid: 1000, gids: vec![1000] };
    let settings = WorkstationSettings::default();
    match message {
        DaemonRequest::Run(request) => {
            let Ok(ask) = admission::to_ask(&request, &settings.default) else { return };
            assert!(!admission::describe_ask(&ask).is_empty());
            let Ok(shares) = admission::place(&node(), &[], &settings, &who, &ask) else { return };
            assert!(!shares.is_empty() && shares.len() <= 2);
            assert!(shares.iter().all(|share| share.memory_bytes.is_some_and(|memory| memory.0 <= MEMORY)));
        }
        DaemonRequest::Resize { name, change } => {
            let Ok(ask) = admission::to_ask(&Default::default(), &settings.default) else { return };
            let Ok(shares) = admission::place(&node(), &[], &settings, &who, &ask) else { return };
            let held = [admission::HeldShares { name: "a", who: &who, shares: &shares }];
            if let Ok(shares) = admission::resize(&node(), &held, &settings, &name, &change) {
                assert!(
                    shares.iter().all(|share| share.memory_bytes.is_some_and(|memory| memory.0 <= MEMORY))
                );
            }
        }
        _ => {}
    }
});
