//! The turn scheduler's thread of one GPU: polls the containers, calls the scheduler, and writes the turns.

use super::doorbell_wait::{DoorbellWait, WakeReason, reduce_timer_slack};
use super::{Anomalies, ContainerView, TurnScheduler, tuning};
use crate::clock;
use crate::handle::RegionHandle;
use crate::owner::TurnControl;
use crate::protocol::{HEARTBEAT_INTERVAL_NS, IDLE_HEARTBEAT_INTERVAL_NS};
use crate::reader::DoorbellSample;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// One container on one GPU.
#[derive(Debug)]
struct Contender {
    member: u64,
    region: Arc<RegionHandle>,
    gpu: usize,
    /// The doorbell's value when the container's processes were last examined.
    seen: u32,
    /// Whether a thread of it waited, or it had the turn and work to run, when last polled.
    active: bool,
    /// Whether its launches waited for turns when last polled.
    waits_for_turns: bool,
    /// Whether its `usage` was unreadable when last polled.
    unreadable: bool,
    /// Time before which it is not polled.
    backs_off_until: u64,
    /// State as last polled.
    last: ContainerView,
}

/// How thoroughly to poll a container that neither waits nor works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PollDepth {
    /// Its doorbell did not ring: nothing is new.
    None,
    /// Read its doorbell, and examine its processes only if it rang.
    Doorbell,
    /// Examine its processes whether its doorbell rang or not.
    Processes,
}

impl Contender {
    fn turns(&self) -> Option<TurnControl<'_>> {
        self.region.owner().turns(self.gpu)
    }

    /// Polls the container. Returns `None` if its launches do not wait for turns, or if it made its own `usage`
    /// unreadable: then it gets no turn.
    fn poll(&mut self, now: u64, holds: bool, depth: PollDepth) -> Option<ContainerView> {
        let owner = self.region.owner();
        let Some(limits) = owner.limits(self.gpu).filter(|limits| limits.waits_for_turns()) else {
            // It needs no turns, and its doorbell is not waited for.
            self.waits_for_turns = false;
            self.active = false;
            return None;
        };
        // Its doorbell was not waited for until now, so a ring may have been missed.
        let depth = if self.waits_for_turns { depth } else { PollDepth::Processes };
        self.waits_for_turns = true;
        let (cores, ceiling) = owner.compute(limits);
        let priority = limits.priority();
        let with_share = |view| ContainerView { cores, ceiling, priority, ..view };
        let depth = if self.active || holds { PollDepth::Processes } else { depth };
        if depth == PollDepth::None || now < self.backs_off_until {
            return (!self.unreadable).then(|| with_share(self.last));
        }
        self.unreadable = true;
        let DoorbellSample { spent, doorbell } = self.region.reader().doorbell(self.gpu)?;
        let mut view = ContainerView { waiting: false, busy_until: 0, spent, ..self.last };
        if depth == PollDepth::Processes || doorbell != self.seen {
            // Stored before its processes are examined: a process that rings later changes the word again.
            self.seen = doorbell;
            let demand = self.region.reader().demand(self.gpu, now).ok()?;
            let cost = clock::monotonic_ns().saturating_sub(now);
            if cost > tuning::SLOW_POLL_NS {
                // A container can make itself expensive to examine. It is then polled less often, so that others do not
                // wait.
                self.backs_off_until = now.saturating_add(cost.saturating_mul(tuning::SLOW_POLL_BACKOFF));
            }
            view.waiting = demand.waiting > 0;
            view.busy_until = demand.busy_until;
            view.spent = demand.spent;
        }
        self.unreadable = false;
        self.active = view.waiting || (holds && view.busy_until > now);
        self.last = view;
        Some(with_share(view))
    }
}

/// A request from the arbiter to the thread.
#[derive(Debug)]
enum Command {
    Join { member: u64, region: Arc<RegionHandle>, gpu: usize },
    Leave { member: u64 },
}

