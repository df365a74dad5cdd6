//! A process's own end of its lane: giving work to the GPU and learning when it is done.

use super::timeline::DRY;
use super::{State, Ticks, now};
use partage_driver_api::cuda::CudaError;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// The GPU fell off the bus since the lane was opened. Work on it is lost for good, also after it came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuLost;

impl From<GpuLost> for CudaError {
    /// What programs get from every call once their GPU fell off the bus.
    fn from(_: GpuLost) -> Self {
        CudaError::UNKNOWN
    }
}

/// How long a dead process may go on being served before somebody notices, in nanoseconds.
const UNNOTICED: u64 = 5_000_000;

/// One process's lane on one GPU. Positions are nanoseconds of service.
#[derive(Debug)]
pub struct GpuLane {
    state: Arc<State>,
    gpu: usize,
    generation: u32,
    submitted: u64,
    served: u64,
    /// While the processor's counter is below this, the lane has not run dry, whoever else uses the GPU.
    wet_until: u64,
    ticks: Ticks,
    /// Instants somebody wants to know.
    marks: Vec<(u64, Arc<AtomicU64>)>,
}

impl GpuLane {
    /// Opens this process's lane on the GPU.
    pub fn open(state: Arc<State>, gpu: usize) -> Result<Self, GpuLost> {
        let generation = state.shared.gpus[gpu].condition.generation.load(Acquire);
        if generation % 2 == 1 {
            return Err(GpuLost);
        }
        state.bury_the_busy(gpu);
        {
            let (timeline, _held) = state.timeline(gpu);
            timeline.advance(now());
            timeline.clear(state.slot);
        }
        let ticks = Ticks::default();
        Ok(Self { state, gpu, generation, submitted: 0, served: 0, wet_until: 0, ticks, marks: Vec::new() })
    }

    /// The GPU's index on the node.
    pub fn gpu(&self) -> usize {
        self.gpu
    }

    /// Whether the GPU is still the one the lane was opened on.
    pub fn check(&self) -> Result<(), GpuLost> {
        let generation = self.state.shared.gpus[self.gpu].condition.generation.load(Relaxed);
        if generation == self.generation { Ok(()) } else { Err(GpuLost) }
    }

    /// Up to where there is work.
    #[inline]
    pub fn submitted(&self) -> u64 {
        self.submitted
    }

    /// Up to where the lane was served when last looked at.
    #[inline]
    pub fn served(&self) -> u64 {
        self.served
    }

    /// Gives the lane work up to `position`, which begins now if there is no other.
    #[inline]
    pub fn extend(&mut self, position: u64) -> Result<(), GpuLost> {
        debug_assert!(position >= self.submitted && position & DRY == 0);
        if Ticks::read() < self.wet_until {
            let shared = &self.state.shared.clients[self.state.slot].lanes[self.gpu].submitted;
            // Fails if somebody saw the lane run dry after all: a mark is on the word then.
            if shared.compare_exchange(self.submitted, position, Release, Relaxed).is_ok() {
                self.wet_until += self.ticks.ticks(position - self.submitted);
                self.submitted = position;
                return Ok(());
            }
        }
        self.extend_dry(position)
    }

    #[cold]
    fn extend_dry(&mut self, position: u64) -> Result<(), GpuLost> {
        self.look(Some(position)).map(|_| ())
    }

    /// Brings the GPU's timeline up to now; returns up to where the lane was served.
    pub fn refresh(&mut self) -> Result<u64, GpuLost> {
        self.look(None)
    }

    fn look(&mut self, extend_to: Option<u64>) -> Result<u64, GpuLost> {
        self.check()?;
        let ticks = Ticks::read();
        let wall = now();
        let look_for_dead;
        {
            let (timeline, _held) = self.state.timeline(self.gpu);
            timeline.advance(wall);
            let slot = self.state.slot;
            self.served = timeline.lane(slot).served.load(Relaxed);
            if let Some(position) = extend_to {
                timeline.submit(slot, position);
                self.submitted = position;
            }
            let served = self.served;
            self.marks.retain(|(position, stamp)| {
                let reached = if *position <= served { timeline.instant(slot, *position) } else { None };
                if let Some(instant) = reached {
                    stamp.store(instant, Release);
                }
                reached.is_none()
            });
            let line = &timeline.gpu.line;
            look_for_dead = wall > line.looked_for_dead.load(Relaxed) + UNNOTICED;
            if look_for_dead {
                line.looked_for_dead.store(wall, Relaxed);
            }
        }
        if look_for_dead {
            self.state.bury_the_busy(self.gpu);
        }
        self.wet_until = self.ticks.surely_before(ticks, wall, self.submitted - self.served);
        Ok(self.served)
    }

    /// Asks for the instant at which `position` is reached. It is in the cell, and not zero, once somebody has looked at
    /// the lane after that instant.
    pub fn mark(&mut self, position: u64) -> Arc<AtomicU64> {
        let stamp = Arc::new(AtomicU64::new(0));
        self.marks.push((position, Arc::clone(&stamp)));
        stamp
    }

    /// The earliest instant at which `position` can be reached, or nothing if it has been.
    pub fn not_before(&mut self, position: u64) -> Result<Option<u64>, GpuLost> {
        if self.served >= position {
            return self.check().map(|()| None);
        }
        let served = self.refresh()?;
        Ok((served < position).then(|| now() + (position - served)))
    }
}
