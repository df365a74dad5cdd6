//! The schedule of a GPU: which process it serves at which time.
//!
//! A lane is the work of one process on one GPU, measured in *service time*: nanoseconds of the GPU for this process
//! alone. Submitted work has known positions in service time, so a process computes itself at which position its
//! kernels and events complete. Only the mapping to wall time is shared: the GPU serves the lanes that have work
//! round-robin, one slice each, and every lane has a log that maps positions to instants.
//!
//! No thread runs the GPU. A process that needs a result first advances the timeline to the current time, under the
//! GPU's lock, and so does a process that submits work to an empty lane. The result therefore does not depend on how
//! often the timeline is advanced. Each step is recorded before it is applied: if a process is killed in between, the
//! next one completes the step.

use super::layout::{
    GpuRecord, LaneRecord, MAX_SEGMENTS, MAX_WINDOWS, ServiceSegment, StateFile, TimelineRecord,
};
use partage_region::failpoint::point;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::compiler_fence;

/// A flag in `LaneRecord::submitted`: the scheduler has seen the lane without work, so new work must be announced under
/// the lock.
pub(super) const DRY: u64 = 1 << 63;

/// The bits of a window word that hold the busy nanoseconds. The window's number is in the upper bits.
const BUSY_BITS: u32 = 40;

pub(super) fn window_word(number: u64, busy: u64) -> u64 {
    number << BUSY_BITS | busy
}

/// Returns the busy nanoseconds of the window with this number, or 0 if the ring buffer no longer has it.
fn busy_in(windows: &[std::sync::atomic::AtomicU64; MAX_WINDOWS], number: u64) -> u64 {
    let word = windows[(number % MAX_WINDOWS as u64) as usize].load(Relaxed);
    let same = word >> BUSY_BITS == number & (u64::MAX >> BUSY_BITS);
    if same { word & ((1 << BUSY_BITS) - 1) } else { 0 }
}

/// The timeline of one GPU. The caller holds the GPU's lock.
pub(super) struct Timeline<'a> {
    pub(super) shared: &'a StateFile,
    pub(super) gpu: &'a GpuRecord,
    pub(super) index: usize,
}

