//! How much of a GPU's memory is used, and by whom: the region's ledger over this node's words.

use super::layout::{Client, MemoryBook};
use partage_region::memory_account::{SlotTable, SlotWords};
use std::sync::atomic::Ordering::Relaxed;

pub use partage_region::memory_account::{UNIT, units};

/// The lanes of one GPU.
pub(super) struct GpuLanes<'a> {
    pub(super) clients: &'a [Client],
    pub(super) gpu: usize,
}

impl SlotTable for GpuLanes<'_> {
    #[inline]
    fn words(&self, slot: usize) -> Option<SlotWords<'_>> {
        let lane = self.clients.get(slot)?.lanes.get(self.gpu)?;
        Some(SlotWords { total: &lane.total, intent: &lane.intent, confirmed: &lane.confirmed.0 })
    }
}

/// The memory of one GPU, for the client of one slot. One thread at a time.
pub(super) struct Account<'a> {
    ledger: partage_region::memory_account::MemoryAccount<'a, GpuLanes<'a>>,
    book: &'a MemoryBook,
}

impl<'a> Account<'a> {
    #[inline]
    pub(super) fn new(book: &'a MemoryBook, lanes: GpuLanes<'a>, slot: usize) -> Self {
        Self { ledger: partage_region::memory_account::MemoryAccount { word: &book.word, lanes, slot }, book }
    }

    /// Takes `units` more, or says that there are not as many.
    #[inline]
    pub(super) fn take(&self, units: u64) -> bool {
        self.ledger.take(units, self.book.capacity.load(Relaxed)).is_some()
    }

    /// Gives `units` back.
    #[inline]
    pub(super) fn give(&self, units: u64) {
        self.ledger.give(units);
    }

    /// Gives back what the slot's dead process held.
    pub(super) fn release_all(&self) {
        self.ledger.release_all();
    }

    /// Units the slot holds.
    pub(super) fn held(&self) -> u64 {
        self.ledger.held()
    }
}
