//! The sentence of a refused placement: why an ask has no place on this node, and whether it ever will.
//!
//! Where shares go is decided by the core's allocator alone; a front end decides with its own ledger and comes here when there
//! is no place.

use crate::refusal::{Refusal, RefusalReason};
use partage_core::explain::Change;
use partage_core::ledger::Snapshot;
use partage_core::model::{NodeName, PodAsk};

/// Why an ask has no place on this node now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoPlacement {
    /// What each GPU lacks, in words.
    pub why: String,
    /// Changes of the ask that would make it fit now, best first.
    pub changes: Vec<Change>,
    /// Whether the ask would fit if nothing were held and all GPUs were healthy.
    pub fits_when_empty: bool,
}

impl NoPlacement {
    /// Explains an ask that the ledger of a single node found no place for.
    pub fn explain(snapshot: &Snapshot, ask: &PodAsk) -> NoPlacement {
        let explanation = snapshot.explain(ask);
        let of_the_node = explanation.per_node.first().map(|report| report.text.clone());
        NoPlacement {
            why: of_the_node.unwrap_or_else(|| explanation.summary()),
            changes: explanation.suggestions.into_iter().map(|suggestion| suggestion.change).collect(),
            fits_when_empty: snapshot.could_ever_fit(ask),
        }
    }

    /// Returns the refusal for a pod on a node of a cluster. It says whether waiting helps: the author of a pod that never
    /// fits has to know.
    pub fn into_pod_refusal(self, node: &NodeName) -> Refusal {
        let why = &self.why;
        let change = self.changes.first().map(Change::to_string);
        let message = if self.fits_when_empty {
            let change = change.map(|change| format!(", or {change}")).unwrap_or_default();
            format!("no room on node {node} now: {why}; the container starts by itself when there is{change}")
        } else {
            let change = change.unwrap_or_else(|| "ask for less, or for another node".into());
            format!(
                "no room on node {node}, also with nobody else on it: {why}; delete the pod, and {change}"
            )
        };
        Refusal::new(RefusalReason::NoCapacity, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partage_core::ledger::{Ledger, LedgerTime};
    use partage_core::model::{
        Ask, Bytes, ContainerRole, CoresAsk, Gpu, MemoryAsk, Node, PodId, Policy, ShareAsk, WantedGpus,
    };
    use partage_core::place::PolicyEngine;

    const GIB: u64 = 1 << 30;

    fn node() -> Node {
        let gpu = Gpu {
            uuid: "GPU-1".into(),
            minor: 0,
            model: "Tesla T4".into(),
            memory_bytes: Bytes(16 * GIB),
            numa: None,
            pci: None,
            withheld: None,
        };
        Node::new("node1", vec![gpu])
    }

    fn ask(gib: u64) -> PodAsk {
        let part = ShareAsk {
            memory: MemoryAsk::Exactly(Bytes(gib * GIB)),
            cores: CoresAsk::Uncounted,
            whole: false,
            ceiling: None,
        };
        let want = WantedGpus { count: 1, part };
        PodAsk {
            asks: vec![Ask { container: "main".into(), role: ContainerRole::App, want }],
            ..PodAsk::default()
        }
    }

    /// The refusal of an ask on a node of which 12 GiB of 16 GiB are held.
    fn refusal(gib: u64) -> Refusal {
        let mut ledger = Ledger::new([node()]);
        let mut statement = ledger.statement();
        let holder = PodId { uid: "u".into(), namespace: "default".into(), name: "p".into() };
        let policies = PolicyEngine::new(Policy::Binpack);
        statement.place(holder, &ask(12), &policies, LedgerTime(u64::MAX)).unwrap();
        statement.commit();
        NoPlacement::explain(&ledger.snapshot(), &ask(gib)).into_pod_refusal(&node().name)
    }

    #[test]
    fn ask_that_fits_later_is_told_to_wait() {
        let refusal = refusal(8);
        assert_eq!(refusal.reason, RefusalReason::NoCapacity);
        let message = refusal.message;
        assert!(message.starts_with("no room on node node1 now: "), "{message}");
        assert!(message.contains("4 GiB") && message.contains("the container starts by itself"), "{message}");
    }

    #[test]
    fn ask_that_never_fits_is_told_to_change() {
        let message = refusal(20).message;
        assert!(message.starts_with("no room on node node1, also with nobody else on it: "), "{message}");
        assert!(message.contains("delete the pod, and "), "{message}");
    }

    #[test]
    fn unhealthy_gpu_can_recover() {
        let mut unhealthy = node();
        unhealthy.gpus[0].withheld = Some("XID 79".into());
        let snapshot = Ledger::new([unhealthy]).snapshot();
        assert!(NoPlacement::explain(&snapshot, &ask(16)).fits_when_empty);
        assert!(!NoPlacement::explain(&snapshot, &ask(17)).fits_when_empty);
    }
}
