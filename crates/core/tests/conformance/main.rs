//! The conformance cases of the systems Partage replaces, each test named after its case.
//!
//! T, L, F, S, A and D come from tkestack gpu-manager and gpu-admission, B from Aliyun gpushare, C from
//! Volcano vGPU; `ours` has cases of our own. Where upstream's answer depends on chance, ours is the lowest index.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod gpushare;
mod ledger;
mod ours;
mod statements;
mod vcuda;
mod volcano;
mod world;
