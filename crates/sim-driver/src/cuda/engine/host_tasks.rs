//! Host work in stream order: scheduling, execution, and the threads that wait for it.

use super::super::device::Device;
use super::super::entry;
use super::super::{CudaError, pools};
use super::{BlockedOn, ExecutionEngine, HostClosure, PendingTask, StreamOp, StreamTimeline, SubmitOutcome};
use crate::state::now;
use std::panic::AssertUnwindSafe;
use std::sync::MutexGuard;
use std::time::Duration;

/// How often a waiting thread checks for changes that are not signaled.
const RECHECK_INTERVAL: Duration = Duration::from_millis(5);

/// Interval in nanoseconds between checks of another GPU or of a value in memory.
const POLL_NANOS: u64 = 50_000;

/// Host work at a position of a stream.
pub(in super::super) struct HostTask {
    timeline: usize,
    number: u64,
    work: Option<HostClosure>,
    /// Whether it is a function of the program, which runs only on the driver's worker thread.
    is_callback: bool,
}

impl ExecutionEngine {
    /// Schedules a host task at a position; the caller must run it if nothing precedes it.
    pub(super) fn schedule_host_task(
        &mut self,
        timeline: usize,
        position: u64,
        number: u64,
        work: HostClosure,
        is_callback: bool,
    ) -> SubmitOutcome {
        let host_task = HostTask { timeline, number, work: Some(work), is_callback };
        let alone = self.timelines[timeline].pending_tasks.is_empty();
        if alone {
            self.unsettled.add();
        }
        self.timelines[timeline].pending_tasks.push_back(PendingTask { number, key: None });
        let reached = self.lane.as_mut().is_none_or(|lane| {
            lane.served() >= position || lane.refresh().is_ok_and(|served| served >= position)
        });
        // The task may read words that its stream has written before.
        self.store_reached_words();
        if alone && reached && !is_callback {
            return SubmitOutcome::RunNow(host_task);
        }
        self.defer_task(position, host_task);
        SubmitOutcome::Accepted
    }

    /// Queues a task until the GPU has reached the position.
    fn defer_task(&mut self, position: u64, host_task: HostTask) {
        let key = (position, self.next_task);
        self.next_task += 1;
        if let Some(own) = self.timelines[host_task.timeline].pending_tasks.back_mut() {
            own.key = Some(key);
        }
        self.host_tasks.insert(key, host_task);
    }

    /// Marks a task as done that started at an instant, and advances what waited for it.
    fn finish_task(&mut self, timeline: usize, number: u64, is_callback: bool, started: u64) {
        let own = &mut self.timelines[timeline];
        // It is the first one: tasks of a timeline run one after the other.
        if own.pending_tasks.front().is_some_and(|first| first.number == number) {
            own.pending_tasks.pop_front();
        }
        if own.pending_tasks.is_empty() {
            self.unsettled.remove();
        }
        if is_callback && matches!(own.blocked_on, Some(BlockedOn::Callback)) {
            own.blocked_on = None;
            self.unsettled.remove();
        }
        self.finish_copy(timeline, started);
        self.advance();
    }

    /// Advances every timeline that is no longer blocked.
    pub(super) fn advance(&mut self) {
        if !self.unsettled.any() && self.queued == 0 {
            return;
        }
        self.advance_spinning();
        let order = self.by_priority();
        loop {
            let mut moved = false;
            // All at first: a stream of a higher priority may wait for the same as one of a lower.
            for &index in &order {
                if self.is_unblocked(index) && self.timelines[index].blocked_on.take().is_some() {
                    self.unsettled.remove();
                    moved = true;
                }
            }
            for &index in &order {
                moved |= self.place_queued(index);
            }
            if !moved {
                return;
            }
        }
    }

