//! Properties that hold for every cluster, every ask and every order of events.
//!
//! `PROPTEST_CASES=20000 cargo test --test properties` tries more cases; `make soak` does.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod allocator;
mod snapshots;
mod statements;
mod strategies;
