//! Answers kubelet's requests: `Allocate` gets a key for devices, `PreStartContainer` prepares everything that a container gets.
//!
//! `Allocate` does not name a pod, so it is answered with a fresh key and nothing else. Before the container is created,
//! kubelet's checkpoint records which container has which key; then the pod's grant is decided, and the container's region and CDI
//! spec are written.

use super::lifecycle::{ContainerOwner, PREPARE_STEPS, PrepareStep};
use super::recover::annotations;
use crate::cdi_edits::{CdiEditError, CdiTarget};
use crate::containers::ContainerKey;
use crate::device_owner::{ContainerState, DeviceHolder, RuntimeContainer};
use crate::device_plugin::{DeviceAllocator, DeviceId, Refusal, RefusalReason, cdi_device};
use crate::grants::GrantRequest;
use crate::oversubscription::region_policy;
use crate::refusal_log::StartSubject;
use crate::regions::ContainerRegionError;
use crate::state::{NodeState, lock, logged_name, now};
use crate::store::PodRecord;
use partage_cluster::PodView;
use partage_core::model::{ContainerName, Grant, PodUid};
use partage_enforce::error_chain::describe;
use partage_host::cdi::SHARED_DEVICE;
use partage_host::simulated_driver::write_device_files;
use partage_region::failpoint as fault;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tracing::{Instrument, field};

