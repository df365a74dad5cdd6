//! What a node asks of a real API server: it goes away and comes back, pods of one name follow each other, rights are missing.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use partage_cluster::{About, Annotated, Cluster, ClusterError, Phase, PodView, Publication, Severity};
use partage_core::model::{PodId, PodUid};
use partage_testkit::bed::{Bed, Profile};
use partage_testkit::eventually;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;
use tempfile::TempDir;

const NODE: &str = "n1";
/// Only a test that fails waits so long.
const PATIENCE: Duration = Duration::from_secs(120);

/// A control plane with a node that nobody runs: pods on it are bound by hand and stay as they are.
struct Plane {
    folder: TempDir,
    bed: Bed,
}

impl Plane {
    fn start() -> Option<Plane> {
        let bed = Bed::for_test(Profile::control_plane())?;
        let plane = Plane { folder: tempfile::tempdir().unwrap(), bed };
        plane.apply(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}));
        Some(plane)
    }

    fn apply(&self, object: Value) {
        self.bed.kubectl_with(&["create", "-f", "-"], &object.to_string()).unwrap();
    }

    fn get(&self, arguments: &[&str]) -> Value {
        let all = [&["get", "-o", "json"], arguments].concat();
        serde_json::from_str(&self.bed.kubectl(&all).unwrap()).unwrap()
    }

    fn pod(&self, name: &str, node: &str, limits: Value) -> PodId {
        self.apply(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "annotations": {"partage.dev/policy": "spread"}},
            "spec": {
                "nodeName": node,
                "containers": [{"name": "main", "image": "none", "resources": {"limits": limits}}],
            },
        }));
        let uid = self.get(&["pod", name])["metadata"]["uid"].as_str().unwrap().to_string();
        PodId { uid: uid.into(), namespace: "default".into(), name: name.into() }
    }

    fn delete(&self, name: &str) {
        self.bed.kubectl(&["delete", "pod", name, "--force", "--grace-period=0"]).unwrap();
    }

    fn annotation(&self, pod: &str, key: &str) -> Value {
        self.get(&["pod", pod])["metadata"]["annotations"][key].clone()
    }

    /// The administrator's kubeconfig, changed.
    fn kubeconfig(&self, name: &str, change: impl FnOnce(&mut Value)) -> PathBuf {
        let text = self.bed.kubectl(&["config", "view", "--raw", "-o", "json"]).unwrap();
        let mut config = serde_json::from_str(&text).unwrap();
        change(&mut config);
        let path = self.folder.path().join(name);
        std::fs::write(&path, config.to_string()).unwrap();
        path
    }

    fn administrator(&self) -> Cluster {
        let path = self.kubeconfig("administrator", |_| {});
        self.bed.block_on(Cluster::connect(Some(&path), &NODE.into())).unwrap()
    }

    /// A service account that may do this much, with its token.
    fn account(&self, name: &str, rules: Value) -> String {
        self.bed.kubectl(&["create", "serviceaccount", name]).unwrap();
        self.apply(json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
            "metadata": {"name": name}, "rules": rules,
        }));
        let account = format!("--serviceaccount=default:{name}");
        self.bed.kubectl(&["create", "clusterrolebinding", name, "--clusterrole", name, &account]).unwrap();
        self.bed.kubectl(&["create", "token", name]).unwrap().trim().to_string()
    }

    fn by_token(&self, token: &str) -> PathBuf {
        self.kubeconfig("token", |config| config["users"][0]["user"] = json!({"token": token}))
    }

    fn with_token(&self, token: &str) -> Cluster {
        let path = self.by_token(token);
        self.bed.block_on(Cluster::connect(Some(&path), &NODE.into())).unwrap()
    }
}

