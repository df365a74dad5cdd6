use crate::memory_account::{
    AccountWord, MAX_SLOTS, MemoryAccount, NUMBER_MASK, SlotTable, SlotValues, SlotWords, UNITS_MASK,
    UNLIMITED, newer, units, used,
};
use crate::{SLOT_COUNT, UNIT};
use proptest::prelude::*;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

#[derive(Default)]
struct Lane {
    total: AtomicU64,
    intent: AtomicU64,
    confirmed: AtomicU64,
}

impl SlotTable for &[Lane; 3] {
    fn words(&self, slot: usize) -> Option<SlotWords<'_>> {
        let lane = self.get(slot)?;
        Some(SlotWords { total: &lane.total, intent: &lane.intent, confirmed: &lane.confirmed })
    }
}

#[derive(Default)]
struct Gpu {
    word: AtomicU64,
    lanes: [Lane; 3],
}

impl Gpu {
    fn account(&self, slot: usize) -> MemoryAccount<'_, &[Lane; 3]> {
        MemoryAccount { word: &self.word, lanes: &self.lanes, slot }
    }
}

const _: () = assert!(SLOT_COUNT <= MAX_SLOTS);

proptest! {
    #[test]
    fn words_round_trip(units in 0..=UNITS_MASK, number in 0..=NUMBER_MASK, slot in 0..1024u64) {
        let word = AccountWord { units, number, slot };
        prop_assert_eq!(AccountWord::unpack(word.pack()), word);
    }

    /// Whatever the words say, an operation ends, and leaves words that mean something.
    #[test]
    fn any_words_can_be_worked_with(words in any::<[u64; 10]>(), asked in any::<u64>(), capacity in any::<u64>()) {
        let gpu = Gpu::default();
        gpu.word.store(words[0], Release);
        for (lane, words) in gpu.lanes.iter().zip(words[1..].chunks(3)) {
            lane.total.store(words[0], Release);
            lane.intent.store(words[1], Release);
            lane.confirmed.store(words[2], Release);
        }
        for slot in [0, 1, 2, 3, usize::MAX] {
            let account = gpu.account(slot);
            if let Some(used) = account.take(asked, capacity) {
                prop_assert!(used <= capacity.min(UNITS_MASK) || asked == 0);
            }
            account.give(asked);
            account.release_all();
            prop_assert_eq!(account.held(), 0);
        }
        prop_assert!(used(&gpu.word) <= UNITS_MASK);
    }
}

#[test]
fn who_was_long_alone_is_still_confirmed() {
    let gpu = Gpu::default();
    let [one, two] = [0, 1].map(|slot| gpu.account(slot));
    let lane = &gpu.lanes[0];
    // As after so many operations of its own.
    for number in [(1 << 28) - 2, (1 << 29) - 2, 3 * (1 << 28) - 2, NUMBER_MASK - 2] {
        let word = AccountWord { units: 0, number, slot: 0 }.pack();
        lane.total.store(word, Release);
        lane.intent.store(word, Release);
        for _ in 0..6 {
            assert!(one.take(3, 100).is_some());
            one.give(3);
        }
        assert!(one.take(3, 100).is_some() && two.take(1, 100) == Some(4));
        let last = AccountWord::unpack(lane.total.load(Acquire)).number;
        assert_eq!(lane.confirmed.load(Acquire), last);
        one.give(3);
        two.give(1);
    }
    assert_eq!((one.take(u64::MAX, 100), one.take(UNITS_MASK + 1, 100)), (None, None));
}

#[test]
fn numbers_go_round() {
    assert!(newer(1, 0) && newer(0, NUMBER_MASK) && !newer(0, 1) && !newer(7, 7));
}

#[test]
fn what_cannot_be_counted_is_cut_where_there_is_no_limit() {
    let gpu = Gpu::default();
    let [one, two] = [0, 1].map(|slot| gpu.account(slot));
    assert_eq!(one.take(5, UNLIMITED), Some(5));
    assert_eq!(two.take(u64::MAX, UNLIMITED), Some(UNITS_MASK));
    assert_eq!(one.take(5, UNLIMITED), Some(UNITS_MASK));
    two.give(u64::MAX);
    assert_eq!((one.held(), two.held()), (10, 0));
    // A limit that is too large to be counted is not the same as none.
    assert_eq!(one.take(u64::MAX, UNLIMITED - 1), None);
}

#[test]
fn bytes_are_rounded_up() {
    assert_eq!([0, 1, UNIT, UNIT + 1, u64::MAX].map(units), [0, 1, 1, 2, 1 << 48]);
}

#[test]
fn unfinished_operations_are_told_from_finished_ones() {
    let word = |units, number, slot| AccountWord { units, number, slot }.pack();
    let values = SlotValues { total: word(3, 8, 0), intent: word(5, 9, 0), confirmed: 8 };
    assert_eq!(values.truly_held(word(9, 9, 1), 1).units, 5);
    assert_eq!(values.truly_held(word(9, 9, 2), 1).units, 3);
    assert_eq!(SlotValues { confirmed: 9, ..values }.truly_held(word(9, 9, 2), 1).units, 5);
    assert!(values.are_of_one_time() && !SlotValues { intent: word(5, 10, 0), ..values }.are_of_one_time());
}
