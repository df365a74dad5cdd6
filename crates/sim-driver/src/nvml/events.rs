//! Event sets, which deliver faults to waiting programs.
//!
//! A lost GPU raises an XID event first; later waits return `GPU_IS_LOST` when they time out.

use super::arguments::{NvmlResult, gpu, handle, read_in, write_out};
use super::session::session;
use super::*;
use crate::state::{FaultEvent, MAX_GPUS};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// An event set of the program.
#[derive(Default)]
struct EventSet {
    subscriptions: [EventSubscription; MAX_GPUS],
    /// The number of the last event that was examined.
    seen: u32,
}

/// The events of one GPU that a set is registered for.
#[derive(Clone, Copy, Default)]
struct EventSubscription {
    kinds: u64,
    /// Events up to this number occurred before the registration.
    after: u32,
}

/// All event sets by handle. Handles are never reused.
#[derive(Default)]
pub(super) struct EventSets {
    sets: BTreeMap<usize, Arc<Mutex<EventSet>>>,
    created: usize,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every modification leaves the data consistent, so a poisoned lock can be used.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn set(set: nvmlEventSet_t) -> Result<Arc<Mutex<EventSet>>, NvmlError> {
    let sets = locked(&session()?.sets);
    sets.sets.get(&(set as usize)).cloned().ok_or(NvmlError::INVALID_ARGUMENT)
}

/// Returns the event types that a card supports.
fn kinds(gpu: arguments::VisibleGpu) -> u64 {
    let mut kinds = nvmlEventTypePState | nvmlEventTypeXidCriticalError | nvmlEventTypeClock;
    if gpu.profile().memory.ecc {
        kinds |= nvmlEventTypeSingleBitEccError | nvmlEventTypeDoubleBitEccError;
    }
    if gpu.profile().mig_instances > 0 {
        kinds |= nvmlEventMigConfigChange;
    }
    kinds
}

/// Waits for the next registered event, up to the timeout.
fn wait(handle: nvmlEventSet_t, milliseconds: u32) -> Result<FaultEvent, NvmlError> {
    let set = set(handle)?;
    let state = &session()?.state;
    let deadline = Instant::now() + Duration::from_millis(u64::from(milliseconds));
    loop {
        {
            let mut set = locked(&set);
            while let Some(event) = state.event_after(set.seen) {
                set.seen = event.number;
                let subscription = set.subscriptions[event.gpu];
                // Event numbers wrap around: a later one is ahead by less than half the range.
                let later = (event.number.wrapping_sub(subscription.after) as i32) > 0;
                if later && subscription.kinds & u64::from(event.kind) != 0 {
                    return Ok(event);
                }
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let set = locked(&set);
            let lost = (0..state.gpus()).any(|gpu| set.subscriptions[gpu].kinds != 0 && state.is_lost(gpu));
            return Err(if lost { NvmlError::GPU_IS_LOST } else { NvmlError::TIMEOUT });
        }
        // Waits in steps, to notice when the set is freed or the driver is unloaded.
        let seen = locked(&set).seen;
        state.wait_event(seen, left.min(Duration::from_millis(500)));
        session()?;
    }
}

impl NvmlEvents for Library {
    unsafe fn nvmlDeviceGetSupportedEventTypes(device: nvmlDevice_t, event_types: *mut u64) -> NvmlResult {
        write_out!(event_types => kinds(gpu(device)?))
    }

    unsafe fn nvmlEventSetCreate(set: *mut nvmlEventSet_t) -> NvmlResult {
        let session = session()?;
        let seen = session.state.last_event();
        if set.is_null() {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        let mut sets = locked(&session.sets);
        sets.created += 1;
        // The handle is not a valid address, so a program cannot read through it.
        let handle = sets.created << 4;
        sets.sets.insert(handle, Arc::new(Mutex::new(EventSet { seen, ..EventSet::default() })));
        write_out!(set => handle as nvmlEventSet_t)
    }

    unsafe fn nvmlEventSetFree(set: nvmlEventSet_t) -> NvmlResult {
        let mut sets = locked(&session()?.sets);
        sets.sets.remove(&(set as usize)).map(drop).ok_or(NvmlError::INVALID_ARGUMENT)
    }

    unsafe fn nvmlDeviceRegisterEvents(
        device: nvmlDevice_t,
        event_types: u64,
        set: nvmlEventSet_t,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        let set = self::set(set)?;
        if event_types & !nvmlEventTypeAll != 0 {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        if event_types & !kinds(gpu) != 0 {
            return Err(NvmlError::NOT_SUPPORTED);
        }
        let mut set = locked(&set);
        let subscription = &mut set.subscriptions[gpu.index];
        if subscription.kinds == 0 {
            subscription.after = gpu.session.state.last_event();
        }
        subscription.kinds |= event_types;
        Ok(())
    }

    unsafe fn nvmlEventSetWait(
        set: nvmlEventSet_t,
        data: *mut nvmlEventData_v1_t,
        timeoutms: u32,
    ) -> NvmlResult {
        read_in!(data.cast_const());
        let event = wait(set, timeoutms)?;
        write_out!(data => nvmlEventData_v1_t {
            device: handle(event.gpu),
            eventType: u64::from(event.kind),
            eventData: event.data,
        })
    }

    unsafe fn nvmlEventSetWait_v2(
        set: nvmlEventSet_t,
        data: *mut nvmlEventData_t,
        timeoutms: u32,
    ) -> NvmlResult {
        read_in!(data.cast_const());
        let event = wait(set, timeoutms)?;
        write_out!(data => nvmlEventData_t {
            device: handle(event.gpu),
            eventType: u64::from(event.kind),
            eventData: event.data,
            gpuInstanceId: u32::MAX,
            computeInstanceId: u32::MAX,
        })
    }
}
