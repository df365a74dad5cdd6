//! Late binding on a real kubelet and containerd: `Allocate` answers a name, `PreStartContainer` learns whose it is, and
//! the container has exactly its own grant. Every claim is read from inside the containers.

use k8s_openapi::api::core::v1::{Namespace, Node as ApiNode, Pod};
use kube::api::{DeleteParams, ListParams, LogParams, PostParams};
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, ResourceExt};
use partage_e2e::late_plugin::{DeviceNode, Edits, LatePlugin, Mount, Owner, Settings, What, Written};
use partage_kubelet_api::podresources::GetPodResourcesRequest;
use partage_kubelet_api::podresources::pod_resources_lister_client::PodResourcesListerClient;
use partage_kubelet_api::unix::{self, SocketFile};
use partage_testkit::bed::{Bed, Node, Profile};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::slice::from_ref;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;

const RESOURCE: &str = "example.com/late";
const NAMESPACE: &str = "late";
/// Where the granted files are, as the node sees it.
const GRANTS: &str = "/var/lib/late-grants";
const PATIENCE: Duration = Duration::from_secs(300);

/// Says what it was granted, then runs until it is told to exit.
const SAY_AND_STAY: &str = r#"
env | grep ^GRANT
echo "file $(cat /grant)"
echo x > /dev/granted && echo "device opens"
while ! [ -e /state/exit ]; do sleep 1; done
rm /state/exit
exit 1
"#;
/// Says what it was granted and ends well.
const SAY: &str = r#"
env | grep ^GRANT
echo "file $(cat /grant)"
echo x > /dev/granted && echo "device opens"
"#;

/// A cluster of one node with the plugin on it.
struct Stage<'a> {
    bed: &'a Bed,
    settings: Settings,
    plugin: LatePlugin,
    pods: Api<Pod>,
}

