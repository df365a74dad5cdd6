//! Events: markers in a stream that record the wall-clock time at which the GPU reaches them.

use super::capture::{self, CapturedEvent};
use super::context::{self, Context};
use super::device::Device;
use super::engine::{ExecutionEngine, SharedTimestamp, StreamOp};
use super::handle::{HandleArena, handle_of};
use super::session::session;
use super::stream::Stream;
use super::*;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::{Mutex, MutexGuard};

/// A CUDA event, which can be recorded repeatedly.
#[derive(Default)]
pub(super) struct Event {
    inner: Mutex<EventState>,
}

/// The part of an event that changes.
#[derive(Clone, Default)]
struct EventState {
    context: Option<&'static Context>,
    flags: u32,
    /// The current recording, by a number that is never reused; zero before the first.
    ticket: u64,
    placed: Option<PlacedRecording>,
    /// Earlier recordings that a stream may still wait for.
    earlier: Vec<Recording>,
    /// Set while the last recording is part of a graph.
    captured: Option<CapturedEvent>,
}

/// One recording of an event.
#[derive(Clone)]
struct Recording {
    ticket: u64,
    context: Option<&'static Context>,
    placed: Option<PlacedRecording>,
}

/// Where a recording was placed: position in service time, timestamp, and operation of a timeline.
#[derive(Clone)]
struct PlacedRecording {
    position: u64,
    stamp: SharedTimestamp,
    timeline: usize,
    number: u64,
}

static EVENTS: HandleArena<Event> = HandleArena::new();

/// Resolution of the GPU's clock, in nanoseconds.
const CLOCK_TICK_NANOS: u64 = 32;

/// Resolves an event handle.
pub(super) fn resolve(handle: CUevent) -> Result<&'static Event, CudaError> {
    session()?;
    EVENTS.get(handle).ok_or(CudaError::INVALID_HANDLE)
}

/// Destroys all events of a context.
pub(super) fn drop_all(context: &'static Context) {
    for event in EVENTS.live() {
        if event.inner().context.is_some_and(|own| std::ptr::eq(own, context)) {
            EVENTS.drop(handle_of::<_, u8>(event));
        }
    }
}

impl EventState {
    /// Ends the current recording; streams that wait for it keep waiting for it.
    fn retire(&mut self) {
        // A recording that the GPU has reached may still wait for host work before it, which completes within a few
        // more recordings.
        let old = self.earlier.len().saturating_sub(64);
        let mut index = 0;
        self.earlier.retain(|earlier| {
            index += 1;
            index > old || earlier.placed.as_ref().is_none_or(|placed| placed.stamp.load(Acquire) == 0)
        });
        if self.ticket != 0 {
            let placed = self.placed.take();
            self.earlier.push(Recording { ticket: self.ticket, context: self.context, placed });
        }
        self.ticket = 0;
        self.captured = None;
    }

    /// Returns the recording with this ticket, or `None` if it is complete and forgotten.
    fn recording(&self, ticket: u64) -> Option<Recording> {
        if ticket != 0 && self.ticket == ticket {
            return Some(Recording { ticket, context: self.context, placed: self.placed.clone() });
        }
        self.earlier.iter().find(|earlier| earlier.ticket == ticket).cloned()
    }
}

impl Event {
    fn inner(&self) -> MutexGuard<'_, EventState> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn device(&self) -> Option<&'static Device> {
        self.inner().context.map(|context| context.device)
    }

    /// Starts a recording; later waits for the event refer to it.
    pub(super) fn start_recording(&self) -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut inner = self.inner();
        inner.retire();
        inner.ticket = NEXT.fetch_add(1, Relaxed);
        inner.ticket
    }

    /// Prepares a driver-internal event for another recording in the context.
    pub(super) fn rearm(&self, context: &'static Context) -> u64 {
        {
            let mut inner = self.inner();
            inner.retire();
            inner.context = Some(context);
        }
        self.start_recording()
    }

    /// Returns the context in which the event was created.
    pub(super) fn context(&self) -> Option<&'static Context> {
        self.inner().context
    }

    /// Returns what the last recording refers to if it was captured.
    pub(super) fn captured(&self) -> Option<CapturedEvent> {
        self.inner().captured.clone()
    }

    pub(super) fn set_captured(&self, captured: CapturedEvent) {
        self.inner().captured = Some(captured);
    }

    /// Waits until the recording is complete or can no longer complete.
    pub(super) fn wait(&self, ticket: u64) {
        if let Some(device) = self.device() {
            let _ = device.run_tasks_until(device.engine(), |engine| self.is_complete(ticket, Some(engine)));
        }
    }

    /// Returns the ticket of the current recording.
    pub(super) fn ticket(&self) -> u64 {
        self.inner().ticket
    }

    /// Sets the position of a recording.
    pub(super) fn set_placed(
        &self,
        ticket: u64,
        position: u64,
        stamp: SharedTimestamp,
        timeline: usize,
        number: u64,
    ) {
        let placed = Some(PlacedRecording { position, stamp, timeline, number });
        let mut inner = self.inner();
        if inner.ticket == ticket {
            inner.placed = placed;
        } else if let Some(earlier) = inner.earlier.iter_mut().find(|earlier| earlier.ticket == ticket) {
            earlier.placed = placed;
        }
    }

    /// Returns the recording's position in the service time of the engine's GPU, if reaching it is all that is left
    /// to wait for.
    pub(super) fn position(&self, ticket: u64, engine: &ExecutionEngine) -> Option<u64> {
        // Never recorded or complete: nothing to wait for.
        let Some(recording) = self.inner().recording(ticket) else { return Some(0) };
        let placed = recording.placed?;
        let here = recording.context.is_some_and(|context| context.device.owns_engine(engine));
        (here && engine.is_settled(placed.timeline, placed.number)).then_some(placed.position)
    }

    /// Returns whether the recording is complete. `engine` is the engine that the caller has locked.
    pub(super) fn is_complete(&self, ticket: u64, engine: Option<&mut ExecutionEngine>) -> bool {
        let Some(recording) = self.inner().recording(ticket) else { return true };
        let (Some(placed), Some(context)) = (recording.placed, recording.context) else { return false };
        let look = |engine: &mut ExecutionEngine| {
            let reached = placed.stamp.load(Acquire) != 0
                || engine.lane().is_ok_and(|lane| match lane.refresh() {
                    Ok(served) => served >= placed.position,
                    Err(_) => true,
                });
            engine.store_reached_words();
            reached && engine.is_settled(placed.timeline, placed.number)
        };
        match engine {
            Some(engine) if context.device.owns_engine(engine) => look(engine),
            // Two GPUs must not wait for each other's locks: a locked one is checked again soon.
            Some(_) => context.device.try_engine().is_some_and(|mut engine| look(&mut engine)),
            None => look(&mut context.device.engine()),
        }
    }

    fn timestamp(&self) -> Result<u64, CudaError> {
        let inner = self.inner();
        let placed = inner.placed.as_ref().ok_or(CudaError::INVALID_HANDLE)?;
        match placed.stamp.load(Acquire) {
            0 => Err(CudaError::NOT_READY),
            stamp => Ok(stamp / CLOCK_TICK_NANOS * CLOCK_TICK_NANOS),
        }
    }
}

