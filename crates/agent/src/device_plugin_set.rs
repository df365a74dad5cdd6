//! The device plugins of the node: one for each resource that is enabled or still held.

use crate::config::{MAX_SOCKET_PATH, SettingsCheckError};
use crate::device_plugin::{DeviceId, DevicePluginHandle, ListedDevice, endpoint};
use crate::resources::{self, CountResource};
use crate::settings::AgentSettings;
use crate::state::NodeState;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::Instant;

/// The device plugins that are running, by resource.
pub(crate) struct DevicePluginSet {
    directory: PathBuf,
    running: BTreeMap<String, (DevicePluginHandle, watch::Sender<Vec<ListedDevice>>)>,
}

impl DevicePluginSet {
    /// Creates a set without plugins, whose sockets are going to be in this directory.
    pub(crate) fn new(directory: &Path) -> DevicePluginSet {
        DevicePluginSet { directory: directory.into(), running: BTreeMap::new() }
    }

    /// Starts, updates and stops plugins so that kubelet gets what the settings enable and the GPUs have.
    pub(crate) async fn reconcile(&mut self, state: &Arc<NodeState>) {
        let desired = desired_devices(state);
        let gone: Vec<String> =
            self.running.keys().filter(|name| !desired.contains_key(*name)).cloned().collect();
        for name in gone {
            if let Some((plugin, _)) = self.running.remove(&name) {
                tracing::info!(resource = name, "resource is no longer offered");
                plugin.stop().await;
            }
        }
        for (name, devices) in desired {
            match self.running.get(&name) {
                Some((_, list)) => {
                    list.send_if_modified(|current| replace_if_changed(current, devices));
                }
                None => {
                    let (list, listed) = watch::channel(devices);
                    let handle = Handle::current();
                    let state = Arc::clone(state);
                    let plugin = DevicePluginHandle::start(&handle, &self.directory, &name, listed, state);
                    self.running.insert(name, (plugin, list));
                }
            }
        }
    }

    /// Returns the number of streams that kubelet has open for each resource.
    pub(crate) fn kubelet_streams(&self) -> Vec<(String, watch::Receiver<usize>)> {
        self.running.iter().map(|(name, (plugin, _))| (name.clone(), plugin.kubelet_streams())).collect()
    }

    /// Stops all plugins at once. Requests in progress are aborted at the deadline.
    pub(crate) async fn stop(self, deadline: Instant) {
        let mut stopping = tokio::task::JoinSet::new();
        for (plugin, _) in self.running.into_values() {
            stopping.spawn(plugin.stop_by(deadline));
        }
        stopping.join_all().await;
    }
}

/// Checks that the kernel accepts the paths of all sockets in kubelet's directory.
pub(crate) fn check_socket_paths(
    directory: &Path,
    settings: &AgentSettings,
) -> Result<(), SettingsCheckError> {
    for resource in CountResource::enabled(settings).iter().map(CountResource::name) {
        let length = directory.join(endpoint(&resource)).as_os_str().len();
        if length > MAX_SOCKET_PATH {
            return Err(SettingsCheckError::SocketPath { resource, directory: directory.into(), length });
        }
    }
    Ok(())
}

/// Returns the devices that each resource should have.
fn desired_devices(state: &NodeState) -> BTreeMap<String, Vec<ListedDevice>> {
    let settings = state.settings();
    let unhealthy: Vec<bool> =
        state.containers().grants().node().gpus.iter().map(|gpu| gpu.withheld.is_some()).collect();
    let enabled = CountResource::enabled(&settings);
    let counted = state.machine.inventory.counted_node();
    let mut slots: BTreeMap<String, Vec<u32>> = enabled
        .iter()
        .map(|resource| (resource.name(), resources::slots(resource, &counted, &settings)))
        .collect();
    // When kubelet restarts, it fails pods whose devices are gone: held devices of a dialect that was disabled stay until they
    // are released.
    for resource in state.containers().allocations().map(|allocation| &allocation.resource) {
        slots.entry(resource.clone()).or_insert_with(|| vec![0; unhealthy.len()]);
    }
    let devices = |(name, slots): (String, Vec<u32>)| {
        let devices = resources::devices(&slots, &unhealthy, &state.held_devices(&name));
        (name, devices)
    };
    slots.into_iter().map(devices).collect()
}

impl NodeState {
    /// Returns the devices of a resource that containers hold, with the indexes of the GPUs that their shares are of. Devices of
    /// containers without a grant yet are on no GPU.
    pub(crate) fn held_devices(&self, resource: &str) -> BTreeMap<DeviceId, BTreeSet<usize>> {
        let mut held: BTreeMap<DeviceId, BTreeSet<usize>> = BTreeMap::new();
        let containers = self.containers();
        for allocation in containers.allocations().filter(|allocation| allocation.resource == resource) {
            // By the grant and not by the region: after a reboot, and on an unhealthy GPU, there may be no region.
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

/// Replaces a value. Returns whether the new one is different.
pub(crate) fn replace_if_changed<T: PartialEq>(current: &mut T, next: T) -> bool {
    let differs = *current != next;
    *current = next;
    differs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_path_longer_than_the_kernel_allows_is_refused() {
        let of =
            |domain: &str| AgentSettings::parse(&format!("vcudaDomains: [{domain}]"), &"n".into()).unwrap();
        let longest = of(&"a".repeat(51));
        let k0s = Path::new("/var/lib/k0s/kubelet/device-plugins");
        assert_eq!(check_socket_paths(Path::new("/var/lib/kubelet/device-plugins"), &longest), Ok(()));
        let error = check_socket_paths(k0s, &longest).unwrap_err().to_string();
        assert!(error.contains("/var/lib/k0s/kubelet/device-plugins has a path of 111 bytes"), "{error}");
        assert_eq!(check_socket_paths(k0s, &of("tencent.com")), Ok(()));
    }
}
