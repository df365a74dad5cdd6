//! Event sets: faults, delivered to those who wait for them.
//!
//! A GPU that falls off the bus is told by its XID first; who waits on is told `GPU_IS_LOST` when the time is
//! over.

use super::call::{Answer, answer, gpu, handle, passed};
use super::session::session;
use super::*;
use crate::state::{FaultEvent, MAX_GPUS};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// What somebody waits for.
#[derive(Default)]
struct Set {
    wanted: [Wanted; MAX_GPUS],
    /// The number of the last event that was looked at.
    seen: u32,
}

/// What is wanted of one GPU.
#[derive(Clone, Copy, Default)]
struct Wanted {
    kinds: u64,
    /// Events up to this one happened before anybody wanted them.
    after: u32,
}

/// All sets by their handles, which are never given twice.
#[derive(Default)]
pub(super) struct Sets {
    sets: BTreeMap<usize, Arc<Mutex<Set>>>,
    made: usize,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change to them is whole.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn set(set: nvmlEventSet_t) -> Result<Arc<Mutex<Set>>, NvmlError> {
    let sets = locked(&session()?.sets);
    sets.sets.get(&(set as usize)).cloned().ok_or(NvmlError::INVALID_ARGUMENT)
}

/// Kinds of events that a card can have.
fn kinds(gpu: call::Gpu) -> u64 {
    let mut kinds = nvmlEventTypePState | nvmlEventTypeXidCriticalError | nvmlEventTypeClock;
    if gpu.profile().memory.ecc {
        kinds |= nvmlEventTypeSingleBitEccError | nvmlEventTypeDoubleBitEccError;
    }
    if gpu.profile().mig_instances > 0 {
        kinds |= nvmlEventMigConfigChange;
    }
    kinds
}

/// The next event that is wanted, within the time.
fn wait(handle: nvmlEventSet_t, milliseconds: u32) -> Result<FaultEvent, NvmlError> {
    let set = set(handle)?;
    let state = &session()?.state;
    let deadline = Instant::now() + Duration::from_millis(u64::from(milliseconds));
    loop {
        {
            let mut set = locked(&set);
            while let Some(event) = state.event_after(set.seen) {
                set.seen = event.number;
                let wanted = set.wanted[event.gpu];
                // Numbers go round: later is ahead by less than half the way.
                let later = (event.number.wrapping_sub(wanted.after) as i32) > 0;
                if later && wanted.kinds & u64::from(event.kind) != 0 {
                    return Ok(event);
                }
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let set = locked(&set);
            let lost = (0..state.gpus()).any(|gpu| set.wanted[gpu].kinds != 0 && state.is_lost(gpu));
            return Err(if lost { NvmlError::GPU_IS_LOST } else { NvmlError::TIMEOUT });
        }
        // In steps, so that a set that was freed or a driver that was unloaded meanwhile is noticed.
        let seen = locked(&set).seen;
        state.wait_event(seen, left.min(Duration::from_millis(500)));
        session()?;
    }
}

impl Events for Library {
    unsafe fn nvmlDeviceGetSupportedEventTypes(device: nvmlDevice_t, event_types: *mut u64) -> Answer {
        answer!(event_types => kinds(gpu(device)?))
    }

    unsafe fn nvmlEventSetCreate(set: *mut nvmlEventSet_t) -> Answer {
        let session = session()?;
        let seen = session.state.last_event();
        if set.is_null() {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        let mut sets = locked(&session.sets);
        sets.made += 1;
        // No address, so that nobody reads through it; small numbers are.
        let handle = sets.made << 4;
        sets.sets.insert(handle, Arc::new(Mutex::new(Set { seen, ..Set::default() })));
        answer!(set => handle as nvmlEventSet_t)
    }

    unsafe fn nvmlEventSetFree(set: nvmlEventSet_t) -> Answer {
        let mut sets = locked(&session()?.sets);
        sets.sets.remove(&(set as usize)).map(drop).ok_or(NvmlError::INVALID_ARGUMENT)
    }

    unsafe fn nvmlDeviceRegisterEvents(
        device: nvmlDevice_t,
        event_types: u64,
        set: nvmlEventSet_t,
    ) -> Answer {
        let gpu = gpu(device)?;
        let set = self::set(set)?;
        if event_types & !nvmlEventTypeAll != 0 {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        if event_types & !kinds(gpu) != 0 {
            return Err(NvmlError::NOT_SUPPORTED);
        }
        let mut set = locked(&set);
        let wanted = &mut set.wanted[gpu.index];
        if wanted.kinds == 0 {
            wanted.after = gpu.session.state.last_event();
        }
        wanted.kinds |= event_types;
        Ok(())
    }

    unsafe fn nvmlEventSetWait(set: nvmlEventSet_t, data: *mut nvmlEventData_v1_t, timeoutms: u32) -> Answer {
        passed!(data.cast_const());
        let event = wait(set, timeoutms)?;
        answer!(data => nvmlEventData_v1_t {
            device: handle(event.gpu),
            eventType: u64::from(event.kind),
            eventData: event.data,
        })
    }

    unsafe fn nvmlEventSetWait_v2(set: nvmlEventSet_t, data: *mut nvmlEventData_t, timeoutms: u32) -> Answer {
        passed!(data.cast_const());
        let event = wait(set, timeoutms)?;
        answer!(data => nvmlEventData_t {
            device: handle(event.gpu),
            eventType: u64::from(event.kind),
            eventData: event.data,
            gpuInstanceId: u32::MAX,
            computeInstanceId: u32::MAX,
        })
    }
}
