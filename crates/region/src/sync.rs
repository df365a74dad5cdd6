//! The atomics of the ledger. Its model test compiles the same source with the ones of a model checker.

pub(crate) use core::sync::atomic::{AtomicU64, Ordering};
