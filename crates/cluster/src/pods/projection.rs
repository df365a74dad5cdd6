//! Decodes a pod into the part that is kept.

use super::view::{PodPhase, PodView};
use crate::watch::Projection;
use k8s_openapi::api::core::v1;
use kube::core::{ApiResource, Object};
use kube::{Api, Client};
use partage_core::model::{ContainerName, PodId};
use partage_core::pod::{PodManifest, Problem};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A pod with only the fields that are read. Other fields are not even held while the object is decoded.
pub(crate) type LeanPod = Object<PodSpec, PodStatus>;

/// Keeps a [`PodView`] of each pod.
#[derive(Debug)]
pub struct PodProjection;

/// Bytes of labels or annotations that are kept of a pod. No text of Partage or of a replaced system is longer.
const MAX_TEXT_BYTES: usize = 32 << 10;
/// Limit for finished pods, which hold no shares; there may be thousands.
const MAX_TEXT_BYTES_WHEN_FINISHED: usize = 4 << 10;
/// Kubelet's reason if a device plugin did not allocate what a pod requests.
const DEVICES_REJECTED: &str = "UnexpectedAdmissionError";
/// A copy of the whole manifest.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// Parts of the label and annotation keys that dialects read or write. Only these keys are kept of a pod with too much text.
const DIALECT_KEYS: [&str; 10] = [
    "partage.dev/",
    "volcano.sh/",
    "aliyun.com/",
    "ALIYUN_COM_",
    "gpushare",
    "hami.io/",
    "nvidia.com/",
    "vcuda",
    "/predicate-",
    "/gpu-assigned",
];

/// The fields of a pod's spec that are read.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSpec {
    init_containers: Vec<Container>,
    containers: Vec<Container>,
    ephemeral_containers: Vec<Container>,
    resources: Value,
    /// Not part of an ask, so the reader of asks does not get it.
    #[serde(skip_serializing)]
    termination_grace_period_seconds: Option<i64>,
}

