//! The bypass audit: compares the driver's per-process data with what the regions account for.
//!
//! A tenant can write anything into its own `usage`, and a program can call the driver without the shim. Neither can
//! hide from the driver: every process that uses a GPU is in its list, with its host pid, its memory and its
//! utilization. The audit prevents nothing; it reports which process bypassed its limits.
//!
//! The audit does no I/O: an [`AuditRound`] holds the observations, and the findings are returned. [`BypassAudit`]
//! keeps state between rounds, because a momentary difference is not a finding: contexts are created and memory is
//! freed between two rounds.

use crate::protocol::MAX_GPUS;
use crate::reader::{Forgery, UsageSnapshot};

/// One process on one GPU, as the driver reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedProcess {
    /// Pid in the host's pid namespace.
    pub pid: u32,
    /// GPU memory in bytes.
    pub memory: u64,
    /// Percentage of the time since the last round in which its kernels ran.
    pub busy: u32,
    /// Its container, by its cgroup; `None` for processes of the host itself, which are not audited.
    pub container: Option<String>,
}

/// A GPU and its processes, as the driver reports them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedGpu {
    /// UUID of the GPU, as raw bytes.
    pub uuid: [u8; 16],
    /// The processes that use it.
    pub processes: Vec<ObservedProcess>,
}

/// The limits of a container on one GPU, as far as the audit needs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantedGpu {
    /// UUID of the GPU, as raw bytes.
    pub uuid: [u8; 16],
    /// Bytes that may be used; `u64::MAX` for no limit.
    pub memory: u64,
    /// Bytes that one context takes on this GPU; zero if unknown.
    pub context: u64,
    /// Whether its launches have waited for turns since the last round, and so were counted all the time.
    pub waits_for_turns: bool,
}

/// A container: its limits, in the order of its region, and the usage that its processes report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditedContainer {
    /// Identifier of the container, as in [`ObservedProcess::container`].
    pub id: String,
    /// Limits of its GPUs.
    pub granted: Vec<GrantedGpu>,
    /// Its region's usage, read before the driver was queried.
    pub before: UsageSnapshot,
    /// Its region's usage, read after the driver was queried. At any time an honest process accounts for at least what
    /// it holds, so it is judged by the larger of the two values, and changes between the two readings do not matter.
    pub after: UsageSnapshot,
}

/// Observations of one audit round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditRound {
    /// Time of the round, in nanoseconds of the monotonic clock.
    pub now: u64,
    /// All GPUs of the machine.
    pub gpus: Vec<ObservedGpu>,
    /// All containers with a readable region.
    pub containers: Vec<AuditedContainer>,
    /// Containers whose region cannot be read: damaged, or of an unsupported layout. Their limits still hold, but there
    /// is nothing to compare their usage with, so nothing is reported against them.
    pub unmanaged: Vec<String>,
}

/// The kind of a bypass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BypassKind {
    /// Words of `usage` contradict each other, or a process's account fell while the driver's value did not: they were
    /// written without memory being freed. Or the file was made longer or shorter.
    ForgedUsage,
    /// A process holds memory that its region does not account for.
    UnaccountedMemory,
    /// All processes together hold more than the limit, and their accounts agree: the limit was not checked.
    OverLimit,
    /// A process works on a GPU that is shared by turns, and has not accounted for as much time.
    UnaccountedWork,
    /// A process uses a GPU that its container was not granted.
    UngrantedGpu,
}

/// A bypass that has lasted longer than the grace period.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BypassFinding {
    /// Identifier of the container, as in [`AuditedContainer::id`].
    pub container: String,
    /// UUID of the GPU.
    pub gpu: [u8; 16],
    /// What kind of bypass it is.
    pub kind: BypassKind,
    /// Host pid of the process; `None` where the finding is about the container as a whole.
    pub pid: Option<u32>,
    /// Amount: bytes of memory, nanoseconds of recent work, or bytes by which the file grew; zero for words that
    /// contradict each other.
    pub amount: u64,
    /// Time of the first round with this finding, on the monotonic clock.
    pub since: u64,
}

/// Differences that are not reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuditTolerance {
    /// Nanoseconds for which a difference must last before it is a finding: a context exists before its process is
    /// registered, and memory is given back shortly after it was freed.
    pub grace: u64,
    /// Bytes that a driver may take for a process beyond what the shim accounts for.
    pub memory: u64,
    /// Percent of what a process holds that a driver may take beyond what the shim accounts for, for gaps between
    /// allocations. The larger of this and `memory` applies.
    pub memory_percent: u64,
    /// Bytes of a context on a GPU whose context size has not been measured.
    pub context: u64,
    /// Nanoseconds of work below which nothing is judged.
    pub work: u64,
}

