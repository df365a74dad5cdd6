//! The turn scheduler: decides whose launches pass on each GPU, and whom the GPU's time is charged to.
//!
//! | file | content |
//! |---|---|
//! | `charging` | charges the time that has passed to the containers that occupied the GPUs |
//! | `regime` | per GPU: whether containers take turns, or the driver interleaves them |
//! | `turns` | ends turns, and starts the next ones |
//!
//! A container that has several GPUs gets its turns on all of them together, because its kernels may wait for each
//! other.

mod charging;
mod regime;
mod turns;

use super::account::{Account, ComputeShare, Pace};
use super::tuning;
use crate::protocol::{DEFAULT_RUN_AHEAD_NS, HEARTBEAT_INTERVAL_NS, MAX_GPUS};
use regime::RegimeState;
use turns::{Candidate, Turn};

/// State of one container on one GPU, as polled. The daemon sets the share; the other fields come from the container's
/// own processes and may have any value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContenderView {
    /// Guaranteed compute, in thousandths of a percent of the GPU's time.
    pub cores: u32,
    /// Compute that the container may reach with time that others leave unused; equal to `cores` in hard mode.
    pub ceiling: u32,
    /// Priority among containers that want the same turn: the higher goes first.
    pub priority: u32,
    /// Whether the container asked for short waits.
    pub low_latency: bool,
    /// Whether a thread of the container waits for a turn.
    pub waiting: bool,
    /// Whether the container's work occupies the GPU.
    pub occupied: bool,
    /// Time at which the work began, on the clock of `now`; zero if it is not known.
    pub since: u64,
    /// A number that changes when some work has finished.
    pub progress: u64,
}

/// Whether launches of a container pass on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GateState {
    /// Launches wait.
    #[default]
    Closed,
    /// Launches wait, except into streams that have nothing queued.
    Draining,
    /// Launches pass.
    Open,
}

/// What to do, and when to decide again at the latest.
#[derive(Clone, Debug, Default)]
pub struct SchedulerDecision {
    /// The contenders whose launches pass or wait from now on. Closed ones come first.
    pub gates: Vec<(usize, GateState)>,
    /// Time of the next decision, even if no doorbell rings.
    pub next: u64,
}

/// One container on one GPU.
#[derive(Clone, Debug)]
struct Contender {
    container: u64,
    gpu: usize,
    account: Account,
    view: ContenderView,
    /// Whether it occupied the GPU at the previous decision.
    was_occupied: bool,
    gate: GateState,
    /// Time from which on it occupied the GPU without being allowed to; zero if it does not.
    overrun_since: u64,
    /// When its progress last changed.
    progress_at: u64,
    /// When it last waited or occupied the GPU.
    active_at: u64,
    /// While its container takes no turns: whether its ceiling allows launches now.
    within_budget: bool,
    /// Whether the container has other GPUs.
    has_siblings: bool,
    /// Whether no view of it was seen yet, so that its share is not known.
    is_new: bool,
    /// Nanoseconds charged in total, and not yet taken by [`TurnScheduler::take_charge`].
    charged: u64,
    untaken: u64,
}

impl Contender {
    fn is_active(&self, now: u64) -> bool {
        now.saturating_sub(self.active_at) < tuning::IDLE_AFTER_NS
    }

    fn is_polled(&self, now: u64) -> bool {
        now.saturating_sub(self.active_at) < tuning::IDLE_AFTER_NS + 5 * tuning::SAMPLE_INTERVAL_NS
    }

    fn charge(&mut self, nanos: u64) {
        self.charged = self.charged.saturating_add(nanos);
        self.untaken = self.untaken.saturating_add(nanos);
    }
}

/// One GPU.
#[derive(Clone, Copy, Debug)]
struct SharedGpu {
    regime: RegimeState,
    /// Measured time from the moment a turn opens until its work begins.
    handover: u64,
    /// Weighted lent time of the container that had some last: new containers start from here, not from zero.
    weighted_lent: u64,
    /// Number of containers that asked for short waits.
    low_latency: u32,
}

