//! The condition of the cards: what was set on them, what they count, and what breaks.

use super::{State, now, robust};
use partage_region::failpoint::point;
use rustix::thread::futex;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, fence};
use std::time::Duration;

/// A setting of a card that outlives the process that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
#[allow(missing_docs)]
pub enum Setting {
    Persistence,
    ComputeMode,
    PowerLimit,
    EccPending,
    GraphicsClock,
    MemoryClock,
    LockedGraphics,
    LockedMemory,
    Accounting,
    Mig,
}

/// Something a card counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
#[allow(missing_docs)]
pub enum Counter {
    CorrectedVolatile,
    UncorrectedVolatile,
    CorrectedAggregate,
    UncorrectedAggregate,
    RetiredPages,
    /// When it last came back, in nanoseconds: its energy is counted from there.
    Returned,
    /// How long it had been busy until then.
    BusyBefore,
}

/// What can go wrong, or right again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The driver reports this XID for the GPU.
    Xid(u32),
    /// So many single-bit errors, mended by the card.
    CorrectedErrors(u64),
    /// So many double-bit errors; the driver reports XID 48 too.
    UncorrectedErrors(u64),
    /// Falls off the bus, with XID 79.
    Lost,
    /// Is on the bus again.
    Returned,
    /// Takes so many thousandths of the usual time from now on; 1000 is as usual.
    Slow(u32),
    /// MIG mode is enabled, or disabled, at once and without a reset. It is cut in no instances.
    Mig(bool),
}

/// An event that NVML's event sets deliver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultEvent {
    /// Counts events of the node from 1.
    pub number: u32,
    /// The GPU's index.
    pub gpu: usize,
    /// NVML's bit for the kind of event.
    pub kind: u32,
    /// NVML's data: the XID, for one.
    pub data: u64,
}

impl FaultEvent {
    /// The XID, if the event is one.
    pub fn xid(&self) -> Option<u64> {
        (self.kind == XID).then_some(self.data)
    }
}

const SINGLE_BIT: u32 = 0x1;
const DOUBLE_BIT: u32 = 0x2;
const XID: u32 = 0x8;
const MIG_CHANGE: u32 = 0x100;

impl State {
    /// Whether the kernel module is loaded.
    pub fn is_loaded(&self) -> bool {
        self.shared.header.unloaded.load(Acquire) == 0
    }

    /// Loads or unloads the kernel module.
    pub fn set_loaded(&self, loaded: bool) {
        self.shared.header.unloaded.store(u32::from(!loaded), Release);
    }

    /// Whether the GPU is off the bus.
    pub fn is_lost(&self, gpu: usize) -> bool {
        self.generation(gpu) % 2 == 1
    }

    /// Changes whenever the GPU falls off the bus or comes back.
    pub fn generation(&self, gpu: usize) -> u32 {
        self.shared.gpus[gpu].condition.generation.load(Acquire)
    }

