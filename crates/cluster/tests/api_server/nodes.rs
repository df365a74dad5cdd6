//! A node's own object: its status, labels and annotations.

use crate::control_plane::{ControlPlane, NODE, connect};
use partage_cluster::{ApiClient, ClientOptions, ClusterError, NodePatch, NodeWriter, WatchSelector};
use partage_testkit::eventually;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

#[test]
fn node_is_written_with_the_permission_on_its_status_alone() {
    let Some(plane) = ControlPlane::start() else { return };
    let token = plane.account(
        "agent",
        json!([
            {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]},
            {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
        ]),
    );
    let client = plane.with_token(&token);
    let writer = NodeWriter::new(&client, &NODE.into());
    let watched = plane.bed.block_on(async { writer.watch() });
    let some = |text: &str| Some(text.to_string());
    let change = NodePatch {
        capacity: BTreeMap::from([
            ("volcano.sh/vgpu-memory".into(), 89_424),
            ("partage.dev/cores".into(), 200),
        ]),
        annotations: BTreeMap::from([("partage.dev/inventory".into(), some("{}"))]),
        labels: BTreeMap::from([("gpushare".into(), some("true"))]),
        ..NodePatch::default()
    };
    plane.bed.block_on(async {
        // The API server learns of a new role a moment after its creation.
        eventually("it may write", async || writer.apply(&change).await).await;
        let node = writer.read().await.unwrap();
        assert_eq!(node.capacity, node.allocatable);
        assert_eq!(node.capacity["volcano.sh/vgpu-memory"], "89424");
        assert_eq!(node.annotations["partage.dev/inventory"], "{}");
        assert_eq!(node.labels["gpushare"], "true");
        eventually("the watch shows the node as it is", async || {
            // Controllers write on it, too.
            let node = writer.read().await.map_err(|error| error.to_string())?;
            let shown = watched.by_name("", NODE);
            if shown.as_deref() == Some(&node) { Ok(()) } else { Err(format!("{shown:?}, not {node:?}")) }
        })
        .await;

        let change = NodePatch {
            removed_capacity: BTreeSet::from(["volcano.sh/vgpu-memory".into()]),
            annotations: BTreeMap::from([("partage.dev/inventory".into(), None)]),
            labels: BTreeMap::from([("gpushare".into(), None)]),
            ..NodePatch::default()
        };
        writer.apply(&change).await.unwrap();
        let node = writer.read().await.unwrap();
        assert_eq!(node.capacity, BTreeMap::from([("partage.dev/cores".to_string(), "200".to_string())]));
        assert!(
            !node.annotations.contains_key("partage.dev/inventory") && !node.labels.contains_key("gpushare")
        );

        let forbidden = client.watch_pods(&WatchSelector::on_node(&NODE.into()));
        let error = client.pod(&"default".into(), &"any".into()).await.unwrap_err();
        assert!(matches!(error, ClusterError::Forbidden { .. }) && !error.is_transient());
        assert!(error.to_string().contains("cannot get resource \"pods\""), "{error}");
        assert!(!forbidden.is_synced());
    });
    let path = plane.kubeconfig("other", |_| {});
    plane.bed.block_on(async {
        let other = NodeWriter::new(&connect(&path).await.unwrap(), &"n9".into());
        let error = other.read().await.unwrap_err().to_string();
        let expected =
            "reading node n9: node n9 not found: use the name under which its kubelet registered it";
        assert_eq!(error, expected);
        let refused = other.apply(&NodePatch::default()).await;
        assert!(matches!(refused, Err(ClusterError::NodeNotFound { .. })), "{refused:?}");
        let options = ClientOptions { kubeconfig: None, component: "partage-test", instance: NODE };
        let error = ApiClient::connect(&options).await.unwrap_err().to_string();
        assert!(error.starts_with("this process does not run in a pod with a service account ("), "{error}");
        let absent = plane.folder().join("absent");
        let error = connect(&absent).await.unwrap_err().to_string();
        assert!(error.starts_with(&format!("invalid kubeconfig {} (", absent.display())), "{error}");
    });
}
