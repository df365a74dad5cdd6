//! Fake nodes in a real control plane: Ready as long as their heartbeats continue, and no longer.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{ListParams, PostParams};
use kube::{Api, Client, ResourceExt};
use partage_core::cluster_file::ClusterFile;
use partage_core::model;
use partage_testkit::bed::{BedProfile, TestBed};
use partage_testkit::eventually;
use partage_testkit::fake_nodes::{self, FakeNodes, FakeNodesOptions, INVENTORY_ANNOTATION, NodeTemplate};
use serde_json::json;

#[test]
fn fake_node_is_ready_only_while_its_heartbeats_continue() {
    let Some(bed) = TestBed::for_test(BedProfile::control_plane().node_monitor_grace_seconds(40)) else {
        return;
    };
    bed.block_on(async {
        let client = bed.client();
        let alive = three_nodes("alive-");
        let nodes: Api<Node> = Api::all(client.clone());
        let heartbeating =
            FakeNodes::start(client.clone(), &alive, FakeNodesOptions::default().group("alive"))
                .await
                .unwrap();
        for node in nodes.list(&ListParams::default()).await.unwrap() {
            let inventory: model::Node =
                serde_json::from_str(&node.annotations()[INVENTORY_ANNOTATION]).unwrap();
            assert!(alive.nodes.contains(&inventory), "the inventory comes from the snapshot");
        }
        // The others stop at once. When kube-controller-manager marks them NotReady, it has waited its whole grace
        // period, and those with heartbeats have stayed Ready throughout.
        let dead = three_nodes("dead-");
        FakeNodes::start(client.clone(), &dead, FakeNodesOptions::default().group("dead"))
            .await
            .unwrap()
            .stop()
            .await;
        let all_are = async |group: &str, ready: &str| {
            let of_group = ListParams::default().labels(&format!("{}={group}", fake_nodes::GROUP_LABEL));
            let seen = nodes.list(&of_group).await.map_err(|e| e.to_string())?;
            let seen: Vec<String> = seen.items.iter().map(ready_status).collect();
            if seen == [ready, ready, ready] { Ok(()) } else { Err(format!("{seen:?}")) }
        };
        eventually("the nodes without heartbeats become NotReady", async || all_are("dead", "Unknown").await)
            .await;
        assert_eq!(all_are("alive", "True").await, Ok(()));
        assert_eq!(heartbeating.missed_heartbeats(), 0, "{:?}", heartbeating.last_heartbeat_error());

        // A later run adopts them, and they are Ready again.
        let again =
            FakeNodes::start(client.clone(), &dead, FakeNodesOptions::default().group("dead")).await.unwrap();
        assert_eq!(all_are("dead", "True").await, Ok(()));
        let bound = bind_by_scheduler(&client).await;
        assert!(bound.starts_with("alive-") || bound.starts_with("dead-"), "{bound}");

        // Nodes of another group are left alone.
        let other = FakeNodes::start(client.clone(), &dead, FakeNodesOptions::default().group("other"))
            .await
            .err()
            .unwrap();
        let message = other.to_string();
        assert!(message.contains("already exists and is not one of these fake nodes"), "{message}");

        again.delete().await.unwrap();
        heartbeating.delete().await.unwrap();
        assert!(nodes.list(&ListParams::default()).await.unwrap().items.is_empty());
        let leases: Api<Lease> = Api::namespaced(client, "kube-node-lease");
        assert!(leases.list(&ListParams::default()).await.unwrap().items.is_empty());
    });
}

fn three_nodes(prefix: &str) -> ClusterFile {
    fake_nodes::generate_snapshot(3, &NodeTemplate { prefix: prefix.into(), ..NodeTemplate::default() })
        .unwrap()
}

fn ready_status(node: &Node) -> String {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    let ready = conditions.and_then(|all| all.iter().find(|condition| condition.type_ == "Ready"));
    ready.map(|condition| condition.status.clone()).unwrap_or_default()
}

/// Returns the node that the real kube-scheduler selects for a pod that requests all GPUs of one node.
async fn bind_by_scheduler(client: &Client) -> String {
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "a"},
        "spec": {"containers": [{"name": "main", "image": "none", "resources": {"limits": {"partage.dev/gpu": "8"}}}]},
    }))
    .unwrap();
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    pods.create(&PostParams::default(), &pod).await.unwrap();
    eventually("the pod is bound", async || {
        let pod = pods.get("a").await.map_err(|e| e.to_string())?;
        pod.spec.and_then(|spec| spec.node_name).ok_or_else(|| format!("{:?}", pod.status))
    })
    .await
}
