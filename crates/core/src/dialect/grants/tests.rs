//! Conformance cases and properties of the records of all dialects.

mod cases;
mod hostile;
mod round_trips;

use super::*;
use crate::dialect::MemoryUnit;
use crate::model::{Cores, GpuUuid};

const NOW: UnixNanos = UnixNanos(1_700_000_000_123_456_789);

fn gpu(uuid: &str, minor: u32, mib: u64) -> Gpu {
    Gpu {
        uuid: uuid.into(),
        minor,
        model: "Tesla T4".into(),
        memory_bytes: Bytes::mib(mib).unwrap(),
        numa: None,
        pci: None,
        withheld: None,
    }
}

/// Two GPUs of different sizes; the second is not minor 1.
fn node() -> Node {
    Node::new("n1", vec![gpu("GPU-a", 0, 16276), gpu("GPU-b", 3, 12288)])
}

fn container(name: &str, role: ContainerRole, limits: &[(&str, &str)]) -> Container {
    let limits: BTreeMap<String, String> =
        limits.iter().map(|(name, amount)| (name.to_string(), amount.to_string())).collect();
    Container { name: name.into(), role, requests: limits.clone(), limits }
}

fn app(name: &str, limits: &[(&str, &str)]) -> Container {
    container(name, ContainerRole::App, limits)
}

fn pod(containers: Vec<Container>) -> Pod {
    Pod { containers, ..Pod::default() }
}

fn annotated(mut pod: Pod, annotations: &[(&str, &str)]) -> Pod {
    for (key, value) in annotations {
        pod.annotations.insert(key.to_string(), value.to_string());
    }
    pod
}

fn share(gpu: &str, memory: Option<Bytes>, cores: Option<u32>) -> Share {
    let cores = cores.map(|percent| Cores::percent(percent).unwrap());
    let whole = cores == Some(Cores::WHOLE);
    Share { gpu: gpu.into(), memory_bytes: memory, cores, ceiling: None, whole }
}

fn mib(gpu: &str, mib: u64, cores: Option<u32>) -> Share {
    share(gpu, Bytes::mib(mib), cores)
}

fn gib(gpu: &str, gib: u64) -> Share {
    share(gpu, Bytes::gib(gib), None)
}

fn granted(container: &str, shares: Vec<Share>) -> Grant {
    Grant { container: container.into(), init: false, shares }
}

fn pod_grant(grants: Vec<Grant>) -> PodGrant {
    PodGrant { node: "n1".into(), grants }
}

/// Writes a grant for a pod whose containers with a grant all ask in one dialect.
fn written(pod: &Pod, grant: &PodGrant, dialect: Dialect, settings: &Settings) -> Written {
    written_on(&node(), pod, grant, dialect, settings)
}

fn written_on(node: &Node, pod: &Pod, grant: &PodGrant, dialect: Dialect, settings: &Settings) -> Written {
    let dialects = grant.grants.iter().map(|grant| (grant.container.clone(), dialect)).collect();
    write(grant, node, &Spelling::of(pod, &dialects), settings, NOW).unwrap()
}

/// Reads a pod's record on [`node`].
fn read_back(pod: &Pod, settings: &Settings) -> Result<Option<(Dialect, PodGrant)>, String> {
    read(pod, None, &node(), settings).map_err(|e| e.to_string())
}

fn env<'a>(written: &'a Written, container: &str) -> Vec<(&'a str, &'a str)> {
    written.env[container].iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
}

fn annotations(written: &Written) -> Vec<(&str, &str)> {
    let foreign = written.annotations.iter().filter(|(key, _)| key.as_str() != native::ANNOTATION);
    foreign.map(|(key, value)| (key.as_str(), value.as_str())).collect()
}

/// What a pod looks like after its grant was written, to tools that do not know the native record.
fn as_foreign(mut pod: Pod, written: &Written) -> Pod {
    pod.annotations.extend(written.annotations.clone());
    pod.annotations.remove(native::ANNOTATION);
    pod
}

fn in_mib() -> Settings {
    Settings { gpushare_unit: MemoryUnit::Mib, ..Settings::default() }
}

fn with_factor(volcano_memory_factor: u32) -> Settings {
    Settings { volcano_memory_factor, ..Settings::default() }
}

fn uuids(node: &Node) -> Vec<GpuUuid> {
    node.gpus.iter().map(|gpu| gpu.uuid.clone()).collect()
}
