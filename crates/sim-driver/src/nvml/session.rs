//! The lifetime of the library: its node, from the first `nvmlInit` to the last `nvmlShutdown`.
//!
//! Without a node the library reports that the kernel driver is not loaded. A forked child of a process that uses the
//! library starts uninitialized.

use super::arguments::NvmlResult;
use super::events::EventSets;
use super::export_table;
use super::{Library, NvmlError, NvmlLifecycle, c_void};
use crate::node::{NodeConfig, NodeDir, NodeGpu};
use crate::profile::GpuProfile;
use crate::state::{self, SimNodeState, StateError};
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::time::SystemTime;

/// A GPU of the node and the profile of its model.
pub(super) struct GpuCard {
    pub(super) gpu: NodeGpu,
    pub(super) profile: GpuProfile,
}

impl GpuCard {
    fn load_all(config: &NodeConfig) -> Vec<Self> {
        let profiles = (0..config.gpus.len()).map_while(|gpu| config.profile(gpu).cloned());
        config.gpus.iter().cloned().zip(profiles).map(|(gpu, profile)| Self { gpu, profile }).collect()
    }
}

/// The node as opened by this process. Never freed once opened, because other threads may be inside a function.
pub(super) struct Session {
    pub(super) node: NodeDir,
    pub(super) state: SimNodeState,
    /// All cards, by their index on the node.
    pub(super) cards: Vec<GpuCard>,
    /// Indices of the cards that this process may use. The program sees only these, renumbered.
    pub(super) visible: Vec<usize>,
    pub(super) sets: Mutex<EventSets>,
    /// Number of `nvmlInit` calls without `nvmlShutdown`.
    users: AtomicU32,
    pid: u32,
    /// Wall-clock time minus monotonic time, in nanoseconds. Read once, so that an instant always has the same
    /// wall-clock time.
    wall_offset: u64,
}

impl Session {
    fn open() -> Result<Self, NvmlError> {
        let node = node_dir()?;
        let state = SimNodeState::attach(node.path()).map_err(|failure| match failure {
            StateError::Full(_) => NvmlError::INSUFFICIENT_RESOURCES,
            StateError::Foreign(_) => NvmlError::LIB_RM_VERSION_MISMATCH,
            _ => NvmlError::DRIVER_NOT_LOADED,
        })?;
        let cards = GpuCard::load_all(node.config());
        if cards.len() > state.gpus() {
            return Err(NvmlError::LIB_RM_VERSION_MISMATCH);
        }
        let visible = node.usable_gpus();
        let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let wall_offset = u64::try_from(wall.as_nanos()).unwrap_or(u64::MAX).saturating_sub(state::now());
        Ok(Self {
            node,
            state,
            cards,
            visible,
            sets: Mutex::default(),
            users: AtomicU32::new(0),
            pid: std::process::id(),
            wall_offset,
        })
    }

    /// Returns the index of the first visible card for which `matches` returns true.
    pub(super) fn find(&self, matches: impl Fn(&GpuCard) -> bool) -> Result<usize, NvmlError> {
        self.visible.iter().copied().find(|&gpu| matches(&self.cards[gpu])).ok_or(NvmlError::NOT_FOUND)
    }

    fn is_used(&self) -> bool {
        self.users.load(Ordering::Acquire) > 0
    }

    pub(super) fn config(&self) -> &NodeConfig {
        self.node.config()
    }

    /// Converts an instant of the node's clock to microseconds of wall-clock time.
    pub(super) fn wall_micros(&self, instant: u64) -> u64 {
        (instant + self.wall_offset) / 1000
    }

    /// Converts wall-clock microseconds to the node's clock.
    pub(super) fn instant(&self, micros: u64) -> u64 {
        // The end of that microsecond, because everything reported with this time was already seen.
        micros.saturating_mul(1000).saturating_add(999).saturating_sub(self.wall_offset)
    }
}

/// Pointer to the session: null before the first `nvmlInit`, and never freed after it.
type SessionPointer = AtomicPtr<Session>;

