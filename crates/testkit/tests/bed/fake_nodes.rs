//! Fake nodes in a real control plane: Ready as long as they beat, and not a moment for free.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{ListParams, PostParams};
use kube::{Api, Client, ResourceExt};
use partage_core::cluster_file::ClusterFile;
use partage_core::model;
use partage_testkit::bed::{Bed, Profile};
use partage_testkit::eventually;
use partage_testkit::fake_nodes::{self, FakeNodes, INVENTORY, Plan, Template};
use serde_json::json;

#[test]
fn a_fake_node_is_ready_while_it_beats() {
    let Some(bed) = Bed::for_test(Profile::control_plane().give_nodes_up_after(40)) else { return };
    bed.block_on(async {
        let client = bed.client();
        let alive = fleet("alive-");
        let nodes: Api<Node> = Api::all(client.clone());
        let beating = FakeNodes::start(client.clone(), &alive, Plan::default().group("alive")).await.unwrap();
        for node in nodes.list(&ListParams::default()).await.unwrap() {
            let inventory: model::Node = serde_json::from_str(&node.annotations()[INVENTORY]).unwrap();
            assert!(alive.nodes.contains(&inventory), "the inventory is the snapshot's");
        }
        // The others stop at once. When kube-controller-manager gives them up, it has waited its whole grace period,
        // and those that beat have lived through it.
        let dead = fleet("dead-");
        FakeNodes::start(client.clone(), &dead, Plan::default().group("dead")).await.unwrap().stop().await;
        let all_are = async |group: &str, ready: &str| {
            let of_group = ListParams::default().labels(&format!("{}={group}", fake_nodes::GROUP));
            let seen = nodes.list(&of_group).await.map_err(|e| e.to_string())?;
            let seen: Vec<String> = seen.items.iter().map(readiness).collect();
            if seen == [ready, ready, ready] { Ok(()) } else { Err(format!("{seen:?}")) }
        };
        eventually("the silent nodes are given up", async || all_are("dead", "Unknown").await).await;
        assert_eq!(all_are("alive", "True").await, Ok(()));
        assert_eq!(beating.missed(), 0, "{:?}", beating.last_miss());

        // Taken over by a later run, they are back.
        let again = FakeNodes::start(client.clone(), &dead, Plan::default().group("dead")).await.unwrap();
        assert_eq!(all_are("dead", "True").await, Ok(()));
        let bound = bind_by_scheduler(&client).await;
        assert!(bound.starts_with("alive-") || bound.starts_with("dead-"), "{bound}");

        // Names that are taken by others stay theirs.
        let other =
            FakeNodes::start(client.clone(), &dead, Plan::default().group("other")).await.err().unwrap();
        let said = other.to_string();
        assert!(said.contains("exists already and is none of these fake nodes"), "{said}");

        again.delete().await.unwrap();
        beating.delete().await.unwrap();
        assert!(nodes.list(&ListParams::default()).await.unwrap().items.is_empty());
        let leases: Api<Lease> = Api::namespaced(client, "kube-node-lease");
        assert!(leases.list(&ListParams::default()).await.unwrap().items.is_empty());
    });
}

fn fleet(prefix: &str) -> ClusterFile {
    fake_nodes::inventory(3, &Template { prefix: prefix.into(), ..Template::default() }).unwrap()
}

fn readiness(node: &Node) -> String {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    let ready = conditions.and_then(|all| all.iter().find(|condition| condition.type_ == "Ready"));
    ready.map(|condition| condition.status.clone()).unwrap_or_default()
}

/// The node the real kube-scheduler chose for a pod that asks for all GPUs of one.
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
