//! The lifecycle of this node's containers as one type.
//!
//! Every container that kubelet requested devices for is in one map, from the answer to `Allocate` until its files are
//! removed. Its [`ContainerStage`] records how far it has come:
//!
//! ```text
//!  Allocate              PreStartContainer                                pod finished or gone,
//!     │                  │            │            │                      none of its containers runs
//!   Named ──────────▶ Identified ─▶ Granted ─▶ Prepared ────────────────▶ Ended ──▶ removed from the map
//! ```
//!
//! A container that restarts goes through `PreStartContainer` again and stays [`ContainerStage::Prepared`].
//!
//! The methods of [`Containers`] do no I/O and hold no lock. A transition that must survive a crash returns what to persist;
//! [`PREPARE_STEPS`] and [`REMOVE_STEPS`] give the order of the steps that follow. The agent may be killed between any two steps:
//! [`Containers::recover`] derives the same map from what is on disk and from kubelet's checkpoint.

use crate::containers::ContainerKey;
use crate::device_owner::DeviceHolder;
use crate::device_plugin::{DeviceId, Refusal};
use crate::grants::{GrantRequest, NodeGrants};
use crate::settings::AgentSettings;
use crate::store::{AllocationRecord, PodRecord};
use partage_core::model::{ContainerName, Grant, Node, PodId, PodUid};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

/// Minimum age before an allocation or a record without a pod counts as orphaned: the watch and kubelet's checkpoint may lag
/// behind.
pub(crate) const ORPHAN_GRACE_PERIOD: Duration = Duration::from_secs(120);

/// The steps before a container may start, in the order in which they are made. The CDI spec is last because the container
/// runtime acts on it: a spec never refers to a region that does not exist.
pub(crate) const PREPARE_STEPS: [PrepareStep; 2] = [PrepareStep::Region, PrepareStep::Spec];

/// The steps after a container has ended, in the order in which they are made. The spec goes first, so that no restart finds half of it; the
/// allocation record goes last, so that an agent that is killed in between removes the rest when it starts again.
pub(crate) const REMOVE_STEPS: [RemoveStep; 3] =
    [RemoveStep::Spec, RemoveStep::Region, RemoveStep::Allocation];

/// A durable step of preparing a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PrepareStep {
    /// The shared-memory region with its limits.
    Region,
    /// The CDI spec that the runtime applies. It carries the pod's record, so nothing is lost if the agent is killed here.
    Spec,
}

/// A durable step of removing a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RemoveStep {
    /// The CDI spec goes first, so that no restart finds half of the container's files.
    Spec,
    /// The region follows the spec that refers to it.
    Region,
    /// The record of the answer to `Allocate`.
    Allocation,
}

/// A container of a pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ContainerOwner {
    pub(crate) pod: PodUid,
    pub(crate) container: ContainerName,
}

/// The stage of a container in its lifecycle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ContainerStage {
    /// `Allocate` was answered. Kubelet does not name the pod.
    Named,
    /// Kubelet's checkpoint (or PodResources and the runtime) names the pod and container.
    Identified {
        /// The container that kubelet allocated the devices to.
        owner: ContainerOwner,
    },
    /// The pod's grant is decided and counted in the ledger; it includes this container.
    Granted {
        /// The container that the grant includes.
        owner: ContainerOwner,
    },
    /// Region and CDI spec exist. The container may be running.
    Prepared {
        /// The container that the region and the spec are for.
        owner: ContainerOwner,
        /// The key whose region the spec refers to: another one where the container has several keys.
        region: ContainerKey,
    },
    /// The pod has ended and the files are being removed. Its share stays counted until the last file is gone.
    Ended {
        /// The container whose files are being removed.
        owner: ContainerOwner,
    },
}

/// One entry of the map.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TrackedContainer {
    /// The answer to `Allocate`; absent if the container is known only from a spec or kubelet's checkpoint.
    allocation: Option<AllocationRecord>,
    stage: ContainerStage,
}

impl TrackedContainer {
    fn owner(&self) -> Option<&ContainerOwner> {
        match &self.stage {
            ContainerStage::Named => None,
            ContainerStage::Identified { owner }
            | ContainerStage::Granted { owner }
            | ContainerStage::Prepared { owner, .. }
            | ContainerStage::Ended { owner } => Some(owner),
        }
    }
}

