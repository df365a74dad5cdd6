//! Simulated GPU nodes: what daemons and commands need to make one and to look into it.
//!
//! [`profile`] has the cards, [`node`] the folder that is a simulated node, [`state`] what its processes share, and
//! [`install`] writes the two libraries of a driver version into it. The libraries themselves are the crate
//! `partage-sim-driver`.

mod embedded_config;
pub mod install;
pub mod node;
pub mod profile;
pub mod state;
