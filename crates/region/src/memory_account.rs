//! The memory account of a GPU: how many units are used and by which process, exact whichever process is killed when.
//!
//! A GPU has one word: the units used, and which process changed it last with which of its operations. A process writes
//! what it is about to hold (`intent`), changes the word, then writes that it holds it (`total`). If it is killed in
//! between, the process that reclaims its slot must know whether the word was changed. The word itself shows that until
//! it is changed again, and a process that changes it first confirms the operation that it is about to overwrite, in
//! the slot of the process that performed it.
//!
//! The caller chooses where the words lie, and passes the capacity: the processes that it limits can write to some of
//! the files.

use super::failpoint::point;
use super::protocol::{ACCOUNT_NUMBER_BITS, ACCOUNT_SLOT_BITS, ACCOUNT_UNITS_BITS};
use super::sync::AtomicU64;
use super::sync::Ordering::{Acquire, Relaxed, Release};

pub use super::protocol::MEMORY_UNIT;

/// Capacity of a GPU without a limit. Usage is counted as far as the word allows.
pub const UNLIMITED: u64 = u64::MAX;

/// Most slots that a word can name.
pub const MAX_SLOTS: usize = 1 << ACCOUNT_SLOT_BITS;

/// Most bytes that can be counted.
pub const MAX_BYTES: u64 = UNITS_MASK * MEMORY_UNIT;

/// Converts bytes to units, rounded up.
#[inline]
#[must_use]
pub fn units(bytes: u64) -> u64 {
    bytes.div_ceil(MEMORY_UNIT)
}

pub(crate) const UNITS_MASK: u64 = (1 << ACCOUNT_UNITS_BITS) - 1;
pub(crate) const NUMBER_MASK: u64 = (1 << ACCOUNT_NUMBER_BITS) - 1;

/// A decoded word: units, and the number of the operation that resulted in them. In a GPU's word, also the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccountWord {
    /// Units used, each of [`MEMORY_UNIT`] bytes.
    pub units: u64,
    /// Number of the operation.
    pub number: u64,
    /// Slot of the process that performed the operation.
    pub slot: u64,
}

impl AccountWord {
    /// Decodes a word. Every bit pattern is valid.
    #[inline]
    #[must_use]
    pub fn unpack(word: u64) -> Self {
        Self {
            units: word & UNITS_MASK,
            number: word >> ACCOUNT_UNITS_BITS & NUMBER_MASK,
            slot: word >> (ACCOUNT_UNITS_BITS + ACCOUNT_NUMBER_BITS),
        }
    }

    /// Encodes the word. The fields must be within their bounds.
    #[inline]
    #[must_use]
    pub fn pack(self) -> u64 {
        self.units
            | self.number << ACCOUNT_UNITS_BITS
            | self.slot << (ACCOUNT_UNITS_BITS + ACCOUNT_NUMBER_BITS)
    }
}

/// Returns whether `number` is newer than `than`. Numbers wrap: the newer one is ahead by less than half of the range.
#[inline]
pub(crate) fn newer(number: u64, than: u64) -> bool {
    let ahead = number.wrapping_sub(than) & NUMBER_MASK;
    ahead != 0 && ahead < 1 << (ACCOUNT_NUMBER_BITS - 1)
}

/// The words of one slot on one GPU.
#[derive(Clone, Copy, Debug)]
pub struct SlotWords<'a> {
    /// Units that it holds.
    pub total: &'a AtomicU64,
    /// Units that it is about to hold.
    pub intent: &'a AtomicU64,
    /// Its last operation that another process has confirmed. Other processes write it, so it should be on another
    /// cache line than the rest.
    pub confirmed: &'a AtomicU64,
}

/// The values of a slot's words at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotValues {
    /// Units that it holds.
    pub total: u64,
    /// Units that it is about to hold.
    pub intent: u64,
    /// Its last operation that another process has confirmed.
    pub confirmed: u64,
}

impl SlotValues {
    /// Returns what the slot holds, whether or not its last operation was completed. `word` is the GPU's word, read
    /// after `intent` and before `confirmed`.
    #[must_use]
    pub fn resolve_held(self, word: u64, slot: usize) -> AccountWord {
        let (total, intent) = (AccountWord::unpack(self.total), AccountWord::unpack(self.intent));
        if intent.number == total.number {
            return total;
        }
        let word = AccountWord::unpack(word);
        let in_word = word.slot == slot as u64 && word.number == intent.number;
        if in_word || self.confirmed == intent.number { intent } else { total }
    }

    /// Returns whether one process can have left these values: it has at most one operation in progress.
    #[must_use]
    pub fn is_consistent(self) -> bool {
        let (total, intent) = (AccountWord::unpack(self.total), AccountWord::unpack(self.intent));
        intent.number.wrapping_sub(total.number) & NUMBER_MASK <= 1
    }
}

/// Access to the words of a GPU's slots.
pub trait SlotTable {
    /// Returns the words of one slot; `None` if there is no such slot.
    fn words(&self, slot: usize) -> Option<SlotWords<'_>>;
}

