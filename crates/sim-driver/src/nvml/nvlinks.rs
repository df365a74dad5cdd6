//! NVLinks: their remote ends and their state. An unconnected link is inactive and supports no other query; a link
//! that the card does not have is not supported.

use super::arguments::{NvmlResult, VisibleGpu, gpu, gpu_as_root, write_out};
use super::*;
use crate::node::NvLinkEnd;

/// PCI device id and subsystem id of an NVSwitch.
const NVSWITCH_PCI_ID: (u32, u32) = (0x1AF1_10DE, 0);

fn link_of(device: nvmlDevice_t, link: u32) -> Result<(VisibleGpu, NvLinkEnd), NvmlError> {
    let gpu = gpu(device)?;
    if link >= NVML_NVLINK_MAX_LINKS {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    let end = gpu.card().gpu.links.get(link as usize).ok_or(NvmlError::NOT_SUPPORTED)?;
    Ok((gpu, *end))
}

/// Checks that the card has the link, connected or not.
pub(super) fn check_link_exists(gpu: VisibleGpu, link: u32) -> Result<(), NvmlError> {
    let links = gpu.profile().nvlink.as_ref().map_or(0, |nvlink| nvlink.links);
    if link < links { Ok(()) } else { Err(NvmlError::NOT_SUPPORTED) }
}

/// Returns the PCI information of the remote end.
fn remote_pci_info(gpu: VisibleGpu, end: NvLinkEnd) -> nvmlPciInfo_t {
    match end {
        NvLinkEnd::Gpu { gpu: other, .. } => identity::pci_info(&gpu.session.cards[other]),
        NvLinkEnd::Switch(address) => identity::pci_info_at(address, NVSWITCH_PCI_ID.0, NVSWITCH_PCI_ID.1),
    }
}

impl NvmlLinks for Library {
    unsafe fn nvmlDeviceGetNvLinkState(
        device: nvmlDevice_t,
        link: u32,
        is_active: *mut nvmlEnableState_t,
    ) -> NvmlResult {
        let active = match link_of(device, link) {
            Ok(_) => NVML_FEATURE_ENABLED,
            Err(NvmlError::NOT_SUPPORTED) => {
                check_link_exists(gpu(device)?, link)?;
                NVML_FEATURE_DISABLED
            }
            Err(error) => return Err(error),
        };
        write_out!(is_active => active)
    }

    unsafe fn nvmlDeviceGetNvLinkVersion(device: nvmlDevice_t, link: u32, version: *mut u32) -> NvmlResult {
        let (gpu, _) = link_of(device, link)?;
        write_out!(version => gpu.profile().nvlink.as_ref().map_or(0, |nvlink| nvlink.version))
    }

    unsafe fn nvmlDeviceGetNvLinkCapability(
        device: nvmlDevice_t,
        link: u32,
        capability: nvmlNvLinkCapability_t,
        cap_result: *mut u32,
    ) -> NvmlResult {
        link_of(device, link)?;
        let has = match capability {
            NVML_NVLINK_CAP_P2P_SUPPORTED | NVML_NVLINK_CAP_P2P_ATOMICS | NVML_NVLINK_CAP_VALID => 1,
            // Capabilities of the link itself, whatever is connected.
            NVML_NVLINK_CAP_SYSMEM_ACCESS | NVML_NVLINK_CAP_SYSMEM_ATOMICS => 1,
            NVML_NVLINK_CAP_SLI_BRIDGE => 0,
            _ => return Err(NvmlError::INVALID_ARGUMENT),
        };
        write_out!(cap_result => has)
    }

    unsafe fn nvmlDeviceGetNvLinkRemotePciInfo(
        device: nvmlDevice_t,
        link: u32,
        pci: *mut nvmlPciInfo_v2_t,
    ) -> NvmlResult {
        let (gpu, end) = link_of(device, link)?;
        write_out!(pci => identity::legacy_pci_info(remote_pci_info(gpu, end)))
    }

    unsafe fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
        device: nvmlDevice_t,
        link: u32,
        pci: *mut nvmlPciInfo_t,
    ) -> NvmlResult {
        let (gpu, end) = link_of(device, link)?;
        write_out!(pci => remote_pci_info(gpu, end))
    }

    unsafe fn nvmlDeviceGetNvLinkRemoteDeviceType(
        device: nvmlDevice_t,
        link: u32,
        nv_link_device_type: *mut nvmlIntNvLinkDeviceType_t,
    ) -> NvmlResult {
        let (_, end) = link_of(device, link)?;
        write_out!(nv_link_device_type => match end {
            NvLinkEnd::Gpu { .. } => NVML_NVLINK_DEVICE_TYPE_GPU,
            NvLinkEnd::Switch(_) => NVML_NVLINK_DEVICE_TYPE_SWITCH,
        })
    }

    unsafe fn nvmlDeviceGetNvLinkErrorCounter(
        device: nvmlDevice_t,
        link: u32,
        counter: nvmlNvLinkErrorCounter_t,
        counter_value: *mut u64,
    ) -> NvmlResult {
        link_of(device, link)?;
        if counter >= NVML_NVLINK_ERROR_COUNT {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        write_out!(counter_value => 0)
    }

    unsafe fn nvmlDeviceResetNvLinkErrorCounters(device: nvmlDevice_t, link: u32) -> NvmlResult {
        gpu_as_root(device)?;
        link_of(device, link).map(|_| ())
    }
}
