//! Maps CUDA devices to GPUs of the region. Their indexes differ: a program may reorder or hide devices, and the region
//! identifies GPUs by UUID.
#![allow(unsafe_code)]

use crate::driver::cuda as driver;
use partage_driver_api::cuda::{CUDA_SUCCESS, CUdevice, CUuuid};
use partage_region::{MAX_GPUS, RegionTenant};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU8, AtomicU64};

/// Devices beyond this number are ignored; no machine has as many.
const MAX_DEVICES: usize = 64;

/// The GPU of every device, looked up when the driver first answers.
///
/// A device that is not in the region has no GPU, and its calls are refused until the region grows: then all devices
/// are looked up again. The driver's device indexes do not change while a process lives.
pub(crate) struct Devices {
    /// Generation of the region at the last lookup, plus one; zero before the first.
    looked_up: AtomicU64,
    /// GPU of the only device, plus one, if there is only one: then the current device need not be queried. Zero
    /// otherwise.
    only: AtomicU8,
    /// GPU of each device, plus one; zero for none.
    gpus: [AtomicU8; MAX_DEVICES],
}

impl Default for Devices {
    fn default() -> Self {
        Self {
            looked_up: AtomicU64::new(0),
            only: AtomicU8::new(0),
            gpus: [const { AtomicU8::new(0) }; MAX_DEVICES],
        }
    }
}

/// Returns the GPU that a word encodes.
#[inline]
fn gpu_of(word: &AtomicU8) -> Option<usize> {
    usize::from(word.load(Relaxed)).checked_sub(1)
}

impl Devices {
    /// Returns the region's GPU of a device.
    pub(crate) fn gpu(&self, region: &RegionTenant, device: CUdevice) -> Option<usize> {
        let word = self.gpus.get(usize::try_from(device).ok()?)?;
        gpu_of(word).or_else(|| if self.look_up(region) { gpu_of(word) } else { None })
    }

    /// Returns the GPU of the calling thread's context, by querying the driver.
    #[inline]
    pub(crate) fn current(&self, region: &RegionTenant) -> Option<usize> {
        match self.only() {
            Some(gpu) => Some(gpu),
            None => self.among_several(region, || self.gpu(region, current_device()?)),
        }
    }

    /// Returns the GPU of the calling thread's context, from the cache if possible: for launches.
    #[inline]
    pub(crate) fn current_for_launch(&self, region: &RegionTenant) -> Option<usize> {
        match self.only() {
            Some(gpu) => Some(gpu),
            None => self.among_several(region, || {
                super::current_context::gpu(|| self.gpu(region, current_device()?))
            }),
        }
    }

    /// Returns the GPU of the only device, if it is known that there is only one.
    #[inline]
    pub(crate) fn only(&self) -> Option<usize> {
        gpu_of(&self.only)
    }

    /// Finds a GPU if there are several devices, or if that is not known yet.
    fn among_several(&self, region: &RegionTenant, find: impl FnOnce() -> Option<usize>) -> Option<usize> {
        if self.looked_up.load(Acquire) == 0 && !self.look_up(region) {
            return None;
        }
        self.only().or_else(find)
    }

    /// Looks up all devices, unless that was done for the region's current generation. Returns whether it was done.
    #[cold]
    fn look_up(&self, region: &RegionTenant) -> bool {
        // Read before the region's list: if it grows meanwhile, the next miss looks up again.
        let looked_up = u64::from(region.generation()) + 1;
        if self.looked_up.load(Acquire) == looked_up {
            return false;
        }
        let mut count = 0;
        // SAFETY: the pointer is to a local variable. Before `cuInit` the call fails, and nothing is recorded.
        if unsafe { driver::cuDeviceGetCount(&mut count) } != CUDA_SUCCESS {
            return false;
        }
        for (device, word) in (0..count).zip(&self.gpus) {
            let gpu = uuid(device).and_then(|uuid| region.find(&uuid));
            // Never reset to none: GPUs do not leave a region, and another thread may have seen more of them.
            if let Some(gpu) = gpu.and_then(|gpu| u8::try_from(gpu + 1).ok()) {
                word.store(gpu, Relaxed);
            }
        }
        if count == 1 {
            self.only.store(self.gpus[0].load(Relaxed), Relaxed);
        }
        self.looked_up.store(looked_up, Release);
        true
    }
}

const _: () = assert!(MAX_GPUS < u8::MAX as usize);

fn current_device() -> Option<CUdevice> {
    let mut device = 0;
    // SAFETY: the pointer is to a local variable, which the driver fills in.
    (unsafe { driver::cuCtxGetDevice(&mut device) } == CUDA_SUCCESS).then_some(device)
}

fn uuid(device: CUdevice) -> Option<[u8; 16]> {
    let mut uuid = CUuuid { bytes: [0; 16] };
    // The older query: with MIG the newer one returns the UUID of the instance, while the grant has that of the GPU.
    // SAFETY: the pointer is to a local variable, which the driver fills in.
    let answer = unsafe { driver::cuDeviceGetUuid(&mut uuid, device) };
    (answer == CUDA_SUCCESS).then(|| uuid.bytes.map(|byte| byte as u8))
}
