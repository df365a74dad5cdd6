//! The decisions of Partage as pure functions: dialects, placement, ledger and explanations. No I/O, no clock, no `unsafe`.
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
pub mod replay;
pub mod resize;
mod truncate;

#[cfg(test)]
pub(crate) mod testing;
