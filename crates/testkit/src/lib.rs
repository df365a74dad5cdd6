//! A real Kubernetes for Partage's tests. Nothing here reaches the product: other crates use it in tests only.

pub mod binaries;
mod eventually;
pub mod extender;
pub mod fake_nodes;
mod serving;
pub mod webhook;

pub use eventually::eventually;
pub use serving::{Certificate, ServeError};
