use crate::memory_account::{
    AccountWord, MAX_SLOTS, MemoryAccount, NUMBER_MASK, SlotTable, SlotValues, SlotWords, UNITS_MASK,
    UNLIMITED, newer, units, used,
};
use crate::{MEMORY_UNIT, SLOT_COUNT};
use proptest::prelude::*;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

#[derive(Default)]
struct TestLane {
    total: AtomicU64,
    intent: AtomicU64,
    confirmed: AtomicU64,
}

impl SlotTable for &[TestLane; 3] {
    fn words(&self, slot: usize) -> Option<SlotWords<'_>> {
        let lane = self.get(slot)?;
        Some(SlotWords { total: &lane.total, intent: &lane.intent, confirmed: &lane.confirmed })
    }
}

#[derive(Default)]
struct TestGpu {
    word: AtomicU64,
    lanes: [TestLane; 3],
}

impl TestGpu {
    fn account(&self, slot: usize) -> MemoryAccount<'_, &[TestLane; 3]> {
        MemoryAccount { word: &self.word, lanes: &self.lanes, slot }
    }
}

const _: () = assert!(SLOT_COUNT <= MAX_SLOTS);

proptest! {
    #[test]
    fn account_word_round_trips(units in 0..=UNITS_MASK, number in 0..=NUMBER_MASK, slot in 0..1024u64) {
        let word = AccountWord { units, number, slot };
        prop_assert_eq!(AccountWord::unpack(word.pack()), word);
    }

    /// Whatever the words contain, an operation terminates and leaves words that can be decoded.
    #[test]
    fn operations_on_arbitrary_words_terminate(words in any::<[u64; 10]>(), asked in any::<u64>(), capacity in any::<u64>()) {
        let gpu = TestGpu::default();
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
fn sole_user_is_confirmed_after_number_wraparound() {
    let gpu = TestGpu::default();
    let [one, two] = [0, 1].map(|slot| gpu.account(slot));
    let lane = &gpu.lanes[0];
    // Simulates this many operations of its own.
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
fn operation_numbers_wrap_around() {
    assert!(newer(1, 0) && newer(0, NUMBER_MASK) && !newer(0, 1) && !newer(7, 7));
}

#[test]
fn unlimited_account_saturates_at_max_units() {
    let gpu = TestGpu::default();
    let [one, two] = [0, 1].map(|slot| gpu.account(slot));
    assert_eq!(one.take(5, UNLIMITED), Some(5));
    assert_eq!(two.take(u64::MAX, UNLIMITED), Some(UNITS_MASK));
    assert_eq!(one.take(5, UNLIMITED), Some(UNITS_MASK));
    two.give(u64::MAX);
    assert_eq!((one.held(), two.held()), (10, 0));
    // A limit that is too large to be counted is not the same as no limit.
    assert_eq!(one.take(u64::MAX, UNLIMITED - 1), None);
}

#[test]
fn bytes_round_up_to_units() {
    assert_eq!([0, 1, MEMORY_UNIT, MEMORY_UNIT + 1, u64::MAX].map(units), [0, 1, 1, 2, 1 << 48]);
}

#[test]
fn unfinished_operation_resolves_by_word_or_confirmation() {
    let word = |units, number, slot| AccountWord { units, number, slot }.pack();
    let values = SlotValues { total: word(3, 8, 0), intent: word(5, 9, 0), confirmed: 8 };
    assert_eq!(values.resolve_held(word(9, 9, 1), 1).units, 5);
    assert_eq!(values.resolve_held(word(9, 9, 2), 1).units, 3);
    assert_eq!(SlotValues { confirmed: 9, ..values }.resolve_held(word(9, 9, 2), 1).units, 5);
    assert!(values.is_consistent() && !SlotValues { intent: word(5, 10, 0), ..values }.is_consistent());
}
