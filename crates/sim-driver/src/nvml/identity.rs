//! Identity of the GPUs: handles, names, UUIDs, addresses and topology.
//!
//! A lost GPU is still counted, and what the library knows without the card (index, minor number, PCI address) is
//! still returned for an existing handle. A new handle is refused with `GPU_IS_LOST`. A GPU whose device file the
//! program cannot open is not counted, listed or found.

use super::arguments::{
    NvmlResult, VisibleGpu, fixed_text, gpu, gpu_even_if_lost, handle, read_in, write_out, write_out_list,
    write_out_text,
};
use super::session::{GpuCard, session};
use super::topology;
use super::*;
use crate::node::PciAddress;
use crate::profile::Architecture;
use std::ffi::CStr;

/// Writes the handle of a GPU that was found; fails if the GPU is lost.
fn write_handle(gpu: VisibleGpu, device: *mut nvmlDevice_t) -> NvmlResult {
    if device.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    if gpu.is_lost() {
        return Err(NvmlError::GPU_IS_LOST);
    }
    write_out!(device => handle(gpu.index))
}

fn by_index(index: u32, device: *mut nvmlDevice_t) -> NvmlResult {
    let session = session()?;
    let index = *session.visible.get(index as usize).ok_or(NvmlError::INVALID_ARGUMENT)?;
    write_handle(VisibleGpu { session, index }, device)
}