impl Stage<'_> {
    async fn set(bed: &Bed, devices: usize) -> Stage<'_> {
        let node = bed.node("node1").unwrap();
        let path = |inside: &str| node.path(inside).unwrap();
        let grants = path(GRANTS);
        let cdi = path("/etc/cdi");
        std::fs::create_dir_all(&grants).unwrap();
        std::fs::create_dir_all(&cdi).unwrap();
        let record = path("/var/lib/late-record.json");
        let (kubelet, pod_logs) = (path("/var/lib/kubelet"), path("/var/log/pods"));
        let runtime = path("/run/containerd/containerd.sock");
        let mut settings = Settings::new(&kubelet, &pod_logs, &runtime, &cdi, &record);
        settings.devices = devices;
        settings.edits = Arc::new(move |owner| grant(&grants, owner));
        let plugin = LatePlugin::start(&Handle::current(), settings.clone()).unwrap();
        plugin.watched().await;
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}});
        let namespaces: Api<Namespace> = Api::all(bed.client());
        namespaces.create(&PostParams::default(), &serde_json::from_value(namespace).unwrap()).await.unwrap();
        let stage = Stage { bed, settings, plugin, pods: Api::namespaced(bed.client(), NAMESPACE) };
        stage.allocatable(devices).await;
        stage
    }

    fn node(&self) -> &Node {
        self.bed.node("node1").unwrap()
    }

    /// Waits until the node offers this many devices.
    async fn allocatable(&self, devices: usize) {
        let nodes: Api<ApiNode> = Api::all(self.bed.client());
        let offered = move |node: Option<&ApiNode>| {
            let status = node.and_then(|node| node.status.as_ref());
            let offered = status.and_then(|status| status.allocatable.as_ref()?.get(RESOURCE));
            offered.is_some_and(|quantity| quantity.0 == devices.to_string())
        };
        within("the node offers the devices", await_condition(nodes, "node1", offered)).await.unwrap();
    }

    /// Returns when the new kubelet serves, and knows the plugin.
    async fn restart_kubelet(&self) {
        let socket = self.settings.kubelet.join("device-plugins/partage_example_com_late.sock");
        let before = SocketFile::at(&socket).unwrap();
        self.node().kubelet().restart().unwrap();
        within("served again", async {
            while SocketFile::at(&socket).is_err() || before.is_in_place() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
        .await;
        self.plugin.watched().await;
        self.allocatable(self.settings.devices).await;
        let port = std::net::SocketAddr::from((self.node().address(), 10250));
        within("kubelet serves", async {
            while tokio::net::TcpStream::connect(port).await.is_err() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
        .await;
    }

    async fn create(&self, pod: Value) -> Pod {
        self.pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap()
    }

    async fn running(&self, name: &str) -> Pod {
        let running = await_condition(self.pods.clone(), name, conditions::is_pod_running());
        within(&format!("{name} runs"), running).await.unwrap().unwrap()
    }

    async fn says(&self, name: &str, container: &str) -> String {
        let which = LogParams { container: Some(container.to_string()), ..LogParams::default() };
        self.pods.logs(name, &which).await.unwrap()
    }

    /// The container has its own grant, whole, and nobody else's.
    async fn has_its_own(&self, pod: &Pod, container: &str) {
        let name = pod.name_any();
        let expected = format!(
            "GRANT={NAMESPACE}/{name}/{container}\nfile {NAMESPACE}/{name}/{container} {}\ndevice opens\n",
            pod.uid().unwrap()
        );
        // The last lines may still be on their way from the runtime to the log.
        for _ in 0..1200 {
            if self.says(&name, container).await == expected {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(self.says(&name, container).await, expected, "{name}/{container}");
    }

    /// Who asks nothing gets nothing.
    async fn has_nothing(&self, name: &str, container: &str) {
        within("the container has spoken", async {
            while !self.says(name, container).await.ends_with("that is all\n") {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        })
        .await;
        assert_eq!(self.says(name, container).await, "that is all\n", "{name}/{container}");
    }

    async fn force_delete(&self, name: &str) {
        self.pods.delete(name, &DeleteParams::default().grace_period(0)).await.unwrap();
    }

    fn allocated(&self) -> Vec<(String, BTreeSet<String>)> {
        let events = self.plugin.events().into_iter();
        events
            .filter_map(|event| match event.what {
                What::Allocated { key, ids } => Some((key, ids)),
                _ => None,
            })
            .collect()
    }

    fn written(&self) -> Vec<Written> {
        let events = self.plugin.events().into_iter();
        events
            .filter_map(|event| match event.what {
                What::Started { written, .. } => Some(written),
                _ => None,
            })
            .flatten()
            .collect()
    }
}

/// Waits until a container has restarted so many times, and runs.
async fn restarted(pods: &Api<Pod>, name: &str, container: &str, times: i32) {
    let restarted = |pod: Option<&Pod>| {
        let status = pod.and_then(|pod| pod.status.as_ref());
        let mut statuses = status.into_iter().flat_map(|status| status.container_statuses.iter().flatten());
        statuses.any(|s| s.name == container && s.restart_count == times && s.ready)
    };
    within(&format!("{name} restarts"), await_condition(pods.clone(), name, restarted)).await.unwrap();
}

/// Waits until kubelet knows a pod.
async fn known(bed: &Bed, name: &str) {
    let socket = bed.node("node1").unwrap().path("/var/lib/kubelet/pod-resources/kubelet.sock").unwrap();
    let ask = || async {
        let mut client = PodResourcesListerClient::new(unix::connect(&socket).await.ok()?);
        let (pod_name, pod_namespace) = (name.to_string(), NAMESPACE.to_string());
        client.get(GetPodResourcesRequest { pod_name, pod_namespace }).await.ok()
    };
    within(&format!("kubelet knows {name}"), async {
        while ask().await.is_none() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
    .await;
}

/// Tells a container of a pod to exit with an error.
fn tell_to_exit(bed: &Bed, pod: &Pod) {
    let volume = format!("pods/{}/volumes/kubernetes.io~empty-dir/state/exit", pod.uid().unwrap());
    std::fs::write(bed.node("node1").unwrap().path("/var/lib/kubelet").unwrap().join(volume), "").unwrap();
}

/// What a container gets: its name in the environment, its name and UID in a file, and a device node.
fn grant(folder: &std::path::Path, owner: &Owner) -> Edits {
    let uid = &owner.uid;
    let file = format!("{uid}-{}", owner.container);
    std::fs::write(folder.join(&file), format!("{owner} {uid}\n")).unwrap();
    Edits {
        env: vec![format!("GRANT={owner}")],
        device_nodes: vec![DeviceNode { path: "/dev/granted".into(), host_path: "/dev/null".into() }],
        mounts: vec![Mount {
            host_path: format!("{GRANTS}/{file}"),
            container_path: "/grant".into(),
            options: vec!["ro".into(), "bind".into()],
        }],
    }
}

fn container(name: &str, devices: usize, script: &str) -> Value {
    json!({
        "name": name,
        "image": "localhost/busybox:bed",
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", script],
        "resources": {"limits": {RESOURCE: devices.to_string()}},
        "volumeMounts": [{"name": "state", "mountPath": "/state"}],
    })
}

/// A container without devices.
fn plain(name: &str) -> Value {
    let mut container = container(
        name,
        0,
        "env | grep ^GRANT; ls /grant /dev/granted 2>/dev/null; echo that is all; sleep 3600",
    );
    container.as_object_mut().unwrap().remove("resources");
    container
}

fn pod(name: &str, init: &[Value], containers: &[Value]) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "initContainers": init,
            "containers": containers,
            "volumes": [{"name": "state", "emptyDir": {}}],
            "terminationGracePeriodSeconds": 1,
        },
    })
}

async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("not in {PATIENCE:?}: {what}"))
}

fn bed() -> Option<Bed> {
    Bed::for_test(Profile::one_node())
}

#[test]
fn fifty_pods_at_once_each_have_their_own_grant() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, 128).await;
        let names: Vec<String> = (0..50).map(|number| format!("train-{number}")).collect();
        // One container or two, with one device or two.
        let both = |number: usize| number.is_multiple_of(3);
        let creations = names.iter().enumerate().map(|(number, name)| {
            let mut containers = vec![container("main", 1 + number % 2, SAY_AND_STAY)];
            if both(number) {
                containers.push(container("other", 1, SAY_AND_STAY));
            }
            containers.push(plain("none"));
            stage.create(pod(name, &[], &containers))
        });
        futures::future::join_all(creations).await;
        for (number, name) in names.iter().enumerate() {
            let pod = stage.running(name).await;
            stage.has_its_own(&pod, "main").await;
            if both(number) {
                stage.has_its_own(&pod, "other").await;
            }
            stage.has_nothing(name, "none").await;
        }
        let allocated = stage.allocated();
        assert_eq!(allocated.len(), 50 + 17, "one answer for each container");
        let keys: BTreeSet<&String> = allocated.iter().map(|(key, _)| key).collect();
        assert_eq!(keys.len(), allocated.len(), "no name twice");
        let mut held = BTreeSet::new();
        assert!(allocated.iter().flat_map(|(_, ids)| ids).all(|id| held.insert(id)), "no device twice");
    });
}

