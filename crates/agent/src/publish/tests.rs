use super::*;
use crate::resources::PodRequest;
use crate::resources::tests::{node, settings};
use partage_cluster::PodView;
use partage_core::model::Gpu;
use partage_testkit::bed::{Bed, Profile};
use partage_testkit::eventually;
use serde_json::{Value, json};
use std::sync::Arc;

const MEMORY: &str = "volcano.sh/vgpu-memory";

fn map(texts: &[(&str, &str)]) -> BTreeMap<String, String> {
    texts.iter().map(|(key, text)| (key.to_string(), text.to_string())).collect()
}

/// A node after a change.
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

/// A node once it says what it shall.
fn settled(statement: &Statement, mut node: NodeView) -> NodeView {
    for part in [change, relabelling] {
        if let Some(needed) = part(statement, &node) {
            node = changed(node, &needed);
        }
    }
    assert_eq!((change(statement, &node), relabelling(statement, &node)), (None, None));
    node
}

#[test]
fn only_what_differs_is_changed_and_only_what_is_ours_is_taken_back() {
    let before = NodeView {
        labels: map(&[("gpushare", "true"), ("zone", "a"), ("nvidia-device-enable", "disable")]),
        annotations: map(&[("their", "own"), (PUBLISHED, "nobody of us wrote this")]),
        ..NodeView::default()
    };
    let labels = map(&[("gpushare", "true"), ("nvidia-device-enable", "enable")]);
    let settings = Settings { labels, ..settings(&[Dialect::Volcano]) };
    let statement = publication(&node(&[50_000, 50_000]), &settings, &Requested::default());
    let first = relabelling(&statement, &before).unwrap();
    assert_eq!(first.labels, BTreeMap::from([("nvidia-device-enable".into(), Some("enable".into()))]));
    let mut shown = settled(&statement, before);
    for amounts in [&mut shown.capacity, &mut shown.allocatable] {
        assert_eq!(amounts.insert(MEMORY.into(), "100k".into()).unwrap(), "100000");
    }
    assert_eq!(change(&statement, &shown), None, "the API server writes it so");

    // Kubelet forgot, and somebody took the label away.
    shown.allocatable.insert(MEMORY.into(), "0".into());
    shown.labels.remove("gpushare");
    let mend = change(&statement, &shown).unwrap();
    assert_eq!(mend.capacity, BTreeMap::from([(MEMORY.into(), 100_000)]));
    let mend = relabelling(&statement, &shown).unwrap();
    assert_eq!(mend.labels, BTreeMap::from([("gpushare".into(), Some("true".into()))]));
    let shown = settled(&statement, shown);

    let native = Statement { labels: map(&[("gpushare", "true")]), ..Statement::default() };
    let switched = settled(&native, shown);
    assert_eq!(switched.capacity, BTreeMap::new());
    assert_eq!(switched.labels, map(&[("gpushare", "true"), ("zone", "a")]));
    let left = settled(&withdrawn(), switched);
    assert_eq!(left.labels, map(&[("zone", "a")]));
    assert_eq!(left.annotations, map(&[("their", "own")]));
}

