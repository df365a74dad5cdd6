//! How the real kube-scheduler works with an extender, and with thousands of nodes. The design relies on each of these
//! behaviors.

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::api::{ListParams, PostParams, WatchEvent, WatchParams};
use kube::{Api, ResourceExt};
use partage_testkit::bed::{BedProfile, TestBed};
use partage_testkit::eventually;
use partage_testkit::extender::{self, BindArgs, ExtenderCall, ExtenderRules, ManagedResource, TestExtender};
use partage_testkit::fake_nodes::{self, FakeNodes, FakeNodesOptions, NodeTemplate};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

const GPU_RESOURCE: &str = "partage.dev/gpu";
const MEMORY_RESOURCE: &str = "partage.dev/memory";
const CORES_RESOURCE: &str = "partage.dev/cores";
const GRANT_ANNOTATION: &str = "partage.dev/grant";

/// A scheduler reads its configuration when it starts, so the address is fixed. Every bed has its own network.
fn extender_address() -> SocketAddr {
    "10.200.0.1:9998".parse().unwrap()
}

fn pod(name: &str, limits: &Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": name, "annotations": {"example.com/mine": "kept"}},
        "spec": {"containers": [{"name": "main", "image": "none", "resources": {"limits": limits}}]},
    }))
    .unwrap()
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref())
}

fn resource(pod: &Pod, name: &str) -> Option<String> {
    let limits = pod.spec.as_ref()?.containers.first()?.resources.as_ref()?.limits.as_ref()?;
    limits.get(name).map(|quantity| quantity.0.clone())
}

async fn create(pods: &Api<Pod>, name: &str, limits: &Value) {
    pods.create(&PostParams::default(), &pod(name, limits)).await.unwrap();
}

async fn wait_until_bound(pods: &Api<Pod>, name: &str) -> Pod {
    eventually(&format!("{name} is bound"), async || {
        let pod = pods.get(name).await.map_err(|e| e.to_string())?;
        if node_of(&pod).is_some() { Ok(pod) } else { Err(format!("{:?}", pod.status)) }
    })
    .await
}

/// Waits until the scheduler has written into the pod's condition why the pod does not fit, and returns the message.
async fn wait_until_unschedulable(pods: &Api<Pod>, name: &str) -> String {
    eventually(&format!("{name} is unschedulable"), async || {
        let pod = pods.get(name).await.map_err(|e| e.to_string())?;
        let conditions = pod.status.and_then(|status| status.conditions).unwrap_or_default();
        let output = conditions.iter().find(|c| c.type_ == "PodScheduled" && c.status == "False");
        output.and_then(|c| c.message.clone()).ok_or_else(|| format!("{conditions:?}"))
    })
    .await
}

/// Returns every event of one pod from a resource version on until it is bound.
async fn watch_until_bound(pods: &Api<Pod>, name: &str, since: String) -> Vec<Pod> {
    let params = WatchParams::default().fields(&format!("metadata.name={name}")).timeout(60);
    let (mut seen, mut version) = (Vec::new(), since);
    while seen.last().and_then(node_of).is_none() {
        // The server may end a watch at any time; the next one continues from the last version.
        let mut events = pods.watch(&params, &version).await.unwrap().boxed();
        while let Some(Ok(event)) = events.next().await {
            match event {
                WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                    version = pod.resource_version().unwrap();
                    let done = node_of(&pod).is_some();
                    seen.push(pod);
                    if done {
                        break;
                    }
                }
                WatchEvent::Bookmark(_) => {}
                other => panic!("{name}: {other:?}"),
            }
        }
    }
    seen
}

