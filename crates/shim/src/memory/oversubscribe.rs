//! Memory above the limit, if the region's policy allows that: the driver keeps it on the host and maps it for the
//! GPU.
//!
//! It is not counted, so it must not be moved to a GPU: prefetches to a GPU, and advice that lets the driver move or
//! copy it there, fail with an out-of-memory error.
#![allow(unsafe_code)]

use super::{checked, lock};
use crate::driver::cuda as driver;
use crate::hook::hooks;
use crate::process::{self, Process};
use partage_driver_api::cuda::*;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// `CU_DEVICE_CPU`, the host's device number.
const CPU_DEVICE: CUdevice = -1;

/// Allocations that are on the host instead of the GPU.
#[derive(Default)]
pub(super) struct OversubscribedMemory {
    /// Sizes of the allocations in bytes, by address.
    all: Mutex<BTreeMap<CUdeviceptr, u64>>,
    /// Whether there ever was one: most processes never have any.
    any: AtomicBool,
}

impl OversubscribedMemory {
    fn any(&self) -> bool {
        self.any.load(Relaxed)
    }

    fn insert(&self, pointer: CUdeviceptr, bytes: u64) {
        lock(&self.all).insert(pointer, bytes);
        self.any.store(true, Relaxed);
    }

    /// Returns whether a range overlaps any of them.
    fn overlaps(&self, pointer: CUdeviceptr, bytes: u64) -> bool {
        let end = pointer.saturating_add(bytes);
        let all = lock(&self.all);
        // They do not overlap each other: only the last that begins before the end can overlap.
        all.range(..end).next_back().is_some_and(|(&start, &size)| start.saturating_add(size) > pointer)
    }

    /// Frees an allocation that may be one of them, with the driver's call.
    #[inline]
    pub(super) fn free(&self, pointer: CUdeviceptr, call: impl FnOnce() -> CUresult) -> CUresult {
        if !self.any() {
            return call();
        }
        // Removed before the driver frees it: another thread may get the address afterwards.
        let held = lock(&self.all).remove(&pointer);
        let answer = call();
        if let Some(bytes) = held.filter(|_| answer != CUDA_SUCCESS) {
            lock(&self.all).insert(pointer, bytes);
        }
        answer
    }

    /// Forgets allocations that the driver no longer knows.
    pub(super) fn forget_unknown(&self, is_known: impl Fn(CUdeviceptr) -> bool) {
        if self.any() {
            lock(&self.all).retain(|&pointer, _| is_known(pointer));
        }
    }
}

/// Allocates on the host what the limit refused.
pub(super) fn allocate(process: &Process, bytes: u64, refused: CUresult) -> Result<CUdeviceptr, CUresult> {
    if refused != CUDA_ERROR_OUT_OF_MEMORY || !process.region.policy().oversubscribe {
        return Err(refused);
    }
    let size = usize::try_from(bytes).map_err(|_| refused)?;
    let mut pointer = 0;
    // SAFETY: the pointer is to a local variable, which the driver fills in.
    let answer = unsafe { driver::cuMemAllocManaged(&mut pointer, size, CU_MEM_ATTACH_GLOBAL) };
    checked(answer).map_err(|_| refused)?;
    // A GPU that does not support this moves what it needs, as managed memory does anyway.
    // SAFETY: the range is exactly the allocation that was just made.
    unsafe { driver::cuMemAdvise(pointer, size, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, CPU_DEVICE) };
    process.memory.oversubscribed.insert(pointer, bytes);
    Ok(pointer)
}

fn any_oversubscribed() -> bool {
    process::attached().is_some_and(|process| process.memory.oversubscribed.any())
}

/// Returns whether a range must stay on the host.
fn must_stay_on_host(pointer: CUdeviceptr, bytes: usize) -> bool {
    process::attached().is_some_and(|process| process.memory.oversubscribed.overlaps(pointer, bytes as u64))
}

/// Returns whether advice lets the driver move memory to a GPU, or copy it there.
fn leaves_host(advice: CUmem_advise, to_host: bool) -> bool {
    match advice {
        CU_MEM_ADVISE_SET_PREFERRED_LOCATION => !to_host,
        CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION | CU_MEM_ADVISE_SET_READ_MOSTLY => true,
        _ => false,
    }
}

hooks! { cuda;
    fn cuMemAdvise(
        pointer: CUdeviceptr,
        count: usize,
        advice: CUmem_advise,
        device: CUdevice,
    ) |next, _variant| if any_oversubscribed {
        if leaves_host(advice, device == CPU_DEVICE) && must_stay_on_host(pointer, count) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        unsafe { next(pointer, count, advice, device) }
    }

    fn cuMemAdvise_v2(
        pointer: CUdeviceptr,
        count: usize,
        advice: CUmem_advise,
        location: CUmemLocation,
    ) |next, _variant| if any_oversubscribed {
        if leaves_host(advice, location.type_ != CU_MEM_LOCATION_TYPE_DEVICE) && must_stay_on_host(pointer, count) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        unsafe { next(pointer, count, advice, location) }
    }

    fn cuMemPrefetchAsync(
        pointer: CUdeviceptr,
        count: usize,
        to: CUdevice,
        stream: CUstream,
    ) twin cuMemPrefetchAsync_ptsz |next, _variant| if any_oversubscribed {
        if to != CPU_DEVICE && must_stay_on_host(pointer, count) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        unsafe { next(pointer, count, to, stream) }
    }

    fn cuMemPrefetchAsync_v2(
        pointer: CUdeviceptr,
        count: usize,
        location: CUmemLocation,
        flags: u32,
        stream: CUstream,
    ) twin cuMemPrefetchAsync_v2_ptsz |next, _variant| if any_oversubscribed {
        if location.type_ == CU_MEM_LOCATION_TYPE_DEVICE && must_stay_on_host(pointer, count) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        unsafe { next(pointer, count, location, flags, stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_ranges_are_found() {
        let oversubscribed = OversubscribedMemory::default();
        assert!(!oversubscribed.any() && !oversubscribed.overlaps(0, u64::MAX));
        oversubscribed.insert(100, 50);
        oversubscribed.insert(200, 50);
        for (at, bytes, there) in [
            (0, 100, false),
            (0, 101, true),
            (149, 1, true),
            (150, 50, false),
            (150, 51, true),
            (250, 9, false),
        ] {
            assert_eq!(oversubscribed.overlaps(at, bytes), there, "{at} {bytes}");
        }
        assert_eq!(oversubscribed.free(200, || CUDA_ERROR_INVALID_VALUE), CUDA_ERROR_INVALID_VALUE);
        assert!(oversubscribed.overlaps(249, 1));
        assert_eq!(oversubscribed.free(200, || CUDA_SUCCESS), CUDA_SUCCESS);
        assert!(!oversubscribed.overlaps(249, 1));
        oversubscribed.forget_unknown(|_| false);
        assert!(!oversubscribed.overlaps(0, u64::MAX));
    }
}
