//! One machine without Kubernetes: its shares, their owners, and the daemon that grants and releases them.
//!
//! ```text
//!  partage run ── request ──▶ daemon ── places (core), prepares the region, gives turns (enforce)
//!      │  confines itself to the share, becomes the command
//!      ▼
//!  the command and its children ── when the last one has exited, the daemon releases the share
//! ```
//!
//! A state directory ([`state_dir`]) has one daemon. The first command starts it, and it exits some time after the last
//! share; `partage up` is the same daemon in the foreground. All of its state is in files: it can be killed at any
//! time, and the next one adopts the running shares.

pub mod admission;
pub mod client;
pub mod daemon;
pub mod log_file;
mod machine;
pub mod metrics;
pub mod protocol;
pub mod report;
pub mod run;
pub mod settings;
mod share_store;
pub mod state_dir;
pub mod users;

pub use machine::{MachineError, check};
