//! Model test: kubelet, API server, container runtime and disk around [`Containers`], in random order, with resizes, kills of the
//! agent between any two durable steps, and reboots of the node.
//!
//! The model has the real state: which containers run, what is on disk. The agent sees it late (the watch lags), and after a kill
//! only through what it left on disk. The node grants, the ledger, the lifecycle and the order of a resize are the agent's own code.

use super::*;
use crate::resize::{self, ResizeSteps};
use partage_core::model::{Bytes, Gpu, GpuUuid, PodGrant, PodId, Share};
use partage_core::pod::PodManifest;
use proptest::prelude::*;
use serde_json::json;

const GIB: u64 = 1 << 30;
const GPU_MEMORY_GIB: u64 = 8;
const SECOND: u64 = 1_000_000_000;
const RESOURCE: &str = "partage.dev/gpu";

/// What happens next. Numbers select one of the existing items. A `kill` is the number of durable steps after which the agent dies.
#[derive(Clone, Debug)]
enum ModelEvent {
    CreatePod {
        gib: u64,
        containers: usize,
    },
    Allocate {
        pod: usize,
        kill: Option<usize>,
    },
    Start {
        pod: usize,
        kill: Option<usize>,
    },
    Exit {
        pod: usize,
    },
    Finish {
        pod: usize,
    },
    Delete {
        pod: usize,
        force: bool,
    },
    SyncWatch,
    /// Kubelet drops the devices of pods that are gone.
    KubeletForgets,
    /// An operator removed kubelet's checkpoint: it allocates devices again.
    KubeletLosesCheckpoint,
    /// The agent can, or cannot, read kubelet's checkpoint from now on.
    CheckpointReadable(bool),
    /// The agent is killed, an operator removes its records and CDI specs, and the next agent reads the pods' annotations.
    LoseRecords,
    WriteAnnotation {
        pod: usize,
    },
    /// The pod requests other amounts for its containers. `refuses` is the container that uses more than a smaller limit, and
    /// `disk_full` a record that cannot be written.
    Resize {
        pod: usize,
        gib: [u64; 2],
        refuses: Option<usize>,
        disk_full: bool,
        kill: Option<usize>,
    },
    SaveRecords {
        kill: Option<usize>,
    },
    CollectGarbage {
        kill: Option<usize>,
    },
    Advance {
        seconds: u64,
    },
    Kill,
    Reboot,
}

fn events() -> impl Strategy<Value = Vec<ModelEvent>> {
    let kill = || prop_oneof![2 => Just(None), 1 => (0_usize..6).prop_map(Some)];
    let pod = || 0_usize..4;
    let gib = || 1..=GPU_MEMORY_GIB;
    let event = prop_oneof![
        4 => (1..=GPU_MEMORY_GIB, 1_usize..=2).prop_map(|(gib, containers)| ModelEvent::CreatePod { gib, containers }),
        5 => (pod(), kill()).prop_map(|(pod, kill)| ModelEvent::Allocate { pod, kill }),
        8 => (pod(), kill()).prop_map(|(pod, kill)| ModelEvent::Start { pod, kill }),
        4 => pod().prop_map(|pod| ModelEvent::Exit { pod }),
        1 => pod().prop_map(|pod| ModelEvent::Finish { pod }),
        3 => (pod(), any::<bool>()).prop_map(|(pod, force)| ModelEvent::Delete { pod, force }),
        3 => Just(ModelEvent::SyncWatch),
        1 => Just(ModelEvent::KubeletForgets),
        1 => Just(ModelEvent::KubeletLosesCheckpoint),
        1 => any::<bool>().prop_map(ModelEvent::CheckpointReadable),
        1 => Just(ModelEvent::LoseRecords),
        2 => pod().prop_map(|pod| ModelEvent::WriteAnnotation { pod }),
        6 => (pod(), gib(), gib(), proptest::option::of(0_usize..2), proptest::bool::weighted(0.1), kill()).prop_map(
            |(pod, first, second, refuses, disk_full, kill)| {
                ModelEvent::Resize { pod, gib: [first, second], refuses, disk_full, kill }
            }
        ),
        3 => kill().prop_map(|kill| ModelEvent::SaveRecords { kill }),
        7 => kill().prop_map(|kill| ModelEvent::CollectGarbage { kill }),
        3 => (1_u64..200).prop_map(|seconds| ModelEvent::Advance { seconds }),
        1 => Just(ModelEvent::Kill),
        1 => Just(ModelEvent::Reboot),
    ];
    proptest::collection::vec(event, 1..80)
}

