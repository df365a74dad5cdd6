//! Small clusters and asks, in as few words as possible.

use partage_core::ledger::{Ledger, LedgerTime};
use partage_core::model::*;
use partage_core::place::NodeIndex;
use partage_core::place::{Decision, PolicyEngine};

/// A GPU with so many MiB.
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

/// A node with one GPU per entry, of so many MiB each.
pub(crate) fn node(name: &str, mib: &[u64]) -> Node {
    Node::new(name, mib.iter().enumerate().map(|(index, &mib)| gpu(name, index, mib)).collect())
}

/// The node S6 of the reference: pairs behind a switch, {0..3} behind one host bridge, the rest across sockets.
pub(crate) fn s6(mib: u64) -> Node {
    let mut node = node("s6", &[mib; 6]);
    node.links = Some(Links::from_fn(6, |a, b| match (a / 2 == b / 2, a < 4 && b < 4) {
        (true, _) => Link::Pix,
        (_, true) => Link::Phb,
        _ => Link::Node,
    }));
    node
}

/// The node S8: pairs behind a switch, quads behind several, the rest across sockets.
pub(crate) fn s8(mib: u64) -> Node {
    let mut node = node("s8", &[mib; 8]);
    node.links = Some(Links::from_fn(8, |a, b| match (a / 2 == b / 2, a / 4 == b / 4) {
        (true, _) => Link::Pix,
        (_, true) => Link::Pxb,
        _ => Link::System,
    }));
    node
}

/// `cores` and `blocks` of 256 MiB as gpu-manager's users write them.
pub(crate) fn vcuda(cores: u32, blocks: u64) -> WantedGpus {
    let memory = Bytes(blocks << 28);
    if cores < 100 {
        let part = ShareAsk {
            memory: MemoryAsk::Exactly(memory),
            cores: CoresAsk::Exactly(Cores::percent(cores).unwrap()),
            whole: false,
            ceiling: None,
        };
        return WantedGpus { count: 1, part };
    }
    let memory = if blocks == 0 { MemoryAsk::All } else { MemoryAsk::AtMost(memory) };
    WantedGpus { count: cores / 100, part: whole(memory) }
}

/// Whole GPUs.
pub(crate) fn whole(memory: MemoryAsk) -> ShareAsk {
    ShareAsk { memory, cores: CoresAsk::Exactly(Cores::WHOLE), whole: true, ceiling: None }
}

/// So many MiB of each of `count` GPUs.
pub(crate) fn memory(count: u32, mib: u64) -> WantedGpus {
    let part = ShareAsk {
        memory: MemoryAsk::Exactly(Bytes::mib(mib).unwrap()),
        cores: CoresAsk::Uncounted,
        whole: false,
        ceiling: None,
    };
    WantedGpus { count, part }
}

/// A pod of ordinary containers.
pub(crate) fn pod(wants: &[WantedGpus]) -> PodAsk {
    let asks = wants.iter().enumerate().map(|(index, &want)| Ask {
        container: format!("c{index}").into(),
        role: ContainerRole::App,
        want,
    });
    PodAsk { asks: asks.collect(), ..PodAsk::default() }
}

/// A pod's identity.
pub(crate) fn id(name: &str) -> PodId {
    PodId { uid: format!("uid-{name}").into(), namespace: "default".into(), name: name.into() }
}

/// Decides by a policy that has seen nothing yet.
pub(crate) fn best(ledger: &mut Ledger, ask: &PodAsk, policy: Policy) -> Option<Decision> {
    let placer = PolicyEngine::new(policy);
    ledger.best(&placer, ask)
}

/// A scheduler in three lines: decide, reserve, and answer where each container went.
pub(crate) struct World {
    /// The ledger.
    pub(crate) ledger: Ledger,
    policy: Policy,
}

impl World {
    /// These nodes under this policy.
    pub(crate) fn new(policy: Policy, nodes: impl IntoIterator<Item = Node>) -> World {
        World { ledger: Ledger::new(nodes), policy }
    }

    /// Places a pod: the node, and the GPU indexes of each container.
    pub(crate) fn place(&mut self, name: &str, ask: &PodAsk) -> Option<(String, Vec<Vec<usize>>)> {
        let decision = best(&mut self.ledger, ask, self.policy)?;
        let node = self.ledger.cluster().node_capacity(decision.node).node.name.to_string();
        self.ledger.reserve(id(name), ask, &decision, LedgerTime(60_000)).expect("a fresh decision fits");
        let gpus = decision.placement.shares.iter().map(|s| s.iter().map(|slice| slice.gpu).collect());
        Some((node, gpus.collect()))
    }

    /// The GPUs of a pod of one container; empty where it fits nowhere.
    pub(crate) fn gpus(&mut self, name: &str, want: WantedGpus) -> Vec<usize> {
        self.place(name, &pod(&[want])).map(|(_, mut gpus)| gpus.remove(0)).unwrap_or_default()
    }

    /// The GPUs a container would get, without taking them.
    pub(crate) fn would(&mut self, want: WantedGpus) -> Vec<usize> {
        let gpus = self.gpus("probe", want);
        self.delete("probe");
        gpus
    }

    /// Takes a part of a given GPU of the only node, to start a case from there.
    pub(crate) fn occupy(&mut self, gpu: usize, want: WantedGpus) {
        let mut ask = pod(&[want]);
        let uuid = self.ledger.cluster().node_capacity(NodeIndex(0)).node.gpus[gpu].uuid.to_string();
        ask.constraints.uuids.only = vec![uuid];
        let name = format!("occupant-{gpu}-{}", self.ledger.all_held().count());
        assert!(self.place(&name, &ask).is_some(), "GPU {gpu} takes the occupant");
    }

    /// A pod has ended.
    pub(crate) fn delete(&mut self, name: &str) {
        self.ledger.release(&id(name).uid);
    }
}

/// What [`World::would`] answers when nothing fits.
pub(crate) const NOWHERE: [usize; 0] = [];