/// What the agent tracks of a pod in addition to its record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PodStatus {
    /// The record on disk is the current one.
    saved: bool,
    /// The API server has listed the pod. If it is absent later, it was deleted; before that the watch may only lag.
    listed: bool,
}

/// The containers of this node, the pods that hold grants, and the grants themselves.
pub(crate) struct Containers {
    by_key: BTreeMap<ContainerKey, TrackedContainer>,
    /// One entry for each record of the node grants.
    pods: BTreeMap<PodUid, PodStatus>,
    grants: NodeGrants,
    /// Pods that held devices when the agent started and have no readable record. Until it is known whether their containers
    /// run, nothing may be placed: they may hold shares that are not counted.
    unresolved: BTreeSet<PodUid>,
    /// Pods whose record on disk another version of the agent wrote. It stays as it is until the grant changes.
    foreign_records: BTreeSet<PodUid>,
    /// Keys whose CDI spec another version of the agent wrote. Their files are not removed.
    foreign_specs: BTreeSet<ContainerKey>,
}

/// What an earlier agent and kubelet left, as read at start.
#[derive(Debug, Default)]
pub(crate) struct RecoveryInput {
    /// Records of answers to `Allocate`.
    pub(crate) allocations: BTreeMap<ContainerKey, AllocationRecord>,
    /// Records of pods, from disk.
    pub(crate) records: BTreeMap<PodUid, PodRecord>,
    /// Pods whose record on disk another version of the agent wrote.
    pub(crate) foreign_records: BTreeSet<PodUid>,
    /// CDI specs, each with the pod's record as of its last change and the container's name.
    pub(crate) specs: BTreeMap<ContainerKey, (PodRecord, ContainerName)>,
    /// CDI specs that another version of the agent wrote. They stay as they are.
    pub(crate) foreign_specs: BTreeSet<ContainerKey>,
    /// Kubelet's checkpoint; empty where it cannot be read.
    pub(crate) kubelet: Vec<DeviceHolder>,
}

/// A container that was prepared, or was about to be, when an earlier agent ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecoveredContainer {
    pub(crate) key: ContainerKey,
    pub(crate) owner: ContainerOwner,
    /// Whether its CDI spec is complete. If not, it has to be written again before the region is used.
    pub(crate) has_spec: bool,
}

/// The phase of a pod in the API server's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PodPhase {
    /// Listed, and not finished.
    Active,
    /// Listed as succeeded or failed.
    Finished,
    /// Not listed: deleted, or not seen by the watch yet.
    Absent,
}

/// Why a pod no longer needs its grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PodEndCause {
    /// All its containers have exited permanently.
    Finished,
    /// The API server has listed it and no longer lists it.
    Deleted,
    /// The API server has not listed it for the whole grace period.
    NeverListed,
}

impl fmt::Display for PodEndCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PodEndCause::Finished => "finished",
            PodEndCause::Deleted => "deleted",
            PodEndCause::NeverListed => "never listed by the API server",
        })
    }
}

/// The observation by which orphans are decided.
#[derive(Debug)]
pub(crate) struct OrphanCriteria<'a> {
    /// Keys that have a CDI spec or a region on disk. Read before kubelet's checkpoint.
    pub(crate) on_disk: &'a BTreeSet<ContainerKey>,
    /// Keys on disk whose region a process still uses, or whose layout this version does not support.
    pub(crate) kept: &'a BTreeSet<ContainerKey>,
    /// Keys in kubelet's checkpoint of pods that the API server lists or that hold a grant.
    pub(crate) held: &'a BTreeSet<ContainerKey>,
    /// When kubelet wrote its checkpoint, in nanoseconds since the epoch.
    pub(crate) checkpoint_written: Option<u64>,
    /// Whether an active pod that requests devices has a container without a known key.
    pub(crate) pods_waiting: bool,
    /// Now, in nanoseconds since the epoch.
    pub(crate) now: u64,
}

