//! A process's interface to its lane: submits work to the GPU and determines when it is done.

use super::timeline::DRY;
use super::{SimNodeState, TickClock, now};
use partage_driver_api::cuda::CudaError;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// The GPU fell off the bus since the lane was opened. Its work is lost permanently, even if the GPU returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuLost;

impl From<GpuLost> for CudaError {
    /// The error that every call returns after the GPU fell off the bus.
    fn from(_: GpuLost) -> Self {
        CudaError::UNKNOWN
    }
}

/// How long a dead process may be served before it is detected, in nanoseconds.
const DEAD_CHECK_INTERVAL_NANOS: u64 = 5_000_000;

/// The lane of this process on one GPU. Positions are nanoseconds of service time.
#[derive(Debug)]
pub struct GpuLane {
    state: Arc<SimNodeState>,
    gpu: usize,
    generation: u32,
    submitted: u64,
    served: u64,
    /// While the processor's counter is below this tick, the lane has work, even if no other process uses the GPU.
    busy_until_tick: u64,
    ticks: TickClock,
    /// Positions whose instants were requested, with the cells for them.
    marks: Vec<(u64, Arc<AtomicU64>)>,
}

impl GpuLane {
    /// Opens this process's lane on the GPU.
    pub fn open(state: Arc<SimNodeState>, gpu: usize) -> Result<Self, GpuLost> {
        let generation = state.shared.gpus[gpu].condition.generation.load(Acquire);
        if generation % 2 == 1 {
            return Err(GpuLost);
        }
        state.reclaim_dead_runnable(gpu);
        {
            let (timeline, _held) = state.timeline(gpu);
            timeline.advance(now());
            timeline.clear(state.slot);
        }
        let ticks = TickClock::default();
        Ok(Self {
            state,
            gpu,
            generation,
            submitted: 0,
            served: 0,
            busy_until_tick: 0,
            ticks,
            marks: Vec::new(),
        })
    }

    /// Returns the index of the GPU on the node.
    pub fn gpu(&self) -> usize {
        self.gpu
    }

    /// Checks that the GPU has not fallen off the bus since the lane was opened.
    pub fn check(&self) -> Result<(), GpuLost> {
        let generation = self.state.shared.gpus[self.gpu].condition.generation.load(Relaxed);
        if generation == self.generation { Ok(()) } else { Err(GpuLost) }
    }

    /// Returns the position up to which work is submitted.
    #[inline]
    pub fn submitted(&self) -> u64 {
        self.submitted
    }

    /// Returns the position up to which the lane was served at the last update.
    #[inline]
    pub fn served(&self) -> u64 {
        self.served
    }

    /// Submits work up to `position`. It begins now if the lane is idle.
    #[inline]
    pub fn extend(&mut self, position: u64) -> Result<(), GpuLost> {
        debug_assert!(position >= self.submitted && position & DRY == 0);
        if TickClock::read() < self.busy_until_tick {
            let shared = &self.state.shared.clients[self.state.slot].lanes[self.gpu].submitted;
            // Fails if another process has marked the lane as dry.
            if shared.compare_exchange(self.submitted, position, Release, Relaxed).is_ok() {
                self.busy_until_tick += self.ticks.ticks(position - self.submitted);
                self.submitted = position;
                return Ok(());
            }
        }
        self.extend_slow(position)
    }

    #[cold]
    fn extend_slow(&mut self, position: u64) -> Result<(), GpuLost> {
        self.update(Some(position)).map(|_| ())
    }

    /// Advances the GPU's timeline to the current time and returns the position up to which the lane was served.
    pub fn refresh(&mut self) -> Result<u64, GpuLost> {
        self.update(None)
    }

    fn update(&mut self, extend_to: Option<u64>) -> Result<u64, GpuLost> {
        self.check()?;
        let ticks = TickClock::read();
        let wall = now();
        let is_dead_check_due;
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
            is_dead_check_due = wall > line.dead_checked_at.load(Relaxed) + DEAD_CHECK_INTERVAL_NANOS;
            if is_dead_check_due {
                line.dead_checked_at.store(wall, Relaxed);
            }
        }
        if is_dead_check_due {
            self.state.reclaim_dead_runnable(self.gpu);
        }
        self.busy_until_tick = self.ticks.latest_safe_tick(ticks, wall, self.submitted - self.served);
        Ok(self.served)
    }

    /// Cancels submitted work from `position` on, as far as the GPU has not reached it. Returns the position up to
    /// which work is submitted now.
    pub fn truncate(&mut self, position: u64) -> Result<u64, GpuLost> {
        self.check()?;
        let (ticks, wall) = (TickClock::read(), now());
        {
            let (timeline, _held) = self.state.timeline(self.gpu);
            timeline.advance(wall);
            let lane = timeline.lane(self.state.slot);
            self.served = lane.served.load(Relaxed);
            // Only the owner changes the position, and others set the flag only under the lock.
            let flag = lane.submitted.load(Relaxed) & DRY;
            self.submitted = position.clamp(self.served.min(self.submitted), self.submitted);
            lane.submitted.store(self.submitted | flag, Release);
        }
        self.busy_until_tick = self.ticks.latest_safe_tick(ticks, wall, self.submitted - self.served);
        Ok(self.submitted)
    }

    /// Requests the instant at which `position` is reached. The returned cell is zero until the lane is updated after
    /// that instant.
    pub fn mark(&mut self, position: u64) -> Arc<AtomicU64> {
        let stamp = Arc::new(AtomicU64::new(0));
        self.marks.push((position, Arc::clone(&stamp)));
        stamp
    }

    /// Returns the earliest instant at which `position` can be reached; `None` if it has been reached. While other
    /// processes have work on the GPU, the instant is at most a few milliseconds ahead, because one of them may die.
    pub fn not_before(&mut self, position: u64) -> Result<Option<u64>, GpuLost> {
        if self.served >= position {
            return self.check().map(|()| None);
        }
        if self.refresh()? >= position {
            return Ok(None);
        }
        let (timeline, _held) = self.state.timeline(self.gpu);
        let wall = timeline.line().now.load(Relaxed);
        Ok(Some(timeline.earliest_instant(self.state.slot, position, wall + DEAD_CHECK_INTERVAL_NANOS)))
    }

    /// Returns the position that the lane had reached when the GPU fell off the bus.
    pub fn served_when_lost(&self) -> u64 {
        let (timeline, _held) = self.state.timeline(self.gpu);
        timeline.lane(self.state.slot).served.load(Relaxed)
    }
}