#[test]
fn pods_stay_known_while_the_server_is_away_and_those_deleted_meanwhile_go() {
    let Some(plane) = Plane::start() else { return };
    let cluster = plane.administrator();
    let first = plane.pod("first", NODE, json!({"volcano.sh/vgpu-memory": 3000}));
    plane.pod("elsewhere", "n2", json!({"volcano.sh/vgpu-memory": 3000}));
    let pods = plane.bed.block_on(async { cluster.watch_pods() });
    let wait = |uid: &PodUid| plane.bed.block_on(pods.wait_for(uid, PATIENCE)).unwrap();
    let seen = wait(&first.uid);
    assert!(pods.synced() && pods.last_contact().is_some());
    assert_eq!((&seen.id, seen.phase), (&first, Phase::Pending));
    assert_eq!(
        seen.pod.containers[0].amount("volcano.sh/vgpu-memory"),
        Some("3k"),
        "as the server writes it"
    );
    assert_eq!(seen.pod.annotations["partage.dev/policy"], "spread");
    assert_eq!(pods.all().len(), 1, "pods of other nodes are none of ours");

    let second = plane.pod("second", NODE, json!({}));
    assert!(wait(&second.uid).pod.annotations.is_empty(), "it asks for nothing, so nothing of it is kept");
    let status = r#"{"status":{"phase":"Running","initContainerStatuses":[]}}"#;
    plane
        .bed
        .kubectl(&["patch", "pod", "first", "--subresource=status", "--type=merge", "-p", status])
        .unwrap();
    plane.bed.block_on(eventually("the pod is seen running", async || {
        let phase = pods.by_uid(&first.uid).unwrap().phase;
        if phase == Phase::Running { Ok(()) } else { Err(format!("{phase:?}")) }
    }));

    plane.bed.apiserver().kill();
    let missed = plane.bed.block_on(cluster.pod(&first.namespace, &first.name)).unwrap_err();
    assert!(matches!(missed, ClusterError::Away { .. }) && missed.passes(), "{missed}");
    assert!(
        missed.to_string().starts_with("reading pod default/first: the API server does not answer ("),
        "{missed}"
    );
    assert_eq!(pods.all().len(), 2);
    assert!(plane.bed.block_on(pods.wait_for(&first.uid, PATIENCE)).is_some());
    let nobody = plane.bed.block_on(pods.wait_for(&"nobody".into(), Duration::from_millis(1)));
    assert_eq!(nobody, None);
    plane.bed.apiserver().start().unwrap();
    plane.bed.api_ready().unwrap();
    plane.delete("first");
    let third = plane.pod("third", NODE, json!({}));
    wait(&third.uid);
    plane.bed.block_on(eventually("the deleted pod is gone", async || match pods.by_uid(&first.uid) {
        None => Ok(()),
        Some(pod) => Err(format!("{pod:?}")),
    }));
    assert_eq!(names(&pods.all()), ["second", "third"]);
}

fn names(pods: &[std::sync::Arc<PodView>]) -> Vec<String> {
    let mut names: Vec<String> = pods.iter().map(|pod| pod.id.name.to_string()).collect();
    names.sort();
    names
}

#[test]
fn nothing_is_done_to_a_successor_of_the_same_name() {
    let Some(plane) = Plane::start() else { return };
    let cluster = plane.administrator();
    let annotate = |pod: &PodId, text: Option<&str>| {
        let annotations = BTreeMap::from([("partage.dev/grant".to_string(), text.map(String::from))]);
        plane.bed.block_on(cluster.annotate(pod, &annotations))
    };
    let old = plane.pod("same", NODE, json!({}));
    assert_eq!(annotate(&old, Some("old")), Ok(Annotated::Done));
    assert_eq!(plane.annotation("same", "partage.dev/grant"), "old");
    plane.delete("same");
    assert_eq!(annotate(&old, Some("old")), Ok(Annotated::Gone));
    plane.bed.block_on(cluster.evict(&old)).unwrap();

    let new = plane.pod("same", NODE, json!({}));
    assert_eq!(annotate(&old, Some("old")), Ok(Annotated::Gone));
    plane.bed.block_on(cluster.evict(&old)).unwrap();
    let object = plane.get(&["pod", "same"]);
    assert_eq!(object["metadata"]["annotations"], json!({"partage.dev/policy": "spread"}));
    assert_eq!(object["metadata"]["deletionTimestamp"], Value::Null);

    assert_eq!(annotate(&new, Some("new")), Ok(Annotated::Done));
    assert_eq!(annotate(&new, None), Ok(Annotated::Done));
    assert_eq!(plane.annotation("same", "partage.dev/grant"), Value::Null);
    let seen = plane.bed.block_on(cluster.pod(&new.namespace, &new.name)).unwrap().unwrap();
    assert_eq!(seen.id, new);
    plane.bed.block_on(cluster.evict(&new)).unwrap();
    let words = [
        "get",
        "pod",
        "same",
        "--ignore-not-found",
        "-o",
        "jsonpath={.metadata.uid}{.metadata.deletionTimestamp}",
    ];
    let left = plane.bed.kubectl(&words).unwrap();
    assert!(left.is_empty() || left.trim() != new.uid.as_str(), "it goes: {left}");
}

