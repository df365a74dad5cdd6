//! What these cards could do and do not: none is cut in instances, nothing is virtual, nobody encodes, nothing is
//! confidential.

use super::call::{Answer, answer, gpu, passed};
use super::session::session;
use super::*;
use crate::node::LinkEnd;
use crate::profile::Architecture;

/// A card that can be cut in instances.
fn cuttable(device: nvmlDevice_t) -> Result<call::Gpu, NvmlError> {
    let gpu = gpu(device)?;
    if gpu.profile().mig_instances == 0 { Err(NvmlError::NOT_SUPPORTED) } else { Ok(gpu) }
}

impl Mig for Library {
    unsafe fn nvmlDeviceGetMigMode(
        device: nvmlDevice_t,
        current_mode: *mut u32,
        pending_mode: *mut u32,
    ) -> Answer {
        let mode = match cuttable(device)?.is_split() {
            true => NVML_DEVICE_MIG_ENABLE,
            false => NVML_DEVICE_MIG_DISABLE,
        };
        answer!(current_mode => mode, pending_mode => mode)
    }

    unsafe fn nvmlDeviceGetMaxMigDeviceCount(device: nvmlDevice_t, count: *mut u32) -> Answer {
        answer!(count => gpu(device)?.profile().mig_instances)
    }

    unsafe fn nvmlDeviceIsMigDeviceHandle(device: nvmlDevice_t, is_mig_device: *mut u32) -> Answer {
        gpu(device)?;
        answer!(is_mig_device => 0)
    }

    unsafe fn nvmlDeviceGetMigDeviceHandleByIndex(
        device: nvmlDevice_t,
        index: u32,
        _mig_device: *mut nvmlDevice_t,
    ) -> Answer {
        let gpu = cuttable(device)?;
        // Within what there can be, none is there.
        let possible = index < gpu.profile().mig_instances;
        Err(if possible { NvmlError::NOT_FOUND } else { NvmlError::INVALID_ARGUMENT })
    }

    unsafe fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
        mig_device: nvmlDevice_t,
        _device: *mut nvmlDevice_t,
    ) -> Answer {
        gpu(mig_device)?;
        Err(NvmlError::INVALID_ARGUMENT)
    }

    unsafe fn nvmlGpmQueryDeviceSupport(device: nvmlDevice_t, gpm_support: *mut nvmlGpmSupport_t) -> Answer {
        gpu(device)?;
        let version = passed!(gpm_support.cast_const().cast::<u32>());
        if version != NVML_GPM_SUPPORT_VERSION {
            return Err(NvmlError::ARGUMENT_VERSION_MISMATCH);
        }
        answer!(gpm_support => nvmlGpmSupport_t { version, isSupportedDevice: 0 })
    }

    unsafe fn nvmlGpmMetricsGet(metrics_get: *mut nvmlGpmMetricsGet_t) -> Answer {
        session()?;
        // Some programs ask with less than the whole structure: only its version is looked at.
        let version = passed!(metrics_get.cast_const().cast::<u32>());
        Err(if version == NVML_GPM_METRICS_GET_VERSION {
            NvmlError::NOT_SUPPORTED
        } else {
            NvmlError::ARGUMENT_VERSION_MISMATCH
        })
    }
}

impl Vgpu for Library {
    unsafe fn nvmlDeviceGetVirtualizationMode(
        device: nvmlDevice_t,
        virtual_mode: *mut nvmlGpuVirtualizationMode_t,
    ) -> Answer {
        gpu(device)?;
        answer!(virtual_mode => NVML_GPU_VIRTUALIZATION_MODE_NONE)
    }
}

/// Whether a card is part of a fabric of switches: since Hopper they say so themselves.
fn fabric(gpu: call::Gpu) -> nvmlGpuFabricState_t {
    let switched = gpu.card().gpu.links.iter().any(|end| matches!(end, LinkEnd::Switch(_)));
    let state = match switched && gpu.profile().architecture >= Architecture::Hopper {
        true => NVML_GPU_FABRIC_STATE_COMPLETED,
        false => NVML_GPU_FABRIC_STATE_NOT_SUPPORTED,
    };
    state as nvmlGpuFabricState_t
}