#[derive(Clone)]
struct ListedPod {
    id: PodId,
    gib: u64,
    containers: Vec<ContainerName>,
    finished: bool,
    annotations: BTreeMap<String, String>,
}

impl ListedPod {
    /// The manifest as the agent reads it.
    fn manifest(&self) -> PodManifest {
        let limits = json!({RESOURCE: 1, "partage.dev/memory": format!("{}Gi", self.gib)});
        let container =
            |name: &ContainerName| json!({"name": name.as_str(), "resources": {"limits": limits}});
        let containers: Vec<serde_json::Value> = self.containers.iter().map(container).collect();
        PodManifest::read(&json!({"annotations": self.annotations}), &json!({"containers": containers})).0
    }
}

#[derive(Default)]
struct DiskState {
    allocations: BTreeMap<ContainerKey, AllocationRecord>,
    records: BTreeMap<PodUid, PodRecord>,
    specs: BTreeMap<ContainerKey, WrittenSpec>,
    regions: BTreeMap<ContainerKey, (ContainerOwner, Vec<Share>)>,
}

#[derive(Clone)]
struct WrittenSpec {
    record: PodRecord,
    container: ContainerName,
    /// The key whose region is mounted.
    region: ContainerKey,
}

/// The agent was killed at a durable step.
struct AgentKilled;

/// Counts durable steps down to the kill.
struct KillCountdown(Option<usize>);

impl KillCountdown {
    fn step(&mut self) -> Result<(), AgentKilled> {
        match &mut self.0 {
            None => Ok(()),
            Some(0) => Err(AgentKilled),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
        }
    }
}

struct NodeModel {
    now: u64,
    next: u64,
    /// When the watch last caught up.
    synced_at: u64,
    agent: Option<Containers>,
    disk: DiskState,
    api: BTreeMap<PodUid, ListedPod>,
    /// The API server's pods as of the agent's last watch event.
    watch: BTreeMap<PodUid, ListedPod>,
    /// All pods that ever were, also those that were deleted.
    pods: Vec<ListedPod>,
    /// What kubelet knows; its checkpoint, where that can be read.
    kubelet: Vec<DeviceHolder>,
    checkpoint_readable: bool,
    /// Whether the agent could read it when it started.
    recovered_from_checkpoint: bool,
    /// The containers that run, each with the region that is mounted in it.
    running: BTreeMap<ContainerOwner, ContainerKey>,
    /// The grants of pods that started once. Only a resize changes them.
    first_grants: BTreeMap<PodUid, PodGrant>,
    settings: AgentSettings,
}

fn node() -> Node {
    let gpu = |minor: u32| Gpu {
        uuid: format!("GPU-00000000-0000-0000-0000-00000000000{minor}").into(),
        minor,
        model: "NVIDIA A100".into(),
        memory_bytes: Bytes(GPU_MEMORY_GIB * GIB),
        numa: None,
        pci: None,
        withheld: None,
    };
    Node::new("node1", vec![gpu(0), gpu(1)])
}

impl NodeModel {
    fn new() -> NodeModel {
        let mut world = NodeModel {
            now: 1_000_000 * SECOND,
            next: 0,
            synced_at: 1_000_000 * SECOND,
            agent: None,
            disk: DiskState::default(),
            api: BTreeMap::new(),
            watch: BTreeMap::new(),
            pods: Vec::new(),
            kubelet: Vec::new(),
            checkpoint_readable: true,
            recovered_from_checkpoint: true,
            running: BTreeMap::new(),
            first_grants: BTreeMap::new(),
            settings: AgentSettings::default(),
        };
        world.start_agent();
        world
    }

