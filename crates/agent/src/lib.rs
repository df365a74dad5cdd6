//! The node daemon: offers GPUs as resources, and gives containers exactly what they were granted.
//!
//! ```text
//!  kubelet ── plugin ──▶ containers ──▶ identity   whose device ids are these? (kubelet's checkpoint, the container runtime)
//!                             │    ───▶ grants     what does that pod hold? (the ledger, kept by store)
//!                             │    ───▶ inject     what does the container get? (CDI specs)
//!                             └───────▶ regions    limits, usage and turns (the node engine's shares)
//!
//!  app              from the configuration to a running agent: sessions, tasks, shutdown
//!  state            what all tasks work on: the containers, and the connections to everything around the agent
//!  look             polls the driver: health of GPUs, bypasses of limits
//!  pod_annotations  writes grants on pods; resize answers the resizes that pods request
//!  device_plugins   which devices kubelet is offered; publish: what the node says of itself
//!  rejections       why kubelet rejected a pod; refusals: which refusals were logged already
//!  progress         readiness and metrics
//!  find             the container runtime, the driver, the GPUs
//!  uncounted        requests that kubelet brings to no plugin; other_runtime: NVIDIA's own container runtime
//!  mounted          directories that were replaced while they are mounted; withdraw: removes Partage from the node
//! ```
//!
//! Everything it knows is on disk, in kubelet or in the API server: it can be killed at any instruction.

mod api_server;
mod app;
mod config;
mod containers;
mod device_plugins;
mod find;
mod grants;
pub mod identity;
pub mod inject;
mod look;
mod metrics;
mod mounted;
mod other_runtime;
mod oversubscription;
pub mod plugin;
mod pod_annotations;
pub mod processes;
mod progress;
mod publish;
mod refusals;
mod regions;
mod rejections;
mod report;
mod resize;
pub mod resources;
pub mod settings;
mod state;
mod store;
mod suspected;
mod uncounted;
mod withdraw;

pub use app::run;
pub use config::{AgentError, Config};
pub use withdraw::withdraw;
