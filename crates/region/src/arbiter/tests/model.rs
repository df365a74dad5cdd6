//! A model in virtual time: GPUs whose driver gives time slices, containers that launch as the shim lets them, and an
//! arbiter that wakes up late. Everything follows from a seed.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::{
    ContenderView, DEFAULT_RUN_AHEAD_NS, GateState, MICRO, MILLI, PERCENT, SchedulerDecision, TurnScheduler,
    WHOLE_GPU,
};

/// Time for which the driver runs one container's kernels while others have some queued.
const GPU_SLICE_NS: u64 = 2 * MILLI;
/// The shim queues kernels of at least this length one at a time.
const LONG_KERNEL_NS: u64 = 10 * MILLI;
/// Time at which every simulation begins.
const START: u64 = 1_000_000 * MILLI;

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LaunchPattern {
    /// Launches as fast as it may.
    Saturates,
    /// Launches one kernel, waits for it, pauses for this long, and repeats.
    Synchronizes(u64),
    /// Launches this much GPU time, waits for it, sleeps for this long.
    Bursts(u64, u64),
    /// Does nothing until this time, saturates afterwards.
    From(u64),
    /// Reports that it waits, and never wakes up.
    Stopped,
}

/// What the processes of a container report about it. They still work as much as they can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reporting {
    Honest,
    /// Forges what is not `None`.
    Forged {
        occupied: Option<bool>,
        waiting: Option<bool>,
    },
    /// A random view at every poll.
    Random,
}

/// A container, which may have several GPUs. It has one process, a *rank*, on each.
#[derive(Clone, Debug)]
pub(super) struct SimulatedTenant {
    pub(super) view: ContenderView,
    pub(super) gpus: Vec<usize>,
    pub(super) pattern: LaunchPattern,
    pub(super) kernels: Vec<u64>,
    /// Length of a collective that follows every kernel: it spins until it has begun on all GPUs.
    collective: Option<u64>,
    reporting: Reporting,
    /// Least and most time that a rank takes to wake up when its gate opens.
    wakes: (u64, u64),
}

impl SimulatedTenant {
    pub(super) fn new(cores: u32, ceiling: u32, kernels: &[u64]) -> Self {
        let (cores, ceiling) = (cores * PERCENT, ceiling * PERCENT);
        Self {
            view: ContenderView { cores, ceiling, ..ContenderView::default() },
            gpus: vec![0],
            pattern: LaunchPattern::Saturates,
            kernels: kernels.to_vec(),
            collective: None,
            reporting: Reporting::Honest,
            wakes: (20 * MICRO, 200 * MICRO),
        }
    }

    pub(super) fn on(self, gpus: &[usize]) -> Self {
        Self { gpus: gpus.to_vec(), ..self }
    }

    pub(super) fn pattern(self, pattern: LaunchPattern) -> Self {
        Self { pattern, ..self }
    }

    pub(super) fn collective(self, nanos: u64) -> Self {
        Self { collective: Some(nanos), ..self }
    }

    pub(super) fn reporting(self, reporting: Reporting) -> Self {
        Self { reporting, ..self }
    }

    pub(super) fn wakes(self, soonest: u64, latest: u64) -> Self {
        Self { wakes: (soonest, latest), ..self }
    }

    pub(super) fn priority(mut self, priority: u32) -> Self {
        self.view.priority = priority;
        self
    }

    pub(super) fn low_latency(mut self) -> Self {
        self.view.low_latency = true;
        self
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    left: u64,
    /// The number of a collective.
    collective: Option<u64>,
}

/// Why a rank does not launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blocked {
    /// It launches, or does something else.
    No,
    /// Until its gate opens.
    Gate,
    /// Until less is queued.
    Queue,
    /// Until its kernels have run.
    Sync,
}