/// State that the thread shares with the arbiter.
#[derive(Debug, Default)]
struct Mailbox {
    commands: Mutex<Vec<Command>>,
    /// Futex word, incremented to wake the thread.
    signal: AtomicU32,
    stop: AtomicBool,
    decisions: AtomicU64,
    anomalies: Mutex<Vec<(u64, Anomalies)>>,
}

/// Handle on the turn scheduler's thread of one GPU. Dropping it stops the thread.
#[derive(Debug)]
pub(super) struct GpuThread {
    pub(super) uuid: [u8; 16],
    mailbox: Arc<Mailbox>,
    thread: Option<JoinHandle<()>>,
}

impl GpuThread {
    pub(super) fn start(uuid: [u8; 16]) -> io::Result<Self> {
        Self::start_with(uuid, DoorbellWait::new())
    }

    pub(super) fn start_with(uuid: [u8; 16], doorbells: DoorbellWait) -> io::Result<Self> {
        let mailbox = Arc::new(Mailbox::default());
        let its = Arc::clone(&mailbox);
        let thread = std::thread::Builder::new().name("partage-arbiter".to_owned()).spawn(move || {
            TurnLoop {
                mailbox: its,
                scheduler: TurnScheduler::new(),
                contenders: Vec::new(),
                views: Vec::new(),
                waited_for: Vec::new(),
                doorbells,
                last_heartbeat: 0,
                idle: false,
                examined: 0,
            }
            .run();
        })?;
        Ok(Self { uuid, mailbox, thread: Some(thread) })
    }

    /// Gives turns on one GPU of a region from now on.
    pub(super) fn join(&self, member: u64, region: &Arc<RegionHandle>, gpu: usize) {
        self.post(Command::Join { member, region: Arc::clone(region), gpu });
    }

    pub(super) fn leave(&self, member: u64) {
        self.post(Command::Leave { member });
    }

    pub(super) fn decisions(&self) -> u64 {
        self.mailbox.decisions.load(Ordering::Relaxed)
    }

    pub(super) fn anomalies(&self, member: u64) -> Anomalies {
        let all = self.mailbox.anomalies.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().find(|(whose, _)| *whose == member).map_or_else(Anomalies::default, |(_, found)| *found)
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

impl Drop for GpuThread {
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
    contenders: Vec<Option<Contender>>,
    views: Vec<Option<ContainerView>>,
    doorbells: DoorbellWait,
    /// The contenders whose doorbells are in `doorbells`, in that order.
    waited_for: Vec<usize>,
    last_heartbeat: u64,
    /// Whether no container had a turn or wanted one when last polled.
    idle: bool,
    /// The contender whose processes were last examined although its doorbell had not rung.
    examined: usize,
}

impl TurnLoop {
    fn run(mut self) {
        reduce_timer_slack();
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
            let decision = self.scheduler.decide(now, &self.views);
            self.mailbox.decisions.fetch_add(1, Ordering::Relaxed);
            if let Some(turns) = decision.close.and_then(|index| self.turns(index)) {
                turns.close();
            }
            if let Some((turns, open)) = decision.open.and_then(|open| Some((self.turns(open.index)?, open)))
            {
                turns.open(open.allowed);
            }
            let idle = self.scheduler.is_idle() && !self.contenders.iter().flatten().any(|one| one.active);
            if beat || idle != self.idle {
                self.idle = idle;
                self.beat(now);
            }
            let (until, active) = self.prepare_wait(now, signal, decision.next);
            reason = self.doorbells.wait(&self.mailbox.signal, now, until, active);
        }
        // Closes the turn of a container that left just before the stop.
        self.run_commands();
        self.idle = false;
        self.beat(clock::monotonic_ns());
    }

    /// Lists the doorbells to wait for. Returns until when to wait, and whether any of their containers is active.
    fn prepare_wait(&mut self, now: u64, signal: u32, next: u64) -> (u64, bool) {
        let mut active = false;
        self.doorbells.begin(&self.mailbox.signal, signal);
        self.waited_for.clear();
        for (index, (contender, view)) in self.contenders.iter().zip(&self.views).enumerate() {
            // The doorbell of a container that is not polled would end every wait.
            let polled = contender.as_ref().filter(|contender| now >= contender.backs_off_until);
            if let (Some(contender), Some(_)) = (polled, view) {
                self.doorbells.add(&contender.region, contender.gpu, contender.seen);
                self.waited_for.push(index);
                active |= contender.active;
            }
        }
        if !self.idle {
            return (next.min(self.last_heartbeat.saturating_add(HEARTBEAT_INTERVAL_NS)), active);
        }
        let backing_off = self.contenders.iter().flatten().map(|contender| contender.backs_off_until);
        let polled_again = backing_off.filter(|until| *until > now).min().unwrap_or(u64::MAX);
        (self.last_heartbeat.saturating_add(IDLE_HEARTBEAT_INTERVAL_NS).min(polled_again), active)
    }

    fn turns(&self, index: usize) -> Option<TurnControl<'_>> {
        self.contenders.get(index)?.as_ref()?.turns()
    }