/// Uses one bed and three fake nodes of eight GPUs for all checks of an extender.
#[test]
fn extender_places_pods_and_its_binding_carries_the_grant() {
    let managed = [
        ManagedResource::counted(GPU_RESOURCE),
        ManagedResource::ignored(MEMORY_RESOURCE),
        ManagedResource::counted(CORES_RESOURCE),
    ];
    let profile = BedProfile::control_plane().extender(extender::config_entry(extender_address(), &managed));
    let Some(bed) = TestBed::for_test(profile) else { return };
    bed.block_on(async {
        let client = bed.client();
        let snapshot = fake_nodes::generate_snapshot(3, &NodeTemplate::default()).unwrap();
        let nodes = FakeNodes::start(client.clone(), &snapshot, FakeNodesOptions::default()).await.unwrap();
        let rules = ExtenderRules::default()
            .filter(|pod, node| match pod.name_any().as_str() {
                "too-large" => Err(format!("{} requests more memory than a GPU has", pod.name_any())),
                "granted" if node == "fake-00000" => Err("reserved for others".into()),
                // The extender also gets resources that the scheduler ignores.
                "by-memory" if resource(pod, MEMORY_RESOURCE).as_deref() != Some("8Gi") => {
                    Err("memory request is missing".into())
                }
                _ => Ok(()),
            })
            .score(|_, node| if node == "fake-00002" { 10 } else { 0 })
            .annotations(|bind: &BindArgs| {
                BTreeMap::from([(GRANT_ANNOTATION.into(), format!("{}@{}", bind.pod_uid, bind.node))])
            });
        let extender = TestExtender::start(client.clone(), extender_address(), rules).await.unwrap();
        let pods: Api<Pod> = Api::default_namespaced(client);

        wait_until_scheduler_knows_every_node(&pods, 3).await;
        grant_annotation_arrives_together_with_the_node_name(&pods, &extender).await;
        pod_without_gpu_bypasses_the_extender(&pods, &extender).await;
        resource_ignored_by_the_scheduler_needs_no_node_capacity(&pods, &extender).await;
        refusal_shows_the_extenders_message(&pods).await;
        nodes_are_not_filled_beyond_their_device_count(&pods).await;
        assert_eq!(nodes.missed_heartbeats(), 0, "{:?}", nodes.last_heartbeat_error());
    });
}

/// The scheduler learns of nodes through its own watch: a pod that fits only one node shows that this node is known.
async fn wait_until_scheduler_knows_every_node(pods: &Api<Pod>, count: usize) {
    for number in 0..count {
        let name = format!("probe-{number}");
        let mut probe = pod(&name, &json!({"cpu": "1"}));
        let node = BTreeMap::from([("kubernetes.io/hostname".to_string(), format!("fake-{number:05}"))]);
        probe.spec.as_mut().unwrap().node_selector = Some(node);
        pods.create(&PostParams::default(), &probe).await.unwrap();
        wait_until_bound(pods, &name).await;
    }
}

async fn grant_annotation_arrives_together_with_the_node_name(pods: &Api<Pod>, extender: &TestExtender) {
    let since = pods.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    create(pods, "granted", &json!({GPU_RESOURCE: "1"})).await;
    let seen = watch_until_bound(pods, "granted", since);
    let seen = tokio::time::timeout(Duration::from_secs(300), seen).await.expect("the pod is bound");
    assert!(seen.len() >= 2, "creation and binding are two events");
    for pod in &seen {
        assert_eq!(
            pod.annotations().contains_key(GRANT_ANNOTATION),
            node_of(pod).is_some(),
            "the annotation and the node name must appear together: {pod:?}"
        );
    }
    let pod = seen.last().unwrap();
    assert_eq!(node_of(pod), Some("fake-00002"), "the highest score of the remaining nodes");
    assert_eq!(pod.annotations()[GRANT_ANNOTATION], format!("{}@fake-00002", pod.uid().unwrap()));
    assert_eq!(pod.annotations()["example.com/mine"], "kept");
    let calls: Vec<ExtenderCall> =
        extender.calls().into_iter().filter(|call| call.pod() == "granted").collect();
    let [
        ExtenderCall::Filter { nodes: asked, .. },
        ExtenderCall::Prioritize { nodes: left, .. },
        ExtenderCall::Bind(bind),
    ] = &calls[..]
    else {
        panic!("expected filter, prioritize and bind, once each: {calls:?}")
    };
    assert_eq!((asked.len(), left.len()), (3, 2), "prioritize gets only the nodes that passed the filter");
    assert_eq!((bind.node.as_str(), &bind.pod_uid), ("fake-00002", &pod.uid().unwrap()));
}

async fn pod_without_gpu_bypasses_the_extender(pods: &Api<Pod>, extender: &TestExtender) {
    create(pods, "plain", &json!({"cpu": "1"})).await;
    let pod = wait_until_bound(pods, "plain").await;
    assert!(!pod.annotations().contains_key(GRANT_ANNOTATION));
    assert!(extender.calls().iter().all(|call| call.pod() != "plain"));
}