/// Copies a string argument.
fn read_text(text: *const c_char) -> Result<String, NvmlError> {
    session()?;
    if text.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    // SAFETY: non-null, and NVML requires a NUL-terminated string.
    Ok(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

fn by_text(text: &str, of: impl Fn(&GpuCard) -> &str, device: *mut nvmlDevice_t) -> NvmlResult {
    let session = session()?;
    let index = session.find(|card| of(card).eq_ignore_ascii_case(text))?;
    write_handle(VisibleGpu { session, index }, device)
}

/// Returns the PCI information of a device at an address.
pub(super) fn pci_info_at(pci: PciAddress, device: u32, subsystem: u32) -> nvmlPciInfo_t {
    let legacy = format!("{:04X}:{:02X}:{:02X}.0", pci.domain, pci.bus, pci.device);
    nvmlPciInfo_t {
        busIdLegacy: fixed_text(&legacy),
        domain: pci.domain,
        bus: u32::from(pci.bus),
        device: u32::from(pci.device),
        pciDeviceId: device,
        pciSubSystemId: subsystem,
        busId: fixed_text(&pci.to_string()),
    }
}

pub(super) fn pci_info(card: &GpuCard) -> nvmlPciInfo_t {
    pci_info_at(card.gpu.pci, card.profile.pci.device, card.profile.pci.subsystem)
}

/// Converts to the older structure, whose domain has four digits.
pub(super) fn legacy_pci_info(info: nvmlPciInfo_t) -> nvmlPciInfo_v2_t {
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

/// Returns the CPUs local to a GPU.
fn local_cpus(gpu: VisibleGpu) -> impl Iterator<Item = usize> {
    gpu.card().gpu.cpus.iter().map(|cpu| cpu as usize)
}

fn write_cpu_set(size: u32, to: *mut c_ulong, numbers: impl Iterator<Item = usize>) -> NvmlResult {
    if size == 0 || to.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    let mut size = size;
    write_out_list!(&raw mut size, to, topology::bit_set(size, numbers))
}

/// Writes device handles; if the array has no room at all, only their count.
fn write_devices(count: *mut u32, to: *mut nvmlDevice_t, list: &[nvmlDevice_t]) -> NvmlResult {
    let room = read_in!(count.cast_const());
    if room == 0 {
        return write_out!(count => list.len() as u32);
    }
    let list = &list[..list.len().min(room as usize)];
    write_out_list!(count, to, list)
}

impl NvmlIdentity for Library {
    unsafe fn nvmlDeviceGetCount(count: *mut u32) -> NvmlResult {
        write_out!(count => session()?.visible.len() as u32)
    }

    unsafe fn nvmlDeviceGetCount_v2(count: *mut u32) -> NvmlResult {
        write_out!(count => session()?.visible.len() as u32)
    }

    unsafe fn nvmlDeviceGetHandleByIndex(index: u32, device: *mut nvmlDevice_t) -> NvmlResult {
        by_index(index, device)
    }

    unsafe fn nvmlDeviceGetHandleByIndex_v2(index: u32, device: *mut nvmlDevice_t) -> NvmlResult {
        by_index(index, device)
    }

    unsafe fn nvmlDeviceGetHandleByPciBusId(
        pci_bus_id: *const c_char,
        device: *mut nvmlDevice_t,
    ) -> NvmlResult {
        write_handle(topology::by_address(&read_text(pci_bus_id)?)?, device)
    }

    unsafe fn nvmlDeviceGetHandleByPciBusId_v2(
        pci_bus_id: *const c_char,
        device: *mut nvmlDevice_t,
    ) -> NvmlResult {
        write_handle(topology::by_address(&read_text(pci_bus_id)?)?, device)
    }

    unsafe fn nvmlDeviceGetHandleBySerial(serial: *const c_char, device: *mut nvmlDevice_t) -> NvmlResult {
        by_text(&read_text(serial)?, |card| &card.gpu.serial, device)
    }

    unsafe fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut nvmlDevice_t) -> NvmlResult {
        let uuid = read_text(uuid)?;
        if !uuid.starts_with("GPU-") {
            return Err(if uuid.starts_with("MIG-") {
                NvmlError::NOT_FOUND
            } else {
                NvmlError::INVALID_ARGUMENT
            });
        }
        by_text(&uuid, |card| &card.gpu.uuid, device)
    }

    unsafe fn nvmlDeviceGetIndex(device: nvmlDevice_t, index: *mut u32) -> NvmlResult {
        write_out!(index => gpu_even_if_lost(device)?.number())
    }

    unsafe fn nvmlDeviceGetMinorNumber(device: nvmlDevice_t, minor_number: *mut u32) -> NvmlResult {
        write_out!(minor_number => gpu_even_if_lost(device)?.card().gpu.minor)
    }

    unsafe fn nvmlDeviceGetPciInfo(device: nvmlDevice_t, pci: *mut nvmlPciInfo_v1_t) -> NvmlResult {
        let info = legacy_pci_info(pci_info(gpu_even_if_lost(device)?.card()));
        write_out!(pci => nvmlPciInfo_v1_t {
            busId: info.busId,
            domain: info.domain,
            bus: info.bus,
            device: info.device,
            pciDeviceId: info.pciDeviceId,
        })
    }

    unsafe fn nvmlDeviceGetPciInfo_v2(device: nvmlDevice_t, pci: *mut nvmlPciInfo_v2_t) -> NvmlResult {
        write_out!(pci => legacy_pci_info(pci_info(gpu_even_if_lost(device)?.card())))
    }

    unsafe fn nvmlDeviceGetPciInfo_v3(device: nvmlDevice_t, pci: *mut nvmlPciInfo_t) -> NvmlResult {
        write_out!(pci => pci_info(gpu_even_if_lost(device)?.card()))
    }

    unsafe fn nvmlDeviceGetPciInfoExt(device: nvmlDevice_t, pci: *mut nvmlPciInfoExt_t) -> NvmlResult {
        let gpu = gpu_even_if_lost(device)?;
        let version = read_in!(pci.cast_const().cast::<u32>());
        if version != nvmlPciInfoExt_v1 {
            return Err(NvmlError::ARGUMENT_VERSION_MISMATCH);
        }
        let info = pci_info(gpu.card());
        write_out!(pci => nvmlPciInfoExt_t {
            version,
            domain: info.domain,
            bus: info.bus,
            device: info.device,
            pciDeviceId: info.pciDeviceId,
            pciSubSystemId: info.pciSubSystemId,
            // PCI class: 3D controller.
            baseClass: 3,
            subClass: 2,
            busId: info.busId,
        })
    }

    unsafe fn nvmlDeviceGetName(device: nvmlDevice_t, name: *mut c_char, length: u32) -> NvmlResult {
        write_out_text!(name, length, gpu(device)?.profile().name)
    }

    unsafe fn nvmlDeviceGetUUID(device: nvmlDevice_t, uuid: *mut c_char, length: u32) -> NvmlResult {
        write_out_text!(uuid, length, gpu(device)?.card().gpu.uuid)
    }

    unsafe fn nvmlDeviceGetSerial(device: nvmlDevice_t, serial: *mut c_char, length: u32) -> NvmlResult {
        write_out_text!(serial, length, gpu(device)?.card().gpu.serial)
    }

    unsafe fn nvmlDeviceGetBrand(device: nvmlDevice_t, kind: *mut nvmlBrandType_t) -> NvmlResult {
        write_out!(kind => gpu(device)?.profile().brand.nvml())
    }

    unsafe fn nvmlDeviceGetArchitecture(
        device: nvmlDevice_t,
        architecture: *mut nvmlDeviceArchitecture_t,
    ) -> NvmlResult {
        write_out!(architecture => gpu(device)?.profile().architecture.nvml())
    }

    unsafe fn nvmlDeviceGetCudaComputeCapability(
        device: nvmlDevice_t,
        major: *mut i32,
        minor: *mut i32,
    ) -> NvmlResult {
        let capability = gpu(device)?.profile().compute.capability as i32;
        if minor.is_null() {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        write_out!(major => capability / 10, minor => capability % 10)
    }

    unsafe fn nvmlDeviceGetAttributes(
        device: nvmlDevice_t,
        attributes: *mut nvmlDeviceAttributes_t,
    ) -> NvmlResult {
        // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
        unsafe { Self::nvmlDeviceGetAttributes_v2(device, attributes) }
    }

    unsafe fn nvmlDeviceGetAttributes_v2(
        device: nvmlDevice_t,
        _attributes: *mut nvmlDeviceAttributes_t,
    ) -> NvmlResult {
        // Only MIG instances have attributes.
        gpu(device)?;
        Err(NvmlError::NOT_SUPPORTED)
    }

    unsafe fn nvmlDeviceGetBoardId(device: nvmlDevice_t, board_id: *mut u32) -> NvmlResult {
        write_out!(board_id => gpu(device)?.card().gpu.board_id())
    }

    unsafe fn nvmlDeviceGetBoardPartNumber(
        device: nvmlDevice_t,
        part_number: *mut c_char,
        length: u32,
    ) -> NvmlResult {
        write_out_text!(part_number, length, gpu(device)?.profile().board.part)
    }

    unsafe fn nvmlDeviceGetBridgeChipInfo(
        device: nvmlDevice_t,
        _bridge_hierarchy: *mut nvmlBridgeChipHierarchy_t,
    ) -> NvmlResult {
        gpu(device)?;
        Err(NvmlError::NOT_SUPPORTED)
    }

    unsafe fn nvmlDeviceGetBusType(device: nvmlDevice_t, kind: *mut nvmlBusType_t) -> NvmlResult {
        gpu(device)?;
        write_out!(kind => NVML_BUS_TYPE_PCIE)
    }

    unsafe fn nvmlDeviceGetCpuAffinity(
        device: nvmlDevice_t,
        cpu_set_size: u32,
        cpu_set: *mut c_ulong,
    ) -> NvmlResult {
        write_cpu_set(cpu_set_size, cpu_set, local_cpus(gpu(device)?))
    }

    unsafe fn nvmlDeviceGetCpuAffinityWithinScope(
        device: nvmlDevice_t,
        cpu_set_size: u32,
        cpu_set: *mut c_ulong,
        scope: nvmlAffinityScope_t,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        if scope > NVML_AFFINITY_SCOPE_SOCKET {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        write_cpu_set(cpu_set_size, cpu_set, local_cpus(gpu))
    }

    unsafe fn nvmlDeviceGetMemoryAffinity(
        device: nvmlDevice_t,
        node_set_size: u32,
        node_set: *mut c_ulong,
        scope: nvmlAffinityScope_t,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        if scope > NVML_AFFINITY_SCOPE_SOCKET {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        write_cpu_set(node_set_size, node_set, std::iter::once(gpu.card().gpu.numa as usize))
    }

    unsafe fn nvmlDeviceGetNumaNodeId(device: nvmlDevice_t, _node: *mut u32) -> NvmlResult {
        // Applies to cards whose memory is a NUMA node of the host, which none of these is.
        gpu(device)?;
        Err(NvmlError::NOT_SUPPORTED)
    }

    unsafe fn nvmlDeviceGetGspFirmwareMode(
        device: nvmlDevice_t,
        is_enabled: *mut u32,
        default_mode: *mut u32,
    ) -> NvmlResult {
        let on = u32::from(gpu(device)?.profile().architecture >= Architecture::Turing);
        write_out!(is_enabled => on, default_mode => on)
    }

    unsafe fn nvmlDeviceGetGspFirmwareVersion(device: nvmlDevice_t, version: *mut c_char) -> NvmlResult {
        let gpu = gpu(device)?;
        if gpu.profile().architecture < Architecture::Turing {
            return Err(NvmlError::NOT_SUPPORTED);
        }
        write_out_text!(version, NVML_GSP_FIRMWARE_VERSION_BUF_SIZE, gpu.session.config().driver.version())
    }

    unsafe fn nvmlDeviceGetInforomConfigurationChecksum(
        device: nvmlDevice_t,
        checksum: *mut u32,
    ) -> NvmlResult {
        // A number that is constant for the card.
        let sum = gpu(device)?
            .card()
            .gpu
            .uuid
            .bytes()
            .fold(0x811c_9dc5_u32, |sum, byte| (sum ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        write_out!(checksum => sum)
    }

    unsafe fn nvmlDeviceGetInforomImageVersion(
        device: nvmlDevice_t,
        version: *mut c_char,
        length: u32,
    ) -> NvmlResult {
        write_out_text!(version, length, gpu(device)?.profile().board.inforom)
    }

    unsafe fn nvmlDeviceGetInforomVersion(
        device: nvmlDevice_t,
        object: nvmlInforomObject_t,
        version: *mut c_char,
        length: u32,
    ) -> NvmlResult {
        let board = &gpu(device)?.profile().board;
        match object {
            NVML_INFOROM_OEM => write_out_text!(version, length, board.inforom_oem),
            NVML_INFOROM_ECC => write_out_text!(version, length, board.inforom_ecc),
            NVML_INFOROM_POWER | NVML_INFOROM_DEN => Err(NvmlError::NOT_SUPPORTED),
            _ => Err(NvmlError::INVALID_ARGUMENT),
        }
    }

    unsafe fn nvmlDeviceValidateInforom(device: nvmlDevice_t) -> NvmlResult {
        gpu(device).map(|_| ())
    }

    unsafe fn nvmlDeviceGetIrqNum(device: nvmlDevice_t, irq_num: *mut u32) -> NvmlResult {
        write_out!(irq_num => 64 + gpu(device)?.index as u32)
    }

    unsafe fn nvmlDeviceGetMemoryBusWidth(device: nvmlDevice_t, bus_width: *mut u32) -> NvmlResult {
        write_out!(bus_width => gpu(device)?.profile().memory.bus_width)
    }

    unsafe fn nvmlDeviceGetModuleId(device: nvmlDevice_t, module_id: *mut u32) -> NvmlResult {
        // PCIe cards report module 1.
        write_out!(module_id => gpu(device)?.card().gpu.module.max(1))
    }

    unsafe fn nvmlDeviceGetMultiGpuBoard(device: nvmlDevice_t, multi_gpu_bool: *mut u32) -> NvmlResult {
        gpu(device)?;
        write_out!(multi_gpu_bool => 0)
    }

    unsafe fn nvmlDeviceOnSameBoard(
        device1: nvmlDevice_t,
        device2: nvmlDevice_t,
        on_same_board: *mut i32,
    ) -> NvmlResult {
        let (one, other) = (gpu(device1)?, gpu(device2)?);
        write_out!(on_same_board => i32::from(one.index == other.index))
    }

    unsafe fn nvmlDeviceGetNumGpuCores(device: nvmlDevice_t, num_cores: *mut u32) -> NvmlResult {
        let compute = &gpu(device)?.profile().compute;
        write_out!(num_cores => compute.multiprocessors * compute.cores_per_multiprocessor)
    }

    unsafe fn nvmlDeviceGetVbiosVersion(
        device: nvmlDevice_t,
        version: *mut c_char,
        length: u32,
    ) -> NvmlResult {
        write_out_text!(version, length, gpu(device)?.profile().board.vbios)
    }

    unsafe fn nvmlDeviceGetP2PStatus(
        device1: nvmlDevice_t,
        device2: nvmlDevice_t,
        p2p_index: nvmlGpuP2PCapsIndex_t,
        p2p_status: *mut nvmlGpuP2PStatus_t,
    ) -> NvmlResult {
        let (one, other) = (gpu(device1)?, gpu(device2)?);
        let linked = topology::links(one, other.index) > 0;
        let works = match p2p_index {
            NVML_P2P_CAPS_INDEX_READ | NVML_P2P_CAPS_INDEX_WRITE => true,
            NVML_P2P_CAPS_INDEX_NVLINK | NVML_P2P_CAPS_INDEX_ATOMICS => linked,
            NVML_P2P_CAPS_INDEX_PCI => !linked,
            _ => return Err(NvmlError::INVALID_ARGUMENT),
        };
        let status = if works { NVML_P2P_STATUS_OK } else { NVML_P2P_STATUS_NOT_SUPPORTED };
        write_out!(p2p_status => status)
    }

    unsafe fn nvmlDeviceGetTopologyCommonAncestor(
        device1: nvmlDevice_t,
        device2: nvmlDevice_t,
        path_info: *mut nvmlGpuTopologyLevel_t,
    ) -> NvmlResult {
        let (one, other) = (gpu(device1)?, gpu(device2)?);
        let level =
            if one.index == other.index { NVML_TOPOLOGY_INTERNAL } else { topology::level(one, other.index) };
        write_out!(path_info => level)
    }

    unsafe fn nvmlDeviceGetTopologyNearestGpus(
        device: nvmlDevice_t,
        level: nvmlGpuTopologyLevel_t,
        count: *mut u32,
        device_array: *mut nvmlDevice_t,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        if level > NVML_TOPOLOGY_SYSTEM {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        let near = topology::others(gpu, |other| topology::level(gpu, other) == level);
        write_devices(count, device_array, &near)
    }

    unsafe fn nvmlSystemGetTopologyGpuSet(
        cpu_number: u32,
        count: *mut u32,
        device_array: *mut nvmlDevice_t,
    ) -> NvmlResult {
        let session = session()?;
        let near = |card: &GpuCard| card.gpu.cpus.iter().any(|cpu| cpu == cpu_number);
        let gpus = session.visible.iter().filter(|&&gpu| near(&session.cards[gpu])).map(|&gpu| handle(gpu));
        write_devices(count, device_array, &gpus.collect::<Vec<_>>())
    }
}
