//! Conformance cases of the projects that Partage replaces; `native` has Partage's own cases.
//!
//! A module has the cases of one project. Letter and number in a test's name only order the cases. Where the upstream result is random, Partage takes the lowest index.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod gpushare;
mod ledger;
mod native;
mod statements;
mod test_cluster;
mod vcuda;
mod volcano;
