//! A simulated NVIDIA driver that programs take for the real one: the two libraries, the cards, the nodes.
//!
//! [`profile`] knows the cards, [`node`] the folder that is a simulated node, and [`install`] writes the two
//! libraries of a driver version into it.

mod cuda;
pub mod install;
pub mod node;
mod nvml;
pub mod profile;
pub mod state;
mod table;
mod written;
