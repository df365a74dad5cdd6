//! Memory beyond the limit, where its owner allows that: the driver keeps it on the host and shows it to the card.
//!
//! It is not counted, so it must not be brought onto the card: prefetches to a card, and advice that lets the driver move or copy it
//! there, are out of memory.
#![allow(unsafe_code)]

use super::{checked, locked};
use crate::driver::cuda as real;
use crate::hook::hooks;
use crate::process::{self, Process};
use partage_driver_api::cuda::*;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// `CU_DEVICE_CPU`.
const CPU: CUdevice = -1;

/// What lies on the host instead.
#[derive(Default)]
pub(super) struct Beyond {
    /// Addresses and bytes.
    all: Mutex<BTreeMap<CUdeviceptr, u64>>,
    /// Whether there ever was any: most processes never have it.
    any: AtomicBool,
}

impl Beyond {
    fn any(&self) -> bool {
        self.any.load(Relaxed)
    }

    fn insert(&self, pointer: CUdeviceptr, bytes: u64) {
        locked(&self.all).insert(pointer, bytes);
        self.any.store(true, Relaxed);
    }

    /// Whether anything there is.
    fn overlaps(&self, pointer: CUdeviceptr, bytes: u64) -> bool {
        let end = pointer.saturating_add(bytes);
        let all = locked(&self.all);
        // They do not overlap each other: the last that begins before the end is the one.
        all.range(..end).next_back().is_some_and(|(&start, &size)| start.saturating_add(size) > pointer)
    }

    /// Frees what may be one, with the driver's call.
    #[inline]
    pub(super) fn free(&self, pointer: CUdeviceptr, call: impl FnOnce() -> CUresult) -> CUresult {
        if !self.any() {
            return call();
        }
        // Before the driver does: another thread may have the address afterwards.
        let held = locked(&self.all).remove(&pointer);
        let answer = call();
        if let Some(bytes) = held.filter(|_| answer != CUDA_SUCCESS) {
            locked(&self.all).insert(pointer, bytes);
        }
        answer
    }

    /// What the driver does not know any more has gone with what it was in.
    pub(super) fn forget_gone(&self, is_known: impl Fn(CUdeviceptr) -> bool) {
        if self.any() {
            locked(&self.all).retain(|&pointer, _| is_known(pointer));
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
    // SAFETY: a number to fill in.
    let answer = unsafe { real::cuMemAllocManaged(&mut pointer, size, CU_MEM_ATTACH_GLOBAL) };
    checked(answer).map_err(|_| refused)?;
    // A card that cannot do this moves what it needs, as managed memory does anyway.
    // SAFETY: just allocated, and as long.
    unsafe { real::cuMemAdvise(pointer, size, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, CPU) };
    process.memory.beyond.insert(pointer, bytes);
    Ok(pointer)
}

fn any() -> bool {
    process::attached().is_some_and(|process| process.memory.beyond.any())
}

/// Whether it is among what must stay on the host.
fn stays(pointer: CUdeviceptr, bytes: usize) -> bool {
    process::attached().is_some_and(|process| process.memory.beyond.overlaps(pointer, bytes as u64))
}

/// Whether advice lets the driver move memory to a card, or copy it there.
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
    ) |next, _variant| if any {
        if leaves_host(advice, device == CPU) && stays(pointer, count) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        // SAFETY: the arguments are the program's own, passed on unchanged.
        unsafe { next(pointer, count, advice, device) }
    }

    fn cuMemAdvise_v2(
        pointer: CUdeviceptr,
        count: usize,
        advice: CUmem_advise,
        location: CUmemLocation,
    ) |next, _variant| if any {
        if leaves_host(advice, location.type_ != CU_MEM_LOCATION_TYPE_DEVICE) && stays(pointer, count) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        // SAFETY: the arguments are the program's own, passed on unchanged.
        unsafe { next(pointer, count, advice, location) }
    }

    fn cuMemPrefetchAsync(
        pointer: CUdeviceptr,
        count: usize,
        to: CUdevice,
        stream: CUstream,
    ) twin cuMemPrefetchAsync_ptsz |next, _variant| if any {
        if to != CPU && stays(pointer, count) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        // SAFETY: the program's promise.
        unsafe { next(pointer, count, to, stream) }
    }

    fn cuMemPrefetchAsync_v2(
        pointer: CUdeviceptr,
        count: usize,
        location: CUmemLocation,
        flags: u32,
        stream: CUstream,
    ) twin cuMemPrefetchAsync_v2_ptsz |next, _variant| if any {
        if location.type_ == CU_MEM_LOCATION_TYPE_DEVICE && stays(pointer, count) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        // SAFETY: the program's promise.
        unsafe { next(pointer, count, location, flags, stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_overlaps_is_found() {
        let beyond = Beyond::default();
        assert!(!beyond.any() && !beyond.overlaps(0, u64::MAX));
        beyond.insert(100, 50);
        beyond.insert(200, 50);
        for (at, bytes, there) in [
            (0, 100, false),
            (0, 101, true),
            (149, 1, true),
            (150, 50, false),
            (150, 51, true),
            (250, 9, false),
        ] {
            assert_eq!(beyond.overlaps(at, bytes), there, "{at} {bytes}");
        }
        assert_eq!(beyond.free(200, || CUDA_ERROR_INVALID_VALUE), CUDA_ERROR_INVALID_VALUE);
        assert!(beyond.overlaps(249, 1));
        assert_eq!(beyond.free(200, || CUDA_SUCCESS), CUDA_SUCCESS);
        assert!(!beyond.overlaps(249, 1));
        beyond.forget_gone(|_| false);
        assert!(!beyond.overlaps(0, u64::MAX));
    }
}
