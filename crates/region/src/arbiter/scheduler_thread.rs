//! The turn scheduler's thread: polls the containers, calls the scheduler, and writes the turns.
//!
//! One thread decides for all GPUs, because turns of a container on several GPUs begin and end together.

use super::doorbell_wait::{DoorbellWait, WakeReason, raise_priority};
use super::occupancy::OccupancyTracker;
use super::{ContenderView, GateState, SchedulerDecision, TurnScheduler, tuning};
use crate::clock;
use crate::handle::RegionHandle;
use crate::owner::TurnControl;
use crate::protocol::{HEARTBEAT_INTERVAL_NS, IDLE_HEARTBEAT_INTERVAL_NS, MAX_GPUS, WHOLE_GPU};
use crate::reader::ActiveProcesses;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// One container on one GPU.
#[derive(Debug)]
struct PolledContainer {
    member: u64,
    region: Arc<RegionHandle>,
    /// Index of the GPU in the region.
    gpu: usize,
    /// Index of the GPU in the scheduler.
    shared_gpu: usize,
    /// The doorbell's value when the container's processes were last listed.
    seen: u32,
    active: ActiveProcesses,
    tracker: OccupancyTracker,
    /// Whether its launches may wait for turns, when last polled.
    waits_for_turns: bool,
    /// Whether its `usage` was unreadable when last polled.
    unreadable: bool,
    /// Whether processes need not ring when they begin to work.
    watched: bool,
    run_ahead: u64,
    /// Time before which it is not polled.
    backs_off_until: u64,
    /// State as last polled.
    last: ContenderView,
}

/// How thoroughly to poll a container that neither waits nor works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PollDepth {
    /// Its doorbell did not ring: nothing is new.
    None,
    /// Read its doorbell, and list its processes only if it rang.
    Doorbell,
    /// Read what its processes do.
    Activity,
    /// List its processes again, and read what they do.
    Processes,
}

impl PolledContainer {
    fn turns(&self) -> Option<TurnControl<'_>> {
        self.region.owner().turns(self.gpu)
    }

    /// Polls the container. Returns `None` if its launches do not wait for turns, or if it made its own `usage`
    /// unreadable: then it gets no turn.
    fn poll(&mut self, now: u64, depth: PollDepth) -> Option<ContenderView> {
        let owner = self.region.owner();
        let Some(limits) = owner.limits(self.gpu).filter(|limits| limits.waits_for_turns()) else {
            // It needs no turns, and its doorbell is not waited for.
            self.waits_for_turns = false;
            return None;
        };
        // Its doorbell was not waited for until now, so a ring may have been missed.
        let depth = if self.waits_for_turns { depth } else { PollDepth::Processes };
        self.waits_for_turns = true;
        let (cores, ceiling) = owner.compute(limits);
        let (priority, low_latency) = (limits.priority(), limits.is_low_latency());
        let with_share = |view| ContenderView { cores, ceiling, priority, low_latency, ..view };
        if depth == PollDepth::None || now < self.backs_off_until {
            return (!self.unreadable).then(|| with_share(self.last));
        }
        self.unreadable = true;
        let reader = self.region.reader();
        let doorbell = reader.doorbell(self.gpu)?;
        if depth >= PollDepth::Activity || doorbell != self.seen {
            if depth == PollDepth::Processes || doorbell != self.seen {
                // Stored before the processes are listed: a process that rings later changes the word again.
                self.seen = doorbell;
                reader.list_active(self.gpu, &mut self.active).ok()?;
            }
            let activity = reader.activity(self.gpu, &self.active).ok()?;
            let cost = clock::monotonic_ns().saturating_sub(now);
            // A container can make itself expensive to examine. It is then polled less often, so that others do not wait.
            self.backs_off_until = now.saturating_add(poll_pause(cost, self.active.reads()));
            self.last.waiting = activity.waiting > 0;
            self.last.occupied = self.tracker.is_occupied(now, &activity.streams);
            self.last.since = activity.streams.since.min(now);
            self.last.progress = activity.streams.progress;
        }
        self.unreadable = false;
        Some(with_share(self.last))
    }

    /// Writes the words that tell the processes how to behave until the next decision.
    fn publish(&mut self, gated: bool, watched: bool, run_ahead: u64, charge: u64) {
        let (was_watched, before) = (self.watched, self.run_ahead);
        (self.watched, self.run_ahead) = (watched, run_ahead);
        // The word itself: a change of the limits sets it, too.
        let was_gated = self.region.owner().limits(self.gpu).is_some_and(crate::layout::GpuLimits::is_gated);
        let Some(turns) = self.turns() else { return };
        if charge > 0 {
            turns.charge(charge);
        }
        if run_ahead != before {
            turns.set_run_ahead(run_ahead);
        }
        if watched != was_watched {
            turns.set_watched(watched);
        }
        if gated != was_gated {
            turns.set_gated(gated);
        }
    }
}

