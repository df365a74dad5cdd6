//! The library's life: the node it is on from the first `nvmlInit` to the last `nvmlShutdown`.
//!
//! Without a node there is no kernel driver, and the library says so. A process that was forked from one that
//! uses the library starts without it, as after loading.

use super::call::Answer;
use super::events::Sets;
use super::internal;
use super::{Library, Lifecycle, NvmlError, c_void};
use crate::node::{NodeConfig, NodeDir, NodeGpu};
use crate::profile::Profile;
use crate::state::{self, State, StateError};
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::time::SystemTime;

/// A GPU of the node, and the card it is.
pub(super) struct Card {
    pub(super) gpu: NodeGpu,
    pub(super) profile: Profile,
}

impl Card {
    fn all(config: &NodeConfig) -> Vec<Self> {
        let profiles = (0..config.gpus.len()).map_while(|gpu| config.profile(gpu).cloned());
        config.gpus.iter().cloned().zip(profiles).map(|(gpu, profile)| Self { gpu, profile }).collect()
    }
}

/// The node as this process has it. It stays for good once it was opened: other threads may be inside a
/// function.
pub(super) struct Session {
    pub(super) node: NodeDir,
    pub(super) state: State,
    /// All of them; their places are the node's.
    pub(super) cards: Vec<Card>,
    /// The places of those that this process may use. Its program counts these, and hears of no others.
    pub(super) shown: Vec<usize>,
    pub(super) sets: Mutex<Sets>,
    /// `nvmlInit`s without their `nvmlShutdown`.
    users: AtomicU32,
    pid: u32,
    /// What the wall clock is ahead of the monotonic one, in nanoseconds. Taken once, so that an instant is
    /// always told as the same number.
    ahead: u64,
}

impl Session {
    fn open() -> Result<Self, NvmlError> {
        let node = folder()?;
        let state = State::attach(node.path()).map_err(|failure| match failure {
            StateError::Full(_) => NvmlError::INSUFFICIENT_RESOURCES,
            StateError::Foreign(_) => NvmlError::LIB_RM_VERSION_MISMATCH,
            _ => NvmlError::DRIVER_NOT_LOADED,
        })?;
        let cards = Card::all(node.config());
        if cards.len() > state.gpus() {
            return Err(NvmlError::LIB_RM_VERSION_MISMATCH);
        }
        let shown = node.usable();
        let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let ahead = u64::try_from(wall.as_nanos()).unwrap_or(u64::MAX).saturating_sub(state::now());
        Ok(Self {
            node,
            state,
            cards,
            shown,
            sets: Mutex::default(),
            users: AtomicU32::new(0),
            pid: std::process::id(),
            ahead,
        })
    }

    /// The first of the cards that the program may use for which this holds.
    pub(super) fn find(&self, is: impl Fn(&Card) -> bool) -> Result<usize, NvmlError> {
        self.shown.iter().copied().find(|&gpu| is(&self.cards[gpu])).ok_or(NvmlError::NOT_FOUND)
    }

    fn is_used(&self) -> bool {
        self.users.load(Ordering::Acquire) > 0
    }

    pub(super) fn config(&self) -> &NodeConfig {
        self.node.config()
    }

    /// An instant of the node's clock in microseconds of the wall clock.
    pub(super) fn wall_micros(&self, instant: u64) -> u64 {
        (instant + self.ahead) / 1000
    }

    /// The instant of the node's clock after which all is later than `micros` of the wall clock.
    pub(super) fn instant(&self, micros: u64) -> u64 {
        // The end of that microsecond: what was told in it has been seen.
        micros.saturating_mul(1000).saturating_add(999).saturating_sub(self.ahead)
    }
}

/// Where the session of a process is: null before the first `nvmlInit`, never freed after it.
type Place = AtomicPtr<Session>;

/// The session of this process. What a child finds after a fork is the parent's, and not the child's to use.
fn own() -> Option<&'static Session> {
    // SAFETY: null, or a session that was leaked.
    let session = unsafe { place().load(Ordering::Acquire).as_ref() }?;
    (session.pid == std::process::id()).then_some(session)
}

#[cfg(not(test))]
fn place() -> &'static Place {
    static PLACE: Place = Place::new(std::ptr::null_mut());
    &PLACE
}

#[cfg(not(test))]
fn folder() -> Result<NodeDir, NvmlError> {
    NodeDir::named().map_err(|_| NvmlError::DRIVER_NOT_LOADED)
}

/// In tests every thread is a process of its own.
#[cfg(test)]
use tests::{folder, place};

/// The session, if the program is between `nvmlInit` and `nvmlShutdown`.
pub(super) fn session() -> Result<&'static Session, NvmlError> {
    let session = own().filter(|session| session.is_used()).ok_or(NvmlError::UNINITIALIZED)?;
    if session.state.is_loaded() { Ok(session) } else { Err(NvmlError::DRIVER_NOT_LOADED) }
}

/// Whether the program is between `nvmlInit` and `nvmlShutdown`.
pub(super) fn is_open() -> bool {
    own().is_some_and(Session::is_used)
}

fn init() -> Answer {
    let before = place().load(Ordering::Acquire);
    if own().is_none() {
        // Without a lock, which a fork could leave taken for good. Of two threads at once one makes a session too
        // many, which stays: closing its files would give up the locks by which others see this process's pid.
        let new = Box::into_raw(Box::new(Session::open()?));
        let _ = place().compare_exchange(before, new, Ordering::AcqRel, Ordering::Acquire);
    }
    let session = own().ok_or(NvmlError::UNKNOWN)?;
    if !session.state.is_loaded() {
        return Err(NvmlError::DRIVER_NOT_LOADED);
    }
    session.users.fetch_add(1, Ordering::AcqRel);
    Ok(())
}

impl Lifecycle for Library {
    unsafe fn nvmlInit() -> Answer {
        init()
    }

    unsafe fn nvmlInit_v2() -> Answer {
        init()
    }

    unsafe fn nvmlInitWithFlags(_flags: u32) -> Answer {
        init()
    }

    unsafe fn nvmlShutdown() -> Answer {
        let less = |users: u32| users.checked_sub(1);
        let users = &own().ok_or(NvmlError::UNINITIALIZED)?.users;
        let were = users.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        were.map(|_| ()).map_err(|_| NvmlError::UNINITIALIZED)
    }

    unsafe fn nvmlInternalGetExportTable(table: *mut *const c_void, id: *const u8) -> Answer {
        // SAFETY: the caller's promise.
        unsafe { internal::table(table, id) }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::{NodeDir, NvmlError, Place};
    use std::cell::{Cell, OnceCell, RefCell};
    use std::path::PathBuf;

    thread_local! {
        /// Whether this thread's process is root's.
        pub(in crate::nvml) static ROOT: Cell<bool> = const { Cell::new(true) };
        /// The node of this thread's process.
        pub(in crate::nvml) static FOLDER: RefCell<Option<PathBuf>> = const { RefCell::new(None) };
        static PLACE: OnceCell<&'static Place> = const { OnceCell::new() };
    }

    pub(super) fn place() -> &'static Place {
        PLACE.with(|place| *place.get_or_init(|| Box::leak(Box::default())))
    }

    pub(super) fn folder() -> Result<NodeDir, NvmlError> {
        let folder = FOLDER.with_borrow(Clone::clone).ok_or(NvmlError::DRIVER_NOT_LOADED)?;
        NodeDir::open(&folder).map_err(|_| NvmlError::DRIVER_NOT_LOADED)
    }
}
