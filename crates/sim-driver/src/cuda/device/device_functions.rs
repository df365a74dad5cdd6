//! Exported functions for devices.

use super::Device;
use crate::cuda::context::write_out;
use crate::cuda::session::{device, session};
use crate::cuda::{DeviceApi, Library};
use partage_driver_api::cuda::*;
use std::ffi::CStr;

/// Writes a NUL-terminated string, truncated to the buffer.
///
/// # Safety
/// `to` is null or valid for writes of `length` bytes.
unsafe fn write_text(to: *mut c_char, length: i32, text: &str) -> Result<(), CudaError> {
    let room = usize::try_from(length)
        .ok()
        .filter(|&room| room > 0 && !to.is_null())
        .ok_or(CudaError::INVALID_VALUE)?;
    let fits = text.len().min(room - 1);
    // SAFETY: `fits` is smaller than both the text and the buffer.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast::<u8>(), fits) };
    // SAFETY: `fits` is at most `length - 1`, so the terminator is inside the buffer.
    unsafe { to.wrapping_add(fits).write(0) };
    Ok(())
}

fn bus_id(device: &Device) -> String {
    let pci = &device.config.pci;
    format!("{:04X}:{:02X}:{:02X}.0", pci.domain, pci.bus, pci.device)
}

/// Returns whether two devices can access each other's memory: always over NVLink, over PCIe below one host bridge.
fn are_peers(a: &Device, b: &Device) -> Result<bool, CudaError> {
    let config = session()?.node.config();
    if a.gpu == b.gpu {
        return Ok(false);
    }
    Ok(config.nvlinks(a.gpu, b.gpu) > 0 || a.config.numa == b.config.numa)
}

