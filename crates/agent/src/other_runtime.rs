//! The container runtime while the agent runs. Whoever restarts it may have changed it: NVIDIA's own can stand beside it, and must be
//! told to leave our containers alone; CDI can be off.

use crate::find::check_cdi;
use crate::state::NodeState;
use partage_cluster::Severity;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Whoever installs something restarts the container runtime, which takes longer.
const BEAT: Duration = Duration::from_secs(20);

const BY_DEFAULT: &str = "NVIDIA's container runtime runs all containers of this node: those that ask Partage for nothing and have \
     NVIDIA_VISIBLE_DEVICES in their image or manifest get GPUs from it that Partage has given to others; make runc the default runtime";
const BY_CHOICE: &str = "NVIDIA's container runtime can be chosen on this node: a pod whose runtimeClassName leads to it and that has \
     NVIDIA_VISIBLE_DEVICES in its manifest gets GPUs that Partage has given to others; let only those use that RuntimeClass whom you trust \
     with all GPUs";

const BY_CHECKPOINT: &str = "this containerd takes CDI devices from the annotations of a checkpoint image (CVE-2026-53492): who may make pods can \
     have any device that a CDI file on this node describes; install containerd 2.1.9, 2.2.5, 2.3.2 or newer";

/// Asks the container runtime, again and again, what it is. Ends where it can no longer be used: containers would start without what
/// they were granted, and the agent after this one says why.
pub(crate) async fn keep_asking(state: Arc<NodeState>, cdi: PathBuf, stop: CancellationToken) {
    let (mut told, mut warned) = ("", false);
    while !stop.is_cancelled() {
        if let Ok(about) = state.adapters.runtime.about().await {
            if let Err(why) = check_cdi(&cdi, &about) {
                tracing::error!("the container runtime has changed: {why}");
                return;
            }
            if about.trusts_checkpoints && !std::mem::replace(&mut warned, true) {
                tracing::warn!("{BY_CHECKPOINT}");
                state.tell_node(Severity::Warning, "RuntimeTrustsCheckpoints", BY_CHECKPOINT);
            }
            if state.machine.nvidia_runtime.swap(about.nvidia, Ordering::Relaxed) != about.nvidia {
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