#[test]
fn a_label_that_may_not_be_removed_stays_ours() {
    let labels = map(&[("gpushare", "true")]);
    let with = publication(
        &node(&[50_000]),
        &Settings { labels, ..settings(&[Dialect::Volcano]) },
        &Requested::default(),
    );
    let shown = settled(&with, NodeView::default());
    // Everything else is taken back; the policy must find it named when it goes.
    let left = changed(shown.clone(), &change(&withdrawn(), &shown).unwrap());
    assert_eq!((&left.capacity, &left.labels), (&BTreeMap::new(), &shown.labels));
    assert_eq!(
        left.annotations,
        map(&[(PUBLISHED, r#"{"amounts":[],"annotations":[],"labels":["gpushare"]}"#)])
    );
    assert_eq!(change(&withdrawn(), &left), None);
    assert_eq!(settled(&withdrawn(), left), NodeView::default());
}

#[test]
fn the_inventory_is_the_cores_and_says_how_it_may_be_shared() {
    let mut node = node(&[15_360, 15_360]);
    node.gpus[1].withheld = Some("it has fallen off the bus".into());
    let said = publication(&node, &settings(&[Dialect::Volcano, Dialect::Native]), &Requested::default());
    let read: Node = serde_json::from_str(&said.annotations[INVENTORY]).unwrap();
    assert_eq!(read.gpus, node.gpus);
    assert_eq!(read, node, "what is given away is counted as it is published");
    let register = &said.annotations[node_register::ANNOTATION];
    assert!(register.starts_with("GPU-0,10,15360,NVIDIA-NVIDIA A100,true,"), "{register}");
    assert!(register.contains("GPU-1,10,15360,NVIDIA-NVIDIA A100,false,"), "{register}");
    let native = publication(&node, &settings(&[Dialect::Native]), &Requested::default());
    assert_eq!(native.annotations.keys().collect::<Vec<_>>(), [INVENTORY]);
}

/// What the bed shows of its node.
struct Shown<'a> {
    bed: &'a Bed,
}

impl Shown<'_> {
    fn get(&self, what: &[&str]) -> Value {
        let all = [&["get", "-o", "json"], what].concat();
        serde_json::from_str(&self.bed.kubectl(&all).unwrap()).unwrap()
    }

    fn until(&self, what: &str, mut holds: impl FnMut(&Value) -> bool) {
        self.bed.block_on(eventually(what, async || {
            let node = self.get(&["node", "node1"]);
            match holds(&node) {
                true => Ok(()),
                false => Err(format!("{} {}", node["metadata"], node["status"]["allocatable"])),
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

    /// Kubelet admits all pods anew, the oldest first: when a new one runs, all others were admitted.
    fn restart_kubelet(&self, then: &str) {
        self.bed.node("node1").unwrap().kubelet().restart().unwrap();
        self.bed.node_ready("node1").unwrap();
        self.run(then, json!({}));
    }
}

#[test]
fn no_pod_dies_of_what_is_published() {
    let Some(bed) = Bed::for_test(Profile::one_node()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = folder.path().join("kubeconfig");
    std::fs::write(&kubeconfig, bed.kubectl(&["config", "view", "--raw"]).unwrap()).unwrap();
    let cluster = bed.block_on(ApiServer::connect(Some(&kubeconfig), &"node1".into())).unwrap();
    let shown = Shown { bed: &bed };
    bed.kubectl(&["label", "node", "node1", "gpushare=true"]).unwrap();

    let labels = map(&[("gpushare", "true"), ("nvidia-device-enable", "enable")]);
    let settings = Settings { labels, ..settings(&[Dialect::Volcano]) };
    let healthy = node(&[11_178, 11_178]);
    let requests = |pods: &[Arc<PodView>], node: &Node| {
        let running = pods.iter().filter(|pod| !pod.is_finished());
        let running: Vec<_> = running.map(|pod| PodRequest { pod: &pod.pod, grant: None }).collect();
        resources::requested(&running, node)
    };
    let (say, wanted) = watch::channel(None);
    let (pods, keeper) =
        bed.block_on(async { (cluster.watch_pods(), tokio::spawn(keep_published(cluster.clone(), wanted))) });
    say.send_replace(Some(publication(&healthy, &settings, &Requested::default())));
    shown.until("the node says what it has", |node| {
        node["status"]["allocatable"][MEMORY] == "22356"
            && node["metadata"]["labels"]["nvidia-device-enable"] == "enable"
            && node["metadata"]["annotations"][node_register::ANNOTATION].is_string()
    });
    shown.run("large", json!({MEMORY: 12_000}));
    let uid = shown.get(&["pod", "large"])["metadata"]["uid"].as_str().unwrap().to_string();
    assert!(bed.block_on(pods.wait_for(&uid, Duration::from_secs(120))).is_some());

    // A GPU is lost. What is left of the node has less than the pod asks.
    let lost = Some("it has fallen off the bus".to_string());
    let mut ill = healthy.clone();
    ill.gpus[0] = Gpu { withheld: lost, ..ill.gpus[0].clone() };
    let asked = requests(&pods.all(), &ill);
    assert_eq!(asked.total, BTreeMap::from([(MEMORY.to_string(), 12_000)]));
    say.send_replace(Some(publication(&ill, &settings, &asked)));
    shown.until("the node has less", |node| node["status"]["allocatable"][MEMORY] == "12k");
    shown.restart_kubelet("second");
    let pod = shown.until_pod("large", "Running");
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);

    // Somebody else writes there.
    bed.kubectl(&["label", "node", "node1", "nvidia-device-enable-"]).unwrap();
    let zero = json!({"status": {"capacity": {MEMORY: "0"}, "allocatable": {MEMORY: "0"}}}).to_string();
    bed.kubectl(&["patch", "node", "node1", "--subresource=status", "--type=merge", "-p", &zero]).unwrap();
    shown.until("it is mended", |node| {
        node["status"]["allocatable"][MEMORY] == "12k"
            && node["metadata"]["labels"]["nvidia-device-enable"] == "enable"
    });

    // The dialect is switched off: a resource that the node does not have kills nobody.
    let off = Settings { dialects: vec![Dialect::Native], ..settings.clone() };
    say.send_replace(Some(publication(&ill, &off, &asked)));
    shown.until("the dialect is gone", |node| {
        node["status"]["capacity"].get(MEMORY).is_none()
            && node["status"]["allocatable"].get(MEMORY).is_none()
            && node["status"]["capacity"]["partage.dev/cores"] == "100"
            && node["metadata"]["annotations"].get(node_register::ANNOTATION).is_none()
    });
    shown.restart_kubelet("third");
    shown.until_pod("large", "Running");

    drop(say);
    bed.block_on(keeper).unwrap();
    bed.block_on(withdraw(&cluster)).unwrap();
    bed.block_on(withdraw(&cluster)).unwrap();
    let node = shown.get(&["node", "node1"]);
    let text = format!("{}{}", node["metadata"], node["status"]);
    assert!(!text.contains("partage.dev") && !text.contains("volcano.sh"), "{text}");
    assert_eq!(node["metadata"]["labels"]["gpushare"], "true", "it was there before us");
    assert!(node["metadata"]["labels"].get("nvidia-device-enable").is_none());

    // What the rule is for: one amount that is too small, and the pod is killed.
    let small = NodePatch { capacity: BTreeMap::from([(MEMORY.into(), 11_178)]), ..NodePatch::default() };
    bed.block_on(cluster.node.apply(&small)).unwrap();
    shown.restart_kubelet("fourth");
    let pod = shown.until_pod("large", "Failed");
    assert_eq!(pod["status"]["reason"], format!("OutOf{MEMORY}"));
}
