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

fn container(name: &str, role: ContainerRole, limits: &[(&str, &str)]) -> ContainerManifest {
    let limits: BTreeMap<String, String> =
        limits.iter().map(|(name, amount)| (name.to_string(), amount.to_string())).collect();
    ContainerManifest { name: name.into(), role, requests: limits.clone(), limits }
}

fn app(name: &str, limits: &[(&str, &str)]) -> ContainerManifest {
    container(name, ContainerRole::App, limits)
}

fn pod(containers: Vec<ContainerManifest>) -> PodManifest {
    PodManifest { containers, ..PodManifest::default() }
}

fn annotated(mut pod: PodManifest, annotations: &[(&str, &str)]) -> PodManifest {
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

/// Encodes a grant for a pod whose containers with a grant all use one dialect.
fn written(
    pod: &PodManifest,
    grant: &PodGrant,
    dialect: Dialect,
    settings: &DialectSettings,
) -> EncodedGrant {
    written_on(&node(), pod, grant, dialect, settings)
}

fn written_on(
    node: &Node,
    pod: &PodManifest,
    grant: &PodGrant,
    dialect: Dialect,
    settings: &DialectSettings,
) -> EncodedGrant {
    let dialects = grant.grants.iter().map(|grant| (grant.container.clone(), dialect)).collect();
    write(grant, node, &PodDialects::of(pod, &dialects), settings, NOW).unwrap()
}

/// Decodes a pod's record on [`node`].
fn read_back(pod: &PodManifest, settings: &DialectSettings) -> Result<Option<(Dialect, PodGrant)>, String> {
    read(pod, None, &node(), settings).map_err(|e| e.to_string())
}

fn env<'a>(written: &'a EncodedGrant, container: &str) -> Vec<(&'a str, &'a str)> {
    written.env[container].iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
}

fn annotations(written: &EncodedGrant) -> Vec<(&str, &str)> {
    let foreign = written.annotations.iter().filter(|(key, _)| key.as_str() != native::ANNOTATION);
    foreign.map(|(key, value)| (key.as_str(), value.as_str())).collect()
}

/// Returns the pod with its encoded grant, without the native record, as other tools see it.
fn as_foreign(mut pod: PodManifest, written: &EncodedGrant) -> PodManifest {
    pod.annotations.extend(written.annotations.clone());
    pod.annotations.remove(native::ANNOTATION);
    pod
}

fn in_mib() -> DialectSettings {
    DialectSettings { gpushare_unit: MemoryUnit::Mib, ..DialectSettings::default() }
}

fn with_factor(volcano_memory_factor: u32) -> DialectSettings {
    DialectSettings { volcano_memory_factor, ..DialectSettings::default() }
}

fn uuids(node: &Node) -> Vec<GpuUuid> {
    node.gpus.iter().map(|gpu| gpu.uuid.clone()).collect()
}
