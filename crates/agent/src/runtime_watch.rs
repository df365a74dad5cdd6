//! Watches the container runtime while the agent runs: a restart may have changed its configuration.
//!
//! NVIDIA's own runtime can be installed as a handler, and then has to be kept from adding GPUs to the agent's containers; CDI
//! can be disabled.

use crate::container_runtime::check_cdi;
use crate::state::NodeState;
use partage_cluster::Severity;
use partage_enforce::error_chain::describe;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Interval between two polls of the runtime. Installing another runtime and restarting it takes longer.
const POLL_INTERVAL: Duration = Duration::from_secs(20);

const NVIDIA_DEFAULT_NOTE: &str = "NVIDIA's container runtime is the default runtime of this node: containers that request nothing from Partage and \
     set NVIDIA_VISIBLE_DEVICES in their image or manifest get GPUs that Partage has granted to others; make runc the default runtime";
const NVIDIA_AVAILABLE_NOTE: &str = "NVIDIA's container runtime is available on this node: a pod that selects it by runtimeClassName and sets \
     NVIDIA_VISIBLE_DEVICES in its manifest gets GPUs that Partage has granted to others; allow that RuntimeClass only to users who may use \
     all GPUs";

const CHECKPOINT_NOTE: &str = "this containerd takes CDI devices from the annotations of a checkpoint image (CVE-2026-53492): users who may create \
     pods can get any device that a CDI spec on this node describes; install containerd 2.1.9, 2.2.5, 2.3.2 or newer";

/// Polls the container runtime's configuration until stopped. Returns early if the runtime can no longer be used: containers would
/// start without their grants, and the restarted agent reports why.
pub(crate) async fn run(state: Arc<NodeState>, cdi: PathBuf, stop: CancellationToken) {
    let mut reported = "";
    let mut is_vulnerability_reported = false;
    while !stop.is_cancelled() {
        if let Ok(info) = state.adapters.runtime.info().await {
            if let Err(error) = check_cdi(&cdi, &info) {
                tracing::error!(error = %describe(&error), "the container runtime can no longer be used");
                return;
            }
            if info.trusts_checkpoints && !std::mem::replace(&mut is_vulnerability_reported, true) {
                tracing::warn!(
                    version = info.version,
                    advice = CHECKPOINT_NOTE,
                    "container runtime is vulnerable"
                );
                state.node_event(Severity::Warning, "ContainerRuntimeVulnerable", CHECKPOINT_NOTE);
            }
            if state.machine.nvidia_runtime.swap(info.nvidia, Ordering::Relaxed) != info.nvidia {
                tracing::info!(available = info.nvidia, "availability of NVIDIA's container runtime changed");
            }
            let (reason, note) = match (info.nvidia_by_default, info.nvidia) {
                (true, _) => ("NvidiaRuntimeDefault", NVIDIA_DEFAULT_NOTE),
                (false, true) => ("NvidiaRuntimeAvailable", NVIDIA_AVAILABLE_NOTE),
                (false, false) => ("", ""),
            };
            if reason != reported && !reason.is_empty() {
                tracing::warn!(advice = note, "NVIDIA's container runtime exposes GPUs without Partage");
                state.node_event(Severity::Warning, reason, note);
            }
            reported = reason;
        }
        tokio::select! {
            () = tokio::time::sleep(POLL_INTERVAL) => {}
            () = stop.cancelled() => {}
        }
    }
}
