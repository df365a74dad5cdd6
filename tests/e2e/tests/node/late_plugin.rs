//! Tests of the late-binding plugin itself, against a fake of kubelet's two sockets and its checkpoint file. For a real
//! kubelet see `late_binding.rs`.

use base64::Engine;
use partage_agent::device_plugin::CDI_KIND;
use partage_e2e::late_plugin::{
    ContainerEdits, ContainerIdentity, EditDeviceNode, EditMount, LatePlugin, LatePluginSettings,
    PluginEventKind, WrittenSpec,
};
use partage_kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient;
use partage_kubelet_api::deviceplugin::registration_server::{Registration, RegistrationServer};
use partage_kubelet_api::deviceplugin::{self as contract, Empty};
use partage_kubelet_api::podresources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use partage_kubelet_api::podresources::{self as resources};
use partage_kubelet_api::unix;
use prost::Message;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status};

const RESOURCE: &str = "example.com/late";

#[derive(Clone, Copy, PartialEq)]
enum ContainerKind {
    Init,
    App,
}
use ContainerKind::{App, Init};

/// What kubelet keeps for a container.
#[derive(Clone)]
struct Allocation {
    uid: String,
    pod: String,
    container: String,
    kind: ContainerKind,
    ids: Vec<String>,
    answer: contract::ContainerAllocateResponse,
}

/// The parts of kubelet that a plugin sees.
#[derive(Clone)]
struct FakeKubelet {
    folder: Arc<tempfile::TempDir>,
    registered: Arc<Mutex<Vec<contract::RegisterRequest>>>,
    allocations: Arc<Mutex<Vec<Allocation>>>,
    running: watch::Sender<u64>,
    /// Changes when kubelet closes the lists of its plugins.
    holding: watch::Sender<u64>,
}

#[tonic::async_trait]
impl Registration for FakeKubelet {
    async fn register(&self, request: Request<contract::RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        // Kubelet calls back before it responds.
        let socket = self.path("kubelet/device-plugins").join(&request.endpoint);
        let channel = unix::connect(socket).await.map_err(|e| Status::unavailable(e.to_string()))?;
        let mut client = DevicePluginClient::new(channel);
        let options = client.get_device_plugin_options(Empty {}).await?.into_inner();
        assert!(options.pre_start_required);
        self.registered.lock().unwrap().push(request);
        let (mut running, mut holding) = (self.running.subscribe(), self.holding.subscribe());
        tokio::spawn(async move {
            let mut lists = client.list_and_watch(Empty {}).await.unwrap().into_inner();
            loop {
                tokio::select! {
                    list = lists.message() => if !matches!(list, Ok(Some(_))) { break },
                    _ = running.changed() => break,
                    _ = holding.changed() => break,
                }
            }
        });
        Ok(Response::new(Empty {}))
    }
}

