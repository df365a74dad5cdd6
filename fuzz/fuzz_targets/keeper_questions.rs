//! What any user of a machine may say to its keeper: nothing makes it panic, and what it gives is within the machine.
#![no_main]

use libfuzzer_sys::fuzz_target;
use partage_core::model::{Bytes, Gpu, Node};
use partage_workstation::decide;
use partage_workstation::settings::Settings;
use partage_workstation::users::Who;
use partage_workstation::wire::{Bound, LONGEST, Question, hear};

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
    let _ = hear::<Bound>(&mut &bytes[..], LONGEST);
    let Ok(Some(question)) = hear::<Question>(&mut &bytes[..], LONGEST) else { return };
    let who = Who { uid: 1000, gids: vec![1000] };
    let settings = Settings::default();
    match question {
        Question::Run(request) => {
            let Ok(ask) = decide::ask(&request, &settings.default) else { return };
            assert!(!decide::asked(&ask).is_empty());
            let Ok(shares) = decide::place(&node(), &[], &settings, &who, &ask) else { return };
            assert!(!shares.is_empty() && shares.len() <= 2);
            assert!(shares.iter().all(|share| share.memory_bytes.is_some_and(|memory| memory.0 <= MEMORY)));
        }
        Question::Resize { name, change } => {
            let Ok(ask) = decide::ask(&Default::default(), &settings.default) else { return };
            let Ok(shares) = decide::place(&node(), &[], &settings, &who, &ask) else { return };
            let held = [decide::Held { name: "a", who: &who, shares: &shares }];
            if let Ok(shares) = decide::resize(&node(), &held, &settings, &name, &change) {
                assert!(
                    shares.iter().all(|share| share.memory_bytes.is_some_and(|memory| memory.0 <= MEMORY))
                );
            }
        }
        _ => {}
    }
});
