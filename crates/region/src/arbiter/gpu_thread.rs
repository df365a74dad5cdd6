//! One GPU's arbiter at work: a thread that looks at its containers, asks the deal and writes their gates.

use super::doorbell_wait::{Doorbell, DoorbellSample, DoorbellWait, WakeReason, wake_in_time};
use super::{Anomalies, ContainerView, TurnScheduler, tuning};
use crate::clock;
use crate::error::RegionError;
use crate::owner::{RegionOwner, TurnControl};
use crate::reader::UsageReader;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// A region whose turns are dealt here.
#[derive(Debug)]
pub(super) struct Hall {
    pub(super) owner: RegionOwner,
    pub(super) reader: UsageReader,
}

/// One container at one GPU.
#[derive(Debug)]
struct Contender {
    member: u64,
    hall: Arc<Hall>,
    gpu: usize,
    bell: Doorbell,
    seen: u32,
    /// Somebody waited in it, or it had the turn, when last seen.
    lively: bool,
    /// It had a gate when last seen.
    gated: bool,
    broken: bool,
    /// Not asked before this.
    rests_until: u64,
    /// What was seen last.
    last: ContainerView,
}

/// How closely to look at those who neither wait nor work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PollDepth {
    /// They have not rung: nothing is new.
    None,
    /// See whether they have rung.
    Doorbell,
    /// Ask their processes.
    Processes,
}

impl Contender {
    fn gate(&self) -> Option<TurnControl<'_>> {
        self.hall.owner.gate(self.gpu)
    }

    /// What there is to see. Nothing if it has no gate or made its own `usage` unreadable: then it gets no turn.
    fn view(&mut self, now: u64, holds: bool, care: PollDepth) -> Option<ContainerView> {
        let Some(limits) = self.hall.owner.limits(self.gpu).filter(|limits| limits.gated()) else {
            // It wants nothing of us, and its bell is not listened to.
            (self.gated, self.lively) = (false, false);
            return None;
        };
        // What it rang for before it had a gate was not heard.
        let care = if self.gated { care } else { PollDepth::Processes };
        self.gated = true;
        let (cores, ceiling, priority) = (limits.cores(), limits.ceiling(), limits.priority());
        let share = |view| ContainerView { cores, ceiling, priority, ..view };
        let care = if self.lively || holds { PollDepth::Processes } else { care };
        if care == PollDepth::None || now < self.rests_until {
            return (!self.broken).then(|| share(self.last));
        }
        self.broken = true;
        let DoorbellSample { spent, doorbell } = self.bell.glance()?;
        let mut view = ContainerView { waiting: false, busy_until: 0, spent, ..self.last };
        if care == PollDepth::Processes || doorbell != self.seen {
            // Before its processes are asked: who rings later is heard.
            self.seen = doorbell;
            let demand = self.hall.reader.demand(self.gpu, now).ok()?;
            let cost = clock::exact().saturating_sub(now);
            if cost > tuning::DEAR {
                // A container can make itself hard to look at. It is looked at less then: nobody else waits for it.
                self.rests_until = now.saturating_add(cost.saturating_mul(tuning::REST));
            }
            (view.waiting, view.busy_until, view.spent) =
                (demand.waiting > 0, demand.busy_until, demand.spent);
        }
        self.broken = false;
        self.lively = view.waiting || (holds && view.busy_until > now);
        self.last = view;
        Some(share(view))
    }
}

/// What others ask of the thread.
#[derive(Debug)]
enum Command {
    Join { member: u64, hall: Arc<Hall>, gpu: usize, bell: Doorbell },
    Leave { member: u64 },
}

/// What the thread and its runner share.
#[derive(Debug, Default)]
struct Mailbox {
    mail: Mutex<Vec<Command>>,
    /// Futex: counted up when there is mail.
    called: AtomicU32,
    stop: AtomicBool,
    decisions: AtomicU64,
    notes: Mutex<Vec<(u64, Anomalies)>>,
}

/// The arbiter of one GPU.
#[derive(Debug)]
pub(super) struct GpuThread {
    pub(super) uuid: [u8; 16],
    desk: Arc<Mailbox>,
    thread: Option<JoinHandle<()>>,
}

