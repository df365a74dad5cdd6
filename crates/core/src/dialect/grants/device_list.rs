//! The device list of Volcano vGPU and HAMi: `<uuid>,NVIDIA,<memory>,<cores>:` per device, `;` between containers.
//!
//! Decoding is as lenient as in the tools that read these lists: invalid entries are skipped and reported.

use super::quoted;
use crate::model::GpuUuid;

/// The device type in every encoded entry.
pub const NVIDIA: &str = "NVIDIA";

/// One entry of a device list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceEntry {
    /// The UUID of the GPU.
    pub gpu: GpuUuid,
    /// The MIG instance, if the entry names one.
    pub mig: Option<MigSlot>,
    /// The device type, as a vendor name.
    pub kind: String,
    /// Memory in units of the cluster.
    pub memory: u32,
    /// Compute in percent; 0 means no guarantee, 100 means an exclusive GPU.
    pub cores: u32,
}

/// A MIG instance, identified by its position in a group of equal instances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigSlot {
    /// The name of the group.
    pub group: String,
    /// The position in the group.
    pub position: u32,
}

/// A decoded device list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceList {
    /// The devices of each container; empty if the entries of a container were erased.
    pub containers: Vec<Vec<DeviceEntry>>,
    /// Invalid entries, truncated for messages.
    pub skipped: Vec<String>,
}

/// Encodes a device list.
pub fn encode(containers: &[Vec<DeviceEntry>]) -> String {
    let container = |devices: &Vec<DeviceEntry>| devices.iter().map(encode_entry).collect::<String>();
    containers.iter().map(container).collect::<Vec<_>>().join(";")
}

/// Decodes a device list.
pub fn decode(text: &str) -> DeviceList {
    let mut list = DeviceList::default();
    if text.is_empty() {
        return list;
    }
    for container in text.split(';') {
        let mut devices = Vec::new();
        for entry in container.split(':').filter(|entry| !entry.trim().is_empty()) {
            match decode_entry(entry) {
                Some(device) => devices.push(device),
                None => list.skipped.push(quoted(entry)),
            }
        }
        list.containers.push(devices);
    }
    list
}

/// Erases the entries of the first container that still has any. A node does this for one container after the other.
pub fn erase_first(text: &str) -> String {
    let mut containers: Vec<&str> = text.split(';').collect();
    if let Some(first) = containers.iter_mut().find(|container| !container.is_empty()) {
        *first = "";
    }
    containers.join(";")
}

/// Returns whether the entries of all containers were erased.
pub fn is_erased(text: &str) -> bool {
    text.split(';').all(str::is_empty)
}

fn encode_entry(device: &DeviceEntry) -> String {
    let DeviceEntry { gpu, mig, kind, memory, cores } = device;
    let mig = mig.as_ref().map(|MigSlot { group, position }| format!("[{group}-{position}]"));
    format!("{gpu}{},{kind},{memory},{cores}:", mig.unwrap_or_default())
}

fn decode_entry(entry: &str) -> Option<DeviceEntry> {
    let mut fields = entry.split(',').map(str::trim);
    let (id, kind, memory, cores) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let (uuid, mig) = split_mig(id)?;
    if uuid.is_empty() {
        return None;
    }
    let (memory, cores) = (memory.parse().ok()?, cores.parse().ok()?);
    Some(DeviceEntry { gpu: uuid.into(), mig, kind: kind.into(), memory, cores })
}

/// Splits `<uuid>[<group>-<position>]`. Group names may contain hyphens, so the last one separates.
fn split_mig(id: &str) -> Option<(&str, Option<MigSlot>)> {
    let Some((uuid, slot)) = id.split_once('[') else { return Some((id, None)) };
    let (group, position) = slot.strip_suffix(']')?.rsplit_once('-')?;
    Some((uuid, Some(MigSlot { group: group.into(), position: position.parse().ok()? })))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(gpu: &str, memory: u32, cores: u32) -> DeviceEntry {
        DeviceEntry { gpu: gpu.into(), mig: None, kind: NVIDIA.into(), memory, cores }
    }

    #[test]
    fn c10_single_device_is_decoded() {
        let list = decode("GPU-0,NVIDIA,4096,30:");
        assert_eq!(list.containers, [[plain("GPU-0", 4096, 30)]]);
        assert!(list.skipped.is_empty());
    }

    #[test]
    fn c11_c12_c13_c14_invalid_entries_are_skipped() {
        for bad in ["GPU-0,NVIDIA,-5,30:", "GPU-0,NVIDIA,4096,-1:", "GPU-0,NVIDIA,abc,30:", "GPU-0,NVIDIA:"] {
            let list = decode(bad);
            assert_eq!((list.containers, list.skipped.len()), (vec![vec![]], 1), "{bad}");
        }
        assert_eq!(decode("GPU-0,NVIDIA,4294967296,0:").skipped, ["\"GPU-0,NVIDIA,4294967296,0\""]);
    }

    #[test]
    fn c15_valid_entry_beside_an_invalid_one_is_kept() {
        let list = decode("abc:GPU-1,NVIDIA,100,0:");
        assert_eq!(list.containers, [[plain("GPU-1", 100, 0)]]);
        assert_eq!(list.skipped, ["\"abc\""]);
    }

    #[test]
    fn c17_two_containers_round_trip() {
        let containers =
            [vec![plain("GPU-a", 3000, 50), plain("GPU-b", 3000, 50)], vec![plain("GPU-a", 1000, 0)]];
        let text = encode(&containers);
        assert_eq!(text, "GPU-a,NVIDIA,3000,50:GPU-b,NVIDIA,3000,50:;GPU-a,NVIDIA,1000,0:");
        assert_eq!(decode(&text).containers, containers);
    }

    #[test]
    fn c18_containers_are_erased_one_by_one() {
        let text = "GPU-a,NVIDIA,3000,50:GPU-b,NVIDIA,3000,50:;GPU-a,NVIDIA,1000,0:";
        let once = erase_first(text);
        assert_eq!(once, ";GPU-a,NVIDIA,1000,0:");
        assert_eq!(decode(&once).containers, [vec![], vec![plain("GPU-a", 1000, 0)]]);
        assert!(!is_erased(&once));
        let twice = erase_first(&once);
        assert_eq!(twice, ";");
        assert!(is_erased(&twice) && is_erased(""));
        assert_eq!(erase_first("GPU-a,NVIDIA,1,0:"), "");
    }

    #[test]
    fn c19_mig_instances_are_recognized() {
        let slot = |group: &str, position| Some(MigSlot { group: group.into(), position });
        for (id, mig) in
            [("gpu-1234[default-0]", slot("default", 0)), ("gpu-1234[group-2-3]", slot("group-2", 3))]
        {
            let text = format!("{id},NVIDIA,10240,0:");
            let device = decode(&text).containers[0][0].clone();
            assert_eq!((device.gpu.as_str(), device.mig.clone()), ("gpu-1234", mig));
            assert_eq!(encode(&[vec![device]]), text);
        }
        assert_eq!(decode("gpu-1[default,NVIDIA,1,0:gpu-1[0],NVIDIA,1,0:").skipped.len(), 2);
    }
}