    fn is_unblocked(&mut self, index: usize) -> bool {
        // Removed during the check, because the event may need the engine.
        let Some(until) = self.timelines[index].blocked_on.take() else { return false };
        let released = match &until {
            BlockedOn::Callback | BlockedOn::Peers | BlockedOn::Copy(_) => false,
            BlockedOn::Until(instant) => now() >= *instant,
            BlockedOn::FilledGpu => !self.is_gpu_filled_by_spin(),
            BlockedOn::Word(position, condition) => {
                let position = *position;
                let reached = self.lane.as_mut().is_none_or(|lane| {
                    // On a lost GPU, waiting threads get the error when they check the lane.
                    lane.served() >= position || lane.refresh().is_ok_and(|served| served >= position)
                });
                self.store_reached_words();
                reached && condition.is_met()
            }
            BlockedOn::Operations(others) => {
                others.iter().all(|&(timeline, number)| self.timelines[timeline].settled() >= number)
            }
            BlockedOn::Event(event, ticket) => match event.position(*ticket, self) {
                // The event is on this GPU: later operations can be placed after it now.
                Some(position) => {
                    self.extend_tail(index, position);
                    true
                }
                None => event.is_complete(*ticket, Some(self)),
            },
        };
        self.timelines[index].blocked_on = Some(until);
        released
    }

    /// Places queued operations of the timeline until one blocks; returns whether any was placed.
    fn place_queued(&mut self, index: usize) -> bool {
        let mut moved = false;
        while self.timelines[index].blocked_on.is_none() {
            let Some((op, mut others)) = self.timelines[index].queue.pop_front() else { break };
            others.retain(|&(timeline, number)| self.timelines[timeline].settled() < number);
            if !others.is_empty() {
                self.timelines[index].queue.push_front((op, Vec::new()));
                self.block_on(index, BlockedOn::Operations(others));
                break;
            }
            if op.is_kernel() && self.is_gpu_filled_by_spin() {
                self.timelines[index].queue.push_front((op, others));
                self.block_on(index, BlockedOn::FilledGpu);
                break;
            }
            self.queued -= 1;
            moved = true;
            // If the GPU is lost, threads that wait get the error when they check the lane.
            if let Ok(SubmitOutcome::RunNow(host_task)) = self.place(index, op, false) {
                // No thread can run it here: it is the first task of its timeline, and the next thread that looks
                // runs it.
                self.defer_task(0, host_task);
            }
        }
        moved
    }

    /// Removes a task that can run now; with `include_callbacks`, functions of the program are included.
    fn take_ready_task(&mut self, include_callbacks: bool) -> Option<HostTask> {
        let served = match self.lane.as_mut().map(|lane| lane.refresh()) {
            Some(Ok(served)) => served,
            // The GPU serves nothing more: tasks complete without running, so that no thread waits for them.
            Some(Err(_)) | None => u64::MAX,
        };
        self.store_reached_words();
        let first = |timeline: &StreamTimeline| timeline.pending_tasks.front().and_then(|first| first.key);
        let can_be_done = |key: &(u64, u64)| {
            key.0 <= served
                && self
                    .host_tasks
                    .get(key)
                    .is_some_and(|host_task| include_callbacks || !host_task.is_callback)
        };
        let key = self.timelines.iter().filter_map(first).filter(can_be_done).min()?;
        self.host_tasks.remove(&key)
    }

    /// Returns when to check the next task or condition, or `None` if there is nothing to check.
    fn next_poll(&mut self) -> Option<u64> {
        let first = self.host_tasks.keys().next().map(|&(position, _)| position);
        let host_task =
            first.map(|position| match self.lane.as_mut().map(|lane| lane.not_before(position)) {
                Some(Ok(Some(instant))) => instant,
                // The task is due; another thread runs the one before it.
                _ => now() + POLL_NANOS,
            });
        let polled = self
            .timelines
            .iter()
            .any(|timeline| matches!(timeline.blocked_on, Some(BlockedOn::Word(..) | BlockedOn::Event(..))));
        [host_task, polled.then(|| now() + POLL_NANOS), self.next_copy_end()].into_iter().flatten().min()
    }
}

/// Runs a task, unless the GPU is lost, and completes it.
pub(super) fn run_task(device: &'static Device, mut host_task: HostTask) {
    let started = now();
    if let Some(work) = host_task.work.take()
        && !device.state.is_lost(device.gpu)
    {
        // A panic in the task must not leave other threads waiting.
        let _ = std::panic::catch_unwind(AssertUnwindSafe(work));
    }
    let mut engine = device.engine();
    engine.finish_task(host_task.timeline, host_task.number, host_task.is_callback, started);
    drop(engine);
    device.work_changed.notify_all();
}

