//! This node's containers: what they hold, and everything that is done to them.
//!
//! [`lifecycle`] is the type that records which containers exist and the stage of each; it does no I/O. The other modules
//! act on it: [`prepare`] answers kubelet, [`gc`] releases what has ended, [`recover`] starts from what an earlier agent left,
//! [`persist`] writes records to disk, and [`consistency`] compares everything with kubelet and the regions.

pub(crate) mod consistency;
pub(crate) mod gc;
mod key;
pub(crate) mod lifecycle;
pub(crate) mod persist;
mod prepare;
pub(crate) mod recover;

pub use key::ContainerKey;