impl Containers {
    /// Derives everything from what is on disk and what kubelet reports. Also returns the containers whose regions and
    /// specs must be adopted. `node` has the node's grantable capacity.
    ///
    /// A pod's record on disk takes precedence over the copy in its CDI specs.
    pub(crate) fn recover(node: Node, left: RecoveryInput) -> (Containers, Vec<RecoveredContainer>) {
        let RecoveryInput { allocations, mut records, foreign_records, specs, foreign_specs, kubelet } = left;
        let mut pods: BTreeMap<PodUid, PodStatus> = records
            .keys()
            // What an earlier agent recorded was listed once: if it is absent now, it was deleted.
            .map(|uid| (uid.clone(), PodStatus { saved: true, listed: true }))
            .collect();
        let named =
            |allocation| TrackedContainer { allocation: Some(allocation), stage: ContainerStage::Named };
        let mut by_key: BTreeMap<ContainerKey, TrackedContainer> =
            allocations.into_iter().map(|(key, allocation)| (key, named(allocation))).collect();
        let mut recovered = BTreeMap::new();
        for (key, (record, container)) in specs {
            let pod = record.pod.uid.clone();
            let saved = foreign_records.contains(&pod);
            pods.entry(pod.clone()).or_insert(PodStatus { saved, listed: true });
            records.entry(pod.clone()).or_insert(record);
            recovered.insert(key, (ContainerOwner { pod, container }, true));
        }
        for DeviceHolder { uid, container, resource, ids, key, shared, .. } in kubelet {
            let Some(key) = key else { continue };
            by_key.entry(key.clone()).or_insert_with(|| {
                named(AllocationRecord { key: key.clone(), resource, ids, at: 0, shared })
            });
            let has_spec = foreign_specs.contains(&key);
            recovered.entry(key).or_insert((ContainerOwner { pod: uid, container }, has_spec));
        }
        let mut unresolved: BTreeSet<PodUid> =
            foreign_records.iter().filter(|uid| !records.contains_key(*uid)).cloned().collect();
        let mut adopt = Vec::new();
        for (key, (owner, has_spec)) in recovered {
            let record = records.get(&owner.pod);
            if record.is_none() {
                unresolved.insert(owner.pod.clone());
            }
            let stage = match record.and_then(|record| record.grant_of(&owner.container)) {
                Some(_) => {
                    adopt.push(RecoveredContainer { key: key.clone(), owner: owner.clone(), has_spec });
                    ContainerStage::Granted { owner }
                }
                None => ContainerStage::Identified { owner },
            };
            let container = by_key
                .entry(key)
                .or_insert(TrackedContainer { allocation: None, stage: ContainerStage::Named });
            container.stage = stage;
        }
        let grants = NodeGrants::new(node, records);
        (Containers { by_key, pods, grants, unresolved, foreign_records, foreign_specs }, adopt)
    }

    /// Returns the grants of all pods.
    pub(crate) fn grants(&self) -> &NodeGrants {
        &self.grants
    }

    /// Replaces the node after a change of health or settings. Grants stay as they are.
    pub(crate) fn set_node(&mut self, node: Node) {
        self.grants.set_node(node);
    }

    /// Enters an answer to `Allocate`, which must be persisted before kubelet gets it. If that fails, the caller withdraws it
    /// with [`Containers::remove`].
    ///
    /// Allocation times are strictly increasing, also when the clock is set back: of two answers for the same devices the
    /// later one counts.
    pub(crate) fn allocate(
        &mut self,
        key: ContainerKey,
        resource: &str,
        ids: BTreeSet<DeviceId>,
        now: u64,
    ) -> AllocationRecord {
        let last = self.allocations().map(|allocation| allocation.at).max().unwrap_or(0);
        let at = now.max(last.saturating_add(1));
        let resource = resource.into();
        let allocation = AllocationRecord { key: key.clone(), resource, ids, at, shared: true };
        self.by_key.insert(
            key,
            TrackedContainer { allocation: Some(allocation.clone()), stage: ContainerStage::Named },
        );
        allocation
    }

    /// Returns the answer to `Allocate` for a container.
    pub(crate) fn allocation(&self, key: &ContainerKey) -> Option<&AllocationRecord> {
        self.by_key.get(key)?.allocation.as_ref()
    }

    /// Returns all answers to `Allocate` that may still be used, in no particular order.
    pub(crate) fn allocations(&self) -> impl Iterator<Item = &AllocationRecord> {
        self.by_key.values().filter_map(|container| container.allocation.as_ref())
    }

