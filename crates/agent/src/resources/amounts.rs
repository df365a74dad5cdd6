//! Amounts in the node's status.

use crate::settings::Settings;
use partage_core::dialect::Dialect;
use partage_core::model::{Gpu, Node, Role};
use partage_core::pod::Pod;
use std::collections::BTreeMap;

const MIB: u64 = 1 << 20;
/// What one `vcuda-memory` is.
const VCUDA_BLOCK: u64 = 256 << 20;
/// The most that Kubernetes counts.
const MOST: u64 = i64::MAX as u64;
/// All of one GPU's compute, or of its memory.
const PERCENT: u64 = 100;

/// The amounts that the node publishes: all its offered GPUs have, or what is asked if that is more.
///
/// Kubelet admits the pods that run here once more whenever it restarts, against these amounts. Were they to fall below what
/// is asked when a GPU is lost, pods on other GPUs would be killed.
pub fn amounts(node: &Node, settings: &Settings, asked: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let mut amounts = totals(node, settings);
    for (resource, amount) in &mut amounts {
        *amount = (*amount).max(asked.get(resource).copied().unwrap_or(0)).min(MOST);
    }
    amounts
}

fn totals(node: &Node, settings: &Settings) -> BTreeMap<String, u64> {
    let offered: Vec<&Gpu> = node.gpus.iter().filter(|gpu| gpu.withheld.is_none()).collect();
    let count = offered.len() as u64;
    let bytes = |gpu: &Gpu| settings.memory_overcommit.of(gpu.memory_bytes).0;
    // A unit that lies on two GPUs can be given to nobody.
    let memory = |unit: u64| -> u64 { offered.iter().map(|gpu| bytes(gpu) / unit.max(1)).sum() };
    let cores = count * PERCENT;
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
                    let blocks = offered.iter().map(|gpu| bytes(gpu)).sum::<u64>() / VCUDA_BLOCK;
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

/// What pods ask of extended resources, as kubelet counts it. Pods that are finished must not be among them.
///
/// A pod needs what its containers and sidecars need together, or what an init container needs beside the sidecars that
/// were started before it, whichever is more.
pub fn asked(pods: &[&Pod]) -> BTreeMap<String, u64> {
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    for pod in pods {
        for (resource, amount) in asked_by(pod) {
            let sum = sums.entry(resource.to_string()).or_default();
            *sum = sum.saturating_add(amount);
        }
    }
    sums
}

fn asked_by(pod: &Pod) -> BTreeMap<&str, u64> {
    /// What holds of one resource while the containers are gone through in the order of the spec.
    #[derive(Default)]
    struct Need {
        running: u64,
        most: u64,
    }
    let mut needs: BTreeMap<&str, Need> = BTreeMap::new();
    for container in &pod.containers {
        for resource in container.resources().filter(|resource| resource.contains('/')) {
            // An amount that is none is refused by the API server already.
            let Some(Ok(amount)) = container.count(resource) else { continue };
            let need = needs.entry(resource).or_default();
            let now = need.running.saturating_add(amount);
            need.most = need.most.max(now);
            if container.role != Role::Init {
                need.running = now;
            }
        }
    }
    needs.into_iter().map(|(resource, need)| (resource, need.most)).collect()
}