#[test]
fn init_containers_and_sidecars_have_grants_of_their_own() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, 16).await;
        // Only the init container asks: PodResources does not say who it is.
        stage.create(pod("alone", &[container("fetch", 1, SAY)], &[plain("none")])).await;
        // Both ask: kubelet gives the init container's device to the other one too.
        let (fetch, main) = (container("fetch", 1, SAY), container("main", 1, SAY_AND_STAY));
        stage.create(pod("same", &[fetch.clone(), container("unpack", 1, SAY)], from_ref(&main))).await;
        // The init container asks for more, then for less.
        stage.create(pod("more", &[container("fetch", 3, SAY)], from_ref(&main))).await;
        stage.create(pod("less", &[fetch], &[container("main", 3, SAY_AND_STAY)])).await;
        // A sidecar keeps its device.
        let mut sidecar = container("sidecar", 1, SAY_AND_STAY);
        sidecar["restartPolicy"] = json!("Always");
        stage.create(pod("sidecar", &[sidecar], &[main])).await;
        let expected: &[(&str, &[&str])] = &[
            ("alone", &["fetch"]),
            ("same", &["fetch", "unpack", "main"]),
            ("more", &["fetch", "main"]),
            ("less", &["fetch", "main"]),
            ("sidecar", &["sidecar", "main"]),
        ];
        for (name, containers) in expected {
            let pod = stage.running(name).await;
            for container in *containers {
                stage.has_its_own(&pod, container).await;
            }
        }
        // Kubelet asks once for each container, also when the devices are the same.
        assert_eq!(stage.allocated().len(), 10);
    });
}

