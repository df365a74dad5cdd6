//! What kubelet and the API server are told: devices of each resource, and what the node says of itself.

use crate::plugin::{DeviceId, Listed, Plugin};
use crate::publish;
use crate::resources::{self, CountResource, PodRequest};
use crate::state::NodeState;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::sync::watch;

/// The device plugins that serve.
pub(crate) struct Plugins {
    folder: PathBuf,
    running: BTreeMap<String, (Plugin, watch::Sender<Vec<Listed>>)>,
}

impl Plugins {
    /// None yet; their sockets are going to be in this folder.
    pub(crate) fn new(folder: &Path) -> Plugins {
        Plugins { folder: folder.into(), running: BTreeMap::new() }
    }

    /// Serves what the settings say and the GPUs have.
    pub(crate) async fn follow(&mut self, state: &Arc<NodeState>) {
        let wanted = wanted(state);
        let gone: Vec<String> =
            self.running.keys().filter(|name| !wanted.contains_key(*name)).cloned().collect();
        for name in gone {
            if let Some((plugin, _)) = self.running.remove(&name) {
                tracing::info!(resource = name, "no longer offered");
                plugin.stop().await;
            }
        }
        for (name, devices) in wanted {
            match self.running.get(&name) {
                Some((_, list)) => {
                    list.send_if_modified(|now| replace(now, devices));
                }
                None => {
                    let (list, listed) = watch::channel(devices);
                    let plugin =
                        Plugin::start(&Handle::current(), &self.folder, &name, listed, Arc::clone(state));
                    self.running.insert(name, (plugin, list));
                }
            }
        }
    }

    /// For each resource, whether kubelet listens.
    pub(crate) fn watched(&self) -> Vec<(String, watch::Receiver<usize>)> {
        self.running.iter().map(|(name, (plugin, _))| (name.clone(), plugin.watched())).collect()
    }

    pub(crate) async fn stop(self) {
        for (plugin, _) in self.running.into_values() {
            plugin.stop().await;
        }
    }
}

/// The devices of each resource.
fn wanted(state: &NodeState) -> BTreeMap<String, Vec<Listed>> {
    let settings = state.settings();
    let ill: Vec<bool> =
        state.containers().grants().node().gpus.iter().map(|gpu| gpu.withheld.is_some()).collect();
    let enabled = CountResource::enabled(&settings);
    let counted = state.machine.inventory.counted_node();
    let mut slots: BTreeMap<String, Vec<u32>> = enabled
        .iter()
        .map(|resource| (resource.name(), resources::slots(resource, &counted, &settings)))
        .collect();
    // Kubelet fails pods whose devices are gone when it restarts: of a dialect that is spoken no more, those that are held stay
    // until they are given back.
    for resource in state.containers().allocations().map(|allocation| &allocation.resource) {
        slots.entry(resource.clone()).or_insert_with(|| vec![0; ill.len()]);
    }
    let devices = |(name, slots): (String, Vec<u32>)| {
        let devices = resources::devices(&slots, &ill, &state.held(&name));
        (name, devices)
    };
    slots.into_iter().map(devices).collect()
}

impl NodeState {
    /// The devices of a resource that containers hold, with the indexes of the GPUs that their shares are of. Devices of
    /// containers that were granted nothing yet are on no GPU.
    pub(crate) fn held(&self, resource: &str) -> BTreeMap<DeviceId, BTreeSet<usize>> {
        let mut held: BTreeMap<DeviceId, BTreeSet<usize>> = BTreeMap::new();
        let containers = self.containers();
        for allocation in containers.allocations().filter(|allocation| allocation.resource == resource) {
            // By the grant and not by the region: after a reboot, and on an unhealthy GPU, there may be no region yet.
            let grant = containers.owner(&allocation.key).and_then(|owner| containers.grant_of(owner));
            let shares = grant.map_or([].as_slice(), |grant| &grant.shares);
            let gpus: Vec<usize> =
                shares.iter().filter_map(|share| self.hardware().gpu_index(&share.gpu)).collect();
            let each = allocation.ids.len().div_ceil(gpus.len().max(1)).max(1);
            for (at, id) in allocation.ids.iter().enumerate() {
                held.entry(id.clone()).or_default().extend(gpus.get(at / each));
            }
        }
        held
    }
}

/// Puts something in the place of something else; whether that made a difference.
pub(crate) fn replace<T: PartialEq>(now: &mut T, next: T) -> bool {
    let differs = *now != next;
    *now = next;
    differs
}

/// What the node is to say; not known before all of its pods are.
pub(crate) fn publication(state: &NodeState) -> Option<publish::Statement> {
    if !state.adapters.pods.is_synced() {
        return None;
    }
    let pods = state.adapters.pods.all();
    let containers = state.containers();
    let grants = containers.grants();
    let running = pods.iter().filter(|pod| !pod.is_finished());
    let requests: Vec<PodRequest<'_>> = running
        .map(|pod| PodRequest {
            pod: &pod.pod,
            grant: grants.record(&pod.id.uid).map(|record| &record.grant),
        })
        .collect();
    let requested = resources::requested(&requests, grants.node());
    Some(publish::publication(grants.node(), &state.settings(), &requested))
}