/// One process of a container, on one GPU. Its index is that of the contender.
#[derive(Clone, Debug)]
pub(super) struct Rank {
    pub(super) tenant: usize,
    gpu: usize,
    pub(super) gate: GateState,
    /// Whether launches look at the gate at all.
    gated: bool,
    pub(super) blocked: Blocked,
    pub(super) queue: VecDeque<Kernel>,
    queued: u64,
    /// Since when the queue is not empty.
    since: u64,
    progress: u64,
    burst: u64,
    /// Number of collectives launched, and begun.
    pub(super) launched: u64,
    pub(super) begun: u64,
    /// Of several events to continue launching, only the last one counts.
    token: u64,
    /// Number of collectives, or of kernels if there are none, that have run.
    pub(super) steps: u64,
    /// GPU time that it really had, and was charged.
    pub(super) had: u64,
    pub(super) charged: u64,
    /// When it last began to wait for its gate; and how long it waited at first, and at most.
    asked: u64,
    pub(super) first_wait: Option<u64>,
    pub(super) longest_wait: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Launch(usize, u64),
    Wake(usize),
    Doorbell,
    Timer(u64),
}

#[derive(Clone, Debug, Default)]
pub(super) struct Gpu {
    /// The rank whose kernels run, and for how long.
    lane: usize,
    slice: u64,
    pub(super) busy: u64,
    idle_since: Option<u64>,
    /// Longest time for which it was idle although a container with an unlimited ceiling waited.
    pub(super) longest_idle: u64,
}

/// All GPUs of a node, and the containers that use them.
#[derive(Debug)]
pub(super) struct Simulation {
    pub(super) now: u64,
    pub(super) tenants: Vec<SimulatedTenant>,
    /// `None` for a rank whose container has left.
    pub(super) ranks: Vec<Option<Rank>>,
    pub(super) gpus: Vec<Gpu>,
    pub(super) scheduler: TurnScheduler,
    pub(super) random: XorShift,
    pub(super) decisions: u64,
    /// Most nanoseconds by which the charges for a GPU exceeded the time that they are for.
    pub(super) overcharged: u64,
    /// Deepest debt of any contender.
    pub(super) deepest_debt: i64,
    decision: SchedulerDecision,
    decided_at: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    order: u64,
    timer: u64,
}

impl Simulation {
    pub(super) fn new(seed: u64, tenants: Vec<SimulatedTenant>) -> Self {
        let mut simulation = Self {
            now: START,
            tenants: Vec::new(),
            ranks: Vec::new(),
            gpus: Vec::new(),
            scheduler: TurnScheduler::new(),
            random: XorShift::new(seed),
            decisions: 0,
            overcharged: 0,
            deepest_debt: 0,
            decision: SchedulerDecision::default(),
            decided_at: START,
            events: BinaryHeap::new(),
            order: 0,
            timer: 0,
        };
        for tenant in tenants {
            simulation.join(tenant);
        }
        simulation.at(START, Event::Doorbell);
        simulation
    }

    /// Adds a container. Returns the index of its first rank.
    pub(super) fn join(&mut self, tenant: SimulatedTenant) -> usize {
        let (number, first) = (self.tenants.len(), self.ranks.len());
        let start = match tenant.pattern {
            LaunchPattern::From(after) => self.now + after,
            _ => self.now,
        };
        for &gpu in &tenant.gpus {
            let index = self.ranks.len();
            self.gpus.resize(self.gpus.len().max(gpu + 1), Gpu::default());
            self.scheduler.add(index, number as u64, gpu);
            self.ranks.push(Some(Rank {
                tenant: number,
                gpu,
                gate: GateState::Closed,
                gated: true,
                blocked: Blocked::No,
                queue: VecDeque::new(),
                queued: 0,
                since: 0,
                progress: 0,
                burst: 0,
                launched: 0,
                begun: 0,
                token: 0,
                steps: 0,
                had: 0,
                charged: 0,
                asked: self.now,
                first_wait: None,
                longest_wait: 0,
            }));
            let late = self.random.range(0, 300 * MICRO);
            self.launch_at(index, start + late);
        }
        self.tenants.push(tenant);
        first
    }

    /// Removes the container of a rank.
    pub(super) fn leave(&mut self, rank: usize) {
        let tenant = self.rank(rank).tenant;
        for index in 0..self.ranks.len() {
            if self.ranks[index].take_if(|rank| rank.tenant == tenant).is_some() {
                self.scheduler.remove(index);
            }
        }
    }