    fn unique(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn pod(&self, pick: usize) -> Option<ListedPod> {
        // The newest pods are the interesting ones.
        let recent = &self.pods[self.pods.len().saturating_sub(4)..];
        (!recent.is_empty()).then(|| recent[pick % recent.len()].clone())
    }

    /// An agent starts, if none runs, and adopts what is there.
    fn start_agent(&mut self) {
        if self.agent.is_some() {
            return;
        }
        // A new agent lists all pods before it removes anything.
        self.watch = self.api.clone();
        self.synced_at = self.now;
        self.recovered_from_checkpoint = self.checkpoint_readable;
        let left = RecoveryInput {
            allocations: self.disk.allocations.clone(),
            records: self.disk.records.clone(),
            specs: self
                .disk
                .specs
                .iter()
                .map(|(key, spec)| (key.clone(), (spec.record.clone(), spec.container.clone())))
                .collect(),
            kubelet: self.checkpoint(),
            ..RecoveryInput::default()
        };
        let (mut containers, recovered) = Containers::recover(node(), left);
        for RecoveredContainer { key, owner, has_spec } in recovered {
            // As in `recover.rs`: without a region there is no container that could miss it.
            if !self.disk.regions.contains_key(&key) {
                continue;
            }
            let record = containers.grants().record(&owner.pod).cloned().unwrap();
            if !has_spec {
                self.write_spec(&key, &key, &record, &owner);
            }
            self.write_region(&key, &record, &owner);
            containers.prepared(std::slice::from_ref(&key), &owner);
        }
        self.agent = Some(containers);
    }

    fn checkpoint(&self) -> Vec<DeviceHolder> {
        if self.checkpoint_readable { self.kubelet.clone() } else { Vec::new() }
    }

    fn write_region(&mut self, key: &ContainerKey, record: &PodRecord, owner: &ContainerOwner) {
        let shares = record.grant_of(&owner.container).unwrap().shares.clone();
        self.disk.regions.insert(key.clone(), (owner.clone(), shares));
    }

    fn write_spec(
        &mut self,
        key: &ContainerKey,
        region: &ContainerKey,
        record: &PodRecord,
        owner: &ContainerOwner,
    ) {
        let spec = WrittenSpec {
            record: record.clone(),
            container: owner.container.clone(),
            region: region.clone(),
        };
        self.disk.specs.insert(key.clone(), spec);
    }

    /// Runs an operation of the agent; a kill in it leaves the world as it is at that step.
    fn with_agent(
        &mut self,
        kill: Option<usize>,
        work: impl FnOnce(&mut NodeModel, &mut Containers, &mut KillCountdown) -> Result<(), AgentKilled>,
    ) {
        self.start_agent();
        let Some(mut agent) = self.agent.take() else { return };
        if work(self, &mut agent, &mut KillCountdown(kill)).is_ok() {
            self.agent = Some(agent);
        }
    }

    fn apply(&mut self, event: &ModelEvent) {
        self.now += SECOND / 100;
        match *event {
            ModelEvent::CreatePod { gib, containers } => {
                let number = self.unique();
                let name = format!("p{number}");
                let id = PodId {
                    uid: format!("uid-{number}").as_str().into(),
                    namespace: "default".into(),
                    name: name.as_str().into(),
                };
                let containers = (0..containers).map(|at| format!("c{at}").as_str().into()).collect();
                let annotations = BTreeMap::new();
                let pod = ListedPod { id: id.clone(), gib, containers, finished: false, annotations };
                self.api.insert(id.uid, pod.clone());
                self.pods.push(pod);
            }
            ModelEvent::Allocate { pod, kill } => {
                let Some(pod) = self.pod(pod).filter(|pod| self.is_active(&pod.id.uid)) else { return };
                let has_devices = |container: &&ContainerName| {
                    self.kubelet.iter().any(|one| one.uid == pod.id.uid && one.container == **container)
                };
                let Some(container) = pod.containers.iter().find(|one| !has_devices(one)).cloned() else {
                    return;
                };
                // Kubelet gives away a device only once, but those of pods that are gone.
                let is_taken = |id: &DeviceId| {
                    let mut holders = self.kubelet.iter().filter(|holder| holder.ids.contains(id));
                    holders.any(|holder| self.is_active(&holder.uid) || self.runs(&owner_of(holder)))
                };
                let free = (0..12).map(|slot| DeviceId(format!("slot-{slot}"))).find(|id| !is_taken(id));
                let Some(id) = free else { return };
                self.with_agent(kill, |world, agent, fuse| {
                    let number = world.unique();
                    let ids: BTreeSet<DeviceId> = [id].into();
                    let key = ContainerKey(format!("{number:032x}"));
                    let allocation = agent.allocate(key.clone(), RESOURCE, ids.clone(), world.now);
                    fuse.step()?;
                    world.disk.allocations.insert(key.clone(), allocation);
                    fuse.step()?;
                    world.kubelet.push(DeviceHolder {
                        uid: pod.id.uid.clone(),
                        container,
                        resource: RESOURCE.into(),
                        ids,
                        key: Some(key),
                        shared: true,
                        name: None,
                    });
                    Ok(())
                });
            }
            ModelEvent::Start { pod, kill } => {
                let Some(pod) = self.pod(pod).filter(|pod| self.is_active(&pod.id.uid)) else { return };
                let mut holders = self.kubelet.iter().filter(|holder| holder.uid == pod.id.uid);
                let Some(holder) = holders.find(|holder| !self.runs(&owner_of(holder))).cloned() else {
                    return;
                };
                self.with_agent(kill, |world, agent, fuse| world.start_container(agent, &holder, fuse));
            }
            ModelEvent::Exit { pod } => {
                let Some(pod) = self.pod(pod) else { return };
                let of_pod = self.running.keys().find(|owner| owner.pod == pod.id.uid).cloned();
                if let Some(owner) = of_pod {
                    self.running.remove(&owner);
                }
            }
            ModelEvent::Finish { pod } => {
                let Some(uid) = self.pod(pod).map(|pod| pod.id.uid) else { return };
                if let Some(pod) = self.api.get_mut(&uid) {
                    pod.finished = true;
                    self.running.retain(|owner, _| owner.pod != uid);
                }
            }
            ModelEvent::Delete { pod, force } => {
                let Some(uid) = self.pod(pod).map(|pod| pod.id.uid) else { return };
                // Deleted by force, a pod is gone at once, and its containers are not.
                if !force {
                    self.running.retain(|owner, _| owner.pod != uid);
                }
                self.api.remove(&uid);
            }
            ModelEvent::SyncWatch => {
                self.watch = self.api.clone();
                self.synced_at = self.now;
            }
            ModelEvent::KubeletForgets => {
                let api = &self.api;
                let running = &self.running;
                self.kubelet.retain(|holder| {
                    api.contains_key(&holder.uid) || running.contains_key(&owner_of(holder))
                });
            }
            ModelEvent::KubeletLosesCheckpoint => self.kubelet.clear(),
            ModelEvent::CheckpointReadable(readable) => self.checkpoint_readable = readable,
            ModelEvent::WriteAnnotation { pod } => {
                if let Some(pod) = self.pod(pod) {
                    self.annotate(&pod.id.uid);
                }
            }
            ModelEvent::Resize { pod, gib, refuses, disk_full, kill } => {
                let Some(pod) = self.pod(pod).filter(|pod| self.is_active(&pod.id.uid)) else { return };
                self.with_agent(kill, |world, agent, fuse| {
                    world.resize(agent, &pod, gib, refuses, disk_full, fuse)
                });
            }
            ModelEvent::LoseRecords => {
                // A grant cannot be recovered without an annotation, or if kubelet does not report the pod's devices: it is
                // reported and stays uncounted.
                let known = |(owner, key): (&ContainerOwner, &ContainerKey)| {
                    let holds = |holder: &DeviceHolder| {
                        owner_of(holder) == *owner && holder.key.as_ref() == Some(key)
                    };
                    self.is_active(&owner.pod) && self.checkpoint().iter().any(holds)
                };
                if self.agent.is_none() || !self.running.iter().all(known) {
                    return;
                }
                let running: BTreeSet<PodUid> = self.running.keys().map(|owner| owner.pod.clone()).collect();
                running.iter().for_each(|uid| self.annotate(uid));
                self.watch = self.api.clone();
                self.agent = None;
                self.disk.records.clear();
                self.disk.specs.clear();
                self.first_grants.retain(|uid, _| running.contains(uid));
                // If kubelet's checkpoint were lost as well before the next agent reads it, the agent could not find these pods.
                self.with_agent(None, |world, agent, _| {
                    world.resolve(agent);
                    Ok(())
                });
            }
            ModelEvent::SaveRecords { kill } => self.with_agent(kill, |world, agent, fuse| {
                for uid in agent.unsaved_pods() {
                    let Some(record) = agent.grants().record(&uid).cloned() else { continue };
                    fuse.step()?;
                    world.disk.records.insert(uid.clone(), record.clone());
                    agent.record_saved(&record);
                }
                Ok(())
            }),
            ModelEvent::CollectGarbage { kill } => {
                self.with_agent(kill, |world, agent, fuse| world.collect_garbage(agent, fuse));
            }
            ModelEvent::Advance { seconds } => {
                self.now += seconds * SECOND;
                // Kubelet and the agent watch the same API server: neither is behind by more than the grace period.
                if self.now - self.synced_at > 100 * SECOND {
                    self.apply(&ModelEvent::SyncWatch);
                }
            }
            ModelEvent::Kill => self.agent = None,
            ModelEvent::Reboot => {
                self.agent = None;
                self.running.clear();
                // Below /run: nothing of it outlives the boot. The pod records and kubelet's checkpoint do.
                self.disk.allocations.clear();
                self.disk.specs.clear();
                self.disk.regions.clear();
                // A pod whose record did not reach the disk is placed like a new one.
                let records = &self.disk.records;
                self.first_grants.retain(|uid, _| records.contains_key(uid));
            }
        }
    }

    fn annotate(&mut self, uid: &PodUid) {
        let record = self.agent.as_ref().and_then(|agent| agent.grants().record(uid).cloned());
        if let (Some(pod), Some(record)) = (self.api.get_mut(uid), record) {
            pod.annotations.extend(record.annotations);
        }
    }

    fn runs(&self, owner: &ContainerOwner) -> bool {
        self.running.contains_key(owner)
    }

    fn is_active(&self, uid: &PodUid) -> bool {
        self.api.get(uid).is_some_and(|pod| !pod.finished)
    }

    fn request<'a>(&self, pod: &'a ListedPod, manifest: &'a PodManifest) -> GrantRequest<'a> {
        GrantRequest { id: &pod.id, pod: manifest, problems: &[], boot: "boot", now: self.now }
    }

    /// Mirrors `PreStartContainer`.
    fn start_container(
        &mut self,
        agent: &mut Containers,
        holder: &DeviceHolder,
        fuse: &mut KillCountdown,
    ) -> Result<(), AgentKilled> {
        let owner = owner_of(holder);
        let real_key = holder.key.clone().unwrap();
        let reported =
            DeviceHolder { key: holder.key.clone().filter(|_| self.checkpoint_readable), ..holder.clone() };
        let keys = agent.keys_of(&reported);
        if keys.is_empty() {
            return Ok(());
        }
        for key in &keys {
            agent.identify(key, &owner);
        }
        let record = match agent.grants().record(&holder.uid).cloned() {
            Some(_) if !self.watch.contains_key(&holder.uid) => return Ok(()),
            Some(record) => record,
            None => {
                // A pod that the watch does not have yet is read from the API server.
                let listed = self.watch.contains_key(&holder.uid);
                let Some(pod) = self.watch.get(&holder.uid).or(self.api.get(&holder.uid)).cloned() else {
                    return Ok(());
                };
                self.resolve(agent);
                let manifest = pod.manifest();
                match agent.decide(&self.request(&pod, &manifest), &self.settings, listed) {
                    Ok(record) => record,
                    Err(_) => return Ok(()),
                }
            }
        };
        for step in PREPARE_STEPS {
            fuse.step()?;
            match step {
                PrepareStep::Region => self.write_region(&keys[0], &record, &owner),
                PrepareStep::Spec => {
                    keys.iter().for_each(|key| self.write_spec(key, &keys[0], &record, &owner));
                }
            }
        }
        agent.prepared(&keys, &owner);
        if self.checkpoint_readable {
            for key in agent.superseded(&keys[0], &owner) {
                self.remove_container(agent, &key, fuse)?;
            }
            let is_it = |stage: &ContainerStage| matches!(stage, ContainerStage::Prepared { owner: of, .. } if *of == owner);
            let prepared = agent.by_key.values().filter(|container| is_it(&container.stage)).count();
            assert_eq!(prepared, 1, "an earlier key of the container is left");
        }
        fuse.step()?;
        let spec = self.disk.specs.get(&real_key).expect("the runtime finds no spec for its key");
        let first = self.first_grants.entry(owner.pod.clone()).or_insert(record.grant.clone());
        assert_eq!(*first, record.grant, "a restarted container got another grant");
        self.running.insert(owner, spec.region.clone());
        Ok(())
    }

    /// Mirrors `resize.rs`, with its own order of steps and its own rollback.
    fn resize(
        &mut self,
        agent: &mut Containers,
        pod: &ListedPod,
        gib: [u64; 2],
        refuses: Option<usize>,
        disk_full: bool,
        fuse: &mut KillCountdown,
    ) -> Result<(), AgentKilled> {
        let uid = &pod.id.uid;
        let Some(old) = agent.grants().record(uid).cloned() else { return Ok(()) };
        let amounts = pod.containers.iter().zip(gib);
        let request: Vec<String> =
            amounts.map(|(container, gib)| format!("{container}: memory={gib}Gi")).collect();
        let request = request.join("; ");
        let answered = |record: PodRecord| PodRecord { resize: Some(request.clone()), ..record };
        let changes = partage_core::resize::read(&request).unwrap();
        let grant = partage_core::resize::apply(&old.grant, &changes).unwrap();
        let manifest = pod.manifest();
        let new = answered(agent.grants().with_grant(&old, &manifest, grant, &self.settings).unwrap());
        let done = match agent.reserve_resize(&old, &new) {
            Err(_) => Err(ModelResizeError::Refused),
            Ok(()) => {
                let prepared = agent.prepared_of(uid);
                let refuses = refuses.and_then(|at| pod.containers.get(at)).cloned();
                let mut steps = ModelResize { model: self, fuse, refuses, disk_full, is_killed: false };
                resize::apply(&mut steps, &old, &new, prepared)
            }
        };
        match done {
            Err(ModelResizeError::Killed) => return Err(AgentKilled),
            Err(ModelResizeError::Refused) => {
                let record = answered(old);
                agent.replace(record.clone());
                fuse.step()?;
                self.disk.records.insert(uid.clone(), record.clone());
                agent.record_saved(&record);
            }
            Ok(()) => {
                agent.replace(new.clone());
                agent.set_saved(uid, true);
                for (key, container) in agent.prepared_of(uid) {
                    fuse.step()?;
                    let owner = ContainerOwner { pod: uid.clone(), container };
                    self.write_spec(&key, &key, &new, &owner);
                }
            }
        }
        Ok(())
    }

    /// Mirrors `adopt`: pods without a record whose containers run are read from their annotations, and their specs are
    /// written again.
    fn resolve(&mut self, agent: &mut Containers) {
        for uid in agent.unresolved_pods() {
            let runs = self.running.keys().any(|owner| owner.pod == uid);
            if let Some(pod) = self.watch.get(&uid).filter(|_| runs) {
                let manifest = pod.manifest();
                let adopted = agent.adopt(&self.request(pod, &manifest), &self.settings);
                let record = adopted.expect("every running pod carries its grant");
                for holder in self.checkpoint().iter().filter(|holder| holder.uid == uid) {
                    let (key, owner) = (holder.key.clone().unwrap(), owner_of(holder));
                    if self.disk.regions.contains_key(&key) {
                        agent.identify(&key, &owner);
                        self.write_spec(&key, &key, &record, &owner);
                        agent.prepared(&[key], &owner);
                    }
                }
            }
            agent.resolved(&uid);
        }
    }

    fn remove_container(
        &mut self,
        agent: &mut Containers,
        key: &ContainerKey,
        fuse: &mut KillCountdown,
    ) -> Result<(), AgentKilled> {
        for step in REMOVE_STEPS {
            fuse.step()?;
            match step {
                RemoveStep::Spec => drop(self.disk.specs.remove(key)),
                RemoveStep::Region => drop(self.disk.regions.remove(key)),
                RemoveStep::Allocation => drop(self.disk.allocations.remove(key)),
            }
        }
        agent.remove(key);
        Ok(())
    }

    /// Mirrors the garbage collector.
    fn collect_garbage(
        &mut self,
        agent: &mut Containers,
        fuse: &mut KillCountdown,
    ) -> Result<(), AgentKilled> {
        self.resolve(agent);
        let watch = &self.watch;
        let phase = |uid: &PodUid| match watch.get(uid) {
            Some(pod) if pod.finished => PodPhase::Finished,
            Some(_) => PodPhase::Active,
            None => PodPhase::Absent,
        };
        for (PodId { uid, .. }, _) in agent.ended_pods(phase, self.now) {
            if self.running.keys().any(|owner| owner.pod == uid) {
                continue;
            }
            for key in agent.end_pod(&uid) {
                self.remove_container(agent, &key, fuse)?;
            }
            fuse.step()?;
            self.disk.records.remove(&uid);
            agent.release(&uid);
        }
        if !self.checkpoint_readable {
            return Ok(());
        }
        let on_disk = self.disk.specs.keys().chain(self.disk.regions.keys()).cloned().collect();
        let exists = |uid: &PodUid| self.watch.contains_key(uid) || agent.grants().record(uid).is_some();
        let held = self.kubelet.iter().filter(|holder| exists(&holder.uid));
        let held = held.filter_map(|holder| holder.key.clone()).collect();
        let waits = |pod: &ListedPod| !pod.finished && !agent.has_all_keys(&pod.id.uid);
        let view = OrphanCriteria {
            // On a node these are the regions in use. Here there are none, so that all other rules have to protect them.
            kept: &BTreeSet::new(),
            on_disk: &on_disk,
            held: &held,
            checkpoint_written: Some(self.now),
            pods_waiting: self.watch.values().any(waits),
            now: self.now,
        };
        for key in agent.orphans(&view) {
            self.remove_container(agent, &key, fuse)?;
        }
        Ok(())
    }

    /// What must hold after every event, whether or not an agent runs.
    fn check(&self) -> Result<(), TestCaseError> {
        let mut memory: BTreeMap<GpuUuid, u64> = BTreeMap::new();
        for (owner, key) in &self.running {
            let region = self.disk.regions.get(key);
            prop_assert!(region.is_some(), "{owner:?} runs without its region");
            let Some((of, shares)) = region else { continue };
            prop_assert_eq!(of, owner, "a region belongs to another container than the one that runs on it");
            for share in shares {
                *memory.entry(share.gpu.clone()).or_default() +=
                    share.memory_bytes.map_or(0, |bytes| bytes.0);
            }
        }
        for (gpu, bytes) in memory {
            prop_assert!(bytes <= GPU_MEMORY_GIB * GIB, "{gpu} is over-committed: {} GiB run", bytes / GIB);
        }
        for (key, spec) in &self.disk.specs {
            prop_assert!(self.disk.regions.contains_key(&spec.region), "the spec {key} has no region");
        }
        let Some(agent) = &self.agent else { return Ok(()) };
        prop_assert_eq!(agent.grants().audit(), [], "the ledger is over-committed");
        let is_active = |uid: &PodUid| self.watch.get(uid).is_some_and(|pod| !pod.finished);
        let held = self.checkpoint();
        let held = held.iter().filter(|holder| is_active(&holder.uid) && self.recovered_from_checkpoint);
        for holder in held {
            let stage = holder.key.as_ref().and_then(|key| agent.stage(key));
            prop_assert!(stage.is_some(), "an allocation that kubelet holds was removed: {holder:?}");
        }
        let unresolved = agent.unresolved_pods();
        for (uid, grant) in self.first_grants.iter().filter(|(uid, _)| self.is_active(uid)) {
            let record = agent.grants().record(uid);
            prop_assert_eq!(record.map(|record| &record.grant), Some(grant), "an active pod lost its grant");
        }
        for (owner, key) in self.running.iter().filter(|(owner, _)| !unresolved.contains(&owner.pod)) {
            let counted =
                agent.grants().record(&owner.pod).and_then(|record| record.grant_of(&owner.container));
            let shares = self.disk.regions.get(key).map(|(_, shares)| shares);
            prop_assert_eq!(
                counted.map(|grant| &grant.shares),
                shares,
                "{:?} runs with a share that is not counted",
                owner
            );
            let stage = agent.stage(key);
            prop_assert!(
                matches!(stage, Some(ContainerStage::Prepared { owner: of, .. }) if of == owner),
                "{owner:?} runs in stage {stage:?}"
            );
        }
        Ok(())
    }

    /// Everything ends, and the agent has time to notice: nothing may be left.
    fn drain(&mut self) {
        self.running.clear();
        self.api.clear();
        self.checkpoint_readable = true;
        self.apply(&ModelEvent::SyncWatch);
        self.apply(&ModelEvent::KubeletForgets);
        self.apply(&ModelEvent::CollectGarbage { kill: None });
        self.apply(&ModelEvent::Advance { seconds: 1000 });
        self.apply(&ModelEvent::CollectGarbage { kill: None });
    }
}

/// The steps of a resize in the model.
struct ModelResize<'a> {
    model: &'a mut NodeModel,
    fuse: &'a mut KillCountdown,
    /// The container that uses all memory of its current limit.
    refuses: Option<ContainerName>,
    disk_full: bool,
    is_killed: bool,
}

