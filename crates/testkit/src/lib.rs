//! A real Kubernetes for Partage's tests. Nothing here reaches the product: other crates use it in tests only.

pub mod binaries;
mod eventually;
pub mod fake_nodes;

pub use eventually::eventually;