    pub(super) fn rank(&mut self, index: usize) -> &mut Rank {
        self.ranks[index].as_mut().unwrap()
    }

    fn at(&mut self, when: u64, event: Event) {
        self.order += 1;
        self.events.push(Reverse((when, self.order, event)));
    }

    fn launch_at(&mut self, index: usize, when: u64) {
        let rank = self.rank(index);
        rank.token += 1;
        let token = rank.token;
        self.at(when, Event::Launch(index, token));
    }

    fn launch_after(&mut self, index: usize, soonest: u64, latest: u64) {
        let late = self.random.range(soonest, latest);
        self.launch_at(index, self.now + late);
    }

    /// Returns the GPU time that each rank had in `span` from now on.
    pub(super) fn run(&mut self, span: u64) -> Vec<u64> {
        let had = |ranks: &[Option<Rank>]| -> Vec<u64> {
            ranks.iter().map(|rank| rank.as_ref().map_or(0, |rank| rank.had)).collect()
        };
        let before = had(&self.ranks);
        let end = self.now + span;
        loop {
            let gpu = (0..self.gpus.len()).filter_map(|gpu| self.gpu_event(gpu)).min().unwrap_or(u64::MAX);
            let next = self.events.peek().map_or(u64::MAX, |Reverse((when, ..))| *when);
            let when = gpu.min(next).max(self.now);
            if when > end {
                break;
            }
            self.advance(when);
            if next <= when
                && let Some(Reverse((.., event))) = self.events.pop()
            {
                self.handle(event);
            }
        }
        self.advance(end);
        let after = had(&self.ranks);
        after.iter().zip(before.iter().chain(std::iter::repeat(&0))).map(|(after, it)| after - it).collect()
    }

    fn has_work(&self, index: usize) -> bool {
        self.ranks.get(index).and_then(Option::as_ref).is_some_and(|rank| !rank.queue.is_empty())
    }

    /// Returns whether the rank's first kernel is a collective that waits for another rank.
    fn spins(&self, rank: &Rank) -> bool {
        let Some(number) = rank.queue.front().and_then(|kernel| kernel.collective) else { return false };
        self.ranks.iter().flatten().any(|peer| peer.tenant == rank.tenant && peer.begun <= number)
    }

    /// Lets a rank run if the last one has used its slice. Returns when that changes next: a kernel ends, or a slice.
    fn gpu_event(&mut self, gpu: usize) -> Option<u64> {
        let Gpu { lane, slice, .. } = self.gpus[gpu];
        let is_here = |it: usize| self.ranks[it].as_ref().is_some_and(|rank| rank.gpu == gpu);
        if slice == 0 || !(self.has_work(lane) && is_here(lane)) {
            let count = self.ranks.len();
            let lane = (1..=count)
                .map(|step| (lane + step) % count)
                .find(|&index| self.has_work(index) && is_here(index))?;
            (self.gpus[gpu].lane, self.gpus[gpu].slice) = (lane, GPU_SLICE_NS);
        }
        let Gpu { lane, slice, .. } = self.gpus[gpu];
        let rank = self.rank(lane);
        if let Some(number) = rank.queue[0].collective {
            rank.begun = rank.begun.max(number + 1);
        }
        let rank = self.ranks[lane].as_ref()?;
        let left = if self.spins(rank) { u64::MAX } else { rank.queue[0].left };
        Some(self.now + left.min(slice))
    }