impl Default for AuditTolerance {
    fn default() -> Self {
        const MIB: u64 = 1 << 20;
        Self {
            grace: 3_000_000_000,
            memory: 64 * MIB,
            memory_percent: 2,
            context: 1024 * MIB,
            work: 500_000_000,
        }
    }
}

impl AuditTolerance {
    /// Returns the bytes by which a process's memory may exceed what its region accounts for.
    fn of(&self, granted: &GrantedGpu, seen: u64) -> u64 {
        let context = if granted.context == 0 { self.context } else { 0 };
        self.memory.saturating_add(context).max((seen / 100).saturating_mul(self.memory_percent))
    }
}

/// Compares observations from round to round, and keeps what is needed between rounds.
#[derive(Debug, Default)]
pub struct BypassAudit {
    tolerance: AuditTolerance,
    last: Option<u64>,
    suspicions: Vec<BypassFinding>,
    baselines: Vec<ProcessBaseline>,
    balances: Vec<ComputeBalance>,
    ceilings: Vec<MemoryCeiling>,
}

/// Bytes that a container may hold of a GPU: its limit, or what it held when the limit was lowered and has not freed
/// yet.
#[derive(Debug)]
struct MemoryCeiling {
    container: String,
    gpu: [u8; 16],
    bytes: u64,
}

/// Bytes that a process's region accounted for when it last agreed with the driver.
#[derive(Debug)]
struct ProcessBaseline {
    container: String,
    gpu: [u8; 16],
    pid: u32,
    held: u64,
}

/// Recent work of a container on a GPU, by the driver and by its own account, in nanoseconds. Past work counts half
/// after every [`WORK_HALF_LIFE_NS`].
#[derive(Debug)]
struct ComputeBalance {
    container: String,
    gpu: [u8; 16],
    spent: u64,
    worked: u64,
    accounted: u64,
    /// Nanoseconds until the driver's percentages no longer cover work from before the balance began.
    settles: u64,
}

/// Nanoseconds by which the driver reports work late, at most: one of its windows, and one interval between rounds.
const WORK_REPORT_LAG_NS: u64 = 2_000_000_000;

/// Nanoseconds after which work counts half.
const WORK_HALF_LIFE_NS: u64 = 3_000_000_000;

impl BypassAudit {
    /// Creates an audit with this tolerance.
    #[must_use]
    pub fn new(tolerance: AuditTolerance) -> Self {
        Self { tolerance, ..Self::default() }
    }

    /// Examines one round. Returns what has been wrong for longer than the grace period.
    pub fn examine(&mut self, round: &AuditRound) -> Vec<BypassFinding> {
        let passed = self.last.map_or(0, |last| round.now.saturating_sub(last));
        self.last = Some(round.now);
        let mut wrong = Vec::new();
        for container in &round.containers {
            self.examine_container(round, container, passed, &mut wrong);
        }
        for gpu in &round.gpus {
            find_ungranted_use(round, gpu, &mut wrong);
        }
        // State of processes and containers that are gone is dropped.
        let has = |container: &str, gpu: &[u8; 16], pid: Option<u32>| {
            let there = round.gpus.iter().find(|there| there.uuid == *gpu);
            let on_it = there.is_some_and(|there| {
                pid.is_none_or(|pid| there.processes.iter().any(|seen| seen.pid == pid))
            });
            on_it && round.containers.iter().any(|known| known.id == container)
        };
        self.baselines.retain(|baseline| has(&baseline.container, &baseline.gpu, Some(baseline.pid)));
        self.balances.retain(|balance| has(&balance.container, &balance.gpu, None));
        self.ceilings.retain(|ceiling| has(&ceiling.container, &ceiling.gpu, None));
        for finding in &mut wrong {
            let same = |before: &&BypassFinding| {
                (&before.container, before.gpu, before.kind, before.pid)
                    == (&finding.container, finding.gpu, finding.kind, finding.pid)
            };
            if let Some(before) = self.suspicions.iter().find(same) {
                finding.since = before.since;
            }
        }
        wrong.sort();
        self.suspicions = wrong;
        // A file does not grow by accident, and it is truncated as soon as that is noticed: there is nothing to wait
        // for.
        let is_sure = |finding: &BypassFinding| {
            finding.kind == BypassKind::ForgedUsage && finding.pid.is_none() && finding.amount > 0
        };
        let old = |finding: &&BypassFinding| {
            is_sure(finding) || round.now.saturating_sub(finding.since) >= self.tolerance.grace
        };
        self.suspicions.iter().filter(old).cloned().collect()
    }