impl<'a> Timeline<'a> {
    pub(super) fn line(&self) -> &'a TimelineRecord {
        &self.gpu.line
    }

    pub(super) fn lane(&self, slot: usize) -> &'a LaneRecord {
        &self.shared.clients[slot].lanes[self.index]
    }

    /// Returns the wall time of a nanosecond of service, in thousandths.
    pub(super) fn slowness(&self) -> u64 {
        u64::from(self.gpu.condition.slowness.load(Relaxed)).max(1000)
    }

    /// Advances the timeline to `now`.
    pub(super) fn advance(&self, now: u64) {
        let line = self.line();
        let slice = self.shared.header.slice.load(Relaxed).max(1);
        let period = self.shared.header.window.load(Relaxed).max(1);
        let slowness = self.slowness();
        let mut at = line.now.load(Relaxed);
        let mut holder = line.holder.load(Relaxed) as usize;
        let mut left = line.slice_left.load(Relaxed);
        loop {
            if left == 0 || !self.is_runnable(holder) {
                let Some(next) = self.next_runnable(holder) else { break };
                holder = next;
                left = slice;
            }
            let lane = self.lane(holder);
            let submitted = lane.submitted.load(Acquire);
            let served = lane.served.load(Relaxed);
            if submitted & DRY != 0 || submitted <= served {
                // The exchange fails if the process submits more work concurrently: then the lane is not dry.
                let marked = submitted & DRY != 0
                    || lane.submitted.compare_exchange(submitted, submitted | DRY, Acquire, Acquire).is_ok();
                point("sim.timeline");
                if marked {
                    self.set_runnable(holder, false);
                }
                continue;
            }
            if at >= now {
                break;
            }
            let window = at / period;
            let room = left.min(now - at).min((window + 1) * period - at);
            let demand = submitted - served;
            let wanted = (demand.saturating_mul(slowness)).div_ceil(1000);
            let (wall, service) =
                if wanted <= room { (wanted, demand) } else { (room, room * 1000 / slowness) };
            self.step(holder, at, wall, service, left - wall, window, slowness);
            at += wall;
            left -= wall;
        }
        if at < now {
            // No lane has work: the GPU is idle until `now`. Only the clock changes, so no step is needed.
            line.now.store(now, Relaxed);
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn step(&self, slot: usize, at: u64, wall: u64, service: u64, left: u64, window: u64, slowness: u64) {
        let (line, lane) = (self.line(), self.lane(slot));
        let step = &line.step;
        let served = lane.served.load(Relaxed);
        let segments = lane.segments.load(Relaxed);
        let continues = segments > 0 && {
            let last = self.segment(slot, segments - 1);
            last.slowness.load(Relaxed) == slowness && instant(last, served) == at
        };
        step.slot.store(slot as u32, Relaxed);
        step.now.store(at + wall, Relaxed);
        step.slice_left.store(left, Relaxed);
        step.busy.store(line.busy.load(Relaxed) + wall, Relaxed);
        step.served.store(served + service, Relaxed);
        step.segments.store(if continues { segments } else { segments + 1 }, Relaxed);
        step.segment.served.store(served, Relaxed);
        step.segment.wall.store(at, Relaxed);
        step.segment.slowness.store(if continues { 0 } else { slowness }, Relaxed);
        step.window.store(window, Relaxed);
        step.gpu_window.store(window_word(window, busy_in(&line.windows, window) + wall), Relaxed);
        step.lane_window.store(window_word(window, busy_in(&lane.windows, window) + wall), Relaxed);
        point("sim.timeline");
        step.committed.store(1, Release);
        // A process may be killed between two instructions: the compiler must not move stores of `apply` before this.
        compiler_fence(SeqCst);
        point("sim.timeline");
        self.apply();
    }

    /// Applies the committed step. Applying it again after a process died in between has the same result.
    fn apply(&self) {
        let line = self.line();
        let step = &line.step;
        if step.committed.load(Acquire) == 0 {
            return;
        }
        let slot = (step.slot.load(Relaxed) as usize).min(self.shared.clients.len() - 1);
        let lane = self.lane(slot);
        let segments = step.segments.load(Relaxed);
        let slowness = step.segment.slowness.load(Relaxed);
        if slowness != 0 && segments > 0 {
            let segment = self.segment(slot, segments - 1);
            segment.served.store(step.segment.served.load(Relaxed), Relaxed);
            point("sim.timeline");
            segment.wall.store(step.segment.wall.load(Relaxed), Relaxed);
            point("sim.timeline");
            segment.slowness.store(slowness, Relaxed);
            point("sim.timeline");
        }
        lane.segments.store(segments, Relaxed);
        point("sim.timeline");
        let window = (step.window.load(Relaxed) % MAX_WINDOWS as u64) as usize;
        line.windows[window].store(step.gpu_window.load(Relaxed), Relaxed);
        point("sim.timeline");
        lane.windows[window].store(step.lane_window.load(Relaxed), Relaxed);
        point("sim.timeline");
        line.now.store(step.now.load(Relaxed), Relaxed);
        point("sim.timeline");
        line.holder.store(slot as u32, Relaxed);
        point("sim.timeline");
        line.slice_left.store(step.slice_left.load(Relaxed), Relaxed);
        point("sim.timeline");
        line.busy.store(step.busy.load(Relaxed), Relaxed);
        point("sim.timeline");
        lane.served.store(step.served.load(Relaxed), Release);
        point("sim.timeline");
        step.committed.store(0, Release);
        // The values of the next step must not be written before this, either.
        compiler_fence(SeqCst);
    }

    /// Completes the step that a dead owner of the lock left.
    pub(super) fn repair(&self) {
        self.apply();
    }

    fn segment(&self, slot: usize, number: u64) -> &'a ServiceSegment {
        &self.shared.logs[slot][self.index].segments[(number % MAX_SEGMENTS as u64) as usize]
    }

    /// Submits work up to `position` to the lane. The timeline must be advanced to the current time.
    pub(super) fn submit(&self, slot: usize, position: u64) {
        self.lane(slot).submitted.store(position & !DRY, Release);
        point("sim.timeline");
        self.set_runnable(slot, true);
    }

    /// Clears the lane, for a new process or after the death of its process.
    pub(super) fn clear(&self, slot: usize) {
        self.set_runnable(slot, false);
        point("sim.timeline");
        let lane = self.lane(slot);
        lane.submitted.store(DRY, Relaxed);
        lane.served.store(0, Relaxed);
        lane.segments.store(0, Relaxed);
        for window in &lane.windows {
            window.store(0, Relaxed);
        }
    }

    /// Cancels all submitted work of all lanes.
    pub(super) fn stop(&self) {
        for slot in self.runnable().collect::<Vec<_>>() {
            let lane = self.lane(slot);
            lane.submitted.store(lane.served.load(Relaxed) | DRY, Release);
            self.set_runnable(slot, false);
        }
    }

    /// Returns the instant at which the lane was served up to `position`; `None` if it has not been yet. For
    /// positions that are no longer in the log, returns the oldest instant of the log.
    pub(super) fn instant(&self, slot: usize, position: u64) -> Option<u64> {
        let lane = self.lane(slot);
        if lane.served.load(Relaxed) < position {
            return None;
        }
        let segments = lane.segments.load(Relaxed);
        let oldest = segments.saturating_sub(MAX_SEGMENTS as u64);
        // The last segment that began before the position: the end of a segment belongs to that segment.
        let (mut low, mut high) = (oldest, segments);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.segment(slot, middle).served.load(Relaxed) < position {
                low = middle + 1
            } else {
                high = middle
            }
        }
        let segment = self.segment(slot, low.saturating_sub(1).max(oldest));
        Some(instant(segment, position.max(segment.served.load(Relaxed))))
    }

    /// Returns the instant at which the lane will be served up to `position` if no process submits more work until
    /// then. More work of others only makes it later. Gives up at `horizon` and returns that if other lanes have work.
    /// Another process may have advanced the timeline beyond the position already.
    pub(super) fn earliest_instant(&self, slot: usize, position: u64, horizon: u64) -> u64 {
        let (line, slowness) = (self.line(), self.slowness());
        let wall = |service: u64| service.saturating_mul(slowness) / 1000;
        let mut at = line.now.load(Relaxed);
        let own = wall(position.saturating_sub(self.lane(slot).served.load(Relaxed)));
        let demand = |other: usize| {
            let lane = self.lane(other);
            let submitted = lane.submitted.load(Acquire) & !DRY;
            let service = submitted.saturating_sub(lane.served.load(Relaxed));
            (other, if other == slot { own } else { wall(service) })
        };
        let mut lanes: Vec<(usize, u64)> =
            self.runnable().map(demand).filter(|&(_, left)| left > 0).collect();
        let is_own = |&(other, _): &(usize, u64)| other == slot;
        // Without an own entry, which would end the loop below, there is nothing to wait for.
        if !lanes.iter().any(is_own) || lanes.iter().all(is_own) {
            return at + own;
        }
        let slice = self.shared.header.slice.load(Relaxed).max(1);
        let holder = line.holder.load(Relaxed) as usize;
        let mut turn = line.slice_left.load(Relaxed);
        let holds = turn > 0 && lanes.iter().any(|&(other, _)| other == holder);
        // Round-robin order, from the process that has the GPU or else the one after it.
        let first = lanes.iter().position(|&(other, _)| if holds { other == holder } else { other > holder });
        lanes.rotate_left(first.unwrap_or(0));
        if !holds {
            turn = slice;
        }
        while at < horizon {
            for (other, left) in &mut lanes {
                let used = turn.min(*left);
                at += used;
                *left -= used;
                turn = slice;
                if *other == slot && *left == 0 {
                    return at.min(horizon);
                }
            }
        }
        horizon
    }

    fn is_runnable(&self, slot: usize) -> bool {
        self.line().runnable.get(slot / 64).is_some_and(|word| word.load(Relaxed) >> (slot % 64) & 1 == 1)
    }

    fn set_runnable(&self, slot: usize, runnable: bool) {
        let Some(word) = self.line().runnable.get(slot / 64) else { return };
        let bit = 1 << (slot % 64);
        let now = word.load(Relaxed);
        word.store(if runnable { now | bit } else { now & !bit }, Relaxed);
    }

    /// Returns the next slot with work after `slot` in round-robin order; `slot` itself is last.
    fn next_runnable(&self, slot: usize) -> Option<usize> {
        let words = &self.line().runnable;
        let (start, bit) = (slot / 64 % words.len(), slot % 64);
        let after = words[start].load(Relaxed) & (u64::MAX << bit << 1);
        if after != 0 {
            return Some(start * 64 + after.trailing_zeros() as usize);
        }
        (1..=words.len()).map(|step| (start + step) % words.len()).find_map(|index| {
            let word = words[index].load(Relaxed);
            (word != 0).then(|| index * 64 + word.trailing_zeros() as usize)
        })
    }

    /// Iterates over the slots that have work, by ascending number.
    pub(super) fn runnable(&self) -> impl Iterator<Item = usize> {
        self.line().runnable.iter().enumerate().flat_map(|(index, word)| {
            let word = word.load(Relaxed);
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| index * 64 + bit)
        })
    }

    /// Returns the nanoseconds of a window during which the GPU was busy.
    pub(super) fn busy(&self, window: u64) -> u64 {
        busy_in(&self.line().windows, window)
    }

    /// Returns the nanoseconds of a window during which the GPU served one slot.
    pub(super) fn lane_busy(&self, slot: usize, window: u64) -> u64 {
        busy_in(&self.lane(slot).windows, window)
    }
}

fn instant(segment: &ServiceSegment, position: u64) -> u64 {
    let service = position.saturating_sub(segment.served.load(Relaxed));
    let slowness = segment.slowness.load(Relaxed).max(1000);
    segment.wall.load(Relaxed) + (service.saturating_mul(slowness)).div_ceil(1000)
}