    /// Lets time pass, at most up to the next change.
    fn advance(&mut self, to: u64) {
        let passed = to - self.now;
        self.now = to;
        for gpu in 0..self.gpus.len() {
            let lane = self.gpus[gpu].lane;
            let runs = self.has_work(lane) && self.gpus[gpu].slice > 0;
            let spins = self.ranks[lane].as_ref().is_some_and(|rank| self.spins(rank));
            if runs && self.rank(lane).gpu == gpu {
                self.gpus[gpu].slice -= passed;
                self.gpus[gpu].busy += passed;
                self.run_kernel(lane, passed, spins);
            }
            let work = |rank: &Rank| rank.gpu == gpu && !rank.queue.is_empty();
            let wants = |rank: &Rank| {
                let tenant = &self.tenants[rank.tenant];
                rank.gpu == gpu
                    && rank.blocked == Blocked::Gate
                    && tenant.view.ceiling >= WHOLE_GPU
                    && tenant.pattern != LaunchPattern::Stopped
            };
            let is_idle = !self.ranks.iter().flatten().any(work) && self.ranks.iter().flatten().any(wants);
            let state = &mut self.gpus[gpu];
            if is_idle {
                let since = *state.idle_since.get_or_insert(to);
                state.longest_idle = state.longest_idle.max(to - since);
            } else {
                state.idle_since = None;
            }
        }
    }

    fn run_kernel(&mut self, index: usize, passed: u64, spins: bool) {
        let tenant = self.rank(index).tenant;
        let pattern = self.tenants[tenant].pattern;
        let rank = self.rank(index);
        rank.had += passed;
        let head = &mut rank.queue[0];
        if spins {
            return;
        }
        head.left -= passed;
        rank.queued -= passed;
        if rank.queue[0].left > 0 {
            return;
        }
        let ended = rank.queue.pop_front().unwrap();
        rank.progress += 1;
        rank.steps += u64::from(ended.collective.is_some() || rank.launched == 0);
        match rank.blocked {
            Blocked::Queue => self.launch_after(index, 30 * MICRO, 90 * MICRO),
            Blocked::Sync if rank.queue.is_empty() => {
                let pause = match pattern {
                    LaunchPattern::Synchronizes(pause) | LaunchPattern::Bursts(_, pause) => pause,
                    _ => 0,
                };
                self.launch_after(index, pause + 5 * MICRO, pause + 50 * MICRO);
            }
            Blocked::No | Blocked::Gate | Blocked::Sync => {}
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Doorbell => self.arbitrate(),
            Event::Timer(number) if number == self.timer => self.arbitrate(),
            Event::Timer(_) => {}
            Event::Wake(index) | Event::Launch(index, _) => {
                let Some(rank) = self.ranks[index].as_ref() else { return };
                let due = match event {
                    Event::Launch(_, token) => rank.token == token,
                    _ => rank.blocked == Blocked::Gate,
                };
                if due {
                    self.launch(index);
                }
            }
        }
    }

    /// Simulates what the program and the shim do at a launch.
    fn launch(&mut self, index: usize) {
        let now = self.now;
        let run_ahead = self.scheduler.run_ahead(index);
        let is_watched = self.scheduler.is_active(index);
        let (rank, random) = (self.ranks[index].as_mut().unwrap(), &mut self.random);
        let tenant = &self.tenants[rank.tenant];
        let passes = match rank.gate {
            _ if !rank.gated => true,
            GateState::Open => tenant.pattern != LaunchPattern::Stopped,
            GateState::Draining => rank.queue.is_empty(),
            GateState::Closed => false,
        };
        if !passes {
            if rank.blocked != Blocked::Gate {
                (rank.blocked, rank.asked) = (Blocked::Gate, now);
                let late = random.range(20 * MICRO, 120 * MICRO);
                self.at(now + late, Event::Doorbell);
            }
            return;
        }
        if rank.blocked == Blocked::Gate {
            rank.first_wait.get_or_insert(now - rank.asked);
            rank.longest_wait = rank.longest_wait.max(now - rank.asked);
        }
        let kernel = tenant.kernels[random.range(0, tenant.kernels.len() as u64) as usize];
        let least = if kernel >= LONG_KERNEL_NS || run_ahead < DEFAULT_RUN_AHEAD_NS { 1 } else { 3 };
        if rank.queue.len() >= least && rank.queued + kernel > run_ahead {
            rank.blocked = Blocked::Queue;
            return;
        }
        let rings = rank.queue.is_empty() && !is_watched;
        if rank.queue.is_empty() {
            rank.since = now;
        }
        rank.queue.push_back(Kernel { left: kernel, collective: None });
        rank.queued += kernel;
        rank.burst += kernel;
        if let Some(length) = tenant.collective {
            rank.queue.push_back(Kernel { left: length, collective: Some(rank.launched) });
            rank.launched += 1;
            rank.queued += length;
        }
        rank.blocked = match tenant.pattern {
            LaunchPattern::Synchronizes(_) => Blocked::Sync,
            LaunchPattern::Bursts(work, _) if rank.burst >= work => Blocked::Sync,
            _ => Blocked::No,
        };
        if rank.blocked == Blocked::Sync {
            rank.burst = 0;
        } else {
            self.launch_after(index, 2 * MICRO, 6 * MICRO);
        }
        if rings {
            let late = self.random.range(20 * MICRO, 120 * MICRO);
            self.at(now + late, Event::Doorbell);
        }
    }

