//! The node agent: offers GPUs as Kubernetes resources, and gives containers exactly what they were granted.
//!
//! ```text
//!  kubelet ── device_plugin ──▶ containers ──▶ device_owner  which container holds these devices (kubelet's checkpoint, CRI)
//!                                    │    ───▶ grants        the pod's grant (the ledger, persisted by store)
//!                                    │    ───▶ cdi_edits     what the container gets (CDI specs)
//!                                    └───────▶ regions       limits, usage and turns (the node engine's shares)
//!
//!  app                from the configuration to a running agent: sessions, tasks, shutdown
//!  state              what all tasks share: the containers, and the connections to everything around the agent
//!  monitor            polls the driver: health of GPUs, bypasses of limits
//!  pod_annotations    writes grants on pods; resize applies the resizes that pods request
//!  device_plugin_set  the devices that kubelet is offered; node_status: amounts, inventory and labels of the node
//!  rejections         why kubelet rejected a pod; refusal_log: which refusals were logged already
//!  readiness          whether all resources are registered with kubelet; metrics: Prometheus
//!  container_runtime  finds and checks the runtime; gpu_discovery: the driver and the GPUs; retry: waits for both
//!  unserved_asks      asks that reach no plugin; runtime_watch: changes of the container runtime
//!  stale_mounts       directories that were replaced while they are mounted; cleanup: removes Partage from the node
//! ```
//!
//! The agent's whole state is also on disk, in kubelet or in the API server: it can be killed at any instruction.

mod api_server;
mod app;
pub mod cdi_edits;
mod cleanup;
mod config;
mod container_runtime;
mod containers;
pub mod device_owner;
pub mod device_plugin;
mod device_plugin_set;
mod gpu_discovery;
mod grants;
mod metrics;
mod monitor;
mod node_status;
mod oversubscription;
mod pod_annotations;
mod readiness;
mod refusal_log;
mod regions;
mod rejections;
mod report;
mod resize;
pub mod resources;
mod retry;
mod runtime_watch;
pub mod settings;
mod stale_mounts;
mod state;
mod store;
mod unserved_asks;

pub use app::TaskError;
pub use app::run;
pub use cleanup::clean_up;
pub use config::{AgentConfig, AgentError, SettingsCheckError};
pub use container_runtime::ContainerRuntimeError;
pub use containers::ContainerKey;
pub use stale_mounts::StaleMountError;
