//! A device plugin that binds late: the proof of what a node agent relies on.
//!
//! Kubelet's `Allocate` does not say for which container it is, so the answer is only a fresh CDI name, recorded on
//! disk. `PreStartContainer` comes with the same device ids when the container is about to be created. By then kubelet
//! knows whose they are: the plugin asks, and writes the CDI file under the name it answered. What a container gets is
//! for the test to say, by [`Settings::edits`].

mod holders;
mod record;

use holders::Holders;
use partage_rpc::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use partage_rpc::deviceplugin::registration_client::RegistrationClient;
use partage_rpc::deviceplugin::{self as contract, Empty, HEALTHY, KUBELET_SOCKET, UNHEALTHY, VERSION};
use partage_rpc::unix::{self, SocketFile};
use record::Record;
use serde::Serialize;
use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// Vendor and class of the CDI names.
pub const KIND: &str = "partage.dev/grant";

/// How often the sockets are looked at.
const GLANCE: Duration = Duration::from_millis(100);
/// How long kubelet may take from a registration to its first watch of the list.
const WATCH_PATIENCE: Duration = Duration::from_secs(2);

/// Why the plugin did not start.
#[derive(Debug, thiserror::Error)]
pub enum PluginError {
    /// The record of earlier answers could not be read.
    #[error("cannot read the plugin's record {path}")]
    Record {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        source: io::Error,
    },
}

/// What a plugin serves, and where.
#[derive(Clone)]
pub struct Settings {
    /// The extended resource, such as `example.com/late`.
    pub resource: String,
    /// How many devices there are.
    pub devices: usize,
    /// Kubelet's folder (`/var/lib/kubelet` on the node), as this process sees it.
    pub kubelet: PathBuf,
    /// The folder of pod logs (`/var/log/pods` on the node), as this process sees it. It says the names of pods that
    /// hold devices in init containers only.
    pub pod_logs: PathBuf,
    /// The folder where the node's container runtime looks for CDI files, as this process sees it.
    pub cdi: PathBuf,
    /// The file that outlives the plugin. Not in kubelet's folder of device plugins: kubelet takes any file there for a
    /// checkpoint of its own.
    pub record: PathBuf,
    /// What a container gets.
    pub edits: Arc<dyn Fn(&Owner) -> Edits + Send + Sync>,
}

impl Settings {
    /// 64 devices; every container gets its own name in `GRANT`.
    pub fn new(kubelet: &Path, pod_logs: &Path, cdi: &Path, record: &Path) -> Settings {
        Settings {
            resource: "example.com/late".to_string(),
            devices: 64,
            kubelet: kubelet.to_path_buf(),
            pod_logs: pod_logs.to_path_buf(),
            cdi: cdi.to_path_buf(),
            record: record.to_path_buf(),
            edits: Arc::new(|owner| Edits { env: vec![format!("GRANT={owner}")], ..Edits::default() }),
        }
    }

    fn endpoint(&self) -> String {
        format!("{}.sock", self.resource.replace('/', "_"))
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.kubelet.join("device-plugins").join(name)
    }
}

/// What is changed in a container, in the words of a CDI file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Edits {
    /// `NAME=value`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes, with the right to use them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Files and folders.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
}

/// A device node of the node in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceNode {
    /// Where it appears.
    pub path: String,
    /// Where it is, as the container runtime sees it.
    pub host_path: String,
}

/// A file or folder of the node in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    /// Where it is, as the container runtime sees it.
    pub host_path: String,
    /// Where it appears.
    pub container_path: String,
    /// As for mount(8), such as `ro` and `bind`.
    pub options: Vec<String>,
}

/// The container that devices belong to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Owner {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name in the pod.
    pub container: String,
    /// The pod's UID, from kubelet's checkpoint.
    pub uid: Option<String>,
}

impl fmt::Display for Owner {
    /// `namespace/pod/container`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.namespace, self.pod, self.container)
    }
}

/// Where kubelet says that a container holds the devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// In the list of PodResources, and in the checkpoint if that could be read.
    List,
    /// In the checkpoint alone: an init container.
    Checkpoint,
}

/// A CDI file that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The name after `partage.dev/grant=`.
    pub nonce: String,
    /// The container that was answered this name.
    pub owner: Owner,
    /// How that is known.
    pub source: Source,
}