    fn poll(&mut self, now: u64, reason: WakeReason, beat: bool) {
        let holder = self.scheduler.holder();
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
            let holds = holder == Some(index);
            let depth = if rang == Some(index) || (beat && index == self.examined) {
                PollDepth::Processes
            } else if beat || reason == WakeReason::Unknown {
                PollDepth::Doorbell
            } else {
                PollDepth::None
            };
            *view = contender.as_mut().and_then(|contender| contender.poll(now, holds, depth));
            let lost = contender.as_ref().filter(|_| holds && view.is_none());
            if let Some(turns) = lost.and_then(Contender::turns) {
                // Its launches no longer wait for turns, or its file is damaged. The scheduler drops the turn, and no
                // other code would close it.
                turns.close();
            }
        }
    }

    /// Writes a heartbeat for all containers, valid for as long as this thread is going to sleep, and publishes the
    /// anomalies.
    fn beat(&mut self, now: u64) {
        self.last_heartbeat = now;
        let until = if self.idle { now.saturating_add(IDLE_HEARTBEAT_INTERVAL_NS) } else { now };
        for contender in self.contenders.iter().flatten() {
            contender.region.owner().beat(contender.gpu, until);
        }
        let mut anomalies = self.mailbox.anomalies.lock().unwrap_or_else(PoisonError::into_inner);
        anomalies.clear();
        let contenders = self.contenders.iter().enumerate();
        anomalies.extend(
            contenders.filter_map(|(at, one)| Some((one.as_ref()?.member, self.scheduler.anomalies(at)))),
        );
    }

    fn run_commands(&mut self) {
        let commands =
            std::mem::take(&mut *self.mailbox.commands.lock().unwrap_or_else(PoisonError::into_inner));
        for command in commands {
            match command {
                Command::Join { member, region, gpu } => self.join(member, region, gpu),
                Command::Leave { member } => self.leave(member),
            }
        }
    }

    fn join(&mut self, member: u64, region: Arc<RegionHandle>, gpu: usize) {
        let contender = Contender {
            member,
            region,
            gpu,
            seen: 0,
            active: true,
            waits_for_turns: true,
            unreadable: false,
            backs_off_until: 0,
            last: ContainerView::default(),
        };
        if let Some(turns) = contender.turns().filter(|turns| turns.turn().is_open()) {
            // Left open by a daemon that was killed.
            turns.close();
        }
        contender.region.owner().beat(gpu, clock::monotonic_ns());
        match self.contenders.iter().position(Option::is_none) {
            Some(free) => self.contenders[free] = Some(contender),
            None => self.contenders.push(Some(contender)),
        }
    }

    fn leave(&mut self, member: u64) {
        for (index, place) in self.contenders.iter_mut().enumerate() {
            let Some(contender) = place.take_if(|contender| contender.member == member) else { continue };
            self.scheduler.remove(index);
            if let Some(turns) = contender.turns() {
                turns.close();
            }
            contender.region.owner().beat(contender.gpu, clock::monotonic_ns());
        }
    }
}
