//! The node agent on a real kubelet, containerd and API server, as its users see it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

#[path = "node/agreement.rs"]
mod agreement;
#[path = "node/asking.rs"]
mod asking;
#[path = "node/attacks.rs"]
mod attacks;
#[path = "node/away.rs"]
mod away;
#[path = "node/changes.rs"]
mod changes;
#[path = "node/containers.rs"]
mod containers;
#[path = "node/extender.rs"]
mod extender;
#[path = "node/grants.rs"]
mod grants;
#[path = "node/health.rs"]
mod health;
#[path = "node/identity.rs"]
mod identity;
#[path = "node/kills.rs"]
mod kills;
#[path = "node/metrics.rs"]
mod metrics;
#[path = "node/oldest.rs"]
mod oldest;
#[path = "node/reboot.rs"]
mod reboot;
#[path = "node/seeds.rs"]
mod seeds;
#[path = "node/settings.rs"]
mod settings;
#[path = "node/sharing.rs"]
mod sharing;
#[path = "node/stage.rs"]
mod stage;
