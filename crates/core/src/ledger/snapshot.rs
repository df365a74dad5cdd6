//! Immutable views of a ledger's capacity for concurrent readers.

use crate::explain::{Explanation, explain};
use crate::model::{NodeName, PodAsk};
use crate::place::{ClusterCapacity, Decision, NodeIndex, PolicyEngine, RankCache};

/// The capacity of a ledger at one point in time, for readers on any thread.
///
/// Taking one and cloning one take constant time, and later changes of the ledger do not show in it. Reads give the
/// same answers as the ledger itself gave at that time. A reader that decides often keeps a [`RankCache`] of its
/// own; one cache serves any number of snapshots, one after another.
///
/// ```
/// use partage_core::ledger::Ledger;
/// use partage_core::model::PodAsk;
/// use partage_core::place::{PolicyEngine, RankCache, defaults};
///
/// let ledger = Ledger::new([]);
/// let snapshot = ledger.snapshot();
/// let policies = PolicyEngine::new(defaults::CLUSTER_POLICY);
/// let reader = std::thread::spawn(move || {
///     let mut cache = RankCache::default();
///     snapshot.best(&policies, &PodAsk::default(), &mut cache)
/// });
/// assert_eq!(reader.join().ok(), Some(None));
/// ```
#[derive(Clone, Debug)]
pub struct Snapshot {
    cluster: ClusterCapacity,
}

impl Snapshot {
    pub(super) fn new(cluster: ClusterCapacity) -> Snapshot {
        Snapshot { cluster }
    }

    /// Returns the capacity of every node.
    pub fn cluster(&self) -> &ClusterCapacity {
        &self.cluster
    }

    /// Returns the best node for a pod, and the GPUs there; `None` if it fits nowhere.
    pub fn best(&self, policies: &PolicyEngine, ask: &PodAsk, cache: &mut RankCache) -> Option<Decision> {
        policies.best(&self.cluster, ask, cache)
    }

    /// Returns the rank of every node that a pod fits, in the order of their indexes; higher is better.
    pub fn ranks(
        &self,
        policies: &PolicyEngine,
        ask: &PodAsk,
        cache: &mut RankCache,
    ) -> Vec<(NodeIndex, i64)> {
        policies.ranks(&self.cluster, ask, cache)
    }

    /// Returns which of these nodes a pod fits. Unknown nodes are left out.
    pub fn filter<'a>(
        &self,
        ask: &PodAsk,
        nodes: impl IntoIterator<Item = &'a NodeName>,
    ) -> Vec<&'a NodeName> {
        let prepared = self.cluster.prepare(ask);
        let fits = |name: &&NodeName| {
            self.cluster.index_of(name).is_some_and(|node| self.cluster.fits(node, &prepared))
        };
        nodes.into_iter().filter(fits).collect()
    }

    /// Explains why a pod does not fit, per node, with changes that would make it fit.
    pub fn explain(&self, ask: &PodAsk) -> Explanation {
        explain(&self.cluster, ask)
    }

    /// Returns whether a pod would fit some node if no grant were held and every GPU were offered.
    pub fn could_ever_fit(&self, ask: &PodAsk) -> bool {
        let empty = self.cluster.when_empty();
        let prepared = empty.prepare(ask);
        empty.nodes().any(|(node, _)| empty.fits(node, &prepared))
    }
}
