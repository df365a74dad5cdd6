//! A real Kubernetes and simulated GPUs for Partage's tests. Nothing here reaches the product: other crates use it in tests only.
//!
//! The programs, images and clients that it needs are built by `partage-xtask` (`make binaries`).

pub mod agent;
pub mod bed;
pub mod cluster;
pub mod extender;
pub mod fake_nodes;
pub mod fetch;
pub mod openmetrics;
pub mod pages;
pub mod sim_node;
pub mod webhook;
pub mod workload;

mod eventually;
mod serving;
mod skip;

pub use eventually::eventually;
pub use partage_xtask::{binaries, clients, image, manifests, portable};
pub use serving::ServeError;
pub use skip::skip_or_fail;
