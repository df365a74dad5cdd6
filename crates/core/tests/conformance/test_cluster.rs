//! Short constructors for small clusters and asks.

use partage_core::ledger::{Ledger, LedgerTime};
use partage_core::model::*;
use partage_core::place::NodeIndex;
use partage_core::place::{Decision, PolicyEngine};

/// A GPU with this much memory in MiB.
pub(crate) fn gpu(node: &str, index: usize, mib: u64) -> Gpu {
    Gpu {
        uuid: format!("GPU-{node}-{index}").as_str().into(),
        minor: index as u32,
        model: "NVIDIA A100-SXM4-40GB".into(),
        memory_bytes: Bytes::mib(mib).unwrap(),
        numa: None,
        pci: None,
        withheld: None,
    }
}

/// A node with one GPU per entry, with memory in MiB.
pub(crate) fn node(name: &str, mib: &[u64]) -> Node {
    Node::new(name, mib.iter().enumerate().map(|(index, &mib)| gpu(name, index, mib)).collect())
}

/// The node S6 of the upstream tests: pairs behind a switch, {0..3} behind one host bridge, the rest across sockets.
pub(crate) fn s6(mib: u64) -> Node {
    let mut node = node("s6", &[mib; 6]);
    node.links = Some(LinkMatrix::from_fn(6, |a, b| match (a / 2 == b / 2, a < 4 && b < 4) {
        (true, _) => GpuLink::Pix,
        (_, true) => GpuLink::Phb,
        _ => GpuLink::Node,
    }));
    node
}

/// The node S8 of the upstream tests: pairs behind a switch, quads behind several, the rest across sockets.
pub(crate) fn s8(mib: u64) -> Node {
    let mut node = node("s8", &[mib; 8]);
    node.links = Some(LinkMatrix::from_fn(8, |a, b| match (a / 2 == b / 2, a / 4 == b / 4) {
        (true, _) => GpuLink::Pix,
        (_, true) => GpuLink::Pxb,
        _ => GpuLink::System,
    }));
    node
}

/// A request in the vcuda dialect: `cores` and `blocks` of 256 MiB.
pub(crate) fn vcuda(cores: u32, blocks: u64) -> WantedGpus {
    let memory = Bytes(blocks << 28);
    if cores < 100 {
        let share = ShareAsk {
            memory: MemoryAsk::Exactly(memory),
            cores: CoresAsk::Exactly(Cores::percent(cores).unwrap()),
            whole: false,
            ceiling: None,
        };
        return WantedGpus { count: 1, share };
    }
    let memory = if blocks == 0 { MemoryAsk::All } else { MemoryAsk::AtMost(memory) };
    WantedGpus { count: cores / 100, share: whole(memory) }
}

/// A share that is a whole GPU.
pub(crate) fn whole(memory: MemoryAsk) -> ShareAsk {
    ShareAsk { memory, cores: CoresAsk::Exactly(Cores::WHOLE), whole: true, ceiling: None }
}

/// A request for `mib` MiB of each of `count` GPUs.
pub(crate) fn memory(count: u32, mib: u64) -> WantedGpus {
    let share = ShareAsk {
        memory: MemoryAsk::Exactly(Bytes::mib(mib).unwrap()),
        cores: CoresAsk::Uncounted,
        whole: false,
        ceiling: None,
    };
    WantedGpus { count, share }
}

/// A pod of app containers.
pub(crate) fn pod(wants: &[WantedGpus]) -> PodAsk {
    let asks = wants.iter().enumerate().map(|(index, &want)| Ask {
        container: format!("c{index}").into(),
        role: ContainerRole::App,
        want,
    });
    PodAsk { asks: asks.collect(), ..PodAsk::default() }
}

/// The identity of a pod with this name.
pub(crate) fn id(name: &str) -> PodId {
    PodId { uid: format!("uid-{name}").into(), namespace: "default".into(), name: name.into() }
}

/// Decides by a policy that has not learned anything yet.
pub(crate) fn best(ledger: &mut Ledger, ask: &PodAsk, policy: PlacementPolicy) -> Option<Decision> {
    let placer = PolicyEngine::new(policy);
    ledger.best(&placer, ask)
}

/// A minimal scheduler: decides, reserves, and returns the GPUs of each container.
pub(crate) struct TestCluster {
    /// The ledger of the scheduler.
    pub(crate) ledger: Ledger,
    policy: PlacementPolicy,
}

impl TestCluster {
    /// Creates a cluster with these nodes and this policy.
    pub(crate) fn new(policy: PlacementPolicy, nodes: impl IntoIterator<Item = Node>) -> TestCluster {
        TestCluster { ledger: Ledger::new(nodes), policy }
    }

    /// Places a pod and returns the node and the GPU indexes of each container.
    pub(crate) fn place(&mut self, name: &str, ask: &PodAsk) -> Option<(String, Vec<Vec<usize>>)> {
        let decision = best(&mut self.ledger, ask, self.policy)?;
        let node = self.ledger.cluster().node_capacity(decision.node).node.name.to_string();
        self.ledger.reserve(id(name), ask, &decision, LedgerTime(60_000)).expect("a fresh decision fits");
        let gpus = decision.placement.shares.iter().map(|s| s.iter().map(|slice| slice.gpu).collect());
        Some((node, gpus.collect()))
    }

    /// Places a pod of one container and returns its GPUs; empty if it does not fit.
    pub(crate) fn gpus(&mut self, name: &str, want: WantedGpus) -> Vec<usize> {
        self.place(name, &pod(&[want])).map(|(_, mut gpus)| gpus.remove(0)).unwrap_or_default()
    }

    /// Returns the GPUs that a container would get, without reserving them.
    pub(crate) fn preview(&mut self, want: WantedGpus) -> Vec<usize> {
        let gpus = self.gpus("probe", want);
        self.delete("probe");
        gpus
    }

    /// Reserves a share of a specific GPU of the only node, as the initial state of a test.
    pub(crate) fn occupy(&mut self, gpu: usize, want: WantedGpus) {
        let mut ask = pod(&[want]);
        let uuid = self.ledger.cluster().node_capacity(NodeIndex(0)).node.gpus[gpu].uuid.to_string();
        ask.constraints.uuids.only = vec![uuid];
        let name = format!("occupant-{gpu}-{}", self.ledger.all_held().count());
        assert!(self.place(&name, &ask).is_some(), "the share fits GPU {gpu}");
    }

    /// Releases the grant of a pod.
    pub(crate) fn delete(&mut self, name: &str) {
        self.ledger.release(&id(name).uid);
    }
}

/// The result of [`TestCluster::preview`] if nothing fits.
pub(crate) const NOWHERE: [usize; 0] = [];
