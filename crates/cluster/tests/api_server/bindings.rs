//! Bindings with annotations, and everything that can be in their way.

use crate::control_plane::{ControlPlane, NODE};
use partage_cluster::{BindConflict, BindOutcome, BindingState, ClusterError, PodBinding};
use partage_core::model::PodId;
use serde_json::{Value, json};
use std::collections::BTreeMap;

const GRANT: &str = "partage.dev/grant";

fn binding(pod: &PodId, node: &str, grant: &str) -> PodBinding {
    PodBinding {
        pod: pod.clone(),
        node: node.into(),
        annotations: BTreeMap::from([(GRANT.to_string(), grant.to_string())]),
        resource_version: None,
    }
}

#[test]
fn binding_carries_annotations_and_reports_every_outcome() {
    let Some(plane) = ControlPlane::start() else { return };
    let client = plane.administrator();
    let bind = |binding: &PodBinding| plane.bed.block_on(client.bind_pod(binding));
    let read = |binding: &PodBinding| plane.bed.block_on(client.read_binding(binding)).unwrap();

    let pod = plane.pod("web", None, json!({}));
    let wanted = binding(&pod, NODE, "g1");
    assert_eq!(read(&wanted), BindingState::Unbound);
    assert_eq!(bind(&wanted), Ok(BindOutcome::Bound));
    let object = plane.get(&["pod", "web"]);
    assert_eq!(object["spec"]["nodeName"], NODE);
    let annotations = json!({GRANT: "g1", "partage.dev/policy": "spread"});
    assert_eq!(object["metadata"]["annotations"], annotations, "merged with those that the pod has");
    assert_eq!(read(&wanted), BindingState::Bound);

    // A repeated request is not a conflict, another decision is.
    assert_eq!(bind(&wanted), Ok(BindOutcome::Bound));
    let elsewhere = BindConflict::BoundElsewhere(NODE.into());
    assert_eq!(bind(&binding(&pod, "n2", "g1")), Ok(BindOutcome::Conflict(elsewhere)));
    let other = BindConflict::OtherAnnotations;
    assert_eq!(bind(&binding(&pod, NODE, "g2")), Ok(BindOutcome::Conflict(other)));
    assert_eq!(plane.annotation("web", GRANT), "g1");

    // Another pod of the same name is not bound.
    plane.delete("web");
    assert_eq!(bind(&wanted), Ok(BindOutcome::NotFound));
    assert_eq!(read(&wanted), BindingState::NotFound);
    plane.pod("web", None, json!({}));
    assert_eq!(bind(&wanted), Ok(BindOutcome::Conflict(BindConflict::Replaced)));
    assert_eq!(plane.get(&["pod", "web"])["spec"]["nodeName"], Value::Null);

    // A pod that has changed since it was read is not bound.
    let changed = plane.pod("changed", None, json!({}));
    let version = plane.get(&["pod", "changed"])["metadata"]["resourceVersion"].as_str().unwrap().to_string();
    let stale = PodBinding { resource_version: Some(version), ..binding(&changed, NODE, "g1") };
    plane.bed.kubectl(&["annotate", "pod", "changed", "a=b"]).unwrap();
    let outcome = bind(&stale).unwrap();
    assert!(matches!(&outcome, BindOutcome::Conflict(BindConflict::Refused(_))), "{outcome:?}");
    assert_eq!(read(&stale), BindingState::Unbound);

    // A pod that is being deleted is not bound.
    let finalizer = r#"{"metadata": {"finalizers": ["partage.dev/test"]}}"#;
    let patch = |patch: &str| {
        plane.bed.kubectl(&["patch", "pod", "changed", "--type=merge", "-p", patch]).unwrap();
    };
    patch(finalizer);
    plane.bed.kubectl(&["delete", "pod", "changed", "--wait=false"]).unwrap();
    let outcome = bind(&binding(&changed, NODE, "g1"));
    assert_eq!(outcome, Ok(BindOutcome::Conflict(BindConflict::Deleting)));
    patch(r#"{"metadata": {"finalizers": null}}"#);

    let token = plane.account("reader", json!([]));
    let refused = plane.bed.block_on(plane.with_token(&token).bind_pod(&wanted)).unwrap_err();
    assert!(matches!(refused, ClusterError::Forbidden { .. }), "{refused}");

    // An unknown outcome is read back.
    let pod = plane.pod("late", None, json!({}));
    let wanted = binding(&pod, NODE, "g1");
    plane.without_server(|| {
        let outcome = bind(&wanted).unwrap();
        assert!(matches!(outcome, BindOutcome::Unknown(ClusterError::Unavailable { .. })), "{outcome:?}");
        assert!(plane.bed.block_on(client.read_binding(&wanted)).unwrap_err().is_transient());
    });
    assert_eq!(read(&wanted), BindingState::Unbound);
    assert_eq!(bind(&wanted), Ok(BindOutcome::Bound));
}
