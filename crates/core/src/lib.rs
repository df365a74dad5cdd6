//! What Partage decides, and nothing else: pure functions with no I/O, no clock and no `unsafe`.
#![forbid(unsafe_code)]

pub mod check;
pub mod cluster_file;
pub mod dialect;
pub mod explain;
pub mod ledger;
pub mod manifest;
pub mod model;
pub mod place;
pub mod pod;
pub mod quantity;
mod quote;
pub mod resize;
pub mod simulate;
#[cfg(test)]
pub(crate) mod testing;
