//! Late binding on a real kubelet and containerd: `Allocate` responds with a name, `PreStartContainer` identifies the
//! container, and the container has exactly its own grant. All results are read from inside the containers.

use k8s_openapi::api::core::v1::{Namespace, Node as ApiNode, Pod};
use kube::api::{DeleteParams, ListParams, LogParams, PostParams};
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, ResourceExt};
use partage_e2e::late_plugin::{
    ContainerEdits, ContainerIdentity, EditDeviceNode, EditMount, LatePlugin, LatePluginSettings,
    PluginEventKind, WrittenSpec,
};
use partage_kubelet_api::podresources::GetPodResourcesRequest;
use partage_kubelet_api::podresources::pod_resources_lister_client::PodResourcesListerClient;
use partage_kubelet_api::unix::{self, SocketFile};
use partage_testkit::bed::{BedNode, BedProfile, TestBed};
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
const GRANTS_DIR: &str = "/var/lib/late-grants";
const TIMEOUT: Duration = Duration::from_secs(300);

/// Prints what it was granted, then runs until the file appears.
const REPORT_AND_STAY: &str = r#"
env | grep ^GRANT
echo "file $(cat /grant)"
echo x > /dev/granted && echo "device opens"
while ! [ -e /state/exit ]; do sleep 1; done
rm /state/exit
exit 1
"#;
/// Prints what it was granted and exits with 0.
const REPORT_AND_EXIT: &str = r#"
env | grep ^GRANT
echo "file $(cat /grant)"
echo x > /dev/granted && echo "device opens"
"#;

/// A cluster of one node with the plugin.
struct LateBindingNode<'a> {
    bed: &'a TestBed,
    settings: LatePluginSettings,
    plugin: LatePlugin,
    pods: Api<Pod>,
}

