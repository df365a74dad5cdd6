//! Features that are reported as absent: MIG instances, virtual GPUs, video encoding, confidential computing.

use super::arguments::{NvmlResult, gpu, read_in, write_out};
use super::session::session;
use super::*;
use crate::node::NvLinkEnd;
use crate::profile::Architecture;

/// Resolves a device handle; fails if the card does not support MIG.
fn mig_capable_gpu(device: nvmlDevice_t) -> Result<arguments::VisibleGpu, NvmlError> {
    let gpu = gpu(device)?;
    if gpu.profile().mig_instances == 0 { Err(NvmlError::NOT_SUPPORTED) } else { Ok(gpu) }
}

impl NvmlMig for Library {
    unsafe fn nvmlDeviceGetMigMode(
        device: nvmlDevice_t,
        current_mode: *mut u32,
        pending_mode: *mut u32,
    ) -> NvmlResult {
        let enabled = mig_capable_gpu(device)?.is_mig_enabled();
        let mode = if enabled { NVML_DEVICE_MIG_ENABLE } else { NVML_DEVICE_MIG_DISABLE };
        write_out!(current_mode => mode, pending_mode => mode)
    }

    unsafe fn nvmlDeviceGetMaxMigDeviceCount(device: nvmlDevice_t, count: *mut u32) -> NvmlResult {
        write_out!(count => gpu(device)?.profile().mig_instances)
    }

    unsafe fn nvmlDeviceIsMigDeviceHandle(device: nvmlDevice_t, is_mig_device: *mut u32) -> NvmlResult {
        gpu(device)?;
        write_out!(is_mig_device => 0)
    }

    unsafe fn nvmlDeviceGetMigDeviceHandleByIndex(
        device: nvmlDevice_t,
        index: u32,
        _mig_device: *mut nvmlDevice_t,
    ) -> NvmlResult {
        let gpu = mig_capable_gpu(device)?;
        // No instance exists at any valid index.
        let possible = index < gpu.profile().mig_instances;
        Err(if possible { NvmlError::NOT_FOUND } else { NvmlError::INVALID_ARGUMENT })
    }

    unsafe fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
        mig_device: nvmlDevice_t,
        _device: *mut nvmlDevice_t,
    ) -> NvmlResult {
        gpu(mig_device)?;
        Err(NvmlError::INVALID_ARGUMENT)
    }

    unsafe fn nvmlGpmQueryDeviceSupport(
        device: nvmlDevice_t,
        gpm_support: *mut nvmlGpmSupport_t,
    ) -> NvmlResult {
        gpu(device)?;
        let version = read_in!(gpm_support.cast_const().cast::<u32>());
        if version != NVML_GPM_SUPPORT_VERSION {
            return Err(NvmlError::ARGUMENT_VERSION_MISMATCH);
        }
        write_out!(gpm_support => nvmlGpmSupport_t { version, isSupportedDevice: 0 })
    }

    unsafe fn nvmlGpmMetricsGet(metrics_get: *mut nvmlGpmMetricsGet_t) -> NvmlResult {
        session()?;
        // Some programs pass less than the whole structure, so only the version is read.
        let version = read_in!(metrics_get.cast_const().cast::<u32>());
        Err(if version == NVML_GPM_METRICS_GET_VERSION {
            NvmlError::NOT_SUPPORTED
        } else {
            NvmlError::ARGUMENT_VERSION_MISMATCH
        })
    }
}

impl NvmlVgpu for Library {
    unsafe fn nvmlDeviceGetVirtualizationMode(
        device: nvmlDevice_t,
        virtual_mode: *mut nvmlGpuVirtualizationMode_t,
    ) -> NvmlResult {
        gpu(device)?;
        write_out!(virtual_mode => NVML_GPU_VIRTUALIZATION_MODE_NONE)
    }
}

/// Returns the NVSwitch fabric state, which cards report since Hopper.
fn fabric_state(gpu: arguments::VisibleGpu) -> nvmlGpuFabricState_t {
    let switched = gpu.card().gpu.links.iter().any(|end| matches!(end, NvLinkEnd::Switch(_)));
    let state = if switched && gpu.profile().architecture >= Architecture::Hopper {
        NVML_GPU_FABRIC_STATE_COMPLETED
    } else {
        NVML_GPU_FABRIC_STATE_NOT_SUPPORTED
    };
    state as nvmlGpuFabricState_t
}