enum ModelResizeError {
    Killed,
    Refused,
}

impl ModelResize<'_> {
    fn step(&mut self) -> Result<(), ModelResizeError> {
        self.fuse.step().map_err(|AgentKilled| {
            self.is_killed = true;
            ModelResizeError::Killed
        })
    }

    fn set(&mut self, key: &ContainerKey, shares: &[Share]) {
        if let Some((_, limits)) = self.model.disk.regions.get_mut(key) {
            *limits = shares.to_vec();
        }
    }
}

impl ResizeSteps for ModelResize<'_> {
    type Error = ModelResizeError;

    fn set_limits(
        &mut self,
        key: &ContainerKey,
        container: &ContainerName,
        shares: &[Share],
    ) -> Result<(), ModelResizeError> {
        self.step()?;
        let memory = |shares: &[Share]| shares.iter().map(|share| share.memory_bytes).collect::<Vec<_>>();
        let shrinks = self.model.disk.regions.get(key).is_some_and(|(_, now)| memory(shares) < memory(now));
        if shrinks && self.refuses.as_ref() == Some(container) {
            return Err(ModelResizeError::Refused);
        }
        self.set(key, shares);
        Ok(())
    }

    fn restore_limits(&mut self, key: &ContainerKey, _: &ContainerName, shares: &[Share]) {
        // An agent that was killed restores nothing: the next one does.
        if !self.is_killed {
            self.set(key, shares);
        }
    }

    fn save(&mut self, record: &PodRecord) -> Result<(), ModelResizeError> {
        self.step()?;
        if self.disk_full {
            return Err(ModelResizeError::Refused);
        }
        self.model.disk.records.insert(record.pod.uid.clone(), record.clone());
        // From here on the pod has its new amounts, also after a kill.
        if let Some(grant) = self.model.first_grants.get_mut(&record.pod.uid) {
            grant.clone_from(&record.grant);
        }
        Ok(())
    }
}

fn owner_of(holder: &DeviceHolder) -> ContainerOwner {
    ContainerOwner { pod: holder.uid.clone(), container: holder.container.clone() }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn no_order_of_events_and_kills_over_commits_or_leaks(events in events()) {
        let mut world = NodeModel::new();
        for event in &events {
            world.apply(event);
            world.check()?;
        }
        world.drain();
        world.check()?;
        prop_assert_eq!(world.disk.allocations.len(), 0, "allocation records are left");
        prop_assert_eq!(world.disk.records.len(), 0, "pod records are left");
        prop_assert_eq!(world.disk.specs.len(), 0, "CDI specs are left");
        prop_assert_eq!(world.disk.regions.len(), 0, "regions are left");
        let agent = world.agent.as_ref().unwrap();
        prop_assert_eq!(agent.by_key.len(), 0, "containers are left");
        prop_assert_eq!(agent.grants().records().count(), 0, "grants are left");
    }
}