/// Returns how long a container is not polled after a poll of this cost in nanoseconds and reads.
fn poll_pause(cost: u64, reads: usize) -> u64 {
    let slow = if cost > tuning::SLOW_POLL_NS { cost.saturating_mul(tuning::SLOW_POLL_BACKOFF) } else { 0 };
    // At most a slot and a page for each process, so it fits.
    let many = if reads > tuning::MAX_CHEAP_READS { reads as u64 * tuning::PAUSE_PER_READ_NS } else { 0 };
    slow.max(many)
}

/// A request from the arbiter to the thread.
#[derive(Debug)]
enum Command {
    Join { member: u64, region: Arc<RegionHandle>, gpu: usize },
    Leave { member: u64 },
    Charge { member: u64, uuid: [u8; 16], nanos: u64 },
}

/// State that the thread shares with the arbiter.
#[derive(Debug, Default)]
struct Mailbox {
    commands: Mutex<Vec<Command>>,
    /// Futex word, incremented to wake the thread.
    signal: AtomicU32,
    stop: AtomicBool,
    decisions: AtomicU64,
}

/// Handle on the turn scheduler's thread. Dropping it stops the thread.
#[derive(Debug)]
pub(super) struct SchedulerThread {
    mailbox: Arc<Mailbox>,
    thread: Option<JoinHandle<()>>,
}

impl SchedulerThread {
    pub(super) fn start() -> io::Result<Self> {
        Self::start_with(DoorbellWait::new())
    }

    pub(super) fn start_with(doorbells: DoorbellWait) -> io::Result<Self> {
        let mailbox = Arc::new(Mailbox::default());
        let its = Arc::clone(&mailbox);
        let thread = std::thread::Builder::new().name("partage-arbiter".to_owned()).spawn(move || {
            TurnLoop {
                mailbox: its,
                scheduler: TurnScheduler::new(),
                decision: SchedulerDecision::default(),
                contenders: Vec::new(),
                views: Vec::new(),
                gpus: Vec::new(),
                waited_for: Vec::new(),
                doorbells,
                last_heartbeat: 0,
                idle: false,
                examined: 0,
            }
            .run();
        })?;
        Ok(Self { mailbox, thread: Some(thread) })
    }

    /// Gives turns on one GPU of a region from now on.
    pub(super) fn join(&self, member: u64, region: &Arc<RegionHandle>, gpu: usize) {
        self.post(Command::Join { member, region: Arc::clone(region), gpu });
    }

    pub(super) fn leave(&self, member: u64) {
        self.post(Command::Leave { member });
    }

    /// Charges a region for time that it used on a GPU without accounting for it.
    pub(super) fn charge(&self, member: u64, uuid: [u8; 16], nanos: u64) {
        self.post(Command::Charge { member, uuid, nanos });
    }

    pub(super) fn decisions(&self) -> u64 {
        self.mailbox.decisions.load(Ordering::Relaxed)
    }

    fn post(&self, command: Command) {
        self.mailbox.commands.lock().unwrap_or_else(PoisonError::into_inner).push(command);
        self.wake();
    }

    pub(super) fn wake(&self) {
        self.mailbox.signal.fetch_add(1, Ordering::Release);
        crate::futex::wake(&self.mailbox.signal, 1);
    }
}

impl Drop for SchedulerThread {
    fn drop(&mut self) {
        self.mailbox.stop.store(true, Ordering::Release);
        self.wake();
        if let Some(thread) = self.thread.take() {
            // An error means that the thread panicked, and then it has ended as well.
            let _ = thread.join();
        }
    }
}

/// State that only the thread uses.
struct TurnLoop {
    mailbox: Arc<Mailbox>,
    scheduler: TurnScheduler,
    decision: SchedulerDecision,
    contenders: Vec<Option<PolledContainer>>,
    views: Vec<Option<ContenderView>>,
    /// The UUID of each of the scheduler's GPUs; `None` for an unused index.
    gpus: Vec<Option<[u8; 16]>>,
    doorbells: DoorbellWait,
    /// The contenders whose doorbells are in `doorbells`, in that order.
    waited_for: Vec<usize>,
    last_heartbeat: u64,
    /// Whether no container was active when last polled.
    idle: bool,
    /// The contender whose processes were last listed although its doorbell had not rung.
    examined: usize,
}