    fn examine_container(
        &mut self,
        round: &AuditRound,
        container: &AuditedContainer,
        passed: u64,
        wrong: &mut Vec<BypassFinding>,
    ) {
        let snapshot = &container.after;
        let grown = snapshot.forged.iter().find_map(|forged| match *forged {
            Forgery::Grown { bytes } => Some(bytes),
            Forgery::Accounts { .. }
            | Forgery::Slot { .. }
            | Forgery::Truncated
            | Forgery::Header
            | Forgery::Owner => None,
        });
        let short = snapshot.forged.contains(&Forgery::Truncated);
        for (index, granted) in container.granted.iter().enumerate().take(MAX_GPUS) {
            let mut note = |kind, pid, amount| {
                wrong.push(BypassFinding {
                    container: container.id.clone(),
                    gpu: granted.uuid,
                    kind,
                    pid,
                    amount,
                    since: round.now,
                });
            };
            let contradicts = |forged: &Forgery| match *forged {
                Forgery::Accounts { gpu, .. } | Forgery::Slot { gpu, .. } => gpu == index,
                Forgery::Grown { .. } => false,
                Forgery::Truncated | Forgery::Header | Forgery::Owner => true,
            };
            if snapshot.forged.iter().any(contradicts) {
                note(BypassKind::ForgedUsage, None, 0);
            }
            if let Some(bytes) = grown.filter(|_| index == 0) {
                note(BypassKind::ForgedUsage, None, bytes);
            }
            // A truncated account gives no basis to judge the container by.
            if short {
                continue;
            }
            let Some(gpu) = round.gpus.iter().find(|gpu| gpu.uuid == granted.uuid) else { continue };
            let of_this = gpu.processes.iter().filter(|seen| seen.container.as_ref() == Some(&container.id));
            let (mut worked, mut memory, mut slack) = (0u64, 0u64, 0u64);
            for seen in of_this {
                memory = memory.saturating_add(seen.memory);
                slack = slack.saturating_add(self.tolerance.of(granted, seen.memory));
                worked = worked.saturating_add(passed.saturating_mul(seen.busy.min(100).into()) / 100);
                if let Some((kind, bytes)) = self.compare_memory(container, granted, index, seen) {
                    note(kind, Some(seen.pid), bytes);
                }
            }
            let excess = self.memory_over_limit(&container.id, granted, memory);
            if excess > slack {
                note(BypassKind::OverLimit, None, excess);
            }
            let spent = snapshot.gpus.get(index).map_or(0, |gpu| gpu.spent);
            if let Some(nanoseconds) = self.compare_work(&container.id, granted, passed, worked, spent) {
                note(BypassKind::UnaccountedWork, None, nanoseconds);
            }
        }
    }

    /// Compares a process's memory with its account. Returns what is wrong with it.
    fn compare_memory(
        &mut self,
        container: &AuditedContainer,
        granted: &GrantedGpu,
        index: usize,
        seen: &ObservedProcess,
    ) -> Option<(BypassKind, u64)> {
        let held =
            [&container.before, &container.after].map(|snapshot| accounted_memory(snapshot, index, seen.pid));
        let Some(held) = held.into_iter().flatten().max() else {
            return (seen.memory > 0).then_some((BypassKind::UnaccountedMemory, seen.memory));
        };
        let container = container.id.as_str();
        let before = self.baselines.iter_mut().find(|baseline| {
            (baseline.container.as_str(), baseline.gpu, baseline.pid) == (container, granted.uuid, seen.pid)
        });
        let missing = seen.memory.saturating_sub(held);
        if missing > self.tolerance.of(granted, seen.memory) {
            let fell = before.is_some_and(|before| held < before.held);
            return Some((
                if fell { BypassKind::ForgedUsage } else { BypassKind::UnaccountedMemory },
                missing,
            ));
        }
        match before {
            Some(before) => before.held = held,
            None => self.baselines.push(ProcessBaseline {
                container: container.to_string(),
                gpu: granted.uuid,
                pid: seen.pid,
                held,
            }),
        }
        None
    }

