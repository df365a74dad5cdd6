//! A model in virtual time: a GPU, containers that launch as the shim lets them, and an arbiter that wakes up late.
//! Everything follows from a seed.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::{ContainerView, MICRO, MILLI, PERCENT, TIME_CHUNK_NS, TurnDecision, TurnScheduler, WHOLE_GPU};

const GPU_SLICE_NS: u64 = 2 * MILLI;
const QUEUE_DEPTH: usize = 1024;
const UNKNOWN_COST_GUESS_NS: u64 = 100 * MICRO;

/// A small random number generator; the model needs no good one.
#[derive(Clone, Debug)]
pub(super) struct XorShift(u64);

impl XorShift {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn range(&mut self, from: u64, to: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        from + self.0 % (to - from).max(1)
    }
}

/// How a container's program launches work.
#[derive(Clone, Copy, Debug)]
pub(super) enum LaunchPattern {
    /// Launches as fast as it may.
    Saturates,
    /// Launches one kernel, waits for it, pauses for this long, and repeats.
    Synchronizes(u64),
    /// Saturates for this much GPU time, waits for it, sleeps for this long.
    Bursts(u64, u64),
    /// Does nothing until this time, saturates afterwards.
    From(u64),
    /// Reports that it waits, and never wakes up.
    Stopped,
}

/// What a container reports about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reporting {
    Honest,
    /// `busy_until` is always this far in the future.
    NeverDrained(u64),
    /// `busy_until` is always nothing.
    AlwaysDrained,
    /// Any of it may be false. The container still works as much as it is granted, and does not wait when it reports
    /// so.
    Forged {
        spent: ForgedValue,
        busy_until: ForgedValue,
        waiting: Option<bool>,
    },
}

/// How a number is forged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ForgedValue {
    /// The true value: nothing is forged.
    None,
    /// Always this value, whatever the truth is.
    Always(u64),
    /// The true value plus this.
    Off(u64),
    /// The true value divided by this.
    Part(u64),
    /// A random value at every poll.
    Anything,
    /// The true value, zero or the maximum, chosen at every poll.
    Extremes,
}

