use super::*;
use crate::resources::PodRequest;
use crate::resources::tests::{node, settings};
use partage_cluster::PodView;
use partage_core::model::Gpu;
use partage_testkit::bed::{BedProfile, TestBed};
use partage_testkit::eventually;
use serde_json::{Value, json};
use std::sync::Arc;

const MEMORY: &str = "volcano.sh/vgpu-memory";

fn map(texts: &[(&str, &str)]) -> BTreeMap<String, String> {
    texts.iter().map(|(key, text)| (key.to_string(), text.to_string())).collect()
}

/// Returns a node after a patch.
fn changed(mut node: NodeView, change: &NodePatch) -> NodeView {
    let apply = |shown: &mut BTreeMap<String, String>, change: &BTreeMap<String, Option<String>>| {
        for (key, text) in change {
            match text {
                Some(text) => drop(shown.insert(key.clone(), text.clone())),
                None => drop(shown.remove(key)),
            }
        }
    };
    apply(&mut node.annotations, &change.annotations);
    apply(&mut node.labels, &change.labels);
    for amounts in [&mut node.capacity, &mut node.allocatable] {
        amounts.retain(|name, _| !change.removed_capacity.contains(name));
        amounts.extend(change.capacity.iter().map(|(name, amount)| (name.clone(), amount.to_string())));
    }
    node
}

/// Returns a node after all patches to the desired state.
fn settled(statement: &DesiredNodeStatus, mut node: NodeView) -> NodeView {
    for part in [status_patch, label_patch] {
        if let Some(needed) = part(statement, &node) {
            node = changed(node, &needed);
        }
    }
    assert_eq!((status_patch(statement, &node), label_patch(statement, &node)), (None, None));
    node
}

#[test]
fn only_differences_are_patched_and_only_owned_keys_are_removed() {
    let before = NodeView {
        labels: map(&[("gpushare", "true"), ("zone", "a"), ("nvidia-device-enable", "disable")]),
        annotations: map(&[("their", "own"), (PUBLISHED_ANNOTATION, "not written by an agent")]),
        ..NodeView::default()
    };
    let labels = map(&[("gpushare", "true"), ("nvidia-device-enable", "enable")]);
    let settings = AgentSettings { labels, ..settings(&[Dialect::Volcano]) };
    let statement = desired(&node(&[50_000, 50_000]), &settings, &RequestedAmounts::default());
    let first = label_patch(&statement, &before).unwrap();
    assert_eq!(first.labels, BTreeMap::from([("nvidia-device-enable".into(), Some("enable".into()))]));
    let mut shown = settled(&statement, before);
    for amounts in [&mut shown.capacity, &mut shown.allocatable] {
        assert_eq!(amounts.insert(MEMORY.into(), "100k".into()).unwrap(), "100000");
    }
    assert_eq!(status_patch(&statement, &shown), None, "the API server's spelling of the same amount");

    // Kubelet reset the amount, and another component removed the label.
    shown.allocatable.insert(MEMORY.into(), "0".into());
    shown.labels.remove("gpushare");
    let mend = status_patch(&statement, &shown).unwrap();
    assert_eq!(mend.capacity, BTreeMap::from([(MEMORY.into(), 100_000)]));
    let mend = label_patch(&statement, &shown).unwrap();
    assert_eq!(mend.labels, BTreeMap::from([("gpushare".into(), Some("true".into()))]));
    let shown = settled(&statement, shown);

    let native = DesiredNodeStatus { labels: map(&[("gpushare", "true")]), ..DesiredNodeStatus::default() };
    let switched = settled(&native, shown);
    assert_eq!(switched.capacity, BTreeMap::new());
    assert_eq!(switched.labels, map(&[("gpushare", "true"), ("zone", "a")]));
    let left = settled(&DesiredNodeStatus::default(), switched);
    assert_eq!(left.labels, map(&[("zone", "a")]));
    assert_eq!(left.annotations, map(&[("their", "own")]));
}