/// Returns the session of this process. After a fork, the child ignores the parent's session.
fn process_session() -> Option<&'static Session> {
    // SAFETY: null, or a leaked session that is never freed.
    let session = unsafe { session_pointer().load(Ordering::Acquire).as_ref() }?;
    (session.pid == std::process::id()).then_some(session)
}

#[cfg(not(test))]
fn session_pointer() -> &'static SessionPointer {
    static SESSION: SessionPointer = SessionPointer::new(std::ptr::null_mut());
    &SESSION
}

#[cfg(not(test))]
fn node_dir() -> Result<NodeDir, NvmlError> {
    NodeDir::from_environment().map_err(|_| NvmlError::DRIVER_NOT_LOADED)
}

/// In tests, every thread acts as a separate process.
#[cfg(test)]
use tests::{node_dir, session_pointer};

/// Returns the session if the library is initialized and the driver is loaded.
pub(super) fn session() -> Result<&'static Session, NvmlError> {
    let session = process_session().filter(|session| session.is_used()).ok_or(NvmlError::UNINITIALIZED)?;
    if session.state.is_loaded() { Ok(session) } else { Err(NvmlError::DRIVER_NOT_LOADED) }
}

/// Returns whether the library is initialized.
pub(super) fn is_open() -> bool {
    process_session().is_some_and(Session::is_used)
}

fn init() -> NvmlResult {
    let before = session_pointer().load(Ordering::Acquire);
    if process_session().is_none() {
        // Lock-free, because a fork could leave a lock held in the child. If two threads race, one session is leaked:
        // closing its files would release the locks by which other processes know this process's pid.
        let new = Box::into_raw(Box::new(Session::open()?));
        let _ = session_pointer().compare_exchange(before, new, Ordering::AcqRel, Ordering::Acquire);
    }
    let session = process_session().ok_or(NvmlError::UNKNOWN)?;
    if !session.state.is_loaded() {
        return Err(NvmlError::DRIVER_NOT_LOADED);
    }
    session.users.fetch_add(1, Ordering::AcqRel);
    Ok(())
}

impl NvmlLifecycle for Library {
    unsafe fn nvmlInit() -> NvmlResult {
        init()
    }

    unsafe fn nvmlInit_v2() -> NvmlResult {
        init()
    }

    unsafe fn nvmlInitWithFlags(_flags: u32) -> NvmlResult {
        init()
    }

    unsafe fn nvmlShutdown() -> NvmlResult {
        let decrement = |users: u32| users.checked_sub(1);
        let users = &process_session().ok_or(NvmlError::UNINITIALIZED)?.users;
        let previous = users.fetch_update(Ordering::AcqRel, Ordering::Acquire, decrement);
        previous.map(|_| ()).map_err(|_| NvmlError::UNINITIALIZED)
    }

    unsafe fn nvmlInternalGetExportTable(table: *mut *const c_void, id: *const u8) -> NvmlResult {
        // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
        unsafe { export_table::write_table(table, id) }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::{NodeDir, NvmlError, SessionPointer};
    use std::cell::{Cell, OnceCell, RefCell};
    use std::path::PathBuf;

    thread_local! {
        /// Whether this thread's process runs as root.
        pub(in crate::nvml) static IS_ROOT: Cell<bool> = const { Cell::new(true) };
        /// The node directory of this thread's process.
        pub(in crate::nvml) static NODE_PATH: RefCell<Option<PathBuf>> = const { RefCell::new(None) };
        static SESSION: OnceCell<&'static SessionPointer> = const { OnceCell::new() };
    }

    pub(super) fn session_pointer() -> &'static SessionPointer {
        SESSION.with(|session_pointer| *session_pointer.get_or_init(|| Box::leak(Box::default())))
    }

    pub(super) fn node_dir() -> Result<NodeDir, NvmlError> {
        let node_dir = NODE_PATH.with_borrow(Clone::clone).ok_or(NvmlError::DRIVER_NOT_LOADED)?;
        NodeDir::open(&node_dir).map_err(|_| NvmlError::DRIVER_NOT_LOADED)
    }
}