impl ForgedValue {
    fn apply(self, truth: u64, random: &mut XorShift) -> u64 {
        match self {
            Self::None => truth,
            Self::Always(number) => number,
            Self::Off(number) => truth.wrapping_add(number),
            Self::Part(number) => truth / number,
            Self::Anything => random.range(0, u64::MAX),
            Self::Extremes => [truth, 0, u64::MAX][usize::try_from(random.range(0, 3)).unwrap()],
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct SimulatedTenant {
    pub(super) view: ContainerView,
    pub(super) pattern: LaunchPattern,
    pub(super) reporting: Reporting,
    pub(super) kernels: Vec<u64>,
    /// Least and most time that it takes to wake up when it gets a turn.
    wakes: (u64, u64),
    learned: Vec<Option<u64>>,
    left: i64,
    seen: u64,
    turn: u64,
    open: bool,
    allowed: u64,
    asleep: bool,
    burst: u64,
    launched: u64,
    queue: VecDeque<(u64, usize, u64, bool)>,
    /// Blocked until its queue has space, or is empty.
    blocked: Option<usize>,
    /// GPU time that it really had.
    pub(super) had: u64,
    /// When it last had to wait; and the longest time that it waited for a turn.
    asked: u64,
    pub(super) longest_wait: u64,
    pub(super) first_wait: Option<u64>,
}

impl SimulatedTenant {
    pub(super) fn new(cores: u32, ceiling: u32, kernels: &[u64]) -> Self {
        Self {
            view: ContainerView {
                cores: cores * PERCENT,
                ceiling: ceiling * PERCENT,
                ..ContainerView::default()
            },
            pattern: LaunchPattern::Saturates,
            reporting: Reporting::Honest,
            kernels: kernels.to_vec(),
            wakes: (20 * MICRO, 200 * MICRO),
            learned: vec![None; kernels.len()],
            left: 0,
            seen: 0,
            turn: 0,
            open: false,
            allowed: 0,
            asleep: false,
            burst: 0,
            launched: 0,
            queue: VecDeque::new(),
            blocked: None,
            had: 0,
            asked: 0,
            longest_wait: 0,
            first_wait: None,
        }
    }

    pub(super) fn pattern(mut self, pattern: LaunchPattern) -> Self {
        self.pattern = pattern;
        self
    }

    pub(super) fn wakes(mut self, soonest: u64, latest: u64) -> Self {
        self.wakes = (soonest, latest);
        self
    }

    pub(super) fn reporting(mut self, reporting: Reporting) -> Self {
        self.reporting = reporting;
        self
    }

    pub(super) fn priority(mut self, priority: u32) -> Self {
        self.view.priority = priority;
        self
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Step(usize),
    Wake(usize),
    Doorbell,
    Timer(u64),
}

/// One GPU and all containers that use it.
#[derive(Debug)]
pub(super) struct Simulation {
    pub(super) now: u64,
    pub(super) tenants: Vec<Option<SimulatedTenant>>,
    pub(super) scheduler: TurnScheduler,
    pub(super) random: XorShift,
    pub(super) orders: Vec<(u64, TurnDecision)>,
    /// Longest time for which the GPU was idle although a container with an unlimited ceiling waited.
    pub(super) longest_idle: u64,
    pub(super) busy: u64,
    /// GPU time of each container in each millisecond.
    pub(super) trace: Vec<Vec<u64>>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    order: u64,
    timer: u64,
    lane: usize,
    slice: u64,
    idle_since: Option<u64>,
    pub(super) decisions: u64,
}

impl Simulation {
    pub(super) fn new(seed: u64, tenants: Vec<SimulatedTenant>) -> Self {
        let mut simulation = Self {
            now: 1_000_000 * MILLI,
            tenants: Vec::new(),
            scheduler: TurnScheduler::new(),
            random: XorShift::new(seed),
            orders: Vec::new(),
            longest_idle: 0,
            busy: 0,
            trace: Vec::new(),
            events: BinaryHeap::new(),
            order: 0,
            timer: 0,
            lane: 0,
            slice: 0,
            idle_since: None,
            decisions: 0,
        };
        for tenant in tenants {
            simulation.join(tenant);
        }
        simulation.at(simulation.now, Event::Doorbell);
        simulation
    }

    pub(super) fn join(&mut self, mut tenant: SimulatedTenant) -> usize {
        let index = self.tenants.len();
        tenant.asked = self.now;
        let start = match tenant.pattern {
            LaunchPattern::From(when) => self.now + when,
            _ => self.now,
        };
        self.tenants.push(Some(tenant));
        let late = self.random.range(0, 300 * MICRO);
        self.at(start + late, Event::Step(index));
        index
    }

    pub(super) fn leave(&mut self, index: usize) -> Option<SimulatedTenant> {
        self.tenants[index].take()
    }

    pub(super) fn tenant(&mut self, index: usize) -> &mut SimulatedTenant {
        self.tenants[index].as_mut().unwrap()
    }

    fn at(&mut self, when: u64, event: Event) {
        self.order += 1;
        self.events.push(Reverse((when, self.order, event)));
    }

    /// Returns the GPU time that each container had in `span` from now on.
    pub(super) fn run(&mut self, span: u64) -> Vec<u64> {
        let before: Vec<u64> = self.tenants.iter().map(|it| it.as_ref().map_or(0, |it| it.had)).collect();
        let end = self.now + span;
        loop {
            let gpu = self.gpu_event();
            let next = self.events.peek().map(|Reverse((when, ..))| *when);
            let when = gpu.unwrap_or(u64::MAX).min(next.unwrap_or(u64::MAX));
            if when > end {
                break;
            }
            self.advance(when);
            if let Some(Reverse((at, _, event))) = self.events.peek().copied()
                && at <= when
            {
                self.events.pop();
                self.handle(event);
            }
        }
        self.advance(end);
        let had = |index: usize| self.tenants[index].as_ref().map_or(0, |it| it.had);
        (0..self.tenants.len()).map(|index| had(index) - before.get(index).copied().unwrap_or(0)).collect()
    }

    fn runs(&self, index: usize) -> bool {
        self.tenants.get(index).and_then(Option::as_ref).is_some_and(|it| !it.queue.is_empty())
    }

    /// Returns when the GPU's state changes next: a kernel ends, or a slice.
    fn gpu_event(&mut self) -> Option<u64> {
        if !self.runs(self.lane) || self.slice == 0 {
            let count = self.tenants.len();
            let next =
                (1..=count).map(|step| (self.lane + step) % count.max(1)).find(|index| self.runs(*index));
            self.lane = next?;
            self.slice = GPU_SLICE_NS;
        }
        let head = self.tenants[self.lane].as_ref()?.queue.front()?.0;
        Some(self.now + head.min(self.slice))
    }

    /// Lets time pass, at most up to the next change.
    fn advance(&mut self, to: u64) {
        let passed = to - self.now;
        let lane = self.lane;
        self.now = to;
        let runs = self.runs(lane) && self.slice > 0;
        if runs {
            self.slice -= passed;
            self.busy += passed;
            let milli = usize::try_from(to / MILLI - 1_000_000).unwrap();
            if self.trace.len() <= milli {
                self.trace.resize(milli + 1, Vec::new());
            }
            let seats = self.tenants.len();
            self.trace[milli].resize(seats, 0);
            self.trace[milli][lane] += passed;
            let noise = self.random.range(995, 1006);
            let tenant = self.tenants[lane].as_mut().unwrap();
            tenant.had += passed;
            let head = tenant.queue.front_mut().unwrap();
            head.0 -= passed;
            if head.0 == 0 {
                let (_, key, charged, sampled) = tenant.queue.pop_front().unwrap();
                if sampled {
                    // The duration that two events measured, slightly off the true one.
                    let measured = tenant.kernels[key] * noise / 1000;
                    tenant.learned[key] = Some(measured);
                    tenant.view.spent = tenant.view.spent.wrapping_add(measured).wrapping_sub(charged);
                }
                if tenant.blocked.is_some_and(|room| tenant.queue.len() <= room) {
                    tenant.blocked = None;
                    let after = match tenant.pattern {
                        LaunchPattern::Synchronizes(think) => think,
                        LaunchPattern::Bursts(_, sleep) if tenant.burst == 0 => sleep,
                        _ => 0,
                    };
                    let after = after + self.random.range(5 * MICRO, 50 * MICRO);
                    self.at(to + after, Event::Step(lane));
                }
            }
        }
        let idle = !self.tenants.iter().flatten().any(|it| !it.queue.is_empty());
        let wanted = self.tenants.iter().flatten().any(|it| {
            it.view.waiting && it.view.ceiling >= WHOLE_GPU && !matches!(it.pattern, LaunchPattern::Stopped)
        });
        if idle && wanted {
            let since = *self.idle_since.get_or_insert(to);
            self.longest_idle = self.longest_idle.max(to - since);
        } else {
            self.idle_since = None;
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Doorbell => self.arbitrate(),
            Event::Timer(number) if number == self.timer => self.arbitrate(),
            Event::Timer(_) => {}
            Event::Wake(index) => {
                let now = self.now;
                if let Some(tenant) = &mut self.tenants[index]
                    && tenant.asleep
                    && !matches!(tenant.pattern, LaunchPattern::Stopped)
                {
                    tenant.asleep = false;
                    tenant.view.waiting = false;
                    if tenant.open {
                        tenant.first_wait.get_or_insert(now - tenant.asked);
                        tenant.longest_wait = tenant.longest_wait.max(now - tenant.asked);
                    }
                    self.step(index, true);
                }
            }
            Event::Step(index) => self.step(index, false),
        }
    }

    /// Simulates what the shim does at a launch.
    fn step(&mut self, index: usize, woken: bool) {
        let now = self.now;
        let Some(tenant) = self.tenants[index].as_mut() else { return };
        let key = usize::try_from(self.random.range(0, tenant.kernels.len() as u64)).unwrap();
        let charged = tenant.learned[key].unwrap_or(UNKNOWN_COST_GUESS_NS);
        // A kernel of unknown length is launched alone until it was measured.
        let unknown = tenant.learned[key].is_none();
        let fast = tenant.seen == tenant.turn && tenant.left > 0;
        if !fast {
            tenant.seen = tenant.turn;
            #[expect(clippy::cast_possible_wrap)]
            let room = tenant.allowed.wrapping_sub(tenant.view.spent) as i64;
            if !tenant.open || (tenant.left <= 0 && room <= 0) {
                if !woken {
                    tenant.asked = now;
                }
                tenant.asleep = true;
                tenant.view.waiting = true;
                let late = self.random.range(20 * MICRO, 120 * MICRO);
                self.at(now + late, Event::Doorbell);
                return;
            }
            if tenant.left <= 0 {
                let owed = u64::try_from(-tenant.left).unwrap_or(0);
                let chunk = (charged + owed).max(TIME_CHUNK_NS);
                tenant.view.spent = tenant.view.spent.wrapping_add(chunk);
                tenant.view.busy_until = tenant.view.busy_until.max(now) + chunk;
                tenant.left += i64::try_from(chunk).unwrap();
            }
        }
        tenant.left -= i64::try_from(charged).unwrap();
        tenant.launched += 1;
        let sampled = unknown || tenant.launched % 128 == 0;
        tenant.queue.push_back((tenant.kernels[key], key, charged, sampled));
        let room = match tenant.pattern {
            _ if unknown => Some(0),
            LaunchPattern::Synchronizes(_) => Some(0),
            LaunchPattern::Bursts(work, _) => {
                tenant.burst += charged;
                (tenant.burst >= work).then(|| {
                    tenant.burst = 0;
                    0
                })
            }
            _ => (tenant.queue.len() >= QUEUE_DEPTH).then_some(QUEUE_DEPTH - 1),
        };
        if room.is_some() {
            tenant.blocked = room;
        } else {
            let cost = self.random.range(2 * MICRO, 6 * MICRO);
            self.at(now + cost, Event::Step(index));
        }
    }

    fn arbitrate(&mut self) {
        let now = self.now;
        self.decisions += 1;
        let random = &mut self.random;
        let views: Vec<Option<ContainerView>> = self
            .tenants
            .iter()
            .map(|tenant| {
                let tenant = tenant.as_ref()?;
                let view = tenant.view;
                Some(match tenant.reporting {
                    Reporting::Honest => view,
                    Reporting::NeverDrained(far) => ContainerView { busy_until: now + far, ..view },
                    Reporting::AlwaysDrained => ContainerView { busy_until: 0, ..view },
                    Reporting::Forged { spent, busy_until, waiting } => ContainerView {
                        spent: spent.apply(view.spent, random),
                        busy_until: busy_until.apply(view.busy_until, random),
                        waiting: waiting.unwrap_or(view.waiting),
                        ..view
                    },
                })
            })
            .collect();
        let order = self.scheduler.decide(now, &views);
        self.orders.push((now, order));
        if let Some(index) = order.close {
            self.tenant(index).open = false;
            self.tenant(index).turn += 1;
        }
        if let Some(open) = order.open {
            let (soonest, latest) = self.tenant(open.index).wakes;
            let late = self.random.range(soonest, latest);
            let tenant = self.tenant(open.index);
            tenant.open = true;
            tenant.turn += 1;
            // A container that forged its total still has the amount that it was granted.
            let reported = views[open.index].map_or(0, |view| view.spent);
            tenant.allowed = open.allowed.wrapping_sub(reported).wrapping_add(tenant.view.spent);
            self.at(now + late, Event::Wake(open.index));
        }
        self.timer += 1;
        let late = self.random.range(5 * MICRO, 60 * MICRO);
        let timer = Event::Timer(self.timer);
        self.at(order.next + late, timer);
    }
}
