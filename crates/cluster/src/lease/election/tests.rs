use super::*;
use proptest::prelude::*;

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn candidate(identity: &str) -> Election {
    Election::new(identity.into(), ElectionTiming::default(), Duration::ZERO)
}

fn held_by(holder: &str, version: &str) -> LeaseRecord {
    LeaseRecord {
        holder: holder.into(),
        duration: Some(seconds(15)),
        transitions: 3,
        version: version.into(),
    }
}

#[test]
fn absent_lease_is_created_and_renewed() {
    let mut election = candidate("a");
    assert_eq!(election.next(seconds(100)), NextStep::Read);
    election.was_read(seconds(100), None);
    assert_eq!(election.next(seconds(100)), NextStep::Create);
    election.was_written(seconds(100), seconds(103), held_by("a", "1"));
    // The term is counted from when the write was sent, not from when it was answered.
    assert_eq!(election.term(seconds(103)), Some(LeaseTerm { number: 3, deadline: seconds(110) }));
    assert_eq!(election.next(seconds(104)), NextStep::Wait(seconds(105)));
    let renewal = NextStep::Write { version: "1".into(), transitions: 3, is_acquisition: false };
    assert_eq!(election.next(seconds(105)), renewal);
    election.was_written(seconds(105), seconds(105), held_by("a", "2"));
    assert_eq!(election.term(seconds(114)), Some(LeaseTerm { number: 3, deadline: seconds(115) }));
    assert_eq!(election.term(seconds(115)), None);
}

#[test]
fn held_lease_is_taken_only_after_it_was_seen_unchanged_for_its_duration() {
    let mut election = candidate("b");
    election.was_read(seconds(100), Some(held_by("a", "1")));
    assert_eq!(election.next(seconds(100)), NextStep::Wait(seconds(102)));
    // A renewal starts the wait again.
    election.was_read(seconds(110), Some(held_by("a", "2")));
    assert_eq!(election.next(seconds(110)), NextStep::Wait(seconds(112)));
    election.was_read(seconds(124), Some(held_by("a", "2")));
    assert_eq!(election.next(seconds(124)), NextStep::Wait(seconds(126)));
    election.was_read(seconds(126), Some(held_by("a", "2")));
    let acquisition = NextStep::Write { version: "2".into(), transitions: 4, is_acquisition: true };
    assert_eq!(election.next(seconds(126)), acquisition);
}

#[test]
fn longer_duration_of_the_holder_is_respected_within_bounds() {
    for (written, wait) in [(Some(1), 15), (Some(60), 60), (Some(1_000_000), 600), (None, 15)] {
        let mut election = candidate("b");
        let record = LeaseRecord { duration: written.map(seconds), ..held_by("a", "1") };
        election.was_read(seconds(100), Some(record.clone()));
        election.was_read(seconds(100 + wait - 1), Some(record.clone()));
        assert!(matches!(election.next(seconds(100 + wait - 1)), NextStep::Wait(_)), "{written:?}");
        election.was_read(seconds(100 + wait + 1), Some(record));
        assert!(matches!(election.next(seconds(100 + wait + 1)), NextStep::Write { .. }), "{written:?}");
    }
}

#[test]
fn released_lease_is_taken_at_once() {
    let mut election = candidate("a");
    election.was_read(seconds(1), Some(held_by("", "7")));
    assert!(matches!(election.next(seconds(1)), NextStep::Write { is_acquisition: true, .. }));
    election.was_written(seconds(1), seconds(1), held_by("a", "8"));
    assert_eq!(election.release(), Some("8".into()));
    assert_eq!(election.term(seconds(1)), None);
    let mut follower = candidate("b");
    follower.was_read(seconds(1), Some(held_by("a", "8")));
    assert_eq!(follower.release(), None, "another's lease is not released");
}

#[test]
fn leader_that_sees_another_holder_stops_at_once() {
    let mut election = candidate("a");
    election.was_written(seconds(1), seconds(1), held_by("a", "1"));
    election.was_refused(seconds(3));
    assert!(election.term(seconds(3)).is_some(), "a conflict may be its own write whose answer was lost");
    assert_eq!(election.next(seconds(3)), NextStep::Read);
    election.was_read(seconds(3), Some(held_by("b", "2")));
    assert_eq!(election.term(seconds(3)), None);
}

#[test]
fn answer_that_arrives_after_the_deadline_starts_no_term() {
    let mut election = candidate("a");
    election.was_written(seconds(1), seconds(12), held_by("a", "1"));
    assert_eq!(election.term(seconds(12)), None);
}