#[test]
fn label_that_may_not_be_removed_stays_owned() {
    let labels = map(&[("gpushare", "true")]);
    let with = desired(
        &node(&[50_000]),
        &AgentSettings { labels, ..settings(&[Dialect::Volcano]) },
        &RequestedAmounts::default(),
    );
    let shown = settled(&with, NodeView::default());
    // Everything else is removed; the admission policy must find the label recorded when it is removed.
    let left = changed(shown.clone(), &status_patch(&DesiredNodeStatus::default(), &shown).unwrap());
    assert_eq!((&left.capacity, &left.labels), (&BTreeMap::new(), &shown.labels));
    assert_eq!(
        left.annotations,
        map(&[(PUBLISHED_ANNOTATION, r#"{"amounts":[],"annotations":[],"labels":["gpushare"]}"#)])
    );
    assert_eq!(status_patch(&DesiredNodeStatus::default(), &left), None);
    assert_eq!(settled(&DesiredNodeStatus::default(), left), NodeView::default());
}

#[test]
fn inventory_annotation_is_the_offered_node() {
    let mut node = node(&[15_360, 15_360]);
    node.gpus[1].withheld = Some("it has fallen off the bus".into());
    let published =
        desired(&node, &settings(&[Dialect::Volcano, Dialect::Native]), &RequestedAmounts::default());
    let read: Node = serde_json::from_str(&published.annotations[INVENTORY_ANNOTATION]).unwrap();
    assert_eq!(read.gpus, node.gpus);
    assert_eq!(read, node, "schedulers count by the node that the agent grants by");
    let register = &published.annotations[node_register::ANNOTATION];
    assert!(register.starts_with("GPU-0,10,15360,NVIDIA-NVIDIA A100,true,"), "{register}");
    assert!(register.contains("GPU-1,10,15360,NVIDIA-NVIDIA A100,false,"), "{register}");
    let native = desired(&node, &settings(&[Dialect::Native]), &RequestedAmounts::default());
    assert_eq!(native.annotations.keys().collect::<Vec<_>>(), [INVENTORY_ANNOTATION]);
}

/// The node of the test bed, as kubectl shows it.
struct Shown<'a> {
    bed: &'a TestBed,
}

impl Shown<'_> {
    fn get(&self, what: &[&str]) -> Value {
        let all = [&["get", "-o", "json"], what].concat();
        serde_json::from_str(&self.bed.kubectl(&all).unwrap()).unwrap()
    }

    fn until(&self, what: &str, mut holds: impl FnMut(&Value) -> bool) {
        self.bed.block_on(eventually(what, async || {
            let node = self.get(&["node", "node1"]);
            if holds(&node) {
                Ok(())
            } else {
                Err(format!("{} {}", node["metadata"], node["status"]["allocatable"]))
            }
        }));
    }

    fn until_pod(&self, name: &str, phase: &str) -> Value {
        self.bed.block_on(eventually(&format!("pod {name} is {phase}"), async || {
            let pod = self.get(&["pod", name]);
            if pod["status"]["phase"] == phase { Ok(pod) } else { Err(pod["status"].to_string()) }
        }))
    }

    fn run(&self, name: &str, limits: Value) {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {"terminationGracePeriodSeconds": 0, "containers": [{
                "name": "main", "image": "localhost/busybox:bed", "command": ["sleep", "100000"],
                "resources": {"limits": limits},
            }]},
        });
        self.bed.kubectl_with(&["create", "-f", "-"], &pod.to_string()).unwrap();
        self.until_pod(name, "Running");
    }

    /// Restarts kubelet, which admits all pods again, the oldest first: when a new one runs, all others were admitted.
    fn restart_kubelet(&self, then: &str) {
        self.bed.node("node1").unwrap().kubelet().restart().unwrap();
        self.bed.wait_until_node_ready("node1").unwrap();
        self.run(then, json!({}));
    }
}

