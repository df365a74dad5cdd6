//! AWS virtual GPU: slots of a GPU under MPS.
//!
//! This system keeps no record in the API server. Which slots a pod holds is known to the kubelet alone, as
//! device IDs `<GPU UUID>-<slot>`: they are what a node reads to take over its running pods.

use super::{GrantError, Placed, Written, quoted};
use crate::dialect::asks::aws::VGPU;
use crate::model::{ContainerName, ContainerRole, Cores, GpuUuid, Grant, Node, Share};
use std::collections::BTreeSet;

/// Every device ID of a node: all slots of the first GPU, then of the next. GPUs that are not offered have none.
pub fn device_ids(node: &Node) -> impl Iterator<Item = String> {
    let offered = node.gpus.iter().filter(|gpu| gpu.withheld.is_none());
    offered.flat_map(|gpu| (0..node.slots_per_gpu).map(move |slot| format!("{}-{slot}", gpu.uuid)))
}

/// The UUID in a device ID: everything before the last dash, because UUIDs have dashes of their own.
pub fn gpu_of(device_id: &str) -> Option<&str> {
    device_id.rsplit_once('-').map(|(uuid, _)| uuid)
}

/// The slots that one container's device IDs take of each GPU, each GPU once, in the order of the node: the
/// kubelet's own order is random.
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
            let message = format!("device {} is not offered: {reason}", quoted(id));
            return Err(GrantError::new(VGPU, message));
        }
        // A slot named twice is one slot.
        taken[index].insert(slot);
    }
    let counted = node.gpus.iter().zip(taken).filter(|(_, slots)| !slots.is_empty());
    // A slot is below the slots per GPU, so their number fits what holds those.
    Ok(counted.map(|(gpu, slots)| (gpu.uuid.clone(), slots.len() as u32)).collect())
}

/// The grant of a running container, from the device IDs that the kubelet reports for it: this system's only
/// record. It limits no memory.
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

pub(super) fn write(placed: &[&Placed<'_>], written: &mut Written) {
    for placed in placed {
        // One value holds for all GPUs of a process, so the smallest share decides.
        let Some(cores) = placed.parts.iter().filter_map(|part| part.share.cores).min() else { continue };
        let percent = thread_percentage(cores).to_string();
        written.env_of(placed).insert("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE".into(), percent);
    }
}

/// Whole percents for MPS, rounded down so that all clients together stay within the GPU, but never none.
fn thread_percentage(cores: Cores) -> u32 {
    (cores.as_millipercent() / 1000).max(1)
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
    fn a01_every_slot_of_every_gpu_is_a_device() {
        let ids: Vec<String> = device_ids(&node(10)).collect();
        assert_eq!(ids.len(), 20);
        assert_eq!((&*ids[0], &*ids[9], &*ids[10], &*ids[19]), ("a-0", "a-9", "b-0", "b-9"));
    }

    #[test]
    fn a04_one_slot_is_one_gpu() {
        assert_eq!(taken(&["a-3"]), [("a".into(), 1)]);
    }

    #[test]
    fn a05_two_slots_of_one_gpu_show_it_once() {
        assert_eq!(taken(&["a-1", "a-7"]), [("a".into(), 2)]);
        assert_eq!(taken(&["a-1", "a-1"]), [("a".into(), 1)]);
    }

    #[test]
    fn a06_two_gpus_come_in_the_order_of_the_node() {
        assert_eq!(taken(&["a-1", "b-2"]), [("a".into(), 1), ("b".into(), 1)]);
        assert_eq!(taken(&["b-2", "a-1"]), taken(&["a-1", "b-2"]));
    }

    #[test]
    fn a_running_containers_grant_is_read_from_its_devices() {
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
    fn a07_an_unknown_id_is_named() {
        for id in ["c-1", "a-10", "a", "a-", "a-x", ""] {
            let error = slots_taken(&node(10), &[id]).unwrap_err().to_string();
            assert_eq!(error, format!("k8s.amazonaws.com/vgpu: node n1 has no device \"{id}\""));
        }
    }

    #[test]
    fn a08_a_gpu_not_offered_says_why() {
        let mut node = node(10);
        node.gpus[1].withheld = Some("XID 79".into());
        let error = slots_taken(&node, &["b-1"]).unwrap_err().to_string();
        assert_eq!(error, "k8s.amazonaws.com/vgpu: device \"b-1\" is not offered: XID 79");
        assert_eq!(device_ids(&node).count(), 10);
    }

    #[test]
    fn a09_the_last_dash_ends_the_uuid() {
        assert_eq!(gpu_of("GPU-12-34-5"), Some("GPU-12-34"));
        assert_eq!(gpu_of("plain"), None);
    }

    #[test]
    fn a13_containers_do_not_see_each_others_gpus() {
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
