//! The region: two files that a container's processes and the node's agent share.
//!
//! `limits` says what the container may have; its owner writes it and nobody inside can. `usage` says what its processes
//! hold; they write it, and whoever reads it expects anything there.

pub mod alive;
pub mod arbiter;
pub mod audit;
pub mod clock;
mod error;
pub mod futex;
pub mod layout;
pub mod ledger;
mod limits;
mod map;
pub mod mortal;
mod sync;
mod usage;

#[cfg(test)]
mod tests;

pub use error::{Refused, RegionError};
pub use layout::{GpuBook, GpuLimits, Lane, MAX_GPUS, SLOTS, Turn};
pub use ledger::UNIT;
pub use limits::{Gate, GpuShare, Owner, Policy};
pub use usage::reader::{Demand, Forgery, GpuUsage, ProcessUsage, Snapshot, UsageReader};
pub use usage::{Process, Region};

/// The file that says what the container may have.
pub const LIMITS: &str = "limits";

/// The file that says what its processes hold.
pub const USAGE: &str = "usage";
