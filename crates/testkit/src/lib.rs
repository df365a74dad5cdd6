//! A real Kubernetes and simulated GPUs for Partage's tests. Nothing here reaches the product: other crates use it in tests only.

pub mod agent;
pub mod bed;
pub mod binaries;
pub mod clients;
pub mod cluster;
pub mod extender;
pub mod fake_nodes;
pub mod fetch;
pub mod image;
pub mod manifests;
pub mod openmetrics;
pub mod pages;
pub mod plugin;
pub mod portable;
pub mod sim_node;
pub mod webhook;
pub mod workload;

mod debian;
mod digest;
mod eventually;
mod machine;
mod missing;
mod process;
mod progress;
mod python;
mod serving;
mod space;
mod work;

pub use eventually::eventually;
pub use serving::ServeError;
