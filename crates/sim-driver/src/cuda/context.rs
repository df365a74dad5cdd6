//! Contexts: what a process opens on a GPU. All other objects belong to a context.

mod context_functions;
mod green_context;

pub(super) use context_functions::write_out;

use super::device::Device;
use super::entry::THREAD;
use super::handle::{HandleArena, handle_of};
use super::session::{session, unique_id};
use super::stream::Stream;
use super::{CUcontext, CudaError, event, memory, module, stream};
use crate::state::{GpuSetting, UNIT};
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

/// A CUDA context of this process on one device.
pub(super) struct Context {
    pub(super) device: &'static Device,
    pub(super) id: u64,
    /// The API version that its creator requested.
    api: u32,
    /// Whether it is the device's primary context, which can be reopened after it was destroyed.
    pub(super) primary: bool,
    flags: AtomicU32,
    alive: AtomicBool,
    /// The context's stream group in the device's engine.
    pub(super) group: usize,
    legacy: OnceLock<&'static Stream>,
    limits: [AtomicU64; 8],
    /// Serializes changes to limits that are charged to the card.
    limits_lock: Mutex<()>,
    cache: AtomicU32,
    banks: AtomicU32,
    /// Number of creations and attachments minus detachments.
    attached: AtomicU32,
    /// Ids of the contexts whose memory this one may access.
    pub(super) peers: Mutex<Vec<u64>>,
}

/// The state of a device's primary context.
#[derive(Default)]
pub(super) struct PrimaryContext {
    context: Option<&'static Context>,
    retained: u32,
    flags: u32,
}

static CONTEXTS: HandleArena<Context> = HandleArena::new();

thread_local! {
    /// The contexts below the current one on the thread's context stack.
    static CONTEXT_STACK: RefCell<Vec<Option<&'static Context>>> = const { RefCell::new(Vec::new()) };
}

/// Resolves a context handle.
pub(super) fn resolve(handle: CUcontext) -> Result<&'static Context, CudaError> {
    session()?;
    let context = CONTEXTS.get(handle).ok_or(CudaError::INVALID_CONTEXT)?;
    if context.is_alive() { Ok(context) } else { Err(CudaError::CONTEXT_IS_DESTROYED) }
}

/// Returns the calling thread's current context.
#[inline]
pub(super) fn current() -> Result<&'static Context, CudaError> {
    match selected() {
        // A thread can have a context only after the driver was initialized.
        Some(context) if context.is_alive() => Ok(context),
        Some(_) => Err(CudaError::CONTEXT_IS_DESTROYED),
        None => session().and(Err(CudaError::INVALID_CONTEXT)),
    }
}

/// Returns the current context and whether the null stream means the per-thread one, with one thread-local access.
#[inline]
pub(super) fn current_and_mode() -> Result<(&'static Context, bool), CudaError> {
    let (selected, per_thread) = THREAD.with(|thread| (thread.current.get(), thread.is_per_thread()));
    match selected {
        Some(context) if context.is_alive() => Ok((context, per_thread)),
        _ => current().map(|context| (context, per_thread)),
    }
}

/// Returns the calling thread's current context even if it was destroyed.
#[inline]
fn selected() -> Option<&'static Context> {
    THREAD.with(|thread| thread.current.get())
}

/// Sets the calling thread's current context.
pub(super) fn select(context: Option<&'static Context>) {
    THREAD.with(|thread| thread.current.set(context));
}

fn push(context: &'static Context) {
    CONTEXT_STACK.with_borrow_mut(|below| below.push(selected()));
    select(Some(context));
}

fn pop() -> Result<&'static Context, CudaError> {
    let context = selected().ok_or(CudaError::INVALID_CONTEXT)?;
    select(CONTEXT_STACK.with_borrow_mut(|below| below.pop().flatten()));
    Ok(context)
}

/// CUDA's default limits: stack, printf buffer, heap, device-runtime sync depth and pending launches, L2 fetch
/// granularity, persisting L2.
const DEFAULT_LIMITS: [u64; 8] = [1024, 1 << 20, 8 << 20, 2, 2048, 64, 0, 0];

impl Context {
    pub(super) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    pub(super) fn handle(&'static self) -> CUcontext {
        handle_of(self)
    }