#[test]
fn who_is_evicted_ends_soon_whatever_it_asks_for() {
    let Some(plane) = Plane::start() else { return };
    let cluster = plane.administrator();
    for (name, asks, gets) in [("year", 31_536_000, 30), ("quick", 5, 5)] {
        plane.apply(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {
                "nodeName": NODE, "terminationGracePeriodSeconds": asks,
                "containers": [{"name": "main", "image": "none"}],
            },
        }));
        let uid = plane.get(&["pod", name])["metadata"]["uid"].as_str().unwrap().to_string();
        let id = PodId { uid: uid.into(), namespace: "default".into(), name: name.into() };
        plane.bed.block_on(cluster.evict(&id)).unwrap();
        assert_eq!(plane.get(&["pod", name])["metadata"]["deletionGracePeriodSeconds"], gets, "{name}");
    }
}

#[test]
fn a_node_says_what_it_has_by_its_status_alone() {
    let Some(plane) = Plane::start() else { return };
    let token = plane.account(
        "agent",
        json!([
            {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]},
            {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
        ]),
    );
    let cluster = plane.with_token(&token);
    let shown = plane.bed.block_on(async { cluster.watch_node() });
    let some = |text: &str| Some(text.to_string());
    let said = Publication {
        capacity: BTreeMap::from([
            ("volcano.sh/vgpu-memory".into(), 89_424),
            ("partage.dev/cores".into(), 200),
        ]),
        annotations: BTreeMap::from([("partage.dev/inventory".into(), some("{}"))]),
        labels: BTreeMap::from([("gpushare".into(), some("true"))]),
        ..Publication::default()
    };
    plane.bed.block_on(async {
        // The API server hears of the role a moment after it was made.
        eventually("it may publish", async || cluster.publish(&said).await).await;
        let node = cluster.node().await.unwrap();
        assert_eq!(node.capacity, node.allocatable);
        assert_eq!(node.capacity["volcano.sh/vgpu-memory"], "89424");
        assert_eq!(node.annotations["partage.dev/inventory"], "{}");
        assert_eq!(node.labels["gpushare"], "true");
        eventually("the watch shows the node as it is", async || {
            // Others write on it too.
            let node = cluster.node().await.map_err(|error| error.to_string())?;
            let shown = shown.borrow().clone();
            if shown.as_deref() == Some(&node) { Ok(()) } else { Err(format!("{shown:?}, and not {node:?}")) }
        })
        .await;

        let said = Publication {
            gone_capacity: BTreeSet::from(["volcano.sh/vgpu-memory".into()]),
            annotations: BTreeMap::from([("partage.dev/inventory".into(), None)]),
            labels: BTreeMap::from([("gpushare".into(), None)]),
            ..Publication::default()
        };
        cluster.publish(&said).await.unwrap();
        let node = cluster.node().await.unwrap();
        assert_eq!(node.capacity, BTreeMap::from([("partage.dev/cores".to_string(), "200".to_string())]));
        assert!(
            !node.annotations.contains_key("partage.dev/inventory") && !node.labels.contains_key("gpushare")
        );

        let forbidden = cluster.watch_pods();
        let said = cluster.pod(&"default".into(), &"any".into()).await.unwrap_err();
        assert!(matches!(said, ClusterError::Forbidden { .. }) && !said.passes());
        assert!(said.to_string().contains("cannot get resource \"pods\""), "{said}");
        assert!(!forbidden.synced());
    });
    let path = plane.kubeconfig("other", |_| {});
    plane.bed.block_on(async {
        let other = Cluster::connect(Some(&path), &"n9".into()).await.unwrap();
        let said = other.node().await.unwrap_err().to_string();
        let expected =
            "reading node n9: the cluster has no node n9: give the name under which its kubelet registered it";
        assert_eq!(said, expected);
        assert!(matches!(other.publish(&Publication::default()).await, Err(ClusterError::NoNode { .. })));
        let said = Cluster::connect(None, &NODE.into()).await.unwrap_err().to_string();
        assert!(said.starts_with("this process runs in no pod with a service account ("), "{said}");
        let absent = plane.folder.path().join("absent");
        let said = Cluster::connect(Some(&absent), &NODE.into()).await.unwrap_err().to_string();
        assert!(said.starts_with(&format!("the kubeconfig {} cannot be used (", absent.display())), "{said}");
    });
}