impl NvmlMisc for Library {
    unsafe fn nvmlDeviceGetEncoderStats(
        device: nvmlDevice_t,
        session_count: *mut u32,
        average_fps: *mut u32,
        average_latency: *mut u32,
    ) -> NvmlResult {
        gpu(device)?;
        write_out!(session_count => 0, average_fps => 0, average_latency => 0)
    }

    unsafe fn nvmlDeviceGetEncoderSessions(
        device: nvmlDevice_t,
        session_count: *mut u32,
        _session_infos: *mut nvmlEncoderSessionInfo_t,
    ) -> NvmlResult {
        gpu(device)?;
        write_out!(session_count => 0)
    }

    unsafe fn nvmlDeviceGetFBCStats(device: nvmlDevice_t, fbc_stats: *mut nvmlFBCStats_t) -> NvmlResult {
        gpu(device)?;
        write_out!(fbc_stats => nvmlFBCStats_t::default())
    }

    unsafe fn nvmlDeviceGetFBCSessions(
        device: nvmlDevice_t,
        session_count: *mut u32,
        _session_info: *mut nvmlFBCSessionInfo_t,
    ) -> NvmlResult {
        gpu(device)?;
        write_out!(session_count => 0)
    }

    unsafe fn nvmlDeviceGetConfComputeProtectedMemoryUsage(
        device: nvmlDevice_t,
        memory: *mut nvmlMemory_t,
    ) -> NvmlResult {
        gpu(device)?;
        write_out!(memory => nvmlMemory_t::default())
    }

    unsafe fn nvmlSystemGetConfComputeCapabilities(
        capabilities: *mut nvmlConfComputeSystemCaps_t,
    ) -> NvmlResult {
        session()?;
        write_out!(capabilities => nvmlConfComputeSystemCaps_t::default())
    }

    unsafe fn nvmlSystemGetConfComputeState(state: *mut nvmlConfComputeSystemState_t) -> NvmlResult {
        session()?;
        write_out!(state => nvmlConfComputeSystemState_t::default())
    }

    unsafe fn nvmlDeviceGetGpuFabricInfo(
        device: nvmlDevice_t,
        gpu_fabric_info: *mut nvmlGpuFabricInfo_t,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        write_out!(gpu_fabric_info => nvmlGpuFabricInfo_t { state: fabric_state(gpu), ..Default::default() })
    }

    unsafe fn nvmlDeviceGetGpuFabricInfoV(
        device: nvmlDevice_t,
        gpu_fabric_info: *mut nvmlGpuFabricInfoV_t,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        let version = read_in!(gpu_fabric_info.cast_const().cast::<u32>());
        if version != nvmlGpuFabricInfo_v2 {
            return Err(NvmlError::ARGUMENT_VERSION_MISMATCH);
        }
        write_out!(gpu_fabric_info => nvmlGpuFabricInfoV_t { version, state: fabric_state(gpu), ..Default::default() })
    }

    unsafe fn nvmlDeviceQueryDrainState(
        pci_info: *mut nvmlPciInfo_t,
        current_state: *mut nvmlEnableState_t,
    ) -> NvmlResult {
        session()?;
        let pci = read_in!(pci_info.cast_const());
        topology::by_pci_location(pci.domain, pci.bus, pci.device)?;
        write_out!(current_state => NVML_FEATURE_DISABLED)
    }

    unsafe fn nvmlGetBlacklistDeviceCount(count: *mut u32) -> NvmlResult {
        session()?;
        write_out!(count => 0)
    }

    unsafe fn nvmlGetExcludedDeviceCount(count: *mut u32) -> NvmlResult {
        session()?;
        write_out!(count => 0)
    }

    unsafe fn nvmlGetBlacklistDeviceInfoByIndex(
        _index: u32,
        _info: *mut nvmlExcludedDeviceInfo_t,
    ) -> NvmlResult {
        session()?;
        Err(NvmlError::INVALID_ARGUMENT)
    }

    unsafe fn nvmlGetExcludedDeviceInfoByIndex(
        _index: u32,
        _info: *mut nvmlExcludedDeviceInfo_t,
    ) -> NvmlResult {
        session()?;
        Err(NvmlError::INVALID_ARGUMENT)
    }
}
