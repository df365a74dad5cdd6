//! One machine, end to end: every command of the local mode as people type it, and their mistakes.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod commands;
mod limits;
mod mistakes;
mod picture;
mod resize;
mod stop;
mod support;
mod top;
mod views;
