//! Helpers of the end-to-end tests, which are in `tests/`, one binary per area.

pub mod late_plugin;
mod programs;

pub use programs::{partage, sample, testkit, xtask};
