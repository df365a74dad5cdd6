//! Writes events on pods that kubelet rejected: the reason, and what happens next.

use crate::resources::CountResource;
use crate::settings::AgentSettings;
use crate::state::{NodeState, now};
use partage_cluster::{PodView, Severity};
use partage_core::model::PodUid;
use std::collections::BTreeSet;
use std::time::Duration;

/// Maximum age of a rejected pod that still gets an event: an earlier agent has explained older ones.
const MAX_REJECTION_AGE: Duration = Duration::from_secs(600);

/// Writes an event on each pod that kubelet rejected: why, and what happens next.
pub(crate) fn report(state: &NodeState, reported: &mut BTreeSet<PodUid>) {
    let pods = state.adapters.pods.all();
    reported.retain(|uid| pods.iter().any(|pod| pod.id.uid == *uid));
    for pod in pods.iter().filter(|pod| requests_served_resource(pod, &state.settings())) {
        let Some(message) = &pod.rejected else { continue };
        let record_boot = state.containers().grants().record(&pod.id.uid).map(|record| record.boot.clone());
        let earlier = record_boot.map(|boot| boot != state.machine.boot);
        let created = u64::try_from(pod.created).unwrap_or(0);
        let recent = now() / 1_000_000_000 < created + MAX_REJECTION_AGE.as_secs();
        if (earlier.is_none() && !recent) || !reported.insert(pod.id.uid.clone()) {
            continue;
        }
        let (reason, why) = classify_rejection(message, earlier == Some(true));
        let note = format!(
            "{why}: kubelet failed the pod (UnexpectedAdmissionError); its shares are released. Its controller creates a replacement; \
             create a pod without a controller again"
        );
        state.adapters.cluster.pod_event(&pod.id, Severity::Warning, reason, &note);
    }
}

/// Returns whether a pod requests a resource that this node serves.
pub(crate) fn requests_served_resource(pod: &PodView, settings: &AgentSettings) -> bool {
    let resources: Vec<String> = CountResource::enabled(settings).iter().map(CountResource::name).collect();
    let is_requested =
        |resource: &String| pod.pod.containers.iter().any(|one| one.amount(resource).is_some());
    resources.iter().any(is_requested)
}

/// Parts of kubelet's message if it has no device plugin, or lost the connection to it while it waited for a response. The agent's
/// own refusals have the code `FailedPrecondition`.
const AGENT_UNAVAILABLE: [&str; 5] = [
    "no healthy devices present",
    "unregistered device",
    "has been stopped",
    "code = Unavailable",
    "code = Canceled",
];

/// Returns the event reason and the cause of a rejection, from kubelet's message.
fn classify_rejection(message: &str, rebooted: bool) -> (&'static str, String) {
    // Without kubelet's prefix and suffix.
    let plain =
        message.trim_start_matches("Pod was rejected: ").trim_start_matches("Allocate failed due to ");
    let plain = plain.trim_end_matches(", which is unexpected").trim_end_matches('.');
    if message.is_empty() || AGENT_UNAVAILABLE.iter().any(|part| message.contains(part)) {
        let why = if rebooted {
            "the node was rebooted, and kubelet admitted its pods before the Partage agent had registered"
        } else {
            "kubelet admitted the pod while the Partage agent was unavailable"
        };
        return ("AgentUnavailable", why.into());
    }
    let why = if message.contains("requested number of devices unavailable") {
        format!(
            "kubelet has fewer free devices than the pod requests, for example because another pod was admitted first ({plain})"
        )
    } else if message.contains("rpc error") {
        format!("the Partage agent refused the pod's devices ({plain})")
    } else {
        format!("kubelet rejected the pod ({plain})")
    };
    ("NotAdmitted", why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejection_quotes_kubelet_unless_the_agent_was_unavailable() {
        let away = "Pod was rejected: Allocate failed due to no healthy devices present; cannot allocate unhealthy devices partage.dev/gpu, which is unexpected";
        assert_eq!(classify_rejection(away, false).0, "AgentUnavailable");
        assert!(classify_rejection(away, true).1.starts_with("the node was rebooted"));
        let unregistered = "Pod was rejected: Allocate failed due to can't allocate unregistered device partage.dev/gpu, which is unexpected";
        assert_eq!(classify_rejection(unregistered, false).0, "AgentUnavailable");
        for (message, why) in [
            (
                "Pod was rejected: Allocate failed due to requested number of devices unavailable for partage.dev/gpu. Requested: 3, Available: 1, which is unexpected",
                "kubelet has fewer free devices than the pod requests, for example because another pod was admitted first (requested number of devices \
                 unavailable for partage.dev/gpu. Requested: 3, Available: 1)",
            ),
            (
                "Pod was rejected: Allocate failed due to rpc error: code = FailedPrecondition desc = the answer cannot be recorded: no space left, which is unexpected",
                "the Partage agent refused the pod's devices (rpc error: code = FailedPrecondition desc = the answer \
                 cannot be recorded: no space left)",
            ),
            ("Pod was rejected: something new", "kubelet rejected the pod (something new)"),
        ] {
            assert_eq!(classify_rejection(message, false), ("NotAdmitted", why.to_string()));
            assert_eq!(classify_rejection(message, true).1, why, "a reboot has nothing to do with it");
        }
    }

    #[test]
    fn connection_lost_during_allocate_is_not_a_refusal() {
        for message in [
            "Pod was rejected: Allocate failed due to rpc error: code = Canceled desc = grpc: the client connection is closing, which is unexpected",
            "Pod was rejected: Allocate failed due to rpc error: code = Unavailable desc = error reading from server: EOF, which is unexpected",
        ] {
            assert_eq!(
                classify_rejection(message, false),
                (
                    "AgentUnavailable",
                    "kubelet admitted the pod while the Partage agent was unavailable".to_string()
                )
            );
        }
    }
}