impl Default for SharedGpu {
    fn default() -> Self {
        Self {
            regime: RegimeState::default(),
            handover: tuning::MIN_HANDOVER_NS,
            weighted_lent: 0,
            low_latency: 0,
        }
    }
}

impl SharedGpu {
    /// Returns the longest gap between kernels that is charged.
    fn charged_gap(&self) -> u64 {
        // The turn before must end, and the next must begin.
        (2 * self.handover).clamp(2 * tuning::MIN_HANDOVER_NS, tuning::MAX_CHARGED_GAP_NS)
    }
}

/// Distributes the time of a node's GPUs among containers.
///
/// A contender is one container on one GPU; its position in the slice of views is its *index*. `None` stands for an
/// unused index or a container that cannot be polled: its account is kept until [`remove`](TurnScheduler::remove), so
/// that a container cannot lose its debt by becoming unreadable. Memory is allocated only when contenders are added.
#[derive(Debug)]
pub struct TurnScheduler {
    now: u64,
    contenders: Vec<Option<Contender>>,
    gpus: [SharedGpu; MAX_GPUS],
    /// The GPUs that have contenders, as a bitmap.
    used_gpus: u32,
    turns: Vec<Turn>,
    candidates: Vec<Candidate>,
    /// State of the random number generator that varies the sampling interval.
    random: u64,
}

impl Default for TurnScheduler {
    fn default() -> Self {
        Self::new()
    }
}

