//! Fit, score and place: the one allocator that everything else asks.
//!
//! A [`Cluster`] holds the room left on every GPU. A pod's ask is prepared once ([`Prepared`]), checked against
//! a node ([`Cluster::fits`]), ranked by a [`Ranking`] and placed on the best one ([`Cluster::best`]). The same
//! room and the same ask always give the same answer; ties go to the lowest index.
//!
//! Reading order: [`room`] (what is left), [`fit`] (whether a part fits one GPU, and why not), [`order`] (which
//! GPUs first), [`solve`] (a whole pod on one node, giving a [`placement`]), [`rank`] (which node), [`cluster`]
//! (all of them, with ranks cached on boards), [`fragmentation`] (the default policy).

mod board;
pub mod cluster;
pub mod fit;
pub mod fragmentation;
pub(crate) mod mix;
pub mod order;
pub mod placement;
pub mod placer;
pub mod rank;
pub mod room;
pub(crate) mod sketch;
pub mod solve;

pub use cluster::{Cluster, Decision, NodeIndex};
pub use fit::{Need, Prepared, Short, Wanted};
pub use placement::{Placement, Slice};
pub use placer::Placer;
pub use rank::Ranking;
pub use room::{Charge, GpuClass, GpuRoom, HostUse, NodeRoom};
pub use solve::NodeShort;
