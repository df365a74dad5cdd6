//! Which GPUs there are: handles, names, identities, places.
//!
//! A GPU that is off the bus is still counted, and what the library knows without asking the card (its index,
//! its minor number, its PCI address) is still told to those who have its handle. A new handle is refused,
//! with `GPU_IS_LOST`. One whose device file the program could not open is not counted, not listed and not found.

use super::call::{Answer, Gpu, answer, answer_list, answer_text, gpu, handle, known, letters, passed};
use super::session::{Card, session};
use super::topology;
use super::*;
use crate::node::PciAddress;
use crate::profile::Architecture;
use std::ffi::CStr;

/// Ends a search for a GPU.
fn found(gpu: Gpu, device: *mut nvmlDevice_t) -> Answer {
    if device.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    if gpu.is_lost() {
        return Err(NvmlError::GPU_IS_LOST);
    }
    answer!(device => handle(gpu.index))
}

fn by_index(index: u32, device: *mut nvmlDevice_t) -> Answer {
    let session = session()?;
    let index = *session.shown.get(index as usize).ok_or(NvmlError::INVALID_ARGUMENT)?;
    found(Gpu { session, index }, device)
}

/// A text the program passed.
fn given(text: *const c_char) -> Result<String, NvmlError> {
    session()?;
    if text.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    // SAFETY: not null, so it is a text.
    Ok(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

fn by_text(text: &str, of: impl Fn(&Card) -> &str, device: *mut nvmlDevice_t) -> Answer {
    let session = session()?;
    let index = session.find(|card| of(card).eq_ignore_ascii_case(text))?;
    found(Gpu { session, index }, device)
}

/// A place on the PCI bus, of whatever is there.
pub(super) fn place(pci: PciAddress, device: u32, subsystem: u32) -> nvmlPciInfo_t {
    let legacy = format!("{:04X}:{:02X}:{:02X}.0", pci.domain, pci.bus, pci.device);
    nvmlPciInfo_t {
        busIdLegacy: letters(&legacy),
        domain: pci.domain,
        bus: u32::from(pci.bus),
        device: u32::from(pci.device),
        pciDeviceId: device,
        pciSubSystemId: subsystem,
        busId: letters(&pci.to_string()),
    }
}

pub(super) fn pci_info(card: &Card) -> nvmlPciInfo_t {
    place(card.gpu.pci, card.profile.pci.device, card.profile.pci.subsystem)
}

/// The same as it was written before domains had eight digits.
pub(super) fn older(info: nvmlPciInfo_t) -> nvmlPciInfo_v2_t {
    nvmlPciInfo_v2_t {
        busId: info.busIdLegacy,
        domain: info.domain,
        bus: info.bus,
        device: info.device,
        pciDeviceId: info.pciDeviceId,
        pciSubSystemId: info.pciSubSystemId,
        ..Default::default()
    }
}

/// The processors next to a GPU.
fn cpus(gpu: Gpu) -> impl Iterator<Item = usize> {
    gpu.card().gpu.cpus.iter().map(|cpu| cpu as usize)
}

fn put_set(size: u32, to: *mut c_ulong, numbers: impl Iterator<Item = usize>) -> Answer {
    if size == 0 || to.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    let mut size = size;
    answer_list!(&raw mut size, to, topology::set(size, numbers))
}

/// Lists that say their length when asked with no room at all.
fn put_devices(count: *mut u32, to: *mut nvmlDevice_t, list: &[nvmlDevice_t]) -> Answer {
    let room = passed!(count.cast_const());
    if room == 0 {
        return answer!(count => list.len() as u32);
    }
    let list = &list[..list.len().min(room as usize)];
    answer_list!(count, to, list)
}

impl Identity for Library {
    unsafe fn nvmlDeviceGetCount(count: *mut u32) -> Answer {
        answer!(count => session()?.shown.len() as u32)
    }

    unsafe fn nvmlDeviceGetCount_v2(count: *mut u32) -> Answer {
        answer!(count => session()?.shown.len() as u32)
    }

    unsafe fn nvmlDeviceGetHandleByIndex(index: u32, device: *mut nvmlDevice_t) -> Answer {
        by_index(index, device)
    }

    unsafe fn nvmlDeviceGetHandleByIndex_v2(index: u32, device: *mut nvmlDevice_t) -> Answer {
        by_index(index, device)
    }

    unsafe fn nvmlDeviceGetHandleByPciBusId(pci_bus_id: *const c_char, device: *mut nvmlDevice_t) -> Answer {
        found(topology::by_address(&given(pci_bus_id)?)?, device)
    }

    unsafe fn nvmlDeviceGetHandleByPciBusId_v2(
        pci_bus_id: *const c_char,
        device: *mut nvmlDevice_t,
    ) -> Answer {
        found(topology::by_address(&given(pci_bus_id)?)?, device)
    }

    unsafe fn nvmlDeviceGetHandleBySerial(serial: *const c_char, device: *mut nvmlDevice_t) -> Answer {
        by_text(&given(serial)?, |card| &card.gpu.serial, device)
    }

    unsafe fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut nvmlDevice_t) -> Answer {
        let uuid = given(uuid)?;
        if !uuid.starts_with("GPU-") {
            return Err(if uuid.starts_with("MIG-") {
                NvmlError::NOT_FOUND
            } else {
                NvmlError::INVALID_ARGUMENT
            });
        }
        by_text(&uuid, |card| &card.gpu.uuid, device)
    }

    unsafe fn nvmlDeviceGetIndex(device: nvmlDevice_t, index: *mut u32) -> Answer {
        answer!(index => known(device)?.number())
    }

    unsafe fn nvmlDeviceGetMinorNumber(device: nvmlDevice_t, minor_number: *mut u32) -> Answer {
        answer!(minor_number => known(device)?.card().gpu.minor)
    }

    unsafe fn nvmlDeviceGetPciInfo(device: nvmlDevice_t, pci: *mut nvmlPciInfo_v1_t) -> Answer {
        let info = older(pci_info(known(device)?.card()));
        answer!(pci => nvmlPciInfo_v1_t {
            busId: info.busId,
            domain: info.domain,
            bus: info.bus,
            device: info.device,
            pciDeviceId: info.pciDeviceId,
        })
    }

    unsafe fn nvmlDeviceGetPciInfo_v2(device: nvmlDevice_t, pci: *mut nvmlPciInfo_v2_t) -> Answer {
        answer!(pci => older(pci_info(known(device)?.card())))
    }

    unsafe fn nvmlDeviceGetPciInfo_v3(device: nvmlDevice_t, pci: *mut nvmlPciInfo_t) -> Answer {
        answer!(pci => pci_info(known(device)?.card()))
    }

    unsafe fn nvmlDeviceGetPciInfoExt(device: nvmlDevice_t, pci: *mut nvmlPciInfoExt_t) -> Answer {
        let gpu = known(device)?;
        let version = passed!(pci.cast_const().cast::<u32>());
        if version != nvmlPciInfoExt_v1 {
            return Err(NvmlError::ARGUMENT_VERSION_MISMATCH);
        }
        let info = pci_info(gpu.card());
        answer!(pci => nvmlPciInfoExt_t {
            version,
            domain: info.domain,
            bus: info.bus,
            device: info.device,
            pciDeviceId: info.pciDeviceId,
            pciSubSystemId: info.pciSubSystemId,
            // A 3D controller.
            baseClass: 3,
            subClass: 2,
            busId: info.busId,
        })
    }

    unsafe fn nvmlDeviceGetName(device: nvmlDevice_t, name: *mut c_char, length: u32) -> Answer {
        answer_text!(name, length, gpu(device)?.profile().name)
    }

    unsafe fn nvmlDeviceGetUUID(device: nvmlDevice_t, uuid: *mut c_char, length: u32) -> Answer {
        answer_text!(uuid, length, gpu(device)?.card().gpu.uuid)
    }

    unsafe fn nvmlDeviceGetSerial(device: nvmlDevice_t, serial: *mut c_char, length: u32) -> Answer {
        answer_text!(serial, length, gpu(device)?.card().gpu.serial)
    }

    unsafe fn nvmlDeviceGetBrand(device: nvmlDevice_t, kind: *mut nvmlBrandType_t) -> Answer {
        answer!(kind => gpu(device)?.profile().brand.nvml())
    }

    unsafe fn nvmlDeviceGetArchitecture(
        device: nvmlDevice_t,
        architecture: *mut nvmlDeviceArchitecture_t,
    ) -> Answer {
        answer!(architecture => gpu(device)?.profile().architecture.nvml())
    }

    unsafe fn nvmlDeviceGetCudaComputeCapability(
        device: nvmlDevice_t,
        major: *mut i32,
        minor: *mut i32,
    ) -> Answer {
        let capability = gpu(device)?.profile().compute.capability as i32;
        if minor.is_null() {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        answer!(major => capability / 10, minor => capability % 10)
    }

    unsafe fn nvmlDeviceGetAttributes(
        device: nvmlDevice_t,
        attributes: *mut nvmlDeviceAttributes_t,
    ) -> Answer {
        // SAFETY: the caller's promise.
        unsafe { Self::nvmlDeviceGetAttributes_v2(device, attributes) }
    }

    unsafe fn nvmlDeviceGetAttributes_v2(
        device: nvmlDevice_t,
        _attributes: *mut nvmlDeviceAttributes_t,
    ) -> Answer {
        // Attributes are of MIG instances.
        gpu(device)?;
        Err(NvmlError::NOT_SUPPORTED)
    }

    unsafe fn nvmlDeviceGetBoardId(device: nvmlDevice_t, board_id: *mut u32) -> Answer {
        answer!(board_id => gpu(device)?.card().gpu.board_id())
    }

    unsafe fn nvmlDeviceGetBoardPartNumber(
        device: nvmlDevice_t,
        part_number: *mut c_char,
        length: u32,
    ) -> Answer {
        answer_text!(part_number, length, gpu(device)?.profile().board.part)
    }

    unsafe fn nvmlDeviceGetBridgeChipInfo(
        device: nvmlDevice_t,
        _bridge_hierarchy: *mut nvmlBridgeChipHierarchy_t,
    ) -> Answer {
        gpu(device)?;
        Err(NvmlError::NOT_SUPPORTED)
    }

    unsafe fn nvmlDeviceGetBusType(device: nvmlDevice_t, kind: *mut nvmlBusType_t) -> Answer {
        gpu(device)?;
        answer!(kind => NVML_BUS_TYPE_PCIE)
    }

    unsafe fn nvmlDeviceGetCpuAffinity(
        device: nvmlDevice_t,
        cpu_set_size: u32,
        cpu_set: *mut c_ulong,
    ) -> Answer {
        put_set(cpu_set_size, cpu_set, cpus(gpu(device)?))
    }

    unsafe fn nvmlDeviceGetCpuAffinityWithinScope(
        device: nvmlDevice_t,
        cpu_set_size: u32,
        cpu_set: *mut c_ulong,
        scope: nvmlAffinityScope_t,
    ) -> Answer {
        let gpu = gpu(device)?;
        if scope > NVML_AFFINITY_SCOPE_SOCKET {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        put_set(cpu_set_size, cpu_set, cpus(gpu))
    }

    unsafe fn nvmlDeviceGetMemoryAffinity(
        device: nvmlDevice_t,
        node_set_size: u32,
        node_set: *mut c_ulong,
        scope: nvmlAffinityScope_t,
    ) -> Answer {
        let gpu = gpu(device)?;
        if scope > NVML_AFFINITY_SCOPE_SOCKET {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        put_set(node_set_size, node_set, std::iter::once(gpu.card().gpu.numa as usize))
    }

    unsafe fn nvmlDeviceGetNumaNodeId(device: nvmlDevice_t, _node: *mut u32) -> Answer {
        // A card whose memory is a NUMA node of the host; none of these is.
        gpu(device)?;
        Err(NvmlError::NOT_SUPPORTED)
    }

    unsafe fn nvmlDeviceGetGspFirmwareMode(
        device: nvmlDevice_t,
        is_enabled: *mut u32,
        default_mode: *mut u32,
    ) -> Answer {
        let on = u32::from(gpu(device)?.profile().architecture >= Architecture::Turing);
        answer!(is_enabled => on, default_mode => on)
    }

    unsafe fn nvmlDeviceGetGspFirmwareVersion(device: nvmlDevice_t, version: *mut c_char) -> Answer {
        let gpu = gpu(device)?;
        if gpu.profile().architecture < Architecture::Turing {
            return Err(NvmlError::NOT_SUPPORTED);
        }
        answer_text!(version, NVML_GSP_FIRMWARE_VERSION_BUF_SIZE, gpu.session.config().driver.version())
    }

    unsafe fn nvmlDeviceGetInforomConfigurationChecksum(device: nvmlDevice_t, checksum: *mut u32) -> Answer {
        // Any number that is always the same for a card.
        let sum = gpu(device)?
            .card()
            .gpu
            .uuid
            .bytes()
            .fold(0x811c_9dc5_u32, |sum, byte| (sum ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        answer!(checksum => sum)
    }

    unsafe fn nvmlDeviceGetInforomImageVersion(
        device: nvmlDevice_t,
        version: *mut c_char,
        length: u32,
    ) -> Answer {
        answer_text!(version, length, gpu(device)?.profile().board.inforom)
    }

    unsafe fn nvmlDeviceGetInforomVersion(
        device: nvmlDevice_t,
        object: nvmlInforomObject_t,
        version: *mut c_char,
        length: u32,
    ) -> Answer {
        let board = &gpu(device)?.profile().board;
        match object {
            NVML_INFOROM_OEM => answer_text!(version, length, board.inforom_oem),
            NVML_INFOROM_ECC => answer_text!(version, length, board.inforom_ecc),
            NVML_INFOROM_POWER | NVML_INFOROM_DEN => Err(NvmlError::NOT_SUPPORTED),
            _ => Err(NvmlError::INVALID_ARGUMENT),
        }
    }

    unsafe fn nvmlDeviceValidateInforom(device: nvmlDevice_t) -> Answer {
        gpu(device).map(|_| ())
    }

    unsafe fn nvmlDeviceGetIrqNum(device: nvmlDevice_t, irq_num: *mut u32) -> Answer {
        answer!(irq_num => 64 + gpu(device)?.index as u32)
    }

    unsafe fn nvmlDeviceGetMemoryBusWidth(device: nvmlDevice_t, bus_width: *mut u32) -> Answer {
        answer!(bus_width => gpu(device)?.profile().memory.bus_width)
    }

    unsafe fn nvmlDeviceGetModuleId(device: nvmlDevice_t, module_id: *mut u32) -> Answer {
        // Cards in slots are told as the first module.
        answer!(module_id => gpu(device)?.card().gpu.module.max(1))
    }

    unsafe fn nvmlDeviceGetMultiGpuBoard(device: nvmlDevice_t, multi_gpu_bool: *mut u32) -> Answer {
        gpu(device)?;
        answer!(multi_gpu_bool => 0)
    }

    unsafe fn nvmlDeviceOnSameBoard(
        device1: nvmlDevice_t,
        device2: nvmlDevice_t,
        on_same_board: *mut i32,
    ) -> Answer {
        let (one, other) = (gpu(device1)?, gpu(device2)?);
        answer!(on_same_board => i32::from(one.index == other.index))
    }

    unsafe fn nvmlDeviceGetNumGpuCores(device: nvmlDevice_t, num_cores: *mut u32) -> Answer {
        let compute = &gpu(device)?.profile().compute;
        answer!(num_cores => compute.multiprocessors * compute.cores_per_multiprocessor)
    }

    unsafe fn nvmlDeviceGetVbiosVersion(device: nvmlDevice_t, version: *mut c_char, length: u32) -> Answer {
        answer_text!(version, length, gpu(device)?.profile().board.vbios)
    }

    unsafe fn nvmlDeviceGetP2PStatus(
        device1: nvmlDevice_t,
        device2: nvmlDevice_t,
        p2p_index: nvmlGpuP2PCapsIndex_t,
        p2p_status: *mut nvmlGpuP2PStatus_t,
    ) -> Answer {
        let (one, other) = (gpu(device1)?, gpu(device2)?);
        let linked = topology::links(one, other.index) > 0;
        let works = match p2p_index {
            NVML_P2P_CAPS_INDEX_READ | NVML_P2P_CAPS_INDEX_WRITE => true,
            NVML_P2P_CAPS_INDEX_NVLINK | NVML_P2P_CAPS_INDEX_ATOMICS => linked,
            NVML_P2P_CAPS_INDEX_PCI => !linked,
            _ => return Err(NvmlError::INVALID_ARGUMENT),
        };
        let status = if works { NVML_P2P_STATUS_OK } else { NVML_P2P_STATUS_NOT_SUPPORTED };
        answer!(p2p_status => status)
    }

    unsafe fn nvmlDeviceGetTopologyCommonAncestor(
        device1: nvmlDevice_t,
        device2: nvmlDevice_t,
        path_info: *mut nvmlGpuTopologyLevel_t,
    ) -> Answer {
        let (one, other) = (gpu(device1)?, gpu(device2)?);
        let level =
            if one.index == other.index { NVML_TOPOLOGY_INTERNAL } else { topology::level(one, other.index) };
        answer!(path_info => level)
    }

    unsafe fn nvmlDeviceGetTopologyNearestGpus(
        device: nvmlDevice_t,
        level: nvmlGpuTopologyLevel_t,
        count: *mut u32,
        device_array: *mut nvmlDevice_t,
    ) -> Answer {
        let gpu = gpu(device)?;
        if level > NVML_TOPOLOGY_SYSTEM {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        let near = topology::others(gpu, |other| topology::level(gpu, other) == level);
        put_devices(count, device_array, &near)
    }

    unsafe fn nvmlSystemGetTopologyGpuSet(
        cpu_number: u32,
        count: *mut u32,
        device_array: *mut nvmlDevice_t,
    ) -> Answer {
        let session = session()?;
        let near = |card: &Card| card.gpu.cpus.iter().any(|cpu| cpu == cpu_number);
        let gpus = session.shown.iter().filter(|&&gpu| near(&session.cards[gpu])).map(|&gpu| handle(gpu));
        put_devices(count, device_array, &gpus.collect::<Vec<_>>())
    }
}
