//! Settings, counters and injected faults of the GPUs.

use super::{SimNodeState, now, robust_mutex};
use partage_region::failpoint::point;
use rustix::thread::futex;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, fence};
use std::time::Duration;

/// A setting of a GPU that persists after the process that made it exits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
#[allow(missing_docs)]
pub enum GpuSetting {
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

/// A counter of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
#[allow(missing_docs)]
pub enum GpuCounter {
    CorrectedVolatile,
    UncorrectedVolatile,
    CorrectedAggregate,
    UncorrectedAggregate,
    RetiredPages,
    /// The time of the GPU's last return to the bus, in nanoseconds. Its energy counter starts there.
    Returned,
    /// The busy time of the GPU before that return, in nanoseconds.
    BusyBefore,
}

/// A fault that can be injected, or the recovery from one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuFault {
    /// The driver reports this XID for the GPU.
    Xid(u32),
    /// This number of single-bit ECC errors, which the GPU corrects.
    CorrectedErrors(u64),
    /// This number of double-bit ECC errors. The driver reports XID 48, too.
    UncorrectedErrors(u64),
    /// The GPU falls off the bus. The driver reports XID 79.
    Lost,
    /// The GPU returns to the bus.
    Returned,
    /// Work takes this many thousandths of its normal time from now on; 1000 is normal speed.
    Slow(u32),
    /// MIG mode is enabled or disabled immediately, without a reset. No instances are created.
    Mig(bool),
}

/// An event that NVML's event sets deliver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultEvent {
    /// The sequence number of the event on the node, from 1.
    pub number: u32,
    /// The index of the GPU.
    pub gpu: usize,
    /// NVML's event type bit.
    pub kind: u32,
    /// NVML's event data, such as the XID.
    pub data: u64,
}

impl FaultEvent {
    /// Returns the XID of an XID event; `None` for other events.
    pub fn xid(&self) -> Option<u64> {
        (self.kind == EVENT_XID).then_some(self.data)
    }
}

const EVENT_SINGLE_BIT_ECC: u32 = 0x1;
const EVENT_DOUBLE_BIT_ECC: u32 = 0x2;
const EVENT_XID: u32 = 0x8;
const EVENT_MIG_CHANGE: u32 = 0x100;

impl SimNodeState {
    /// Returns whether the simulated kernel module is loaded.
    pub fn is_loaded(&self) -> bool {
        self.shared.header.unloaded.load(Acquire) == 0
    }

    /// Loads or unloads the simulated kernel module.
    pub fn set_loaded(&self, loaded: bool) {
        self.shared.header.unloaded.store(u32::from(!loaded), Release);
    }

    /// Returns whether the GPU is off the bus.
    pub fn is_lost(&self, gpu: usize) -> bool {
        self.generation(gpu) % 2 == 1
    }

    /// Returns a number that changes whenever the GPU falls off the bus or returns.
    pub fn generation(&self, gpu: usize) -> u32 {
        self.shared.gpus[gpu].condition.generation.load(Acquire)
    }

