//! AWS virtual GPU: slots of a GPU under MPS.
//!
//! AWS's device plugin keeps no record in the API server. Only kubelet knows the slots of a pod, as device IDs
//! `<GPU UUID>-<slot>`. A node reads them to adopt its running pods.

use super::{EncodedGrant, GrantError, PlacedGrant, quoted};
use crate::dialect::asks::aws::VGPU;
use crate::model::{ContainerName, ContainerRole, Cores, GpuUuid, Grant, Node, Share};
use std::collections::BTreeSet;

/// Returns all device IDs of a node: the slots of the first GPU, then of the next. Withheld GPUs have none.
pub fn device_ids(node: &Node) -> impl Iterator<Item = String> {
    let available = node.gpus.iter().filter(|gpu| gpu.withheld.is_none());
    available.flat_map(|gpu| (0..node.slots_per_gpu).map(move |slot| format!("{}-{slot}", gpu.uuid)))
}

/// Returns the UUID in a device ID: the text before the last dash, because UUIDs contain dashes.
pub fn gpu_of(device_id: &str) -> Option<&str> {
    device_id.rsplit_once('-').map(|(uuid, _)| uuid)
}

/// Returns the number of slots per GPU in a container's device IDs, in the order of the node's GPUs: kubelet's order is
/// random.
pub fn slots_taken(node: &Node, device_ids: &[&str]) -> Result<Vec<(GpuUuid, u32)>, GrantError> {
    let mut taken = vec![BTreeSet::new(); node.gpus.len()];
    for id in device_ids {
        let unknown = || {
            let message = format!("node {} has no device {}", node.name, quoted(id));
            GrantError::new(VGPU, message)
        };
        let (uuid, slot) = id.rsplit_once('-').ok_or_else(unknown)?;
        let index = node.gpu_index(&uuid.into()).ok_or_else(unknown)?;
        let slot: u32 = slot.parse().ok().filter(|&slot| slot < node.slots_per_gpu).ok_or_else(unknown)?;
        if let Some(reason) = &node.gpus[index].withheld {
            let message = format!("device {} is unavailable: {reason}", quoted(id));
            return Err(GrantError::new(VGPU, message));
        }
        // Duplicates count once.
        taken[index].insert(slot);
    }
    let counted = node.gpus.iter().zip(taken).filter(|(_, slots)| !slots.is_empty());
    // Every slot is less than `slots_per_gpu`, so their number fits a u32.
    Ok(counted.map(|(gpu, slots)| (gpu.uuid.clone(), slots.len() as u32)).collect())
}

/// Decodes the grant of a running container from the device IDs that kubelet reports for it. It has no memory limits.
pub fn read(
    node: &Node,
    container: &ContainerName,
    role: ContainerRole,
    device_ids: &[&str],
) -> Result<Grant, GrantError> {
    let share = |(gpu, taken)| Share {
        gpu,
        memory_bytes: None,
        cores: Some(Cores::of_slots(taken, node.slots_per_gpu)),
        ceiling: None,
        whole: false,
    };
    let shares: Vec<Share> = slots_taken(node, device_ids)?.into_iter().map(share).collect();
    if shares.is_empty() {
        let message = format!("container {} holds no device", quoted(container.as_str()));
        return Err(GrantError::new(VGPU, message));
    }
    Ok(Grant { container: container.clone(), init: role == ContainerRole::Init, shares })
}