    /// The word that [`State::generation`] reads.
    pub fn generation_word(&self, gpu: usize) -> &'static AtomicU32 {
        &self.shared.gpus[gpu].condition.generation
    }

    /// Thousandths of the usual time that work takes.
    pub fn slowness(&self, gpu: usize) -> u32 {
        self.shared.gpus[gpu].condition.slowness.load(Relaxed).max(1000)
    }

    /// Whether the GPU is in MIG mode, where that was switched since the node was made.
    pub fn mig(&self, gpu: usize) -> Option<bool> {
        self.setting(gpu, Setting::Mig).map(|mode| mode != 0)
    }

    /// A setting, where one was made.
    pub fn setting(&self, gpu: usize, setting: Setting) -> Option<u64> {
        self.shared.gpus[gpu].condition.settings[setting as usize].load(Acquire).checked_sub(1)
    }

    /// Makes a setting, or takes it back.
    pub fn set(&self, gpu: usize, setting: Setting, value: Option<u64>) {
        let word = value.map_or(0, |value| value.saturating_add(1));
        self.shared.gpus[gpu].condition.settings[setting as usize].store(word, Release);
    }

    /// What the card has counted.
    pub fn counter(&self, gpu: usize, counter: Counter) -> u64 {
        self.shared.gpus[gpu].condition.counters[counter as usize].load(Acquire)
    }

    /// Counts on.
    pub fn count(&self, gpu: usize, counter: Counter, more: u64) {
        self.shared.gpus[gpu].condition.counters[counter as usize].fetch_add(more, Release);
    }

    /// Starts a counter anew.
    pub fn reset_counter(&self, gpu: usize, counter: Counter) {
        self.shared.gpus[gpu].condition.counters[counter as usize].store(0, Release);
    }

    /// Makes it happen.
    pub fn inject(&self, gpu: usize, fault: Fault) {
        let condition = &self.shared.gpus[gpu].condition;
        match fault {
            Fault::Xid(xid) => self.report(gpu, XID, u64::from(xid)),
            Fault::CorrectedErrors(errors) => {
                self.count(gpu, Counter::CorrectedVolatile, errors);
                self.count(gpu, Counter::CorrectedAggregate, errors);
                self.report(gpu, SINGLE_BIT, errors);
            }
            Fault::UncorrectedErrors(errors) => {
                self.count(gpu, Counter::UncorrectedVolatile, errors);
                self.count(gpu, Counter::UncorrectedAggregate, errors);
                self.report(gpu, DOUBLE_BIT, errors);
                self.report(gpu, XID, 48);
            }
            Fault::Lost if self.turn_generation(gpu, 0) => {
                {
                    let (timeline, _held) = self.timeline(gpu);
                    timeline.advance(now());
                    timeline.stop();
                }
                self.report(gpu, XID, 79);
            }
            Fault::Returned if self.is_lost(gpu) => {
                // What was on it is gone: errors since the last reset, and all work.
                self.reset_counter(gpu, Counter::CorrectedVolatile);
                self.reset_counter(gpu, Counter::UncorrectedVolatile);
                let busy = self.service(gpu, self.slot()).1;
                for (counter, value) in [(Counter::Returned, now()), (Counter::BusyBefore, busy)] {
                    self.reset_counter(gpu, counter);
                    self.count(gpu, counter, value);
                }
                self.turn_generation(gpu, 1);
            }
            Fault::Lost | Fault::Returned => {}
            Fault::Slow(thousandths) => {
                let (timeline, _held) = self.timeline(gpu);
                // What came before went at the old speed.
                timeline.advance(now());
                condition.slowness.store(thousandths.max(1000), Release);
            }
            Fault::Mig(enabled) => {
                self.set(gpu, Setting::Mig, Some(u64::from(enabled)));
                self.report(gpu, MIG_CHANGE, 0);
            }
        }
    }

    /// Counts a fall off the bus or a return; false if somebody else did, or it does not apply.
    fn turn_generation(&self, gpu: usize, from: u32) -> bool {
        let generation = &self.shared.gpus[gpu].condition.generation;
        let turned =
            generation.fetch_update(Release, Acquire, |now| (now % 2 == from).then(|| now.wrapping_add(1)));
        turned.is_ok()
    }

    fn report(&self, gpu: usize, kind: u32, data: u64) {
        let header = &self.shared.header;
        let held = robust::take(&header.event_lock, self.slot, &self.alive);
        let number = header.event_count.load(Relaxed).wrapping_add(1);
        let event = &header.events[number as usize % header.events.len()];
        event.number.store(0, Release);
        // What follows must not be seen under the old number.
        fence(SeqCst);
        point("sim.event");
        event.gpu.store(gpu as u32, Relaxed);
        event.kind.store(kind, Relaxed);
        event.data.store(data, Relaxed);
        event.number.store(u64::from(number), Release);
        point("sim.event");
        header.event_count.store(number, Release);
        drop(held);
        let _ = futex::wake(&header.event_count, futex::Flags::empty(), u32::MAX);
    }

    /// The number of the last event.
    pub fn last_event(&self) -> u32 {
        self.shared.header.event_count.load(Acquire)
    }

    /// The first event after `number`, if there is one and it is remembered still.
    pub fn event_after(&self, number: u32) -> Option<FaultEvent> {
        let header = &self.shared.header;
        let last = self.last_event();
        let known = header.events.len() as u32;
        let first = number.wrapping_add(1);
        let behind = last.wrapping_sub(number);
        if behind == 0 {
            return None;
        }
        let first = if behind > known { last.wrapping_sub(known).wrapping_add(1) } else { first };
        // One whose writer was killed is not there; the next one is.
        (0..=last.wrapping_sub(first))
            .map(|ahead| first.wrapping_add(ahead))
            .find_map(|number| self.event(number))
    }

    fn event(&self, number: u32) -> Option<FaultEvent> {
        let events = &self.shared.header.events;
        let event = &events[number as usize % events.len()];
        let found = FaultEvent {
            number,
            gpu: (event.gpu.load(Acquire) as usize).min(self.gpus.saturating_sub(1)),
            kind: event.kind.load(Acquire),
            data: event.data.load(Acquire),
        };
        (event.number.load(Acquire) == u64::from(number)).then_some(found)
    }

    /// Waits for an event after `number`, at most so long.
    pub fn wait_event(&self, number: u32, at_most: Duration) {
        let timeout = futex::Timespec {
            tv_sec: i64::try_from(at_most.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(at_most.subsec_nanos()),
        };
        if self.last_event() == number {
            let _ =
                futex::wait(&self.shared.header.event_count, futex::Flags::empty(), number, Some(&timeout));
        }
    }
}
