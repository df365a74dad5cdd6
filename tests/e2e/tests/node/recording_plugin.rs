//! A real kubelet and containerd, with plugins whose provider records what it is called with.

use partage_agent::ContainerKey;
use partage_agent::device_owner::{ContainerRuntime, DeviceHolder, DeviceOwnerError, DeviceOwners};
use partage_agent::device_plugin::{
    CDI_KIND, DeviceAllocator, DeviceId, DevicePluginHandle, ListedDevice, Refusal, RefusalReason,
};
use partage_core::model::PodUid;
use partage_testkit::bed::{BedNode, TestBed};
use partage_testkit::eventually;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

/// One start of a container.
pub(crate) struct ContainerStart {
    pub(crate) ids: BTreeSet<DeviceId>,
    /// The containers that hold the devices.
    pub(crate) holders: Result<Vec<DeviceHolder>, DeviceOwnerError>,
    /// The containers that hold the devices, found without kubelet's checkpoint.
    pub(crate) without_checkpoint: Result<Vec<DeviceHolder>, DeviceOwnerError>,
}

impl ContainerStart {
    /// Returns an error if the start cannot be judged: kubelet or the runtime did not respond in time.
    fn transient_refusal(&self) -> Option<Refusal> {
        let errors = [&self.holders, &self.without_checkpoint].map(|output| output.as_ref().err());
        let no_time = |error: &&DeviceOwnerError| {
            matches!(
                error,
                DeviceOwnerError::PodResourcesUnavailable { .. }
                    | DeviceOwnerError::RuntimeUnavailable { .. }
            )
        };
        errors
            .into_iter()
            .flatten()
            .find(no_time)
            .map(|error| Refusal::new(RefusalReason::Failed, error.to_string()))
    }
}

/// Provides every container with its pod's UID and its own name, in `GRANT`.
pub(crate) struct RecordingGiver {
    kubelet: DeviceOwners,
    blind: DeviceOwners,
    cdi: PathBuf,
    pub(crate) names: Mutex<BTreeMap<ContainerKey, BTreeSet<DeviceId>>>,
    pub(crate) starts: Mutex<Vec<ContainerStart>>,
}

impl DeviceAllocator for RecordingGiver {
    async fn allocate(&self, _: &str, ids: BTreeSet<DeviceId>) -> Result<ContainerKey, Refusal> {
        let mut bytes = [0_u8; 16];
        std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut bytes).unwrap();
        let key = ContainerKey(bytes.iter().map(|byte| format!("{byte:02x}")).collect());
        self.names.lock().unwrap().insert(key.clone(), ids);
        Ok(key)
    }

    async fn prepare_container(&self, resource: &str, ids: BTreeSet<DeviceId>) -> Result<(), Refusal> {
        let (holders, without_checkpoint) = tokio::join!(
            self.kubelet.holders(resource, &ids, None),
            self.blind.holders(resource, &ids, None)
        );
        let start = ContainerStart { ids, holders, without_checkpoint };
        if let Some(refusal) = start.transient_refusal() {
            return Err(refusal);
        }
        for holder in start.holders.as_deref().unwrap_or_default() {
            // If the checkpoint could not be read now, it can the next time.
            let Some(key) = holder.key.as_ref() else {
                return Err(Refusal::new(RefusalReason::Failed, "no name yet".to_string()));
            };
            assert_eq!(
                self.names.lock().unwrap().get(key),
                Some(&start.ids),
                "the name was allocated for these ids"
            );
            let edits = json!({"env": [format!("GRANT={}/{}", holder.uid, holder.container)]});
            let devices = json!([{"name": key.0, "containerEdits": edits}]);
            let spec = json!({"cdiVersion": "0.6.0", "kind": CDI_KIND, "devices": devices});
            let temporary = self.cdi.join(format!(".{key}"));
            std::fs::write(&temporary, spec.to_string()).unwrap();
            std::fs::rename(temporary, self.cdi.join(format!("{key}.json"))).unwrap();
        }
        let refusal =
            start.holders.as_ref().err().map(|error| Refusal::new(RefusalReason::Failed, error.to_string()));
        self.starts.lock().unwrap().push(start);
        refusal.map_or(Ok(()), Err)
    }
}

/// A resource with its devices and its plugin.
pub(crate) struct ServedResource {
    pub(crate) devices: watch::Sender<Vec<ListedDevice>>,
    pub(crate) plugin: DevicePluginHandle,
}

pub(crate) struct RecordingNode<'a> {
    pub(crate) bed: &'a TestBed,
    pub(crate) giver: Arc<RecordingGiver>,
    pub(crate) runtime: ContainerRuntime,
    _blind: tempfile::TempDir,
}

