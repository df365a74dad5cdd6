//! One machine without Kubernetes: its shares, whose they are, and the daemon that grants and releases them.
//!
//! ```text
//!  partage run ── request ──▶ daemon ── places (core), prepares the region, gives turns (enforce)
//!      │  confines itself to the share, becomes the command
//!      ▼
//!  the command and its children ── when the last one has ended, the daemon releases the share
//! ```
//!
//! A state directory ([`home`]) has one daemon. The first command starts it, and it ends some time after the last share;
//! `partage up` is the same daemon in the foreground. Everything it knows is in files: it can be killed at any time, and the next
//! one adopts what runs.

pub mod client;
pub mod daemon;
pub mod decide;
pub mod home;
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