#[test]
fn published_amounts_never_make_kubelet_kill_a_pod() {
    let Some(bed) = TestBed::for_test(BedProfile::one_node()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = folder.path().join("kubeconfig");
    std::fs::write(&kubeconfig, bed.kubectl(&["config", "view", "--raw"]).unwrap()).unwrap();
    let cluster = bed.block_on(ApiServer::connect(Some(&kubeconfig), &"node1".into())).unwrap();
    let shown = Shown { bed: &bed };
    bed.kubectl(&["label", "node", "node1", "gpushare=true"]).unwrap();

    let labels = map(&[("gpushare", "true"), ("nvidia-device-enable", "enable")]);
    let settings = AgentSettings { labels, ..settings(&[Dialect::Volcano]) };
    let healthy = node(&[11_178, 11_178]);
    let requests = |pods: &[Arc<PodView>], node: &Node| {
        let running = pods.iter().filter(|pod| !pod.is_finished());
        let running: Vec<_> = running.map(|pod| PodRequest { pod: &pod.pod, grant: None }).collect();
        resources::requested(&running, node)
    };
    let (sender, wanted) = watch::channel(None);
    let (pods, status_task) =
        bed.block_on(async { (cluster.watch_pods(), tokio::spawn(run(cluster.clone(), wanted))) });
    sender.send_replace(Some(desired(&healthy, &settings, &RequestedAmounts::default())));
    shown.until("the node has its amounts", |node| {
        node["status"]["allocatable"][MEMORY] == "22356"
            && node["metadata"]["labels"]["nvidia-device-enable"] == "enable"
            && node["metadata"]["annotations"][node_register::ANNOTATION].is_string()
    });
    shown.run("large", json!({MEMORY: 12_000}));
    let uid = shown.get(&["pod", "large"])["metadata"]["uid"].as_str().unwrap().to_string();
    assert!(bed.block_on(pods.wait_for(&uid, Duration::from_secs(120))).is_some());

    // A GPU is lost. The other one has less than the pod requests.
    let lost = Some("it has fallen off the bus".to_string());
    let mut unhealthy = healthy.clone();
    unhealthy.gpus[0] = Gpu { withheld: lost, ..unhealthy.gpus[0].clone() };
    let asked = requests(&pods.all(), &unhealthy);
    assert_eq!(asked.total, BTreeMap::from([(MEMORY.to_string(), 12_000)]));
    sender.send_replace(Some(desired(&unhealthy, &settings, &asked)));
    shown.until("the node has less", |node| node["status"]["allocatable"][MEMORY] == "12k");
    shown.restart_kubelet("second");
    let pod = shown.until_pod("large", "Running");
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);

    // Another component changes the node.
    bed.kubectl(&["label", "node", "node1", "nvidia-device-enable-"]).unwrap();
    let zero = json!({"status": {"capacity": {MEMORY: "0"}, "allocatable": {MEMORY: "0"}}}).to_string();
    bed.kubectl(&["patch", "node", "node1", "--subresource=status", "--type=merge", "-p", &zero]).unwrap();
    shown.until("the change is reverted", |node| {
        node["status"]["allocatable"][MEMORY] == "12k"
            && node["metadata"]["labels"]["nvidia-device-enable"] == "enable"
    });

    // The dialect is disabled: kubelet does not kill pods for a resource that the node does not have.
    let off = AgentSettings { dialects: vec![Dialect::Native], ..settings.clone() };
    sender.send_replace(Some(desired(&unhealthy, &off, &asked)));
    shown.until("the dialect is gone", |node| {
        node["status"]["capacity"].get(MEMORY).is_none()
            && node["status"]["allocatable"].get(MEMORY).is_none()
            && node["status"]["capacity"]["partage.dev/cores"] == "100"
            && node["metadata"]["annotations"].get(node_register::ANNOTATION).is_none()
    });
    shown.restart_kubelet("third");
    shown.until_pod("large", "Running");

    drop(sender);
    bed.block_on(status_task).unwrap();
    bed.block_on(clean_up(&cluster)).unwrap();
    bed.block_on(clean_up(&cluster)).unwrap();
    let node = shown.get(&["node", "node1"]);
    let text = format!("{}{}", node["metadata"], node["status"]);
    assert!(!text.contains("partage.dev") && !text.contains("volcano.sh"), "{text}");
    assert_eq!(node["metadata"]["labels"]["gpushare"], "true", "it existed before and is not owned");
    assert!(node["metadata"]["labels"].get("nvidia-device-enable").is_none());

    // The reason for the rule: with one amount that is too small, kubelet kills the pod.
    let small = NodePatch { capacity: BTreeMap::from([(MEMORY.into(), 11_178)]), ..NodePatch::default() };
    bed.block_on(cluster.node.apply(&small)).unwrap();
    shown.restart_kubelet("fourth");
    let pod = shown.until_pod("large", "Failed");
    assert_eq!(pod["status"]["reason"], format!("OutOf{MEMORY}"));
}
