//! `partage sim`: nodes, their environment, and programs on them.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod environment;
mod programs;