impl TurnScheduler {
    /// Returns a scheduler without containers.
    #[must_use]
    pub fn new() -> Self {
        Self {
            now: 0,
            contenders: Vec::new(),
            gpus: [SharedGpu::default(); MAX_GPUS],
            used_gpus: 0,
            turns: Vec::new(),
            candidates: Vec::new(),
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// Adds a container on a GPU (below [`MAX_GPUS`]) at an unused index. Contenders with the same number of the container
    /// belong together.
    pub fn add(&mut self, index: usize, container: u64, gpu: usize) {
        if self.contenders.len() <= index {
            self.contenders.resize_with(index + 1, || None);
        }
        self.contenders[index] = Some(Contender {
            container,
            gpu: gpu.min(MAX_GPUS - 1),
            account: Account::new(self.now, ComputeShare::default()),
            view: ContenderView::default(),
            was_occupied: false,
            gate: GateState::Closed,
            overrun_since: 0,
            progress_at: 0,
            active_at: 0,
            within_budget: true,
            has_siblings: false,
            is_new: true,
            charged: 0,
            untaken: 0,
        });
        self.find_siblings();
        // At most one turn per contender, so that decisions allocate nothing.
        self.turns.reserve(self.contenders.len());
        self.candidates.reserve(self.contenders.len());
    }

    /// Forgets the contender at this index, so that another one can use the index.
    pub fn remove(&mut self, index: usize) {
        if let Some(place) = self.contenders.get_mut(index) {
            *place = None;
        }
        self.find_siblings();
        self.leave_turns(index);
    }

    fn find_siblings(&mut self) {
        for index in 0..self.contenders.len() {
            let Some(container) = self.contender(index).map(|it| it.container) else { continue };
            let count = self.contenders.iter().flatten().filter(|it| it.container == container).count();
            if let Some(contender) = self.contender_mut(index) {
                contender.has_siblings = count > 1;
            }
        }
        self.used_gpus = self.contenders.iter().flatten().fold(0, |gpus, it| gpus | 1 << it.gpu);
    }

    /// Returns the GPUs that have contenders.
    fn used_gpus(&self) -> impl Iterator<Item = usize> + use<> {
        let used = self.used_gpus;
        (0..MAX_GPUS).filter(move |gpu| used >> gpu & 1 == 1)
    }

    /// Returns the nanoseconds that the contender was charged since the last call.
    pub fn take_charge(&mut self, index: usize) -> u64 {
        self.contenders
            .get_mut(index)
            .and_then(Option::as_mut)
            .map_or(0, |it| std::mem::take(&mut it.untaken))
    }

    /// Charges time that the contender used without occupying the GPU by its markers, as the driver found.
    pub fn charge_unaccounted(&mut self, index: usize, nanos: u64) {
        if let Some(contender) = self.contender_mut(index) {
            contender.account.charge_unaccounted(nanos);
            contender.charge(nanos);
        }
    }

    /// Returns the nanoseconds that the contender was charged in total.
    #[must_use]
    pub fn charged(&self, index: usize) -> u64 {
        self.contender(index).map_or(0, |it| it.charged)
    }

    /// Returns the contender's unused guaranteed time in nanoseconds; debt is negative.
    #[cfg(test)]
    pub(super) fn credit(&self, index: usize) -> i64 {
        self.contender(index).map_or(0, |it| it.account.credit())
    }

    /// Returns whether containers take turns on a GPU.
    #[cfg(test)]
    pub(super) fn takes_turns(&self, gpu: usize) -> bool {
        self.gpus.get(gpu).is_some_and(|gpu| gpu.regime.takes_turns())
    }

    /// Records that the contender's doorbell rang: it begins to work, although that may not be visible yet.
    pub fn note_ring(&mut self, index: usize, now: u64) {
        if let Some(contender) = self.contender_mut(index) {
            contender.active_at = now;
        }
    }

    /// Returns whether the contender waits or works, or did so a moment ago.
    #[must_use]
    pub fn is_active(&self, index: usize) -> bool {
        self.contender(index).is_some_and(|it| it.is_active(self.now))
    }

    /// Returns whether the contender must be polled at the next decision, even if its doorbell does not ring. That is
    /// so for some time after it has become inactive: a process that begins at that moment may not ring.
    #[must_use]
    pub fn is_polled(&self, index: usize) -> bool {
        self.contender(index).is_some_and(|it| it.is_polled(self.now))
    }

    /// Returns whether no contender is active: the next decision can wait until a doorbell rings.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.turns.is_empty() && !self.contenders.iter().flatten().any(|it| it.is_polled(self.now))
    }

    /// Returns the nanoseconds of work that a contender's processes may have queued.
    #[must_use]
    pub fn run_ahead(&self, index: usize) -> u64 {
        let Some(contender) = self.contender(index) else { return DEFAULT_RUN_AHEAD_NS };
        let gpu = &self.gpus[contender.gpu];
        if gpu.low_latency > u32::from(contender.view.low_latency) {
            return tuning::RUN_AHEAD_BESIDE_LOW_LATENCY_NS;
        }
        gpu.handover
            .saturating_mul(tuning::RUN_AHEAD_PER_HANDOVER)
            .clamp(DEFAULT_RUN_AHEAD_NS, tuning::MAX_RUN_AHEAD_NS)
    }

    fn contender(&self, index: usize) -> Option<&Contender> {
        self.contenders.get(index)?.as_ref()
    }

    fn contender_mut(&mut self, index: usize) -> Option<&mut Contender> {
        self.contenders.get_mut(index)?.as_mut()
    }

    /// Decides what to do at `now`, given the polled state of all contenders.
    pub fn decide(&mut self, now: u64, views: &[Option<ContenderView>], decision: &mut SchedulerDecision) {
        let now = now.max(self.now);
        let last = if self.now == 0 { now } else { self.now };
        self.observe(now, views);
        self.charge(last, now);
        self.accrue(last, now, views);
        self.now = now;
        self.update_regimes(last, now);
        self.end_turns(now);
        self.start_turns(now);
        self.set_gates(now, decision);
        decision.next = self
            .next_decision(now)
            .clamp(now.saturating_add(50 * super::MICRO), now.saturating_add(HEARTBEAT_INTERVAL_NS));
    }

    /// Stores the polled state.
    fn observe(&mut self, now: u64, views: &[Option<ContenderView>]) {
        for (index, contender) in self.contenders.iter_mut().enumerate() {
            let Some(contender) = contender else { continue };
            contender.was_occupied = contender.view.occupied;
            let before = contender.view.progress;
            contender.view = match views.get(index).copied().flatten() {
                Some(view) => view,
                None => ContenderView { waiting: false, occupied: false, since: 0, ..contender.view },
            };
            if contender.view.progress != before || !contender.was_occupied {
                contender.progress_at = now;
            }
            if contender.view.waiting || contender.view.occupied {
                contender.active_at = now;
            }
        }
    }

    /// Accrues credit for the time since the last decision.
    fn accrue(&mut self, last: u64, now: u64, views: &[Option<ContenderView>]) {
        let passed = (now - last).min(1_000 * super::MILLI);
        let whole = u64::from(crate::protocol::WHOLE_GPU);
        let mut guaranteed = [0_u64; MAX_GPUS];
        let mut low_latency = [0_u32; MAX_GPUS];
        for contender in self.contenders.iter().flatten() {
            if contender.account.wanted() {
                guaranteed[contender.gpu] += u64::from(contender.account.share().cores());
            }
            low_latency[contender.gpu] += u32::from(contender.view.low_latency);
        }
        for (gpu, count) in self.gpus.iter_mut().zip(low_latency) {
            gpu.low_latency = count;
        }
        for (index, contender) in self.contenders.iter_mut().enumerate() {
            let Some(contender) = contender else { continue };
            // If the containers that want time were guaranteed more than there is, all guarantees accrue more slowly, in
            // proportion.
            let owed = passed * whole / guaranteed[contender.gpu].max(whole);
            let share = match views.get(index).copied().flatten() {
                Some(view) => ComputeShare::new(view.cores, view.ceiling),
                None => contender.account.share(),
            };
            if contender.is_new && views.get(index).is_some_and(Option::is_some) {
                contender.is_new = false;
                contender.account = Account::new(now, share);
            }
            let wants = contender.view.waiting || contender.view.occupied;
            if wants && !contender.account.wanted() {
                contender.account.join_lending(self.gpus[contender.gpu].weighted_lent);
            }
            contender.account.accrue(now, owed, passed, share, wants);
        }
    }

    /// Returns the length of turns on a GPU.
    fn pace(&self, gpu: usize) -> Pace {
        let slow = self.gpus[gpu].handover.saturating_mul(tuning::TURN_PER_HANDOVER);
        let slow = slow.min(tuning::MAX_SLOW_HOST_TURN_NS);
        Pace {
            max_guaranteed_turn: tuning::MAX_GUARANTEED_TURN_NS.max(slow),
            max_lent_turn: tuning::MAX_LENT_TURN_NS.max(slow / 2),
        }
    }

    /// Returns the state of a contender's gate.
    fn gate_of(&self, index: usize, contender: &Contender) -> GateState {
        let turn = self.turns.iter().find(|turn| turn.members().contains(&index));
        let is_open = if self.gpus[contender.gpu].regime.takes_turns() {
            turn.is_some_and(Turn::is_open)
        } else {
            contender.within_budget
        };
        if is_open {
            GateState::Open
        } else if turn.is_some_and(|turn| turn.lets_peers_pass() && !contender.view.occupied)
            || self.may_hold_back_own_work(contender)
        {
            GateState::Draining
        } else {
            GateState::Closed
        }
    }

    /// Returns for how long the running work of a container has made no progress, if a thread of it waits: the work may
    /// wait for the launch that the thread wants to make, such as the other half of a collective.
    fn stalled_for(&self, container: u64) -> Option<u64> {
        let own = self.contenders.iter().flatten().filter(|it| it.container == container);
        if !own.clone().any(|it| it.view.waiting) {
            return None;
        }
        let running = own.into_iter().filter(|it| it.view.occupied);
        running.map(|it| self.now.saturating_sub(it.progress_at)).min()
    }

    /// Returns whether a closed gate may be what the container's running work waits for. That cannot be known: such a gate
    /// opens for some time, first where the container has nothing running. It opens again and again, because debt that
    /// grows while the work is stalled would never be paid off; and not for long, because the work may be forged.
    fn may_hold_back_own_work(&self, contender: &Contender) -> bool {
        if !contender.has_siblings && !contender.view.occupied {
            return false;
        }
        let Some(stalled) = self.stalled_for(contender.container) else { return false };
        if stalled >= tuning::MAX_OVERRUN_NS {
            return stalled % tuning::STALL_RETRY_INTERVAL_NS < tuning::STALL_RETRY_NS;
        }
        let first =
            if contender.view.occupied { tuning::MAX_OVERRUN_NS / 2 } else { tuning::STALLED_AFTER_NS };
        stalled >= first
    }

    fn set_gates(&mut self, now: u64, decision: &mut SchedulerDecision) {
        self.update_budgets();
        decision.gates.clear();
        for index in 0..self.contenders.len() {
            let Some(contender) = self.contender(index) else { continue };
            let gate = self.gate_of(index, contender);
            if gate == contender.gate {
                continue;
            }
            if gate == GateState::Closed {
                decision.gates.insert(0, (index, gate));
            } else {
                decision.gates.push((index, gate));
            }
            if let Some(contender) = self.contender_mut(index) {
                contender.gate = gate;
                if gate == GateState::Open {
                    contender.account.begin_run();
                    contender.account.last_turn_at = now;
                }
            }
        }
    }

    /// Decides which containers with a ceiling may launch while they take no turns. A container with several GPUs may
    /// launch on all that it uses, or on none.
    fn update_budgets(&mut self) {
        for index in 0..self.contenders.len() {
            let Some(contender) = self.contender(index) else { continue };
            let within = |it: &Contender| {
                if it.within_budget {
                    it.account.budget().is_none_or(|budget| budget > 0)
                } else {
                    it.account.has_worthwhile_budget()
                }
            };
            let is_sibling = |it: &&Contender| {
                it.container == contender.container && (it.is_active(self.now) || it.view.waiting)
            };
            let siblings = self.contenders.iter().flatten().filter(is_sibling);
            let within = within(contender) && (!contender.has_siblings || siblings.into_iter().all(within));
            if let Some(contender) = self.contender_mut(index) {
                contender.within_budget = within;
            }
        }
    }

    /// Returns when to decide again.
    fn next_decision(&mut self, now: u64) -> u64 {
        let mut next = self.next_turn_event(now);
        let mut samples = false;
        for contender in self.contenders.iter().flatten() {
            let occupied = contender.view.occupied;
            samples |= occupied || contender.is_polled(now);
            if self.gpus[contender.gpu].regime.takes_turns() {
                if contender.view.waiting {
                    let eligible =
                        contender.account.eligible_in().map_or(u64::MAX, |after| now.saturating_add(after));
                    let eligible = eligible.max(contender.account.skipped_until);
                    if eligible > now {
                        next = next.min(eligible);
                    }
                }
            } else if contender.within_budget {
                if let Some(budget) = contender.account.budget() {
                    let open_for = now.saturating_sub(contender.account.last_turn_at);
                    if occupied {
                        next = next.min(now.saturating_add(budget));
                    } else if contender.view.waiting && open_for < tuning::WAKE_ALLOWANCE_NS {
                        // Its work begins soon after this decision, and not at a random time.
                        next = next.min(now.saturating_add(tuning::HANDOVER_POLL_INTERVAL_NS));
                    }
                }
            } else {
                next = next
                    .min(contender.account.budget_in().map_or(u64::MAX, |after| now.saturating_add(after)));
            }
        }
        if samples { next.min(now.saturating_add(self.sample_interval())) } else { next }
    }

    /// Returns the time until the next sample: 60 to 140 % of the mean.
    fn sample_interval(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        tuning::SAMPLE_INTERVAL_NS * (60 + self.random % 81) / 100
    }
}
