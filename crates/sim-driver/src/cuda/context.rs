//! Contexts: a process's hold on a GPU. Everything else belongs to one.

mod calls;
mod green;

pub(super) use calls::answer;

use super::device::Device;
use super::entry::THREAD;
use super::handle::{Arena, handle_of};
use super::session::{session, unique};
use super::stream::Stream;
use super::{CUcontext, CudaError, event, memory, module, stream};
use crate::state::{Setting, UNIT};
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

/// A context.
pub(super) struct Context {
    pub(super) device: &'static Device,
    pub(super) id: u64,
    /// The version its maker asked for.
    api: u32,
    /// Whether it is its device's primary one, which may live again.
    pub(super) primary: bool,
    flags: AtomicU32,
    alive: AtomicBool,
    /// Its streams' group in the device's engine.
    pub(super) group: usize,
    legacy: OnceLock<&'static Stream>,
    limits: [AtomicU64; 8],
    /// One at a time changes what the limits take of the card.
    growing: Mutex<()>,
    cache: AtomicU32,
    banks: AtomicU32,
    /// How often it was made or attached, less how often it was let go.
    attached: AtomicU32,
    /// Contexts whose memory it may use, by their number.
    pub(super) peers: Mutex<Vec<u64>>,
}

/// The context that programs share on a device.
#[derive(Default)]
pub(super) struct Primary {
    context: Option<&'static Context>,
    retained: u32,
    flags: u32,
}

static CONTEXTS: Arena<Context> = Arena::new();

thread_local! {
    /// What lies under the current one.
    static BELOW: RefCell<Vec<Option<&'static Context>>> = const { RefCell::new(Vec::new()) };
}

/// The context a handle means.
pub(super) fn resolve(handle: CUcontext) -> Result<&'static Context, CudaError> {
    session()?;
    let context = CONTEXTS.get(handle).ok_or(CudaError::INVALID_CONTEXT)?;
    if context.is_alive() { Ok(context) } else { Err(CudaError::CONTEXT_IS_DESTROYED) }
}

/// The calling thread's context.
#[inline]
pub(super) fn current() -> Result<&'static Context, CudaError> {
    match selected() {
        // Whoever has a context has initialised the driver.
        Some(context) if context.is_alive() => Ok(context),
        Some(_) => Err(CudaError::CONTEXT_IS_DESTROYED),
        None => session().and(Err(CudaError::INVALID_CONTEXT)),
    }
}

/// The same, and whether "no stream" means the thread's own, found at once.
#[inline]
pub(super) fn current_and_mode() -> Result<(&'static Context, bool), CudaError> {
    let (selected, per_thread) = THREAD.with(|thread| (thread.current.get(), thread.is_per_thread()));
    match selected {
        Some(context) if context.is_alive() => Ok((context, per_thread)),
        _ => current().map(|context| (context, per_thread)),
    }
}

/// The calling thread's context, be it destroyed.
#[inline]
fn selected() -> Option<&'static Context> {
    THREAD.with(|thread| thread.current.get())
}

/// Makes it the calling thread's.
pub(super) fn select(context: Option<&'static Context>) {
    THREAD.with(|thread| thread.current.set(context));
}

fn push(context: &'static Context) {
    BELOW.with_borrow_mut(|below| below.push(selected()));
    select(Some(context));
}

fn pop() -> Result<&'static Context, CudaError> {
    let context = selected().ok_or(CudaError::INVALID_CONTEXT)?;
    select(BELOW.with_borrow_mut(|below| below.pop().flatten()));
    Ok(context)
}

/// CUDA's default limits: stack, printf buffer, heap, device-runtime depth and launches, L2 fetch, persisting L2.
const LIMITS: [u64; 8] = [1024, 1 << 20, 8 << 20, 2, 2048, 64, 0, 0];

impl Context {
    pub(super) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    pub(super) fn handle(&'static self) -> CUcontext {
        handle_of(self)
    }