#[test]
fn deleted_lease_ends_a_term_and_lets_its_holder_stop_first() {
    let mut leader = candidate("a");
    leader.was_written(seconds(1), seconds(1), held_by("a", "1"));
    leader.was_read(seconds(2), None);
    assert_eq!(leader.term(seconds(2)), None);

    let mut follower = candidate("b");
    follower.was_read(seconds(100), Some(held_by("a", "1")));
    follower.was_read(seconds(102), None);
    assert!(matches!(follower.next(seconds(102)), NextStep::Wait(_)));
    follower.was_read(seconds(115), None);
    assert_eq!(follower.next(seconds(115)), NextStep::Create);
}

/// Microseconds of true time, which no process can see.
type TrueTime = u64;

const SECOND: TrueTime = 1_000_000;

/// A source of arbitrary numbers: those that proptest chose, over and over.
struct RandomNumbers {
    numbers: Vec<u32>,
    at: usize,
}

impl RandomNumbers {
    fn below(&mut self, bound: u64) -> u64 {
        let number = self.numbers[self.at % self.numbers.len()];
        // Another number on each pass.
        let number = u64::from(number).wrapping_add((self.at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        self.at += 1;
        (number ^ (number >> 29)) % bound
    }

    fn is_one_in(&mut self, bound: u64) -> bool {
        self.below(bound) == 0
    }
}

/// A replica's clock: it has its own zero, and runs up to 5 % faster or slower than true time.
#[derive(Clone, Copy)]
struct SkewedClock {
    offset: u64,
    per_mille: u64,
}

impl SkewedClock {
    fn at(self, time: TrueTime) -> LocalTime {
        Duration::from_micros(self.offset + time * self.per_mille / 1000)
    }

    /// The first true moment at which the clock shows this time.
    fn when(self, local: LocalTime) -> TrueTime {
        let micros = u64::try_from(local.as_micros()).unwrap_or(u64::MAX);
        micros.saturating_sub(self.offset).saturating_mul(1000).div_ceil(self.per_mille)
    }
}

/// A request that was sent, and what will become of it.
#[derive(Clone)]
struct InFlight {
    identity: String,
    step: NextStep,
    is_release: bool,
    sent: LocalTime,
    /// When the server carries it out; `None` if it never arrives.
    arrives: Option<TrueTime>,
    answer: Option<ServerAnswer>,
    /// Whether the candidate receives the answer. Otherwise it gives up.
    is_answered: bool,
}

#[derive(Clone)]
enum ServerAnswer {
    Read(Option<LeaseRecord>),
    Written(LeaseRecord),
    Refused,
}

struct Replica {
    election: Election,
    clock: SkewedClock,
    wakes: TrueTime,
    in_flight: Option<InFlight>,
    /// The term that began last: from when to when this replica leads, in true time.
    leads: Option<(TrueTime, TrueTime)>,
    past: Vec<(TrueTime, TrueTime)>,
    is_leaving: bool,
}

/// Replicas, their clocks, the network between them and one lease.
struct SimulatedCluster {
    chance: RandomNumbers,
    now: TrueTime,
    lease: Option<LeaseRecord>,
    versions: u64,
    identities: u64,
    replicas: Vec<Replica>,
    /// Requests whose sender has given up, and which may still arrive.
    orphaned: Vec<InFlight>,
    /// Terms of replicas that are gone.
    past: Vec<(TrueTime, TrueTime)>,
    /// Whether requests are lost or delayed, and replicas crash and freeze.
    is_faulty: bool,
}

impl SimulatedCluster {
    fn new(numbers: Vec<u32>, replicas: usize) -> SimulatedCluster {
        let mut world = SimulatedCluster {
            chance: RandomNumbers { numbers, at: 0 },
            now: 0,
            lease: None,
            versions: 0,
            identities: 0,
            replicas: Vec::new(),
            orphaned: Vec::new(),
            past: Vec::new(),
            is_faulty: true,
        };
        for _ in 0..replicas {
            let replica = world.replica();
            world.replicas.push(replica);
        }
        world
    }

    fn replica(&mut self) -> Replica {
        self.identities += 1;
        let clock =
            SkewedClock { offset: self.chance.below(1 << 40), per_mille: 950 + self.chance.below(101) };
        let jitter = Duration::from_micros(self.chance.below(SECOND / 2));
        let identity = format!("replica-{}", self.identities);
        Replica {
            election: Election::new(identity, ElectionTiming::default(), jitter),
            clock,
            wakes: self.now + self.chance.below(SECOND),
            in_flight: None,
            leads: None,
            past: Vec::new(),
            is_leaving: false,
        }
    }

    fn run_until(&mut self, end: TrueTime) {
        loop {
            let arrivals = self.replicas.iter().filter_map(|replica| replica.in_flight.as_ref()?.arrives);
            let arrivals = arrivals.chain(self.orphaned.iter().filter_map(|request| request.arrives));
            let wakes = self.replicas.iter().map(|replica| replica.wakes);
            let Some(next) = arrivals.chain(wakes).min().filter(|next| *next <= end) else { break };
            self.now = next;
            self.arrivals();
            for at in 0..self.replicas.len() {
                if self.replicas[at].wakes <= self.now {
                    self.wake(at);
                }
            }
        }
        self.now = end;
    }

    /// The server carries out what has arrived.
    fn arrivals(&mut self) {
        let now = self.now;
        let is_due = |request: &InFlight| request.arrives.is_some_and(|at| at <= now);
        for at in 0..self.orphaned.len() {
            if is_due(&self.orphaned[at]) {
                let mut request = self.orphaned[at].clone();
                self.carry_out(&mut request);
                self.orphaned[at] = request;
            }
        }
        self.orphaned.retain(|request| request.arrives.is_some());
        for at in 0..self.replicas.len() {
            if let Some(mut request) = self.replicas[at].in_flight.clone().filter(is_due) {
                self.carry_out(&mut request);
                self.replicas[at].in_flight = Some(request);
            }
        }
    }

    fn carry_out(&mut self, request: &mut InFlight) {
        request.arrives = None;
        let duration = Some(ElectionTiming::default().lease_duration());
        let holder = if request.is_release { String::new() } else { request.identity.clone() };
        let (is_current, transitions) = match &request.step {
            NextStep::Create => (self.lease.is_none(), 0),
            NextStep::Write { version, transitions, .. } => {
                (self.lease.as_ref().is_some_and(|lease| lease.version == *version), *transitions)
            }
            NextStep::Read | NextStep::Wait(_) => {
                request.answer = Some(ServerAnswer::Read(self.lease.clone()));
                return;
            }
        };
        if is_current {
            self.versions += 1;
            let version = self.versions.to_string();
            let record = LeaseRecord { holder, duration, transitions, version };
            self.lease = Some(record.clone());
            request.answer = Some(ServerAnswer::Written(record));
        } else {
            request.answer = Some(ServerAnswer::Refused);
        }
    }

    /// A replica runs: it receives an answer, or acts.
    fn wake(&mut self, at: usize) {
        if self.is_faulty && self.chance.is_one_in(60) {
            return self.crash(at);
        }
        if self.is_faulty && self.chance.is_one_in(20) {
            // The process does not run for a while; its clock does.
            self.replicas[at].wakes = self.now + self.chance.below(40 * SECOND);
            return;
        }
        let now = self.replicas[at].clock.at(self.now);
        if let Some(request) = self.replicas[at].in_flight.take() {
            if request.arrives.is_some() {
                // It gave up, and the request may still arrive.
                self.orphaned.push(InFlight { answer: None, ..request.clone() });
            }
            let election = &mut self.replicas[at].election;
            match request.answer.filter(|_| request.is_answered) {
                Some(ServerAnswer::Read(record)) => election.was_read(now, record),
                Some(ServerAnswer::Written(record)) if !request.is_release => {
                    election.was_written(request.sent, now, record);
                }
                Some(ServerAnswer::Refused) => election.was_refused(now),
                _ => election.has_failed(now),
            }
            self.note_term(at);
        }
        if self.replicas[at].is_leaving {
            return self.replace(at);
        }
        if self.is_faulty && self.chance.is_one_in(80) {
            return self.leave(at, now);
        }
        let step = self.replicas[at].election.next(now);
        self.note_term(at);
        match step {
            NextStep::Wait(until) => {
                let wakes = self.replicas[at].clock.when(until).max(self.now + 1);
                self.replicas[at].wakes = wakes;
            }
            step => self.send(at, step, false),
        }
    }

    fn send(&mut self, at: usize, step: NextStep, is_release: bool) {
        let delay = |world: &mut SimulatedCluster| {
            let is_slow = world.is_faulty && world.chance.is_one_in(4);
            world.chance.below(if is_slow { 12 * SECOND } else { SECOND / 20 })
        };
        let arrives = self.now + delay(self);
        let answered = arrives + delay(self);
        let is_lost = self.is_faulty && self.chance.is_one_in(8);
        let is_answer_lost = self.is_faulty && self.chance.is_one_in(8);
        let timeout = self.now + 5 * SECOND;
        let is_answered = !is_lost && !is_answer_lost && answered < timeout;
        let ends = if is_answered { answered } else { timeout };
        let replica = &mut self.replicas[at];
        let (identity, sent) = (replica.election.identity.clone(), replica.clock.at(self.now));
        let arrives = (!is_lost).then_some(arrives);
        replica.in_flight =
            Some(InFlight { identity, step, is_release, sent, arrives, answer: None, is_answered });
        replica.wakes = ends;
    }

    /// A replica stops leading and gives its lease back.
    fn leave(&mut self, at: usize, now: LocalTime) {
        let transitions =
            self.replicas[at].election.observed.as_ref().map_or(0, |(record, _)| record.transitions);
        let version = self.replicas[at].election.release();
        assert_eq!(self.replicas[at].election.term(now), None);
        self.note_term(at);
        match version {
            Some(version) => {
                self.replicas[at].is_leaving = true;
                self.send(at, NextStep::Write { version, transitions, is_acquisition: false }, true);
            }
            None => self.replace(at),
        }
    }

    fn crash(&mut self, at: usize) {
        let now = self.now;
        if let Some((_, until)) = &mut self.replicas[at].leads {
            *until = (*until).min(now);
        }
        self.replace(at);
    }

    /// A new process takes the place of one that is gone.
    fn replace(&mut self, at: usize) {
        let fresh = self.replica();
        let gone = std::mem::replace(&mut self.replicas[at], fresh);
        self.past.extend(gone.past.into_iter().chain(gone.leads));
        self.orphaned.extend(gone.in_flight.filter(|request| request.arrives.is_some()));
    }

    /// Notes from when to when a replica leads: `is_leader` compares the deadline with the clock.
    fn note_term(&mut self, at: usize) {
        let now = self.now;
        let replica = &mut self.replicas[at];
        let term = replica.election.term(replica.clock.at(now));
        let until = term.map(|term| replica.clock.when(term.deadline));
        replica.leads = match (replica.leads, until) {
            (Some((since, before)), Some(until)) if now < before => Some((since, until)),
            (before, until) => {
                let ended = before.map(|(since, before)| (since, before.min(now)));
                replica.past.extend(ended);
                until.map(|until| (now, until))
            }
        };
    }

    /// All terms of all replicas in true time, in the order in which they began.
    fn terms(&self) -> Vec<(TrueTime, TrueTime)> {
        let mut terms = self.past.clone();
        for replica in &self.replicas {
            terms.extend(replica.past.iter().copied().chain(replica.leads));
        }
        terms.retain(|(since, until)| since < until);
        terms.sort_unstable();
        terms
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Whatever requests are lost, late or carried out without an answer, and whichever replicas crash, freeze, leave or
    /// have a clock that runs 5 % faster than another's: no two replicas lead at the same moment.
    #[test]
    fn no_two_terms_overlap(numbers in prop::collection::vec(any::<u32>(), 200), replicas in 2_usize..5) {
        let mut world = SimulatedCluster::new(numbers, replicas);
        world.run_until(1800 * SECOND);
        let terms = world.terms();
        for pair in terms.windows(2) {
            prop_assert!(pair[0].1 <= pair[1].0, "{pair:?} overlap in {terms:?}");
        }

        // Once the network works again, a replica leads within the lease duration and a few retries.
        world.is_faulty = false;
        world.run_until(1860 * SECOND);
        let now = world.now;
        let leads = |replica: &Replica| replica.leads.is_some_and(|(_, until)| now < until);
        prop_assert_eq!(world.replicas.iter().filter(|replica| leads(replica)).count(), 1);
    }
}

#[test]
fn faulty_world_changes_its_leader_often() {
    // Otherwise the property above would hold for want of terms.
    let mut world = SimulatedCluster::new((0..200).map(|number| number * 7919).collect(), 3);
    world.run_until(1800 * SECOND);
    let terms = world.terms();
    assert!(terms.len() > 20, "{} terms", terms.len());
    let led: TrueTime = terms.iter().map(|(since, until)| until - since).sum();
    assert!(led > 600 * SECOND, "{led}");
}
