//! Device plugins: one server for each count resource, and kubelet told of it whenever it may have forgotten.
//!
//! Kubelet forgets its plugins when it starts: it removes their sockets, and counts their devices as lost until they register
//! again. Pods that it admits meanwhile fail, so a plugin must be back within milliseconds. It watches the folder for that.

mod folder;
mod keep;
mod serve;

use partage_kubelet_api::deviceplugin::KUBELET_SOCKET;
use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Vendor and class of the CDI devices that are answered to kubelet.
pub const CDI_KIND: &str = "partage.dev/grant";

/// One device of a resource, as kubelet counts it. It belongs to no GPU until its container was granted one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct DeviceId(pub String);

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The name after `partage.dev/grant=`: 32 hexadecimal digits, never used twice.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct ContainerKey(pub String);

impl ContainerKey {
    /// The CDI device of this name, as kubelet hands it to the container runtime.
    pub fn cdi_device(&self) -> String {
        format!("{CDI_KIND}={self}")
    }

    /// The name of a CDI device. `None` where it is not one of ours.
    pub fn of_cdi_device(device: &str) -> Option<ContainerKey> {
        let key = device.strip_prefix(CDI_KIND)?.strip_prefix('=')?;
        let ours = key.len() == 32 && key.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        ours.then(|| ContainerKey(key.to_string()))
    }
}

impl fmt::Display for ContainerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why kubelet is told no, in a sentence that the pod's author reads.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(pub String);

impl From<partage_enforce::refusal::Refusal> for Refusal {
    fn from(refusal: partage_enforce::refusal::Refusal) -> Refusal {
        Refusal(refusal.sentence())
    }
}

/// Who answers kubelet.
pub trait Giver: Send + Sync + 'static {
    /// Kubelet chose devices for a container that it does not name: a fresh name, on disk before it is answered.
    fn allocate(
        &self,
        resource: &str,
        ids: BTreeSet<DeviceId>,
    ) -> impl Future<Output = Result<ContainerKey, Refusal>> + Send;

    /// Returns the CDI devices that kubelet is to pass to the container runtime for this name.
    fn cdi_devices(&self, key: &ContainerKey) -> Vec<String> {
        vec![key.cdi_device()]
    }

    /// A container with these devices is about to be created. On success everything it gets is in its place.
    fn start(
        &self,
        resource: &str,
        ids: BTreeSet<DeviceId>,
    ) -> impl Future<Output = Result<(), Refusal>> + Send;
}

/// A device with its health.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its id.
    pub id: DeviceId,
    /// Whether containers may be given it.
    pub healthy: bool,
}

/// A resource that is served. Dropping it ends that; kubelet then counts its devices as lost.
#[derive(Debug)]
pub struct Plugin {
    watched: watch::Receiver<usize>,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Plugin {
    /// Serves a resource and keeps kubelet knowing of it, until dropped or stopped. Kubelet need not be there yet. `folder` is
    /// kubelet's `device-plugins`.
    pub fn start<G: Giver>(
        runtime: &Handle,
        folder: &Path,
        resource: &str,
        devices: watch::Receiver<Vec<Listed>>,
        giver: Arc<G>,
    ) -> Plugin {
        let shared = Arc::new(Shared {
            folder: folder.to_path_buf(),
            resource: resource.to_string(),
            devices,
            giver,
            watched: watch::Sender::new(0),
            opened: AtomicU64::new(0),
        });
        let watched = shared.watched.subscribe();
        let (stop, stopped) = watch::channel(false);
        let task = runtime.spawn(keep::keep(shared, stopped));
        Plugin { watched, stop, task }
    }

    /// How many streams kubelet has open: 1 while it knows the plugin, 0 otherwise.
    pub fn watched(&self) -> watch::Receiver<usize> {
        self.watched.clone()
    }

    /// Ends, and waits until the socket is gone.
    pub async fn stop(mut self) {
        self.stop.send_replace(true);
        // An error is a task that was cancelled with its runtime: it has ended too.
        let _ = (&mut self.task).await;
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

/// Removes the sockets that plugins have left in kubelet's `device-plugins`. Nobody may serve them.
pub(crate) fn remove_sockets(folder: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let ours = name.to_str().is_some_and(|name| name.starts_with(SOCKET) && name.ends_with(".sock"));
        if ours && entry.file_type()?.is_socket() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// How the file names of our sockets begin.
const SOCKET: &str = "partage_";

/// What the server and the one who registers it know together.
#[derive(Debug)]
struct Shared<G> {
    folder: PathBuf,
    resource: String,
    devices: watch::Receiver<Vec<Listed>>,
    giver: Arc<G>,
    /// How many streams of the list are open.
    watched: watch::Sender<usize>,
    /// How many were ever opened.
    opened: AtomicU64,
}

/// The file name of a resource's socket. No two resources that are served differ in dots and slashes only.
pub(crate) fn endpoint(resource: &str) -> String {
    format!("{SOCKET}{}.sock", resource.replace(['/', '.'], "_"))
}

impl<G> Shared<G> {
    fn endpoint(&self) -> String {
        endpoint(&self.resource)
    }

    fn socket(&self) -> PathBuf {
        self.folder.join(self.endpoint())
    }

    fn kubelet_socket(&self) -> PathBuf {
        self.folder.join(KUBELET_SOCKET)
    }
}
