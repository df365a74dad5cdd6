//! The test bed itself, and behavior of the real API server, scheduler and kubelet that the design relies on.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod admission;
mod fake_nodes;
mod kubectl_access;
mod lifecycle;
mod scheduling;
