//! The node agent on a real kubelet, containerd and API server, as its users see it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

mod agreement;
mod asking;
mod attacks;
mod away;
mod changes;
mod containers;
mod device_gate;
mod device_plugin;
mod extender;
mod grants;
mod health;
mod identity;
mod inject;
mod kills;
mod kubelet;
mod late_plugin;
mod metrics;
mod oldest;
mod oversubscribe;
mod reboot;
mod recorder;
mod seeds;
mod settings;
mod shared_spec;
mod sharing;
mod sim_pods;
mod stage;
mod upgrade;