impl DeviceApi for Library {
    unsafe fn cuDeviceGetCount(count: *mut i32) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(count, session()?.devices.len() as i32) }
    }

    unsafe fn cuDeviceGet(to: *mut CUdevice, ordinal: i32) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(to, device(ordinal)?.ordinal) }
    }

    unsafe fn cuDeviceGetName(name: *mut c_char, length: i32, ordinal: CUdevice) -> Result<(), CudaError> {
        // SAFETY: CUDA requires the buffer to be null or `length` bytes long.
        unsafe { write_text(name, length, &device(ordinal)?.profile.name) }
    }

    unsafe fn cuDeviceGetUuid(uuid: *mut CUuuid, ordinal: CUdevice) -> Result<(), CudaError> {
        let bytes = device(ordinal)?.config.uuid_bytes();
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(uuid.cast::<[u8; 16]>(), bytes) }
    }

    unsafe fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, ordinal: CUdevice) -> Result<(), CudaError> {
        // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
        unsafe { Self::cuDeviceGetUuid(uuid, ordinal) }
    }

    unsafe fn cuDeviceTotalMem_v2(bytes: *mut usize, ordinal: CUdevice) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(bytes, device(ordinal)?.profile.memory.usable() as usize) }
    }

    unsafe fn cuDeviceTotalMem(bytes: *mut u32, ordinal: CUdevice) -> Result<(), CudaError> {
        let total = device(ordinal)?.profile.memory.usable();
        // SAFETY: CUDA requires output pointers to be null or valid for writes. The 32-bit form saturates.
        unsafe { write_out(bytes, u32::try_from(total).unwrap_or(u32::MAX)) }
    }

    unsafe fn cuDeviceGetAttribute(
        value: *mut i32,
        attribute: CUdevice_attribute,
        ordinal: CUdevice,
    ) -> Result<(), CudaError> {
        let found = device(ordinal)?.attribute(attribute).ok_or(CudaError::INVALID_VALUE)?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(value, found) }
    }

    unsafe fn cuDeviceComputeCapability(
        major: *mut i32,
        minor: *mut i32,
        ordinal: CUdevice,
    ) -> Result<(), CudaError> {
        let capability = device(ordinal)?.profile.compute.capability as i32;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(major, capability / 10) }?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(minor, capability % 10) }
    }

    unsafe fn cuDeviceGetProperties(properties: *mut CUdevprop, ordinal: CUdevice) -> Result<(), CudaError> {
        let device = device(ordinal)?;
        let of = |attribute| device.attribute(attribute).unwrap_or(0);
        let found = CUdevprop {
            maxThreadsPerBlock: of(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
            maxThreadsDim: [1024, 1024, 64],
            maxGridSize: [i32::MAX, 65_535, 65_535],
            sharedMemPerBlock: of(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK),
            totalConstantMemory: of(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY),
            SIMDWidth: of(CU_DEVICE_ATTRIBUTE_WARP_SIZE),
            memPitch: i32::MAX,
            regsPerBlock: of(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK),
            clockRate: of(CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
            textureAlign: of(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT),
        };
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(properties, found) }
    }

    unsafe fn cuDeviceGetPCIBusId(
        pci_bus_id: *mut c_char,
        length: i32,
        ordinal: CUdevice,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires the buffer to be null or `length` bytes long.
        unsafe { write_text(pci_bus_id, length, &bus_id(device(ordinal)?)) }
    }

    unsafe fn cuDeviceGetByPCIBusId(to: *mut CUdevice, pci_bus_id: *const c_char) -> Result<(), CudaError> {
        let session = session()?;
        if pci_bus_id.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: non-null, and the program passes a NUL-terminated string.
        let asked = unsafe { CStr::from_ptr(pci_bus_id) }.to_str().unwrap_or_default().to_ascii_uppercase();
        // The domain and the function may be omitted.
        let means = |device: &&Device| {
            let full = bus_id(device);
            let short = full.strip_suffix(".0").unwrap_or(&full);
            [full.as_str(), short, full.trim_start_matches("0000:"), short.trim_start_matches("0000:")]
                .contains(&asked.as_str())
        };
        let found = session.devices.iter().find(means).ok_or(CudaError::INVALID_VALUE)?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(to, found.ordinal) }
    }

    unsafe fn cuDeviceCanAccessPeer(
        can_access: *mut i32,
        from: CUdevice,
        peer: CUdevice,
    ) -> Result<(), CudaError> {
        let peers = are_peers(device(from)?, device(peer)?)?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(can_access, i32::from(peers)) }
    }

    unsafe fn cuDeviceGetP2PAttribute(
        value: *mut i32,
        attribute: CUdevice_P2PAttribute,
        from: CUdevice,
        to: CUdevice,
    ) -> Result<(), CudaError> {
        let (from, to) = (device(from)?, device(to)?);
        if from.gpu == to.gpu {
            return Err(CudaError::INVALID_DEVICE);
        }
        let linked = session()?.node.config().nvlinks(from.gpu, to.gpu) > 0;
        let found = match attribute {
            CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK => i32::from(!linked),
            CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED
            | CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED => i32::from(are_peers(from, to)?),
            CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED => i32::from(linked),
            _ => return Err(CudaError::INVALID_VALUE),
        };
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(value, found) }
    }

    unsafe fn cuDeviceGetExecAffinitySupport(
        value: *mut i32,
        kind: CUexecAffinityType,
        ordinal: CUdevice,
    ) -> Result<(), CudaError> {
        device(ordinal)?;
        if kind != CU_EXEC_AFFINITY_TYPE_SM_COUNT {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: CUDA requires output pointers to be null or valid for writes. Execution affinity requires MPS.
        unsafe { write_out(value, 0) }
    }

    unsafe fn cuDeviceGetTexture1DLinearMaxWidth(
        max_width_in_elements: *mut usize,
        _format: CUarray_format,
        num_channels: u32,
        ordinal: CUdevice,
    ) -> Result<(), CudaError> {
        device(ordinal)?;
        if !matches!(num_channels, 1 | 2 | 4) {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(max_width_in_elements, 1 << 28) }
    }
}
