//! The test bed itself, and what the design leans on: what a real API server, scheduler and kubelet do.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod access;
mod admission;
mod fake_nodes;
mod lifecycle;
mod scheduling;