/// Something that happened.
#[derive(Debug, Clone)]
pub struct Event {
    /// When.
    pub at: Instant,
    /// What.
    pub what: What,
}

/// What can happen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// Kubelet took the registration.
    Registered,
    /// Kubelet began to watch the list of devices.
    Watched,
    /// Devices were given to a container that is not known yet.
    Allocated {
        /// The name that was answered.
        nonce: String,
        /// The devices.
        ids: BTreeSet<String>,
    },
    /// A container may be created.
    Started {
        /// Its devices.
        ids: BTreeSet<String>,
        /// The files that were written: one for each container of the pod that holds exactly these devices. Kubelet
        /// gives the devices of an init container to later containers of the pod.
        written: Vec<Written>,
        /// From the call to the answer.
        took: Duration,
    },
    /// A container may not be created.
    Refused {
        /// Its devices.
        ids: BTreeSet<String>,
        /// The sentence that kubelet was told.
        why: String,
    },
}

/// A running plugin. Dropping it ends it; what it recorded is there for the next one.
pub struct LatePlugin {
    shared: Arc<Shared>,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl LatePlugin {
    /// Starts on a runtime. Kubelet need not be there yet.
    pub fn start(runtime: &Handle, settings: Settings) -> Result<LatePlugin, PluginError> {
        let record = Record::open(&settings.record)?;
        let device = |number| contract::Device {
            id: format!("late-{number}"),
            health: HEALTHY.to_string(),
            topology: None,
        };
        let devices = (0..settings.devices).map(device).collect();
        let shared = Arc::new(Shared {
            holders: Holders::new(&settings.kubelet, &settings.pod_logs, &settings.resource),
            record: Mutex::new(record),
            devices: watch::Sender::new(devices),
            watchers: watch::Sender::new(0),
            events: Mutex::default(),
            refusals: Mutex::default(),
            settings,
        });
        let (stop, stopped) = watch::channel(false);
        let task = runtime.spawn(keep_serving(shared.clone(), stopped));
        Ok(LatePlugin { shared, stop, task })
    }

    /// Waits until kubelet watches the list of devices.
    pub async fn watched(&self) {
        // The sender lives as long as we do.
        let _ = self.shared.watchers.subscribe().wait_for(|watchers| *watchers > 0).await;
    }

    /// Ends, and waits until the socket is gone.
    pub async fn stop(mut self) {
        self.stop.send_replace(true);
        let _ = (&mut self.task).await;
    }

    /// What happened since the start, in order.
    pub fn events(&self) -> Vec<Event> {
        lock(&self.shared.events).clone()
    }

    /// The ids of all devices.
    pub fn ids(&self) -> Vec<String> {
        self.shared.devices.borrow().iter().map(|device| device.id.clone()).collect()
    }

    /// Makes a device healthy or not. Kubelet is told at once.
    pub fn set_health(&self, id: &str, healthy: bool) {
        let health = if healthy { HEALTHY } else { UNHEALTHY };
        self.shared.devices.send_modify(|devices| {
            for device in devices.iter_mut().filter(|device| device.id == id) {
                device.health = health.to_string();
            }
        });
    }

    /// Refuses the next `times` starts of containers with a sentence.
    pub fn refuse_starts(&self, times: usize, sentence: &str) {
        lock(&self.shared.refusals).extend(std::iter::repeat_n(sentence.to_string(), times));
    }

    /// The CDI file of a name, whether it was written or not.
    pub fn cdi_file(&self, nonce: &str) -> PathBuf {
        record::spec_path(&self.shared.settings.cdi, nonce)
    }
}

impl Drop for LatePlugin {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

struct Shared {
    settings: Settings,
    holders: Holders,
    record: Mutex<Record>,
    devices: watch::Sender<Vec<contract::Device>>,
    /// How many streams of the list are open.
    watchers: watch::Sender<usize>,
    events: Mutex<Vec<Event>>,
    refusals: Mutex<VecDeque<String>>,
}

impl Shared {
    fn log(&self, what: What) {
        lock(&self.events).push(Event { at: Instant::now(), what });
    }

