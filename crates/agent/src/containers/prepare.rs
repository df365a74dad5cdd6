//! Answers kubelet: names devices in `Allocate`, and makes everything that a container gets in `PreStartContainer`.
//!
//! `Allocate` does not say which pod it is for, so it is answered with a fresh key and nothing else. Before the container is
//! created, kubelet's checkpoint says which container has which key; then its pod's grant is decided, and its region and CDI
//! spec are made.

use super::lifecycle::{ContainerOwner, PREPARE, PrepareStep};
use super::recover::annotations;
use crate::grants::GrantRequest;
use crate::identity::{ContainerState, Holder, RunningContainer};
use crate::inject::Container;
use crate::oversubscription::region_policy;
use crate::plugin::{ContainerKey, DeviceId, Giver, Refusal};
use crate::refusals::StartSubject;
use crate::state::{NodeState, lock, logged_name, now};
use crate::store::PodRecord;
use partage_cluster::PodView;
use partage_core::model::{ContainerName, Grant, PodUid};
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

/// How long the watch may take to deliver what kubelet knows already, and the API server to say how a container ended.
const WATCH_LAG_TIMEOUT: Duration = Duration::from_secs(3);
/// How long the answer to `PreStartContainer` may take. Kubelet gives up after 30 s, without a reason that anybody could read.
const START_TIMEOUT: Duration = Duration::from_secs(25);
/// How often it is checked whether an init container is reported as finished.
const FINISH_POLL_INTERVAL: Duration = Duration::from_millis(50);

