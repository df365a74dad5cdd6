//! What the end-to-end tests share. The tests are in `tests/`, one binary per area.

pub mod late_plugin;
mod program;

pub use program::{partage, sample, testkit, xtask};
