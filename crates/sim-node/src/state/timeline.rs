//! Who has the GPU when.
//!
//! A lane is the work of one process on one GPU, measured in *service time*: nanoseconds of the GPU for this process
//! alone. Work that was submitted lies at known positions of it, so a process works out itself when, in service time,
//! its kernels and events are done. What it shares with the others is only when it was served: the GPU goes round the
//! lanes that have work, a slice each, and every lane keeps a log that turns positions into instants of the wall clock.
//!
//! There is no GPU that runs by itself. Whoever wants to know something first brings the timeline up to now, under the
//! GPU's lock, and everybody who starts to have work after having had none does so too. So the result does not depend
//! on who looks how often. Each step is written down before it is applied: a process that is killed in the middle
//! leaves a step that the next one finishes.

use super::layout::{Gpu, Lane, Line, SEGMENTS, Segment, Shared, WINDOWS};
use partage_region::failpoint::point;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::compiler_fence;

/// On `Lane::submitted`: the GPU has seen the lane run dry, so that more work is news to it.
pub(super) const DRY: u64 = 1 << 63;

/// A window's number and the nanoseconds in it, in one word.
const BUSY_BITS: u32 = 40;

pub(super) fn window_word(number: u64, busy: u64) -> u64 {
    number << BUSY_BITS | busy
}

/// Nanoseconds in the window of that number, if the ring still has it.
fn busy_in(windows: &[std::sync::atomic::AtomicU64; WINDOWS], number: u64) -> u64 {
    let word = windows[(number % WINDOWS as u64) as usize].load(Relaxed);
    let same = word >> BUSY_BITS == number & (u64::MAX >> BUSY_BITS);
    if same { word & ((1 << BUSY_BITS) - 1) } else { 0 }
}

/// The timeline of one GPU while its lock is held.
pub(super) struct Timeline<'a> {
    pub(super) shared: &'a Shared,
    pub(super) gpu: &'a Gpu,
    pub(super) index: usize,
}

impl<'a> Timeline<'a> {
    fn line(&self) -> &'a Line {
        &self.gpu.line
    }

    pub(super) fn lane(&self, slot: usize) -> &'a Lane {
        &self.shared.clients[slot].lanes[self.index]
    }

    /// Thousandths of wall time that a unit of service takes.
    pub(super) fn slowness(&self) -> u64 {
        u64::from(self.gpu.condition.slowness.load(Relaxed)).max(1000)
    }

    /// Works the timeline out up to `now`.
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
                // It may be getting more work this very moment: then it is not dry.
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
            // Nobody has work: the rest is idle. Only the clock moves, so no step is needed.
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
        // Processes are killed between instructions: what is applied must come after in the program itself.
        compiler_fence(SeqCst);
        point("sim.timeline");
        self.apply();
    }

    /// Applies the committed step, also once more after somebody who died at it.
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
        let window = (step.window.load(Relaxed) % WINDOWS as u64) as usize;
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
        // Nor may the next step's values be written before.
        compiler_fence(SeqCst);
    }

    /// Finishes what a dead owner of the lock left.
    pub(super) fn repair(&self) {
        self.apply();
    }

    fn segment(&self, slot: usize, number: u64) -> &'a Segment {
        &self.shared.logs[slot][self.index].segments[(number % SEGMENTS as u64) as usize]
    }

    /// Gives the lane work up to `position`. The timeline must be up to now.
    pub(super) fn submit(&self, slot: usize, position: u64) {
        self.lane(slot).submitted.store(position & !DRY, Release);
        point("sim.timeline");
        self.set_runnable(slot, true);
    }

    /// Empties the lane, for its next process or because its process is gone.
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

    /// Nothing of what was submitted goes on.
    pub(super) fn stop(&self) {
        for slot in self.runnable().collect::<Vec<_>>() {
            let lane = self.lane(slot);
            lane.submitted.store(lane.served.load(Relaxed) | DRY, Release);
            self.set_runnable(slot, false);
        }
    }

    /// The instant at which the lane had been served up to `position`, if it has. Instants that the log has forgotten
    /// are given as the oldest one it knows.
    pub(super) fn instant(&self, slot: usize, position: u64) -> Option<u64> {
        let lane = self.lane(slot);
        if lane.served.load(Relaxed) < position {
            return None;
        }
        let segments = lane.segments.load(Relaxed);
        let oldest = segments.saturating_sub(SEGMENTS as u64);
        // The last segment that began before the position: an end belongs to what ended there.
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

    fn is_runnable(&self, slot: usize) -> bool {
        self.line().runnable.get(slot / 64).is_some_and(|word| word.load(Relaxed) >> (slot % 64) & 1 == 1)
    }

    fn set_runnable(&self, slot: usize, runnable: bool) {
        let Some(word) = self.line().runnable.get(slot / 64) else { return };
        let bit = 1 << (slot % 64);
        let now = word.load(Relaxed);
        word.store(if runnable { now | bit } else { now & !bit }, Relaxed);
    }

    /// The next slot with work after `slot`, going round; that slot itself comes last.
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

    /// Slots that have work, in no particular order.
    pub(super) fn runnable(&self) -> impl Iterator<Item = usize> {
        self.line().runnable.iter().enumerate().flat_map(|(index, word)| {
            let word = word.load(Relaxed);
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| index * 64 + bit)
        })
    }

    /// Nanoseconds in the window of that number during which anything ran.
    pub(super) fn busy(&self, window: u64) -> u64 {
        busy_in(&self.line().windows, window)
    }

    /// The same for one slot.
    pub(super) fn lane_busy(&self, slot: usize, window: u64) -> u64 {
        busy_in(&self.lane(slot).windows, window)
    }
}

fn instant(segment: &Segment, position: u64) -> u64 {
    let service = position.saturating_sub(segment.served.load(Relaxed));
    let slowness = segment.slowness.load(Relaxed).max(1000);
    segment.wall.load(Relaxed) + (service.saturating_mul(slowness)).div_ceil(1000)
}