async fn resource_ignored_by_the_scheduler_needs_no_node_capacity(pods: &Api<Pod>, extender: &TestExtender) {
    create(pods, "by-memory", &json!({GPU_RESOURCE: "1", MEMORY_RESOURCE: "8Gi"})).await;
    assert!(wait_until_bound(pods, "by-memory").await.annotations().contains_key(GRANT_ANNOTATION));
    // A resource that is counted must be on the node; the extender is not called.
    create(pods, "by-cores", &json!({GPU_RESOURCE: "1", CORES_RESOURCE: "50"})).await;
    let output = wait_until_unschedulable(pods, "by-cores").await;
    assert!(output.contains("Insufficient partage.dev/cores"), "{output}");
    assert!(extender.calls().iter().all(|call| call.pod() != "by-cores"));
}

async fn refusal_shows_the_extenders_message(pods: &Api<Pod>) {
    create(pods, "too-large", &json!({GPU_RESOURCE: "1"})).await;
    let output = wait_until_unschedulable(pods, "too-large").await;
    assert!(output.contains("3 too-large requests more memory than a GPU has"), "{output}");
}

/// Runs last, because it fills all nodes.
async fn nodes_are_not_filled_beyond_their_device_count(pods: &Api<Pod>) {
    // The pods "granted" and "by-memory" hold two of 24 devices.
    let names: Vec<String> = (0..30).map(|number| format!("many-{number:02}")).collect();
    for name in &names {
        create(pods, name, &json!({GPU_RESOURCE: "1"})).await;
    }
    eventually("22 pods are bound and 8 are unschedulable", async || {
        let all = pods.list(&ListParams::default()).await.map_err(|e| e.to_string())?;
        let many = all.items.iter().filter(|pod| pod.name_any().starts_with("many-"));
        let (on_a_node, left): (Vec<&Pod>, Vec<&Pod>) = many.partition(|pod| node_of(pod).is_some());
        let refused = left.iter().filter(|pod| {
            let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
            conditions.is_some_and(|all| all.iter().any(|c| c.reason.as_deref() == Some("Unschedulable")))
        });
        let seen = (on_a_node.len(), refused.count());
        if seen == (22, 8) { Ok(()) } else { Err(format!("{seen:?}")) }
    })
    .await;
    assert_eq!(
        held_per_node(pods, GPU_RESOURCE).await,
        [("fake-00000", 8), ("fake-00001", 8), ("fake-00002", 8)].map(owned_pair).into()
    );
}

fn owned_pair((name, count): (&str, u64)) -> (String, u64) {
    (name.into(), count)
}

/// Returns how much of a resource the pods of each node hold.
async fn held_per_node(pods: &Api<Pod>, name: &str) -> BTreeMap<String, u64> {
    let mut held = BTreeMap::new();
    for pod in pods.list(&ListParams::default()).await.unwrap() {
        if let (Some(node), Some(amount)) = (node_of(&pod), resource(&pod, name)) {
            *held.entry(node.to_string()).or_insert(0) += amount.parse::<u64>().unwrap();
        }
    }
    held
}

#[test]
fn gpu_pod_waits_without_its_extender_and_other_pods_do_not() {
    let managed = [ManagedResource::counted(GPU_RESOURCE)];
    let profile = BedProfile::control_plane().extender(extender::config_entry(extender_address(), &managed));
    let Some(bed) = TestBed::for_test(profile) else { return };
    bed.block_on(async {
        let client = bed.client();
        let snapshot = fake_nodes::generate_snapshot(2, &NodeTemplate::default()).unwrap();
        let _nodes = FakeNodes::start(client.clone(), &snapshot, FakeNodesOptions::default()).await.unwrap();
        let pods: Api<Pod> = Api::default_namespaced(client.clone());
        create(&pods, "waits", &json!({GPU_RESOURCE: "1"})).await;
        create(&pods, "plain", &json!({"cpu": "1"})).await;
        wait_until_bound(&pods, "plain").await;
        let events: Api<Event> = Api::default_namespaced(client.clone());
        eventually("an event reports that the extender is unreachable", async || {
            let about = ListParams::default().fields("involvedObject.name=waits,reason=FailedScheduling");
            let all = events.list(&about).await.map_err(|e| e.to_string())?;
            let words: Vec<_> = all.items.into_iter().filter_map(|event| event.message).collect();
            // The first attempts may come before the nodes are known.
            if words.iter().any(|output| output.contains("connection refused")) {
                Ok(())
            } else {
                Err(format!("{words:?}"))
            }
        })
        .await;
        assert_eq!(node_of(&pods.get("waits").await.unwrap()), None);
        // The scheduler retries automatically.
        let extender =
            TestExtender::start(client, extender_address(), ExtenderRules::default()).await.unwrap();
        wait_until_bound(&pods, "waits").await;
        extender.stop().await;
    });
}

