//! A real Kubernetes for Partage's tests. Nothing here reaches the product: other crates use it in tests only.

pub mod bed;
pub mod binaries;
pub mod cluster;
pub mod extender;
pub mod fake_nodes;
pub mod image;
pub mod plugin;
pub mod webhook;

mod debian;
mod digest;
mod eventually;
mod machine;
mod missing;
mod process;
mod progress;
mod serving;
mod space;
mod work;

pub use eventually::eventually;
pub use serving::ServeError;
