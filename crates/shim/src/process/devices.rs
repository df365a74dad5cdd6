//! Which CUDA device is which GPU of the region. Their numbers differ: a program may reorder or hide devices, the region
//! knows GPUs by their UUIDs.
#![allow(unsafe_code)]

use crate::driver::cuda as real;
use partage_driver_api::cuda::{CUDA_SUCCESS, CUdevice, CUuuid};
use partage_region::{MAX_GPUS, RegionTenant};
use std::sync::OnceLock;

/// Devices beyond this are not looked at; no machine has as many.
const MOST: usize = 64;

/// The GPU of every device. A device that the region does not name has none: the container was not granted it.
#[derive(Default)]
pub(crate) struct Devices {
    /// Filled once the driver answers; it does not change while a process lives.
    known: OnceLock<Known>,
}

struct Known {
    gpus: [Option<u8>; MOST],
    /// The only device, where there is but one: then nobody needs to ask which is meant.
    only: Option<usize>,
}

impl Devices {
    /// The region's GPU of a device.
    pub(crate) fn gpu(&self, region: &RegionTenant, device: CUdevice) -> Option<usize> {
        let known = self.known(region)?;
        known.gpus.get(usize::try_from(device).ok()?).copied().flatten().map(usize::from)
    }

    /// The GPU of the calling thread's context, as the driver says.
    #[inline]
    pub(crate) fn current(&self, region: &RegionTenant) -> Option<usize> {
        match self.known(region)?.only {
            Some(gpu) => Some(gpu),
            None => self.gpu(region, current_device()?),
        }
    }

    /// The same as far as is known without asking: for launches.
    #[inline]
    pub(crate) fn current_for_launch(&self, region: &RegionTenant) -> Option<usize> {
        match self.known(region)?.only {
            Some(gpu) => Some(gpu),
            None => super::current_context::gpu(|| self.gpu(region, current_device()?)),
        }
    }

    /// The only device's GPU, where that is known and there is but one.
    #[inline]
    pub(crate) fn only(&self) -> Option<usize> {
        self.known.get()?.only
    }

    #[inline]
    fn known(&self, region: &RegionTenant) -> Option<&Known> {
        match self.known.get() {
            Some(known) => Some(known),
            None => self.learn(region),
        }
    }

    #[cold]
    fn learn(&self, region: &RegionTenant) -> Option<&Known> {
        let mut count = 0;
        // SAFETY: a number to fill in. Before cuInit this fails, and nothing is remembered.
        if unsafe { real::cuDeviceGetCount(&mut count) } != CUDA_SUCCESS {
            return None;
        }
        let mut gpus = [None; MOST];
        for (device, gpu) in (0..count).zip(&mut gpus) {
            *gpu = uuid(device).and_then(|uuid| region.find(&uuid)).and_then(|gpu| u8::try_from(gpu).ok());
        }
        let only = if count == 1 { gpus[0].map(usize::from).filter(|&gpu| gpu < MAX_GPUS) } else { None };
        Some(self.known.get_or_init(|| Known { gpus, only }))
    }
}

fn current_device() -> Option<CUdevice> {
    let mut device = 0;
    // SAFETY: a number to fill in.
    (unsafe { real::cuCtxGetDevice(&mut device) } == CUDA_SUCCESS).then_some(device)
}

fn uuid(device: CUdevice) -> Option<[u8; 16]> {
    let mut uuid = CUuuid { bytes: [0; 16] };
    // The older question: with MIG the newer one names the instance, the grant the GPU.
    // SAFETY: a struct to fill in.
    let answer = unsafe { real::cuDeviceGetUuid(&mut uuid, device) };
    (answer == CUDA_SUCCESS).then(|| uuid.bytes.map(|byte| byte as u8))
}