#[test]
fn two_hundred_nodes_are_scheduled_with_and_without_an_extender() {
    run_load_test(200, 200);
}

#[test]
#[ignore = "takes minutes and 2 GiB of memory: make soak"]
fn five_thousand_nodes_are_scheduled_with_and_without_an_extender() {
    run_load_test(5000, 500);
}

/// Creates fake nodes, then as many pods of each kind with three GPUs each: two fit on a node.
fn run_load_test(node_count: u32, pod_count: usize) {
    const COUNTED_RESOURCE: &str = "example.com/gpu";
    let managed = [ManagedResource::counted(GPU_RESOURCE)];
    let profile = BedProfile::control_plane().extender(extender::config_entry(extender_address(), &managed));
    let Some(bed) = TestBed::for_test(profile) else { return };
    bed.block_on(async {
        let client = bed.client();
        let snapshot = fake_nodes::generate_snapshot(node_count, &NodeTemplate::default()).unwrap();
        let plan = FakeNodesOptions::default().resources(|node| {
            let count = fake_nodes::gpu_count(node);
            let plain = count.values().map(|amount| (COUNTED_RESOURCE.to_string(), amount.clone())).collect();
            [count, plain].into_iter().flatten().collect()
        });
        let nodes = FakeNodes::start(client.clone(), &snapshot, plan).await.unwrap();
        let extender =
            TestExtender::start(client.clone(), extender_address(), ExtenderRules::default()).await.unwrap();
        let pods: Api<Pod> = Api::default_namespaced(client.clone());
        for (kind, resource) in [("plain", COUNTED_RESOURCE), ("managed", GPU_RESOURCE)] {
            let (pods, limits) = (&pods, &json!({resource: "3"}));
            stream::iter(0..pod_count)
                .for_each_concurrent(16, async |number| {
                    create(pods, &format!("{kind}-{number}"), limits).await
                })
                .await;
            eventually(&format!("all {kind} pods are bound"), async || {
                let all = pods.list(&ListParams::default()).await.map_err(|e| e.to_string())?;
                let ours = all.items.iter().filter(|pod| pod.name_any().starts_with(kind));
                let left = ours.filter(|pod| node_of(pod).is_none()).count();
                if left == 0 { Ok(()) } else { Err(format!("{left} are not bound")) }
            })
            .await;
            let held = held_per_node(pods, resource).await;
            assert_eq!(held.values().sum::<u64>(), 3 * pod_count as u64);
            assert!(held.values().all(|&held| held <= 8), "{held:?}");
        }
        let calls = extender.calls();
        assert!(calls.iter().all(|call| call.pod().starts_with("managed-")));
        let binds = calls.iter().filter(|call| matches!(call, ExtenderCall::Bind(_)));
        assert_eq!(binds.map(ExtenderCall::pod).collect::<BTreeSet<_>>().len(), pod_count);
        let all = Api::<Node>::all(client).list(&ListParams::default()).await.unwrap();
        assert_eq!(all.items.len(), node_count as usize);
        let lost: Vec<&Node> = all.items.iter().filter(|node| !is_ready(node)).collect();
        assert!(lost.is_empty(), "{} nodes are not Ready, the first: {:?}", lost.len(), lost.first());
        assert_eq!(nodes.missed_heartbeats(), 0, "{:?}", nodes.last_heartbeat_error());
    });
}

fn is_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    let tainted =
        node.spec.as_ref().and_then(|spec| spec.taints.as_ref()).is_some_and(|taints| !taints.is_empty());
    !tainted && conditions.is_some_and(|all| all.iter().any(|c| c.type_ == "Ready" && c.status == "True"))
}
