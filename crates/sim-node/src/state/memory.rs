//! Accounting of GPU memory: the memory account of `partage-region` on the words of the state file.

use super::layout::{ClientRecord, GpuMemoryRecord};
use partage_region::memory_account::{SlotTable, SlotWords};
use std::sync::atomic::Ordering::Relaxed;

pub use partage_region::memory_account::{MEMORY_UNIT as UNIT, units};

/// The slot table of one GPU's memory account.
pub(super) struct GpuLanes<'a> {
    pub(super) clients: &'a [ClientRecord],
    pub(super) gpu: usize,
}

impl SlotTable for GpuLanes<'_> {
    #[inline]
    fn words(&self, slot: usize) -> Option<SlotWords<'_>> {
        let lane = self.clients.get(slot)?.lanes.get(self.gpu)?;
        Some(SlotWords { total: &lane.total, intent: &lane.intent, confirmed: &lane.confirmed.0 })
    }
}

/// The memory account of one GPU for the client of one slot. Callers serialize calls for a slot.
pub(super) struct GpuMemoryAccount<'a> {
    account: partage_region::memory_account::MemoryAccount<'a, GpuLanes<'a>>,
    record: &'a GpuMemoryRecord,
}

impl<'a> GpuMemoryAccount<'a> {
    #[inline]
    pub(super) fn new(record: &'a GpuMemoryRecord, lanes: GpuLanes<'a>, slot: usize) -> Self {
        Self {
            account: partage_region::memory_account::MemoryAccount { word: &record.word, lanes, slot },
            record,
        }
    }

    /// Allocates `units`. Returns false if not as many are free.
    #[inline]
    pub(super) fn take(&self, units: u64) -> bool {
        self.account.take(units, self.record.capacity.load(Relaxed)).is_some()
    }

    /// Releases `units`, or all that the slot holds if these are fewer.
    #[inline]
    pub(super) fn give(&self, units: u64) {
        self.account.give(units);
    }

    /// Releases all units of the slot, whose process is dead.
    pub(super) fn release_all(&self) {
        self.account.release_all();
    }

    /// Returns the units that the slot holds.
    pub(super) fn held(&self) -> u64 {
        self.account.held()
    }
}