impl TurnLoop {
    fn run(mut self) {
        raise_priority();
        let mut reason = WakeReason::Unknown;
        loop {
            // Read before anything that a signal may be about: a later signal changes the word that the thread waits
            // on.
            let signal = self.mailbox.signal.load(Ordering::Acquire);
            if self.mailbox.stop.load(Ordering::Acquire) {
                break;
            }
            self.run_commands();
            let now = clock::monotonic_ns();
            let beat = now.saturating_sub(self.last_heartbeat) >= HEARTBEAT_INTERVAL_NS / 2;
            self.poll(now, reason, beat);
            self.scheduler.decide(now, &self.views, &mut self.decision);
            self.mailbox.decisions.fetch_add(1, Ordering::Relaxed);
            self.write_gates();
            self.publish();
            let idle = self.scheduler.is_idle();
            if beat || idle != self.idle {
                self.idle = idle;
                self.beat(now);
            }
            let (until, active) = self.prepare_wait(now, signal);
            reason = self.doorbells.wait(&self.mailbox.signal, now, until, active);
        }
        // Closes the turns of a container that left just before the stop.
        self.run_commands();
        for contender in self.contenders.iter().flatten() {
            if let Some(turns) = contender.turns() {
                turns.set_watched(false);
            }
        }
        self.idle = false;
        self.beat(clock::monotonic_ns());
    }

    fn write_gates(&self) {
        for &(index, gate) in &self.decision.gates {
            let Some(turns) =
                self.contenders.get(index).and_then(Option::as_ref).and_then(PolledContainer::turns)
            else {
                continue;
            };
            match gate {
                GateState::Closed => turns.close(),
                GateState::Draining => turns.drain(),
                GateState::Open => {
                    turns.open();
                }
            }
        }
    }

    /// Tells the processes whether they are gated and watched, and what they were charged.
    fn publish(&mut self) {
        let mut waiting = [0_u32; MAX_GPUS];
        for contender in self.contenders.iter().flatten().filter(|it| it.waits_for_turns) {
            waiting[contender.shared_gpu] += 1;
        }
        for index in 0..self.contenders.len() {
            let Some(contender) = self.contenders[index].as_ref() else { continue };
            // A container that has the GPU to itself and no ceiling need not even look at its turn.
            let others = waiting[contender.shared_gpu] > 1;
            let has_ceiling = self.views[index].is_some_and(|view| view.ceiling.max(view.cores) < WHOLE_GPU);
            let gated = contender.waits_for_turns && (others || has_ceiling);
            let watched = gated && self.views[index].is_some() && self.scheduler.is_active(index);
            let run_ahead = self.scheduler.run_ahead(index);
            let charge = self.scheduler.take_charge(index);
            if let Some(contender) = self.contenders[index].as_mut() {
                contender.publish(gated, watched, run_ahead, charge);
            }
        }
    }

    /// Lists the doorbells to wait for. Returns until when to wait, and whether any of their containers is active.
    fn prepare_wait(&mut self, now: u64, signal: u32) -> (u64, bool) {
        let mut active = false;
        self.doorbells.begin(&self.mailbox.signal, signal);
        self.waited_for.clear();
        for (index, (contender, view)) in self.contenders.iter().zip(&self.views).enumerate() {
            // The doorbell of a container that is not polled would end every wait.
            let polled = contender.as_ref().filter(|contender| now >= contender.backs_off_until);
            if let (Some(contender), Some(_)) = (polled, view) {
                self.doorbells.add(&contender.region, contender.gpu, contender.seen);
                self.waited_for.push(index);
                active |= self.scheduler.is_active(index);
            }
        }
        if !self.idle {
            return (
                self.decision.next.min(self.last_heartbeat.saturating_add(HEARTBEAT_INTERVAL_NS)),
                active,
            );
        }
        let backing_off = self.contenders.iter().flatten().map(|contender| contender.backs_off_until);
        let polled_again = backing_off.filter(|until| *until > now).min().unwrap_or(u64::MAX);
        (self.last_heartbeat.saturating_add(IDLE_HEARTBEAT_INTERVAL_NS).min(polled_again), active)
    }

    fn poll(&mut self, now: u64, reason: WakeReason, beat: bool) {
        self.views.resize(self.contenders.len(), None);
        if beat {
            // One container at every heartbeat, so that a process that failed to ring is found eventually.
            self.examined = (self.examined + 1) % self.contenders.len().max(1);
        }
        let rang = match reason {
            WakeReason::Doorbell(at) => self.waited_for.get(at).copied(),
            WakeReason::TimedOut | WakeReason::Unknown => None,
        };
        for (index, (view, contender)) in self.views.iter_mut().zip(&mut self.contenders).enumerate() {
            let active = self.scheduler.is_polled(index);
            let depth = if rang == Some(index) || (beat && (active || index == self.examined)) {
                PollDepth::Processes
            } else if active {
                PollDepth::Activity
            } else if beat || reason == WakeReason::Unknown {
                PollDepth::Doorbell
            } else {
                PollDepth::None
            };
            let Some(contender) = contender else {
                *view = None;
                continue;
            };
            let seen = contender.seen;
            *view = contender.poll(now, depth);
            if contender.seen != seen {
                self.scheduler.note_ring(index, now);
            }
        }
    }