impl LateBindingNode<'_> {
    async fn start(bed: &TestBed, devices: usize) -> LateBindingNode<'_> {
        let node = bed.node("node1").unwrap();
        let path = |inside: &str| node.path(inside).unwrap();
        let grants = path(GRANTS_DIR);
        let cdi = path("/etc/cdi");
        std::fs::create_dir_all(&grants).unwrap();
        std::fs::create_dir_all(&cdi).unwrap();
        let record = path("/var/lib/late-record.json");
        let (kubelet, pod_logs) = (path("/var/lib/kubelet"), path("/var/log/pods"));
        let runtime = path("/run/containerd/containerd.sock");
        let mut settings = LatePluginSettings::new(&kubelet, &pod_logs, &runtime, &cdi, &record);
        settings.devices = devices;
        settings.edits = Arc::new(move |owner| grant_edits(&grants, owner));
        let plugin = LatePlugin::start(&Handle::current(), settings.clone()).unwrap();
        plugin.wait_until_watched().await;
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}});
        let namespaces: Api<Namespace> = Api::all(bed.client());
        namespaces.create(&PostParams::default(), &serde_json::from_value(namespace).unwrap()).await.unwrap();
        let test_node =
            LateBindingNode { bed, settings, plugin, pods: Api::namespaced(bed.client(), NAMESPACE) };
        test_node.wait_until_allocatable(devices).await;
        test_node
    }

    fn node(&self) -> &BedNode {
        self.bed.node("node1").unwrap()
    }

    /// Waits until the node offers this many devices.
    async fn wait_until_allocatable(&self, devices: usize) {
        let nodes: Api<ApiNode> = Api::all(self.bed.client());
        let offered = move |node: Option<&ApiNode>| {
            let status = node.and_then(|node| node.status.as_ref());
            let offered = status.and_then(|status| status.allocatable.as_ref()?.get(RESOURCE));
            offered.is_some_and(|quantity| quantity.0 == devices.to_string())
        };
        with_timeout("node offers the devices", await_condition(nodes, "node1", offered)).await.unwrap();
    }

    /// Restarts kubelet, and returns when the new one serves and has registered the plugin.
    async fn restart_kubelet(&self) {
        let socket = self.settings.kubelet.join("device-plugins/partage_example_com_late.sock");
        let before = SocketFile::at(&socket).unwrap();
        self.node().kubelet().restart().unwrap();
        with_timeout("plugin serves again", async {
            while SocketFile::at(&socket).is_err() || before.is_in_place() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
        .await;
        self.plugin.wait_until_watched().await;
        self.wait_until_allocatable(self.settings.devices).await;
        let port = std::net::SocketAddr::from((self.node().address(), 10250));
        with_timeout("kubelet serves", async {
            while tokio::net::TcpStream::connect(port).await.is_err() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
        .await;
    }

    async fn create(&self, pod: Value) -> Pod {
        self.pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap()
    }

    async fn wait_until_running(&self, name: &str) -> Pod {
        let running = await_condition(self.pods.clone(), name, conditions::is_pod_running());
        with_timeout(&format!("{name} is running"), running).await.unwrap().unwrap()
    }

    async fn container_log(&self, name: &str, container: &str) -> String {
        let which = LogParams { container: Some(container.to_string()), ..LogParams::default() };
        self.pods.logs(name, &which).await.unwrap()
    }

    /// Checks that the container has its own grant, complete, and no other.
    async fn assert_has_own_grant(&self, pod: &Pod, container: &str) {
        let name = pod.name_any();
        let expected = format!(
            "GRANT={NAMESPACE}/{name}/{container}\nfile {NAMESPACE}/{name}/{container} {}\ndevice opens\n",
            pod.uid().unwrap()
        );
        // The last lines may not have reached the log yet.
        for _ in 0..1200 {
            if self.container_log(&name, container).await == expected {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(self.container_log(&name, container).await, expected, "{name}/{container}");
    }

    /// Checks that a container without a request gets nothing.
    async fn assert_has_no_grant(&self, name: &str, container: &str) {
        with_timeout("container printed its output", async {
            while !self.container_log(name, container).await.ends_with("that is all\n") {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        })
        .await;
        assert_eq!(self.container_log(name, container).await, "that is all\n", "{name}/{container}");
    }

    async fn force_delete(&self, name: &str) {
        self.pods.delete(name, &DeleteParams::default().grace_period(0)).await.unwrap();
    }

    fn allocations(&self) -> Vec<(String, BTreeSet<String>)> {
        let events = self.plugin.events().into_iter();
        events
            .filter_map(|event| match event.what {
                PluginEventKind::Allocated { key, ids } => Some((key, ids)),
                _ => None,
            })
            .collect()
    }

    fn written_specs(&self) -> Vec<WrittenSpec> {
        let events = self.plugin.events().into_iter();
        events
            .filter_map(|event| match event.what {
                PluginEventKind::Started { written, .. } => Some(written),
                _ => None,
            })
            .flatten()
            .collect()
    }
}

/// Waits until a container has restarted this number of times, and runs.
async fn wait_until_restarted(pods: &Api<Pod>, name: &str, container: &str, times: i32) {
    let restarted = |pod: Option<&Pod>| {
        let status = pod.and_then(|pod| pod.status.as_ref());
        let mut statuses = status.into_iter().flat_map(|status| status.container_statuses.iter().flatten());
        statuses.any(|s| s.name == container && s.restart_count == times && s.ready)
    };
    with_timeout(&format!("{name} restarts"), await_condition(pods.clone(), name, restarted)).await.unwrap();
}

/// Waits until kubelet has a pod.
async fn wait_until_kubelet_knows(bed: &TestBed, name: &str) {
    let socket = bed.node("node1").unwrap().path("/var/lib/kubelet/pod-resources/kubelet.sock").unwrap();
    let ask = || async {
        let mut client = PodResourcesListerClient::new(unix::connect(&socket).await.ok()?);
        let (pod_name, pod_namespace) = (name.to_string(), NAMESPACE.to_string());
        client.get(GetPodResourcesRequest { pod_name, pod_namespace }).await.ok()
    };
    with_timeout(&format!("kubelet knows {name}"), async {
        while ask().await.is_none() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
    .await;
}

/// Makes a container of a pod exit with an error.
fn request_exit(bed: &TestBed, pod: &Pod) {
    let volume = format!("pods/{}/volumes/kubernetes.io~empty-dir/state/exit", pod.uid().unwrap());
    std::fs::write(bed.node("node1").unwrap().path("/var/lib/kubelet").unwrap().join(volume), "").unwrap();
}

/// Returns what a container gets: its name in the environment, its name and UID in a file, and a device node.
fn grant_edits(folder: &std::path::Path, owner: &ContainerIdentity) -> ContainerEdits {
    let uid = &owner.uid;
    let file = format!("{uid}-{}", owner.container);
    std::fs::write(folder.join(&file), format!("{owner} {uid}\n")).unwrap();
    ContainerEdits {
        env: vec![format!("GRANT={owner}")],
        device_nodes: vec![EditDeviceNode { path: "/dev/granted".into(), host_path: "/dev/null".into() }],
        mounts: vec![EditMount {
            host_path: format!("{GRANTS_DIR}/{file}"),
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

/// Returns a container without devices.
fn container_without_devices(name: &str) -> Value {
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

async fn with_timeout<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(TIMEOUT, future).await.unwrap_or_else(|_| panic!("timeout of {TIMEOUT:?}: {what}"))
}

fn bed() -> Option<TestBed> {
    TestBed::for_test(BedProfile::one_node())
}

#[test]
fn fifty_concurrent_pods_each_get_their_own_grant() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = LateBindingNode::start(&bed, 128).await;
        let names: Vec<String> = (0..50).map(|number| format!("train-{number}")).collect();
        // One container or two, with one device or two.
        let both = |number: usize| number.is_multiple_of(3);
        let creations = names.iter().enumerate().map(|(number, name)| {
            let mut containers = vec![container("main", 1 + number % 2, REPORT_AND_STAY)];
            if both(number) {
                containers.push(container("other", 1, REPORT_AND_STAY));
            }
            containers.push(container_without_devices("none"));
            test_node.create(pod(name, &[], &containers))
        });
        futures::future::join_all(creations).await;
        for (number, name) in names.iter().enumerate() {
            let pod = test_node.wait_until_running(name).await;
            test_node.assert_has_own_grant(&pod, "main").await;
            if both(number) {
                test_node.assert_has_own_grant(&pod, "other").await;
            }
            test_node.assert_has_no_grant(name, "none").await;
        }
        let allocated = test_node.allocations();
        assert_eq!(allocated.len(), 50 + 17, "one response for each container");
        let keys: BTreeSet<&String> = allocated.iter().map(|(key, _)| key).collect();
        assert_eq!(keys.len(), allocated.len(), "every name is unique");
        let mut held = BTreeSet::new();
        assert!(
            allocated.iter().flat_map(|(_, ids)| ids).all(|id| held.insert(id)),
            "every device is allocated once"
        );
    });
}

#[test]
fn init_containers_and_sidecars_get_their_own_grants() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = LateBindingNode::start(&bed, 16).await;
        // Only the init container requests devices: PodResources does not list it.
        test_node
            .create(pod(
                "alone",
                &[container("fetch", 1, REPORT_AND_EXIT)],
                &[container_without_devices("none")],
            ))
            .await;
        // Both request devices: kubelet hands the init container's device to the other one too.
        let (fetch, main) = (container("fetch", 1, REPORT_AND_EXIT), container("main", 1, REPORT_AND_STAY));
        test_node
            .create(pod("same", &[fetch.clone(), container("unpack", 1, REPORT_AND_EXIT)], from_ref(&main)))
            .await;
        // The init container requests more, then less.
        test_node.create(pod("more", &[container("fetch", 3, REPORT_AND_EXIT)], from_ref(&main))).await;
        test_node.create(pod("less", &[fetch], &[container("main", 3, REPORT_AND_STAY)])).await;
        // A sidecar keeps its device.
        let mut sidecar = container("sidecar", 1, REPORT_AND_STAY);
        sidecar["restartPolicy"] = json!("Always");
        test_node.create(pod("sidecar", &[sidecar], &[main])).await;
        let expected: &[(&str, &[&str])] = &[
            ("alone", &["fetch"]),
            ("same", &["fetch", "unpack", "main"]),
            ("more", &["fetch", "main"]),
            ("less", &["fetch", "main"]),
            ("sidecar", &["sidecar", "main"]),
        ];
        for (name, containers) in expected {
            let pod = test_node.wait_until_running(name).await;
            for container in *containers {
                test_node.assert_has_own_grant(&pod, container).await;
            }
        }
        // Kubelet calls `Allocate` once for each container, also when the devices are the same.
        assert_eq!(test_node.allocations().len(), 10);
    });
}

#[test]
fn restarted_container_is_prepared_again_and_keeps_its_key() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = LateBindingNode::start(&bed, 4).await;
        test_node.create(pod("train", &[], &[container("main", 2, REPORT_AND_STAY)])).await;
        let pod = test_node.wait_until_running("train").await;
        test_node.assert_has_own_grant(&pod, "main").await;
        request_exit(test_node.bed, &pod);
        wait_until_restarted(&test_node.pods, "train", "main", 1).await;
        test_node.assert_has_own_grant(&pod, "main").await;
        // `Allocate` belongs to the admission of the pod, `PreStartContainer` to every creation of the container.
        let allocated = test_node.allocations();
        assert_eq!(allocated.len(), 1);
        let written = test_node.written_specs();
        assert!(
            written.len() >= 2 && written.iter().all(|written| written.key == allocated[0].0),
            "{written:?}"
        );
    });
}

#[test]
fn refused_container_shows_the_reason_and_starts_later() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = LateBindingNode::start(&bed, 4).await;
        test_node.plugin.refuse_starts(2, "gpu0 has 4Gi left, 8Gi were granted");
        test_node.create(pod("train", &[], &[container("main", 1, REPORT_AND_STAY)])).await;
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
        with_timeout("message is shown", await_condition(test_node.pods.clone(), "train", refused))
            .await
            .unwrap();
        let pod = test_node.wait_until_running("train").await;
        test_node.assert_has_own_grant(&pod, "main").await;
        assert_eq!(test_node.allocations().len(), 1);
    });
}

