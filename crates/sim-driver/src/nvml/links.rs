//! NVLinks: what they lead to, and that they are sound. A link that leads nowhere is inactive and says no more of
//! itself; one that the card does not have is not supported.

use super::call::{Answer, Gpu, answer, gpu, owned};
use super::*;
use crate::node::LinkEnd;

/// What an NVSwitch says it is.
const SWITCH: (u32, u32) = (0x1AF1_10DE, 0);

fn link_of(device: nvmlDevice_t, link: u32) -> Result<(Gpu, LinkEnd), NvmlError> {
    let gpu = gpu(device)?;
    if link >= NVML_NVLINK_MAX_LINKS {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    let end = gpu.card().gpu.links.get(link as usize).ok_or(NvmlError::NOT_SUPPORTED)?;
    Ok((gpu, *end))
}

/// Whether the card has a link, wherever it leads.
pub(super) fn has_link(gpu: Gpu, link: u32) -> Result<(), NvmlError> {
    let links = gpu.profile().nvlink.as_ref().map_or(0, |nvlink| nvlink.links);
    if link < links { Ok(()) } else { Err(NvmlError::NOT_SUPPORTED) }
}

/// What is at the other end.
fn remote(gpu: Gpu, end: LinkEnd) -> nvmlPciInfo_t {
    match end {
        LinkEnd::Gpu { gpu: other, .. } => identity::pci_info(&gpu.session.cards[other]),
        LinkEnd::Switch(address) => identity::place(address, SWITCH.0, SWITCH.1),
    }
}

impl Links for Library {
    unsafe fn nvmlDeviceGetNvLinkState(
        device: nvmlDevice_t,
        link: u32,
        is_active: *mut nvmlEnableState_t,
    ) -> Answer {
        let active = match link_of(device, link) {
            Ok(_) => NVML_FEATURE_ENABLED,
            Err(NvmlError::NOT_SUPPORTED) => {
                has_link(gpu(device)?, link)?;
                NVML_FEATURE_DISABLED
            }
            Err(error) => return Err(error),
        };
        answer!(is_active => active)
    }

    unsafe fn nvmlDeviceGetNvLinkVersion(device: nvmlDevice_t, link: u32, version: *mut u32) -> Answer {
        let (gpu, _) = link_of(device, link)?;
        answer!(version => gpu.profile().nvlink.as_ref().map_or(0, |nvlink| nvlink.version))
    }

    unsafe fn nvmlDeviceGetNvLinkCapability(
        device: nvmlDevice_t,
        link: u32,
        capability: nvmlNvLinkCapability_t,
        cap_result: *mut u32,
    ) -> Answer {
        link_of(device, link)?;
        let has = match capability {
            NVML_NVLINK_CAP_P2P_SUPPORTED | NVML_NVLINK_CAP_P2P_ATOMICS | NVML_NVLINK_CAP_VALID => 1,
            // What the link could do, whatever is at its other end.
            NVML_NVLINK_CAP_SYSMEM_ACCESS | NVML_NVLINK_CAP_SYSMEM_ATOMICS => 1,
            NVML_NVLINK_CAP_SLI_BRIDGE => 0,
            _ => return Err(NvmlError::INVALID_ARGUMENT),
        };
        answer!(cap_result => has)
    }

    unsafe fn nvmlDeviceGetNvLinkRemotePciInfo(
        device: nvmlDevice_t,
        link: u32,
        pci: *mut nvmlPciInfo_v2_t,
    ) -> Answer {
        let (gpu, end) = link_of(device, link)?;
        answer!(pci => identity::older(remote(gpu, end)))
    }

    unsafe fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
        device: nvmlDevice_t,
        link: u32,
        pci: *mut nvmlPciInfo_t,
    ) -> Answer {
        let (gpu, end) = link_of(device, link)?;
        answer!(pci => remote(gpu, end))
    }

    unsafe fn nvmlDeviceGetNvLinkRemoteDeviceType(
        device: nvmlDevice_t,
        link: u32,
        nv_link_device_type: *mut nvmlIntNvLinkDeviceType_t,
    ) -> Answer {
        let (_, end) = link_of(device, link)?;
        answer!(nv_link_device_type => match end {
            LinkEnd::Gpu { .. } => NVML_NVLINK_DEVICE_TYPE_GPU,
            LinkEnd::Switch(_) => NVML_NVLINK_DEVICE_TYPE_SWITCH,
        })
    }

    unsafe fn nvmlDeviceGetNvLinkErrorCounter(
        device: nvmlDevice_t,
        link: u32,
        counter: nvmlNvLinkErrorCounter_t,
        counter_value: *mut u64,
    ) -> Answer {
        link_of(device, link)?;
        if counter >= NVML_NVLINK_ERROR_COUNT {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        answer!(counter_value => 0)
    }

    unsafe fn nvmlDeviceResetNvLinkErrorCounters(device: nvmlDevice_t, link: u32) -> Answer {
        owned(device)?;
        link_of(device, link).map(|_| ())
    }
}
