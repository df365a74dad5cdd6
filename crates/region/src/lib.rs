//! The region: two files that a container's processes and the node daemon share.
//!
//! The daemon writes `limits`, which holds what the container may use and is read-only inside it. The container's
//! processes write `usage`, which holds what they use; readers must expect any contents there.
//!
//! | side | type | files |
//! |---|---|---|
//! | daemon | [`RegionHandle`] ([`RegionOwner`] and [`UsageReader`]) | writes `limits`, reads `usage` |
//! | daemon | [`arbiter::Arbiter`], [`audit::BypassAudit`] | by handles and snapshots |
//! | shim | [`RegionTenant`] | reads `limits`, writes `usage` |
//!
//! Daemon and shim are upgraded at different times: [`protocol`] holds the numbers that they must agree on, and both
//! work with regions of the current layout and of older ones. Regions of any other layout are reported and left as they
//! are.

pub mod arbiter;
pub mod audit;
pub mod clock;
mod error;
pub mod failpoint;
pub mod futex;
mod handle;
pub mod layout;
pub mod liveness_lock;
pub mod markers;
pub mod memory_account;
mod mmap;
mod owner;
pub mod protocol;
mod reader;
mod sync;
mod tenant;

#[cfg(test)]
mod tests;

pub use error::{RegionError, ReservationRefused};
pub use handle::{RegionHandle, inspect, is_in_use};
pub use layout::{GpuAccount, GpuLimits, ProcessLane, TurnWord};
pub use owner::{GpuShare, RegionOwner, RegionPolicy, TurnControl, TurnGate};
pub use protocol::{MAX_GPUS, MEMORY_UNIT, SLOT_COUNT, WHOLE_GPU};
pub use reader::{ComputeActivity, Forgery, GpuUsage, ProcessUsage, UsageReader, UsageSnapshot};
pub use tenant::{RegionTenant, TenantProcess};

/// Name of the file that holds the container's limits.
pub const LIMITS_FILE: &str = "limits";

/// Name of the file that holds what the container's processes use.
pub const USAGE_FILE: &str = "usage";