#[test]
fn kubelet_restart_does_not_affect_running_containers() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = LateBindingNode::start(&bed, 16).await;
        for name in ["one", "two"] {
            test_node.create(pod(name, &[], &[container("main", 1, REPORT_AND_STAY)])).await;
        }
        let one = test_node.wait_until_running("one").await;
        let two = test_node.wait_until_running("two").await;
        test_node.assert_has_own_grant(&one, "main").await;
        test_node.assert_has_own_grant(&two, "main").await;
        let before = (test_node.allocations(), test_node.written_specs());
        test_node.restart_kubelet().await;
        assert_eq!(
            (test_node.allocations(), test_node.written_specs()),
            before,
            "running containers are not allocated again"
        );
        for pod in [&one, &two] {
            let now = test_node.wait_until_running(&pod.name_any()).await;
            let status = &now.status.as_ref().unwrap().container_statuses.as_ref().unwrap()[0];
            assert_eq!((now.uid(), status.restart_count), (pod.uid(), 0));
        }

        // New pods, and containers that restart now, work as before.
        test_node.create(pod("three", &[], &[container("main", 1, REPORT_AND_STAY)])).await;
        let three = test_node.wait_until_running("three").await;
        test_node.assert_has_own_grant(&three, "main").await;
        request_exit(test_node.bed, &one);
        wait_until_restarted(&test_node.pods, "one", "main", 1).await;
        test_node.assert_has_own_grant(&one, "main").await;
        assert_eq!(test_node.allocations().len(), 3);
        let devices: Vec<(String, BTreeSet<String>)> = test_node.allocations();
        let ids: BTreeSet<&String> = devices.iter().flat_map(|(_, ids)| ids).collect();
        assert_eq!(ids.len(), 3, "held devices are not allocated again");
    });
}