    /// Returns the legacy default stream of the context.
    pub(super) fn legacy(&self) -> Result<&'static Stream, CudaError> {
        self.legacy.get().copied().ok_or(CudaError::INVALID_CONTEXT)
    }

    fn create(
        device: &'static Device,
        flags: u32,
        api: u32,
        primary: bool,
    ) -> Result<&'static Self, CudaError> {
        check_compute_mode(device)?;
        device.charge(device.profile.memory.context)?;
        Self::build(device, flags, api, primary).inspect_err(|_| device.refund(device.profile.memory.context))
    }

    fn build(
        device: &'static Device,
        flags: u32,
        api: u32,
        primary: bool,
    ) -> Result<&'static Self, CudaError> {
        let (group, legacy) = {
            let mut engine = device.engine();
            engine.open(device)?;
            engine.open_group()
        };
        let new = || Context {
            device,
            id: unique_id(),
            api,
            primary,
            flags: AtomicU32::new(flags),
            alive: AtomicBool::new(true),
            group,
            legacy: OnceLock::new(),
            limits: DEFAULT_LIMITS.map(AtomicU64::new),
            limits_lock: Mutex::default(),
            cache: AtomicU32::new(0),
            banks: AtomicU32::new(1),
            attached: AtomicU32::new(1),
            peers: Mutex::default(),
        };
        // Slots of contexts are not reused: a context keeps its id and handle for the life of the process.
        let context = CONTEXTS.make(new, |_| ()).ok_or(CudaError::OUT_OF_MEMORY)?;
        context.open(legacy)?;
        Ok(context)
    }

    fn open(&'static self, legacy: usize) -> Result<(), CudaError> {
        let legacy = stream::create_on_timeline(self, legacy, 0, 0)?;
        let _ = self.legacy.set(legacy);
        self.device.count_context(true);
        Ok(())
    }

    /// Reopens the destroyed primary context.
    fn revive(&'static self) -> Result<(), CudaError> {
        check_compute_mode(self.device)?;
        let bytes = self.device.profile.memory.context;
        self.device.charge(bytes)?;
        let opened = self.device.engine().open(self.device);
        opened.inspect_err(|_| self.device.refund(bytes))?;
        self.device.engine().reopen_group(self.group);
        self.device.count_context(true);
        self.alive.store(true, Ordering::Release);
        Ok(())
    }

    /// Returns the bytes that a limit charges beyond a context's base size: the printf buffer and the heap are on the
    /// card.
    fn extra_bytes(which: usize, value: u64) -> Option<u64> {
        match which {
            1 | 2 => value.saturating_sub(DEFAULT_LIMITS[which]).checked_next_multiple_of(UNIT),
            _ => Some(0),
        }
    }

    /// Sets a limit and adjusts what it charges to the card.
    fn set_limit(&self, which: usize, value: u64) -> Result<(), CudaError> {
        let _guard = self.limits_lock.lock().map_err(|_| CudaError::UNKNOWN)?;
        if !self.is_alive() {
            return Err(CudaError::CONTEXT_IS_DESTROYED);
        }
        let limit = self.limits.get(which).ok_or(CudaError::UNSUPPORTED_LIMIT)?;
        let before = Self::extra_bytes(which, limit.load(Ordering::Relaxed)).unwrap_or(0);
        let after = Self::extra_bytes(which, value).ok_or(CudaError::OUT_OF_MEMORY)?;
        if after > before {
            self.device.charge(after - before)?;
        } else if after < before {
            self.device.refund(before - after);
        }
        limit.store(value, Ordering::Relaxed);
        Ok(())
    }

    /// Resets the limits to their defaults.
    fn reset_limits(&self) {
        let _guard = self.limits_lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        for (which, (limit, initial)) in self.limits.iter().zip(DEFAULT_LIMITS).enumerate() {
            let extra_bytes = Self::extra_bytes(which, limit.swap(initial, Ordering::Relaxed)).unwrap_or(0);
            if extra_bytes > 0 {
                self.device.refund(extra_bytes);
            }
        }
    }

    /// Destroys the context and everything in it.
    fn destroy(&'static self) {
        // Like the real driver, finishes work in flight first; a lost GPU has none.
        self.device.engine().stop_waiting_for_peers(self.group);
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
        self.device.refund(self.device.profile.memory.context);
        self.device.count_context(false);
    }

    /// Waits for everything submitted to any stream of the context.
    pub(super) fn sync(&'static self) -> Result<(), CudaError> {
        let timelines = self.device.engine().timelines_of(self.group);
        timelines.into_iter().try_for_each(|timeline| self.device.sync(timeline))
    }
}

/// Returns the contexts that are alive.
pub(super) fn live() -> impl Iterator<Item = &'static Context> {
    CONTEXTS.live().filter(|context| context.is_alive())
}

/// Checks that the GPU's compute mode permits a context of this process.
fn check_compute_mode(device: &'static Device) -> Result<(), CudaError> {
    const EXCLUSIVE_PROCESS: u64 = 3;
    const PROHIBITED: u64 = 2;
    match device.state.setting(device.gpu, GpuSetting::ComputeMode) {
        Some(PROHIBITED) => Err(CudaError::DEVICE_UNAVAILABLE),
        Some(EXCLUSIVE_PROCESS) => {
            let others = device.state.processes(device.gpu);
            let taken = others.iter().any(|process| process.slot != device.state.slot());
            if taken { Err(CudaError::DEVICE_UNAVAILABLE) } else { Ok(()) }
        }
        _ => Ok(()),
    }
}

/// Retains the device's primary context, opening it if necessary.
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