#[test]
fn a_container_that_restarts_is_asked_for_again_and_keeps_its_name() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, 4).await;
        stage.create(pod("train", &[], &[container("main", 2, SAY_AND_STAY)])).await;
        let pod = stage.running("train").await;
        stage.has_its_own(&pod, "main").await;
        tell_to_exit(stage.bed, &pod);
        restarted(&stage.pods, "train", "main", 1).await;
        stage.has_its_own(&pod, "main").await;
        // `Allocate` belongs to the admission of the pod, `PreStartContainer` to every creation of the container.
        let allocated = stage.allocated();
        assert_eq!(allocated.len(), 1);
        let written = stage.written();
        assert!(
            written.len() >= 2 && written.iter().all(|written| written.key == allocated[0].0),
            "{written:?}"
        );
    });
}

#[test]
fn a_refusal_is_shown_and_the_container_starts_by_itself_later() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, 4).await;
        stage.plugin.refuse_starts(2, "gpu0 has 4Gi left, 8Gi were granted");
        stage.create(pod("train", &[], &[container("main", 1, SAY_AND_STAY)])).await;
        let refused = |pod: Option<&Pod>| {
            let status = pod.and_then(|pod| pod.status.as_ref());
            let mut statuses =
                status.into_iter().flat_map(|status| status.container_statuses.iter().flatten());
            statuses.any(|status| {
                let waiting = status.state.as_ref().and_then(|state| state.waiting.as_ref());
                waiting.is_some_and(|waiting| {
                    waiting.reason.as_deref() == Some("CreateContainerConfigError")
                        && waiting
                            .message
                            .as_deref()
                            .unwrap_or("")
                            .contains("gpu0 has 4Gi left, 8Gi were granted")
                })
            })
        };
        within("the sentence is shown", await_condition(stage.pods.clone(), "train", refused)).await.unwrap();
        let pod = stage.running("train").await;
        stage.has_its_own(&pod, "main").await;
        assert_eq!(stage.allocated().len(), 1);
    });
}

#[test]
fn a_restart_of_kubelet_is_not_noticed_by_running_containers() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, 16).await;
        for name in ["one", "two"] {
            stage.create(pod(name, &[], &[container("main", 1, SAY_AND_STAY)])).await;
        }
        let one = stage.running("one").await;
        let two = stage.running("two").await;
        stage.has_its_own(&one, "main").await;
        stage.has_its_own(&two, "main").await;
        let before = (stage.allocated(), stage.written());
        stage.restart_kubelet().await;
        assert_eq!((stage.allocated(), stage.written()), before, "nothing is given again to what runs");
        for pod in [&one, &two] {
            let now = stage.running(&pod.name_any()).await;
            let status = &now.status.as_ref().unwrap().container_statuses.as_ref().unwrap()[0];
            assert_eq!((now.uid(), status.restart_count), (pod.uid(), 0));
        }

        // New pods, and containers that restart now, work as before.
        stage.create(pod("three", &[], &[container("main", 1, SAY_AND_STAY)])).await;
        let three = stage.running("three").await;
        stage.has_its_own(&three, "main").await;
        tell_to_exit(stage.bed, &one);
        restarted(&stage.pods, "one", "main", 1).await;
        stage.has_its_own(&one, "main").await;
        assert_eq!(stage.allocated().len(), 3);
        let devices: Vec<(String, BTreeSet<String>)> = stage.allocated();
        let ids: BTreeSet<&String> = devices.iter().flat_map(|(_, ids)| ids).collect();
        assert_eq!(ids.len(), 3, "what was held is not given again");
    });
}

