//! NVIDIA's own runtime, where there is one: it must be told to leave our containers alone, and can come at any time.

use crate::node::NodeState;
use partage_cluster::Severity;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Whoever installs it restarts the container runtime, which takes longer.
const BEAT: Duration = Duration::from_secs(20);

const BY_DEFAULT: &str = "NVIDIA's container runtime runs all containers of this node: those that ask Partage for nothing and have \
     NVIDIA_VISIBLE_DEVICES in their image or manifest get GPUs from it that Partage has given to others; make runc the default runtime";
const BY_CHOICE: &str = "NVIDIA's container runtime can be chosen on this node: a pod whose runtimeClassName leads to it and that has \
     NVIDIA_VISIBLE_DEVICES in its manifest gets GPUs that Partage has given to others; let only those use that RuntimeClass whom you trust \
     with all GPUs";

/// Asks the container runtime, again and again, whether NVIDIA's stands beside it.
pub(crate) async fn keep_asking(state: Arc<NodeState>, stop: CancellationToken) {
    let mut told = "";
    while !stop.is_cancelled() {
        if let Ok(about) = state.runtime.about().await {
            if state.nvidia_runtime.swap(about.nvidia, Ordering::Relaxed) != about.nvidia {
                tracing::info!(is_there = about.nvidia, "NVIDIA's container runtime came or went");
            }
            let (reason, note) = match (about.nvidia_by_default, about.nvidia) {
                (true, _) => ("NvidiaRuntimeIsDefault", BY_DEFAULT),
                (false, true) => ("NvidiaRuntimeIsThere", BY_CHOICE),
                (false, false) => ("", ""),
            };
            if reason != told && !reason.is_empty() {
                tracing::warn!("{note}");
                state.tell_node(Severity::Warning, reason, note);
            }
            told = reason;
        }
        tokio::select! {
            () = tokio::time::sleep(BEAT) => {}
            () = stop.cancelled() => {}
        }
    }
}