    async fn register(&self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let channel = unix::connect(self.settings.socket(KUBELET_SOCKET)).await?;
        let request = contract::RegisterRequest {
            version: VERSION.to_string(),
            endpoint: self.settings.endpoint(),
            resource_name: self.settings.resource.clone(),
            options: Some(options()),
        };
        RegistrationClient::new(channel).register(request).await?;
        self.log(What::Registered);
        Ok(())
    }

    fn allocate(&self, ids: Vec<String>) -> io::Result<contract::ContainerAllocateResponse> {
        let ids: BTreeSet<String> = ids.into_iter().collect();
        let nonce = lock(&self.record).answer(ids.clone())?;
        let name = format!("{KIND}={nonce}");
        self.log(What::Allocated { nonce, ids });
        let cdi_devices = vec![contract::CdiDevice { name }];
        Ok(contract::ContainerAllocateResponse { cdi_devices, ..Default::default() })
    }

    async fn start(&self, ids: &BTreeSet<String>) -> Result<Vec<Written>, Status> {
        if let Some(sentence) = lock(&self.refusals).pop_front() {
            return Err(Status::failed_precondition(sentence));
        }
        let held = self.holders.of(ids).await?;
        let mut record = lock(&self.record);
        let mut written = Vec::new();
        let mut numbers = Vec::new();
        for holder in held.by {
            let nonce = match holder.nonce {
                Some(nonce) => nonce,
                None => only_answer(&record, ids)?,
            };
            // Nothing is written under a name that we did not answer for these very ids.
            let Some(answer) = record.get(&nonce).filter(|answer| answer.ids == *ids) else {
                return Err(Status::internal(format!("{nonce} was never answered for {ids:?}")));
            };
            numbers.push(answer.number);
            let edits = (self.settings.edits)(&holder.owner);
            record::write_spec(&self.settings.cdi, &nonce, &holder.owner, &edits)
                .map_err(|e| Status::internal(format!("cannot write the CDI file of {nonce}: {e}")))?;
            written.push(Written { nonce, owner: holder.owner, source: holder.source });
        }
        // What was answered for any of these ids before, and kubelet no longer keeps, is of a pod that is gone. Its name
        // must not come alive again.
        let first = numbers.into_iter().min().unwrap_or(0);
        let gone = |nonce: &str, answer: &record::Answer| {
            let earlier = answer.number < first && !answer.ids.is_disjoint(ids);
            earlier && held.kept.as_ref().is_some_and(|kept| !kept.contains(nonce))
        };
        let stale = record.answers().filter(|(nonce, answer)| gone(nonce, answer));
        let stale: Vec<String> = stale.map(|(nonce, _)| nonce.to_string()).collect();
        for nonce in &stale {
            record::remove_spec(&self.settings.cdi, nonce).map_err(|e| Status::internal(e.to_string()))?;
        }
        record.forget(&stale).map_err(|e| Status::internal(e.to_string()))?;
        Ok(written)
    }
}

/// The name for these ids when only the list could be asked. With several it is not known which one is meant.
fn only_answer(record: &Record, ids: &BTreeSet<String>) -> Result<String, Status> {
    let mut answers = record.answers().filter(|(_, answer)| answer.ids == *ids).map(|(nonce, _)| nonce);
    match (answers.next(), answers.next()) {
        (Some(nonce), None) => Ok(nonce.to_string()),
        (None, _) => Err(Status::internal(format!("nothing was ever answered for {ids:?}"))),
        (Some(_), Some(_)) => Err(Status::unavailable(format!(
            "several names were answered for {ids:?} and kubelet's checkpoint does not say which is meant"
        ))),
    }
}

fn options() -> contract::DevicePluginOptions {
    contract::DevicePluginOptions { pre_start_required: true, get_preferred_allocation_available: false }
}

/// Serves until told to stop; anew when the socket is removed.
async fn keep_serving(shared: Arc<Shared>, mut stop: watch::Receiver<bool>) {
    while !*stop.borrow() {
        // An earlier plugin may still be ending, or kubelet's folder may not be there yet.
        if let Ok(listener) = unix::listen(shared.settings.socket(&shared.settings.endpoint())).await {
            let file = listener.file().clone();
            let (end, ended) = watch::channel(());
            let service = DevicePluginServer::new(Service { shared: shared.clone(), ended: ended.clone() });
            let mut signal = ended;
            let server =
                tokio::spawn(Server::builder().serve_with_incoming_shutdown(service, listener, async move {
                    while signal.changed().await.is_ok() {}
                }));
            keep_registered(&shared, &file, &mut stop).await;
            // The old streams end before a new registration: when one ends, kubelet drops the plugin's newest
            // connection, whichever that is.
            drop(end);
            let _ = tokio::time::timeout(WATCH_PATIENCE, server).await;
        }
        if !*stop.borrow() {
            pause(&mut stop).await;
        }
    }
}

/// Registers with every new kubelet, and again when kubelet lets the list go. Returns when our socket is gone or at the
/// end.
async fn keep_registered(shared: &Shared, ours: &SocketFile, stop: &mut watch::Receiver<bool>) {
    let mut registered: Option<(SocketFile, Instant)> = None;
    while !*stop.borrow() && ours.is_in_place() {
        let kubelet = SocketFile::at(shared.settings.socket(KUBELET_SOCKET)).ok();
        let known = match (&registered, &kubelet) {
            (Some((file, since)), Some(now)) => {
                let watched = *shared.watchers.borrow() > 0;
                file == now && (watched || since.elapsed() < WATCH_PATIENCE)
            }
            (None, Some(_)) => false,
            (_, None) => true,
        };
        if !known {
            // Refused or not there yet: the next glance tries again.
            registered = tokio::select! {
                answer = shared.register() => answer.ok().and(kubelet).map(|file| (file, Instant::now())),
                _ = stop.changed() => None,
            };
        }
        pause(stop).await;
    }
}

async fn pause(stop: &mut watch::Receiver<bool>) {
    // Ends early when told to stop; it does not matter which.
    let _ = tokio::time::timeout(GLANCE, stop.changed()).await;
}

struct Service {
    shared: Arc<Shared>,
    /// Closes when the server ends.
    ended: watch::Receiver<()>,
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<contract::DevicePluginOptions>, Status> {
        Ok(Response::new(options()))
    }

