//! Conformance cases of the projects that Partage replaces. Each test is named after its case.
//!
//! T, L, F, S, A and D come from tkestack gpu-manager and gpu-admission, B from Aliyun gpushare, C from
//! Volcano vGPU; `native` has Partage's own cases. Where the upstream result is random, Partage takes the lowest index.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod gpushare;
mod ledger;
mod native;
mod statements;
mod test_cluster;
mod vcuda;
mod volcano;
