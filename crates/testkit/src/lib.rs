//! A real Kubernetes for Partage's tests. Nothing here reaches the product: other crates use it in tests only.

pub mod bed;
pub mod binaries;
pub mod cluster;
pub mod image;
pub mod plugin;

mod debian;
mod digest;
mod machine;
mod missing;
mod process;
mod progress;
mod space;
mod work;
