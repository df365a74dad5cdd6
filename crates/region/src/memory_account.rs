//! How much of a GPU's memory is used, and by whom: exact whatever is killed when.
//!
//! The GPU has one word: units used, and who changed it last with which of its operations. A process writes what it is
//! about to hold (`intent`), changes the word, then writes that it holds it (`total`). If it is killed in between, its
//! heir must know whether the word was changed. The word itself says so as long as nobody changed it since, and whoever
//! does change it first confirms the operation it is about to overwrite in the lane of the one who did it.
//!
//! Where the words lie is the caller's business, and so is the capacity: some files could be forged by who it limits.

use super::failpoint::point;
use super::protocol::{ACCOUNT_NUMBER_BITS, ACCOUNT_SLOT_BITS, ACCOUNT_UNITS_BITS, MEMORY_UNIT};
use super::sync::AtomicU64;
use super::sync::Ordering::{Acquire, Relaxed, Release};

/// Bytes that the account counts in.
pub const UNIT: u64 = MEMORY_UNIT;

/// As a capacity: as much as anybody likes. It is counted as far as can be.
pub const UNLIMITED: u64 = u64::MAX;

/// The most slots that a word can name.
pub const MAX_SLOTS: usize = 1 << ACCOUNT_SLOT_BITS;

/// The most bytes that can be counted.
pub const MAX_BYTES: u64 = UNITS_MASK * UNIT;

/// `bytes` in units, rounded up.
#[inline]
#[must_use]
pub fn units(bytes: u64) -> u64 {
    bytes.div_ceil(UNIT)
}

pub(crate) const UNITS_MASK: u64 = (1 << ACCOUNT_UNITS_BITS) - 1;
pub(crate) const NUMBER_MASK: u64 = (1 << ACCOUNT_NUMBER_BITS) - 1;

/// Units and the number of the operation that made them so; with a slot above, the GPU's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccountWord {
    /// Units used.
    pub units: u64,
    /// The number of the operation.
    pub number: u64,
    /// Whose operation it was.
    pub slot: u64,
}

impl AccountWord {
    /// What the bits mean. Any bits mean something.
    #[inline]
    #[must_use]
    pub fn unpack(word: u64) -> Self {
        Self {
            units: word & UNITS_MASK,
            number: word >> ACCOUNT_UNITS_BITS & NUMBER_MASK,
            slot: word >> (ACCOUNT_UNITS_BITS + ACCOUNT_NUMBER_BITS),
        }
    }

    /// The bits. The parts must be in their bounds.
    #[inline]
    #[must_use]
    pub fn pack(self) -> u64 {
        self.units
            | self.number << ACCOUNT_UNITS_BITS
            | self.slot << (ACCOUNT_UNITS_BITS + ACCOUNT_NUMBER_BITS)
    }
}

/// Numbers go round: the one that is ahead by less than half the way is the newer one.
#[inline]
pub(crate) fn newer(number: u64, than: u64) -> bool {
    let ahead = number.wrapping_sub(than) & NUMBER_MASK;
    ahead != 0 && ahead < 1 << (ACCOUNT_NUMBER_BITS - 1)
}

/// The words of one slot on one GPU.
#[derive(Clone, Copy, Debug)]
pub struct SlotWords<'a> {
    /// What it holds.
    pub total: &'a AtomicU64,
    /// What it is about to hold.
    pub intent: &'a AtomicU64,
    /// Its last operation that somebody else saw done. Others write it: it should lie apart from the rest.
    pub confirmed: &'a AtomicU64,
}

/// What the words of a slot said at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotValues {
    /// What it holds.
    pub total: u64,
    /// What it is about to hold.
    pub intent: u64,
    /// Its last operation that somebody else saw done.
    pub confirmed: u64,
}

impl SlotValues {
    /// What the slot truly holds, finished or not, given what the GPU's word said after `intent` was read and before
    /// `confirmed` was.
    #[must_use]
    pub fn truly_held(self, word: u64, slot: usize) -> AccountWord {
        let (total, intent) = (AccountWord::unpack(self.total), AccountWord::unpack(self.intent));
        if intent.number == total.number {
            return total;
        }
        let word = AccountWord::unpack(word);
        let in_word = word.slot == slot as u64 && word.number == intent.number;
        if in_word || self.confirmed == intent.number { intent } else { total }
    }