/// Maximum time for the watch to deliver a pod that kubelet has already, and for the API server to report how a container ended.
const WATCH_LAG_TIMEOUT: Duration = Duration::from_secs(3);
/// Time limit for the answer to `PreStartContainer`. Kubelet gives up after 30 s, with an error that does not name a cause.
const START_TIMEOUT: Duration = Duration::from_secs(25);
/// Interval between two checks of whether an init container is reported as finished.
const FINISH_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Why a container could not be prepared.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PrepareError {
    /// Its region cannot be created or adopted.
    #[error(transparent)]
    Region(#[from] ContainerRegionError),
    /// The device files of a simulated driver cannot be written.
    #[error("cannot write device files in {}", directory.display())]
    DeviceFiles {
        /// The directory of the region.
        directory: PathBuf,
        /// What the system reported.
        #[source]
        source: io::Error,
    },
    /// A device that the container needs is missing.
    #[error(transparent)]
    CdiEdits(#[from] CdiEditError),
    /// The pod's record cannot be encoded for the CDI spec.
    #[error("cannot encode the pod's record")]
    Record(#[source] serde_json::Error),
    /// A CDI spec cannot be written.
    #[error("cannot write the container's CDI spec")]
    Spec(#[source] io::Error),
}

impl NodeState {
    /// Returns the record of the pod that holds these devices; its grant is decided now if it was not before.
    async fn grant_record(&self, holder: &DeviceHolder) -> Result<PodRecord, Refusal> {
        let known = self.containers().grants().record(&holder.uid).cloned();
        if let Some(record) = known {
            // Its shares are about to be released.
            if self.adapters.pods.is_synced() && self.adapters.pods.by_uid(&holder.uid).is_none() {
                let message = format!(
                    "pod {} was deleted: the API server no longer has it, and its GPUs are released to other pods",
                    holder.uid
                );
                return Err(Refusal::new(RefusalReason::NotFound, message));
            }
            return Ok(self.with_current_boot(record));
        }
        let (pod, listed) = self.find_pod(holder).await?;
        self.resolve_pods().await?;
        let settings = self.settings();
        let request = GrantRequest {
            id: &pod.id,
            pod: &pod.pod,
            problems: &pod.problems,
            boot: &self.machine.boot,
            now: now(),
        };
        let decided = self.containers().decide(&request, &settings, listed);
        fault::point("after-decide");
        decided
    }

    /// Returns the record with this boot: a pod that restarts after a reboot keeps its grant.
    fn with_current_boot(&self, mut record: PodRecord) -> PodRecord {
        if record.boot != self.machine.boot {
            record.boot.clone_from(&self.machine.boot);
            self.containers().replace(record.clone());
        }
        record
    }

    /// Returns the pod that holds these devices, and whether the API server's list has it: a single read may be ahead of the list.
    async fn find_pod(&self, holder: &DeviceHolder) -> Result<(Arc<PodView>, bool), Refusal> {
        if let Some(pod) = self.adapters.pods.wait_for(&holder.uid, WATCH_LAG_TIMEOUT).await {
            return Ok((pod, true));
        }
        let unknown = |cause: &str| {
            let message =
                format!("pod {} is not known yet: {cause}; kubelet retries automatically", holder.uid);
            Refusal::new(RefusalReason::NotFound, message)
        };
        // Kubelet and the API server have different UIDs for a static pod.
        let not_found = "the API server has no such pod (a static pod cannot have a share: use a DaemonSet)";
        let Some((namespace, name)) = &holder.name else {
            let is_synced = self.adapters.pods.is_synced();
            return Err(unknown(if is_synced {
                not_found
            } else {
                "the API server has not listed the node's pods yet"
            }));
        };
        match self.adapters.cluster.client.pod(namespace, name).await {
            Ok(Some(pod)) if pod.id.uid == holder.uid => Ok((pod, false)),
            Ok(_) => Err(unknown(not_found)),
            Err(error) => Err(unknown(&describe(&error))),
        }
    }

    /// Creates everything that a container gets, in the order of [`PREPARE_STEPS`]. `keys` are all keys under which the runtime may
    /// request it; the region is created under the first. The region of a container that may be running (`may_run`) is adopted
    /// or left alone, and never replaced.
    pub(super) fn prepare(
        &self,
        keys: &[ContainerKey],
        owner: &ContainerOwner,
        record: &PodRecord,
        grant: &Grant,
        may_run: bool,
    ) -> Result<(), PrepareError> {
        let Some(key) = keys.first() else { return Ok(()) };
        let all = self.throttled();
        {
            let mut containers = self.containers();
            keys.iter().for_each(|key| containers.identify(key, owner));
        }
        for step in PREPARE_STEPS {
            match step {
                PrepareStep::Region => {
                    if may_run {
                        self.adopt_region(key, owner, record, grant, &all)?;
                    } else {
                        let policy = region_policy(record);
                        let regions = &self.adapters.regions;
                        regions.prepare(key, owner, &grant.shares, &all, record.turns, policy)?;
                    }
                    fault::point("after-region");
                }
                PrepareStep::Spec => {
                    self.write_specs(keys, key, record, grant)?;
                    fault::point("after-cdi");
                }
            }
        }
        self.containers().prepared(keys, owner);
        self.save_soon(&owner.pod);
        self.apply_turns_since(&all);
        Ok(())
    }

    /// Writes the CDI specs of a container, under each of its keys. They refer to the region of the key `region`.
    fn write_specs(
        &self,
        keys: &[ContainerKey],
        region: &ContainerKey,
        record: &PodRecord,
        grant: &Grant,
    ) -> Result<(), PrepareError> {
        let container = &grant.container;
        let region = self.adapters.regions.folder(region);
        let devices = self
            .simulated_device_files(&region, grant)
            .map_err(|source| PrepareError::DeviceFiles { directory: region.clone(), source })?;
        let empty = BTreeMap::new();
        let target = CdiTarget {
            node: self.hardware(),
            shares: &grant.shares,
            region: &region,
            devices: devices.as_deref(),
            env: record.env.get(container).unwrap_or(&empty),
            nvidia_runtime: self.machine.nvidia_runtime.load(Ordering::Relaxed),
        };
        let annotations =
            annotations(record, container, &self.adapters.driver_bundle).map_err(PrepareError::Record)?;
        for key in keys {
            let edits = if self.has_shared_device(key) {
                // Restores a shared spec that was removed or changed by hand.
                self.adapters
                    .cdi
                    .put_shared(&self.adapters.driver_bundle.shared_edits())
                    .map_err(PrepareError::Spec)?;
                self.adapters.driver_bundle.container_edits(&target)?
            } else {
                self.adapters.driver_bundle.edits(&target)?
            };
            self.adapters.cdi.put(&key.0, &annotations, &edits).map_err(PrepareError::Spec)?;
        }
        Ok(())
    }

    /// Returns whether kubelet passes [`SHARED_DEVICE`] to the runtime beside this key. It does not if an agent without that device
    /// answered `Allocate`: then the container's own CDI spec must be complete.
    fn has_shared_device(&self, key: &ContainerKey) -> bool {
        self.containers().allocation(key).is_some_and(|allocation| allocation.shared)
    }

    /// Returns whether the files of a prepared container exist.
    fn is_prepared(&self, key: &ContainerKey) -> bool {
        self.adapters.cdi.get(&key.0).is_some_and(|found| found.content.is_ok())
            && (self.adapters.cdi.has_shared() || !self.has_shared_device(key))
            && self.adapters.regions.folder(key).is_dir()
    }

    /// Removes the files of a container under earlier keys.
    fn remove_superseded(&self, key: &ContainerKey, owner: &ContainerOwner) {
        let superseded = self.containers().superseded(key, owner);
        for other in &superseded {
            self.remove_container(other);
        }
    }

    /// Writes the device files of the granted GPUs if the driver is simulated, and returns their directory: a simulated driver
    /// sees the GPUs that have a file there.
    fn simulated_device_files(&self, region: &Path, grant: &Grant) -> io::Result<Option<PathBuf>> {
        if self.machine.simulated.is_none() {
            return Ok(None);
        }
        let folder = region.join("dev");
        write_device_files(&folder, self.hardware(), &grant.shares)?;
        Ok(Some(folder))
    }

    /// Refuses a container one of whose GPUs is unhealthy or gone.
    fn check_health(&self, grant: &Grant) -> Result<(), Refusal> {
        let containers = self.containers();
        let node = containers.grants().node();
        for share in &grant.shares {
            let cause = match node.gpu_index(&share.gpu) {
                Some(at) => node.gpus[at].withheld.clone(),
                None => Some("the node no longer has this GPU".into()),
            };
            if let Some(cause) = cause {
                let message = format!(
                    "the container's GPU {} cannot be used: {cause}; the container starts when the GPU recovers; to get another GPU, delete \
                     the pod",
                    share.gpu
                );
                return Err(Refusal::new(RefusalReason::Failed, message));
            }
        }
        Ok(())
    }

    /// Prepares the container that is about to start. `current` is set to the container that is being prepared, for the log of a
    /// refusal.
    async fn prepare_holders(
        &self,
        resource: &str,
        ids: &BTreeSet<DeviceId>,
        current: &Mutex<Option<DeviceHolder>>,
    ) -> Result<(), Refusal> {
        let newest = self.containers().newest_key(resource, ids);
        let holders = self.adapters.device_owners.holders(resource, ids, newest.as_ref()).await;
        let holders = holders.map_err(|error| Refusal::new(RefusalReason::NotFound, describe(&error)))?;
        for holder in &holders {
            *lock(current) = Some(holder.clone());
            self.record_holder(holder);
            self.prepare_holder(holder).await?;
            self.refusals.remove(&StartSubject::of(holder));
        }
        self.changed.notify_waiters();
        Ok(())
    }

    /// Adds the container to the fields of the request's span, once it is known.
    fn record_holder(&self, holder: &DeviceHolder) {
        let span = tracing::Span::current();
        span.record("container", field::display(&holder.container));
        span.record("uid", field::display(&holder.uid));
        let id = self.pod_id(&holder.uid).map(|id| (id.namespace, id.name));
        if let Some((namespace, pod)) = id.or_else(|| holder.name.clone()) {
            span.record("namespace", field::display(namespace)).record("pod", field::display(pod));
        }
    }

    /// Prepares one container that holds the devices.
    async fn prepare_holder(&self, holder: &DeviceHolder) -> Result<(), Refusal> {
        // A pod that is force-deleted meanwhile is released before or after this, and never in between.
        let _guard = self.lock_pod(&holder.uid).await;
        if let Some(key) = &holder.key {
            let owner = ContainerOwner { pod: holder.uid.clone(), container: holder.container.clone() };
            self.containers().identify(key, &owner);
        }
        let record = self.grant_record(holder).await?;
        let container = self.starting_container(holder, &record).await;
        let Some(grant) = record.grant_of(&container) else {
            let message = format!(
                "the pod's grant does not include container {container}: its request {} is not a valid GPU request",
                holder.resource
            );
            return Err(Refusal::new(RefusalReason::Invalid, message));
        };
        let keys = self.containers().keys_of(holder);
        let Some(key) = keys.first() else {
            let message = format!("the devices of container {container} have no known key: delete the pod");
            return Err(Refusal::new(RefusalReason::Failed, message));
        };
        if grant.init && self.has_finished(&holder.uid, &container) && self.is_prepared(key) {
            // An init container's devices are reused by later containers: an unhealthy GPU of its own must not block those. Where
            // it starts again, as all init containers do in a new sandbox, its files exist; after a reboot they do not, and it is
            // prepared like any other container.
            return Ok(());
        }
        self.check_health(grant)?;
        let owner = ContainerOwner { pod: holder.uid.clone(), container };
        // Disk writes must not delay other tasks.
        tokio::task::block_in_place(|| {
            self.prepare(&keys, &owner, &record, grant, false)?;
            if holder.key.is_some() {
                self.remove_superseded(key, &owner);
            }
            Ok(())
        })
        .map_err(|error: PrepareError| Refusal::new(RefusalReason::Failed, describe(&error)))
    }

    /// Logs that a container was refused, once for each reason: kubelet retries every few seconds.
    fn log_refusal(
        &self,
        resource: &str,
        ids: &BTreeSet<DeviceId>,
        holder: Option<&DeviceHolder>,
        refusal: &Refusal,
    ) {
        let subject = match holder {
            Some(holder) => StartSubject::of(holder),
            None => StartSubject::Devices(resource.to_string(), ids.clone()),
        };
        let container = holder.map(|holder| holder.container.as_str());
        let uid = holder.map(|holder| holder.uid.as_str());
        let id = holder.and_then(|holder| self.pod_id(&holder.uid));
        let named = holder.and_then(|holder| holder.name.as_ref());
        let (namespace, pod) = match (&id, named) {
            (None, Some((namespace, pod))) => (Some(namespace.as_str()), Some(pod.as_str())),
            (id, _) => logged_name(id.as_ref()),
        };
        let device = ids.first().map(field::display);
        let cause = refusal.sentence();
        let reason = refusal.reason.as_event_reason();
        if self.refusals.insert(&subject, &cause) {
            tracing::info!(
                namespace,
                pod,
                container,
                uid,
                resource,
                device,
                reason,
                cause,
                "container start refused"
            );
        } else {
            tracing::debug!(
                namespace,
                pod,
                container,
                uid,
                resource,
                device,
                reason,
                cause,
                "container start refused again"
            );
        }
    }

    /// Returns the container that is about to start. PodResources, the fallback for kubelet's checkpoint, has no init containers:
    /// then it is the first init container with a grant that has not finished.
    async fn starting_container(&self, holder: &DeviceHolder, record: &PodRecord) -> ContainerName {
        if holder.key.is_some() {
            return holder.container.clone();
        }
        if self.was_started(&holder.uid, &holder.container).await {
            return holder.container.clone();
        }
        let inits = record.grant.grants.iter().filter(|grant| grant.init);
        for grant in inits {
            if !self.wait_until_finished(&holder.uid, &grant.container).await {
                return grant.container.clone();
            }
        }
        holder.container.clone()
    }

    /// Returns whether a container was created in its pod's sandbox before: then all init containers before it have finished.
    async fn was_started(&self, uid: &PodUid, container: &ContainerName) -> bool {
        let (Ok(sandboxes), Ok(containers)) =
            (self.adapters.runtime.sandboxes().await, self.adapters.runtime.containers().await)
        else {
            return false;
        };
        let ready = |id: &str| sandboxes.iter().any(|sandbox| sandbox.id == id && sandbox.ready);
        let is_it = |one: &RuntimeContainer| one.uid == *uid && one.container == *container;
        containers.iter().any(|one| is_it(one) && ready(&one.sandbox))
    }

    /// Returns whether an init container has finished. The runtime reports first that it ended, and the API server later how: an
    /// init container that ended and is not reported as finished within the timeout is started again.
    async fn wait_until_finished(&self, uid: &PodUid, container: &ContainerName) -> bool {
        let started = Instant::now();
        loop {
            if self.has_finished(uid, container) {
                return true;
            }
            let ended = self.adapters.runtime.containers().await.is_ok_and(|all| {
                let mut of_it = all.iter().filter(|one| one.uid == *uid && one.container == *container);
                of_it.any(|one| one.state == ContainerState::Exited)
            });
            if !ended || started.elapsed() > WATCH_LAG_TIMEOUT {
                return false;
            }
            tokio::time::sleep(FINISH_POLL_INTERVAL).await;
        }
    }

    fn has_finished(&self, uid: &PodUid, init: &ContainerName) -> bool {
        self.adapters.pods.by_uid(uid).is_some_and(|pod| pod.finished_inits.contains(init))
    }
}

impl DeviceAllocator for NodeState {
    async fn allocate(&self, resource: &str, ids: BTreeSet<DeviceId>) -> Result<ContainerKey, Refusal> {
        let device = ids.first().map(field::display);
        let span = tracing::info_span!("allocate", resource, device, devices = ids.len(), key = field::Empty);
        // Kubelet's checkpoint shows later which pod the key is for.
        span.in_scope(|| self.allocate_key(resource, ids))
    }

    fn cdi_devices(&self, key: &ContainerKey) -> Vec<String> {
        vec![cdi_device(key), SHARED_DEVICE.to_string()]
    }

    async fn prepare_container(&self, resource: &str, ids: BTreeSet<DeviceId>) -> Result<(), Refusal> {
        let span = tracing::info_span!(
            "pre_start_container",
            resource,
            device = ids.first().map(field::display),
            namespace = field::Empty,
            pod = field::Empty,
            container = field::Empty,
            uid = field::Empty
        );
        self.prepare_within_timeout(resource, &ids).instrument(span).await
    }
}

impl NodeState {
    /// Answers `Allocate` with a fresh key.
    fn allocate_key(&self, resource: &str, ids: BTreeSet<DeviceId>) -> Result<ContainerKey, Refusal> {
        let started = Instant::now();
        let key = random_key().map_err(|error| {
            Refusal::new(RefusalReason::Failed, format!("cannot read random bytes for a key: {error}"))
        })?;
        tracing::Span::current().record("key", field::display(&key));
        let allocation = self.containers().allocate(key.clone(), resource, ids, now());
        self.adapters.store.put_allocation(&allocation).map_err(|error| {
            self.containers().remove(&key);
            let error = describe(&error);
            // Kubelet fails the pod and quotes the cause in its status; `Allocate` does not name the pod that it is for.
            tracing::warn!(resource, error, "device allocation refused: it cannot be recorded");
            Refusal::new(RefusalReason::Failed, format!("the allocation cannot be recorded: {error}"))
        })?;
        fault::point("after-name");
        let duration = started.elapsed();
        tracing::debug!(resource, micros = duration.as_micros(), "devices allocated");
        self.counts().allocations.add(duration);
        Ok(key)
    }

    /// Answers `PreStartContainer` within [`START_TIMEOUT`].
    async fn prepare_within_timeout(&self, resource: &str, ids: &BTreeSet<DeviceId>) -> Result<(), Refusal> {
        let started = Instant::now();
        let timed_out = || {
            let message = format!(
                "preparing the container took longer than {} s; kubelet retries automatically",
                START_TIMEOUT.as_secs()
            );
            Refusal::new(RefusalReason::Failed, message)
        };
        let current = Mutex::new(None);
        let done = tokio::time::timeout(START_TIMEOUT, self.prepare_holders(resource, ids, &current));
        let done = done.await.unwrap_or_else(|_| Err(timed_out()));
        let duration = started.elapsed();
        let holder = lock(&current).take();
        match &done {
            Ok(()) => {
                let id = holder.as_ref().and_then(|holder| self.pod_id(&holder.uid));
                let (namespace, pod) = logged_name(id.as_ref());
                tracing::debug!(
                    namespace,
                    pod,
                    container = holder.as_ref().map(|holder| holder.container.as_str()),
                    resource,
                    micros = duration.as_micros(),
                    "container prepared"
                );
                self.counts().starts.add(duration);
            }
            Err(refusal) => {
                self.counts().refused += 1;
                self.log_refusal(resource, ids, holder.as_ref(), refusal);
            }
        }
        done
    }
}

/// Returns a key of 128 random bits, which no earlier container has.
fn random_key() -> io::Result<ContainerKey> {
    let mut bytes = [0_u8; 16];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(ContainerKey(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
}
