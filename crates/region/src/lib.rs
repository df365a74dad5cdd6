//! The region: two files that a container's processes and the node's agent share.
//!
//! `limits` says what the container may have; its owner writes it and nobody inside can. `usage` says what its processes
//! hold; they write it, and whoever reads it expects anything there.

pub mod arbiter;
pub mod audit;
pub mod clock;
mod error;
pub mod failpoint;
pub mod futex;
pub mod layout;
pub mod liveness_lock;
pub mod memory_account;
mod mmap;
mod owner;
mod reader;
mod sync;
mod tenant;

#[cfg(test)]
mod tests;

pub use error::{Refused, RegionError};
pub use layout::{GpuAccount, GpuLimits, MAX_GPUS, ProcessLane, SLOTS, TurnWord};
pub use memory_account::UNIT;
pub use owner::{GpuShare, RegionOwner, RegionPolicy, TurnControl};
pub use reader::{ComputeDemand, Forgery, GpuUsage, ProcessUsage, UsageReader, UsageSnapshot};
pub use tenant::{Process, RegionTenant};

/// The file that says what the container may have.
pub const LIMITS: &str = "limits";

/// The file that says what its processes hold.
pub const USAGE: &str = "usage";