    /// Returns the word that [`SimNodeState::generation`] reads.
    pub fn generation_word(&self, gpu: usize) -> &'static AtomicU32 {
        &self.shared.gpus[gpu].condition.generation
    }

    /// Returns the duration of work in thousandths of its normal time.
    pub fn slowness(&self, gpu: usize) -> u32 {
        self.shared.gpus[gpu].condition.slowness.load(Relaxed).max(1000)
    }

    /// Returns the MIG mode of the GPU if it was switched since the creation of the node.
    pub fn mig(&self, gpu: usize) -> Option<bool> {
        self.setting(gpu, GpuSetting::Mig).map(|mode| mode != 0)
    }

    /// Returns the value of a setting; `None` if it is at its default.
    pub fn setting(&self, gpu: usize, setting: GpuSetting) -> Option<u64> {
        self.shared.gpus[gpu].condition.settings[setting as usize].load(Acquire).checked_sub(1)
    }

    /// Sets the value of a setting, or resets it to its default with `None`.
    pub fn set_setting(&self, gpu: usize, setting: GpuSetting, value: Option<u64>) {
        let word = value.map_or(0, |value| value.saturating_add(1));
        self.shared.gpus[gpu].condition.settings[setting as usize].store(word, Release);
    }

    /// Returns the value of a counter.
    pub fn counter(&self, gpu: usize, counter: GpuCounter) -> u64 {
        self.shared.gpus[gpu].condition.counters[counter as usize].load(Acquire)
    }

    /// Adds to a counter.
    pub fn add_to_counter(&self, gpu: usize, counter: GpuCounter, more: u64) {
        self.shared.gpus[gpu].condition.counters[counter as usize].fetch_add(more, Release);
    }

    /// Resets a counter to zero.
    pub fn reset_counter(&self, gpu: usize, counter: GpuCounter) {
        self.shared.gpus[gpu].condition.counters[counter as usize].store(0, Release);
    }

    /// Injects a fault, or recovers from one.
    pub fn inject(&self, gpu: usize, fault: GpuFault) {
        let condition = &self.shared.gpus[gpu].condition;
        match fault {
            GpuFault::Xid(xid) => self.report(gpu, EVENT_XID, u64::from(xid)),
            GpuFault::CorrectedErrors(errors) => {
                self.add_to_counter(gpu, GpuCounter::CorrectedVolatile, errors);
                self.add_to_counter(gpu, GpuCounter::CorrectedAggregate, errors);
                self.report(gpu, EVENT_SINGLE_BIT_ECC, errors);
            }
            GpuFault::UncorrectedErrors(errors) => {
                self.add_to_counter(gpu, GpuCounter::UncorrectedVolatile, errors);
                self.add_to_counter(gpu, GpuCounter::UncorrectedAggregate, errors);
                self.report(gpu, EVENT_DOUBLE_BIT_ECC, errors);
                self.report(gpu, EVENT_XID, 48);
            }
            GpuFault::Lost if self.advance_generation(gpu, 0) => {
                {
                    let (timeline, _held) = self.timeline(gpu);
                    timeline.advance(now());
                    timeline.stop();
                }
                self.report(gpu, EVENT_XID, 79);
            }
            GpuFault::Returned if self.is_lost(gpu) => {
                // The reset clears volatile error counters and all work.
                self.reset_counter(gpu, GpuCounter::CorrectedVolatile);
                self.reset_counter(gpu, GpuCounter::UncorrectedVolatile);
                let busy = self.service_time(gpu, self.slot()).1;
                for (counter, value) in [(GpuCounter::Returned, now()), (GpuCounter::BusyBefore, busy)] {
                    self.reset_counter(gpu, counter);
                    self.add_to_counter(gpu, counter, value);
                }
                self.advance_generation(gpu, 1);
            }
            GpuFault::Lost | GpuFault::Returned => {}
            GpuFault::Slow(thousandths) => {
                let (timeline, _held) = self.timeline(gpu);
                // Work up to now ran at the old speed.
                timeline.advance(now());
                condition.slowness.store(thousandths.max(1000), Release);
            }
            GpuFault::Mig(enabled) => {
                self.set_setting(gpu, GpuSetting::Mig, Some(u64::from(enabled)));
                self.report(gpu, EVENT_MIG_CHANGE, 0);
            }
        }
    }

    /// Increments the generation if its parity is `from`. Returns false if it is not, also because another process was
    /// faster.
    fn advance_generation(&self, gpu: usize, from: u32) -> bool {
        let generation = &self.shared.gpus[gpu].condition.generation;
        let turned =
            generation.fetch_update(Release, Acquire, |now| (now % 2 == from).then(|| now.wrapping_add(1)));
        turned.is_ok()
    }

    fn report(&self, gpu: usize, kind: u32, data: u64) {
        let header = &self.shared.header;
        let held = robust_mutex::lock(&header.event_lock, self.slot, &self.alive);
        let number = header.event_count.load(Relaxed).wrapping_add(1);
        let event = &header.events[number as usize % header.events.len()];
        event.number.store(0, Release);
        // Readers must not see the following stores under the old number.
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

    /// Returns the number of the last event.
    pub fn last_event(&self) -> u32 {
        self.shared.header.event_count.load(Acquire)
    }

    /// Returns the first event after `number` that is still in the ring buffer.
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
        // An event whose writer was killed is missing; the one after it is returned.
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

    /// Waits for an event after `number`, for at most `timeout`.
    pub fn wait_event(&self, number: u32, timeout: Duration) {
        let timeout = futex::Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        if self.last_event() == number {
            let _ =
                futex::wait(&self.shared.header.event_count, futex::Flags::empty(), number, Some(&timeout));
        }
    }
}
