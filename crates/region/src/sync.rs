//! The atomics of the memory account. Its model test compiles the same source with those of a model checker.

pub(crate) use core::sync::atomic::{AtomicU64, Ordering};
