//! The node daemon: GPUs become resources, and containers get exactly what they were granted.
//!
//! ```text
//!  kubelet ── plugin ──▶ node ──▶ identity   whose device ids are these? (kubelet, the container runtime)
//!                         │  ───▶ book       what does that pod hold? (the ledger, kept by checkpoint)
//!                         │  ───▶ inject     what does the container get? (CDI file)
//!                         └─────▶ regions    its limits and usage, the arbiter's turns
//!
//!  look     asks the driver again and again: health, the audit   publish  what the node says of itself
//!  sweep    gives back what has ended, removes what is nobody's  wishes   what pods say, and other amounts for them
//!  progress what probes and Prometheus are told (metrics)        offers   devices and amounts, as they are now
//!  find     the runtime, the driver, the GPUs                    uncounted  asks that kubelet brings to nobody
//!  audit    where the book, kubelet and the regions disagree
//!  suspected  containers with a recent bypass finding                refusals which refusals were logged already
//!  mounted  folders that were made again behind its back         other_runtime  NVIDIA's own, told to leave containers alone
//!  run      all of it, from start to end
//! ```
//!
//! Everything it knows is on disk, in kubelet or in the API server: it can be killed at any instruction.

mod api_server;
mod app;
mod audit;
mod book;
mod checkpoint;
mod config;
mod containers;
mod find;
pub mod identity;
pub mod inject;
mod look;
mod metrics;
mod mounted;
mod node;
mod offers;
mod other_runtime;
pub mod plugin;
pub mod processes;
mod progress;
mod publish;
mod refusals;
mod regions;
mod report;
pub mod resources;
pub mod settings;
mod suspected;
mod sweep;
mod uncounted;
mod wishes;
mod withdraw;

pub use app::run;
pub use config::{AgentError, Config};
pub use withdraw::withdraw;