    /// Returns how many bytes a container holds beyond its limit.
    fn memory_over_limit(&mut self, container: &str, granted: &GrantedGpu, memory: u64) -> u64 {
        let known = self
            .ceilings
            .iter_mut()
            .find(|ceiling| (ceiling.container.as_str(), ceiling.gpu) == (container, granted.uuid));
        let Some(ceiling) = known else {
            // The history before the first round is unknown: the limit may just have been lowered.
            let bytes = granted.memory.max(memory);
            self.ceilings.push(MemoryCeiling { container: container.to_string(), gpu: granted.uuid, bytes });
            return 0;
        };
        let excess = memory.saturating_sub(ceiling.bytes.max(granted.memory));
        ceiling.bytes = granted.memory.max(ceiling.bytes.min(memory));
        excess
    }

    /// Returns how much more a container worked recently on a GPU than it accounts for.
    fn compare_work(
        &mut self,
        container: &str,
        granted: &GrantedGpu,
        passed: u64,
        worked: u64,
        spent: u64,
    ) -> Option<u64> {
        if !granted.waits_for_turns {
            // Work is not counted. When it is counted again, the balance starts from zero, and the driver's percentages cover
            // earlier work for a while.
            let is_this = |balance: &ComputeBalance| {
                (balance.container.as_str(), balance.gpu) == (container, granted.uuid)
            };
            self.balances.retain(|balance| !is_this(balance));
            return None;
        }
        let known = self
            .balances
            .iter_mut()
            .find(|balance| (balance.container.as_str(), balance.gpu) == (container, granted.uuid));
        let Some(balance) = known else {
            // Counting starts with this round.
            let container = container.to_string();
            self.balances.push(ComputeBalance {
                container,
                gpu: granted.uuid,
                spent,
                worked: 0,
                accounted: 0,
                settles: WORK_REPORT_LAG_NS,
            });
            return None;
        };
        // Exponential decay in small steps: 1 - t/2h approximates 2^(-t/h) within a few percent.
        let fade = |value: u64| {
            let lost = u128::from(value) * u128::from(passed.min(WORK_HALF_LIFE_NS))
                / u128::from(2 * WORK_HALF_LIFE_NS);
            value.saturating_sub(u64::try_from(lost).unwrap_or(u64::MAX))
        };
        balance.worked = fade(balance.worked).saturating_add(worked);
        // A total that was corrected downwards accounts for nothing.
        balance.accounted = fade(balance.accounted).saturating_add(spent.saturating_sub(balance.spent));
        balance.spent = spent;
        if balance.settles > 0 {
            balance.settles = balance.settles.saturating_sub(passed);
            (balance.worked, balance.accounted) = (0, 0);
            return None;
        }
        // The driver's percentages cover whole windows that ended a while ago, and kernel costs are estimates: only a
        // factor of two is significant.
        let bypass = balance.worked > self.tolerance.work && balance.accounted < balance.worked / 2;
        bypass.then(|| balance.worked - balance.accounted)
    }
}

/// Returns the bytes that a process holds according to its region; `None` if it is not registered. A process that uses
/// both driver libraries has two slots.
fn accounted_memory(snapshot: &UsageSnapshot, index: usize, pid: u32) -> Option<u64> {
    let slots = snapshot.processes.iter().filter(|process| process.pid_here == Some(pid));
    slots.map(|process| process.held.get(index).copied().unwrap_or(0)).reduce(u64::saturating_add)
}

/// Reports processes on a GPU that their containers were not granted.
fn find_ungranted_use(round: &AuditRound, gpu: &ObservedGpu, wrong: &mut Vec<BypassFinding>) {
    for seen in &gpu.processes {
        let Some(container) = seen.container.as_ref().filter(|id| !round.unmanaged.contains(id)) else {
            continue;
        };
        let mut own = round.containers.iter().filter(|known| known.id == *container);
        if own.any(|known| known.granted.iter().any(|granted| granted.uuid == gpu.uuid)) {
            continue;
        }
        wrong.push(BypassFinding {
            container: container.clone(),
            gpu: gpu.uuid,
            kind: BypassKind::UngrantedGpu,
            pid: Some(seen.pid),
            amount: seen.memory,
            since: round.now,
        });
    }
}

#[cfg(test)]
mod tests;
