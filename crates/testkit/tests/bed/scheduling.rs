//! What the real kube-scheduler does with an extender, and with thousands of nodes. The design leans on each of these.

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::api::{ListParams, PostParams, WatchEvent, WatchParams};
use kube::{Api, ResourceExt};
use partage_testkit::bed::{Bed, Profile};
use partage_testkit::eventually;
use partage_testkit::extender::{self, Bind, Call, Extender, Managed, Rules};
use partage_testkit::fake_nodes::{self, FakeNodes, Plan, Template};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

const GPU: &str = "partage.dev/gpu";
const MEMORY: &str = "partage.dev/memory";
const CORES: &str = "partage.dev/cores";
const GRANT: &str = "partage.dev/grant";

/// A scheduler reads its configuration when it starts: the address is fixed. Every bed has a network of its own.
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

async fn bound(pods: &Api<Pod>, name: &str) -> Pod {
    eventually(&format!("{name} is bound"), async || {
        let pod = pods.get(name).await.map_err(|e| e.to_string())?;
        if node_of(&pod).is_some() { Ok(pod) } else { Err(format!("{:?}", pod.status)) }
    })
    .await
}

/// Waits until the scheduler has said why a pod does not fit, in the pod's condition, and returns the words.
async fn unschedulable(pods: &Api<Pod>, name: &str) -> String {
    eventually(&format!("{name} is found not to fit"), async || {
        let pod = pods.get(name).await.map_err(|e| e.to_string())?;
        let conditions = pod.status.and_then(|status| status.conditions).unwrap_or_default();
        let said = conditions.iter().find(|c| c.type_ == "PodScheduled" && c.status == "False");
        said.and_then(|c| c.message.clone()).ok_or_else(|| format!("{conditions:?}"))
    })
    .await
}