#[tonic::async_trait]
impl PodResourcesLister for FakeKubelet {
    async fn list(
        &self,
        _: Request<resources::ListPodResourcesRequest>,
    ) -> Result<Response<resources::ListPodResourcesResponse>, Status> {
        let allocations = self.allocations.lock().unwrap();
        let pod_resources = allocations.iter().filter(|a| a.kind == App).map(|allocation| {
            // One entry for each device, as kubelet does.
            let device = |id: &String| resources::ContainerDevices {
                resource_name: RESOURCE.into(),
                device_ids: vec![id.clone()],
                topology: None,
            };
            resources::PodResources {
                name: allocation.pod.clone(),
                namespace: "team".into(),
                containers: vec![resources::ContainerResources {
                    name: allocation.container.clone(),
                    devices: allocation.ids.iter().map(device).collect(),
                    ..Default::default()
                }],
            }
        });
        let pod_resources = pod_resources.collect();
        Ok(Response::new(resources::ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<resources::AllocatableResourcesRequest>,
    ) -> Result<Response<resources::AllocatableResourcesResponse>, Status> {
        Err(Status::unimplemented("not used"))
    }

    async fn get(
        &self,
        _: Request<resources::GetPodResourcesRequest>,
    ) -> Result<Response<resources::GetPodResourcesResponse>, Status> {
        Err(Status::unimplemented("not used"))
    }
}

impl FakeKubelet {
    async fn start() -> FakeKubelet {
        let folder = tempfile::tempdir().unwrap();
        for name in ["kubelet/device-plugins", "kubelet/pod-resources", "cdi", "logs"] {
            fs::create_dir_all(folder.path().join(name)).unwrap();
        }
        let kubelet = FakeKubelet {
            folder: Arc::new(folder),
            registered: Arc::default(),
            allocations: Arc::default(),
            running: watch::Sender::new(0),
            holding: watch::Sender::new(0),
        };
        kubelet.serve().await;
        kubelet
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    async fn serve(&self) {
        let registration = unix::listen(self.path("kubelet/device-plugins/kubelet.sock")).await.unwrap();
        let resources = unix::listen(self.path("kubelet/pod-resources/kubelet.sock")).await.unwrap();
        let until_restart = || {
            let mut running = self.running.subscribe();
            async move { drop(running.changed().await) }
        };
        let service = RegistrationServer::new(self.clone());
        tokio::spawn(Server::builder().serve_with_incoming_shutdown(service, registration, until_restart()));
        let service = PodResourcesListerServer::new(self.clone());
        tokio::spawn(Server::builder().serve_with_incoming_shutdown(service, resources, until_restart()));
    }

    /// Restarts as kubelet does: the sockets of all plugins are removed.
    async fn restart(&self) {
        self.running.send_modify(|starts| *starts += 1);
        for entry in fs::read_dir(self.path("kubelet/device-plugins")).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|e| e == "sock") {
                // A plugin that ends may have removed its own socket.
                let _ = fs::remove_file(path);
            }
        }
        while self.path("kubelet/pod-resources/kubelet.sock").exists() {
            tokio::task::yield_now().await;
        }
        self.serve().await;
    }

    fn settings(&self) -> LatePluginSettings {
        let (kubelet, runtime) = (self.path("kubelet"), self.path("containerd.sock"));
        LatePluginSettings::new(
            &kubelet,
            &self.path("logs"),
            &runtime,
            &self.path("cdi"),
            &self.path("record.json"),
        )
    }

    async fn plugin(&self) -> LatePlugin {
        let plugin = LatePlugin::start(&Handle::current(), self.settings()).unwrap();
        plugin.wait_until_watched().await;
        plugin
    }

    async fn client(&self) -> DevicePluginClient<Channel> {
        let socket = self.path("kubelet/device-plugins/partage_example_com_late.sock");
        DevicePluginClient::new(unix::connect(socket).await.unwrap())
    }

    /// Admits a container of a pod with these devices.
    async fn allocate(
        &self,
        uid: &str,
        pod: &str,
        container: &str,
        kind: ContainerKind,
        ids: &[&str],
    ) -> String {
        let ids: Vec<String> = ids.iter().map(|id| id.to_string()).collect();
        let ask = contract::ContainerAllocateRequest { devices_ids: ids.clone() };
        let ask = contract::AllocateRequest { container_requests: vec![ask] };
        let answer =
            self.client().await.allocate(ask).await.unwrap().into_inner().container_responses.remove(0);
        let key = answer.cdi_devices[0].name.strip_prefix(&format!("{CDI_KIND}=")).unwrap().to_string();
        let (uid, pod, container) = (uid.to_string(), pod.to_string(), container.to_string());
        fs::create_dir_all(self.path("logs").join(format!("team_{pod}_{uid}"))).unwrap();
        let allocation = Allocation { uid, pod, container, kind, ids, answer };
        self.allocations.lock().unwrap().push(allocation);
        self.write_checkpoint();
        key
    }

    fn write_checkpoint(&self) {
        let allocations = self.allocations.lock().unwrap();
        let entries = allocations.iter().map(|allocation| {
            json!({
                "PodUID": allocation.uid,
                "ContainerName": allocation.container,
                "ResourceName": RESOURCE,
                "DeviceIDs": {"-1": allocation.ids},
                "AllocResp": base64::engine::general_purpose::STANDARD.encode(allocation.answer.encode_to_vec()),
            })
        });
        let entries: Vec<Value> = entries.collect();
        let data = json!({"PodDeviceEntries": entries, "RegisteredDevices": {RESOURCE: []}});
        let path = self.path("kubelet/device-plugins/kubelet_internal_checkpoint");
        fs::write(path, json!({"Data": data, "Checksum": 1}).to_string()).unwrap();
    }

    fn forget(&self, uid: &str) {
        self.allocations.lock().unwrap().retain(|allocation| allocation.uid != uid);
    }

    async fn pre_start(&self, ids: &[&str]) -> Result<(), Status> {
        let devices_ids = ids.iter().map(|id| id.to_string()).collect();
        let ask = contract::PreStartContainerRequest { devices_ids };
        self.client().await.pre_start_container(ask).await.map(drop)
    }
}

fn owner(pod: &str, container: &str, uid: &str) -> ContainerIdentity {
    ContainerIdentity {
        namespace: "team".into(),
        pod: pod.into(),
        container: container.into(),
        uid: uid.into(),
    }
}

/// Returns what the plugin wrote at its last start of a container.
fn last_written(plugin: &LatePlugin) -> Vec<WrittenSpec> {
    let mut started = plugin.events().into_iter().filter_map(|event| match event.what {
        PluginEventKind::Started { written, .. } => Some(written),
        _ => None,
    });
    started.next_back().unwrap()
}

/// Returns the environment that a name defines, if its file exists.
fn env(plugin: &LatePlugin, key: &str) -> Option<Vec<String>> {
    let spec: Value = serde_json::from_slice(&fs::read(plugin.cdi_file(key)).ok()?).unwrap();
    assert_eq!(spec["kind"], CDI_KIND);
    assert_eq!(spec["devices"][0]["name"], key);
    let env = spec["devices"][0]["containerEdits"]["env"].as_array().unwrap();
    Some(env.iter().map(|entry| entry.as_str().unwrap().to_string()).collect())
}

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..6000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("timeout: {what}");
}