impl GpuThread {
    pub(super) fn start(uuid: [u8; 16]) -> io::Result<Self> {
        Self::start_with(uuid, DoorbellWait::new())
    }

    pub(super) fn start_with(uuid: [u8; 16], bells: DoorbellWait) -> io::Result<Self> {
        let desk = Arc::new(Mailbox::default());
        let its = Arc::clone(&desk);
        let thread = std::thread::Builder::new().name("partage-arbiter".to_owned()).spawn(move || {
            TurnLoop {
                desk: its,
                deal: TurnScheduler::new(),
                seats: Vec::new(),
                views: Vec::new(),
                listened: Vec::new(),
                bells,
                beaten: 0,
                quiet: false,
                asked: 0,
            }
            .run();
        })?;
        Ok(Self { uuid, desk, thread: Some(thread) })
    }

    pub(super) fn join(
        &self,
        member: u64,
        hall: &Arc<Hall>,
        folder: &Path,
        gpu: usize,
    ) -> Result<(), RegionError> {
        let bell = Doorbell::open(folder, gpu)?;
        self.post(Command::Join { member, hall: Arc::clone(hall), gpu, bell });
        Ok(())
    }

    pub(super) fn leave(&self, member: u64) {
        self.post(Command::Leave { member });
    }

    pub(super) fn decisions(&self) -> u64 {
        self.desk.decisions.load(Ordering::Relaxed)
    }

    pub(super) fn notes(&self, member: u64) -> Anomalies {
        let notes = self.desk.notes.lock().unwrap_or_else(PoisonError::into_inner);
        notes.iter().find(|(whose, _)| *whose == member).map_or_else(Anomalies::default, |(_, notes)| *notes)
    }

    fn post(&self, mail: Command) {
        self.desk.mail.lock().unwrap_or_else(PoisonError::into_inner).push(mail);
        self.call();
    }

    pub(super) fn call(&self) {
        self.desk.called.fetch_add(1, Ordering::Release);
        crate::futex::wake(&self.desk.called, 1);
    }
}

impl Drop for GpuThread {
    fn drop(&mut self) {
        self.desk.stop.store(true, Ordering::Release);
        self.call();
        if let Some(thread) = self.thread.take() {
            // It has no other way to end than by the word above.
            let _ = thread.join();
        }
    }
}

/// The thread's own.
struct TurnLoop {
    desk: Arc<Mailbox>,
    deal: TurnScheduler,
    seats: Vec<Option<Contender>>,
    views: Vec<Option<ContainerView>>,
    bells: DoorbellWait,
    /// Whose bells those are.
    listened: Vec<usize>,
    beaten: u64,
    /// Nobody had a turn or wanted one when last looked at.
    quiet: bool,
    /// Whose processes were asked last although nothing was heard of them.
    asked: usize,
}

impl TurnLoop {
    fn run(mut self) {
        wake_in_time();
        let mut heard = WakeReason::Unknown;
        loop {
            // Before anything that a call may be about: whoever calls afterwards changes the word that is waited on.
            let called = self.desk.called.load(Ordering::Acquire);
            if self.desk.stop.load(Ordering::Acquire) {
                break;
            }
            self.read_mail();
            let now = clock::exact();
            let beat = now.saturating_sub(self.beaten) >= tuning::BEAT / 2;
            self.look(now, heard, beat);
            let order = self.deal.decide(now, &self.views);
            self.desk.decisions.fetch_add(1, Ordering::Relaxed);
            if let Some(gate) = order.close.and_then(|seat| self.gate(seat)) {
                gate.close();
            }
            if let Some((gate, open)) = order.open.and_then(|open| Some((self.gate(open.seat)?, open))) {
                gate.open(open.allowed);
            }
            let quiet = self.deal.rests() && self.seats.iter().flatten().all(|seat| !seat.lively);
            if beat || quiet != self.quiet {
                self.quiet = quiet;
                self.beat(now);
            }
            let mut active = false;
            self.bells.begin(&self.desk.called, called);
            self.listened.clear();
            for (number, (seat, view)) in self.seats.iter().zip(&self.views).enumerate() {
                // Whoever is not looked at would ring for ever.
                if let (Some(seat), Some(_)) = (seat.as_ref().filter(|seat| now >= seat.rests_until), view) {
                    self.bells.add(&seat.bell, seat.seen);
                    self.listened.push(number);
                    active |= seat.lively;
                }
            }
            let rested =
                self.seats.iter().flatten().map(|seat| seat.rests_until).filter(|until| *until > now).min();
            let until = match quiet {
                true => self.beaten.saturating_add(tuning::QUIET).min(rested.unwrap_or(u64::MAX)),
                false => order.next.min(self.beaten.saturating_add(tuning::BEAT)),
            };
            heard = self.bells.wait(&self.desk.called, now, until, active);
        }
        // Who left just before has its gate closed.
        self.read_mail();
        self.quiet = false;
        self.beat(clock::exact());
    }

