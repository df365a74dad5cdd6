//! A GPU as one process has it.

use super::CudaError;
mod attributes;
mod calls;

use super::context::Primary;
use super::engine::{Engine, Loose};
use super::spin::{Held, Spin};
use crate::node::{NodeConfig, NodeGpu};
use crate::profile::Profile;
use crate::state::{GpuLost, State, units};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// One GPU of the node in this process.
pub(super) struct Device {
    /// Its number for the program.
    pub(super) ordinal: i32,
    /// Its index on the node.
    pub(super) gpu: usize,
    /// Which one it is.
    pub(super) config: NodeGpu,
    /// What it is.
    pub(super) profile: Profile,
    pub(super) state: Arc<State>,
    /// Its work. Taken for every launch, and never while anything is waited for.
    engine: Mutex<Engine>,
    /// Whether anything of it waits for the host.
    pub(super) loose: Arc<Loose>,
    /// The card's generation when the driver was started.
    generation: u32,
    /// Where it is counted.
    generation_now: &'static AtomicU32,
    /// As many blocks fill the card, whatever their size.
    pub(super) most_blocks: u64,
    /// Told whenever work of the host in a stream's order is done.
    pub(super) changed: Condvar,
    /// The node's books take one thread of a process at a time.
    books: Spin<()>,
    pub(super) primary: Mutex<Primary>,
    contexts: Mutex<u32>,
}

impl Device {
    pub(super) fn new(
        ordinal: usize,
        gpu: usize,
        config: &NodeConfig,
        state: Arc<State>,
        depth: usize,
    ) -> Option<Self> {
        let engine = Engine::new(depth);
        let profile = config.profile(gpu)?.clone();
        let compute = &profile.compute;
        Some(Self {
            ordinal: ordinal as i32,
            gpu,
            config: config.gpus.get(gpu)?.clone(),
            generation: state.generation(gpu),
            generation_now: state.generation_word(gpu),
            most_blocks: u64::from(compute.multiprocessors) * u64::from(compute.blocks_per_multiprocessor),
            profile,
            state,
            loose: engine.loose(),
            engine: Mutex::new(engine),
            changed: Condvar::new(),
            books: Spin::new(()),
            primary: Mutex::default(),
            contexts: Mutex::new(0),
        })
    }

    /// The device's work, for a moment.
    #[inline]
    pub(super) fn engine(&self) -> MutexGuard<'_, Engine> {
        // Whoever panicked inside left positions, which are valid at every step.
        self.engine.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Fails once the card fell off the bus, also after it came back.
    #[inline]
    pub(super) fn check(&self) -> Result<(), CudaError> {
        if self.generation_now.load(Ordering::Acquire) == self.generation {
            Ok(())
        } else {
            Err(GpuLost.into())
        }
    }

    /// The same, unless somebody has it.
    pub(super) fn try_engine(&self) -> Option<MutexGuard<'_, Engine>> {
        self.engine.try_lock().ok()
    }

    /// Whether it is this device's.
    pub(super) fn is_engine(&self, engine: &Engine) -> bool {
        engine.gpu() == Some(self.gpu)
    }

    /// The right to change the books, for a moment.
    #[inline]
    pub(super) fn books(&self) -> Held<'_, ()> {
        self.books.lock()
    }

    /// Takes memory of the card for this process; the driver's own words if there is not as much.
    #[inline]
    pub(super) fn take(&self, bytes: u64) -> Result<(), CudaError> {
        let books = self.books();
        self.take_with(&books, bytes)
    }

    /// Gives it back.
    #[inline]
    pub(super) fn give(&self, bytes: u64) {
        let books = self.books();
        self.give_with(&books, bytes);
    }

    /// The same for who has the books.
    #[inline]
    pub(super) fn take_with(&self, _books: &Held<'_, ()>, bytes: u64) -> Result<(), CudaError> {
        if self.state.take_memory(self.gpu, units(bytes)) { Ok(()) } else { Err(CudaError::OUT_OF_MEMORY) }
    }

    /// The same for who has the books.
    #[inline]
    pub(super) fn give_with(&self, _books: &Held<'_, ()>, bytes: u64) {
        self.state.give_memory(self.gpu, units(bytes));
    }

    /// One more context, or one less: the process is on the card's list while it has any.
    pub(super) fn count_context(&self, open: bool) {
        let mut contexts = self.contexts.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        *contexts = if open { *contexts + 1 } else { contexts.saturating_sub(1) };
        self.state.set_contexts(self.gpu, *contexts);
    }
}
