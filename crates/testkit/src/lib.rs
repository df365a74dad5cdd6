//! Runs a real Kubernetes and simulated GPUs for Partage's tests. The product does not depend on this crate: other
//! crates use it in tests only.
//!
//! `partage-xtask` (`make binaries`) builds the programs, images and clients that it needs.

pub mod agent;
pub mod bed;
pub mod cluster;
pub mod doc_pages;
pub mod extender;
pub mod fake_nodes;
pub mod http_client;
pub mod openmetrics;
pub mod sim_node;
pub mod webhook;
pub mod workload;

mod eventually;
mod skip;
mod test_server;

pub use eventually::eventually;
pub use partage_xtask::{binaries, clients, image, manifests, portable_shim};
pub use skip::skip_or_fail;
pub use test_server::ServeError;
