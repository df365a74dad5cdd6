//! How much of a GPU's memory is used, and by whom: exact whatever is killed when.
//!
//! The GPU has one word: units used, and who changed it last with which of its operations. A process writes what it is
//! about to hold (`intent`), changes the word, then writes that it holds it (`total`). If it is killed in between, its
//! heir must know whether the word was changed. The word itself says so as long as nobody changed it since, and whoever
//! does change it first confirms the operation it is about to overwrite in the lane of the one who did it.

use super::layout::{Client, Lane, MemoryBook};
use super::mortal::may_die_here;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// What the accounting counts in. No allocation of the driver is smaller or lies across.
pub const UNIT: u64 = 64 << 10;

/// `bytes` in units, rounded up.
pub(crate) fn units(bytes: u64) -> u64 {
    bytes.div_ceil(UNIT)
}

const UNITS_BITS: u32 = 24;
const NUMBER_BITS: u32 = 30;
const UNITS_MASK: u64 = (1 << UNITS_BITS) - 1;
const NUMBER_MASK: u64 = (1 << NUMBER_BITS) - 1;

/// Units and the number of the operation that made them so; with a slot above, the GPU's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Word {
    units: u64,
    number: u64,
    slot: u64,
}

impl Word {
    fn unpack(word: u64) -> Self {
        Self {
            units: word & UNITS_MASK,
            number: word >> UNITS_BITS & NUMBER_MASK,
            slot: word >> (UNITS_BITS + NUMBER_BITS),
        }
    }

    fn pack(self) -> u64 {
        self.units | self.number << UNITS_BITS | self.slot << (UNITS_BITS + NUMBER_BITS)
    }
}

/// Numbers go round: the one that is ahead by less than half the way is the newer one.
fn newer(number: u64, than: u64) -> bool {
    let ahead = number.wrapping_sub(than) & NUMBER_MASK;
    ahead != 0 && ahead < 1 << (NUMBER_BITS - 1)
}

/// The memory of one GPU, for the client of one slot. One thread at a time.
pub(super) struct Account<'a> {
    pub(super) book: &'a MemoryBook,
    pub(super) clients: &'a [Client],
    pub(super) gpu: usize,
    pub(super) slot: usize,
}

