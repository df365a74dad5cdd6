//! Pods: their cache over an absence of the server, annotations and evictions.

use crate::control_plane::{ControlPlane, NODE, WATCH_TIMEOUT};
use partage_cluster::{AnnotateOutcome, ClusterError, PodPhase, PodView, WatchSelector};
use partage_core::model::{PodId, PodUid};
use partage_testkit::eventually;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

#[test]
fn cache_survives_an_api_server_outage_and_drops_deleted_pods() {
    let Some(plane) = ControlPlane::start() else { return };
    let client = plane.administrator();
    let first = plane.pod("first", Some(NODE), json!({"volcano.sh/vgpu-memory": 3000}));
    plane.pod("elsewhere", Some("n2"), json!({"volcano.sh/vgpu-memory": 3000}));
    let pods = plane.bed.block_on(async { client.watch_pods(&WatchSelector::on_node(&NODE.into())) });
    let wait = |uid: &PodUid| plane.bed.block_on(pods.wait_for(uid, WATCH_TIMEOUT)).unwrap();
    let seen = wait(&first.uid);
    assert!(pods.is_synced() && pods.last_contact().is_some());
    assert_eq!((&seen.id, seen.phase), (&first, PodPhase::Pending));
    assert_eq!(
        seen.pod.containers[0].amount("volcano.sh/vgpu-memory"),
        Some("3k"),
        "as the server writes it"
    );
    assert_eq!(seen.pod.annotations["partage.dev/policy"], "spread");
    assert_eq!(pods.all().len(), 1, "pods of other nodes are not selected");
    assert_eq!(pods.by_name("default", "first"), Some(seen));
    assert_eq!(pods.by_name("default", "elsewhere"), None);

    let second = plane.pod("second", Some(NODE), json!({}));
    assert!(wait(&second.uid).pod.annotations.is_empty(), "a pod without asks keeps no annotations");
    let status = r#"{"status":{"phase":"Running","initContainerStatuses":[]}}"#;
    plane
        .bed
        .kubectl(&["patch", "pod", "first", "--subresource=status", "--type=merge", "-p", status])
        .unwrap();
    plane.bed.block_on(eventually("the pod is seen running", async || {
        let phase = pods.by_uid(&first.uid).unwrap().phase;
        if phase == PodPhase::Running { Ok(()) } else { Err(format!("{phase:?}")) }
    }));

    plane.without_server(|| {
        let error = plane.bed.block_on(client.pod(&first.namespace, &first.name)).unwrap_err();
        assert!(matches!(error, ClusterError::Unavailable { .. }) && error.is_transient(), "{error}");
        assert!(
            error.to_string().starts_with("reading pod default/first: the API server is unavailable ("),
            "{error}"
        );
        assert_eq!(pods.all().len(), 2);
        assert!(plane.bed.block_on(pods.wait_for(&first.uid, WATCH_TIMEOUT)).is_some());
        let absent = plane.bed.block_on(pods.wait_for("absent", Duration::from_millis(1)));
        assert_eq!(absent, None);
    });
    plane.delete("first");
    let third = plane.pod("third", Some(NODE), json!({}));
    wait(&third.uid);
    plane.bed.block_on(eventually("the deleted pod is gone", async || match pods.by_uid(&first.uid) {
        None => Ok(()),
        Some(pod) => Err(format!("{pod:?}")),
    }));
    assert_eq!(names(&pods.all()), ["second", "third"]);
}

fn names(pods: &[Arc<PodView>]) -> Vec<String> {
    let mut names: Vec<String> = pods.iter().map(|pod| pod.id.name.to_string()).collect();
    names.sort();
    names
}

#[test]
fn successor_of_the_same_name_is_neither_annotated_nor_evicted() {
    let Some(plane) = ControlPlane::start() else { return };
    let client = plane.administrator();
    let annotate = |pod: &PodId, text: Option<&str>| {
        let annotations = BTreeMap::from([("partage.dev/grant".to_string(), text.map(String::from))]);
        plane.bed.block_on(client.annotate_pod(pod, &annotations))
    };
    let old = plane.pod("same", Some(NODE), json!({}));
    assert_eq!(annotate(&old, Some("old")), Ok(AnnotateOutcome::Done));
    assert_eq!(plane.annotation("same", "partage.dev/grant"), "old");
    plane.delete("same");
    assert_eq!(annotate(&old, Some("old")), Ok(AnnotateOutcome::Gone));
    plane.bed.block_on(client.evict_pod(&old)).unwrap();

    let new = plane.pod("same", Some(NODE), json!({}));
    assert_eq!(annotate(&old, Some("old")), Ok(AnnotateOutcome::Gone));
    plane.bed.block_on(client.evict_pod(&old)).unwrap();
    let object = plane.get(&["pod", "same"]);
    assert_eq!(object["metadata"]["annotations"], json!({"partage.dev/policy": "spread"}));
    assert_eq!(object["metadata"]["deletionTimestamp"], Value::Null);

    assert_eq!(annotate(&new, Some("new")), Ok(AnnotateOutcome::Done));
    assert_eq!(annotate(&new, None), Ok(AnnotateOutcome::Done));
    assert_eq!(plane.annotation("same", "partage.dev/grant"), Value::Null);
    let seen = plane.bed.block_on(client.pod(&new.namespace, &new.name)).unwrap().unwrap();
    assert_eq!(seen.id, new);
    plane.bed.block_on(client.evict_pod(&new)).unwrap();
    let words = [
        "get",
        "pod",
        "same",
        "--ignore-not-found",
        "-o",
        "jsonpath={.metadata.uid}{.metadata.deletionTimestamp}",
    ];
    let left = plane.bed.kubectl(&words).unwrap();
    assert!(left.is_empty() || left.trim() != new.uid.as_str(), "it is deleted: {left}");
}

#[test]
fn evicted_pod_gets_at_most_thirty_seconds() {
    let Some(plane) = ControlPlane::start() else { return };
    let client = plane.administrator();
    for (name, requested, granted) in [("year", 31_536_000, 30), ("quick", 5, 5)] {
        plane.apply(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {
                "nodeName": NODE, "terminationGracePeriodSeconds": requested,
                "containers": [{"name": "main", "image": "none"}],
            },
        }));
        let uid = plane.get(&["pod", name])["metadata"]["uid"].as_str().unwrap().to_string();
        let id = PodId { uid: uid.into(), namespace: "default".into(), name: name.into() };
        plane.bed.block_on(client.evict_pod(&id)).unwrap();
        assert_eq!(plane.get(&["pod", name])["metadata"]["deletionGracePeriodSeconds"], granted, "{name}");
    }
}
