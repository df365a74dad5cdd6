//! One machine, end to end: every command of the workstation mode, and user errors.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod command_behavior;
mod limits;
mod ps_inspect;
mod readme_image;
mod resize;
mod stop;
mod support;
mod top_terminal;
mod user_errors;
