//! The message of a refused placement: why an ask does not fit this node, and whether it ever will.
//!
//! Only the core's allocator decides where shares go; a front end calls it with its own ledger, and uses this module if
//! the ask does not fit.

use crate::refusal::{Refusal, RefusalReason};
use partage_core::explain::SuggestedChange;
use partage_core::ledger::Snapshot;
use partage_core::model::{NodeName, PodAsk};

/// Why an ask does not fit this node now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoPlacement {
    /// What each GPU lacks, as text.
    pub why: String,
    /// Changes of the ask that would make it fit now, best first.
    pub changes: Vec<SuggestedChange>,
    /// Whether the ask would fit if nothing were held and all GPUs were healthy.
    pub fits_when_empty: bool,
}

impl NoPlacement {
    /// Explains why an ask does not fit the ledger of a single node.
    pub fn explain(snapshot: &Snapshot, ask: &PodAsk) -> NoPlacement {
        let explanation = snapshot.explain(ask);
        let of_the_node = explanation.per_node.first().map(|report| report.text.clone());
        NoPlacement {
            why: of_the_node.unwrap_or_else(|| explanation.summary()),
            changes: explanation.suggestions.into_iter().map(|suggestion| suggestion.change).collect(),
            fits_when_empty: snapshot.could_ever_fit(ask),
        }
    }

    /// Returns the refusal for a pod on a node of a cluster. It states whether waiting helps, because a pod that never
    /// fits has to be changed.
    pub fn into_pod_refusal(self, node: &NodeName) -> Refusal {
        let why = &self.why;
        let change = self.changes.first().map(SuggestedChange::to_string);
        let message = if self.fits_when_empty {
            let change = change.map(|change| format!(", or {change}")).unwrap_or_default();
            format!(
                "insufficient GPU capacity on node {node}: {why}; the container starts when capacity is released{change}"
            )
        } else {
            let change = change.unwrap_or_else(|| "request less, or schedule the pod to another node".into());
            format!(
                "insufficient GPU capacity on node {node}, even when empty: {why}; delete the pod, and {change}"
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
        Ask, Bytes, ContainerRole, CoresAsk, Gpu, MemoryAsk, Node, PlacementPolicy, PodId, ShareAsk,
        WantedGpus,
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
        let share = ShareAsk {
            memory: MemoryAsk::Exactly(Bytes(gib * GIB)),
            cores: CoresAsk::Uncounted,
            whole: false,
            ceiling: None,
        };
        let want = WantedGpus { count: 1, share };
        PodAsk {
            asks: vec![Ask { container: "main".into(), role: ContainerRole::App, want }],
            ..PodAsk::default()
        }
    }

    /// Returns the refusal of an ask on a node of which 12 GiB of 16 GiB are held.
    fn refusal(gib: u64) -> Refusal {
        let mut ledger = Ledger::new([node()]);
        let mut statement = ledger.statement();
        let holder = PodId { uid: "u".into(), namespace: "default".into(), name: "p".into() };
        let policies = PolicyEngine::new(PlacementPolicy::Binpack);
        statement.place(holder, &ask(12), &policies, LedgerTime(u64::MAX)).unwrap();
        statement.commit();
        NoPlacement::explain(&ledger.snapshot(), &ask(gib)).into_pod_refusal(&node().name)
    }

    #[test]
    fn refusal_of_an_ask_that_fits_later_says_to_wait() {
        let refusal = refusal(8);
        assert_eq!(refusal.reason, RefusalReason::NoCapacity);
        let message = refusal.message;
        assert!(message.starts_with("insufficient GPU capacity on node node1: "), "{message}");
        assert!(message.contains("4 GiB") && message.contains("the container starts when"), "{message}");
    }

    #[test]
    fn refusal_of_an_ask_that_never_fits_says_to_change_it() {
        let message = refusal(20).message;
        assert!(
            message.starts_with("insufficient GPU capacity on node node1, even when empty: "),
            "{message}"
        );
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
