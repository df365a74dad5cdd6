//! Random nodes, grants and cluster files for property tests.

use crate::cluster_file::{ClusterFile, ClusterFileGrant};
use crate::model::{
    Bytes, Cores, Gpu, GpuLink, Grant, LinkMatrix, MAX_SLOTS, MilliCpu, Node, Overcommit, PodGrant, PodId,
    Share,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::subsequence;

/// Memory sizes of real GPUs in GiB.
const MEMORY_GIB: [u64; 7] = [8, 12, 16, 24, 40, 48, 80];

/// Returns a node called `name` with `gpus` GPUs. UUIDs are unique among nodes of different names.
///
/// Minor numbers have gaps, as on machines whose driver hides a GPU.
pub(crate) fn node(name: &'static str, gpus: std::ops::Range<usize>) -> impl Strategy<Value = Node> {
    let gpu = (prop::sample::select(&MEMORY_GIB[..]), 1u32..3, option::of(0u32..2), option::of(Just(())));
    let settings = (
        option::of(0u64..1 << 20),
        option::of(0u64..1 << 44),
        100u32..=300,
        1..=MAX_SLOTS,
        option::of(1u32..100),
        any::<bool>(),
    );
    (vec(gpu, gpus), settings).prop_map(move |(gpus, (cpu, memory, overcommit, slots, most, linked))| {
        let mut next_minor = 0;
        let gpus: Vec<Gpu> = gpus
            .into_iter()
            .enumerate()
            .map(|(index, (gib, step, numa, withheld))| {
                let minor = next_minor;
                next_minor += step;
                Gpu {
                    uuid: format!("GPU-{name}-{index:04}-5e1f-4c2a-9d3b7a6c1e50").into(),
                    minor,
                    model: ["Tesla T4", "NVIDIA A100-SXM4-80GB"][index % 2].into(),
                    memory_bytes: Bytes(gib << 30),
                    numa,
                    pci: None,
                    withheld: withheld.map(|()| "unhealthy".into()),
                }
            })
            .collect();
        let links = linked.then(|| {
            LinkMatrix::from_fn(gpus.len(), |a, b| match (a == b, a / 2 == b / 2) {
                (true, _) => GpuLink::NvLink,
                (_, true) => GpuLink::Pix,
                _ => GpuLink::System,
            })
        });
        Node {
            links,
            cpu_milli: cpu.map(MilliCpu),
            memory_bytes: memory.map(Bytes),
            memory_overcommit_percent: Overcommit::percent(overcommit).unwrap_or_default(),
            slots_per_gpu: slots,
            max_shares_per_gpu: most,
            ..Node::new(name, gpus)
        }
    })
}

/// Returns any amount of compute.
pub(crate) fn cores() -> impl Strategy<Value = Cores> {
    (0u32..=100_000).prop_map(|milli| Cores::millipercent(milli).unwrap())
}

/// Returns a share of one of the node's GPUs, by its index, of any form the model has.
pub(crate) fn share(node: &Node, gpu: usize) -> impl Strategy<Value = Share> + use<> {
    let (uuid, memory) = (node.gpus[gpu].uuid.clone(), node.gpus[gpu].memory_bytes.0);
    let memory = option::of((0..=memory).prop_map(Bytes));
    (memory, option::of(cores()), option::of(cores()), any::<bool>()).prop_map(
        move |(memory_bytes, cores, ceiling, whole)| Share {
            gpu: uuid.clone(),
            memory_bytes,
            cores,
            ceiling,
            whole,
        },
    )
}

/// Returns a grant of one to three containers on distinct GPUs each, of any form the model has.
pub(crate) fn pod_grant(node: &Node) -> impl Strategy<Value = PodGrant> + use<> {
    let name = node.name.clone();
    let node = node.clone();
    let indexes: Vec<usize> = (0..node.gpus.len()).collect();
    let shares = subsequence(indexes, 1..=node.gpus.len()).prop_flat_map(move |gpus| {
        let shares: Vec<_> = gpus.into_iter().map(|gpu| share(&node, gpu)).collect();
        shares
    });
    (vec(shares, 1..4), any::<bool>()).prop_map(move |(containers, init)| PodGrant {
        node: name.clone(),
        grants: containers
            .into_iter()
            .enumerate()
            .map(|(index, shares)| Grant {
                container: format!("c{index}").into(),
                init: init && index == 0,
                shares,
            })
            .collect(),
    })
}

/// Returns a node with GPUs and a grant on it.
pub(crate) fn node_and_grant() -> impl Strategy<Value = (Node, PodGrant)> {
    node("n1", 1..9).prop_flat_map(|node| {
        let grant = pod_grant(&node);
        (Just(node), grant)
    })
}

/// Returns a small cluster with random grants.
pub(crate) fn cluster_file() -> impl Strategy<Value = ClusterFile> {
    (node("n0", 0..3), node("n1", 1..9), node("n2", 1..3)).prop_flat_map(|(a, b, c)| {
        let grants = vec((prop_oneof![pod_grant(&b), pod_grant(&c)], 0u64..9000, 0u64..1 << 40), 0..4);
        (Just(vec![a, b, c]), grants).prop_map(|(nodes, grants)| ClusterFile {
            nodes,
            grants: grants
                .into_iter()
                .enumerate()
                .map(|(index, (grant, cpu, memory))| ClusterFileGrant {
                    pod: PodId {
                        uid: format!("uid-{index}").into(),
                        namespace: "default".into(),
                        name: format!("pod-{index}").into(),
                    },
                    grant,
                    cpu_milli: MilliCpu(cpu),
                    memory_bytes: Bytes(memory),
                })
                .collect(),
        })
    })
}