#[test]
fn events_are_counted_and_outlive_an_absence_of_the_server() {
    let Some(plane) = Plane::start() else { return };
    let token = plane.account(
        "agent",
        json!([{"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch"]}]),
    );
    let cluster = plane.with_token(&token);
    let pod = plane.pod("greedy", NODE, json!({}));
    let events = |subject: &str| -> Vec<(String, i64)> {
        let selector = format!("involvedObject.name={subject}");
        let list = plane.get(&["events", "--field-selector", &selector]);
        let ours = |event: &&Value| event["reportingComponent"] == "partage.dev/node";
        let mut seen: Vec<_> = list["items"]
            .as_array()
            .unwrap()
            .iter()
            .filter(ours)
            .map(|event| {
                let count = event["series"]["count"].as_i64().unwrap_or(1);
                (format!("{} {}: {}", event["type"], event["reason"], event["message"]), count)
            })
            .collect();
        seen.sort();
        seen
    };
    let expect = |subject: &str, expected: &[(&str, i64)]| {
        let expected: Vec<(String, i64)> = expected.iter().map(|(s, n)| (s.to_string(), *n)).collect();
        plane.bed.block_on(eventually("the events are there", async || {
            let seen = events(subject);
            if seen == expected { Ok(()) } else { Err(format!("{seen:?}")) }
        }));
    };
    plane.bed.apiserver().kill();
    for _ in 0..3 {
        cluster.tell(About::Pod(&pod), Severity::Warning, "Bypass", "uses more than its region says");
        cluster.tell(About::Node, Severity::Normal, "GpuBack", "GPU 0 answers again");
    }
    cluster.tell(About::Pod(&pod), Severity::Normal, "Resized", &"é".repeat(600));
    plane.bed.apiserver().start().unwrap();
    plane.bed.api_ready().unwrap();
    let cut = format!("\"Normal\" \"Resized\": \"{}\"", "é".repeat(512));
    expect("greedy", &[(&cut, 1), ("\"Warning\" \"Bypass\": \"uses more than its region says\"", 3)]);
    expect(NODE, &[("\"Normal\" \"GpuBack\": \"GPU 0 answers again\"", 3)]);
    let described = plane.bed.kubectl(&["describe", "node", NODE]).unwrap();
    assert!(described.contains("GPU 0 answers again"), "{described}");
    let described = plane.bed.kubectl(&["describe", "pod", "greedy"]).unwrap();
    assert!(described.contains("uses more than its region says"), "{described}");
}

#[test]
fn metrics_are_for_those_whom_rbac_lets() {
    let Some(plane) = Plane::start() else { return };
    let may = json!([{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]);
    let (scraper, other) = (plane.account("scraper", may), plane.account("other", json!([])));
    let agent = plane.account(
        "agent",
        json!([
            {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]},
            {"apiGroups": ["authorization.k8s.io"], "resources": ["subjectaccessreviews"], "verbs": ["create"]},
        ]),
    );
    let cluster = plane.with_token(&agent);
    let ask = |cluster: &Cluster, token: &str| plane.bed.block_on(cluster.may_read_metrics(token));
    let path = plane.by_token(&agent);
    plane.bed.block_on(eventually("the right is in force", async || {
        // A connection of its own, which has no answer from before.
        let fresh = Cluster::connect(Some(&path), &NODE.into()).await.unwrap();
        match fresh.may_read_metrics(&scraper).await {
            Ok(true) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    }));
    assert_eq!(ask(&cluster, &scraper), Ok(true));
    for refused in [other.as_str(), "nobody's", "", &"x".repeat(20 << 10)] {
        assert_eq!(ask(&cluster, refused), Ok(false), "{refused:.20}");
    }
    let said = ask(&plane.with_token(&other), &scraper).unwrap_err();
    assert!(matches!(said, ClusterError::Forbidden { .. }), "{said}");
    assert!(said.to_string().starts_with("asking whose token it is: the API server forbids it ("), "{said}");

    plane.bed.apiserver().kill();
    let said = ask(&cluster, &other[1..]).unwrap_err();
    assert!(said.passes(), "{said}");
}
