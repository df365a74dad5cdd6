//! The device list of Volcano vGPU and HAMi: `<uuid>,NVIDIA,<memory>,<cores>:` per device, `;` between containers.
//!
//! Decoding is as lenient as the tools that read these lists: an entry that is none is skipped, and reported.

use super::quoted;
use crate::model::GpuUuid;

/// The device type of every entry written.
pub const NVIDIA: &str = "NVIDIA";

/// One entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The MIG instance of it, where the entry names one.
    pub mig: Option<MigSlot>,
    /// The device type.
    pub kind: String,
    /// Memory in the cluster's units.
    pub memory: u32,
    /// Compute in percent; 0 = nothing promised, 100 = nobody else.
    pub cores: u32,
}

/// A MIG instance: a position in a group of equal ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigSlot {
    /// The group.
    pub group: String,
    /// The position in it.
    pub position: u32,
}

/// A decoded list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceList {
    /// The devices per container. Empty where the entries of a container were erased.
    pub containers: Vec<Vec<Device>>,
    /// Entries that are none, cut short for messages.
    pub skipped: Vec<String>,
}

/// Writes a list.
pub fn encode(containers: &[Vec<Device>]) -> String {
    let container = |devices: &Vec<Device>| devices.iter().map(entry).collect::<String>();
    containers.iter().map(container).collect::<Vec<_>>().join(";")
}

/// Reads a list.
pub fn decode(text: &str) -> DeviceList {
    let mut list = DeviceList::default();
    if text.is_empty() {
        return list;
    }
    for container in text.split(';') {
        let mut devices = Vec::new();
        for entry in container.split(':').filter(|entry| !entry.trim().is_empty()) {
            match device(entry) {
                Some(device) => devices.push(device),
                None => list.skipped.push(quoted(entry)),
            }
        }
        list.containers.push(devices);
    }
    list
}

/// The list without the entries of the first container that still has any, as a node erases it container by
/// container.
pub fn erase_first(text: &str) -> String {
    let mut containers: Vec<&str> = text.split(';').collect();
    if let Some(first) = containers.iter_mut().find(|container| !container.is_empty()) {
        *first = "";
    }
    containers.join(";")
}

/// Whether every container's entries were erased.
pub fn is_erased(text: &str) -> bool {
    text.split(';').all(str::is_empty)
}

fn entry(device: &Device) -> String {
    let Device { gpu, mig, kind, memory, cores } = device;
    let mig = mig.as_ref().map(|MigSlot { group, position }| format!("[{group}-{position}]"));
    format!("{gpu}{},{kind},{memory},{cores}:", mig.unwrap_or_default())
}

fn device(entry: &str) -> Option<Device> {
    let mut fields = entry.split(',').map(str::trim);
    let (id, kind, memory, cores) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let (uuid, mig) = mig(id)?;
    if uuid.is_empty() {
        return None;
    }
    let (memory, cores) = (memory.parse().ok()?, cores.parse().ok()?);
    Some(Device { gpu: uuid.into(), mig, kind: kind.into(), memory, cores })
}

/// Splits `<uuid>[<group>-<position>]`. A group may have hyphens of its own, so the last one separates.
fn mig(id: &str) -> Option<(&str, Option<MigSlot>)> {
    let Some((uuid, slot)) = id.split_once('[') else { return Some((id, None)) };
    let (group, position) = slot.strip_suffix(']')?.rsplit_once('-')?;
    Some((uuid, Some(MigSlot { group: group.into(), position: position.parse().ok()? })))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(gpu: &str, memory: u32, cores: u32) -> Device {
        Device { gpu: gpu.into(), mig: None, kind: NVIDIA.into(), memory, cores }
    }

    #[test]
    fn c10_one_device() {
        let list = decode("GPU-0,NVIDIA,4096,30:");
        assert_eq!(list.containers, [[plain("GPU-0", 4096, 30)]]);
        assert!(list.skipped.is_empty());
    }

    #[test]
    fn c11_c12_c13_c14_an_entry_that_is_none_is_skipped() {
        for bad in ["GPU-0,NVIDIA,-5,30:", "GPU-0,NVIDIA,4096,-1:", "GPU-0,NVIDIA,abc,30:", "GPU-0,NVIDIA:"] {
            let list = decode(bad);
            assert_eq!((list.containers, list.skipped.len()), (vec![vec![]], 1), "{bad}");
        }
        assert_eq!(decode("GPU-0,NVIDIA,4294967296,0:").skipped, ["\"GPU-0,NVIDIA,4294967296,0\""]);
    }

    #[test]
    fn c15_a_good_entry_beside_a_bad_one_is_kept() {
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
    fn c19_mig_instances_are_recognised() {
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
