//! Computes the amounts of extended resources in the node's status.

use crate::settings::AgentSettings;
use partage_core::dialect::Dialect;
use partage_core::model::{ContainerRole, Gpu, Node, PodGrant, Share};
use partage_core::pod::{ContainerManifest, PodManifest};
use std::collections::BTreeMap;

const MIB: u64 = 1 << 20;
/// Bytes of one `vcuda-memory`.
const VCUDA_BLOCK_BYTES: u64 = 256 << 20;
/// The largest amount that Kubernetes counts.
const MAX_AMOUNT: u64 = i64::MAX as u64;
/// The compute, or the memory, of a whole GPU in percent.
const WHOLE_PERCENT: u64 = 100;

/// Extended resources that the pods of a node request, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestedAmounts {
    /// The sum over all pods.
    pub total: BTreeMap<String, u64>,
    /// The part of it that no healthy GPU provides, because its shares are on unhealthy GPUs.
    pub on_unhealthy: BTreeMap<String, u64>,
}

/// A pod that is not finished, with its grant if it has one.
#[derive(Clone, Copy, Debug)]
pub struct PodRequest<'a> {
    /// The manifest with its requests.
    pub pod: &'a PodManifest,
    /// The grant, which has the GPUs of its shares.
    pub grant: Option<&'a PodGrant>,
}

/// Returns the amounts that the node publishes: what its healthy GPUs have, plus what pods on unhealthy GPUs request; and at least what all
/// pods request.
///
/// Kube-scheduler subtracts the requests of all pods from these amounts, also of those whose GPU is lost: without the second term an
/// unhealthy GPU would take capacity from healthy ones. Kubelet admits running pods again whenever it restarts, against these amounts:
/// if they were below what is requested, it would kill pods.
pub fn amounts(node: &Node, settings: &AgentSettings, requested: &RequestedAmounts) -> BTreeMap<String, u64> {
    let of = |map: &BTreeMap<String, u64>, resource: &str| map.get(resource).copied().unwrap_or(0);
    let mut amounts = totals(node, settings);
    for (resource, amount) in &mut amounts {
        let published = amount.saturating_add(of(&requested.on_unhealthy, resource));
        *amount = published.max(of(&requested.total, resource)).min(MAX_AMOUNT);
    }
    amounts
}

fn totals(node: &Node, settings: &AgentSettings) -> BTreeMap<String, u64> {
    let offered: Vec<&Gpu> = node.gpus.iter().filter(|gpu| gpu.withheld.is_none()).collect();
    let count = offered.len() as u64;
    let bytes = |gpu: &Gpu| settings.memory_overcommit.of(gpu.memory_bytes).0;
    // Each GPU is rounded down: a unit that spans two GPUs cannot be granted.
    let memory = |unit: u64| -> u64 { offered.iter().map(|gpu| bytes(gpu) / unit.max(1)).sum() };
    let cores = count * WHOLE_PERCENT;
    let percent = count * u64::from(u32::from(settings.memory_overcommit));

    let mut totals = BTreeMap::new();
    let mut put = |name: &str, amount: u64| totals.insert(name.to_string(), amount);
    for dialect in &settings.dialects {
        match dialect {
            Dialect::Native => {
                put("partage.dev/memory", memory(1));
                put("partage.dev/memory-percent", percent);
                put("partage.dev/cores", cores);
            }
            Dialect::Gpushare => {
                put("aliyun.com/gpu-count", count);
            }
            Dialect::Volcano => {
                put("volcano.sh/vgpu-memory", memory(u64::from(settings.volcano_memory_factor) * MIB));
                put("volcano.sh/vgpu-memory-percentage", percent);
                put("volcano.sh/vgpu-cores", cores);
            }
            Dialect::Vcuda => {
                for domain in &settings.vcuda_domains {
                    // Upstream publishes the blocks of all GPUs together.
                    let blocks = offered.iter().map(|gpu| bytes(gpu)).sum::<u64>() / VCUDA_BLOCK_BYTES;
                    put(&format!("{domain}/vcuda-memory"), blocks);
                }
            }
            Dialect::Aws => {}
            Dialect::Hami => {
                put("nvidia.com/gpumem", memory(MIB));
                put("nvidia.com/gpumem-percentage", percent);
                put("nvidia.com/gpucores", cores);
            }
        }
    }
    totals
}

/// Returns what pods request of extended resources, as kubelet counts it, on a node whose unhealthy GPUs are withheld.
///
/// A pod needs what its containers and sidecars need together, or what an init container needs beside the sidecars that
/// were started before it, whichever is more.
pub fn requested(pods: &[PodRequest<'_>], node: &Node) -> RequestedAmounts {
    let mut requested = RequestedAmounts::default();
    for PodRequest { pod, grant } in pods {
        let healthy_part =
            |container: &ContainerManifest, amount: u64| on_healthy(container, amount, *grant, node);
        let healthy = requested_by(pod, healthy_part);
        for (resource, amount) in requested_by(pod, |_, amount| amount) {
            let unhealthy = amount.saturating_sub(healthy.get(resource).copied().unwrap_or(0));
            add(&mut requested.total, resource, amount);
            if unhealthy > 0 {
                add(&mut requested.on_unhealthy, resource, unhealthy);
            }
        }
    }
    requested
}

fn add(sums: &mut BTreeMap<String, u64>, resource: &str, amount: u64) {
    let sum = sums.entry(resource.to_string()).or_default();
    *sum = sum.saturating_add(amount);
}

/// Returns the part of a container's request that is on healthy GPUs, by the number of its shares there, rounded up. A container without a
/// grant can only get one on healthy GPUs.
fn on_healthy(container: &ContainerManifest, amount: u64, grant: Option<&PodGrant>, node: &Node) -> u64 {
    let name = container.name.as_str();
    let of_container = grant.and_then(|grant| grant.grants.iter().find(|one| one.container.as_str() == name));
    let shares = of_container.map_or([].as_slice(), |one| one.shares.as_slice());
    if shares.is_empty() {
        return amount;
    }
    let is_healthy =
        |share: &&Share| node.gpu_index(&share.gpu).is_some_and(|at| node.gpus[at].withheld.is_none());
    let healthy = shares.iter().filter(is_healthy).count() as u128;
    let part = (u128::from(amount) * healthy).div_ceil(shares.len() as u128);
    u64::try_from(part).unwrap_or(amount)
}

/// Returns what one pod requests; each container counts with what `part` returns for its amount.
fn requested_by(pod: &PodManifest, part: impl Fn(&ContainerManifest, u64) -> u64) -> BTreeMap<&str, u64> {
    /// The need for one resource, computed over the containers in the order of the spec.
    #[derive(Default)]
    struct ResourceNeed {
        running: u64,
        peak: u64,
    }
    let mut needs: BTreeMap<&str, ResourceNeed> = BTreeMap::new();
    for container in &pod.containers {
        for resource in container.resources().filter(|resource| resource.contains('/')) {
            // The API server refuses an amount that is not a number.
            let Some(Ok(amount)) = container.count(resource) else { continue };
            let need = needs.entry(resource).or_default();
            let now = need.running.saturating_add(part(container, amount));
            need.peak = need.peak.max(now);
            if container.role != ContainerRole::Init {
                need.running = now;
            }
        }
    }
    needs.into_iter().map(|(resource, need)| (resource, need.peak)).collect()
}