    /// The legacy default stream.
    pub(super) fn legacy(&self) -> Result<&'static Stream, CudaError> {
        self.legacy.get().copied().ok_or(CudaError::INVALID_CONTEXT)
    }

    fn create(
        device: &'static Device,
        flags: u32,
        api: u32,
        primary: bool,
    ) -> Result<&'static Self, CudaError> {
        admit(device)?;
        device.take(device.profile.memory.context)?;
        Self::build(device, flags, api, primary).inspect_err(|_| device.give(device.profile.memory.context))
    }

    fn build(
        device: &'static Device,
        flags: u32,
        api: u32,
        primary: bool,
    ) -> Result<&'static Self, CudaError> {
        let (group, legacy) = {
            let mut engine = device.engine();
            engine.open(&device.state, device.gpu)?;
            engine.open_group()
        };
        let new = || Context {
            device,
            id: unique(),
            api,
            primary,
            flags: AtomicU32::new(flags),
            alive: AtomicBool::new(true),
            group,
            legacy: OnceLock::new(),
            limits: LIMITS.map(AtomicU64::new),
            growing: Mutex::default(),
            cache: AtomicU32::new(0),
            banks: AtomicU32::new(1),
            attached: AtomicU32::new(1),
            peers: Mutex::default(),
        };
        // Never used again: a context's number and handle are its own for good.
        let context = CONTEXTS.make(new, |_| ()).ok_or(CudaError::OUT_OF_MEMORY)?;
        context.open(legacy)?;
        Ok(context)
    }

    fn open(&'static self, legacy: usize) -> Result<(), CudaError> {
        let legacy = stream::make(self, legacy, 0, 0)?;
        let _ = self.legacy.set(legacy);
        self.device.count_context(true);
        Ok(())
    }

    /// The primary context lives again.
    fn revive(&'static self) -> Result<(), CudaError> {
        admit(self.device)?;
        let bytes = self.device.profile.memory.context;
        self.device.take(bytes)?;
        let opened = self.device.engine().open(&self.device.state, self.device.gpu);
        opened.inspect_err(|_| self.device.give(bytes))?;
        self.device.count_context(true);
        self.alive.store(true, Ordering::Release);
        Ok(())
    }

    /// Bytes of the card that a limit takes beyond what every context has: the printf buffer and the heap lie there.
    fn grown(which: usize, value: u64) -> Option<u64> {
        match which {
            1 | 2 => value.saturating_sub(LIMITS[which]).checked_next_multiple_of(UNIT),
            _ => Some(0),
        }
    }

    /// Sets one of its limits, and takes or gives back what that is of the card.
    fn set_limit(&self, which: usize, value: u64) -> Result<(), CudaError> {
        let _growing = self.growing.lock().map_err(|_| CudaError::UNKNOWN)?;
        if !self.is_alive() {
            return Err(CudaError::CONTEXT_IS_DESTROYED);
        }
        let limit = self.limits.get(which).ok_or(CudaError::UNSUPPORTED_LIMIT)?;
        let before = Self::grown(which, limit.load(Ordering::Relaxed)).unwrap_or(0);
        let after = Self::grown(which, value).ok_or(CudaError::OUT_OF_MEMORY)?;
        if after > before {
            self.device.take(after - before)?;
        } else if after < before {
            self.device.give(before - after);
        }
        limit.store(value, Ordering::Relaxed);
        Ok(())
    }

    /// It has the limits that every context begins with.
    fn reset_limits(&self) {
        let _growing = self.growing.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        for (which, (limit, initial)) in self.limits.iter().zip(LIMITS).enumerate() {
            let grown = Self::grown(which, limit.swap(initial, Ordering::Relaxed)).unwrap_or(0);
            if grown > 0 {
                self.device.give(grown);
            }
        }
    }

    /// Ends the context and everything in it.
    fn destroy(&'static self) {
        // Work in flight is finished, as the driver does; a lost GPU has none.
        let _ = self.sync();
        if !self.alive.swap(false, Ordering::AcqRel) {
            return;
        }
        module::drop_all(self);
        event::drop_all(self);
        stream::drop_all(self);
        memory::drop_all(self);
        self.reset_limits();
        if !self.primary {
            self.device.engine().close_group(self.group);
        }
        self.device.give(self.device.profile.memory.context);
        self.device.count_context(false);
    }

    /// Waits for everything submitted to any of its streams.
    pub(super) fn sync(&'static self) -> Result<(), CudaError> {
        let tracks = self.device.engine().tracks_of(self.group);
        tracks.into_iter().try_for_each(|track| self.device.sync(track))
    }
}

/// The contexts that live.
pub(super) fn live() -> impl Iterator<Item = &'static Context> {
    CONTEXTS.live().filter(|context| context.is_alive())
}

/// Whether the card takes a context of this process.
fn admit(device: &'static Device) -> Result<(), CudaError> {
    const EXCLUSIVE_PROCESS: u64 = 3;
    const PROHIBITED: u64 = 2;
    match device.state.setting(device.gpu, Setting::ComputeMode) {
        Some(PROHIBITED) => Err(CudaError::DEVICE_UNAVAILABLE),
        Some(EXCLUSIVE_PROCESS) => {
            let others = device.state.processes(device.gpu);
            let taken = others.iter().any(|process| process.slot != device.state.slot());
            if taken { Err(CudaError::DEVICE_UNAVAILABLE) } else { Ok(()) }
        }
        _ => Ok(()),
    }
}

/// One more hold on a device's primary context.
pub(super) fn retain_primary(device: &'static Device) -> Result<&'static Context, CudaError> {
    let mut primary = device.primary.lock().map_err(|_| CudaError::UNKNOWN)?;
    let context = match primary.context {
        Some(context) if context.is_alive() => context,
        Some(context) => {
            context.revive()?;
            context
        }
        None => Context::create(device, primary.flags, 3020, true)?,
    };
    primary.context = Some(context);
    primary.retained += 1;
    Ok(context)
}
