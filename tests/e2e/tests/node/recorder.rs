//! A real kubelet and containerd, with plugins whose giver writes down what it learns.

use partage_agent::identity::{Holder, IdentityError, Kubelet, Runtime};
use partage_agent::plugin::{CDI_KIND, ContainerKey, DeviceId, Giver, Listed, Plugin, Refusal};
use partage_core::model::PodUid;
use partage_testkit::bed::{Bed, Node};
use partage_testkit::eventually;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

/// One start of a container.
pub(crate) struct Start {
    pub(crate) ids: BTreeSet<DeviceId>,
    /// Who they belong to.
    pub(crate) holders: Result<Vec<Holder>, IdentityError>,
    /// The same from somebody who cannot read kubelet's checkpoint.
    pub(crate) without_checkpoint: Result<Vec<Holder>, IdentityError>,
}

impl Start {
    /// Why nothing can be said of it: kubelet or the runtime had no time to answer.
    fn in_vain(&self) -> Option<Refusal> {
        let errors = [&self.holders, &self.without_checkpoint].map(|said| said.as_ref().err());
        let no_time = |error: &&IdentityError| {
            matches!(error, IdentityError::Kubelet { .. } | IdentityError::Runtime { .. })
        };
        errors.into_iter().flatten().find(no_time).map(|error| Refusal(error.to_string()))
    }
}

/// Gives every container its pod's UID and its own name, in `GRANT`.
pub(crate) struct Recorder {
    kubelet: Kubelet,
    blind: Kubelet,
    cdi: PathBuf,
    pub(crate) names: Mutex<BTreeMap<ContainerKey, BTreeSet<DeviceId>>>,
    pub(crate) starts: Mutex<Vec<Start>>,
}

impl Giver for Recorder {
    async fn allocate(&self, _: &str, ids: BTreeSet<DeviceId>) -> Result<ContainerKey, Refusal> {
        let mut bytes = [0_u8; 16];
        std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut bytes).unwrap();
        let key = ContainerKey(bytes.iter().map(|byte| format!("{byte:02x}")).collect());
        self.names.lock().unwrap().insert(key.clone(), ids);
        Ok(key)
    }

    async fn start(&self, resource: &str, ids: BTreeSet<DeviceId>) -> Result<(), Refusal> {
        let (holders, without_checkpoint) = tokio::join!(
            self.kubelet.holders(resource, &ids, None),
            self.blind.holders(resource, &ids, None)
        );
        let start = Start { ids, holders, without_checkpoint };
        if let Some(refusal) = start.in_vain() {
            return Err(refusal);
        }
        for holder in start.holders.as_deref().unwrap_or_default() {
            // Where the checkpoint could not be read just now, it can the next time.
            let Some(key) = holder.key.as_ref() else { return Err(Refusal("no name yet".to_string())) };
            assert_eq!(
                self.names.lock().unwrap().get(key),
                Some(&start.ids),
                "the name was answered for these ids"
            );
            let edits = json!({"env": [format!("GRANT={}/{}", holder.uid, holder.container)]});
            let devices = json!([{"name": key.0, "containerEdits": edits}]);
            let spec = json!({"cdiVersion": "0.6.0", "kind": CDI_KIND, "devices": devices});
            let temporary = self.cdi.join(format!(".{key}"));
            std::fs::write(&temporary, spec.to_string()).unwrap();
            std::fs::rename(temporary, self.cdi.join(format!("{key}.json"))).unwrap();
        }
        let refusal = start.holders.as_ref().err().map(|error| Refusal(error.to_string()));
        self.starts.lock().unwrap().push(start);
        refusal.map_or(Ok(()), Err)
    }
}

/// A resource with so many devices.
pub(crate) struct Resource {
    pub(crate) devices: watch::Sender<Vec<Listed>>,
    pub(crate) plugin: Plugin,
}

pub(crate) struct Stage<'a> {
    pub(crate) bed: &'a Bed,
    pub(crate) giver: Arc<Recorder>,
    pub(crate) runtime: Runtime,
    _blind: tempfile::TempDir,
}

impl<'a> Stage<'a> {
    pub(crate) fn set(bed: &'a Bed) -> Stage<'a> {
        let node = bed.node("node1").unwrap();
        let (kubelet, cdi) = (node.path("/var/lib/kubelet").unwrap(), node.path("/etc/cdi").unwrap());
        std::fs::create_dir_all(&cdi).unwrap();
        let runtime = Runtime::new(&node.path("/run/containerd/containerd.sock").unwrap());
        // Kubelet's folder without its device plugins.
        let blind = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(kubelet.join("pod-resources"), blind.path().join("pod-resources"))
            .unwrap();
        let giver = Arc::new(Recorder {
            kubelet: Kubelet::new(&kubelet, runtime.clone()),
            blind: Kubelet::new(blind.path(), runtime.clone()),
            cdi,
            names: Mutex::default(),
            starts: Mutex::default(),
        });
        Stage { bed, giver, runtime, _blind: blind }
    }

    pub(crate) fn node(&self) -> &Node {
        self.bed.node("node1").unwrap()
    }

    pub(crate) fn folder(&self) -> PathBuf {
        self.node().path("/var/lib/kubelet/device-plugins").unwrap()
    }

    /// Serves a resource, and waits until the node offers it.
    pub(crate) fn serve(&self, name: &str, count: usize) -> Resource {
        let device = |number| Listed { id: DeviceId(format!("d{number}")), healthy: true };
        let (devices, listed) = watch::channel((0..count).map(device).collect());
        let plugin = Plugin::start(self.bed.handle(), &self.folder(), name, listed, self.giver.clone());
        let resource = Resource { devices, plugin };
        self.offered(name, count);
        resource
    }

    /// Waits until the node offers so many devices.
    pub(crate) fn offered(&self, resource: &str, count: usize) {
        self.eventually(&format!("the node offers {count} of {resource}"), || {
            let node = self.get("node/node1")?;
            let offered = &node["status"]["allocatable"][resource];
            if offered.as_str() == Some(count.to_string().as_str()) {
                Ok(())
            } else {
                Err(format!("{offered}"))
            }
        });
    }

    /// Waits until kubelet watches the list of a resource's devices.
    pub(crate) fn watched(&self, resource: &Resource) {
        let mut watched = resource.plugin.watched();
        self.bed.block_on(async { drop(watched.wait_for(|streams| *streams == 1).await) });
    }

    pub(crate) fn eventually<T>(&self, what: &str, mut ask: impl FnMut() -> Result<T, String>) -> T {
        self.bed.block_on(eventually(what, async || ask()))
    }

    pub(crate) fn get(&self, what: &str) -> Result<Value, String> {
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

    /// Waits until a pod runs, and every one of these containers has said its own grant. Returns its UID.
    pub(crate) fn runs(&self, pod: &str, containers: &[&str]) -> PodUid {
        let uid = self.eventually(&format!("{pod} runs"), || {
            let pod = self.get(&format!("pod/{pod}"))?;
            match pod["status"]["phase"].as_str() {
                Some("Running") => Ok(pod["metadata"]["uid"].as_str().unwrap().to_string()),
                _ => Err(pod["status"].to_string()),
            }
        });
        for container in containers {
            self.eventually(&format!("{pod}/{container} says its grant"), || {
                let said = self.bed.kubectl(&["logs", pod, "-c", container]).map_err(|e| e.to_string())?;
                let expected = format!("GRANT={uid}/{container}\nthat is all\n");
                if said == expected { Ok(()) } else { Err(said) }
            });
        }
        uid.into()
    }
}

/// A container that says its grant, and then runs to its end or stays.
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