    /// Writes a heartbeat for all containers, valid for as long as this thread is going to sleep.
    fn beat(&mut self, now: u64) {
        self.last_heartbeat = now;
        let until = if self.idle { now.saturating_add(IDLE_HEARTBEAT_INTERVAL_NS) } else { now };
        for contender in self.contenders.iter().flatten() {
            contender.region.owner().beat(contender.gpu, until);
        }
    }

    fn run_commands(&mut self) {
        let commands =
            std::mem::take(&mut *self.mailbox.commands.lock().unwrap_or_else(PoisonError::into_inner));
        for command in commands {
            match command {
                Command::Join { member, region, gpu } => self.join(member, region, gpu),
                Command::Leave { member } => self.leave(member),
                Command::Charge { member, uuid, nanos } => self.charge(member, uuid, nanos),
            }
        }
    }

    /// Returns the scheduler's index of the GPU with this UUID; `None` if the node has too many.
    fn shared_gpu(&mut self, uuid: [u8; 16]) -> Option<usize> {
        if let Some(known) = self.gpus.iter().position(|gpu| *gpu == Some(uuid)) {
            return Some(known);
        }
        let free = self.gpus.iter().position(Option::is_none);
        let index = match free {
            Some(free) => free,
            None if self.gpus.len() < MAX_GPUS => {
                self.gpus.push(None);
                self.gpus.len() - 1
            }
            None => return None,
        };
        self.gpus[index] = Some(uuid);
        Some(index)
    }

    fn join(&mut self, member: u64, region: Arc<RegionHandle>, gpu: usize) {
        let Some(uuid) = region.owner().limits(gpu).map(crate::layout::GpuLimits::uuid) else { return };
        let Some(shared_gpu) = self.shared_gpu(uuid) else { return };
        let contender = PolledContainer {
            member,
            region,
            gpu,
            shared_gpu,
            seen: 0,
            active: ActiveProcesses::default(),
            tracker: OccupancyTracker::default(),
            // Found to wait for turns at the first poll, which is then thorough.
            waits_for_turns: false,
            unreadable: false,
            watched: false,
            run_ahead: 0,
            backs_off_until: 0,
            last: ContenderView::default(),
        };
        if let Some(turns) = contender.turns() {
            // A daemon that was killed may have left other words.
            turns.close();
            turns.set_watched(false);
            turns.set_run_ahead(0);
            turns.set_gated(true);
        }
        contender.region.owner().beat(gpu, clock::monotonic_ns());
        let index = self.contenders.iter().position(Option::is_none).unwrap_or(self.contenders.len());
        self.scheduler.add(index, member, shared_gpu);
        if index == self.contenders.len() {
            self.contenders.push(Some(contender));
        } else {
            self.contenders[index] = Some(contender);
        }
    }

    fn charge(&mut self, member: u64, uuid: [u8; 16], nanos: u64) {
        let is_charged = |contender: &PolledContainer| {
            contender.member == member && self.gpus.get(contender.shared_gpu) == Some(&Some(uuid))
        };
        let index = self.contenders.iter().position(|contender| contender.as_ref().is_some_and(is_charged));
        if let Some(index) = index {
            self.scheduler.charge_unaccounted(index, nanos);
        }
    }

    fn leave(&mut self, member: u64) {
        for (index, place) in self.contenders.iter_mut().enumerate() {
            let Some(contender) = place.take_if(|contender| contender.member == member) else { continue };
            self.scheduler.remove(index);
            if let Some(turns) = contender.turns() {
                turns.close();
                turns.set_watched(false);
                turns.set_gated(true);
            }
            contender.region.owner().beat(contender.gpu, clock::monotonic_ns());
        }
        for (index, gpu) in self.gpus.iter_mut().enumerate() {
            if !self.contenders.iter().flatten().any(|contender| contender.shared_gpu == index) {
                *gpu = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{MARKER_PAGE_COUNT, SLOT_COUNT};

    #[test]
    fn container_with_all_slots_and_pages_is_polled_rarely() {
        assert_eq!(poll_pause(tuning::SLOW_POLL_NS, tuning::MAX_CHEAP_READS), 0);
        assert!(poll_pause(0, SLOT_COUNT + MARKER_PAGE_COUNT) > 20_000_000);
        assert_eq!(poll_pause(2_000_000, 1), 64_000_000);
    }
}