impl<'a> RecordingNode<'a> {
    pub(crate) fn start(bed: &'a TestBed) -> RecordingNode<'a> {
        let node = bed.node("node1").unwrap();
        let (kubelet, cdi) = (node.path("/var/lib/kubelet").unwrap(), node.path("/etc/cdi").unwrap());
        std::fs::create_dir_all(&cdi).unwrap();
        let runtime = ContainerRuntime::new(&node.path("/run/containerd/containerd.sock").unwrap());
        // Kubelet's directory without its device plugins.
        let blind = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(kubelet.join("pod-resources"), blind.path().join("pod-resources"))
            .unwrap();
        let giver = Arc::new(RecordingGiver {
            kubelet: DeviceOwners::new(&kubelet, runtime.clone()),
            blind: DeviceOwners::new(blind.path(), runtime.clone()),
            cdi,
            names: Mutex::default(),
            starts: Mutex::default(),
        });
        RecordingNode { bed, giver, runtime, _blind: blind }
    }

    pub(crate) fn node(&self) -> &BedNode {
        self.bed.node("node1").unwrap()
    }

    pub(crate) fn plugin_dir(&self) -> PathBuf {
        self.node().path("/var/lib/kubelet/device-plugins").unwrap()
    }

    /// Serves a resource, and waits until the node offers it.
    pub(crate) fn serve(&self, name: &str, count: usize) -> ServedResource {
        let device = |number| ListedDevice { id: DeviceId(format!("d{number}")), healthy: true };
        let (devices, listed) = watch::channel((0..count).map(device).collect());
        let plugin = DevicePluginHandle::start(
            self.bed.handle(),
            &self.plugin_dir(),
            name,
            listed,
            self.giver.clone(),
        );
        let resource = ServedResource { devices, plugin };
        self.wait_until_offered(name, count);
        resource
    }

    /// Waits until the node offers this number of devices.
    pub(crate) fn wait_until_offered(&self, resource: &str, count: usize) {
        self.eventually(&format!("the node offers {count} of {resource}"), || {
            let node = self.get_object("node/node1")?;
            let offered = &node["status"]["allocatable"][resource];
            if offered.as_str() == Some(count.to_string().as_str()) {
                Ok(())
            } else {
                Err(format!("{offered}"))
            }
        });
    }

    /// Waits until kubelet watches the list of a resource's devices.
    pub(crate) fn wait_until_watched(&self, resource: &ServedResource) {
        let mut watched = resource.plugin.kubelet_streams();
        self.bed.block_on(async { drop(watched.wait_for(|streams| *streams == 1).await) });
    }

    pub(crate) fn eventually<T>(&self, what: &str, mut ask: impl FnMut() -> Result<T, String>) -> T {
        self.bed.block_on(eventually(what, async || ask()))
    }

    pub(crate) fn get_object(&self, what: &str) -> Result<Value, String> {
        let text = self.bed.kubectl(&["get", what, "-o", "json"]).map_err(|e| e.to_string())?;
        serde_json::from_str(&text).map_err(|e| e.to_string())
    }

    pub(crate) fn create(&self, pods: &[Value]) {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": pods});
        self.bed.kubectl_with(&["create", "-f", "-"], &list.to_string()).unwrap();
    }

    pub(crate) fn force_delete(&self, pod: &str) {
        self.bed.kubectl(&["delete", "pod", pod, "--force", "--grace-period=0"]).unwrap();
    }

    /// Waits until a pod runs, and each of these containers has printed its own grant. Returns its UID.
    pub(crate) fn wait_until_running(&self, pod: &str, containers: &[&str]) -> PodUid {
        let uid = self.eventually(&format!("{pod} is running"), || {
            let pod = self.get_object(&format!("pod/{pod}"))?;
            match pod["status"]["phase"].as_str() {
                Some("Running") => Ok(pod["metadata"]["uid"].as_str().unwrap().to_string()),
                _ => Err(pod["status"].to_string()),
            }
        });
        for container in containers {
            self.eventually(&format!("{pod}/{container} prints its grant"), || {
                let output = self.bed.kubectl(&["logs", pod, "-c", container]).map_err(|e| e.to_string())?;
                let expected = format!("GRANT={uid}/{container}\nthat is all\n");
                if output == expected { Ok(()) } else { Err(output) }
            });
        }
        uid.into()
    }
}

/// Returns a container that prints its grant, and then ends or keeps running.
pub(crate) fn container(name: &str, resource: &str, devices: usize, stays: bool) -> Value {
    let stay = if stays { "; while :; do sleep 1; done" } else { "" };
    json!({
        "name": name,
        "image": "localhost/busybox:bed",
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", format!("env | grep ^GRANT; echo that is all{stay}")],
        "resources": {"limits": {resource: devices.to_string()}},
    })
}

pub(crate) fn pod(name: &str, init: &[Value], containers: &[Value]) -> Value {
    let spec = json!({"initContainers": init, "containers": containers, "terminationGracePeriodSeconds": 1});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
}
