//! One machine without Kubernetes: its shares, who they belong to, and the keeper that gives and takes them.
//!
//! ```text
//!  partage run ── asks ──▶ keeper ── decides (core), makes the region, deals turns (arbiter)
//!      │  binds itself to the share, becomes the command
//!      ▼
//!  the command and its children ── when the last one has ended, the keeper takes everything back
//! ```
//!
//! There is one keeper in a [`home`]. It is started by whoever needs it and ends with the last share; `partage up` is the same
//! keeper in the foreground. All it knows is in files: kill it at any time, and the next one goes on from them.

pub mod client;
pub mod decide;
pub mod home;
pub mod keeper;
pub mod log_file;
mod machine;
pub mod metrics;
pub mod report;
pub mod run;
pub mod settings;
mod store;
pub mod users;
pub mod wire;

pub use machine::{MachineError, check};
