//! Any text in any record of a pod is read or refused, and what is read can be written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use partage_core::dialect::grants::{
    Spelling, UnixNanos, gpushare, hami, native, read, vcuda, volcano, write,
};
use partage_core::dialect::{Dialect, Settings};
use partage_core::model::{Bytes, ContainerRole, Gpu, Node};
use partage_core::pod::{Container, Pod};
use std::collections::BTreeMap;

fuzz_target!(|data: &[u8]| {
    let Some((&selector, text)) = data.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let (first, second) = text.split_once('\n').unwrap_or((text, ""));
    let keys = [
        native::ANNOTATION.to_string(),
        gpushare::INDEX.to_string(),
        gpushare::ALLOCATION.to_string(),
        volcano::IDS.to_string(),
        hami::IDS.to_string(),
        vcuda::index_key("example.com", 0),
        "example.com/vcuda-core-limit".to_string(),
    ];
    let (node, mut pod) = (node(), pod(second));
    pod.annotations.insert(keys[usize::from(selector) % keys.len()].clone(), first.to_string());
    pod.annotations.insert(keys[usize::from(selector >> 4) % keys.len()].clone(), second.to_string());

    let settings = Settings::default();
    let Ok(Some((_, grant))) = read(&pod, None, &node, &settings) else { return };
    let known = grant.grants.iter().flat_map(|grant| &grant.shares).all(|s| node.gpu_index(&s.gpu).is_some());
    for dialect in Dialect::ALL {
        let dialects = pod.containers.iter().map(|c| (c.name.clone(), dialect)).collect();
        let written = write(&grant, &node, &Spelling::of(&pod, &dialects), &settings, UnixNanos(1));
        // Only a GPU that the node has lost stops a readable grant.
        let Ok(written) = written else {
            assert!(!known);
            continue;
        };
        let again = Pod { annotations: written.annotations, ..pod.clone() };
        assert_eq!(read(&again, None, &node, &settings), Ok(Some((Dialect::Native, grant.clone()))));
    }
});

fn node() -> Node {
    let gpu = |uuid: &str, minor| Gpu {
        uuid: uuid.into(),
        minor,
        model: "Tesla T4".into(),
        memory_bytes: Bytes(16 << 30),
        numa: None,
        pci: None,
        withheld: None,
    };
    Node::new("n1", vec![gpu("GPU-a", 0), gpu("GPU-b", 3)])
}

/// A pod that asks in every dialect with a record; the second container's amounts are the fuzzer's.
fn pod(amount: &str) -> Pod {
    let container = |name: &str, role, amount: &str| {
        let names = [
            "aliyun.com/gpu-mem",
            "volcano.sh/vgpu-number",
            "example.com/vcuda-core",
            "example.com/vcuda-memory",
            "nvidia.com/gpu",
        ];
        let limits: BTreeMap<_, _> =
            names.iter().map(|name| (name.to_string(), amount.to_string())).collect();
        Container { name: name.into(), role, requests: BTreeMap::new(), limits }
    };
    Pod {
        containers: vec![
            container("init", ContainerRole::Init, "1"),
            container("main", ContainerRole::App, "2"),
            container("side", ContainerRole::App, amount),
        ],
        ..Pod::default()
    }
}