#[tokio::test]
async fn spec_is_written_when_the_owner_is_known() {
    let kubelet = FakeKubelet::start().await;
    let plugin = kubelet.plugin().await;
    let request = kubelet.registered.lock().unwrap()[0].clone();
    assert_eq!((request.resource_name.as_str(), request.version.as_str()), (RESOURCE, "v1beta1"));
    let key = kubelet.allocate("u1", "train", "main", App, &["late-1", "late-0"]).await;
    assert_eq!(env(&plugin, &key), None, "the owner is not known yet");
    kubelet.pre_start(&["late-0", "late-1"]).await.unwrap();
    assert_eq!(env(&plugin, &key).unwrap(), ["GRANT=team/train/main"]);
    let written = WrittenSpec { key, owner: owner("train", "main", "u1") };
    assert_eq!(last_written(&plugin), [written]);
    let names = fs::read_dir(kubelet.path("cdi")).unwrap().count();
    assert_eq!(names, 1, "no temporary files are left");
}

#[tokio::test]
async fn device_nodes_and_mounts_are_written_in_cdi_format() {
    let kubelet = FakeKubelet::start().await;
    let mut settings = kubelet.settings();
    settings.edits = Arc::new(|_| ContainerEdits {
        env: vec![],
        device_nodes: vec![EditDeviceNode { path: "/dev/x".into(), host_path: "/dev/y".into() }],
        mounts: vec![EditMount {
            host_path: "/a".into(),
            container_path: "/b".into(),
            options: vec!["ro".into(), "bind".into()],
        }],
    });
    let plugin = LatePlugin::start(&Handle::current(), settings).unwrap();
    plugin.wait_until_watched().await;
    let key = kubelet.allocate("u1", "train", "main", App, &["late-0"]).await;
    kubelet.pre_start(&["late-0"]).await.unwrap();
    let spec: Value = serde_json::from_slice(&fs::read(plugin.cdi_file(&key)).unwrap()).unwrap();
    let expected = json!({
        "cdiVersion": "0.6.0",
        "kind": "partage.dev/grant",
        "devices": [{
            "name": key,
            "annotations": {"partage.dev/owner": "team/train/main"},
            "containerEdits": {
                "deviceNodes": [{"path": "/dev/x", "hostPath": "/dev/y"}],
                "mounts": [{"hostPath": "/a", "containerPath": "/b", "options": ["ro", "bind"]}],
            },
        }],
    });
    assert_eq!(spec, expected);
}