    /// Whether one process can have left this: it has one operation under way, or none.
    #[must_use]
    pub fn are_of_one_time(self) -> bool {
        let (total, intent) = (AccountWord::unpack(self.total), AccountWord::unpack(self.intent));
        intent.number.wrapping_sub(total.number) & NUMBER_MASK <= 1
    }
}

/// Where the words of a GPU's slots are.
pub trait SlotTable {
    /// The words of one slot; none if there is no such slot.
    fn words(&self, slot: usize) -> Option<SlotWords<'_>>;
}

/// The memory of one GPU, for the process of one slot. One thread at a time.
#[derive(Debug)]
pub struct MemoryAccount<'a, L> {
    /// The GPU's word.
    pub word: &'a AtomicU64,
    /// The words of all slots.
    pub lanes: L,
    /// Whose account this is.
    pub slot: usize,
}

impl<L: SlotTable> MemoryAccount<'_, L> {
    /// Takes `units` more of `capacity`; the units used then, or none if there are not as many.
    #[inline]
    pub fn take(&self, units: u64, capacity: u64) -> Option<u64> {
        let lane = self.lanes.words(self.slot)?;
        let held = AccountWord::unpack(lane.total.load(Relaxed));
        let wanted = held.units.saturating_add(units);
        if units == 0 {
            // Nothing always fits, also where the limit was lowered below what is held.
            return Some(used(self.word));
        }
        if capacity == UNLIMITED {
            return self.change(lane, held, wanted.min(UNITS_MASK), UNITS_MASK, true);
        }
        let capacity = capacity.min(UNITS_MASK);
        if wanted > capacity { None } else { self.change(lane, held, wanted, capacity, false) }
    }

    /// Gives `units` back.
    #[inline]
    pub fn give(&self, units: u64) {
        let Some(lane) = self.lanes.words(self.slot) else { return };
        let held = AccountWord::unpack(lane.total.load(Relaxed));
        self.change(lane, held, held.units.saturating_sub(units), UNITS_MASK, true);
    }

    /// `capacity` and `units` are at most `UNITS_MASK`. With `cut` there is no refusal, and what cannot be
    /// counted is not.
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
        // Who is alone on a card is confirmed by nobody. Without this its confirmations would one day look newer than it.
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

    /// Notes for the last one who changed the word that its operation was done: the word is about to forget it.
    fn confirm(&self, word: AccountWord) {
        if let Some(lane) = self.lanes.words(word.slot as usize) {
            let _ = lane
                .confirmed
                .fetch_update(Release, Acquire, |known| newer(word.number, known).then_some(word.number));
        }
    }

    /// Gives back what the slot's dead process held; returns how much. May itself be killed and repeated.
    pub fn release_all(&self) -> u64 {
        let Some(lane) = self.lanes.words(self.slot) else { return 0 };
        let held = self.truly_held(lane);
        // From here on the slot looks as if its last operation had ended before the death.
        lane.total.store(held.pack(), Release);
        point("account.settled");
        if held.units > 0 {
            self.change(lane, held, 0, UNITS_MASK, true);
        }
        held.units
    }

    fn truly_held(&self, lane: SlotWords<'_>) -> AccountWord {
        let total = lane.total.load(Acquire);
        let intent = lane.intent.load(Acquire);
        // The word before the confirmation: whoever changes it afterwards has confirmed before.
        let word = self.word.load(Acquire);
        let confirmed = lane.confirmed.load(Acquire);
        SlotValues { total, intent, confirmed }.truly_held(word, self.slot)
    }

    /// Units the slot holds.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.lanes.words(self.slot).map_or(0, |lane| AccountWord::unpack(lane.total.load(Acquire)).units)
    }
}

/// Units used of a GPU, by all, from its word.
#[inline]
#[must_use]
pub fn used(word: &AtomicU64) -> u64 {
    AccountWord::unpack(word.load(Relaxed)).units
}