/// Every event of one pod from a moment on until it is bound, none left out.
async fn watched_until_bound(pods: &Api<Pod>, name: &str, since: String) -> Vec<Pod> {
    let params = WatchParams::default().fields(&format!("metadata.name={name}")).timeout(60);
    let (mut seen, mut version) = (Vec::new(), since);
    while seen.last().and_then(node_of).is_none() {
        // The server may end a watch at any time; the next one goes on where it was.
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

/// One bed and three fake nodes of eight GPUs for all that an extender shows.
#[test]
fn an_extender_decides_and_its_binding_carries_the_grant() {
    let managed = [Managed::counted(GPU), Managed::ignored(MEMORY), Managed::counted(CORES)];
    let profile = Profile::control_plane().extender(extender::entry(extender_address(), &managed));
    let Some(bed) = Bed::for_test(profile) else { return };
    bed.block_on(async {
        let client = bed.client();
        let snapshot = fake_nodes::inventory(3, &Template::default()).unwrap();
        let nodes = FakeNodes::start(client.clone(), &snapshot, Plan::default()).await.unwrap();
        let rules = Rules::default()
            .filter(|pod, node| match pod.name_any().as_str() {
                "too-large" => Err(format!("{} wants more memory than a GPU has", pod.name_any())),
                "granted" if node == "fake-00000" => Err("kept for others".into()),
                // What the scheduler ignores still arrives.
                "by-memory" if resource(pod, MEMORY).as_deref() != Some("8Gi") => {
                    Err("lost its memory".into())
                }
                _ => Ok(()),
            })
            .score(|_, node| if node == "fake-00002" { 10 } else { 0 })
            .annotations(|bind: &Bind| {
                BTreeMap::from([(GRANT.into(), format!("{}@{}", bind.pod_uid, bind.node))])
            });
        let extender = Extender::start(client.clone(), extender_address(), rules).await.unwrap();
        let pods: Api<Pod> = Api::default_namespaced(client);

        every_node_is_known_to_the_scheduler(&pods, 3).await;
        the_grant_arrives_with_the_node_and_never_alone(&pods, &extender).await;
        others_never_reach_the_extender(&pods, &extender).await;
        an_ignored_quantity_needs_no_node_that_has_it(&pods, &extender).await;
        a_refusal_is_said_in_the_extenders_words(&pods).await;
        no_node_is_filled_over_its_count(&pods).await;
        assert_eq!(nodes.missed(), 0, "{:?}", nodes.last_miss());
    });
}

/// The scheduler learns of nodes by a watch of its own: a pod that only one of them suits shows that it did.
async fn every_node_is_known_to_the_scheduler(pods: &Api<Pod>, count: usize) {
    for number in 0..count {
        let name = format!("probe-{number}");
        let mut probe = pod(&name, &json!({"cpu": "1"}));
        let node = BTreeMap::from([("kubernetes.io/hostname".to_string(), format!("fake-{number:05}"))]);
        probe.spec.as_mut().unwrap().node_selector = Some(node);
        pods.create(&PostParams::default(), &probe).await.unwrap();
        bound(pods, &name).await;
    }
}

async fn the_grant_arrives_with_the_node_and_never_alone(pods: &Api<Pod>, extender: &Extender) {
    let since = pods.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    create(pods, "granted", &json!({GPU: "1"})).await;
    let seen = watched_until_bound(pods, "granted", since);
    let seen = tokio::time::timeout(Duration::from_secs(300), seen).await.expect("the pod is bound");
    assert!(seen.len() >= 2, "created, then bound");
    for pod in &seen {
        assert_eq!(
            pod.annotations().contains_key(GRANT),
            node_of(pod).is_some(),
            "one without the other: {pod:?}"
        );
    }
    let pod = seen.last().unwrap();
    assert_eq!(node_of(pod), Some("fake-00002"), "the best of those left");
    assert_eq!(pod.annotations()[GRANT], format!("{}@fake-00002", pod.uid().unwrap()));
    assert_eq!(pod.annotations()["example.com/mine"], "kept");
    let calls: Vec<Call> = extender.calls().into_iter().filter(|call| call.pod() == "granted").collect();
    let [Call::Filter { nodes: asked, .. }, Call::Prioritize { nodes: left, .. }, Call::Bind(bind)] =
        &calls[..]
    else {
        panic!("filter, prioritize and bind, once each: {calls:?}")
    };
    assert_eq!((asked.len(), left.len()), (3, 2), "names of nodes, and only those that passed");
    assert_eq!((bind.node.as_str(), &bind.pod_uid), ("fake-00002", &pod.uid().unwrap()));
}

async fn others_never_reach_the_extender(pods: &Api<Pod>, extender: &Extender) {
    create(pods, "plain", &json!({"cpu": "1"})).await;
    let pod = bound(pods, "plain").await;
    assert!(!pod.annotations().contains_key(GRANT));
    assert!(extender.calls().iter().all(|call| call.pod() != "plain"));
}

async fn an_ignored_quantity_needs_no_node_that_has_it(pods: &Api<Pod>, extender: &Extender) {
    create(pods, "by-memory", &json!({GPU: "1", MEMORY: "8Gi"})).await;
    assert!(bound(pods, "by-memory").await.annotations().contains_key(GRANT));
    // A resource that is counted must be on the node; the extender is not even asked.
    create(pods, "by-cores", &json!({GPU: "1", CORES: "50"})).await;
    let said = unschedulable(pods, "by-cores").await;
    assert!(said.contains("Insufficient partage.dev/cores"), "{said}");
    assert!(extender.calls().iter().all(|call| call.pod() != "by-cores"));
}

async fn a_refusal_is_said_in_the_extenders_words(pods: &Api<Pod>) {
    create(pods, "too-large", &json!({GPU: "1"})).await;
    let said = unschedulable(pods, "too-large").await;
    assert!(said.contains("3 too-large wants more memory than a GPU has"), "{said}");
}

/// Runs last: it takes everything.
async fn no_node_is_filled_over_its_count(pods: &Api<Pod>) {
    // "granted" and "by-memory" hold two of 24.
    let names: Vec<String> = (0..30).map(|number| format!("many-{number:02}")).collect();
    for name in &names {
        create(pods, name, &json!({GPU: "1"})).await;
    }
    eventually("22 are bound and 8 are found not to fit", async || {
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
        held(pods, GPU).await,
        [("fake-00000", 8), ("fake-00001", 8), ("fake-00002", 8)].map(own).into()
    );
}

fn own((name, count): (&str, u64)) -> (String, u64) {
    (name.into(), count)
}

/// How much of a resource the pods of each node hold.
async fn held(pods: &Api<Pod>, name: &str) -> BTreeMap<String, u64> {
    let mut held = BTreeMap::new();
    for pod in pods.list(&ListParams::default()).await.unwrap() {
        if let (Some(node), Some(amount)) = (node_of(&pod), resource(&pod, name)) {
            *held.entry(node.to_string()).or_insert(0) += amount.parse::<u64>().unwrap();
        }
    }
    held
}

#[test]
fn without_its_extender_a_gpu_pod_waits_and_others_do_not() {
    let managed = [Managed::counted(GPU)];
    let profile = Profile::control_plane().extender(extender::entry(extender_address(), &managed));
    let Some(bed) = Bed::for_test(profile) else { return };
    bed.block_on(async {
        let client = bed.client();
        let snapshot = fake_nodes::inventory(2, &Template::default()).unwrap();
        let _nodes = FakeNodes::start(client.clone(), &snapshot, Plan::default()).await.unwrap();
        let pods: Api<Pod> = Api::default_namespaced(client.clone());
        create(&pods, "waits", &json!({GPU: "1"})).await;
        create(&pods, "plain", &json!({"cpu": "1"})).await;
        bound(&pods, "plain").await;
        let events: Api<Event> = Api::default_namespaced(client.clone());
        eventually("an event says that the extender is not there", async || {
            let about = ListParams::default().fields("involvedObject.name=waits,reason=FailedScheduling");
            let all = events.list(&about).await.map_err(|e| e.to_string())?;
            let words: Vec<_> = all.items.into_iter().filter_map(|event| event.message).collect();
            // The first tries may come before the nodes are known.
            if words.iter().any(|said| said.contains("connection refused")) {
                Ok(())
            } else {
                Err(format!("{words:?}"))
            }
        })
        .await;
        assert_eq!(node_of(&pods.get("waits").await.unwrap()), None);
        // It is tried again by itself.
        let extender = Extender::start(client, extender_address(), Rules::default()).await.unwrap();
        bound(&pods, "waits").await;
        extender.stop().await;
    });
}

#[test]
fn two_hundred_nodes_are_filled_with_and_without_an_extender() {
    load(200, 200);
}

#[test]
#[ignore = "minutes, and 2 GiB of memory: make soak"]
fn five_thousand_nodes_are_filled_with_and_without_an_extender() {
    load(5000, 500);
}

/// Fake nodes, then as many pods of each kind, three GPUs each: two fit on a node.
fn load(node_count: u32, pod_count: usize) {
    const COUNTED: &str = "example.com/gpu";
    let managed = [Managed::counted(GPU)];
    let profile = Profile::control_plane().extender(extender::entry(extender_address(), &managed));
    let Some(bed) = Bed::for_test(profile) else { return };
    bed.block_on(async {
        let client = bed.client();
        let snapshot = fake_nodes::inventory(node_count, &Template::default()).unwrap();
        let plan = Plan::default().resources(|node| {
            let count = fake_nodes::gpu_count(node);
            let plain = count.values().map(|amount| (COUNTED.to_string(), amount.clone())).collect();
            [count, plain].into_iter().flatten().collect()
        });
        let nodes = FakeNodes::start(client.clone(), &snapshot, plan).await.unwrap();
        let extender = Extender::start(client.clone(), extender_address(), Rules::default()).await.unwrap();
        let pods: Api<Pod> = Api::default_namespaced(client.clone());
        for (kind, resource) in [("plain", COUNTED), ("managed", GPU)] {
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
                if left == 0 { Ok(()) } else { Err(format!("{left} are not")) }
            })
            .await;
            let held = held(pods, resource).await;
            assert_eq!(held.values().sum::<u64>(), 3 * pod_count as u64);
            assert!(held.values().all(|&held| held <= 8), "{held:?}");
        }
        let calls = extender.calls();
        assert!(calls.iter().all(|call| call.pod().starts_with("managed-")));
        let binds = calls.iter().filter(|call| matches!(call, Call::Bind(_)));
        assert_eq!(binds.map(Call::pod).collect::<BTreeSet<_>>().len(), pod_count);
        let all = Api::<Node>::all(client).list(&ListParams::default()).await.unwrap();
        assert_eq!(all.items.len(), node_count as usize);
        let lost: Vec<&Node> = all.items.iter().filter(|node| !is_ready(node)).collect();
        assert!(lost.is_empty(), "{} nodes are not Ready, the first: {:?}", lost.len(), lost.first());
        assert_eq!(nodes.missed(), 0, "{:?}", nodes.last_miss());
    });
}

fn is_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    let tainted =
        node.spec.as_ref().and_then(|spec| spec.taints.as_ref()).is_some_and(|taints| !taints.is_empty());
    !tainted && conditions.is_some_and(|all| all.iter().any(|c| c.type_ == "Ready" && c.status == "True"))
}
