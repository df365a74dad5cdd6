//! Executes the work of one process on one GPU.
//!
//! Every stream has a *timeline* of operations. An operation that takes GPU time gets its position in service time
//! when it is submitted (see [`timeline`](crate::state)), so a launch costs a few additions. Work that the host does
//! in stream order (copies, callbacks) is a *host task*: it runs when the GPU has reached its position, on a thread
//! that waits for it or on the driver's worker thread. While the position is unknown, because a callback or another
//! GPU comes first, the timeline is *blocked* and later operations wait in its queue.

mod card_thread;
mod concurrent_kernels;
mod copy_engines;
mod host_tasks;
mod peer_kernels;
mod word_writes;

use super::CudaError;
use super::device::Device;
use super::event::Event;
use super::stream::{MemoryWord, WordCondition};
use crate::state::GpuLane;
use card_thread::CardThread;
use concurrent_kernels::ConcurrentKernels;
use copy_engines::CopyEngines;
pub(super) use copy_engines::{CopyDirection, CopyLink, CopyTime};
pub(super) use host_tasks::HostTask;
pub(super) use peer_kernels::PeerKernel;
use peer_kernels::SpinningKernel;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use word_writes::WordWrites;
pub(super) use word_writes::{has_pending_writes, store_words_at_exit, wait_for_stores};

/// The share of a kernel that occupies the whole GPU.
pub(super) const FULL_GPU_SHARE: u32 = 1 << 16;

/// Work that the host does in stream order.
pub(super) type HostClosure = Box<dyn FnOnce() + Send>;