    /// Returns the key that was last answered for exactly these devices.
    pub(crate) fn newest_key(&self, resource: &str, ids: &BTreeSet<DeviceId>) -> Option<ContainerKey> {
        let same = self.allocations().filter(|one| one.resource == resource && one.ids == *ids);
        same.max_by_key(|allocation| allocation.at).map(|allocation| allocation.key.clone())
    }

    /// Returns the keys under which the runtime may request the container of a holder, the one to prepare first.
    ///
    /// Kubelet's checkpoint names exactly one. Without it these are all keys for the holder's devices that belong to no other
    /// pod, newest first: an init container and the container that inherits its devices were answered one key each, and only
    /// one of them runs at a time, so both keys lead to the same region.
    pub(crate) fn keys_of(&self, holder: &DeviceHolder) -> Vec<ContainerKey> {
        if let Some(key) = &holder.key {
            return vec![key.clone()];
        }
        let is_candidate = |container: &&TrackedContainer| {
            let same = container
                .allocation
                .as_ref()
                .is_some_and(|one| one.resource == holder.resource && one.ids == holder.ids);
            same && container.owner().is_none_or(|owner| owner.pod == holder.uid)
        };
        let mut same: Vec<&AllocationRecord> = self
            .by_key
            .values()
            .filter(is_candidate)
            .filter_map(|container| container.allocation.as_ref())
            .collect();
        same.sort_by_key(|allocation| Reverse(allocation.at));
        same.into_iter().map(|allocation| allocation.key.clone()).collect()
    }

    /// Notes which container a key belongs to. A container that is further already stays there, unless the key now belongs
    /// to another container.
    pub(crate) fn identify(&mut self, key: &ContainerKey, owner: &ContainerOwner) {
        let is_granted = self.grant_of(owner).is_some();
        let container = self
            .by_key
            .entry(key.clone())
            .or_insert(TrackedContainer { allocation: None, stage: ContainerStage::Named });
        if container.owner() != Some(owner) {
            let owner = owner.clone();
            container.stage = if is_granted {
                ContainerStage::Granted { owner }
            } else {
                ContainerStage::Identified { owner }
            };
        }
    }

    /// Returns the grant of a container.
    pub(crate) fn grant_of(&self, owner: &ContainerOwner) -> Option<&Grant> {
        self.grants.record(&owner.pod)?.grant_of(&owner.container)
    }

    /// Decides a pod's grant, or returns the one it has. The record has to be saved. `listed` means that the watch has the
    /// pod: a single read of the API server may be ahead of it.
    pub(crate) fn decide(
        &mut self,
        request: &GrantRequest<'_>,
        settings: &AgentSettings,
        listed: bool,
    ) -> Result<PodRecord, Refusal> {
        let record = self.grants.decide(request, settings)?;
        self.note_grant(&record, listed);
        Ok(record)
    }

    /// Takes over the grant that a running pod carries in its annotations and of which no record is left.
    pub(crate) fn adopt(
        &mut self,
        request: &GrantRequest<'_>,
        settings: &AgentSettings,
    ) -> Result<PodRecord, Refusal> {
        let record = self.grants.adopt(request, settings)?;
        self.note_grant(&record, true);
        Ok(record)
    }

    /// Holds the larger of two amounts for a pod whose resize is under way; [`Containers::replace`] ends it.
    pub(crate) fn reserve_resize(&mut self, old: &PodRecord, new: &PodRecord) -> Result<(), Refusal> {
        self.grants.reserve(old, &new.grant)
    }

    /// Replaces a pod's record. It has to be saved.
    pub(crate) fn replace(&mut self, record: PodRecord) {
        self.set_saved(&record.pod.uid, false);
        self.grants.replace(record);
    }

    /// Moves the containers of the pod that wait for its grant to the next stage.
    fn note_grant(&mut self, record: &PodRecord, listed: bool) {
        let uid = &record.pod.uid;
        let saved = self.foreign_records.contains(uid);
        self.pods.entry(uid.clone()).or_insert(PodStatus { saved, listed: false }).listed |= listed;
        for container in self.by_key.values_mut() {
            if let ContainerStage::Identified { owner } = &container.stage
                && owner.pod == *uid
                && record.grant_of(&owner.container).is_some()
            {
                container.stage = ContainerStage::Granted { owner: owner.clone() };
            }
        }
    }

