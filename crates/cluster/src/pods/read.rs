//! From the API server's object to what is kept of it.

use super::view::{Phase, PodView};
use crate::connection::Watched;
use k8s_openapi::api::core::v1;
use kube::core::{ApiResource, Object};
use partage_core::model::{ContainerName, PodId};
use partage_core::pod::{Pod, Problem};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A pod with what is read of it. What is not here is not even held while it is read.
pub(crate) type LeanPod = Object<Spec, Status>;

impl Watched for LeanPod {
    fn resource() -> ApiResource {
        ApiResource::erase::<v1::Pod>(&())
    }
}

/// No text of ours or of a replaced system is longer; a tenant's may be, and there is not room for many of those.
const LONGEST: usize = 32 << 10;
/// The same for a pod that has ended: it holds nothing any more, and there may be thousands.
const LONGEST_OF_THE_FINISHED: usize = 4 << 10;
/// What kubelet says where a device plugin did not give what a pod asks.
const NO_DEVICES: &str = "UnexpectedAdmissionError";
/// All of the manifest once more.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// What annotations of dialects have in their names.
const OF_DIALECTS: [&str; 9] = [
    "partage.dev/",
    "volcano.sh/",
    "aliyun.com/",
    "ALIYUN_COM_",
    "gpushare",
    "hami.io/",
    "nvidia.com/",
    "vcuda",
    "/predicate-",
];

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Spec {
    init_containers: Vec<Container>,
    containers: Vec<Container>,
    ephemeral_containers: Vec<Container>,
    resources: Value,
    /// No ask: of no use to who reads those.
    #[serde(skip_serializing)]
    termination_grace_period_seconds: Option<i64>,
}

