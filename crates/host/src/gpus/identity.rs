//! The identity of a GPU and its links to others, which do not change while the driver is loaded.

use nvml_wrapper::enum_wrappers::device::{P2pCapabilitiesIndex, P2pStatus, TopologyLevel};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use partage_core::model::{Bytes, Gpu, GpuLink, GpuUuid};
use std::fs;

/// Returns why a GPU in MIG mode is withheld.
pub(super) fn split(uuid: &GpuUuid) -> String {
    format!(
        "MIG mode is enabled, and MIG instances cannot be shared further: disable it (sudo nvidia-smi -i {uuid} -mig 0)"
    )
}

/// NVML's affinity scope for the nearest NUMA node, as opposed to the whole socket.
const NUMA_NODE_SCOPE: u32 = 0;
/// The number of words of a set of NUMA nodes: Linux supports up to 1,024.
const NUMA_SET_WORDS: usize = 1024 / std::ffi::c_ulong::BITS as usize;

/// The properties of a GPU that do not change.
#[derive(Debug)]
pub(super) struct GpuIdentity {
    pub(super) gpu: Gpu,
}

impl GpuIdentity {
    pub(super) fn of(device: &Device<'_>) -> Result<Self, NvmlError> {
        let pci = device.pci_info()?.bus_id;
        let gpu = Gpu {
            uuid: device.uuid()?.into(),
            minor: device.minor_number().or_else(|error| match error {
                // WSL has one device file for all GPUs.
                NvmlError::NotSupported => device.index(),
                other => Err(other),
            })?,
            model: device.name()?,
            memory_bytes: memory(device)?,
            numa: numa(device).or_else(|| numa_of(&pci)),
            pci: Some(pci),
            withheld: None,
        };
        Ok(Self { gpu })
    }
}

/// Returns the memory that programs can allocate, without what the driver reserves. Shares can use all of it.
fn memory(device: &Device<'_>) -> Result<Bytes, NvmlError> {
    let memory = device.memory_info()?;
    Ok(Bytes(memory.total.saturating_sub(memory.reserved)))
}

/// Returns the NUMA node of a GPU from the driver.
fn numa(device: &Device<'_>) -> Option<u32> {
    first_of(&device.memory_affinity(NUMA_SET_WORDS, NUMA_NODE_SCOPE).ok()?)
}

/// Returns the first member of a bit set.
fn first_of(set: &[std::ffi::c_ulong]) -> Option<u32> {
    let word = set.iter().position(|word| *word != 0)?;
    Some(word as u32 * std::ffi::c_ulong::BITS + set[word].trailing_zeros())
}

/// Returns the NUMA node of a PCI device from the kernel, for drivers that do not report it.
fn numa_of(pci: &str) -> Option<u32> {
    // NVML writes the domain with eight digits, the kernel with four.
    let address = pci.to_ascii_lowercase();
    let address = address.strip_prefix("0000").filter(|rest| rest.len() >= 12).unwrap_or(&address);
    let text = fs::read_to_string(format!("/sys/bus/pci/devices/{address}/numa_node")).ok()?;
    // A machine without NUMA has -1.
    text.trim().parse().ok()
}

/// Returns whether a GPU is in MIG mode; `None` if it does not respond. GPUs and drivers without MIG are not.
pub(super) fn is_split(device: &Device<'_>) -> Option<bool> {
    match device.mig_mode() {
        Ok(mode) => Some(mode.current == 1),
        Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound) => {
            Some(false)
        }
        Err(_) => None,
    }
}

/// Returns the best link between two GPUs; `None` if the driver does not report it.
pub(super) fn link(nvml: &Nvml, a: u32, b: u32) -> Option<GpuLink> {
    let (from, to) = (nvml.device_by_index(a).ok()?, nvml.device_by_index(b).ok()?);
    if matches!(from.p2p_status(&to, P2pCapabilitiesIndex::NvLink), Ok(P2pStatus::Ok)) {
        return Some(GpuLink::NvLink);
    }
    Some(match from.topology_common_ancestor(to).ok()? {
        TopologyLevel::Internal | TopologyLevel::Single => GpuLink::Pix,
        TopologyLevel::Multiple => GpuLink::Pxb,
        TopologyLevel::HostBridge => GpuLink::Phb,
        TopologyLevel::Node => GpuLink::Node,
        TopologyLevel::System => GpuLink::System,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_member_of_a_set_is_found_in_any_word() {
        assert_eq!(first_of(&[0b100, 1]), Some(2));
        assert_eq!(first_of(&[0, 0b1000]), Some(67));
        assert_eq!((first_of(&[]), first_of(&[0, 0])), (None, None));
    }

    #[test]
    fn unknown_pci_address_has_no_numa_node() {
        assert_eq!(numa_of("00000000:FE:1F.7"), None);
        assert_eq!(numa_of(""), None);
    }
}