/// Kubelet forgets a plugin's options when it restarts. Until the plugin has registered again, a container that
/// restarts is created without `PreStartContainer`, with the name it got before: the file must exist.
#[test]
fn container_restarted_without_the_plugin_keeps_its_grant() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = LateBindingNode::start(&bed, 4).await;
        test_node.create(pod("train", &[], &[container("main", 1, REPORT_AND_STAY)])).await;
        let train = test_node.wait_until_running("train").await;
        test_node.assert_has_own_grant(&train, "main").await;
        let key = test_node.allocations()[0].0.clone();

        test_node.node().kubelet().kill();
        let LateBindingNode { bed, settings, plugin, pods } = test_node;
        let file = plugin.cdi_file(&key);
        plugin.stop().await;
        assert!(file.exists(), "files outlive the plugin");
        bed.node("node1").unwrap().kubelet().start().unwrap();
        // Not earlier: when kubelet admits a pod whose container has ended, it fails the pod, see below.
        wait_until_kubelet_knows(bed, "train").await;
        request_exit(bed, &train);
        wait_until_restarted(&pods, "train", "main", 1).await;

        let plugin = LatePlugin::start(&Handle::current(), settings.clone()).unwrap();
        plugin.wait_until_watched().await;
        let test_node = LateBindingNode { bed, settings, plugin, pods };
        test_node.assert_has_own_grant(&train, "main").await;
        assert_eq!(test_node.allocations(), [], "the response of the first plugin is still valid");
    });
}