/// An operation submitted to a stream.
pub(super) enum StreamOp {
    /// Takes GPU time in nanoseconds and a share of the GPU.
    Kernel { duration: u64, share: u32 },
    /// Records an event: the recording with this ticket, or for zero a new one that starts at submission.
    RecordEvent(&'static Event, u64),
    /// Runs driver work on memory in stream order.
    HostWork(HostClosure),
    /// Runs a copy or fill that occupies a copy engine.
    Copy(CopyTime, HostClosure),
    /// Calls a function of the program. The stream continues after it has returned.
    Callback(HostClosure),
    /// Blocks the stream until this recording of the event is complete.
    WaitEvent(&'static Event, u64),
    /// Blocks the stream until the word meets the condition.
    WaitWord(WordCondition),
    /// Writes a word into memory.
    WriteWord(MemoryWord, u64),
    /// Runs kernels that depend on each other.
    GraphKernels(Arc<[GraphKernel]>),
    /// Runs a kernel that spins until its peers have begun.
    PeerKernel(PeerKernel),
}

/// A kernel of a graph: duration, share of the GPU, and the indices of the earlier kernels it depends on.
pub(super) struct GraphKernel {
    pub(super) duration: u64,
    pub(super) share: u32,
    pub(super) dependencies: Vec<usize>,
}

/// What a timeline waits for before its queue can continue.
enum BlockedOn {
    Event(&'static Event, u64),
    /// Operations of other timelines, up to these numbers.
    Operations(Vec<(usize, u64)>),
    /// A value in memory, which counts from this position on.
    Word(u64, WordCondition),
    /// A function of the program that has not returned.
    Callback,
    /// A copy whose bytes have not been moved.
    Copy(CopyTime),
    /// An instant, at which a copy ends.
    Until(u64),
    /// The peers of a kernel, which have not begun.
    Peers,
    /// A spinning kernel of another stream that fills the GPU.
    FilledGpu,
}

/// A host task that is not done.
pub(super) struct PendingTask {
    /// The number of its operation in the timeline.
    number: u64,
    /// Its key in `host_tasks`; `None` while a thread runs it.
    key: Option<(u64, u64)>,
}

/// The operations of one stream.
#[derive(Default)]
pub(super) struct StreamTimeline {
    group: usize,
    kind: StreamKind,
    /// The priority of the stream; lower numbers come first.
    priority: i32,
    /// The position in service time at which its last operation ends.
    tail: u64,
    /// Number of operations submitted so far.
    op_count: u64,
    /// Host tasks that are not done, in order.
    pending_tasks: VecDeque<PendingTask>,
    blocked_on: Option<BlockedOn>,
    /// Operations that wait, each with the operations of other timelines that it depends on.
    queue: VecDeque<(StreamOp, Vec<(usize, u64)>)>,
    closing: bool,
}

/// How a stream is ordered relative to the other streams of its context.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum StreamKind {
    /// The legacy default stream, ordered before and after all blocking streams.
    #[default]
    Legacy,
    /// An ordinary stream, ordered with the legacy default stream.
    Blocking,
    /// A stream that is not ordered with the legacy default stream.
    NonBlocking,
}

impl StreamTimeline {
    /// Returns the number of the last settled operation: it is placed, not blocked, and its host task is done.
    fn settled(&self) -> u64 {
        let placed = self.op_count - self.queue.len() as u64;
        let free = match self.blocked_on {
            // The last placed operation is the one that blocks.
            Some(
                BlockedOn::Event(..)
                | BlockedOn::Word(..)
                | BlockedOn::Peers
                | BlockedOn::Copy(_)
                | BlockedOn::Until(_),
            ) => placed - 1,
            Some(BlockedOn::Operations(_) | BlockedOn::Callback | BlockedOn::FilledGpu) | None => placed,
        };
        self.pending_tasks.front().map_or(free, |first| free.min(first.number - 1))
    }
}

/// The streams of one context.
#[derive(Clone, Copy, Default)]
struct StreamGroup {
    legacy: usize,
    /// Whether the context is being destroyed.
    closing: bool,
    /// The latest end of the legacy stream and the blocking streams.
    tail: u64,
}

/// The work of this process on one GPU.
pub(super) struct ExecutionEngine {
    lane: Option<GpuLane>,
    /// The device that owns the engine, once the lane is open.
    device: Option<&'static Device>,
    timelines: Vec<StreamTimeline>,
    free: Vec<usize>,
    groups: Vec<StreamGroup>,
    free_groups: Vec<usize>,
    /// Ends of the most recent launches, as a ring. When it is full, a launch must wait for the oldest.
    recent_ends: Vec<u64>,
    launches: usize,
    concurrent: ConcurrentKernels,
    host_tasks: BTreeMap<(u64, u64), HostTask>,
    next_task: u64,
    word_writes: WordWrites,
    spinning: Vec<SpinningKernel>,
    /// Whether a stream had another priority than the default.
    has_priorities: bool,
    copy_engines: CopyEngines,
    card_thread: CardThread,
    /// Timelines that are blocked or have host tasks. While there are none, streams are independent of each other.
    unsettled: Arc<UnsettledCount>,
    /// Number of operations in the queues of all timelines.
    queued: usize,
    worker: bool,
    /// Where the kernels of each [`StreamOp::GraphKernels`] ended.
    #[cfg(test)]
    pub(super) kernel_ends: Vec<Vec<u64>>,
}

/// Counts timelines that are blocked or have host tasks. Modified only under the engine's lock; a read without the
/// lock is as current as one just before locking.
#[derive(Default)]
pub(super) struct UnsettledCount(AtomicUsize);

impl UnsettledCount {
    #[inline]
    pub(super) fn any(&self) -> bool {
        self.count() > 0
    }

    #[inline]
    fn count(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }

    fn add(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }

    fn remove(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// The result of a submission.
pub(super) enum SubmitOutcome {
    /// The operation is placed or queued.
    Accepted,
    /// Nothing precedes this host task: the submitter must run it.
    RunNow(HostTask),
    /// The launch queue is full: submit again when the GPU has reached this position.
    LaunchQueueFull(u64, StreamOp),
    /// The stream is blocked and its queue is full: submit again when it has advanced.
    StreamQueueFull(StreamOp),
}

impl ExecutionEngine {
    pub(super) fn new(depth: usize) -> Self {
        Self {
            lane: None,
            device: None,
            timelines: Vec::new(),
            free: Vec::new(),
            groups: Vec::new(),
            free_groups: Vec::new(),
            recent_ends: vec![0; depth.clamp(2, 1 << 20)],
            launches: 0,
            concurrent: ConcurrentKernels::default(),
            host_tasks: BTreeMap::new(),
            next_task: 0,
            word_writes: WordWrites::default(),
            spinning: Vec::new(),
            has_priorities: false,
            copy_engines: CopyEngines::default(),
            card_thread: CardThread::default(),
            unsettled: Arc::default(),
            queued: 0,
            worker: false,
            #[cfg(test)]
            kernel_ends: Vec::new(),
        }
    }

    /// Opens the GPU lane, for the process's first context on the GPU.
    pub(super) fn open(&mut self, device: &'static Device) -> Result<(), CudaError> {
        if let Some(lane) = &self.lane {
            return Ok(lane.check()?);
        }
        let (state, gpu) = (&device.state, device.gpu);
        state.reserve_lane(gpu).map_err(|_| CudaError::OUT_OF_MEMORY)?;
        self.lane = Some(GpuLane::open(Arc::clone(state), gpu)?);
        self.device = Some(device);
        Ok(())
    }

    pub(super) fn lane(&mut self) -> Result<&mut GpuLane, CudaError> {
        self.lane.as_mut().ok_or(CudaError::INVALID_CONTEXT)
    }

    /// Returns the counter that the device reads without the lock.
    pub(super) fn unsettled(&self) -> Arc<UnsettledCount> {
        Arc::clone(&self.unsettled)
    }

    /// Returns the index of the GPU.
    pub(super) fn gpu(&self) -> Option<usize> {
        self.lane.as_ref().map(GpuLane::gpu)
    }

    /// Opens the streams of a context; returns the group and the timeline of its legacy stream.
    pub(super) fn open_group(&mut self) -> (usize, usize) {
        let group = self.free_groups.pop().unwrap_or_else(|| {
            self.groups.push(StreamGroup::default());
            self.groups.len() - 1
        });
        let legacy = self.open_timeline(group, StreamKind::Legacy);
        self.groups[group].legacy = legacy;
        self.groups[group].closing = false;
        (group, legacy)
    }

    /// Closes the streams of a context, including its default stream.
    pub(super) fn close_group(&mut self, group: usize) {
        self.free_groups.push(group);
    }

    /// Opens the timeline of a stream.
    pub(super) fn open_timeline(&mut self, group: usize, kind: StreamKind) -> usize {
        self.free_closed_timelines();
        let timeline = self.free.pop().unwrap_or_else(|| {
            self.timelines.push(StreamTimeline::default());
            self.timelines.len() - 1
        });
        let before = &self.timelines[timeline];
        // Numbering continues: an event recorded in the slot's previous timeline stays settled.
        let (op_count, tail) = (before.op_count, before.tail);
        self.timelines[timeline] =
            StreamTimeline { group, kind, tail, op_count, ..StreamTimeline::default() };
        timeline
    }

    /// Sets the priority of a stream: lower numbers come first among operations that wait in queues.
    pub(super) fn set_priority(&mut self, timeline: usize, priority: i32) {
        self.timelines[timeline].priority = priority;
        self.has_priorities |= priority != 0;
    }

    /// Returns the timelines in the order in which their queues continue.
    fn by_priority(&self) -> Vec<usize> {
        let mut all: Vec<usize> = (0..self.timelines.len()).collect();
        if self.has_priorities {
            all.sort_by_key(|&index| self.timelines[index].priority);
        }
        all
    }

    /// Closes a timeline as soon as its work is done.
    pub(super) fn close_timeline(&mut self, timeline: usize) {
        self.timelines[timeline].closing = true;
        self.free_closed_timelines();
    }

    fn free_closed_timelines(&mut self) {
        if !self.timelines.iter().any(|timeline| timeline.closing) {
            return;
        }
        let served = self.lane.as_mut().map_or(u64::MAX, |lane| lane.refresh().unwrap_or(u64::MAX));
        self.store_reached_words();
        for (index, timeline) in self.timelines.iter_mut().enumerate() {
            if timeline.closing && timeline.tail <= served && timeline.settled() == timeline.op_count {
                timeline.closing = false;
                self.free.push(index);
            }
        }
    }

    /// Submits an operation, unless the stream's queue is full.
    #[inline]
    pub(super) fn submit(&mut self, timeline: usize, op: StreamOp) -> Result<SubmitOutcome, CudaError> {
        if self.queued > 0 && self.is_queue_full(timeline) {
            return Ok(SubmitOutcome::StreamQueueFull(op));
        }
        self.submit_unbounded(timeline, op)
    }

    /// Returns whether the timeline's queue is full.
    pub(super) fn is_queue_full(&self, timeline: usize) -> bool {
        self.timelines[timeline].queue.len() >= self.recent_ends.len()
    }

    /// Submits an operation without a bound on the queue, for callers that wait for it.
    #[inline]
    pub(super) fn submit_unbounded(
        &mut self,
        timeline: usize,
        op: StreamOp,
    ) -> Result<SubmitOutcome, CudaError> {
        let op = match op {
            // The recording starts at submission, so that later waits refer to it.
            StreamOp::RecordEvent(event, 0) => StreamOp::RecordEvent(event, event.start_recording()),
            op => op,
        };
        if self.unsettled.any() {
            let others = self.unsettled_before(timeline);
            let own = &self.timelines[timeline];
            if own.blocked_on.is_some() || !own.queue.is_empty() {
                self.queue(timeline, op, others);
                return Ok(SubmitOutcome::Accepted);
            }
            if !others.is_empty() {
                self.block_on(timeline, BlockedOn::Operations(others));
                self.queue(timeline, op, Vec::new());
                return Ok(SubmitOutcome::Accepted);
            }
            if op.is_kernel() && self.is_gpu_filled_by_spin() {
                self.block_on(timeline, BlockedOn::FilledGpu);
                self.queue(timeline, op, Vec::new());
                return Ok(SubmitOutcome::Accepted);
            }
        }
        self.place(timeline, op, true)
    }

    fn queue(&mut self, timeline: usize, op: StreamOp, others: Vec<(usize, u64)>) {
        let timeline = &mut self.timelines[timeline];
        timeline.op_count += 1;
        timeline.queue.push_back((op, others));
        self.queued += 1;
    }

    /// Returns the unsettled operations of other streams that the timeline's next operation must follow.
    fn unsettled_before(&self, index: usize) -> Vec<(usize, u64)> {
        let timeline = &self.timelines[index];
        let others: Vec<usize> = match timeline.kind {
            StreamKind::NonBlocking => Vec::new(),
            StreamKind::Blocking => vec![self.groups[timeline.group].legacy],
            StreamKind::Legacy => (0..self.timelines.len())
                .filter(|&other| {
                    let theirs = &self.timelines[other];
                    theirs.group == timeline.group && theirs.kind == StreamKind::Blocking
                })
                .collect(),
        };
        others
            .into_iter()
            .map(|other| (other, self.timelines[other].op_count))
            .filter(|&(other, op_count)| self.timelines[other].settled() < op_count)
            .collect()
    }

    fn block_on(&mut self, timeline: usize, until: BlockedOn) {
        if self.timelines[timeline].blocked_on.replace(until).is_none() {
            self.unsettled.add();
        }
    }

    /// Returns the earliest position at which the timeline's next operation can start.
    #[inline]
    fn earliest(&self, timeline: &StreamTimeline) -> u64 {
        match timeline.kind {
            StreamKind::NonBlocking => timeline.tail,
            StreamKind::Legacy => self.groups[timeline.group].tail,
            StreamKind::Blocking => {
                timeline.tail.max(self.timelines[self.groups[timeline.group].legacy].tail)
            }
        }
    }

    #[inline]
    fn extend_tail(&mut self, index: usize, tail: u64) {
        let timeline = &mut self.timelines[index];
        timeline.tail = timeline.tail.max(tail);
        if timeline.kind != StreamKind::NonBlocking {
            let group = &mut self.groups[timeline.group];
            group.tail = group.tail.max(tail);
        }
    }

    /// Places an operation that is not blocked. An operation from the queue (`is_new` is false) was counted before
    /// and is never rejected.
    #[inline]
    fn place(&mut self, timeline: usize, op: StreamOp, is_new: bool) -> Result<SubmitOutcome, CudaError> {
        if let StreamOp::Kernel { duration, share } = op {
            if duration > 0 {
                if is_new && let Some(oldest) = self.launch_queue_full_until()? {
                    return Ok(SubmitOutcome::LaunchQueueFull(oldest, op));
                }
                let earliest = self.earliest(&self.timelines[timeline]);
                let end = self.place_kernel(earliest, duration, share)?;
                self.record_launch(end);
                self.extend_tail(timeline, end);
            }
            self.timelines[timeline].op_count += u64::from(is_new);
            return Ok(SubmitOutcome::Accepted);
        }
        self.place_non_kernel(timeline, op, is_new)
    }

    /// Returns the position that the GPU must reach before the next launch fits, or `None` if it fits now.
    #[inline]
    fn launch_queue_full_until(&mut self) -> Result<Option<u64>, CudaError> {
        let oldest = self.recent_ends[self.launches % self.recent_ends.len()];
        let lane = self.lane.as_mut().ok_or(CudaError::INVALID_CONTEXT)?;
        Ok((oldest > lane.served() && oldest > lane.refresh()?).then_some(oldest))
    }

    #[inline]
    fn record_launch(&mut self, end: u64) {
        let depth = self.recent_ends.len();
        self.recent_ends[self.launches % depth] = end;
        self.launches += 1;
    }

    /// Places a kernel and returns the position at which it ends.
    #[inline]
    fn place_kernel(&mut self, earliest: u64, duration: u64, share: u32) -> Result<u64, CudaError> {
        let lane = self.lane.as_mut().ok_or(CudaError::INVALID_CONTEXT)?;
        let submitted = lane.submitted();
        let start = if share >= FULL_GPU_SHARE {
            self.concurrent.set_exclusive_until(submitted + duration);
            submitted
        } else {
            self.concurrent.place(lane.refresh()?, earliest, submitted, duration, share)
        };
        let end = start + duration;
        if end > submitted {
            lane.extend(end)?;
        }
        Ok(end)
    }

    /// Places an operation that takes no time but needs the GPU's turn; returns its position, at or after `earliest`.
    fn place_marker(&mut self, earliest: u64) -> Result<u64, CudaError> {
        let lane = self.lane.as_mut().ok_or(CudaError::INVALID_CONTEXT)?;
        let start = if earliest == lane.submitted() { earliest } else { lane.refresh()?.max(earliest) };
        // One nanosecond, so that time slices of other processes precede it as they would precede any work.
        if start + 1 > lane.submitted() {
            lane.extend(start + 1)?;
        }
        Ok(start + 1)
    }

    fn place_non_kernel(
        &mut self,
        index: usize,
        op: StreamOp,
        is_new: bool,
    ) -> Result<SubmitOutcome, CudaError> {
        if is_new
            && let StreamOp::GraphKernels(_) | StreamOp::PeerKernel(_) = op
            && let Some(oldest) = self.launch_queue_full_until()?
        {
            return Ok(SubmitOutcome::LaunchQueueFull(oldest, op));
        }
        if is_new && let StreamOp::WriteWord(..) = op {
            self.store_reached_words();
            if self.word_writes.len() >= self.recent_ends.len()
                && let Some(oldest) = self.word_writes.first_position()
            {
                return Ok(SubmitOutcome::LaunchQueueFull(oldest, op));
            }
        }
        let earliest = self.earliest(&self.timelines[index]);
        let number = {
            let timeline = &mut self.timelines[index];
            timeline.op_count += u64::from(is_new);
            // An operation from the queue was removed from it before it was placed.
            timeline.op_count - timeline.queue.len() as u64
        };
        match op {
            StreamOp::Kernel { .. } => {}
            StreamOp::PeerKernel(kernel) => self.place_peer_kernel(index, earliest, kernel)?,
            StreamOp::GraphKernels(nodes) => {
                let mut ends = Vec::with_capacity(nodes.len());
                for node in nodes.iter() {
                    let latest = node.dependencies.iter().filter_map(|&index| ends.get(index)).max();
                    let earliest = latest.copied().unwrap_or(earliest);
                    let mut end = earliest;
                    if node.duration > 0 {
                        end = self.place_kernel(earliest, node.duration, node.share)?;
                        self.record_launch(end);
                    }
                    ends.push(end);
                }
                let end = ends.iter().copied().max().unwrap_or(earliest);
                #[cfg(test)]
                self.kernel_ends.push(ends);
                self.extend_tail(index, end);
            }
            StreamOp::RecordEvent(event, ticket) => {
                let end = self.place_marker(earliest)?;
                self.extend_tail(index, end);
                let stamp = self.lane()?.mark(end);
                event.set_placed(ticket, end, stamp, index, number);
            }
            StreamOp::WaitEvent(event, ticket) => match event.position(ticket, self) {
                // Complete, or at a known position with no host work before it.
                Some(position) => self.extend_tail(index, position.max(earliest)),
                None => self.block_on(index, BlockedOn::Event(event, ticket)),
            },
            StreamOp::WaitWord(condition) => {
                // A word that meets the condition now is assumed to meet it later, unless a stream will write it.
                self.store_reached_words();
                if self.word_writes.will_change(condition.word()) || !condition.is_met() {
                    self.block_on(index, BlockedOn::Word(earliest, condition));
                }
            }
            StreamOp::WriteWord(word, value) => {
                let own = &self.timelines[index];
                if let (false, Some(device)) = (own.pending_tasks.is_empty(), self.device) {
                    let work = move || {
                        // No memory is unmapped while the engine is locked.
                        let _engine = device.engine();
                        word.store_if_mapped(value);
                    };
                    return Ok(self.schedule_host_task(index, earliest, number, Box::new(work), false));
                }
                let end = self.place_marker(earliest)?;
                self.extend_tail(index, end);
                self.add_word_write(end, word, value)?;
            }
            StreamOp::HostWork(work) => {
                return Ok(self.schedule_host_task(index, earliest, number, work, false));
            }
            StreamOp::Copy(time, work) => {
                self.block_on(index, BlockedOn::Copy(time));
                return Ok(self.schedule_host_task(index, earliest, number, work, false));
            }
            StreamOp::Callback(work) => {
                self.block_on(index, BlockedOn::Callback);
                return Ok(self.schedule_host_task(index, earliest, number, work, true));
            }
        }
        Ok(SubmitOutcome::Accepted)
    }

    /// Returns whether the timeline's operation with this number is settled.
    pub(super) fn is_settled(&self, timeline: usize, number: u64) -> bool {
        // A timeline that does not exist has nothing to wait for.
        self.timelines.get(timeline).is_none_or(|timeline| timeline.settled() >= number)
    }

    /// Returns the number of the last operation submitted to the timeline.
    pub(super) fn last_op(&self, timeline: usize) -> u64 {
        self.timelines[timeline].op_count
    }

    /// Returns whether everything submitted to the timeline is done.
    pub(super) fn is_idle(&mut self, timeline: usize) -> Result<bool, CudaError> {
        self.advance();
        let earliest = self.earliest(&self.timelines[timeline]);
        let own = &self.timelines[timeline];
        let settled = own.settled() == own.op_count
            && (own.kind != StreamKind::Legacy
                || !self.timelines.iter().any(|other| {
                    other.group == own.group
                        && other.kind == StreamKind::Blocking
                        && other.settled() < other.op_count
                }));
        let lane = self.lane()?;
        lane.check()?;
        let idle = settled && (lane.served() >= earliest || lane.refresh()? >= earliest);
        self.store_reached_words();
        Ok(idle)
    }

    /// Returns the open timelines of a context.
    pub(super) fn timelines_of(&self, group: usize) -> Vec<usize> {
        (0..self.timelines.len())
            .filter(|&timeline| self.timelines[timeline].group == group && !self.free.contains(&timeline))
            .collect()
    }
}

impl Device {
    /// Submits a kernel that takes no time.
    #[inline]
    pub(super) fn submit_empty_kernel(&'static self, timeline: usize) -> Result<(), CudaError> {
        // Without unsettled timelines it can be skipped: later operations follow what precedes it anyway.
        if self.unsettled.any() {
            self.submit(timeline, StreamOp::Kernel { duration: 0, share: FULL_GPU_SHARE })
        } else {
            Ok(())
        }
    }

    /// Submits an operation to a stream's timeline, waiting while the queue is full.
    #[inline]
    pub(super) fn submit(&'static self, timeline: usize, op: StreamOp) -> Result<(), CudaError> {
        let mut engine = self.engine();
        let mut submitted = engine.submit(timeline, op)?;
        loop {
            match submitted {
                SubmitOutcome::Accepted => {
                    if engine.unsettled.any() {
                        host_tasks::wake_worker(self, &mut engine);
                    }
                    return Ok(());
                }
                SubmitOutcome::RunNow(host_task) => {
                    drop(engine);
                    host_tasks::run_task(self, host_task);
                    return Ok(());
                }
                SubmitOutcome::StreamQueueFull(op) => {
                    host_tasks::wake_worker(self, &mut engine);
                    self.run_tasks_until(engine, |engine| !engine.is_queue_full(timeline))?;
                    engine = self.engine();
                    submitted = engine.submit(timeline, op)?;
                }
                SubmitOutcome::LaunchQueueFull(position, op) => {
                    drop(engine);
                    self.wait_for_position(position)?;
                    engine = self.engine();
                    submitted = engine.submit(timeline, op)?;
                }
            }
        }
    }

    /// Waits until the GPU has reached `position`.
    pub(super) fn wait_for_position(&self, position: u64) -> Result<(), CudaError> {
        loop {
            let mut engine = self.engine();
            let instant = engine.lane()?.not_before(position)?;
            engine.store_reached_words();
            drop(engine);
            let Some(instant) = instant else { return Ok(()) };
            crate::state::wait_until(instant);
        }
    }
}

/// A wall-clock timestamp that is zero until the GPU reaches the marked position.
pub(super) type SharedTimestamp = Arc<AtomicU64>;
