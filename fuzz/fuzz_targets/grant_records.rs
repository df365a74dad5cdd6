//! Grant records of a pod: any text is decoded or refused, and a decoded grant can be encoded and decoded again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use partage_core::dialect::grants::{PodDialects, RECORD_ANNOTATIONS, UnixNanos, read, vcuda, write};
use partage_core::dialect::{Dialect, DialectSettings};
use partage_core::model::{Bytes, ContainerRole, Gpu, Node};
use partage_core::pod::{ContainerManifest, PodManifest};
use std::collections::BTreeMap;

fuzz_target!(|data: &[u8]| {
    let Some((&selector, text)) = data.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let (first, second) = text.split_once('\n').unwrap_or((text, ""));
    let of_vcuda = [vcuda::index_key("example.com", 0), "example.com/vcuda-core-limit".to_string()];
    let keys: Vec<String> = RECORD_ANNOTATIONS.map(String::from).into_iter().chain(of_vcuda).collect();
    let (node, mut pod) = (node(), pod(second));
    pod.annotations.insert(keys[usize::from(selector) % keys.len()].clone(), first.to_string());
    pod.annotations.insert(keys[usize::from(selector >> 4) % keys.len()].clone(), second.to_string());

    let settings = DialectSettings::default();
    let Ok(Some((_, grant))) = read(&pod, None, &node, &settings) else { return };
    let known = grant.grants.iter().flat_map(|grant| &grant.shares).all(|s| node.gpu_index(&s.gpu).is_some());
    for dialect in Dialect::ALL {
        let dialects = pod.containers.iter().map(|c| (c.name.clone(), dialect)).collect();
        let written = write(&grant, &node, &PodDialects::of(&pod, &dialects), &settings, UnixNanos(1));
        // A decoded grant can always be encoded, unless it names a GPU that the node no longer has.
        let Ok(written) = written else {
            assert!(!known);
            continue;
        };
        let again = PodManifest { annotations: written.annotations, ..pod.clone() };
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

/// A pod with resources of every dialect that has a record; the fuzzer chooses the amounts of the third container.
fn pod(amount: &str) -> PodManifest {
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
        ContainerManifest { name: name.into(), role, requests: BTreeMap::new(), limits }
    };
    PodManifest {
        containers: vec![
            container("init", ContainerRole::Init, "1"),
            container("main", ContainerRole::App, "2"),
            container("side", ContainerRole::App, amount),
        ],
        ..PodManifest::default()
    }
}
