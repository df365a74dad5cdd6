//! The node agent on a real kubelet, containerd and API server, as its users see it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

mod agent_crashes;
mod agent_upgrade;
mod cdi_injection;
mod consistency;
mod container_kinds;
mod containerd_1_7;
mod dependency_outages;
mod device_filter;
mod extender_grants;
mod gpu_health;
mod gpu_sharing;
mod grant_lifecycle;
mod kubelet_registration;
mod late_binding;
mod late_plugin;
mod metrics;
mod node_reboot;
mod oversubscribe;
mod pod_identity;
mod recording_plugin;
mod refusals_and_resize;
mod replaced_systems;
mod runtime_changes;
mod settings_reload;
mod shared_spec;
mod simulated_driver_pods;
mod tenant_attacks;
mod test_node;