    /// Notes that a container's CDI spec exists under each of these keys, and its region under the first.
    pub(crate) fn prepared(&mut self, keys: &[ContainerKey], owner: &ContainerOwner) {
        for key in keys {
            self.identify(key, owner);
            if let Some((container, region)) = self.by_key.get_mut(key).zip(keys.first()) {
                container.stage = ContainerStage::Prepared { owner: owner.clone(), region: region.clone() };
            }
        }
    }

    /// Returns other keys under which the same container was prepared before. Kubelet may have lost its checkpoint and requested
    /// devices again: the container that had the earlier key is gone.
    pub(crate) fn superseded(&self, key: &ContainerKey, owner: &ContainerOwner) -> Vec<ContainerKey> {
        let same = |(other, container): &(&ContainerKey, &TrackedContainer)| {
            *other != key
                && matches!(&container.stage, ContainerStage::Prepared { owner: of, .. } if of == owner)
        };
        self.by_key.iter().filter(same).map(|(other, _)| other.clone()).collect()
    }

    /// Returns the stage of a container.
    pub(crate) fn stage(&self, key: &ContainerKey) -> Option<&ContainerStage> {
        self.by_key.get(key).map(|container| &container.stage)
    }

    /// Returns the container that a key belongs to, if it is known.
    pub(crate) fn owner(&self, key: &ContainerKey) -> Option<&ContainerOwner> {
        self.by_key.get(key)?.owner()
    }

    /// Returns all containers whose owner is known, with their stages.
    pub(crate) fn owned(&self) -> impl Iterator<Item = (&ContainerKey, &ContainerOwner, &ContainerStage)> {
        self.by_key.iter().filter_map(|(key, container)| Some((key, container.owner()?, &container.stage)))
    }

    /// Returns a pod's prepared containers, with the keys of their regions.
    pub(crate) fn prepared_of(&self, uid: &PodUid) -> Vec<(ContainerKey, ContainerName)> {
        let of_pod = self.by_key.iter().filter_map(|(key, container)| match &container.stage {
            ContainerStage::Prepared { owner, region } if owner.pod == *uid && region == key => {
                Some((key.clone(), owner.container.clone()))
            }
            _ => None,
        });
        of_pod.collect()
    }

    /// Returns the keys of a pod's granted containers that are not prepared.
    pub(crate) fn unprepared_of(&self, uid: &PodUid) -> impl Iterator<Item = &ContainerKey> {
        let is_unprepared = move |container: &TrackedContainer| matches!(&container.stage, ContainerStage::Granted { owner } if owner.pod == *uid);
        self.by_key.iter().filter(move |(_, container)| is_unprepared(container)).map(|(key, _)| key)
    }

    /// Returns whether a pod holds a grant and a key is known for every container in it.
    pub(crate) fn has_all_keys(&self, uid: &PodUid) -> bool {
        let has_key = |grant: &Grant| {
            let is_it = |owner: &ContainerOwner| owner.pod == *uid && owner.container == grant.container;
            self.by_key.values().filter_map(TrackedContainer::owner).any(is_it)
        };
        self.grants.record(uid).is_some_and(|record| record.grant.grants.iter().all(has_key))
    }

    /// Returns the pods that held devices when the agent started, and whose grants are not known.
    pub(crate) fn unresolved_pods(&self) -> BTreeSet<PodUid> {
        self.unresolved.clone()
    }

    /// Notes that a pod's grant is known, or that it has none.
    pub(crate) fn resolved(&mut self, uid: &PodUid) {
        self.unresolved.remove(uid);
    }

    /// Returns the pods whose current record is not on disk.
    pub(crate) fn unsaved_pods(&self) -> Vec<PodUid> {
        self.pods.iter().filter(|(_, status)| !status.saved).map(|(uid, _)| uid.clone()).collect()
    }

    /// Returns whether a pod's current record is on disk.
    pub(crate) fn is_saved(&self, uid: &PodUid) -> bool {
        self.pods.get(uid).is_some_and(|status| status.saved)
    }

    /// Returns a pod's record if it has to be written.
    pub(crate) fn unsaved_record(&self, uid: &PodUid) -> Option<PodRecord> {
        self.grants.record(uid).filter(|_| !self.is_saved(uid)).cloned()
    }