/// At its start kubelet admits every pod again. A running container is skipped; one that has ended, such as an init
/// container, needs its devices to be healthy, and they are not until the plugin has registered. Kubelet 1.36 fails the
/// whole pod unless the plugin was faster, whatever plugin it is: this test shows that nothing else happens.
#[test]
fn pod_with_a_finished_init_container_continues_or_fails_admission() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = LateBindingNode::start(&bed, 4).await;
        let (fetch, main) = (container("fetch", 1, REPORT_AND_EXIT), container("main", 1, REPORT_AND_STAY));
        test_node.create(pod("train", &[fetch], &[main])).await;
        let train = test_node.wait_until_running("train").await;
        test_node.assert_has_own_grant(&train, "main").await;
        test_node.restart_kubelet().await;
        // Until the new kubelet has admitted the pod, the API server has the status of the old one, and there are no
        // logs.
        let which = LogParams { container: Some("main".to_string()), ..LogParams::default() };
        let refused = with_timeout("the new kubelet has decided", async {
            loop {
                let status = test_node.pods.get("train").await.unwrap().status.unwrap();
                match status.phase.as_deref() {
                    Some("Running") if test_node.pods.logs("train", &which).await.is_ok() => return None,
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
fn force_deleted_pod_and_its_successor_get_different_keys() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        // With one device, the successor gets the same one.
        let test_node = LateBindingNode::start(&bed, 1).await;
        let mut uids = BTreeMap::new();
        for round in 0..5 {
            test_node.create(pod("train", &[], &[container("main", 1, REPORT_AND_STAY)])).await;
            let train = test_node.wait_until_running("train").await;
            test_node.assert_has_own_grant(&train, "main").await;
            uids.insert(round, train.uid().unwrap());
            test_node.force_delete("train").await;
        }
        let allocated = test_node.allocations();
        assert_eq!(allocated.len(), 5);
        assert!(allocated.iter().all(|(_, ids)| *ids == allocated[0].1), "always the same device");
        let keys: BTreeSet<&String> = allocated.iter().map(|(key, _)| key).collect();
        assert_eq!(keys.len(), 5, "every name is new");
        // A creation that failed in the runtime is retried, with another `PreStartContainer`.
        let mut owners: Vec<String> =
            test_node.written_specs().into_iter().map(|written| written.owner.uid).collect();
        owners.dedup();
        assert_eq!(owners, uids.into_values().collect::<Vec<_>>());
        let files: Vec<PathBuf> = allocated.iter().map(|(key, _)| test_node.plugin.cdi_file(key)).collect();
        let there: Vec<bool> = files.iter().map(|file| file.exists()).collect();
        assert_eq!(there, [false, false, false, false, true], "files of deleted pods are removed");
    });
}

#[test]
fn unhealthy_devices_are_withdrawn_and_offered_again() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = LateBindingNode::start(&bed, 8).await;
        test_node.plugin.set_health("late-0", false);
        test_node.plugin.set_health("late-1", false);
        test_node.wait_until_allocatable(6).await;
        test_node.plugin.set_health("late-0", true);
        test_node.wait_until_allocatable(7).await;
        let pods = test_node.pods.list(&ListParams::default()).await.unwrap();
        assert!(pods.items.is_empty());
    });
}