impl Others for Library {
    unsafe fn nvmlDeviceGetEncoderStats(
        device: nvmlDevice_t,
        session_count: *mut u32,
        average_fps: *mut u32,
        average_latency: *mut u32,
    ) -> Answer {
        gpu(device)?;
        answer!(session_count => 0, average_fps => 0, average_latency => 0)
    }

    unsafe fn nvmlDeviceGetEncoderSessions(
        device: nvmlDevice_t,
        session_count: *mut u32,
        _session_infos: *mut nvmlEncoderSessionInfo_t,
    ) -> Answer {
        gpu(device)?;
        answer!(session_count => 0)
    }

    unsafe fn nvmlDeviceGetFBCStats(device: nvmlDevice_t, fbc_stats: *mut nvmlFBCStats_t) -> Answer {
        gpu(device)?;
        answer!(fbc_stats => nvmlFBCStats_t::default())
    }

    unsafe fn nvmlDeviceGetFBCSessions(
        device: nvmlDevice_t,
        session_count: *mut u32,
        _session_info: *mut nvmlFBCSessionInfo_t,
    ) -> Answer {
        gpu(device)?;
        answer!(session_count => 0)
    }

    unsafe fn nvmlDeviceGetConfComputeProtectedMemoryUsage(
        device: nvmlDevice_t,
        memory: *mut nvmlMemory_t,
    ) -> Answer {
        gpu(device)?;
        answer!(memory => nvmlMemory_t::default())
    }

    unsafe fn nvmlSystemGetConfComputeCapabilities(capabilities: *mut nvmlConfComputeSystemCaps_t) -> Answer {
        session()?;
        answer!(capabilities => nvmlConfComputeSystemCaps_t::default())
    }

    unsafe fn nvmlSystemGetConfComputeState(state: *mut nvmlConfComputeSystemState_t) -> Answer {
        session()?;
        answer!(state => nvmlConfComputeSystemState_t::default())
    }

    unsafe fn nvmlDeviceGetGpuFabricInfo(
        device: nvmlDevice_t,
        gpu_fabric_info: *mut nvmlGpuFabricInfo_t,
    ) -> Answer {
        let gpu = gpu(device)?;
        answer!(gpu_fabric_info => nvmlGpuFabricInfo_t { state: fabric(gpu), ..Default::default() })
    }

    unsafe fn nvmlDeviceGetGpuFabricInfoV(
        device: nvmlDevice_t,
        gpu_fabric_info: *mut nvmlGpuFabricInfoV_t,
    ) -> Answer {
        let gpu = gpu(device)?;
        let version = passed!(gpu_fabric_info.cast_const().cast::<u32>());
        if version != nvmlGpuFabricInfo_v2 {
            return Err(NvmlError::ARGUMENT_VERSION_MISMATCH);
        }
        answer!(gpu_fabric_info => nvmlGpuFabricInfoV_t { version, state: fabric(gpu), ..Default::default() })
    }

    unsafe fn nvmlDeviceQueryDrainState(
        pci_info: *mut nvmlPciInfo_t,
        current_state: *mut nvmlEnableState_t,
    ) -> Answer {
        session()?;
        let pci = passed!(pci_info.cast_const());
        topology::by_place(pci.domain, pci.bus, pci.device)?;
        answer!(current_state => NVML_FEATURE_DISABLED)
    }

    unsafe fn nvmlGetBlacklistDeviceCount(count: *mut u32) -> Answer {
        session()?;
        answer!(count => 0)
    }

    unsafe fn nvmlGetExcludedDeviceCount(count: *mut u32) -> Answer {
        session()?;
        answer!(count => 0)
    }

    unsafe fn nvmlGetBlacklistDeviceInfoByIndex(_index: u32, _info: *mut nvmlExcludedDeviceInfo_t) -> Answer {
        session()?;
        Err(NvmlError::INVALID_ARGUMENT)
    }

    unsafe fn nvmlGetExcludedDeviceInfoByIndex(_index: u32, _info: *mut nvmlExcludedDeviceInfo_t) -> Answer {
        session()?;
        Err(NvmlError::INVALID_ARGUMENT)
    }
}
