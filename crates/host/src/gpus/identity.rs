//! What a GPU is and how it is linked to others: what does not change while the driver is loaded.

use nvml_wrapper::enum_wrappers::device::{P2pCapabilitiesIndex, P2pStatus, TopologyLevel};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use partage_core::model::{Bytes, Gpu, GpuUuid, Link};
use std::fs;

/// Why a GPU in MIG mode is not offered.
pub(super) fn split(uuid: &GpuUuid) -> String {
    format!(
        "MIG mode is enabled, and its parts are not shared further: disable it (sudo nvidia-smi -i {uuid} -mig 0)"
    )
}

/// NVML's number for the NUMA node that is nearest, not all of its socket.
const NODE_SCOPE: u32 = 0;
/// Words of a set of NUMA nodes: 1,024 are the most that Linux has.
const NODE_WORDS: usize = 1024 / std::ffi::c_ulong::BITS as usize;

/// A GPU, without what changes.
#[derive(Debug)]
pub(super) struct Identity {
    pub(super) gpu: Gpu,
}

impl Identity {
    pub(super) fn of(device: &Device<'_>) -> Result<Self, NvmlError> {
        let pci = device.pci_info()?.bus_id;
        let gpu = Gpu {
            uuid: device.uuid()?.into(),
            minor: device.minor_number().or_else(|error| match error {
                // Windows' Linux has one device file for all.
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

/// What programs can have: without what the driver keeps for itself. Shares that fill a GPU to the last byte get it.
fn memory(device: &Device<'_>) -> Result<Bytes, NvmlError> {
    let memory = device.memory_info()?;
    Ok(Bytes(memory.total.saturating_sub(memory.reserved)))
}

/// The NUMA node that a GPU hangs on, as the driver has it.
fn numa(device: &Device<'_>) -> Option<u32> {
    first_of(&device.memory_affinity(NODE_WORDS, NODE_SCOPE).ok()?)
}

/// The first number of a set.
fn first_of(set: &[std::ffi::c_ulong]) -> Option<u32> {
    let word = set.iter().position(|word| *word != 0)?;
    Some(word as u32 * std::ffi::c_ulong::BITS + set[word].trailing_zeros())
}

/// The same, as the kernel has it: some drivers do not tell.
fn numa_of(pci: &str) -> Option<u32> {
    // NVML writes the domain with eight digits, the kernel with four.
    let address = pci.to_ascii_lowercase();
    let address = address.strip_prefix("0000").filter(|rest| rest.len() >= 12).unwrap_or(&address);
    let text = fs::read_to_string(format!("/sys/bus/pci/devices/{address}/numa_node")).ok()?;
    // A machine without NUMA says -1.
    text.trim().parse().ok()
}

/// Whether a GPU is in MIG mode. Cards and drivers that have none say so; `None` where it does not answer.
pub(super) fn is_split(device: &Device<'_>) -> Option<bool> {
    match device.mig_mode() {
        Ok(mode) => Some(mode.current == 1),
        Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound) => {
            Some(false)
        }
        Err(_) => None,
    }
}

/// The best link between two GPUs; `None` where the driver does not tell.
pub(super) fn link(nvml: &Nvml, a: u32, b: u32) -> Option<Link> {
    let (from, to) = (nvml.device_by_index(a).ok()?, nvml.device_by_index(b).ok()?);
    if matches!(from.p2p_status(&to, P2pCapabilitiesIndex::NvLink), Ok(P2pStatus::Ok)) {
        return Some(Link::NvLink);
    }
    Some(match from.topology_common_ancestor(to).ok()? {
        TopologyLevel::Internal | TopologyLevel::Single => Link::Pix,
        TopologyLevel::Multiple => Link::Pxb,
        TopologyLevel::HostBridge => Link::Phb,
        TopologyLevel::Node => Link::Node,
        TopologyLevel::System => Link::System,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_a_set_is_found_in_any_word() {
        assert_eq!(first_of(&[0b100, 1]), Some(2));
        assert_eq!(first_of(&[0, 0b1000]), Some(67));
        assert_eq!((first_of(&[]), first_of(&[0, 0])), (None, None));
    }

    #[test]
    fn a_place_that_the_kernel_does_not_have_has_no_node() {
        assert_eq!(numa_of("00000000:FE:1F.7"), None);
        assert_eq!(numa_of(""), None);
    }
}
