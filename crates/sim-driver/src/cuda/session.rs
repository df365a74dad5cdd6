//! The driver in this process: the node it is on and the GPUs it shows, from `cuInit` on.

use super::device::Device;
use super::{CudaError, context, sharing, visible};
use crate::node::NodeDir;
use crate::state::State;
use partage_driver_api::exports::DriverVersion;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// The node, and the devices in the order the program sees them.
pub(super) struct Session {
    pub(super) node: NodeDir,
    pub(super) devices: Vec<Device>,
}

static SESSION: OnceLock<Result<Session, CudaError>> = OnceLock::new();

/// Set in the child of a process that had initialised the driver: its GPUs are not the child's.
static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    if SESSION.get().is_some() {
        FORKED.store(true, Ordering::Relaxed);
        // The child has this one thread.
        context::select(None);
    }
}

/// Opens the driver; later calls answer as the first did.
pub(super) fn open() -> Result<&'static Session, CudaError> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(CudaError::NOT_INITIALIZED);
    }
    SESSION.get_or_init(start).as_ref().map_err(|&error| error)
}

fn start() -> Result<Session, CudaError> {
    // Without a node there is no kernel driver and no device file, which libcuda calls "no device".
    let node = NodeDir::named().map_err(|_| CudaError::NO_DEVICE)?;
    let state = Arc::new(State::attach(node.path()).map_err(|_| CudaError::NO_DEVICE)?);
    if !state.is_loaded() {
        return Err(CudaError::NO_DEVICE);
    }
    let wanted = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    // The variable counts the GPUs that the program may use, and no others.
    let usable = node.usable();
    let gpus = &node.config().gpus;
    let uuids: Vec<String> = usable.iter().map(|&gpu| gpus[gpu].uuid.clone()).collect();
    // A card that is off the bus when a process starts is not there for it, nor is one in MIG mode, of which it could have an
    // instance only.
    let present = |gpu: &usize| !state.is_lost(*gpu) && !node.is_split(&state, *gpu);
    let shown = visible::devices(wanted.as_deref(), &uuids);
    let shown: Vec<usize> = shown.into_iter().map(|number| usable[number]).filter(present).collect();
    if shown.is_empty() {
        return Err(CudaError::NO_DEVICE);
    }
    let depth = usize::try_from(node.config().settings.queue).unwrap_or(usize::MAX);
    let devices = shown
        .into_iter()
        .enumerate()
        .filter_map(|(ordinal, gpu)| Device::new(ordinal, gpu, node.config(), Arc::clone(&state), depth))
        .collect();
    // SAFETY: the handler only stores to a static and to the calling thread's own variables.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    // What processes exported that are dead by now.
    sharing::sweep(&node.shared());
    Ok(Session { node, devices })
}

/// The driver, if it was opened.
#[inline]
pub(super) fn session() -> Result<&'static Session, CudaError> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(CudaError::NOT_INITIALIZED);
    }
    match SESSION.get() {
        Some(Ok(session)) => Ok(session),
        _ => Err(CudaError::NOT_INITIALIZED),
    }
}

/// A device by its number.
pub(super) fn device(ordinal: i32) -> Result<&'static Device, CudaError> {
    let session = session()?;
    usize::try_from(ordinal)
        .ok()
        .and_then(|index| session.devices.get(index))
        .ok_or(CudaError::INVALID_DEVICE)
}

/// The version the node's driver claims, also before `cuInit`.
pub(super) fn driver() -> DriverVersion {
    static VERSION: OnceLock<DriverVersion> = OnceLock::new();
    *VERSION.get_or_init(|| NodeDir::named().map_or(DriverVersion::R550, |node| node.config().driver))
}

/// Numbers that are never used twice in a process: of contexts, streams, captures.
pub(super) fn unique() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
