//! Device plugins: one gRPC server for each count resource, which stays registered with kubelet.
//!
//! Kubelet forgets its plugins when it starts: it removes their sockets, and counts their devices as lost until they register
//! again. Pods that it admits meanwhile fail, so a plugin must be back within milliseconds. It watches kubelet's directory for
//! that.

mod dir_watch;
mod registration;
mod service;

pub use partage_enforce::refusal::{Refusal, RefusalReason};

use crate::containers::ContainerKey;
use partage_kubelet_api::deviceplugin::KUBELET_SOCKET;
use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Vendor and class of the CDI devices in the answers to `Allocate`.
pub const CDI_KIND: &str = "partage.dev/grant";

/// The id of one device of a resource, as kubelet counts it. A device belongs to no GPU until its container is granted one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct DeviceId(pub String);

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Number of characters of a key in the name of a CDI device, which are hexadecimal digits.
const KEY_LENGTH: usize = 32;

/// Returns the CDI device of a container, as kubelet passes it to the container runtime.
pub fn cdi_device(key: &ContainerKey) -> String {
    format!("{CDI_KIND}={key}")
}

/// Returns the key in the name of a CDI device. `None` if the device is not one of Partage's grants.
pub fn key_of_cdi_device(device: &str) -> Option<ContainerKey> {
    let key = device.strip_prefix(CDI_KIND)?.strip_prefix('=')?;
    let is_key = key.len() == KEY_LENGTH && key.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    is_key.then(|| ContainerKey(key.to_string()))
}

/// Decides about the devices of a plugin: the server calls it for kubelet's requests.
pub trait DeviceAllocator: Send + Sync + 'static {
    /// Answers `Allocate`: kubelet chose devices for a container that it does not name. Returns a fresh key, which is on disk
    /// before kubelet gets it.
    fn allocate(
        &self,
        resource: &str,
        ids: BTreeSet<DeviceId>,
    ) -> impl Future<Output = Result<ContainerKey, Refusal>> + Send;

    /// Returns the CDI devices that kubelet passes to the container runtime for this key.
    fn cdi_devices(&self, key: &ContainerKey) -> Vec<String> {
        vec![cdi_device(key)]
    }

    /// Answers `PreStartContainer`: a container with these devices is about to be created. On success everything that the
    /// container gets is in place.
    fn prepare_container(
        &self,
        resource: &str,
        ids: BTreeSet<DeviceId>,
    ) -> impl Future<Output = Result<(), Refusal>> + Send;
}

/// A device with its health, as it is listed to kubelet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedDevice {
    /// The id that kubelet counts it by.
    pub id: DeviceId,
    /// Whether kubelet may allocate it to containers.
    pub healthy: bool,
}

/// Time for requests in progress when a plugin is stopped.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// A resource that is served to kubelet. Dropping the handle stops the plugin; kubelet then counts its devices as lost.
#[derive(Debug)]
pub struct DevicePluginHandle {
    streams: watch::Receiver<usize>,
    /// Stops the plugin; requests in progress have until then.
    stop: watch::Sender<Option<Instant>>,
    task: JoinHandle<()>,
}

impl DevicePluginHandle {
    /// Serves a resource and keeps it registered with kubelet, until the handle is dropped or stopped. Kubelet need not run
    /// yet. `directory` is kubelet's `device-plugins`.
    pub fn start<A: DeviceAllocator>(
        runtime: &Handle,
        directory: &Path,
        resource: &str,
        devices: watch::Receiver<Vec<ListedDevice>>,
        allocator: Arc<A>,
    ) -> DevicePluginHandle {
        let context = Arc::new(PluginContext {
            directory: directory.to_path_buf(),
            resource: resource.to_string(),
            devices,
            allocator,
            streams: watch::Sender::new(0),
            opened: AtomicU64::new(0),
        });
        let streams = context.streams.subscribe();
        let (stop, stopped) = watch::channel(None);
        let task = runtime.spawn(registration::run(context, stopped));
        DevicePluginHandle { streams, stop, task }
    }

    /// Returns how many `ListAndWatch` streams kubelet has open: 1 while the plugin is registered, 0 otherwise.
    pub fn kubelet_streams(&self) -> watch::Receiver<usize> {
        self.streams.clone()
    }

    /// Stops the plugin, and waits until its socket is removed.
    pub async fn stop(self) {
        self.stop_by(Instant::now() + DRAIN_TIMEOUT).await;
    }

    /// Stops the plugin as [`DevicePluginHandle::stop`] does, and aborts requests that are in progress at the deadline.
    pub async fn stop_by(mut self, deadline: Instant) {
        self.stop.send_replace(Some(deadline.min(Instant::now() + DRAIN_TIMEOUT)));
        // An error is a task that was cancelled with its runtime: it has ended too.
        let _ = (&mut self.task).await;
    }
}

impl Drop for DevicePluginHandle {
    fn drop(&mut self) {
        if self.stop.borrow().is_none() {
            self.stop.send_replace(Some(Instant::now() + DRAIN_TIMEOUT));
        }
    }
}

/// Removes the sockets that plugins have left in kubelet's `device-plugins`. No plugin may be running.
pub(crate) fn remove_sockets(directory: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let is_ours =
            name.to_str().is_some_and(|name| name.starts_with(SOCKET_PREFIX) && name.ends_with(".sock"));
        if is_ours && entry.file_type()?.is_socket() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// The beginning of the file names of Partage's sockets.
const SOCKET_PREFIX: &str = "partage_";

/// State that a plugin's server and its registration share.
#[derive(Debug)]
struct PluginContext<A> {
    directory: PathBuf,
    resource: String,
    devices: watch::Receiver<Vec<ListedDevice>>,
    allocator: Arc<A>,
    /// Number of open `ListAndWatch` streams.
    streams: watch::Sender<usize>,
    /// Number of streams that were ever opened.
    opened: AtomicU64,
}

/// Returns the file name of a resource's socket. No two served resources differ in dots and slashes only.
pub(crate) fn endpoint(resource: &str) -> String {
    format!("{SOCKET_PREFIX}{}.sock", resource.replace(['/', '.'], "_"))
}

impl<A> PluginContext<A> {
    fn endpoint(&self) -> String {
        endpoint(&self.resource)
    }

    fn socket(&self) -> PathBuf {
        self.directory.join(self.endpoint())
    }

    fn kubelet_socket(&self) -> PathBuf {
        self.directory.join(KUBELET_SOCKET)
    }
}