/// Records an event in a stream.
pub(super) fn record(event: &'static Event, stream: &'static Stream) -> Result<(), CudaError> {
    let own = event.inner().context;
    if !own.is_some_and(|own| std::ptr::eq(own.device, stream.context().device)) {
        return Err(CudaError::INVALID_HANDLE);
    }
    stream.submit(StreamOp::RecordEvent(event, 0))
}

impl EventApi for Library {
    unsafe fn cuEventCreate(event: *mut CUevent, flags: u32) -> Result<(), CudaError> {
        let context = context::current()?;
        let known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
        let between = flags & CU_EVENT_INTERPROCESS != 0 && flags & CU_EVENT_DISABLE_TIMING == 0;
        if event.is_null() || flags & !known != 0 || between {
            return Err(CudaError::INVALID_VALUE);
        }
        let made = EVENTS.make(Event::default, |old| old.inner().retire());
        let made = made.ok_or(CudaError::OUT_OF_MEMORY)?;
        {
            let mut inner = made.inner();
            inner.context = Some(context);
            inner.flags = flags;
        }
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { event.write(handle_of(made)) };
        Ok(())
    }

    unsafe fn cuEventDestroy(event: CUevent) -> Result<(), CudaError> {
        resolve(event)?;
        EVENTS.drop(event);
        Ok(())
    }

    unsafe fn cuEventDestroy_v2(event: CUevent) -> Result<(), CudaError> {
        // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
        unsafe { Self::cuEventDestroy(event) }
    }

    unsafe fn cuEventRecord(event: CUevent, stream: CUstream) -> Result<(), CudaError> {
        // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
        unsafe { Self::cuEventRecordWithFlags(event, stream, 0) }
    }

    unsafe fn cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: u32) -> Result<(), CudaError> {
        let (stream, event) = (stream::resolve(stream)?, resolve(event)?);
        if flags & !CU_EVENT_RECORD_EXTERNAL != 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        if let Some(capture) = stream.capture() {
            return capture.record_event(event, flags);
        }
        if flags != 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        record(event, stream)
    }

    unsafe fn cuEventQuery(event: CUevent) -> Result<(), CudaError> {
        let event = resolve(event)?;
        event.check_not_captured()?;
        capture::check_unsafe_call()?;
        if let Some(device) = event.device() {
            device.engine().lane()?.check()?;
        }
        if event.is_complete(event.ticket(), None) { Ok(()) } else { Err(CudaError::NOT_READY) }
    }

    unsafe fn cuEventSynchronize(event: CUevent) -> Result<(), CudaError> {
        let event = resolve(event)?;
        event.check_not_captured()?;
        capture::check_unsafe_call()?;
        let Some(device) = event.device() else { return Ok(()) };
        let ticket = event.ticket();
        let engine = device.engine();
        device.run_tasks_until(engine, |engine| event.is_complete(ticket, Some(engine)))?;
        // On a lost GPU the recording counts as complete, but it never happened.
        device.engine().lane()?.check()?;
        pools::trim_after_sync(device);
        Ok(())
    }

    unsafe fn cuEventElapsedTime(
        milliseconds: *mut f32,
        start: CUevent,
        end: CUevent,
    ) -> Result<(), CudaError> {
        let (start, end) = (resolve(start)?, resolve(end)?);
        if milliseconds.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        let gpu = |event: &Event| event.device().map(|device| device.gpu);
        if gpu(start) != gpu(end) {
            return Err(CudaError::INVALID_HANDLE);
        }
        for event in [start, end] {
            event.check_not_captured()?;
            let inner = event.inner().clone();
            if inner.ticket == 0 || inner.flags & CU_EVENT_DISABLE_TIMING != 0 {
                return Err(CudaError::INVALID_HANDLE);
            }
            if !event.is_complete(inner.ticket, None) {
                return Err(CudaError::NOT_READY);
            }
        }
        let nanoseconds = end.timestamp()? as i64 - start.timestamp()? as i64;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { milliseconds.write((nanoseconds as f64 / 1e6) as f32) };
        Ok(())
    }
}
