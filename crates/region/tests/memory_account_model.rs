//! The ledger under a model checker: the same source as in the library, with atomics whose every access may be followed
//! by any other thread's. A thread is a process; it may be killed wherever the ledger says that it may.
#![allow(dead_code, unreachable_pub, missing_docs, clippy::unwrap_used)]

/// The atomics of the model.
mod sync {
    pub(crate) use shuttle::sync::atomic::{AtomicU64, Ordering};
}

/// Deaths of the model: the thread unwinds, and nothing of the ledger's runs on the way.
mod failpoint {
    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    shuttle::thread_local! {
        static LEFT: Cell<Option<u32>> = Cell::new(None);
    }

    struct Killed;

    pub(crate) fn point(_name: &str) {
        match LEFT.with(Cell::get) {
            None => {}
            Some(0) => resume_unwind(Box::new(Killed)),
            Some(left) => LEFT.with(|cell| cell.set(Some(left - 1))),
        }
    }

    /// The work's result, or none if it died at the n-th place.
    pub(crate) fn until_death<T>(n: Option<u32>, work: impl FnOnce() -> T) -> Option<T> {
        LEFT.with(|cell| cell.set(n));
        let result = catch_unwind(AssertUnwindSafe(work));
        LEFT.with(|cell| cell.set(None));
        match result {
            Ok(result) => Some(result),
            Err(cause) if cause.is::<Killed>() => None,
            Err(cause) => resume_unwind(cause),
        }
    }
}

#[path = "../src/memory_account.rs"]
mod memory_account;
#[path = "../src/protocol.rs"]
mod protocol;

use failpoint::until_death;
use memory_account::{MemoryAccount, SlotTable, SlotWords};
use shuttle::rand::Rng;
use shuttle::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use shuttle::{check_dfs, check_pct, check_random, rand, thread};
use std::sync::Arc;
use std::sync::atomic::AtomicU64 as Truth;

const CAPACITY: u64 = 4;
const SLOTS: usize = 3;

#[derive(Default)]
struct Slot {
    total: AtomicU64,
    intent: AtomicU64,
    confirmed: AtomicU64,
    /// The lock that a living process, or who sees to a dead one, has on the slot.
    locked: AtomicBool,
    /// What the slot's process knows that it holds, apart from what it was doing when it died.
    known: Truth,
}

#[derive(Default)]
struct Gpu {
    word: AtomicU64,
    slots: [Slot; SLOTS],
    /// Units that really are in programs' hands.
    handed_out: Truth,
}

impl SlotTable for &Gpu {
    fn words(&self, slot: usize) -> Option<SlotWords<'_>> {
        let slot = self.slots.get(slot)?;
        Some(SlotWords { total: &slot.total, intent: &slot.intent, confirmed: &slot.confirmed })
    }
}

/// The kernel lets go of it whichever way its holder goes.
struct Lock<'a>(&'a AtomicBool);

impl<'a> Lock<'a> {
    fn take(slot: &'a Slot) -> Option<Self> {
        (!slot.locked.swap(true, Ordering::SeqCst)).then(|| Self(&slot.locked))
    }
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl Gpu {
    fn account(&self, slot: usize) -> MemoryAccount<'_, &Self> {
        MemoryAccount { word: &self.word, lanes: self, slot }
    }

    fn used(&self) -> u64 {
        memory_account::used(&self.word)
    }

    fn take(&self, slot: usize, units: u64) -> bool {
        let Some(used) = self.account(slot).take(units, CAPACITY) else { return false };
        assert!(used <= CAPACITY, "{used} used");
        let before = self.handed_out.fetch_add(units, Ordering::SeqCst);
        assert!(before + units <= CAPACITY, "{} handed out", before + units);
        self.slots[slot].known.fetch_add(units, Ordering::SeqCst);
        true
    }

    fn give(&self, slot: usize, units: u64) {
        // The memory is freed first, then given back.
        self.handed_out.fetch_sub(units, Ordering::SeqCst);
        self.slots[slot].known.fetch_sub(units, Ordering::SeqCst);
        self.account(slot).give(units);
    }

    /// A process in the slot, which stays there if it is not killed; false if it was, or if somebody lived there.
    fn life(&self, slot: usize, death: Option<u32>, work: impl FnOnce()) -> bool {
        let Some(lock) = Lock::take(&self.slots[slot]) else { return false };
        let lived = until_death(death, || {
            self.account(slot).release_all();
            work();
        });
        if lived.is_none() {
            // The driver frees a dead process's memory.
            let known = self.slots[slot].known.swap(0, Ordering::SeqCst);
            self.handed_out.fetch_sub(known, Ordering::SeqCst);
        } else {
            std::mem::forget(lock);
        }
        lived.is_some()
    }

