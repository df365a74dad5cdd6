//! The API objects of a fake node, as its kubelet would write them.

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{Node, NodeAddress, NodeCondition, NodeStatus};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference, Time};
use kube::ResourceExt;
use partage_core::model;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The annotation with a node's inventory: the node of the snapshot, as JSON.
pub const INVENTORY_ANNOTATION: &str = "partage.dev/inventory";
/// The label of fake nodes and their Leases.
pub const GROUP_LABEL: &str = "partage.dev/fake-nodes";

/// CPU and memory of a node for which the snapshot has no value.
const DEFAULT_CPU: &str = "64";
const DEFAULT_MEMORY: &str = "512Gi";
/// The default value of kubelet.
const MAX_PODS: &str = "110";
const LEASE_DURATION_SECONDS: i32 = 40;

/// Returns one `partage.dev/gpu` per offered GPU.
pub fn gpu_count(node: &model::Node) -> BTreeMap<String, Quantity> {
    let offered = node.gpus.iter().filter(|gpu| gpu.withheld.is_none()).count();
    BTreeMap::from([("partage.dev/gpu".into(), Quantity(offered.to_string()))])
}

pub(super) fn node(
    of: &model::Node,
    group: &str,
    labels: &BTreeMap<String, String>,
    resources: BTreeMap<String, Quantity>,
) -> Result<Node, serde_json::Error> {
    let name = of.name.to_string();
    let mut all_labels = BTreeMap::from([
        (GROUP_LABEL.into(), group.into()),
        ("kubernetes.io/hostname".into(), name.clone()),
        ("kubernetes.io/os".into(), "linux".into()),
        ("kubernetes.io/arch".into(), "amd64".into()),
    ]);
    all_labels.extend(labels.clone());
    let mut capacity = resources;
    let cpu = of.cpu_milli.map_or_else(|| DEFAULT_CPU.into(), |cpu| format!("{}m", cpu.0));
    let memory = of.memory_bytes.map_or_else(|| DEFAULT_MEMORY.into(), |memory| memory.0.to_string());
    for (resource, amount) in [("cpu", cpu), ("memory", memory), ("pods", MAX_PODS.into())] {
        capacity.insert(resource.into(), Quantity(amount));
    }
    Ok(Node {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            labels: Some(all_labels),
            annotations: Some(BTreeMap::from([(INVENTORY_ANNOTATION.into(), serde_json::to_string(of)?)])),
            ..ObjectMeta::default()
        },
        spec: None,
        status: Some(NodeStatus {
            addresses: Some(vec![NodeAddress { type_: "Hostname".into(), address: name }]),
            allocatable: Some(capacity.clone()),
            capacity: Some(capacity),
            conditions: Some(conditions()),
            ..NodeStatus::default()
        }),
    })
}

fn conditions() -> Vec<NodeCondition> {
    let now = Time(Timestamp::now());
    [("Ready", "True"), ("MemoryPressure", "False"), ("DiskPressure", "False"), ("PIDPressure", "False")]
        .map(|(type_, status)| NodeCondition {
            type_: type_.into(),
            status: status.into(),
            reason: Some("FakeNode".into()),
            message: Some("a fake node of the test bed".into()),
            last_heartbeat_time: Some(now.clone()),
            last_transition_time: Some(now.clone()),
        })
        .into()
}

/// Returns whether an existing node is the wanted one, from an earlier run: inventory, labels and kinds of resources
/// are compared. Amounts are not: the API server normalizes them.
pub(super) fn is_same_node(there: &Node, wanted: &Node) -> bool {
    let capacity = |node: &Node| node.status.as_ref().and_then(|status| status.capacity.clone());
    wanted.labels().iter().all(|(name, value)| there.labels().get(name) == Some(value))
        && there.annotations().get(INVENTORY_ANNOTATION) == wanted.annotations().get(INVENTORY_ANNOTATION)
        && capacity(there).map(|all| all.into_keys().collect::<Vec<_>>())
            == capacity(wanted).map(|all| all.into_keys().collect::<Vec<_>>())
}

/// Returns the Lease of a node, which owns it, as with kubelet's Leases.
pub(super) fn lease(node: &Node, group: &str) -> Lease {
    Lease {
        metadata: ObjectMeta {
            name: node.metadata.name.clone(),
            labels: Some(BTreeMap::from([(GROUP_LABEL.into(), group.into())])),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".into(),
                kind: "Node".into(),
                name: node.name_any(),
                uid: node.uid().unwrap_or_default(),
                ..OwnerReference::default()
            }]),
            ..ObjectMeta::default()
        },
        spec: Some(LeaseSpec {
            holder_identity: node.metadata.name.clone(),
            lease_duration_seconds: Some(LEASE_DURATION_SECONDS),
            ..LeaseSpec::default()
        }),
    }
}

/// Returns the Lease with the current time as its renewal time.
pub(super) fn renewed_lease(lease: &Lease) -> Lease {
    let spec = lease.spec.clone().unwrap_or_default();
    let spec = Some(LeaseSpec { renew_time: Some(MicroTime(Timestamp::now())), ..spec });
    Lease { metadata: lease.metadata.clone(), spec }
}

/// Returns the patch of a renewal.
pub(super) fn renewal_patch() -> Value {
    json!({"spec": {"renewTime": MicroTime(Timestamp::now())}})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_nodes::{NodeTemplate, generate_snapshot};

    #[test]
    fn node_object_matches_the_snapshot() {
        let snapshot = generate_snapshot(1, &NodeTemplate::default()).unwrap();
        let mut of = snapshot.nodes[0].clone();
        of.gpus[3].withheld = Some("MIG is enabled".into());
        let labels = BTreeMap::from([("zone".to_string(), "a".to_string())]);
        let node = node(&of, "load", &labels, gpu_count(&of)).unwrap();
        assert_eq!(node.labels()[GROUP_LABEL], "load");
        assert_eq!(node.labels()["zone"], "a");
        let back: model::Node = serde_json::from_str(&node.annotations()[INVENTORY_ANNOTATION]).unwrap();
        assert_eq!(back, of);
        let status = node.status.unwrap();
        assert_eq!(status.capacity, status.allocatable);
        let capacity = status.capacity.unwrap();
        let amount = |name: &str| capacity[name].0.clone();
        assert_eq!(amount("partage.dev/gpu"), "7", "one is withheld");
        assert_eq!(amount("cpu"), "96000m");
        assert_eq!(amount("memory"), "824633720832");
        assert_eq!(amount("pods"), "110");
        let ready = status.conditions.unwrap().into_iter().find(|c| c.type_ == "Ready").unwrap();
        assert_eq!(ready.status, "True");
    }

    #[test]
    fn lease_is_owned_by_its_node_and_renewed() {
        let node = Node {
            metadata: ObjectMeta { name: Some("a".into()), uid: Some("1-2".into()), ..ObjectMeta::default() },
            ..Node::default()
        };
        let lease = lease(&node, "load");
        assert_eq!(lease.owner_references()[0].uid, "1-2");
        let renewed = renewed_lease(&lease);
        assert_eq!(renewed.metadata, lease.metadata);
        assert!(renewed.spec.unwrap().renew_time.is_some());
        let when = renewal_patch()["spec"]["renewTime"].as_str().unwrap().to_string();
        assert!(when.ends_with('Z') && when.contains('.'), "the API server requires microseconds: {when}");
    }
}
