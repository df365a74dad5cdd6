//! The driver in this process after `cuInit`: its node and the visible GPUs.

use super::device::Device;
use super::{CudaError, context, engine, sharing, visible_devices};
use crate::node::NodeDir;
use crate::state::SimNodeState;
use partage_driver_api::exports::DriverVersion;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// The node, and the devices in the order in which the program sees them.
pub(super) struct Session {
    pub(super) node: NodeDir,
    pub(super) devices: Vec<Device>,
}

static SESSION: OnceLock<Result<Session, CudaError>> = OnceLock::new();

/// Set in a forked child of an initialized process: a child cannot use the parent's GPUs.
static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn after_fork_in_child() {
    if SESSION.get().is_some() {
        FORKED.store(true, Ordering::Relaxed);
        // The child has only this thread.
        context::select(None);
    }
}

/// Initializes the driver; later calls return the result of the first.
pub(super) fn open() -> Result<&'static Session, CudaError> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(CudaError::NOT_INITIALIZED);
    }
    SESSION.get_or_init(start).as_ref().map_err(|&error| error)
}

fn start() -> Result<Session, CudaError> {
    // Without a node there is no kernel driver and no device file, for which libcuda reports "no device".
    let node = NodeDir::from_environment().map_err(|_| CudaError::NO_DEVICE)?;
    let state = Arc::new(SimNodeState::attach(node.path()).map_err(|_| CudaError::NO_DEVICE)?);
    if !state.is_loaded() {
        return Err(CudaError::NO_DEVICE);
    }
    let wanted = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    // `CUDA_VISIBLE_DEVICES` counts only the GPUs that the program may use.
    let usable = node.usable_gpus();
    let gpus = &node.config().gpus;
    let uuids: Vec<String> = usable.iter().map(|&gpu| gpus[gpu].uuid.clone()).collect();
    // A GPU that is lost when a process starts is not visible to it. Nor is one in MIG mode, because instances are
    // not simulated.
    let present = |gpu: &usize| !state.is_lost(*gpu) && !node.is_mig_enabled(&state, *gpu);
    let visible = visible_devices::parse_visible_devices(wanted.as_deref(), &uuids);
    let visible: Vec<usize> = visible.into_iter().map(|number| usable[number]).filter(present).collect();
    if visible.is_empty() {
        return Err(CudaError::NO_DEVICE);
    }
    let depth = usize::try_from(node.config().settings.queue).unwrap_or(usize::MAX);
    let devices = visible
        .into_iter()
        .enumerate()
        .filter_map(|(ordinal, gpu)| Device::new(ordinal, gpu, node.config(), Arc::clone(&state), depth))
        .collect();
    // SAFETY: the handler only stores to a static and to a thread-local variable.
    unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
    // SAFETY: the handler only uses statics, which are never dropped; in a forked child it does nothing.
    unsafe { libc::atexit(engine::store_words_at_exit) };
    // Files exported by processes that have died since.
    sharing::remove_orphaned_files(&node.shared_dir());
    Ok(Session { node, devices })
}

/// Returns the session if the driver is initialized.
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

/// Returns whether streams can wait for values in memory and write them.
pub(super) fn has_stream_memory_operations() -> bool {
    session().is_ok_and(|session| session.node.config().settings.stream_memory_operations)
}

/// Returns a device by its ordinal.
pub(super) fn device(ordinal: i32) -> Result<&'static Device, CudaError> {
    let session = session()?;
    usize::try_from(ordinal)
        .ok()
        .and_then(|index| session.devices.get(index))
        .ok_or(CudaError::INVALID_DEVICE)
}

/// Returns the driver version of the node, also before `cuInit`.
pub(super) fn driver_version() -> DriverVersion {
    static VERSION: OnceLock<DriverVersion> = OnceLock::new();
    *VERSION
        .get_or_init(|| NodeDir::from_environment().map_or(DriverVersion::R550, |node| node.config().driver))
}

/// Returns a number that is unique in this process, for contexts, streams, captures and graphs.
pub(super) fn unique_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