impl NodeState {
    /// What the pod of these devices holds, decided now where that was not done before.
    async fn granted(&self, holder: &Holder) -> Result<PodRecord, Refusal> {
        let known = self.containers().grants().record(&holder.uid).cloned();
        if let Some(record) = known {
            // Its share is about to be given back.
            if self.adapters.pods.is_synced() && self.adapters.pods.by_uid(&holder.uid).is_none() {
                return Err(Refusal(format!(
                    "pod {} was deleted: the API server no longer has it, and its GPUs go to others",
                    holder.uid
                )));
            }
            return Ok(self.of_this_boot(record));
        }
        let (pod, listed) = self.pod(holder).await?;
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

    /// A pod that starts again after a reboot holds what it held before.
    fn of_this_boot(&self, mut record: PodRecord) -> PodRecord {
        if record.boot != self.machine.boot {
            record.boot.clone_from(&self.machine.boot);
            self.containers().replace(record.clone());
        }
        record
    }

    /// Returns the pod that holds these devices, and whether the API server's list has it: a single read may be ahead of the list.
    async fn pod(&self, holder: &Holder) -> Result<(Arc<PodView>, bool), Refusal> {
        if let Some(pod) = self.adapters.pods.wait_for(&holder.uid, WATCH_LAG_TIMEOUT).await {
            return Ok((pod, true));
        }
        let unknown = |why: &str| {
            Refusal(format!("pod {} is not known here yet: {why}; kubelet tries again by itself", holder.uid))
        };
        // Kubelet and the API server have different UIDs for a pod that comes from a file on the node.
        let no_such = "the API server has no such pod (one that comes from a file on the node cannot have a share: make it a DaemonSet)";
        let Some((namespace, name)) = &holder.name else {
            let has_told = self.adapters.pods.is_synced();
            return Err(unknown(if has_told { no_such } else { "the API server has not told of it" }));
        };
        match self.adapters.cluster.client.pod(namespace, name).await {
            Ok(Some(pod)) if pod.id.uid == holder.uid => Ok((pod, false)),
            Ok(_) => Err(unknown(no_such)),
            Err(error) => Err(unknown(&error.to_string())),
        }
    }

    /// Makes everything that a container gets, in the order of [`PREPARE`]. `keys` are all under which the runtime may request
    /// it; the region is made under the first. The region of a container that may be running (`may_run`) is adopted or left
    /// alone, and never replaced.
    pub(super) fn prepare(
        &self,
        keys: &[ContainerKey],
        owner: &ContainerOwner,
        record: &PodRecord,
        grant: &Grant,
        may_run: bool,
    ) -> Result<(), String> {
        let Some(key) = keys.first() else { return Ok(()) };
        let all = self.gated();
        {
            let mut containers = self.containers();
            keys.iter().for_each(|key| containers.identify(key, owner));
        }
        for step in PREPARE {
            match step {
                PrepareStep::Region => {
                    let (regions, policy) = (&self.adapters.regions, region_policy(record));
                    if may_run {
                        regions.adopt(key, owner, &grant.shares, &all)?;
                    } else {
                        regions.prepare(key, owner, &grant.shares, &all, policy)?;
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

    /// Writes the CDI specs of a container whose region is that of `region`.
    fn write_specs(
        &self,
        keys: &[ContainerKey],
        region: &ContainerKey,
        record: &PodRecord,
        grant: &Grant,
    ) -> Result<(), String> {
        let container = &grant.container;
        let region = self.adapters.regions.folder(region);
        let devices =
            self.devices(&region, grant).map_err(|error| format!("{}: {error}", region.display()))?;
        let empty = BTreeMap::new();
        let target = Container {
            node: self.hardware(),
            shares: &grant.shares,
            region: &region,
            devices: devices.as_deref(),
            env: record.env.get(container).unwrap_or(&empty),
            nvidia_runtime: self.machine.nvidia_runtime.load(Ordering::Relaxed),
        };
        let annotations =
            annotations(record, container, &self.adapters.materials).map_err(|error| error.to_string())?;
        let failed = |error: io::Error| format!("its CDI file cannot be written: {error}");
        for key in keys {
            let edits = if self.has_shared_device(key) {
                // Restores a shared spec that was removed or changed by hand.
                self.adapters.cdi.put_shared(&self.adapters.materials.shared_edits()).map_err(failed)?;
                self.adapters.materials.container_edits(&target)?
            } else {
                self.adapters.materials.edits(&target)?
            };
            self.adapters.cdi.put(&key.0, &annotations, &edits).map_err(failed)?;
        }
        Ok(())
    }

    /// Returns whether kubelet passes [`SHARED_DEVICE`] to the runtime beside this key. It does not where an agent without that device
    /// answered `Allocate`: then the container's own CDI spec must be complete.
    fn has_shared_device(&self, key: &ContainerKey) -> bool {
        self.containers().allocation(key).is_some_and(|allocation| allocation.shared)
    }

    /// Whether everything exists that was made for a container.
    fn is_prepared(&self, key: &ContainerKey) -> bool {
        self.adapters.cdi.get(&key.0).is_some_and(|found| found.content.is_ok())
            && (self.adapters.cdi.has_shared() || !self.has_shared_device(key))
            && self.adapters.regions.folder(key).is_dir()
    }

    /// Removes what was made for a container under earlier keys.
    fn remove_superseded(&self, key: &ContainerKey, owner: &ContainerOwner) {
        let superseded = self.containers().superseded(key, owner);
        for other in &superseded {
            self.remove_container(other);
        }
    }

    /// A simulated driver sees the GPUs that have a file in its node's folder.
    fn devices(&self, region: &Path, grant: &Grant) -> io::Result<Option<PathBuf>> {
        if self.machine.simulated.is_none() {
            return Ok(None);
        }
        let folder = region.join("dev");
        write_device_files(&folder, self.hardware(), &grant.shares)?;
        Ok(Some(folder))
    }

    /// Why a container must not start on one of its GPUs.
    fn ill(&self, grant: &Grant) -> Option<Refusal> {
        let containers = self.containers();
        let node = containers.grants().node();
        grant.shares.iter().find_map(|share| {
            let at = node.gpu_index(&share.gpu);
            let why = match at {
                Some(at) => node.gpus[at].withheld.clone()?,
                None => "this node does not have it any more".into(),
            };
            Some(Refusal(format!(
                "the container's GPU {} is not to be used: {why}; it starts by itself when the GPU is well, or delete the pod to have another",
                share.gpu
            )))
        })
    }

    /// Makes everything ready for the container that is about to start. `current` is the container that is being worked on, for whom a
    /// refusal is.
    async fn start_all(
        &self,
        resource: &str,
        ids: &BTreeSet<DeviceId>,
        current: &Mutex<Option<Holder>>,
    ) -> Result<(), Refusal> {
        let newest = self.containers().newest_key(resource, ids);
        let holders = self.adapters.kubelet.holders(resource, ids, newest.as_ref()).await;
        let holders = holders.map_err(|error| Refusal(error.to_string()))?;
        for holder in &holders {
            *lock(current) = Some(holder.clone());
            self.start_one(holder).await?;
            self.refusals.remove(&StartSubject::of(holder));
        }
        self.changed.notify_waiters();
        Ok(())
    }

    /// Makes everything ready for one container that holds the devices.
    async fn start_one(&self, holder: &Holder) -> Result<(), Refusal> {
        // A pod that is force-deleted meanwhile is forgotten before or after this, and never in between.
        let _alone = self.lock_pod(&holder.uid).await;
        if let Some(key) = &holder.key {
            let owner = ContainerOwner { pod: holder.uid.clone(), container: holder.container.clone() };
            self.containers().identify(key, &owner);
        }
        let record = self.granted(holder).await?;
        let container = self.starting(holder, &record).await;
        let Some(grant) = record.grant_of(&container) else {
            return Err(Refusal(format!(
                "the pod's grant has nothing for container {container}: it asks for {}, and that was not understood as an ask for GPUs",
                holder.resource
            )));
        };
        let keys = self.containers().keys_of(holder);
        let Some(key) = keys.first() else {
            return Err(Refusal(format!(
                "no name is known for the devices of container {container}: delete the pod"
            )));
        };
        if grant.init && self.has_finished(&holder.uid, &container) && self.is_prepared(key) {
            // It passed its devices on: an unhealthy GPU of its own must not block the other containers. Where it starts again, as
            // all do in a new sandbox, everything of it exists; after a reboot that is not so, and it is prepared like any other.
            return Ok(());
        }
        if let Some(refusal) = self.ill(grant) {
            return Err(refusal);
        }
        let owner = ContainerOwner { pod: holder.uid.clone(), container };
        // Waiting for a disk must not keep other tasks waiting.
        tokio::task::block_in_place(|| {
            self.prepare(&keys, &owner, &record, grant, false)?;
            if holder.key.is_some() {
                self.remove_superseded(key, &owner);
            }
            Ok(())
        })
        .map_err(Refusal)
    }

    /// Logs that a container was refused, once for each reason: kubelet retries every few seconds.
    fn log_refusal(
        &self,
        resource: &str,
        ids: &BTreeSet<DeviceId>,
        holder: Option<&Holder>,
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
        let device = ids.first().map(tracing::field::display);
        if self.refusals.insert(&subject, &refusal.0) {
            tracing::info!(namespace, pod, container, uid, resource, device, reason = %refusal, "container start refused");
        } else {
            tracing::debug!(namespace, pod, container, uid, resource, device, reason = %refusal, "container start refused again");
        }
    }

    /// The container that starts. Without its checkpoint kubelet does not tell of init containers: then it is the first of those
    /// with a grant that has not finished.
    async fn starting(&self, holder: &Holder, record: &PodRecord) -> ContainerName {
        if holder.key.is_some() {
            return holder.container.clone();
        }
        if self.was_started(&holder.uid, &holder.container).await {
            return holder.container.clone();
        }
        let inits = record.grant.grants.iter().filter(|grant| grant.init);
        for grant in inits {
            if !self.finishes(&holder.uid, &grant.container).await {
                return grant.container.clone();
            }
        }
        holder.container.clone()
    }

    /// Whether a container was made in its pod's sandbox before: then all that start before it have ended, whoever else can say so.
    async fn was_started(&self, uid: &PodUid, container: &ContainerName) -> bool {
        let (Ok(sandboxes), Ok(containers)) =
            (self.adapters.runtime.sandboxes().await, self.adapters.runtime.containers().await)
        else {
            return false;
        };
        let ready = |id: &str| sandboxes.iter().any(|sandbox| sandbox.id == id && sandbox.ready);
        let is_it = |one: &RunningContainer| one.uid == *uid && one.container == *container;
        containers.iter().any(|one| is_it(one) && ready(&one.sandbox))
    }

    /// Whether an init container has finished. The runtime knows first that one has ended, the API server how: one that ended is
    /// waited for, and starts again where it is not said to have finished.
    async fn finishes(&self, uid: &PodUid, container: &ContainerName) -> bool {
        let begun = Instant::now();
        loop {
            if self.has_finished(uid, container) {
                return true;
            }
            let ended = self.adapters.runtime.containers().await.is_ok_and(|all| {
                let mut of_it = all.iter().filter(|one| one.uid == *uid && one.container == *container);
                of_it.any(|one| one.state == ContainerState::Exited)
            });
            if !ended || begun.elapsed() > WATCH_LAG_TIMEOUT {
                return false;
            }
            tokio::time::sleep(FINISH_POLL_INTERVAL).await;
        }
    }

    fn has_finished(&self, uid: &PodUid, init: &ContainerName) -> bool {
        self.adapters.pods.by_uid(uid).is_some_and(|pod| pod.finished_inits.contains(init))
    }
}

impl Giver for NodeState {
    async fn allocate(&self, resource: &str, ids: BTreeSet<DeviceId>) -> Result<ContainerKey, Refusal> {
        let begun = Instant::now();
        let key = key().map_err(|error| Refusal(format!("no name can be made: {error}")))?;
        let first = ids.first().cloned();
        let allocation = self.containers().allocate(key.clone(), resource, ids, now());
        self.adapters.store.put_allocation(&allocation).map_err(|error| {
            self.containers().remove(&key);
            // Kubelet fails the pod and says why in its status; `Allocate` does not say which pod it is for.
            tracing::warn!(resource, %error, "device allocation refused: it cannot be recorded");
            Refusal(format!("the answer cannot be recorded: {error}; look after the node's disk"))
        })?;
        fault::point("after-name");
        let took = begun.elapsed();
        tracing::debug!(
            resource,
            device = first.map(tracing::field::display),
            micros = took.as_micros(),
            "devices are named"
        );
        self.counts().answers.note(took);
        Ok(key)
    }

    fn cdi_devices(&self, key: &ContainerKey) -> Vec<String> {
        vec![key.cdi_device(), SHARED_DEVICE.to_string()]
    }

    async fn start(&self, resource: &str, ids: BTreeSet<DeviceId>) -> Result<(), Refusal> {
        let begun = Instant::now();
        let late = || {
            Refusal(format!(
                "it took longer than {} s to find out whose devices these are; kubelet tries again by itself",
                START_TIMEOUT.as_secs()
            ))
        };
        let current = Mutex::new(None);
        let done = tokio::time::timeout(START_TIMEOUT, self.start_all(resource, &ids, &current));
        let done = done.await.unwrap_or_else(|_| Err(late()));
        let took = begun.elapsed();
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
                    device = ids.first().map(tracing::field::display),
                    micros = took.as_micros(),
                    "a container is ready"
                );
                self.counts().starts.note(took);
            }
            Err(refusal) => {
                self.counts().refused += 1;
                self.log_refusal(resource, &ids, holder.as_ref(), refusal);
            }
        }
        done
    }
}

/// A name nobody can have used before.
fn key() -> io::Result<ContainerKey> {
    let mut bytes = [0_u8; 16];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(ContainerKey(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
}