    type ListAndWatchStream = ReceiverStream<Result<contract::ListAndWatchResponse, Status>>;

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let (send, receive) = mpsc::channel(1);
        let (shared, mut ended) = (self.shared.clone(), self.ended.clone());
        tokio::spawn(async move {
            let mut list = shared.devices.subscribe();
            shared.log(What::Watched);
            shared.watchers.send_modify(|watchers| *watchers += 1);
            loop {
                let devices = list.borrow_and_update().clone();
                if send.send(Ok(contract::ListAndWatchResponse { devices })).await.is_err() {
                    break;
                }
                tokio::select! {
                    changed = list.changed() => if changed.is_err() { break },
                    () = send.closed() => break,
                    _ = ended.changed() => break,
                }
            }
            shared.watchers.send_modify(|watchers| *watchers -= 1);
        });
        Ok(Response::new(ReceiverStream::new(receive)))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<contract::PreferredAllocationRequest>,
    ) -> Result<Response<contract::PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("any device is as good as any other"))
    }

    async fn allocate(
        &self,
        request: Request<contract::AllocateRequest>,
    ) -> Result<Response<contract::AllocateResponse>, Status> {
        let asks = request.into_inner().container_requests.into_iter();
        let container_responses = asks
            .map(|ask| self.shared.allocate(ask.devices_ids))
            .collect::<io::Result<_>>()
            .map_err(|e| Status::internal(format!("cannot record the answer: {e}")))?;
        Ok(Response::new(contract::AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<contract::PreStartContainerRequest>,
    ) -> Result<Response<contract::PreStartContainerResponse>, Status> {
        let begin = Instant::now();
        let ids: BTreeSet<String> = request.into_inner().devices_ids.into_iter().collect();
        match self.shared.start(&ids).await {
            Ok(written) => {
                self.shared.log(What::Started { ids, written, took: begin.elapsed() });
                Ok(Response::new(contract::PreStartContainerResponse {}))
            }
            Err(status) => {
                self.shared.log(What::Refused { ids, why: status.message().to_string() });
                Err(status)
            }
        }
    }
}

/// A test that failed while it held the lock has told its story; the others go on.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
