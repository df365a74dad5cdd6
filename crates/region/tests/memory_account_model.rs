//! The memory account under a model checker: the library's source, with atomics at whose every access the scheduler may
//! switch threads. A thread stands for a process; it may be killed at every fault injection point.
#![allow(dead_code, unreachable_pub, missing_docs, clippy::unwrap_used)]

/// The atomics of the model.
mod sync {
    pub(crate) use shuttle::sync::atomic::{AtomicU64, Ordering};
}

/// Kills of the model: the thread unwinds, and none of the account's code runs on the way.
mod failpoint {
    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    shuttle::thread_local! {
        static COUNTDOWN: Cell<Option<u32>> = Cell::new(None);
    }

    struct KillPanic;

    pub(crate) fn point(_name: &str) {
        match COUNTDOWN.with(Cell::get) {
            None => {}
            Some(0) => resume_unwind(Box::new(KillPanic)),
            Some(left) => COUNTDOWN.with(|cell| cell.set(Some(left - 1))),
        }
    }

    /// Returns the work's result, or `None` if it was killed at the n-th point.
    pub(crate) fn until_killed<T>(n: Option<u32>, work: impl FnOnce() -> T) -> Option<T> {
        COUNTDOWN.with(|cell| cell.set(n));
        let result = catch_unwind(AssertUnwindSafe(work));
        COUNTDOWN.with(|cell| cell.set(None));
        match result {
            Ok(result) => Some(result),
            Err(cause) if cause.is::<KillPanic>() => None,
            Err(cause) => resume_unwind(cause),
        }
    }
}

#[path = "../src/memory_account.rs"]
mod memory_account;
#[path = "../src/protocol.rs"]
mod protocol;

use failpoint::until_killed;
use memory_account::{MemoryAccount, SlotTable, SlotWords};
use shuttle::rand::Rng;
use shuttle::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use shuttle::{check_dfs, check_pct, check_random, rand, thread};
use std::sync::Arc;
use std::sync::atomic::AtomicU64 as PlainAtomicU64;

const CAPACITY: u64 = 4;
const SLOTS: usize = 3;

#[derive(Default)]
struct ModelSlot {
    total: AtomicU64,
    intent: AtomicU64,
    confirmed: AtomicU64,
    /// The lock on the slot, held by its live process or by the one that reclaims it.
    locked: AtomicBool,
    /// Units that the slot's process knows that it holds, apart from its operation in progress.
    known: PlainAtomicU64,
}

#[derive(Default)]
struct ModelGpu {
    word: AtomicU64,
    slots: [ModelSlot; SLOTS],
    /// Units that processes really hold.
    handed_out: PlainAtomicU64,
}

impl SlotTable for &ModelGpu {
    fn words(&self, slot: usize) -> Option<SlotWords<'_>> {
        let slot = self.slots.get(slot)?;
        Some(SlotWords { total: &slot.total, intent: &slot.intent, confirmed: &slot.confirmed })
    }
}

/// A lock on a slot. The kernel releases it however its holder ends.
struct SlotLock<'a>(&'a AtomicBool);

impl<'a> SlotLock<'a> {
    fn take(slot: &'a ModelSlot) -> Option<Self> {
        (!slot.locked.swap(true, Ordering::SeqCst)).then(|| Self(&slot.locked))
    }
}

impl Drop for SlotLock<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl ModelGpu {
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
        // The memory is freed first, then released in the account.
        self.handed_out.fetch_sub(units, Ordering::SeqCst);
        self.slots[slot].known.fetch_sub(units, Ordering::SeqCst);
        self.account(slot).give(units);
    }

    /// Runs a process in the slot, which stays there unless it is killed. Returns whether it stays; false also if the
    /// slot was taken.
    fn run_process(&self, slot: usize, kill_at: Option<u32>, work: impl FnOnce()) -> bool {
        let Some(lock) = SlotLock::take(&self.slots[slot]) else { return false };
        let lived = until_killed(kill_at, || {
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

    /// Releases what the slot's process held, if it is dead. The reclaiming process may be killed, too.
    fn reclaim(&self, slot: usize, kill_at: Option<u32>) {
        if let Some(_lock) = SlotLock::take(&self.slots[slot]) {
            until_killed(kill_at, || self.account(slot).release_all());
        }
    }

    fn check_account(&self, living: &[usize]) {
        let held: u64 = living.iter().map(|&slot| self.slots[slot].known.load(Ordering::SeqCst)).sum();
        assert_eq!(self.used(), held);
        for &slot in living {
            assert_eq!(self.account(slot).held(), self.slots[slot].known.load(Ordering::SeqCst));
        }
    }
}

fn random_kill() -> Option<u32> {
    let n = rand::thread_rng().gen_range(0..24);
    (n < 18).then_some(n)
}

fn random_operations(gpu: &ModelGpu, slot: usize, most: u64) {
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

/// Processes attach, work, are killed and attach again in the same slots, while another reclaims them and is killed,
/// too.
fn processes_attach_and_are_killed() {
    let gpu = Arc::new(ModelGpu::default());
    let lives = (0..SLOTS - 1).map(|slot| {
        let gpu = Arc::clone(&gpu);
        thread::spawn(move || {
            let mut lives = false;
            for _ in 0..2 {
                lives = gpu.run_process(slot, random_kill(), || random_operations(&gpu, slot, CAPACITY));
                if lives {
                    break;
                }
            }
            lives
        })
    });
    let lives: Vec<_> = lives.collect();
    let reclaimer = {
        let gpu = Arc::clone(&gpu);
        thread::spawn(move || {
            for slot in [0, 1, 0, 1] {
                gpu.reclaim(slot, random_kill());
            }
        })
    };
    let lives: Vec<bool> = lives.into_iter().map(|life| life.join().unwrap()).collect();
    reclaimer.join().unwrap();
    let living: Vec<usize> = (0..SLOTS - 1).filter(|&slot| lives[slot]).collect();
    for slot in (0..SLOTS - 1).filter(|&slot| !lives[slot]) {
        gpu.reclaim(slot, None);
    }
    gpu.check_account(&living);
    let left = CAPACITY - gpu.used();
    assert!(!gpu.take(SLOTS - 1, left + 1) && gpu.take(SLOTS - 1, left));
}

/// Whatever other processes do: a request that fits beside all that they can hold is granted.
fn fitting_requests_are_granted() {
    let gpu = Arc::new(ModelGpu::default());
    let others = (1..SLOTS).map(|slot| {
        let gpu = Arc::clone(&gpu);
        // Together the others never hold more than two units, dead or alive.
        thread::spawn(move || gpu.run_process(slot, random_kill(), || random_operations(&gpu, slot, 1)))
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
fn account_is_exact_under_random_schedules() {
    check_random(processes_attach_and_are_killed, 6_000);
}

#[test]
fn account_is_exact_under_few_context_switches() {
    check_pct(processes_attach_and_are_killed, 6_000, 4);
}

#[test]
fn fitting_request_is_not_refused() {
    check_random(fitting_requests_are_granted, 4_000);
}

/// Every schedule of two concurrent operations, each killed at every point or not at all.
#[test]
fn account_is_exact_under_every_schedule_of_two_operations() {
    for first in 0..7 {
        for second in 0..7 {
            let two = move || {
                let gpu = Arc::new(ModelGpu::default());
                let other = Arc::clone(&gpu);
                let two = thread::spawn(move || until_killed(Some(second), || other.take(1, 2)));
                let one = until_killed(Some(first), || gpu.take(0, 1));
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
                gpu.check_account(&living);
            };
            check_dfs(two, None);
        }
    }
}
