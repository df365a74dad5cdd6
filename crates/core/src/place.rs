//! Fit, score and place: the one allocator that every component calls.
//!
//! A [`ClusterCapacity`] holds the free capacity of every GPU. A pod's ask is prepared once ([`PreparedAsk`]), checked
//! against a node ([`ClusterCapacity::fits`]), ranked by a [`NodeRanking`] and placed on the best node
//! ([`ClusterCapacity::best`]). The same capacity and the same ask always give the same answer; ties go to the lowest
//! index.
//!
//! Reading order: [`capacity`] (what is free), [`fit`] (whether a share fits one GPU, and why not), [`gpu_order`] (which
//! GPUs first), [`solve`] (a whole pod on one node, giving a [`placement`]), [`policies`] (which node),
//! [`cluster_capacity`] (all nodes, with ranks cached by kind of ask), [`fragmentation`] (the default policy of a cluster).

pub mod capacity;
pub(crate) mod capacity_vector;
pub mod cluster_capacity;
pub mod defaults;
pub(crate) mod demand_histogram;
pub mod fit;
pub mod fragmentation;
pub mod gpu_order;
pub mod placement;
pub mod policies;
pub mod policy_engine;
pub mod rank_cache;
pub mod solve;

pub use capacity::{GpuAllocation, GpuCapacity, GpuClass, HostUsage, NodeCapacity};
pub use cluster_capacity::{ClusterCapacity, Decision, NodeIndex};
pub use fit::{PreparedAsk, PreparedWant, ShareNeed, Shortfall};
pub use placement::{PlacedShare, Placement};
pub use policies::NodeRanking;
pub use policy_engine::PolicyEngine;
pub use rank_cache::RankCache;
pub use solve::NodeShortfall;