/// Starts the driver's worker thread if necessary and wakes it.
pub(super) fn wake_worker(device: &'static Device, engine: &mut ExecutionEngine) {
    if !engine.worker {
        let thread = std::thread::Builder::new().name("cuda-EvtHandlr".into());
        engine.worker = spawn_without_signals(|| thread.spawn(move || worker_main(device)).is_ok());
    }
    device.work_changed.notify_all();
}

/// Spawns a thread that blocks all signals: they are for the program's own threads.
pub(super) fn spawn_without_signals(spawn: impl FnOnce() -> bool) -> bool {
    // SAFETY: `sigset_t` is a C struct of integers, for which zero is valid.
    let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = unsafe { std::mem::zeroed() };
    // SAFETY: the argument is a valid signal set.
    unsafe { libc::sigfillset(&mut all) };
    // SAFETY: both sets outlive the call; the thread's mask is restored below.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before) };
    let spawned = spawn();
    // SAFETY: `before` was filled by the call above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    spawned
}

/// The driver's worker thread: runs host tasks as the GPU reaches them.
fn worker_main(device: &'static Device) {
    entry::mark_driver_thread();
    // No other thread runs functions of the program, so the worker must survive panics.
    while std::panic::catch_unwind(AssertUnwindSafe(|| worker_loop(device))).is_err() {}
}

fn worker_loop(device: &'static Device) {
    let mut engine = device.engine();
    loop {
        engine.advance();
        if let Some(host_task) = engine.take_ready_task(true) {
            drop(engine);
            run_task(device, host_task);
            engine = device.engine();
            continue;
        }
        engine = wait_for_work(device, engine);
    }
}

/// Waits until there may be a task to run.
fn wait_for_work<'a>(
    device: &'static Device,
    mut engine: MutexGuard<'a, ExecutionEngine>,
) -> MutexGuard<'a, ExecutionEngine> {
    match engine.next_poll() {
        Some(instant) => {
            let wait = Duration::from_nanos(instant.saturating_sub(now()).max(1));
            match device.work_changed.wait_timeout(engine, wait) {
                Ok((engine, _)) => engine,
                Err(poisoned) => poisoned.into_inner().0,
            }
        }
        None => device.work_changed.wait(engine).unwrap_or_else(|poisoned| poisoned.into_inner()),
    }
}

impl Device {
    /// Waits until everything submitted to the timeline so far is done.
    pub(in super::super) fn sync(&'static self, timeline: usize) -> Result<(), CudaError> {
        entry::ensure_not_driver_thread()?;
        let mut engine = self.engine();
        engine.lane()?.check()?;
        let submitted = engine.submit_unbounded(timeline, StreamOp::HostWork(Box::new(|| ())))?;
        let number = engine.last_op(timeline);
        if let SubmitOutcome::RunNow(host_task) = submitted {
            engine.finish_task(host_task.timeline, host_task.number, false, now());
            engine.store_reached_words();
            drop(engine);
            self.work_changed.notify_all();
        } else {
            self.run_tasks_until(engine, |engine| engine.is_settled(timeline, number))?;
        }
        pools::trim_after_sync(self);
        Ok(())
    }

    /// Runs due host tasks and waits until `done` returns true.
    pub(in super::super) fn run_tasks_until<'a>(
        &'static self,
        mut engine: MutexGuard<'a, ExecutionEngine>,
        mut done: impl FnMut(&mut ExecutionEngine) -> bool,
    ) -> Result<(), CudaError> {
        entry::ensure_not_driver_thread()?;
        loop {
            engine.advance();
            if done(&mut engine) {
                engine.store_reached_words();
                return Ok(());
            }
            engine.lane()?.check()?;
            if let Some(host_task) = engine.take_ready_task(false) {
                drop(engine);
                run_task(self, host_task);
                engine = self.engine();
                continue;
            }
            let soon = engine.next_poll();
            match soon {
                Some(instant) => {
                    drop(engine);
                    crate::state::wait_until(instant);
                    engine = self.engine();
                }
                None => {
                    // Another thread runs the task, or the change is not signaled: check periodically.
                    engine = match self.work_changed.wait_timeout(engine, RECHECK_INTERVAL) {
                        Ok((engine, _)) => engine,
                        Err(poisoned) => poisoned.into_inner().0,
                    };
                }
            }
        }
    }
}