/// Adds the MPS limits to the environment of the containers.
pub(super) fn write(placed: &[&PlacedGrant<'_>], written: &mut EncodedGrant) {
    for placed in placed {
        // One value applies to all GPUs of a process, so the smallest share is used.
        let Some(cores) = placed.shares.iter().filter_map(|on_gpu| on_gpu.share.cores).min() else {
            continue;
        };
        let percent = thread_percentage(cores).to_string();
        written.env_of(placed).insert("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE".into(), percent);
    }
}

/// Returns the whole percentage for MPS, rounded down so that all clients together do not exceed the GPU, and at least 1.
fn thread_percentage(cores: Cores) -> u32 {
    cores.as_whole_percent().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Bytes, Gpu};

    fn node(slots: u32) -> Node {
        let gpu = |uuid: &str, minor| Gpu {
            uuid: uuid.into(),
            minor,
            model: "Tesla V100".into(),
            memory_bytes: Bytes(16 << 30),
            numa: None,
            pci: None,
            withheld: None,
        };
        Node { slots_per_gpu: slots, ..Node::new("n1", vec![gpu("a", 0), gpu("b", 1)]) }
    }

    fn taken(ids: &[&str]) -> Vec<(String, u32)> {
        let taken = slots_taken(&node(10), ids).unwrap();
        taken.into_iter().map(|(uuid, slots)| (uuid.to_string(), slots)).collect()
    }

    #[test]
    fn a01_each_slot_of_each_gpu_is_a_device() {
        let ids: Vec<String> = device_ids(&node(10)).collect();
        assert_eq!(ids.len(), 20);
        assert_eq!((&*ids[0], &*ids[9], &*ids[10], &*ids[19]), ("a-0", "a-9", "b-0", "b-9"));
    }

    #[test]
    fn a04_one_slot_is_on_one_gpu() {
        assert_eq!(taken(&["a-3"]), [("a".into(), 1)]);
    }

    #[test]
    fn a05_two_slots_of_one_gpu_are_one_entry() {
        assert_eq!(taken(&["a-1", "a-7"]), [("a".into(), 2)]);
        assert_eq!(taken(&["a-1", "a-1"]), [("a".into(), 1)]);
    }

    #[test]
    fn a06_gpus_are_in_the_order_of_the_node() {
        assert_eq!(taken(&["a-1", "b-2"]), [("a".into(), 1), ("b".into(), 1)]);
        assert_eq!(taken(&["b-2", "a-1"]), taken(&["a-1", "b-2"]));
    }

    #[test]
    fn grant_of_running_container_is_decoded_from_device_ids() {
        let held = |ids: &[&str]| read(&node(48), &"main".into(), ContainerRole::App, ids);
        let grant = held(&["b-1", "a-0", "a-47"]).unwrap();
        let shares: Vec<_> = grant.shares.iter().map(|s| (s.gpu.as_str(), s.cores, s.memory_bytes)).collect();
        let slots = |taken| Some(Cores::of_slots(taken, 48));
        assert_eq!(shares, [("a", slots(2), None), ("b", slots(1), None)]);
        assert!(!grant.init && read(&node(10), &"main".into(), ContainerRole::Init, &["a-0"]).unwrap().init);
        assert!(held(&["a-48"]).is_err());
        assert_eq!(
            held(&[]).unwrap_err().to_string(),
            "k8s.amazonaws.com/vgpu: container \"main\" holds no device"
        );
    }

    #[test]
    fn a07_unknown_device_id_is_an_error() {
        for id in ["c-1", "a-10", "a", "a-", "a-x", ""] {
            let error = slots_taken(&node(10), &[id]).unwrap_err().to_string();
            assert_eq!(error, format!("k8s.amazonaws.com/vgpu: node n1 has no device \"{id}\""));
        }
    }

    #[test]
    fn a08_withheld_gpu_is_an_error_with_the_reason() {
        let mut node = node(10);
        node.gpus[1].withheld = Some("XID 79".into());
        let error = slots_taken(&node, &["b-1"]).unwrap_err().to_string();
        assert_eq!(error, "k8s.amazonaws.com/vgpu: device \"b-1\" is unavailable: XID 79");
        assert_eq!(device_ids(&node).count(), 10);
    }

    #[test]
    fn a09_uuid_ends_at_the_last_dash() {
        assert_eq!(gpu_of("GPU-12-34-5"), Some("GPU-12-34"));
        assert_eq!(gpu_of("plain"), None);
    }

    #[test]
    fn a13_containers_see_only_their_own_gpus() {
        assert_eq!(taken(&["a-0"]), [("a".into(), 1)]);
        assert_eq!(taken(&["b-0"]), [("b".into(), 1)]);
    }

    #[test]
    fn a14_thread_percentage_is_the_share_of_slots() {
        for (taken, slots, percent) in [(1, 10, 10), (3, 10, 30), (1, 48, 2), (48, 48, 100), (1, 1, 100)] {
            assert_eq!(thread_percentage(Cores::of_slots(taken, slots)), percent, "{taken}/{slots}");
        }
    }
}
