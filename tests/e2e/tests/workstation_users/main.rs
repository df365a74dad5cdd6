//! One machine, end to end: several users, waiting, `partage up`, and recovery when daemons are killed.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod daemon_socket;
mod daemon_upgrade;
mod queue;
mod random_kills;
mod shared_machine;
#[path = "../workstation/support.rs"]
mod support;
mod up_command;
mod user_isolation;