/// Kubelet forgets what a plugin wants to be asked when it restarts. Until the plugin has registered again a container
/// that restarts is created without `PreStartContainer`, with the name it was answered before: the file must be there.
#[test]
fn a_container_that_restarts_before_the_plugin_is_back_has_its_grant() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, 4).await;
        stage.create(pod("train", &[], &[container("main", 1, SAY_AND_STAY)])).await;
        let train = stage.running("train").await;
        stage.has_its_own(&train, "main").await;
        let key = stage.allocated()[0].0.clone();

        stage.node().kubelet().kill();
        let Stage { bed, settings, plugin, pods } = stage;
        let file = plugin.cdi_file(&key);
        plugin.stop().await;
        assert!(file.exists(), "files outlive the plugin");
        bed.node("node1").unwrap().kubelet().start().unwrap();
        // Not earlier: kubelet fails a pod whose container has ended when it admits it, see below.
        known(bed, "train").await;
        tell_to_exit(bed, &train);
        restarted(&pods, "train", "main", 1).await;

        let plugin = LatePlugin::start(&Handle::current(), settings.clone()).unwrap();
        plugin.watched().await;
        let stage = Stage { bed, settings, plugin, pods };
        stage.has_its_own(&train, "main").await;
        assert_eq!(stage.allocated(), [], "the answer of the first plugin still stands");
    });
}

/// At its start kubelet admits every pod again. A container that runs is passed over; one that has ended, as an init
/// container has, needs its devices healthy, and they are not until the plugin has registered. Kubelet 1.36 fails the
/// whole pod unless the plugin was faster, whatever plugin it is: this shows that nothing else happens.
#[test]
fn a_pod_with_a_finished_init_container_goes_on_or_is_refused_in_words() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, 4).await;
        let (fetch, main) = (container("fetch", 1, SAY), container("main", 1, SAY_AND_STAY));
        stage.create(pod("train", &[fetch], &[main])).await;
        let train = stage.running("train").await;
        stage.has_its_own(&train, "main").await;
        stage.restart_kubelet().await;
        // Until the new kubelet has admitted it the API server has what the old one said, and there are no logs.
        let which = LogParams { container: Some("main".to_string()), ..LogParams::default() };
        let refused = within("the new kubelet has decided", async {
            loop {
                let status = stage.pods.get("train").await.unwrap().status.unwrap();
                match status.phase.as_deref() {
                    Some("Running") if stage.pods.logs("train", &which).await.is_ok() => return None,
                    Some("Running") => tokio::time::sleep(Duration::from_millis(100)).await,
                    Some("Failed") => return Some(status),
                    other => panic!("the pod is {other:?}"),
                }
            }
        })
        .await;
        if let Some(status) = refused {
            assert_eq!(status.reason.as_deref(), Some("UnexpectedAdmissionError"));
            assert!(status.message.unwrap().contains("healthy"));
        }
    });
}

#[test]
fn a_force_deleted_pod_and_its_successor_of_the_same_name_are_told_apart() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        // One device: the successor gets the very same.
        let stage = Stage::set(&bed, 1).await;
        let mut uids = BTreeMap::new();
        for round in 0..5 {
            stage.create(pod("train", &[], &[container("main", 1, SAY_AND_STAY)])).await;
            let train = stage.running("train").await;
            stage.has_its_own(&train, "main").await;
            uids.insert(round, train.uid().unwrap());
            stage.force_delete("train").await;
        }
        let allocated = stage.allocated();
        assert_eq!(allocated.len(), 5);
        assert!(allocated.iter().all(|(_, ids)| *ids == allocated[0].1), "always the same device");
        let keys: BTreeSet<&String> = allocated.iter().map(|(key, _)| key).collect();
        assert_eq!(keys.len(), 5, "never the same name");
        // A creation that failed in the runtime is tried again, and asked for again.
        let mut owners: Vec<String> = stage.written().into_iter().map(|written| written.owner.uid).collect();
        owners.dedup();
        assert_eq!(owners, uids.into_values().collect::<Vec<_>>());
        let files: Vec<PathBuf> = allocated.iter().map(|(key, _)| stage.plugin.cdi_file(key)).collect();
        let there: Vec<bool> = files.iter().map(|file| file.exists()).collect();
        assert_eq!(there, [false, false, false, false, true], "the names of the dead are taken away");
    });
}

#[test]
fn lost_devices_are_no_longer_offered_and_come_back() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, 8).await;
        stage.plugin.set_health("late-0", false);
        stage.plugin.set_health("late-1", false);
        stage.allocatable(6).await;
        stage.plugin.set_health("late-0", true);
        stage.allocatable(7).await;
        let pods = stage.pods.list(&ListParams::default()).await.unwrap();
        assert!(pods.items.is_empty());
    });
}