impl Account<'_> {
    fn lane(&self, slot: usize) -> Option<&Lane> {
        self.clients.get(slot).and_then(|client| client.lanes.get(self.gpu))
    }

    /// Takes `units` more, or says that there are not as many.
    #[inline]
    pub(super) fn take(&self, units: u64) -> bool {
        let Some(lane) = self.lane(self.slot) else { return false };
        let held = Word::unpack(lane.total.load(Relaxed));
        let wanted = held.units.saturating_add(units);
        wanted <= self.book.capacity.load(Relaxed).min(UNITS_MASK) && self.change(lane, held, wanted)
    }

    /// Gives `units` back.
    #[inline]
    pub(super) fn give(&self, units: u64) {
        let Some(lane) = self.lane(self.slot) else { return };
        let held = Word::unpack(lane.total.load(Relaxed));
        self.change(lane, held, held.units.saturating_sub(units));
    }

    #[inline]
    fn change(&self, lane: &Lane, held: Word, units: u64) -> bool {
        let number = (held.number + 1) & NUMBER_MASK;
        // Who is alone on a card is confirmed by nobody. Without this its confirmations would one day look newer than it.
        if number & (NUMBER_MASK >> 2) == 0 {
            lane.confirmed.0.store(held.number, Release);
        }
        let after = Word { units, number, slot: 0 };
        lane.intent.store(after.pack(), Release);
        may_die_here();
        let mut seen = self.book.word.load(Acquire);
        loop {
            let word = Word::unpack(seen);
            let used = (word.units + units).saturating_sub(held.units);
            if units > held.units && used > self.book.capacity.load(Relaxed) {
                lane.intent.store(held.pack(), Release);
                return false;
            }
            if word.slot != self.slot as u64 {
                self.confirm(word);
                may_die_here();
            }
            let next = Word { units: used, number, slot: self.slot as u64 };
            match self.book.word.compare_exchange_weak(seen, next.pack(), Release, Acquire) {
                Ok(_) => break,
                Err(now) => seen = now,
            }
        }
        may_die_here();
        lane.total.store(after.pack(), Release);
        may_die_here();
        true
    }

    /// Notes for the last one who changed the word that its operation was done: the word is about to forget it.
    fn confirm(&self, word: Word) {
        if let Some(lane) = self.lane(word.slot as usize) {
            let _ = lane
                .confirmed
                .0
                .fetch_update(Release, Acquire, |known| newer(word.number, known).then_some(word.number));
        }
    }

    /// Gives back what the slot's dead process held; returns how much. May itself be killed and repeated.
    pub(super) fn release_all(&self) -> u64 {
        let Some(lane) = self.lane(self.slot) else { return 0 };
        let held = self.truly_held(lane);
        // From here on the slot looks as if its last operation had ended before the death.
        lane.total.store(held.pack(), Release);
        may_die_here();
        if held.units > 0 {
            self.change(lane, held, 0);
        }
        held.units
    }

    fn truly_held(&self, lane: &Lane) -> Word {
        let total = Word::unpack(lane.total.load(Acquire));
        let intent = Word::unpack(lane.intent.load(Acquire));
        if intent.number == total.number {
            return total;
        }
        // The word first: whoever changes it afterwards has confirmed before.
        let word = Word::unpack(self.book.word.load(Acquire));
        let in_word = word.slot == self.slot as u64 && word.number == intent.number;
        let confirmed = lane.confirmed.0.load(Acquire) == intent.number;
        if in_word || confirmed { intent } else { total }
    }

    /// Units the slot holds.
    pub(super) fn held(&self) -> u64 {
        self.lane(self.slot).map_or(0, |lane| Word::unpack(lane.total.load(Acquire)).units)
    }

    /// Units used of the GPU, by all.
    #[inline]
    pub(super) fn used(book: &MemoryBook) -> u64 {
        Word::unpack(book.word.load(Relaxed)).units
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn words_round_trip(units in 0..=UNITS_MASK, number in 0..=NUMBER_MASK, slot in 0..1024u64) {
            let word = Word { units, number, slot };
            prop_assert_eq!(Word::unpack(word.pack()), word);
        }
    }

    #[test]
    fn a_process_that_was_long_alone_is_still_confirmed() {
        let folder = tempfile::tempdir().unwrap();
        let setup = super::super::Setup { memory: vec![100 * UNIT], slice: 1, window: 1 };
        super::super::create(folder.path(), &setup).unwrap();
        let [one, two] = [(); 2].map(|()| super::super::State::attach(folder.path()).unwrap());
        let lane = &one.shared.clients[one.slot()].lanes[0];
        // As after so many operations of its own.
        for number in [(1 << 28) - 2, (1 << 29) - 2, 3 * (1 << 28) - 2, NUMBER_MASK - 2] {
            let word = Word { units: 0, number, slot: 0 }.pack();
            lane.total.store(word, Release);
            lane.intent.store(word, Release);
            for _ in 0..6 {
                assert!(one.take_memory(0, 3));
                one.give_memory(0, 3);
            }
            assert!(one.take_memory(0, 3) && two.take_memory(0, 1));
            let last = Word::unpack(lane.total.load(Acquire)).number;
            assert_eq!(lane.confirmed.0.load(Acquire), last);
            one.give_memory(0, 3);
            two.give_memory(0, 1);
        }
        assert!(!one.take_memory(0, u64::MAX) && !one.take_memory(0, UNITS_MASK + 1));
    }

    #[test]
    fn numbers_go_round() {
        assert!(newer(1, 0) && newer(0, NUMBER_MASK) && !newer(0, 1) && !newer(7, 7));
    }
}