    /// Notes that a record was written to disk. One that was replaced meanwhile has to be written again.
    pub(crate) fn record_saved(&mut self, written: &PodRecord) {
        let uid = &written.pod.uid;
        self.set_saved(uid, self.grants.record(uid) == Some(written));
    }

    /// Notes whether a pod's current record is on disk.
    pub(crate) fn set_saved(&mut self, uid: &PodUid, saved: bool) {
        if let Some(status) = self.pods.get_mut(uid) {
            status.saved = saved;
        }
    }

    /// Returns the pods that have ended by the API server's list, and why. The caller has to check whether their containers still
    /// run.
    pub(crate) fn ended_pods(
        &mut self,
        phase: impl Fn(&PodUid) -> PodPhase,
        now: u64,
    ) -> Vec<(PodId, PodEndCause)> {
        let mut ended = Vec::new();
        for record in self.grants.records() {
            let uid = &record.pod.uid;
            let status = self.pods.entry(uid.clone()).or_default();
            let phase = phase(uid);
            status.listed |= phase != PodPhase::Absent;
            let end = match phase {
                PodPhase::Active => None,
                PodPhase::Finished => Some(PodEndCause::Finished),
                PodPhase::Absent if status.listed => Some(PodEndCause::Deleted),
                PodPhase::Absent => is_older(record.at, now).then_some(PodEndCause::NeverListed),
            };
            ended.extend(end.map(|end| (record.pod.clone(), end)));
        }
        ended
    }

    /// Moves all containers of a pod to [`ContainerStage::Ended`] and returns their keys. The caller removes the files of each in the
    /// order of [`REMOVE_STEPS`] and calls [`Containers::remove`]; then it removes the pod's record, and last releases the grant.
    pub(crate) fn end_pod(&mut self, uid: &PodUid) -> Vec<ContainerKey> {
        let mut keys = Vec::new();
        for (key, container) in &mut self.by_key {
            if let Some(owner) = container.owner().filter(|owner| owner.pod == *uid).cloned() {
                container.stage = ContainerStage::Ended { owner };
                keys.push(key.clone());
            }
        }
        keys
    }

    /// Removes a container whose files are gone.
    pub(crate) fn remove(&mut self, key: &ContainerKey) {
        self.by_key.remove(key);
    }

    /// Releases a pod's grant, once its record is gone from disk.
    pub(crate) fn release(&mut self, uid: &PodUid) {
        self.pods.remove(uid);
        self.foreign_records.remove(uid);
        self.grants.release(uid);
    }

    /// Returns the keys whose files belong to no container: not of a pod with a grant, not in kubelet's checkpoint for a pod that
    /// exists, and old enough that neither the watch nor the checkpoint can merely lag.
    ///
    /// Kubelet's checkpoint lacks the newest answers until kubelet writes it again. While a pod waits for a container whose key is
    /// not known, an answer that is not clearly older than the checkpoint may belong to it.
    /// Files of another version of the agent, and regions in use, may belong to containers that this version does not know: they
    /// are not orphans.
    pub(crate) fn orphans(&self, view: &OrphanCriteria<'_>) -> Vec<ContainerKey> {
        let keys: BTreeSet<&ContainerKey> = view.on_disk.iter().chain(self.by_key.keys()).collect();
        let is_orphan = |key: &&&ContainerKey| {
            let container = self.by_key.get(**key);
            let allocation = container.and_then(|container| container.allocation.as_ref());
            if allocation.is_some_and(|allocation| !is_older(allocation.at, view.now)) {
                return false;
            }
            if view.held.contains(**key) || view.kept.contains(**key) || self.foreign_specs.contains(**key) {
                return false;
            }
            match container.and_then(TrackedContainer::owner) {
                Some(owner) => !self.pods.contains_key(&owner.pod),
                None => {
                    let written = view.checkpoint_written;
                    let may_be_missing = allocation
                        .is_some_and(|one| !written.is_some_and(|written| is_older(one.at, written)));
                    !(view.pods_waiting && may_be_missing)
                }
            }
        };
        keys.iter().filter(is_orphan).map(|key| (**key).clone()).collect()
    }
}

/// Returns whether `at` is more than the grace period before `than`; both in nanoseconds since the epoch.
pub(crate) fn is_older(at: u64, than: u64) -> bool {
    than.saturating_sub(at) > u64::try_from(ORPHAN_GRACE_PERIOD.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