#[tokio::test]
async fn init_containers_are_found_in_the_checkpoint() {
    let kubelet = FakeKubelet::start().await;
    let plugin = kubelet.plugin().await;
    // The list has no entry for this pod's devices.
    let alone = kubelet.allocate("u1", "prepare", "fetch", Init, &["late-0"]).await;
    kubelet.pre_start(&["late-0"]).await.unwrap();
    assert_eq!(env(&plugin, &alone).unwrap(), ["GRANT=team/prepare/fetch"]);
    let written = WrittenSpec { key: alone, owner: owner("prepare", "fetch", "u1") };
    assert_eq!(last_written(&plugin), [written]);

    // Kubelet hands the ids of an init container to the containers after it: each has its own name.
    let init = kubelet.allocate("u2", "train", "fetch", Init, &["late-1"]).await;
    let main = kubelet.allocate("u2", "train", "main", App, &["late-1"]).await;
    kubelet.pre_start(&["late-1"]).await.unwrap();
    assert_eq!(env(&plugin, &init).unwrap(), ["GRANT=team/train/fetch"]);
    assert_eq!(env(&plugin, &main).unwrap(), ["GRANT=team/train/main"]);

    // Also when the init container had more ids, and is restarted after the others.
    let init = kubelet.allocate("u3", "wide", "fetch", Init, &["late-2", "late-3"]).await;
    let main = kubelet.allocate("u3", "wide", "main", App, &["late-2"]).await;
    for ids in [&["late-2", "late-3"][..], &["late-2"], &["late-2", "late-3"]] {
        kubelet.pre_start(ids).await.unwrap();
    }
    assert_eq!(env(&plugin, &init).unwrap(), ["GRANT=team/wide/fetch"]);
    assert_eq!(env(&plugin, &main).unwrap(), ["GRANT=team/wide/main"]);
}

#[tokio::test]
async fn successor_with_the_same_name_and_ids_gets_another_spec() {
    let kubelet = FakeKubelet::start().await;
    let plugin = kubelet.plugin().await;
    let first = kubelet.allocate("u1", "train", "main", App, &["late-0"]).await;
    kubelet.pre_start(&["late-0"]).await.unwrap();
    kubelet.forget("u1");
    let second = kubelet.allocate("u2", "train", "main", App, &["late-0"]).await;
    assert_ne!(first, second);
    kubelet.pre_start(&["late-0"]).await.unwrap();
    assert_eq!(last_written(&plugin)[0].owner, owner("train", "main", "u2"));
    assert!(env(&plugin, &second).is_some());
    assert_eq!(env(&plugin, &first), None, "the name of the deleted pod is not used again");
}

/// The list has the pod's name, but no runtime returns its UID.
#[tokio::test]
async fn start_without_the_checkpoint_is_refused() {
    let kubelet = FakeKubelet::start().await;
    let plugin = kubelet.plugin().await;
    let key = kubelet.allocate("u1", "train", "main", App, &["late-0"]).await;
    let checkpoint = kubelet.path("kubelet/device-plugins/kubelet_internal_checkpoint");
    for torn in ["{\"Data\":{\"PodDev", "[]"] {
        fs::write(&checkpoint, torn).unwrap();
        let refused = kubelet.pre_start(&["late-0"]).await.unwrap_err();
        assert!(refused.message().contains("the container runtime at"), "{refused}");
        assert_eq!(env(&plugin, &key), None);
    }
    kubelet.write_checkpoint();
    kubelet.pre_start(&["late-0"]).await.unwrap();
    assert_eq!(env(&plugin, &key).unwrap(), ["GRANT=team/train/main"]);
}

#[tokio::test]
async fn unallocated_ids_are_refused_with_the_reason() {
    let kubelet = FakeKubelet::start().await;
    let plugin = kubelet.plugin().await;
    let refused = kubelet.pre_start(&["late-7"]).await.unwrap_err();
    assert!(refused.message().starts_with("kubelet has not reported a container for late-7"), "{refused}");
    let ids = BTreeSet::from(["late-7".to_string()]);
    let event = plugin.events().pop().unwrap().what;
    assert_eq!(event, PluginEventKind::Refused { ids, why: refused.message().to_string() });
}