    /// Gives back what the slot's process held, if it is dead; whoever does this may die of it.
    fn bury(&self, slot: usize, death: Option<u32>) {
        if let Some(_lock) = Lock::take(&self.slots[slot]) {
            until_death(death, || self.account(slot).release_all());
        }
    }

    fn check_books(&self, living: &[usize]) {
        let held: u64 = living.iter().map(|&slot| self.slots[slot].known.load(Ordering::SeqCst)).sum();
        assert_eq!(self.used(), held);
        for &slot in living {
            assert_eq!(self.account(slot).held(), self.slots[slot].known.load(Ordering::SeqCst));
        }
    }
}

fn some_death() -> Option<u32> {
    let n = rand::thread_rng().gen_range(0..24);
    (n < 18).then_some(n)
}

fn a_few_operations(gpu: &Gpu, slot: usize, most: u64) {
    let mut held = 0;
    for _ in 0..4 {
        let mut random = rand::thread_rng();
        if held > 0 && random.gen_range(0..2) == 0 {
            let units = random.gen_range(1..=held);
            held -= units;
            gpu.give(slot, units);
        } else if held < most {
            let units = random.gen_range(1..=most - held);
            if gpu.take(slot, units) {
                held += units;
            }
        }
    }
}

/// Processes come, work, are killed and come again in the same slots, while another buries the dead and is killed too.
fn lives_and_deaths() {
    let gpu = Arc::new(Gpu::default());
    let lives = (0..SLOTS - 1).map(|slot| {
        let gpu = Arc::clone(&gpu);
        thread::spawn(move || {
            let mut lives = false;
            for _ in 0..2 {
                lives = gpu.life(slot, some_death(), || a_few_operations(&gpu, slot, CAPACITY));
                if lives {
                    break;
                }
            }
            lives
        })
    });
    let lives: Vec<_> = lives.collect();
    let undertaker = {
        let gpu = Arc::clone(&gpu);
        thread::spawn(move || {
            for slot in [0, 1, 0, 1] {
                gpu.bury(slot, some_death());
            }
        })
    };
    let lives: Vec<bool> = lives.into_iter().map(|life| life.join().unwrap()).collect();
    undertaker.join().unwrap();
    let living: Vec<usize> = (0..SLOTS - 1).filter(|&slot| lives[slot]).collect();
    for slot in (0..SLOTS - 1).filter(|&slot| !lives[slot]) {
        gpu.bury(slot, None);
    }
    gpu.check_books(&living);
    let left = CAPACITY - gpu.used();
    assert!(!gpu.take(SLOTS - 1, left + 1) && gpu.take(SLOTS - 1, left));
}

/// Whoever else comes, goes and is killed: what fits beside all they can hold is given.
fn what_fits_is_given() {
    let gpu = Arc::new(Gpu::default());
    let others = (1..SLOTS).map(|slot| {
        let gpu = Arc::clone(&gpu);
        // Together the others never hold more than two, dead or alive.
        thread::spawn(move || gpu.life(slot, some_death(), || a_few_operations(&gpu, slot, 1)))
    });
    let others: Vec<_> = others.collect();
    for _ in 0..3 {
        assert!(gpu.take(0, 2), "two of {CAPACITY} were refused with {} used", gpu.used());
        gpu.give(0, 1);
        assert!(gpu.take(0, 1));
        gpu.give(0, 2);
    }
    for other in others {
        other.join().unwrap();
    }
}

#[test]
fn random_schedules() {
    check_random(lives_and_deaths, 6_000);
}

#[test]
fn schedules_with_few_switches() {
    check_pct(lives_and_deaths, 6_000, 4);
}

#[test]
fn a_request_that_fits_is_not_refused() {
    check_random(what_fits_is_given, 4_000);
}

/// Every schedule of two processes that take at once, each killed at every place or not at all.
#[test]
fn every_schedule_of_two_operations() {
    for first in 0..7 {
        for second in 0..7 {
            let two = move || {
                let gpu = Arc::new(Gpu::default());
                let other = Arc::clone(&gpu);
                let two = thread::spawn(move || until_death(Some(second), || other.take(1, 2)));
                let one = until_death(Some(first), || gpu.take(0, 1));
                let two = two.join().unwrap();
                let living: Vec<usize> = [one, two]
                    .iter()
                    .enumerate()
                    .filter(|(_, lived)| lived.is_some())
                    .map(|(slot, _)| slot)
                    .collect();
                assert!(one != Some(false) && two != Some(false), "both fit");
                for dead in (0..2).filter(|slot| !living.contains(slot)) {
                    gpu.account(dead).release_all();
                }
                gpu.check_books(&living);
            };
            check_dfs(two, None);
        }
    }
}
