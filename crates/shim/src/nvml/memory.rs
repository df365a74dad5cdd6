//! Total, used and free memory: the limit, and what the container's processes use of it.
//!
//! `cuMemGetInfo` returns the same values. Without a limit, the true totals are shown.
#![allow(unsafe_code)]

use super::{DeviceShare, check, read_argument, with_share, write_result};
use crate::hook::hooks;
use partage_driver_api::nvml::*;

/// The container's memory of a GPU. The three parts add up to the total.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MemoryView {
    total: u64,
    used: u64,
    free: u64,
    /// Granted, but neither used nor free: only if more was granted than the GPU has.
    reserved: u64,
}

impl MemoryView {
    fn new(limit: u64, used: u64, card_total: u64, card_free: u64) -> Self {
        let total = limit.min(card_total);
        let used = used.min(total);
        let free = (total - used).min(card_free);
        Self { total, used, free, reserved: total - used - free }
    }
}

impl DeviceShare {
    /// Returns the container's part of the driver's values for the GPU; `None` if it has no limit.
    fn view(&self, card_total: u64, card_free: u64) -> Option<MemoryView> {
        let region = &self.process.region;
        let limit = region.memory_limit(self.gpu)?;
        // Memory of dead processes is reclaimed first.
        region.reclaim_dead_processes_if_due();
        Some(MemoryView::new(limit, region.used(self.gpu), card_total, card_free))
    }

    /// # Safety
    /// `to` must be null or valid for writes, as the driver's functions require.
    unsafe fn write_memory_info(
        &self,
        to: *mut nvmlMemory_t,
        query: impl FnOnce() -> nvmlReturn_t,
    ) -> Result<(), nvmlReturn_t> {
        check(query())?;
        // SAFETY: the call succeeded, so the driver has written there.
        let card = unsafe { read_argument(to.cast_const()) }?;
        let Some(MemoryView { total, free, .. }) = self.view(card.total, card.free) else { return Ok(()) };
        // As in the driver: this version has no reserve, so everything that is not free is used.
        // SAFETY: the driver has written to this address, so it is valid for writes.
        unsafe { write_result(to, nvmlMemory_t { total, free, used: total - free }) }
    }
}

hooks! { nvml;
    /// Returns the container's total, used and free memory.
    fn nvmlDeviceGetMemoryInfo(device: nvmlDevice_t, memory: *mut nvmlMemory_t) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let query = || unsafe { next(device, memory) };
        // SAFETY: the application passed `memory` for the driver to write to.
        with_share(device, |share| unsafe { share.write_memory_info(memory, query) })
    }

    /// Returns the same with the reserve as a separate value, of which a container has none.
    fn nvmlDeviceGetMemoryInfo_v2(device: nvmlDevice_t, memory: *mut nvmlMemory_v2_t) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let query = || unsafe { next(device, memory) };
        with_share(device, |share| {
            check(query())?;
            // SAFETY: the call succeeded, so the driver has written there. The version comes first in all versions.
            let version = unsafe { read_argument(memory.cast_const().cast::<u32>()) }?;
            if version != nvmlMemory_v2 {
                // A newer driver has written a format that is unknown here.
                return Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
            }
            // SAFETY: the structure has the format of this version.
            let card = unsafe { read_argument(memory.cast_const()) }?;
            let Some(MemoryView { total, used, free, reserved }) = share.view(card.total, card.free) else { return Ok(()) };
            // SAFETY: the driver has written to this address, so it is valid for writes.
            unsafe { write_result(memory, nvmlMemory_v2_t { version, total, reserved, free, used }) }
        })
    }

    /// The BAR1 window through which the host accesses the GPU. The driver does not report whose mappings are in it, so
    /// a container sees none: all of it is free.
    fn nvmlDeviceGetBAR1MemoryInfo(device: nvmlDevice_t, bar1_memory: *mut nvmlBAR1Memory_t) |next, _variant| {
        with_share(device, |_| {
            let mut card = nvmlBAR1Memory_t::default();
            // Not into the application's structure: another thread could read what others use.
            // SAFETY: the pointer is to a local structure.
            check(unsafe { next(device, &mut card) })?;
            let total = card.bar1Total;
            // SAFETY: the application passed `bar1_memory` for the driver to write to.
            unsafe { write_result(bar1_memory, nvmlBAR1Memory_t { bar1Total: total, bar1Free: total, bar1Used: 0 }) }
        })
    }

    /// Protected memory of confidential computing is memory of the GPU.
    fn nvmlDeviceGetConfComputeProtectedMemoryUsage(
        device: nvmlDevice_t,
        memory: *mut nvmlMemory_t,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let query = || unsafe { next(device, memory) };
        // SAFETY: the application passed `memory` for the driver to write to.
        with_share(device, |share| unsafe { share.write_memory_info(memory, query) })
    }
}

#[cfg(test)]
mod tests {
    use super::MemoryView;

    #[test]
    fn memory_parts_add_up_to_the_total() {
        let view = MemoryView::new(4096, 1000, 40960, 30000);
        assert_eq!(view, MemoryView { total: 4096, used: 1000, free: 3096, reserved: 0 });
        // A GPU that other containers have filled.
        let view = MemoryView::new(4096, 1000, 40960, 96);
        assert_eq!(view, MemoryView { total: 4096, used: 1000, free: 96, reserved: 3000 });
        // A limit above the GPU's memory is capped.
        assert_eq!(
            MemoryView::new(100, 0, 80, 70),
            MemoryView { total: 80, used: 0, free: 70, reserved: 10 }
        );
        for (limit, used, total, free) in
            [(0, u64::MAX, 10, 10), (u64::MAX - 1, u64::MAX, 10, 20), (7, 9, 0, 0)]
        {
            let view = MemoryView::new(limit, used, total, free);
            assert_eq!(view.used + view.free + view.reserved, view.total);
            assert!(view.total <= limit.min(total));
        }
    }
}