/// The memory account of one GPU, used by the process of one slot. Only one thread at a time may use it.
#[derive(Debug)]
pub struct MemoryAccount<'a, L> {
    /// The GPU's word, which the processes of all slots share.
    pub word: &'a AtomicU64,
    /// The words of all slots.
    pub lanes: L,
    /// The slot whose account this is.
    pub slot: usize,
}

impl<L: SlotTable> MemoryAccount<'_, L> {
    /// Takes `units` more of `capacity`. Returns the units used afterwards, or `None` if not enough are free.
    #[inline]
    pub fn take(&self, units: u64, capacity: u64) -> Option<u64> {
        let lane = self.lanes.words(self.slot)?;
        let held = AccountWord::unpack(lane.total.load(Relaxed));
        let wanted = held.units.saturating_add(units);
        if units == 0 {
            // Zero units always fit, even if the limit was lowered below what is held.
            return Some(used(self.word));
        }
        if capacity == UNLIMITED {
            return self.change(lane, held, wanted.min(UNITS_MASK), UNITS_MASK, true);
        }
        let capacity = capacity.min(UNITS_MASK);
        if wanted > capacity { None } else { self.change(lane, held, wanted, capacity, false) }
    }

    /// Gives `units` back. More units than the slot holds empty it.
    #[inline]
    pub fn give(&self, units: u64) {
        let Some(lane) = self.lanes.words(self.slot) else { return };
        let held = AccountWord::unpack(lane.total.load(Relaxed));
        self.change(lane, held, held.units.saturating_sub(units), UNITS_MASK, true);
    }

    /// Changes the slot's units to `units`. `capacity` and `units` are at most `UNITS_MASK`. With `cut` the change is
    /// never refused, and units beyond what can be counted are dropped.
    #[inline]
    fn change(
        &self,
        lane: SlotWords<'_>,
        held: AccountWord,
        units: u64,
        capacity: u64,
        cut: bool,
    ) -> Option<u64> {
        let number = (held.number + 1) & NUMBER_MASK;
        // A process that is alone on a GPU is confirmed by no other. Without this, its old confirmation would
        // eventually look newer than its operations.
        if number & (NUMBER_MASK >> 2) == 0 {
            lane.confirmed.store(held.number, Release);
        }
        let after = AccountWord { units, number, slot: 0 };
        lane.intent.store(after.pack(), Release);
        point("account.intended");
        let mut seen = self.word.load(Acquire);
        let used = loop {
            let word = AccountWord::unpack(seen);
            let used = (word.units + units).saturating_sub(held.units).min(UNITS_MASK);
            if used > capacity && units > held.units && !cut {
                lane.intent.store(held.pack(), Release);
                return None;
            }
            if word.slot != self.slot as u64 {
                self.confirm(word);
                point("account.confirmed");
            }
            let next = AccountWord { units: used, number, slot: self.slot as u64 };
            match self.word.compare_exchange_weak(seen, next.pack(), Release, Acquire) {
                Ok(_) => break used,
                Err(now) => seen = now,
            }
        };
        point("account.changed");
        lane.total.store(after.pack(), Release);
        point("account.noted");
        Some(used)
    }

    /// Confirms the operation of the process that changed the word last: the word is about to be overwritten.
    fn confirm(&self, word: AccountWord) {
        if let Some(lane) = self.lanes.words(word.slot as usize) {
            let _ = lane
                .confirmed
                .fetch_update(Release, Acquire, |known| newer(word.number, known).then_some(word.number));
        }
    }

    /// Releases everything that the slot's dead process held. Returns how much it was. The caller may be killed on the
    /// way; the call can then be repeated.
    pub fn release_all(&self) -> u64 {
        let Some(lane) = self.lanes.words(self.slot) else { return 0 };
        let held = self.resolve_held(lane);
        // From here on, the slot looks as if its last operation had been completed before the process died.
        lane.total.store(held.pack(), Release);
        point("account.settled");
        if held.units > 0 {
            self.change(lane, held, 0, UNITS_MASK, true);
        }
        held.units
    }

    fn resolve_held(&self, lane: SlotWords<'_>) -> AccountWord {
        let total = lane.total.load(Acquire);
        let intent = lane.intent.load(Acquire);
        // Read before the confirmation: a process that changes the word later has confirmed before.
        let word = self.word.load(Acquire);
        let confirmed = lane.confirmed.load(Acquire);
        SlotValues { total, intent, confirmed }.resolve_held(word, self.slot)
    }

    /// Returns the units that the slot holds.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.lanes.words(self.slot).map_or(0, |lane| AccountWord::unpack(lane.total.load(Acquire)).units)
    }
}

/// Returns the units of a GPU that all processes use, from its word.
#[inline]
#[must_use]
pub fn used(word: &AtomicU64) -> u64 {
    AccountWord::unpack(word.load(Relaxed)).units
}