#[tokio::test]
async fn starts_are_refused_as_often_as_requested() {
    let kubelet = FakeKubelet::start().await;
    let plugin = kubelet.plugin().await;
    kubelet.allocate("u1", "train", "main", App, &["late-0"]).await;
    plugin.refuse_starts(2, "insufficient capacity on this node");
    for _ in 0..2 {
        assert_eq!(
            kubelet.pre_start(&["late-0"]).await.unwrap_err().message(),
            "insufficient capacity on this node"
        );
    }
    kubelet.pre_start(&["late-0"]).await.unwrap();
}

#[tokio::test]
async fn new_plugin_knows_the_answers_of_the_old_one() {
    let kubelet = FakeKubelet::start().await;
    let plugin = kubelet.plugin().await;
    let key = kubelet.allocate("u1", "train", "main", App, &["late-0"]).await;
    plugin.stop().await;
    assert!(!kubelet.path("kubelet/device-plugins/partage_example_com_late.sock").exists());
    let plugin = kubelet.plugin().await;
    kubelet.pre_start(&["late-0"]).await.unwrap();
    assert_eq!(env(&plugin, &key).unwrap(), ["GRANT=team/train/main"]);

    // Dropped and started at once: the new plugin waits until the socket is free.
    drop(plugin);
    let _plugin = kubelet.plugin().await;
    kubelet.pre_start(&["late-0"]).await.unwrap();
}

#[tokio::test]
async fn plugin_registers_again_after_kubelet_restart() {
    let kubelet = FakeKubelet::start().await;
    let plugin = kubelet.plugin().await;
    for restarts in 1..=3 {
        kubelet.restart().await;
        eventually("registered again", || kubelet.registered.lock().unwrap().len() > restarts).await;
        plugin.wait_until_watched().await;
    }
}

#[tokio::test]
async fn plugin_registers_again_after_its_socket_is_removed() {
    let kubelet = FakeKubelet::start().await;
    let plugin = kubelet.plugin().await;
    fs::remove_file(kubelet.path("kubelet/device-plugins/partage_example_com_late.sock")).unwrap();
    eventually("registered again", || kubelet.registered.lock().unwrap().len() > 1).await;
    plugin.wait_until_watched().await;
    kubelet.allocate("u1", "train", "main", App, &["late-0"]).await;
}

#[tokio::test]
async fn plugin_registers_again_after_kubelet_closes_the_stream() {
    let kubelet = FakeKubelet::start().await;
    let plugin = kubelet.plugin().await;
    for times in 1..=3 {
        kubelet.holding.send_modify(|times| *times += 1);
        eventually("registered again", || kubelet.registered.lock().unwrap().len() > times).await;
        plugin.wait_until_watched().await;
    }
}

#[tokio::test]
async fn plugin_waits_for_kubelet_and_its_directory() {
    let kubelet = FakeKubelet::start().await;
    let (folder, aside) = (kubelet.path("kubelet"), kubelet.path("aside"));
    fs::rename(&folder, &aside).unwrap();
    let plugin = LatePlugin::start(&Handle::current(), kubelet.settings()).unwrap();
    assert!(tokio::time::timeout(Duration::from_millis(300), plugin.wait_until_watched()).await.is_err());
    fs::rename(&aside, &folder).unwrap();
    plugin.wait_until_watched().await;
}

#[tokio::test]
async fn health_changes_are_sent_at_once() {
    let kubelet = FakeKubelet::start().await;
    let plugin = kubelet.plugin().await;
    let mut lists = kubelet.client().await.list_and_watch(Empty {}).await.unwrap().into_inner();
    assert_eq!(lists.message().await.unwrap().unwrap().devices.len(), 64);
    for healthy in [false, true] {
        plugin.set_health("late-5", healthy);
        let list = lists.message().await.unwrap().unwrap();
        let unhealthy: Vec<_> = list.devices.iter().filter(|d| d.health == contract::UNHEALTHY).collect();
        if healthy {
            assert!(unhealthy.is_empty())
        } else {
            assert_eq!((unhealthy.len(), unhealthy[0].id.as_str()), (1, "late-5"))
        }
    }
}

#[tokio::test]
async fn corrupt_record_is_an_error() {
    let kubelet = FakeKubelet::start().await;
    fs::write(kubelet.path("record.json"), "{").unwrap();
    assert!(LatePlugin::start(&Handle::current(), kubelet.settings()).is_err());
}