    fn view(&mut self, index: usize) -> Option<ContenderView> {
        let rank = self.ranks[index].as_ref()?;
        let tenant = &self.tenants[rank.tenant];
        let honest = ContenderView {
            waiting: rank.blocked == Blocked::Gate,
            occupied: !rank.queue.is_empty(),
            since: if rank.queue.is_empty() { 0 } else { rank.since },
            progress: rank.progress,
            ..tenant.view
        };
        Some(match tenant.reporting {
            Reporting::Honest => honest,
            Reporting::Forged { occupied, waiting } => ContenderView {
                occupied: occupied.unwrap_or(honest.occupied),
                waiting: waiting.unwrap_or(honest.waiting),
                ..honest
            },
            Reporting::Random => ContenderView {
                waiting: self.random.range(0, 2) == 0,
                occupied: self.random.range(0, 2) == 0,
                since: self.random.range(0, u64::MAX),
                progress: self.random.range(0, 5),
                ..honest
            },
        })
    }

    fn arbitrate(&mut self) {
        let now = self.now;
        self.decisions += 1;
        let views: Vec<_> = (0..self.ranks.len()).map(|index| self.view(index)).collect();
        let mut decision = std::mem::take(&mut self.decision);
        self.scheduler.decide(now, &views, &mut decision);
        let mut charged = vec![0; self.gpus.len()];
        for index in 0..self.ranks.len() {
            let charge = self.scheduler.take_charge(index);
            self.deepest_debt = self.deepest_debt.min(self.scheduler.credit(index));
            let Some(rank) = &mut self.ranks[index] else { continue };
            rank.charged += charge;
            charged[rank.gpu] += charge;
        }
        let most = charged.into_iter().max().unwrap_or(0);
        self.overcharged = self.overcharged.max(most.saturating_sub(now - self.decided_at));
        self.decided_at = now;
        for &(index, gate) in &decision.gates {
            let rank = self.rank(index);
            rank.gate = gate;
            // A thread that waits for its queue looks at the gate, too.
            if rank.blocked == Blocked::Queue {
                self.launch_after(index, 60 * MICRO, 500 * MICRO);
            }
        }
        for index in 0..self.ranks.len() {
            let Some(rank) = &self.ranks[index] else { continue };
            let (gpu, tenant) = (rank.gpu, rank.tenant);
            let others = self.ranks.iter().flatten().any(|it| it.gpu == gpu && it.tenant != tenant);
            let gated = others || self.tenants[tenant].view.ceiling < WHOLE_GPU;
            let (soonest, latest) = self.tenants[tenant].wakes;
            let rank = self.rank(index);
            let opened = decision.gates.iter().any(|&(it, gate)| it == index && gate != GateState::Closed);
            let woken = rank.blocked == Blocked::Gate && (opened || (rank.gated && !gated));
            rank.gated = gated;
            if woken {
                let late = self.random.range(soonest, latest);
                self.at(now + late, Event::Wake(index));
            }
        }
        self.timer += 1;
        let late = self.random.range(5 * MICRO, 60 * MICRO);
        self.at(decision.next + late, Event::Timer(self.timer));
        self.decision = decision;
    }
}
