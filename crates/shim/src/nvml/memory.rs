//! How much memory there is, used and free: the limit, and what the container's processes have taken of it.
//!
//! `cuMemGetInfo` tells the same. Where there is no limit, true totals are shown.
#![allow(unsafe_code)]

use super::{Share, check, put, take, told};
use crate::hook::hooks;
use partage_driver_api::nvml::*;

/// The container's memory of a GPU. The three parts make up the total.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct View {
    total: u64,
    used: u64,
    free: u64,
    /// Promised, neither used nor free: only where more was promised than the card has.
    reserved: u64,
}

impl View {
    fn new(limit: u64, used: u64, card_total: u64, card_free: u64) -> Self {
        let total = limit.min(card_total);
        let used = used.min(total);
        let free = (total - used).min(card_free);
        Self { total, used, free, reserved: total - used - free }
    }
}

impl Share {
    /// What the container has of what the driver says of the card; nothing where it has no limit.
    fn view(&self, card_total: u64, card_free: u64) -> Option<View> {
        let region = &self.process.region;
        let limit = region.memory_limit(self.gpu)?;
        // The dead hold nothing.
        region.tidy();
        Some(View::new(limit, region.used(self.gpu), card_total, card_free))
    }

    /// # Safety
    /// As the driver's functions take it: null, or to be written to.
    unsafe fn put_plain(
        &self,
        to: *mut nvmlMemory_t,
        ask: impl FnOnce() -> nvmlReturn_t,
    ) -> Result<(), nvmlReturn_t> {
        check(ask())?;
        // SAFETY: the driver has just written there.
        let card = unsafe { take(to.cast_const()) }?;
        let Some(View { total, free, .. }) = self.view(card.total, card.free) else { return Ok(()) };
        // As the driver does: this one knows no reserve, what is not free is used.
        // SAFETY: the same place.
        unsafe { put(to, nvmlMemory_t { total, free, used: total - free }) }
    }
}

hooks! { nvml;
    /// The container's total, used and free.
    fn nvmlDeviceGetMemoryInfo(device: nvmlDevice_t, memory: *mut nvmlMemory_t) |next, _variant| {
        // SAFETY: the program's promise.
        let ask = || unsafe { next(device, memory) };
        // SAFETY: as it was called.
        told(device, |share| unsafe { share.put_plain(memory, ask) })
    }

    /// The same with the reserve apart, of which a container has none.
    fn nvmlDeviceGetMemoryInfo_v2(device: nvmlDevice_t, memory: *mut nvmlMemory_v2_t) |next, _variant| {
        // SAFETY: the program's promise.
        let ask = || unsafe { next(device, memory) };
        told(device, |share| {
            check(ask())?;
            // SAFETY: the driver has just written there. The version comes first in all versions.
            let version = unsafe { take(memory.cast_const().cast::<u32>()) }?;
            if version != nvmlMemory_v2 {
                // A driver that knows more has told more, in a form unknown here.
                return Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
            }
            // SAFETY: this is the form of that version.
            let card = unsafe { take(memory.cast_const()) }?;
            let Some(View { total, used, free, reserved }) = share.view(card.total, card.free) else { return Ok(()) };
            // SAFETY: the same place.
            unsafe { put(memory, nvmlMemory_v2_t { version, total, reserved, free, used }) }
        })
    }

    /// The window through which the host reaches the card. The driver does not say whose mappings are in it, so a container
    /// sees none: all of it is free.
    fn nvmlDeviceGetBAR1MemoryInfo(device: nvmlDevice_t, bar1_memory: *mut nvmlBAR1Memory_t) |next, _variant| {
        told(device, |_| {
            let mut card = nvmlBAR1Memory_t::default();
            // Not into the program's own: another thread could read what others use.
            // SAFETY: a structure of ours.
            check(unsafe { next(device, &mut card) })?;
            let total = card.bar1Total;
            // SAFETY: as it was called.
            unsafe { put(bar1_memory, nvmlBAR1Memory_t { bar1Total: total, bar1Free: total, bar1Used: 0 }) }
        })
    }

    /// Protected memory of confidential computing is memory of the card.
    fn nvmlDeviceGetConfComputeProtectedMemoryUsage(
        device: nvmlDevice_t,
        memory: *mut nvmlMemory_t,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        let ask = || unsafe { next(device, memory) };
        // SAFETY: as it was called.
        told(device, |share| unsafe { share.put_plain(memory, ask) })
    }
}

#[cfg(test)]
mod tests {
    use super::View;

    #[test]
    fn the_parts_make_up_the_total() {
        let view = View::new(4096, 1000, 40960, 30000);
        assert_eq!(view, View { total: 4096, used: 1000, free: 3096, reserved: 0 });
        // A card that others have filled.
        let view = View::new(4096, 1000, 40960, 96);
        assert_eq!(view, View { total: 4096, used: 1000, free: 96, reserved: 3000 });
        // More than the card has is not there.
        assert_eq!(View::new(100, 0, 80, 70), View { total: 80, used: 0, free: 70, reserved: 10 });
        for (limit, used, total, free) in
            [(0, u64::MAX, 10, 10), (u64::MAX - 1, u64::MAX, 10, 20), (7, 9, 0, 0)]
        {
            let view = View::new(limit, used, total, free);
            assert_eq!(view.used + view.free + view.reserved, view.total);
            assert!(view.total <= limit.min(total));
        }
    }
}
