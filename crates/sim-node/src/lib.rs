//! Simulated GPU nodes: everything that daemons and commands need to create and inspect one.
//!
//! [`profile`] describes the GPU models, [`node`] the directory of a simulated node, [`state`] the memory that its
//! processes share, and [`install`] writes the two libraries of a driver version into it. The crate
//! `partage-sim-driver` implements the libraries themselves.

mod embedded_config;
pub mod install;
pub mod node;
pub mod profile;
pub mod state;
