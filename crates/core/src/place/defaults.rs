//! The placement policy of each component if its settings and the pod name none.
//!
//! The components differ because they choose among different things and know different things. This module is the
//! only place that defines the default policy of each; `docs/placement.md` lists them for operators.

use crate::model::PlacementPolicy;

/// The default of everything that chooses among the nodes of a cluster, such as trace replay and `partage explain`.
///
/// Only here are there enough arrivals to learn what is asked for, and enough nodes for a bad choice to be avoidable.
/// On the bundled traces it allocates more of the GPUs than any other policy (`docs/benchmarks.md`).
pub const CLUSTER_POLICY: PlacementPolicy = PlacementPolicy::Fragmentation;

/// The default of the node agent, which chooses among the GPUs of one node for pods that kube-scheduler sent there.
///
/// It sees too few arrivals to learn from, and a few GPUs at most. Filling the fullest GPU keeps others free for
/// pods that want a whole GPU or a large share, which is what `fragmentation` does as well until it has learned.
pub const NODE_AGENT_POLICY: PlacementPolicy = PlacementPolicy::Binpack;

/// The default of the workstation daemon, which chooses among the GPUs of one machine for its interactive users.
///
/// Idle compute is lent, so two people are better off on two GPUs than on one. Users of a
/// workstation do not queue for whole GPUs, so keeping GPUs free gains little.
pub const WORKSTATION_POLICY: PlacementPolicy = PlacementPolicy::Spread;
