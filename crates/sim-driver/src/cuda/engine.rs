//! The work of one process on one GPU.
//!
//! Every stream is a *track*: operations in order. What takes GPU time is given its place in service time the moment it
//! is submitted (see [`timeline`](crate::state)), so a launch is a few additions. What the host does in a stream's order
//! (copies, callbacks) is a *chore*: it is done when the GPU has come to its position, by a thread that waits for it or
//! by the driver's own. Where the position is not known yet, because a callback or another GPU comes first, the track is
//! *held* and what follows waits in its queue.

mod beside;
mod chores;

use super::CudaError;
use super::device::Device;
use super::event::Event;
use crate::state::{GpuLane, State};
use beside::Beside;
pub(super) use chores::Chore;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A kernel that leaves no room for another.
pub(super) const FULL: u32 = 1 << 16;

/// Something the host does in a stream's order.
pub(super) type Work = Box<dyn FnOnce() + Send>;

/// An operation of a stream.
pub(super) enum Op {
    /// Takes this much GPU time and this part of the GPU.
    Kernel { duration: u64, share: u32 },
    /// Stamps an event: that recording of it, or, with zero, a new one from the moment the operation is submitted.
    Record(&'static Event, u64),
    /// The driver's own work on memory, in order.
    Host(Work),
    /// The program's function: nothing of the stream goes on before it returned.
    Call(Work),
    /// Nothing of the stream goes on before this event, in this recording of it.
    Wait(&'static Event, u64),
    /// Nothing of the stream goes on before this is true.
    Until(Box<dyn Fn() -> bool + Send>),
    /// Kernels with dependencies among each other: duration, share, and the earlier ones that each comes after.
    Kernels(Arc<[Node]>),
}

/// A kernel of a graph.
pub(super) struct Node {
    pub(super) duration: u64,
    pub(super) share: u32,
    pub(super) after: Vec<usize>,
}

/// What holds a track.
enum Until {
    Event(&'static Event, u64),
    /// Operations of other tracks up to these numbers.
    Settled(Vec<(usize, u64)>),
    True(Box<dyn Fn() -> bool + Send>),
    /// The program's function, which runs.
    Call,
}

/// A chore that is not done.
pub(super) struct Outstanding {
    /// Its operation's number.
    number: u64,
    /// Where it waits to be done; nothing while somebody does it.
    key: Option<(u64, u64)>,
}

/// One stream's operations.
#[derive(Default)]
pub(super) struct Track {
    group: usize,
    kind: Kind,
    /// Where its last operation ends.
    tail: u64,
    /// Operations submitted so far.
    entered: u64,
    /// Chores that are not done, in order.
    outstanding: VecDeque<Outstanding>,
    held: Option<Until>,
    /// What waits, and what each comes after in other tracks.
    queue: VecDeque<(Op, Vec<(usize, u64)>)>,
    closing: bool,
}

/// How a track goes together with the others of its context.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Kind {
    /// The legacy default stream: before and after all blocking ones.
    #[default]
    Legacy,
    /// An ordinary stream.
    Blocking,
    /// One that keeps to itself.
    Alone,
}

impl Track {
    /// The last operation that is settled: placed, nothing holds it, and its chore is done.
    fn settled(&self) -> u64 {
        let placed = self.entered - self.queue.len() as u64;
        let free = match self.held {
            // The last one that was placed is what holds.
            Some(Until::Event(..) | Until::True(_)) => placed - 1,
            Some(Until::Settled(_) | Until::Call) | None => placed,
        };
        self.outstanding.front().map_or(free, |first| free.min(first.number - 1))
    }
}

/// A context's streams.
#[derive(Clone, Copy, Default)]
struct Group {
    legacy: usize,
    /// The latest end of the legacy stream and the blocking ones.
    tail: u64,
}

/// The work of this process on one GPU.
pub(super) struct Engine {
    lane: Option<GpuLane>,
    tracks: Vec<Track>,
    free: Vec<usize>,
    groups: Vec<Group>,
    free_groups: Vec<usize>,
    /// Ends of the last launches: one more than fit must wait for the oldest.
    recent: Vec<u64>,
    launches: usize,
    beside: Beside,
    chores: BTreeMap<(u64, u64), Chore>,
    next_chore: u64,
    /// Tracks that are held or have chores; while there are none, streams need not look at each other.
    loose: Arc<Loose>,
    /// Operations in the queues of all tracks.
    queued: usize,
    worker: bool,
    /// Where the kernels of each [`Op::Kernels`] ended.
    #[cfg(test)]
    pub(super) traced: Vec<Vec<u64>>,
}

/// Counts tracks that are held or have chores. Only changed under the engine's lock; a look without it is as old as a
/// look before taking it.
#[derive(Default)]
pub(super) struct Loose(AtomicUsize);

impl Loose {
    #[inline]
    pub(super) fn any(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }

    fn add(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }

    fn remove(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// What became of a submission.
pub(super) enum Submitted {
    /// It is placed or waits in line.
    Done,
    /// Nothing comes before this chore: the submitter does it.
    Now(Chore),
    /// The queue is full until this position has been served; then again.
    Full(u64, Op),
    /// The stream is held and its queue is full; again when it went on.
    Crowded(Op),
}

impl Engine {
    pub(super) fn new(depth: usize) -> Self {
        Self {
            lane: None,
            tracks: Vec::new(),
            free: Vec::new(),
            groups: Vec::new(),
            free_groups: Vec::new(),
            recent: vec![0; depth.clamp(2, 1 << 20)],
            launches: 0,
            beside: Beside::default(),
            chores: BTreeMap::new(),
            next_chore: 0,
            loose: Arc::default(),
            queued: 0,
            worker: false,
            #[cfg(test)]
            traced: Vec::new(),
        }
    }

    /// Opens the lane, for the process's first context on the GPU.
    pub(super) fn open(&mut self, state: &Arc<State>, gpu: usize) -> Result<(), CudaError> {
        if let Some(lane) = &self.lane {
            return Ok(lane.check()?);
        }
        state.reserve_lane(gpu).map_err(|_| CudaError::OUT_OF_MEMORY)?;
        self.lane = Some(GpuLane::open(Arc::clone(state), gpu)?);
        Ok(())
    }

    pub(super) fn lane(&mut self) -> Result<&mut GpuLane, CudaError> {
        self.lane.as_mut().ok_or(CudaError::INVALID_CONTEXT)
    }

    /// What its device looks at without the lock.
    pub(super) fn loose(&self) -> Arc<Loose> {
        Arc::clone(&self.loose)
    }

    /// The GPU it works on.
    pub(super) fn gpu(&self) -> Option<usize> {
        self.lane.as_ref().map(GpuLane::gpu)
    }

    /// A context's streams begin.
    pub(super) fn open_group(&mut self) -> (usize, usize) {
        let group = self.free_groups.pop().unwrap_or_else(|| {
            self.groups.push(Group::default());
            self.groups.len() - 1
        });
        let legacy = self.open_track(group, Kind::Legacy);
        self.groups[group].legacy = legacy;
        (group, legacy)
    }

    /// A context's streams have ended, its default one with them.
    pub(super) fn close_group(&mut self, group: usize) {
        self.free_groups.push(group);
    }

    /// A stream begins.
    pub(super) fn open_track(&mut self, group: usize, kind: Kind) -> usize {
        self.close_settled();
        let track = self.free.pop().unwrap_or_else(|| {
            self.tracks.push(Track::default());
            self.tracks.len() - 1
        });
        let before = &self.tracks[track];
        // Numbers go on: an event that was recorded in the track's former life stays settled.
        let (entered, tail) = (before.entered, before.tail);
        self.tracks[track] = Track { group, kind, tail, entered, ..Track::default() };
        track
    }

    /// A stream ends once its work has.
    pub(super) fn close_track(&mut self, track: usize) {
        self.tracks[track].closing = true;
        self.close_settled();
    }

    fn close_settled(&mut self) {
        if !self.tracks.iter().any(|track| track.closing) {
            return;
        }
        let served = self.lane.as_mut().map_or(u64::MAX, |lane| lane.refresh().unwrap_or(u64::MAX));
        for (index, track) in self.tracks.iter_mut().enumerate() {
            if track.closing && track.tail <= served && track.settled() == track.entered {
                track.closing = false;
                self.free.push(index);
            }
        }
    }

    /// Submits an operation.
    #[inline]
    pub(super) fn submit(&mut self, track: usize, op: Op) -> Result<Submitted, CudaError> {
        if self.queued > 0 && self.is_crowded(track) {
            return Ok(Submitted::Crowded(op));
        }
        self.submit_to(track, op)
    }

    /// Whether as much waits in the track's queue as has room.
    pub(super) fn is_crowded(&self, track: usize) -> bool {
        self.tracks[track].queue.len() >= self.recent.len()
    }

    /// The same without a bound: for who waits for what it submits.
    #[inline]
    pub(super) fn submit_to(&mut self, track: usize, op: Op) -> Result<Submitted, CudaError> {
        let op = match op {
            // Whoever can know of the recording comes after it.
            Op::Record(event, 0) => Op::Record(event, event.enter()),
            op => op,
        };
        if self.loose.any() {
            let others = self.unsettled_before(track);
            let own = &self.tracks[track];
            if own.held.is_some() || !own.queue.is_empty() {
                self.queue(track, op, others);
                return Ok(Submitted::Done);
            }
            if !others.is_empty() {
                self.hold(track, Until::Settled(others));
                self.queue(track, op, Vec::new());
                return Ok(Submitted::Done);
            }
        }
        self.place(track, op, true)
    }

    fn queue(&mut self, track: usize, op: Op, others: Vec<(usize, u64)>) {
        let track = &mut self.tracks[track];
        track.entered += 1;
        track.queue.push_back((op, others));
        self.queued += 1;
    }

    /// What the track's next operation comes after in the streams that its own is ordered with, as far as it has not
    /// been settled.
    fn unsettled_before(&self, index: usize) -> Vec<(usize, u64)> {
        let track = &self.tracks[index];
        let others: Vec<usize> = match track.kind {
            Kind::Alone => Vec::new(),
            Kind::Blocking => vec![self.groups[track.group].legacy],
            Kind::Legacy => (0..self.tracks.len())
                .filter(|&other| {
                    let theirs = &self.tracks[other];
                    theirs.group == track.group && theirs.kind == Kind::Blocking
                })
                .collect(),
        };
        others
            .into_iter()
            .map(|other| (other, self.tracks[other].entered))
            .filter(|&(other, entered)| self.tracks[other].settled() < entered)
            .collect()
    }

    fn hold(&mut self, track: usize, until: Until) {
        if self.tracks[track].held.replace(until).is_none() {
            self.loose.add();
        }
    }

    /// Where the track's next operation can begin at the earliest.
    #[inline]
    fn floor(&self, track: &Track) -> u64 {
        match track.kind {
            Kind::Alone => track.tail,
            Kind::Legacy => self.groups[track.group].tail,
            Kind::Blocking => track.tail.max(self.tracks[self.groups[track.group].legacy].tail),
        }
    }

    #[inline]
    fn set_tail(&mut self, index: usize, tail: u64) {
        let track = &mut self.tracks[index];
        track.tail = track.tail.max(tail);
        if track.kind != Kind::Alone {
            let group = &mut self.groups[track.group];
            group.tail = group.tail.max(tail);
        }
    }

    /// Places an operation that nothing holds. One that comes from the queue has entered before, and is never refused.
    #[inline]
    fn place(&mut self, track: usize, op: Op, entering: bool) -> Result<Submitted, CudaError> {
        if let Op::Kernel { duration, share } = op {
            if duration > 0 {
                if entering && let Some(oldest) = self.is_full()? {
                    return Ok(Submitted::Full(oldest, op));
                }
                let floor = self.floor(&self.tracks[track]);
                let end = self.kernel(floor, duration, share)?;
                self.remember(end);
                self.set_tail(track, end);
            }
            self.tracks[track].entered += u64::from(entering);
            return Ok(Submitted::Done);
        }
        self.place_other(track, op, entering)
    }

    /// Up to where the GPU must come before there is room for another launch; nothing if there is room.
    #[inline]
    fn is_full(&mut self) -> Result<Option<u64>, CudaError> {
        let oldest = self.recent[self.launches % self.recent.len()];
        let lane = self.lane.as_mut().ok_or(CudaError::INVALID_CONTEXT)?;
        Ok((oldest > lane.served() && oldest > lane.refresh()?).then_some(oldest))
    }

    #[inline]
    fn remember(&mut self, end: u64) {
        let depth = self.recent.len();
        self.recent[self.launches % depth] = end;
        self.launches += 1;
    }

    /// Gives a kernel its place; returns where it ends.
    #[inline]
    fn kernel(&mut self, floor: u64, duration: u64, share: u32) -> Result<u64, CudaError> {
        let lane = self.lane.as_mut().ok_or(CudaError::INVALID_CONTEXT)?;
        let submitted = lane.submitted();
        let start = if share >= FULL {
            self.beside.fill(submitted + duration);
            submitted
        } else {
            self.beside.find(lane.refresh()?, floor, submitted, duration, share)
        };
        let end = start + duration;
        if end > submitted {
            lane.extend(end)?;
        }
        Ok(end)
    }

    /// The position of something that takes no time at or after `floor`, but needs the GPU's turn.
    fn moment(&mut self, floor: u64) -> Result<u64, CudaError> {
        let lane = self.lane.as_mut().ok_or(CudaError::INVALID_CONTEXT)?;
        let start = if floor == lane.submitted() { floor } else { lane.refresh()?.max(floor) };
        // A nanosecond, which others' slices come before as they would before any work.
        if start + 1 > lane.submitted() {
            lane.extend(start + 1)?;
        }
        Ok(start + 1)
    }

    fn place_other(&mut self, index: usize, op: Op, entering: bool) -> Result<Submitted, CudaError> {
        if entering
            && let Op::Kernels(_) = op
            && let Some(oldest) = self.is_full()?
        {
            return Ok(Submitted::Full(oldest, op));
        }
        let floor = self.floor(&self.tracks[index]);
        let number = {
            let track = &mut self.tracks[index];
            track.entered += u64::from(entering);
            // The operation left the queue before it was placed.
            track.entered - track.queue.len() as u64
        };
        match op {
            Op::Kernel { .. } => {}
            Op::Kernels(nodes) => {
                let mut ends = Vec::with_capacity(nodes.len());
                for node in nodes.iter() {
                    let after = node.after.iter().filter_map(|&before| ends.get(before)).max();
                    let floor = after.copied().unwrap_or(floor);
                    let mut end = floor;
                    if node.duration > 0 {
                        end = self.kernel(floor, node.duration, node.share)?;
                        self.remember(end);
                    }
                    ends.push(end);
                }
                let end = ends.iter().copied().max().unwrap_or(floor);
                #[cfg(test)]
                self.traced.push(ends);
                self.set_tail(index, end);
            }
            Op::Record(event, ticket) => {
                let end = self.moment(floor)?;
                self.set_tail(index, end);
                let stamp = self.lane()?.mark(end);
                event.placed(ticket, end, stamp, index, number);
            }
            Op::Wait(event, ticket) => match event.position(ticket, self) {
                // Already over, or at a known place and with nothing of the host before it.
                Some(position) => self.set_tail(index, position.max(floor)),
                None => self.hold(index, Until::Event(event, ticket)),
            },
            Op::Until(condition) => {
                if !condition() {
                    self.hold(index, Until::True(condition));
                }
            }
            Op::Host(work) => return Ok(self.chore(index, floor, number, work, false)),
            Op::Call(work) => {
                self.hold(index, Until::Call);
                return Ok(self.chore(index, floor, number, work, true));
            }
        }
        Ok(Submitted::Done)
    }

    /// Whether the operation of that number in the track is settled.
    pub(super) fn is_settled(&self, track: usize, number: u64) -> bool {
        // A track that is not there has nothing to wait for.
        self.tracks.get(track).is_none_or(|track| track.settled() >= number)
    }

    /// The number of the last operation submitted to the track.
    pub(super) fn entered(&self, track: usize) -> u64 {
        self.tracks[track].entered
    }

    /// Whether everything submitted to the track is done.
    pub(super) fn is_idle(&mut self, track: usize) -> Result<bool, CudaError> {
        self.go_on();
        let floor = self.floor(&self.tracks[track]);
        let own = &self.tracks[track];
        let settled = own.settled() == own.entered
            && (own.kind != Kind::Legacy
                || !self.tracks.iter().any(|other| {
                    other.group == own.group
                        && other.kind == Kind::Blocking
                        && other.settled() < other.entered
                }));
        let lane = self.lane()?;
        lane.check()?;
        Ok(settled && (lane.served() >= floor || lane.refresh()? >= floor))
    }

    /// Tracks of a context.
    pub(super) fn tracks_of(&self, group: usize) -> Vec<usize> {
        (0..self.tracks.len())
            .filter(|&track| self.tracks[track].group == group && !self.free.contains(&track))
            .collect()
    }
}

impl Device {
    /// Submits a kernel that takes no time.
    #[inline]
    pub(super) fn submit_nothing(&'static self, track: usize) -> Result<(), CudaError> {
        // Nothing can wait for it: whatever comes after it comes after what is before it.
        if self.loose.any() { self.submit(track, Op::Kernel { duration: 0, share: FULL }) } else { Ok(()) }
    }

    /// Submits an operation to a stream's track, waiting for room where the queue is full.
    #[inline]
    pub(super) fn submit(&'static self, track: usize, op: Op) -> Result<(), CudaError> {
        let mut engine = self.engine();
        let mut submitted = engine.submit(track, op)?;
        loop {
            match submitted {
                Submitted::Done => {
                    if engine.loose.any() {
                        chores::wake(self, &mut engine);
                    }
                    return Ok(());
                }
                Submitted::Now(chore) => {
                    drop(engine);
                    chores::run(self, chore);
                    return Ok(());
                }
                Submitted::Crowded(op) => {
                    chores::wake(self, &mut engine);
                    self.help_until(engine, |engine| !engine.is_crowded(track))?;
                    engine = self.engine();
                    submitted = engine.submit(track, op)?;
                }
                Submitted::Full(position, op) => {
                    drop(engine);
                    self.wait_for(position)?;
                    engine = self.engine();
                    submitted = engine.submit(track, op)?;
                }
            }
        }
    }

    /// Waits until the GPU has come to `position`.
    pub(super) fn wait_for(&self, position: u64) -> Result<(), CudaError> {
        loop {
            let Some(instant) = self.engine().lane()?.not_before(position)? else { return Ok(()) };
            crate::state::wait_until(instant);
        }
    }
}

/// An instant somebody waits for, shared with who stamps it.
pub(super) type Stamp = Arc<AtomicU64>;