impl PodSpec {
    /// Returns the pod's own grace period.
    pub(super) fn grace_period_seconds(&self) -> Option<i64> {
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

/// The fields of a pod's status that are read.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodStatus {
    phase: String,
    reason: String,
    message: String,
    init_container_statuses: Vec<ContainerStatus>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct ContainerStatus {
    name: String,
    state: ContainerState,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct ContainerState {
    terminated: Option<TerminatedState>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct TerminatedState {
    exit_code: i32,
}

impl Container {
    /// Returns whether it requests a resource that is not one of Kubernetes' own.
    fn requests_extended_resource(&self) -> bool {
        let named = |key: &str| {
            self.resources[key].as_object().is_some_and(|all| all.keys().any(|name| name.contains('/')))
        };
        named("limits") || named("requests")
    }
}

impl Projection for PodProjection {
    type Object = LeanPod;
    type View = PodView;
    const RESOURCE: &'static str = "pods";

    fn api(client: Client, namespace: Option<&str>) -> Api<LeanPod> {
        let resource = ApiResource::erase::<v1::Pod>(&());
        match namespace {
            Some(namespace) => Api::namespaced_with(client, namespace, &resource),
            None => Api::all_with(client, &resource),
        }
    }

    fn view(pod: LeanPod) -> Option<PodView> {
        let meta = pod.metadata;
        let id = PodId { uid: meta.uid?.into(), namespace: meta.namespace?.into(), name: meta.name?.into() };
        let status = pod.status.unwrap_or_default();
        let is_finished = matches!(status.phase.as_str(), "Succeeded" | "Failed");
        let max_bytes = if is_finished { MAX_TEXT_BYTES_WHEN_FINISHED } else { MAX_TEXT_BYTES };
        let containers = pod.spec.init_containers.iter().chain(&pod.spec.containers);
        let mut containers = containers.chain(&pod.spec.ephemeral_containers);
        let has_asks = containers.any(Container::requests_extended_resource);
        let mut problems = Vec::new();
        let mut keep = |field: &str, texts: Option<BTreeMap<String, String>>| {
            let texts = texts.filter(|_| has_asks).unwrap_or_default();
            bounded(texts, max_bytes).unwrap_or_else(|bytes| {
                let message = format!(
                    "those of GPU dialects have {bytes} bytes together, and at most {max_bytes} are read: remove some"
                );
                problems.push(Problem::of_pod(field, message));
                BTreeMap::new()
            })
        };
        let metadata = json!({
            "labels": keep("metadata.labels", meta.labels),
            "annotations": keep("metadata.annotations", meta.annotations),
        });
        let spec = serde_json::to_value(&pod.spec).unwrap_or_default();
        let (pod, more) = PodManifest::read(&metadata, &spec);
        problems.extend(more);
        let succeeded = |status: &ContainerStatus| {
            status.state.terminated.as_ref().is_some_and(|terminated| terminated.exit_code == 0)
        };
        let is_rejected = status.phase == "Failed" && status.reason == DEVICES_REJECTED;
        Some(PodView {
            id,
            pod,
            problems,
            phase: match status.phase.as_str() {
                "Running" => PodPhase::Running,
                "Succeeded" => PodPhase::Succeeded,
                "Failed" => PodPhase::Failed,
                "Pending" | "" => PodPhase::Pending,
                _ => PodPhase::Unknown,
            },
            rejected: is_rejected.then_some(status.message),
            created: meta.creation_timestamp.map_or(0, |time| time.0.as_second()),
            finished_inits: status
                .init_container_statuses
                .into_iter()
                .filter(succeeded)
                .map(|status| ContainerName::from(status.name))
                .collect(),
        })
    }
}

/// Returns the texts that are kept, or the size of those of dialects if that exceeds the limit: half an ask is
/// worse than none.
fn bounded(mut texts: BTreeMap<String, String>, max_bytes: usize) -> Result<BTreeMap<String, String>, usize> {
    let size = |texts: &BTreeMap<String, String>| -> usize {
        texts.iter().map(|(key, text)| key.len() + text.len()).sum()
    };
    let of_dialect = |key: &str| DIALECT_KEYS.iter().any(|part| key.contains(part));
    texts.retain(|key, text| key != LAST_APPLIED && (text.len() <= MAX_TEXT_BYTES || of_dialect(key)));
    // A tenant can write 256 KiB on each of its pods: then only what may be an ask or a grant is kept.
    if size(&texts) > max_bytes {
        texts.retain(|key, _| of_dialect(key));
    }
    match size(&texts) {
        bytes if bytes > max_bytes => Err(bytes),
        _ => Ok(texts),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partage_core::dialect::grants::{self, PodDialects, UnixNanos};
    use partage_core::dialect::{Dialect, DialectSettings, asks};
    use partage_core::model::{Bytes, Gpu, Grant, Node, PodGrant, Share};
    use std::collections::BTreeSet;

    fn view(mut object: Value) -> PodView {
        object["metadata"]["uid"] = "u".into();
        object["metadata"]["namespace"] = "n".into();
        object["metadata"]["name"] = "p".into();
        PodProjection::view(serde_json::from_value(object).unwrap()).unwrap()
    }

    #[test]
    fn labels_and_annotations_are_kept_only_where_the_pod_has_asks() {
        let annotations = json!({LAST_APPLIED: "{}", "long": "x".repeat(MAX_TEXT_BYTES + 1), "partage.dev/policy": "spread"});
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
        assert!(seen.phase == PodPhase::Pending && !seen.is_finished());
        assert_eq!(seen.finished_inits, ["fetch".into()].into());

        let mut plain = asking;
        plain["spec"]["containers"][0]["resources"] = json!({"limits": {"cpu": "1"}});
        let seen = view(plain);
        assert!(seen.pod.annotations.is_empty() && seen.pod.labels.is_empty());
    }

    #[test]
    fn annotations_are_kept_up_to_a_bounded_size() {
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
        assert_eq!(of(1, MAX_TEXT_BYTES + 1, "Pending").problems.len(), 1, "half an ask is worse than none");
        let many = of(8, 5000, "Pending");
        assert_eq!(many.pod.annotations.len(), 0);
        let problems: Vec<_> =
            many.problems.iter().map(|one| (one.field.as_str(), one.message.as_str())).collect();
        let message =
            "those of GPU dialects have 40112 bytes together, and at most 32768 are read: remove some";
        assert_eq!(problems, [("metadata.annotations", message)]);
        assert_eq!(of(2, 5000, "Failed").pod.annotations.len(), 0, "a finished pod keeps less");
    }

    /// Returns every annotation that a dialect reads or writes, with a domain of the test's choice for vcuda.
    fn dialect_annotations() -> BTreeSet<String> {
        let gpu = Gpu {
            uuid: "GPU-0".into(),
            minor: 0,
            model: "Tesla T4".into(),
            memory_bytes: Bytes(16 << 30),
            numa: None,
            pci: None,
            withheld: None,
        };
        let share = Share {
            gpu: gpu.uuid.clone(),
            memory_bytes: Some(Bytes(1 << 30)),
            cores: None,
            ceiling: None,
            whole: false,
        };
        let node = Node::new("n", vec![gpu]);
        let grant = PodGrant {
            node: node.name.clone(),
            grants: vec![Grant { container: "main".into(), init: false, shares: vec![share] }],
        };
        let limits = json!({"limits": {"example.com/vcuda-core": "10"}});
        let spec = json!({"containers": [{"name": "main", "resources": limits}]});
        let (pod, _) = PodManifest::read(&json!({}), &spec);
        let mut keys: BTreeSet<String> =
            asks::annotations().chain(grants::RECORD_ANNOTATIONS).map(String::from).collect();
        keys.extend(["example.com/vcuda-core-limit", "aliyun.com/gpu-count"].map(String::from));
        for dialect in Dialect::ALL {
            let dialects = PodDialects::of(&pod, &[("main".into(), dialect)].into());
            let settings = DialectSettings::default();
            let written = grants::write(&grant, &node, &dialects, &settings, UnixNanos(1)).unwrap();
            keys.extend(written.annotations.into_keys());
        }
        keys
    }

    #[test]
    fn annotations_of_every_dialect_are_kept_of_a_pod_with_too_much_text() {
        let keys = dialect_annotations();
        let filler = (0..8).map(|at| (format!("team.example/{at}"), "x".repeat(5000)));
        let annotations: BTreeMap<String, String> =
            keys.iter().map(|key| (key.clone(), "1".to_string())).chain(filler).collect();
        let limits = json!({"limits": {"partage.dev/gpu": "1"}});
        let seen = view(json!({
            "metadata": {"annotations": annotations},
            "spec": {"containers": [{"name": "main", "resources": limits}]},
        }));
        assert_eq!(seen.pod.annotations.into_keys().collect::<BTreeSet<_>>(), keys);
    }

    #[test]
    fn kubelets_message_about_a_rejected_pod_is_kept() {
        let of = |phase: &str, reason: &str| {
            let status = json!({"phase": phase, "reason": reason, "message": "Pod was rejected: why"});
            view(json!({"spec": {"containers": [{"name": "main"}]}, "status": status})).rejected
        };
        assert_eq!(of("Failed", DEVICES_REJECTED).as_deref(), Some("Pod was rejected: why"));
        assert_eq!((of("Running", DEVICES_REJECTED), of("Failed", "Evicted")), (None, None));
    }

    #[test]
    fn failed_init_container_has_not_finished() {
        let seen = view(json!({
            "spec": {"initContainers": [{"name": "fetch"}], "containers": [{"name": "main"}]},
            "status": {"phase": "Running", "initContainerStatuses": [
                {"name": "fetch", "state": {"terminated": {"exitCode": 1}}},
            ]},
        }));
        assert!(seen.finished_inits.is_empty());
        assert_eq!(seen.phase, PodPhase::Running);
    }
}