    fn gate(&self, seat: usize) -> Option<TurnControl<'_>> {
        self.seats.get(seat)?.as_ref()?.gate()
    }

    fn look(&mut self, now: u64, heard: WakeReason, beat: bool) {
        let holder = self.deal.holder();
        self.views.resize(self.seats.len(), None);
        if beat {
            // One at every beat, so that nothing stays unseen for good, whoever forgot to ring.
            self.asked = (self.asked + 1) % self.seats.len().max(1);
        }
        let rang = match heard {
            WakeReason::Doorbell(bell) => self.listened.get(bell).copied(),
            _ => None,
        };
        for (number, (view, seat)) in self.views.iter_mut().zip(&mut self.seats).enumerate() {
            let holds = holder == Some(number);
            *view = seat.as_mut().and_then(|seat| {
                let care = match heard {
                    _ if rang == Some(number) || (beat && number == self.asked) => PollDepth::Processes,
                    WakeReason::Unknown => PollDepth::Doorbell,
                    _ if beat => PollDepth::Doorbell,
                    _ => PollDepth::None,
                };
                seat.view(now, holds, care)
            });
            if let Some(gate) = seat.as_ref().filter(|_| holds && view.is_none()).and_then(Contender::gate) {
                // Its gate was taken away or its file is broken; the deal forgets it, and nobody else would close it.
                gate.close();
            }
        }
    }

    /// Tells all containers that this GPU's arbiter lives, for as long as it is going to sleep, and the runner what was noted.
    fn beat(&mut self, now: u64) {
        self.beaten = now;
        let lives = if self.quiet { now.saturating_add(tuning::QUIET) } else { now };
        for seat in self.seats.iter().flatten() {
            seat.hall.owner.beat(seat.gpu, lives);
        }
        let mut notes = self.desk.notes.lock().unwrap_or_else(PoisonError::into_inner);
        notes.clear();
        let seats = self.seats.iter().enumerate();
        notes.extend(seats.filter_map(|(at, seat)| Some((seat.as_ref()?.member, self.deal.notes(at)))));
    }

    fn read_mail(&mut self) {
        let mail = std::mem::take(&mut *self.desk.mail.lock().unwrap_or_else(PoisonError::into_inner));
        for letter in mail {
            match letter {
                Command::Join { member, hall, gpu, bell } => {
                    let seat = Contender {
                        member,
                        hall,
                        gpu,
                        bell,
                        seen: 0,
                        lively: true,
                        gated: true,
                        broken: false,
                        rests_until: 0,
                        last: ContainerView::default(),
                    };
                    if let Some(gate) = seat.gate().filter(|gate| gate.turn().is_open()) {
                        // Left open by an arbiter that was killed.
                        gate.close();
                    }
                    seat.hall.owner.beat(seat.gpu, clock::exact());
                    match self.seats.iter().position(Option::is_none) {
                        Some(free) => self.seats[free] = Some(seat),
                        None => self.seats.push(Some(seat)),
                    }
                }
                Command::Leave { member } => {
                    for (number, place) in self.seats.iter_mut().enumerate() {
                        let Some(seat) = place.take_if(|seat| seat.member == member) else { continue };
                        self.deal.vacate(number);
                        if let Some(gate) = seat.gate() {
                            gate.close();
                        }
                        seat.hall.owner.beat(seat.gpu, clock::exact());
                    }
                }
            }
        }
    }
}
