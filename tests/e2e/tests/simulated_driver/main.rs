//! `partage sim`: nodes, their environment, and what programs do on them.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod environment;
mod programs;
