//! Events: marks in a stream that stamp the GPU's wall clock when it comes to them.

use super::capture::{self, Captured};
use super::context::{self, Context};
use super::device::Device;
use super::engine::{Engine, Op, Stamp};
use super::handle::{Arena, handle_of};
use super::session::session;
use super::stream::Stream;
use super::*;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::{Mutex, MutexGuard};

/// An event.
#[derive(Default)]
pub(super) struct Event {
    inner: Mutex<Inner>,
}

#[derive(Clone, Default)]
struct Inner {
    context: Option<&'static Context>,
    flags: u32,
    /// The recording that counts, by a number that is never used twice; zero before the first.
    ticket: u64,
    placed: Option<Placed>,
    /// Recordings before that one that a stream may still wait for.
    earlier: Vec<Recording>,
    /// Set while its last recording is a part of a graph.
    captured: Option<Captured>,
}

/// One recording of an event.
#[derive(Clone)]
struct Recording {
    ticket: u64,
    context: Option<&'static Context>,
    placed: Option<Placed>,
}

#[derive(Clone)]
struct Placed {
    position: u64,
    stamp: Stamp,
    track: usize,
    number: u64,
}

static EVENTS: Arena<Event> = Arena::new();

/// The GPU's clock ticks this often, in nanoseconds.
const TICK: u64 = 32;

/// The event a handle means.
pub(super) fn resolve(handle: CUevent) -> Result<&'static Event, CudaError> {
    session()?;
    EVENTS.get(handle).ok_or(CudaError::INVALID_HANDLE)
}

/// Events go with their context.
pub(super) fn drop_all(context: &'static Context) {
    for event in EVENTS.live() {
        if event.inner().context.is_some_and(|own| std::ptr::eq(own, context)) {
            EVENTS.drop(handle_of::<_, u8>(event));
        }
    }
}

impl Inner {
    /// The recording that counts does so no more; whoever waits for it still does.
    fn retire(&mut self) {
        // One that the GPU has come to may still wait for the host's work before it; that is over some recordings later.
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

    /// The recording of that number; nothing if it is over and forgotten.
    fn recording(&self, ticket: u64) -> Option<Recording> {
        if ticket != 0 && self.ticket == ticket {
            return Some(Recording { ticket, context: self.context, placed: self.placed.clone() });
        }
        self.earlier.iter().find(|earlier| earlier.ticket == ticket).cloned()
    }
}

impl Event {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn device(&self) -> Option<&'static Device> {
        self.inner().context.map(|context| context.device)
    }

    /// A new recording; what waits for the event from now on waits for this one.
    pub(super) fn enter(&self) -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut inner = self.inner();
        inner.retire();
        inner.ticket = NEXT.fetch_add(1, Relaxed);
        inner.ticket
    }

    /// The driver's own event: made for that context, and recorded once more.
    pub(super) fn renew(&self, context: &'static Context) -> u64 {
        {
            let mut inner = self.inner();
            inner.retire();
            inner.context = Some(context);
        }
        self.enter()
    }

    /// The context it was made in.
    pub(super) fn context(&self) -> Option<&'static Context> {
        self.inner().context
    }

    /// What its last recording stands for, if that was captured.
    pub(super) fn captured(&self) -> Option<Captured> {
        self.inner().captured.clone()
    }

    pub(super) fn set_captured(&self, captured: Captured) {
        self.inner().captured = Some(captured);
    }

    /// Waits until that recording is over, or nothing will come of it.
    pub(super) fn wait(&self, ticket: u64) {
        if let Some(device) = self.device() {
            let _ = device.help_until(device.engine(), |engine| self.is_over(ticket, Some(engine)));
        }
    }

    /// The recording that counts now.
    pub(super) fn ticket(&self) -> u64 {
        self.inner().ticket
    }

    /// The recording has its place.
    pub(super) fn placed(&self, ticket: u64, position: u64, stamp: Stamp, track: usize, number: u64) {
        let placed = Some(Placed { position, stamp, track, number });
        let mut inner = self.inner();
        if inner.ticket == ticket {
            inner.placed = placed;
        } else if let Some(earlier) = inner.earlier.iter_mut().find(|earlier| earlier.ticket == ticket) {
            earlier.placed = placed;
        }
    }

    /// Where that recording lies in the service time of the engine's own GPU, if that is all there is to wait for.
    pub(super) fn position(&self, ticket: u64, engine: &Engine) -> Option<u64> {
        // Never recorded, or over: nothing to wait for.
        let Some(recording) = self.inner().recording(ticket) else { return Some(0) };
        let placed = recording.placed?;
        let here = recording.context.is_some_and(|context| context.device.is_engine(engine));
        (here && engine.is_settled(placed.track, placed.number)).then_some(placed.position)
    }

    /// Whether that recording is over. `engine`: the one that is locked by the caller.
    pub(super) fn is_over(&self, ticket: u64, engine: Option<&mut Engine>) -> bool {
        let Some(recording) = self.inner().recording(ticket) else { return true };
        let (Some(placed), Some(context)) = (recording.placed, recording.context) else { return false };
        let look = |engine: &mut Engine| {
            let reached = placed.stamp.load(Acquire) != 0
                || engine.lane().is_ok_and(|lane| match lane.refresh() {
                    Ok(served) => served >= placed.position,
                    Err(_) => true,
                });
            reached && engine.is_settled(placed.track, placed.number)
        };
        match engine {
            Some(engine) if context.device.is_engine(engine) => look(engine),
            // Two GPUs must not wait for each other's locks: a busy one is looked at again soon.
            Some(_) => context.device.try_engine().is_some_and(|mut engine| look(&mut engine)),
            None => look(&mut context.device.engine()),
        }
    }

    fn stamp(&self) -> Result<u64, CudaError> {
        let inner = self.inner();
        let placed = inner.placed.as_ref().ok_or(CudaError::INVALID_HANDLE)?;
        match placed.stamp.load(Acquire) {
            0 => Err(CudaError::NOT_READY),
            stamp => Ok(stamp / TICK * TICK),
        }
    }
}

