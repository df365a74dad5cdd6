//! One GPU as seen by one process.

use super::CudaError;
mod device_attributes;
mod device_functions;

use super::context::PrimaryContext;
use super::engine::{ExecutionEngine, UnsettledCount};
use super::spin_lock::{SpinGuard, SpinLock};
use crate::node::{NodeConfig, NodeGpu};
use crate::profile::GpuProfile;
use crate::state::{GpuLost, SimNodeState, units};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// A GPU of the node, opened by this process.
pub(super) struct Device {
    /// The device ordinal, as the program sees it.
    pub(super) ordinal: i32,
    /// The GPU's index on the node.
    pub(super) gpu: usize,
    /// Identity of the GPU: UUID, PCI address, links.
    pub(super) config: NodeGpu,
    /// Properties of the GPU model.
    pub(super) profile: GpuProfile,
    pub(super) state: Arc<SimNodeState>,
    /// The process's work on the GPU. Locked for every launch, and never held while waiting.
    engine: Mutex<ExecutionEngine>,
    /// Counts stream timelines that wait for host work, readable without the lock.
    pub(super) unsettled: Arc<UnsettledCount>,
    /// The GPU's generation when the driver was initialized; it changes when the GPU is lost or returns.
    generation: u32,
    /// The current generation, in the node's shared state.
    generation_word: &'static AtomicU32,
    /// This many blocks fill the GPU, whatever their size.
    pub(super) max_resident_blocks: u64,
    /// Signaled whenever host work in stream order completes.
    pub(super) work_changed: Condvar,
    /// Serializes this process's changes to the shared memory accounting.
    accounting_lock: SpinLock<()>,
    pub(super) primary: Mutex<PrimaryContext>,
    contexts: Mutex<u32>,
}

impl Device {
    pub(super) fn new(
        ordinal: usize,
        gpu: usize,
        config: &NodeConfig,
        state: Arc<SimNodeState>,
        depth: usize,
    ) -> Option<Self> {
        let engine = ExecutionEngine::new(depth);
        let profile = config.profile(gpu)?.clone();
        let compute = &profile.compute;
        Some(Self {
            ordinal: ordinal as i32,
            gpu,
            config: config.gpus.get(gpu)?.clone(),
            generation: state.generation(gpu),
            generation_word: state.generation_word(gpu),
            max_resident_blocks: u64::from(compute.multiprocessors)
                * u64::from(compute.blocks_per_multiprocessor),
            profile,
            state,
            unsettled: engine.unsettled(),
            engine: Mutex::new(engine),
            work_changed: Condvar::new(),
            accounting_lock: SpinLock::new(()),
            primary: Mutex::default(),
            contexts: Mutex::new(0),
        })
    }

    /// Locks the device's execution engine.
    #[inline]
    pub(super) fn engine(&self) -> MutexGuard<'_, ExecutionEngine> {
        // A panic leaves only positions behind, which are valid at every step.
        self.engine.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Fails if the GPU was lost at any time since the driver was initialized, even if it returned.
    #[inline]
    pub(super) fn check(&self) -> Result<(), CudaError> {
        if self.generation_word.load(Ordering::Acquire) == self.generation {
            Ok(())
        } else {
            Err(GpuLost.into())
        }
    }

    /// Locks the engine unless another thread holds it.
    pub(super) fn try_engine(&self) -> Option<MutexGuard<'_, ExecutionEngine>> {
        self.engine.try_lock().ok()
    }

    /// Returns whether the engine is this device's.
    pub(super) fn owns_engine(&self, engine: &ExecutionEngine) -> bool {
        engine.gpu() == Some(self.gpu)
    }

    /// Locks the memory accounting.
    #[inline]
    pub(super) fn lock_accounting(&self) -> SpinGuard<'_, ()> {
        self.accounting_lock.lock()
    }

    /// Charges memory to this process; fails with `OUT_OF_MEMORY` if the card has too little free.
    #[inline]
    pub(super) fn charge(&self, bytes: u64) -> Result<(), CudaError> {
        let guard = self.lock_accounting();
        self.charge_locked(&guard, bytes)
    }

    /// Returns charged memory to the card.
    #[inline]
    pub(super) fn refund(&self, bytes: u64) {
        let guard = self.lock_accounting();
        self.refund_locked(&guard, bytes);
    }

    /// Charges memory while the accounting lock is held.
    #[inline]
    pub(super) fn charge_locked(&self, _guard: &SpinGuard<'_, ()>, bytes: u64) -> Result<(), CudaError> {
        if self.state.take_memory(self.gpu, units(bytes)) { Ok(()) } else { Err(CudaError::OUT_OF_MEMORY) }
    }

    /// Returns charged memory while the accounting lock is held.
    #[inline]
    pub(super) fn refund_locked(&self, _guard: &SpinGuard<'_, ()>, bytes: u64) {
        self.state.release_memory(self.gpu, units(bytes));
    }

    /// Adjusts the number of contexts. NVML lists the process while it has any.
    pub(super) fn count_context(&self, open: bool) {
        let mut contexts = self.contexts.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        *contexts = if open { *contexts + 1 } else { contexts.saturating_sub(1) };
        self.state.set_contexts(self.gpu, *contexts);
    }
}
