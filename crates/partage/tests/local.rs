//! One machine, end to end: every command of the local mode as people type it, and their mistakes.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "local/commands.rs"]
mod commands;
#[path = "local/limits.rs"]
mod limits;
#[path = "local/mistakes.rs"]
mod mistakes;
#[path = "local/resize.rs"]
mod resize;
#[path = "local/stop.rs"]
mod stop;
#[path = "local/support.rs"]
mod support;