/// Records an event in a stream.
pub(super) fn record(event: &'static Event, stream: &'static Stream) -> Result<(), CudaError> {
    let own = event.inner().context;
    if !own.is_some_and(|own| std::ptr::eq(own.device, stream.context().device)) {
        return Err(CudaError::INVALID_HANDLE);
    }
    stream.submit(Op::Record(event, 0))
}

impl Events for Library {
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
        // SAFETY: not null, and the caller's to write.
        unsafe { event.write(handle_of(made)) };
        Ok(())
    }

    unsafe fn cuEventDestroy(event: CUevent) -> Result<(), CudaError> {
        resolve(event)?;
        EVENTS.drop(event);
        Ok(())
    }

    unsafe fn cuEventDestroy_v2(event: CUevent) -> Result<(), CudaError> {
        // SAFETY: the caller's promise is the same.
        unsafe { Self::cuEventDestroy(event) }
    }

    unsafe fn cuEventRecord(event: CUevent, stream: CUstream) -> Result<(), CudaError> {
        // SAFETY: the caller's promise is the same.
        unsafe { Self::cuEventRecordWithFlags(event, stream, 0) }
    }

    unsafe fn cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: u32) -> Result<(), CudaError> {
        let (stream, event) = (stream::resolve(stream)?, resolve(event)?);
        if flags & !CU_EVENT_RECORD_EXTERNAL != 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        if let Some(capture) = stream.capture() {
            return capture.record(event, flags);
        }
        if flags != 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        record(event, stream)
    }

    unsafe fn cuEventQuery(event: CUevent) -> Result<(), CudaError> {
        let event = resolve(event)?;
        event.outside_capture()?;
        capture::safe()?;
        if let Some(device) = event.device() {
            device.engine().lane()?.check()?;
        }
        if event.is_over(event.ticket(), None) { Ok(()) } else { Err(CudaError::NOT_READY) }
    }

    unsafe fn cuEventSynchronize(event: CUevent) -> Result<(), CudaError> {
        let event = resolve(event)?;
        event.outside_capture()?;
        capture::safe()?;
        let Some(device) = event.device() else { return Ok(()) };
        let ticket = event.ticket();
        let engine = device.engine();
        device.help_until(engine, |engine| event.is_over(ticket, Some(engine)))?;
        // On a GPU that is gone it is over, too, but it never happened.
        device.engine().lane()?.check()?;
        pools::at_sync(device);
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
            event.outside_capture()?;
            let inner = event.inner().clone();
            if inner.ticket == 0 || inner.flags & CU_EVENT_DISABLE_TIMING != 0 {
                return Err(CudaError::INVALID_HANDLE);
            }
            if !event.is_over(inner.ticket, None) {
                return Err(CudaError::NOT_READY);
            }
        }
        let nanoseconds = end.stamp()? as i64 - start.stamp()? as i64;
        // SAFETY: not null, and the caller's to write.
        unsafe { milliseconds.write((nanoseconds as f64 / 1e6) as f32) };
        Ok(())
    }
}