impl Spec {
    /// The time that its containers ask for to end, in seconds.
    pub(super) fn grace(&self) -> Option<i64> {
        self.termination_grace_period_seconds
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Container {
    name: String,
    restart_policy: Option<String>,
    resources: Value,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Status {
    phase: String,
    reason: String,
    message: String,
    init_container_statuses: Vec<ContainerStatus>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct ContainerStatus {
    name: String,
    state: State,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct State {
    terminated: Option<Terminated>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Terminated {
    exit_code: i32,
}

impl Container {
    /// Whether it names a resource that is not the node's own.
    fn asks(&self) -> bool {
        let named = |key: &str| {
            self.resources[key].as_object().is_some_and(|all| all.keys().any(|r| r.contains('/')))
        };
        named("limits") || named("requests")
    }
}

/// What is kept. Every object of the server has a UID and a name; one that has none is no pod.
pub(crate) fn view(object: LeanPod) -> Option<PodView> {
    let meta = object.metadata;
    let id = PodId { uid: meta.uid?.into(), namespace: meta.namespace?.into(), name: meta.name?.into() };
    let all = object.spec.init_containers.iter().chain(&object.spec.containers);
    let status = object.status.unwrap_or_default();
    let finished = matches!(status.phase.as_str(), "Succeeded" | "Failed");
    let most = if finished { LONGEST_OF_THE_FINISHED } else { LONGEST };
    let asks = all.chain(&object.spec.ephemeral_containers).any(Container::asks);
    let mut problems = Vec::new();
    let mut keep = |field: &str, texts: Option<BTreeMap<String, String>>| {
        kept(texts.filter(|_| asks).unwrap_or_default(), most).unwrap_or_else(|bytes| {
            let words = "those of dialects of GPUs have";
            let message = format!("{words} {bytes} bytes together, and {most} are read: remove some");
            problems.push(Problem::of_pod(field, message));
            BTreeMap::new()
        })
    };
    let metadata = json!({
        "labels": keep("metadata.labels", meta.labels),
        "annotations": keep("metadata.annotations", meta.annotations),
    });
    let spec = serde_json::to_value(&object.spec).unwrap_or_default();
    let (pod, more) = Pod::read(&metadata, &spec);
    problems.extend(more);
    let succeeded = |status: &ContainerStatus| {
        status.state.terminated.as_ref().is_some_and(|terminated| terminated.exit_code == 0)
    };
    Some(PodView {
        id,
        pod,
        problems,
        phase: match status.phase.as_str() {
            "Running" => Phase::Running,
            "Succeeded" => Phase::Succeeded,
            "Failed" => Phase::Failed,
            "Pending" | "" => Phase::Pending,
            _ => Phase::Unknown,
        },
        rejected: (status.phase == "Failed" && status.reason == NO_DEVICES).then(|| status.message.clone()),
        created: meta.creation_timestamp.map_or(0, |time| time.0.as_second()),
        finished_inits: status
            .init_container_statuses
            .into_iter()
            .filter(succeeded)
            .map(|status| ContainerName::from(status.name))
            .collect(),
    })
}

/// What of it is kept; how much it would be, where that is too much: half an ask is none.
fn kept(mut texts: BTreeMap<String, String>, most: usize) -> Result<BTreeMap<String, String>, usize> {
    let size = |texts: &BTreeMap<String, String>| -> usize {
        texts.iter().map(|(key, text)| key.len() + text.len()).sum()
    };
    let of_a_dialect = |key: &str| OF_DIALECTS.iter().any(|part| key.contains(part));
    texts.retain(|key, text| key != LAST_APPLIED && (text.len() <= LONGEST || of_a_dialect(key)));
    // A tenant may write 256 KiB on each of its pods: then only what may be an ask or a grant is kept.
    if size(&texts) > most {
        texts.retain(|key, _| of_a_dialect(key));
    }
    match size(&texts) {
        bytes if bytes > most => Err(bytes),
        _ => Ok(texts),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(mut object: Value) -> PodView {
        object["metadata"]["uid"] = "u".into();
        object["metadata"]["namespace"] = "n".into();
        object["metadata"]["name"] = "p".into();
        super::view(serde_json::from_value(object).unwrap()).unwrap()
    }

    #[test]
    fn only_what_is_needed_is_kept() {
        let annotations =
            json!({LAST_APPLIED: "{}", "long": "x".repeat(LONGEST + 1), "partage.dev/policy": "spread"});
        let asking = json!({
            "metadata": {"annotations": annotations, "labels": {"app": "a"}, "deletionTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {
                "initContainers": [{"name": "fetch"}, {"name": "proxy", "restartPolicy": "Always"}],
                "containers": [{"name": "main", "image": "x", "resources": {"limits": {"partage.dev/gpu": "1"}}}],
            },
            "status": {
                "phase": "Pending",
                "initContainerStatuses": [
                    {"name": "fetch", "state": {"terminated": {"exitCode": 0}}},
                    {"name": "proxy", "state": {"running": {}}},
                ],
            },
        });
        let seen = view(asking.clone());
        assert_eq!(seen.problems, []);
        assert_eq!(
            seen.pod.annotations,
            BTreeMap::from([("partage.dev/policy".to_string(), "spread".to_string())])
        );
        assert_eq!(seen.pod.labels["app"], "a");
        assert_eq!(seen.pod.containers.len(), 3);
        assert_eq!(seen.pod.containers[2].amount("partage.dev/gpu"), Some("1"));
        assert!(seen.phase == Phase::Pending && !seen.is_finished());
        assert_eq!(seen.finished_inits, ["fetch".into()].into());

        let mut plain = asking;
        plain["spec"]["containers"][0]["resources"] = json!({"limits": {"cpu": "1"}});
        let seen = view(plain);
        assert!(seen.pod.annotations.is_empty() && seen.pod.labels.is_empty());
    }

    #[test]
    fn nobody_fills_the_memory_with_annotations() {
        let of = |count: usize, length: usize, phase: &str| {
            let annotations: BTreeMap<String, String> =
                (0..count).map(|at| (format!("partage.dev/x{at}"), "x".repeat(length))).collect();
            let limits = json!({"limits": {"partage.dev/gpu": "1"}});
            view(json!({
                "metadata": {"annotations": annotations},
                "spec": {"containers": [{"name": "main", "resources": limits}]},
                "status": {"phase": phase},
            }))
        };
        let few = of(2, 5000, "Pending");
        assert_eq!((few.pod.annotations.len(), few.problems.len()), (2, 0));
        assert_eq!(of(1, LONGEST + 1, "Pending").problems.len(), 1, "half an ask is none");
        let many = of(8, 5000, "Pending");
        assert_eq!(many.pod.annotations.len(), 0);
        let said: Vec<_> =
            many.problems.iter().map(|one| (one.field.as_str(), one.message.as_str())).collect();
        let words = "those of dialects of GPUs have 40112 bytes together, and 32768 are read: remove some";
        assert_eq!(said, [("metadata.annotations", words)]);
        assert_eq!(of(2, 5000, "Failed").pod.annotations.len(), 0, "it has ended");
    }

    #[test]
    fn what_kubelet_says_of_a_pod_it_did_not_take_is_kept() {
        let of = |phase: &str, reason: &str| {
            let status = json!({"phase": phase, "reason": reason, "message": "Pod was rejected: why"});
            view(json!({"spec": {"containers": [{"name": "main"}]}, "status": status})).rejected
        };
        assert_eq!(of("Failed", NO_DEVICES).as_deref(), Some("Pod was rejected: why"));
        assert_eq!((of("Running", NO_DEVICES), of("Failed", "Evicted")), (None, None));
    }

    #[test]
    fn an_init_container_that_failed_has_not_finished() {
        let seen = view(json!({
            "spec": {"initContainers": [{"name": "fetch"}], "containers": [{"name": "main"}]},
            "status": {"phase": "Running", "initContainerStatuses": [
                {"name": "fetch", "state": {"terminated": {"exitCode": 1}}},
            ]},
        }));
        assert!(seen.finished_inits.is_empty());
        assert_eq!(seen.phase, Phase::Running);
    }
}
