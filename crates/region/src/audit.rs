//! The bypass audit: what the driver says of every process, held against what the regions say.
//!
//! A tenant can write anything into its own `usage`, and a program can reach the driver past the shim. Neither hides it
//! from the driver itself: whoever uses a GPU is on its list, under the machine's pid, with its memory and its time. So
//! nothing here prevents anything; it says who did it.
//!
//! Pure: what is known comes in as a [`AuditRound`], what was found goes out. [`BypassAudit`] remembers from round to round, since a
//! difference of a moment is no finding: contexts are made and memory is given back between two looks.

use crate::protocol::MAX_GPUS;
use crate::reader::{Forgery, UsageSnapshot};

/// What the driver says of one process on one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedProcess {
    /// On the machine.
    pub pid: u32,
    /// Bytes.
    pub memory: u64,
    /// Percent of the time since the last round in which its kernels ran.
    pub busy: u32,
    /// Its container, by its cgroup; none for programs of the machine itself, which are not looked at.
    pub container: Option<String>,
}

/// A GPU, and who uses it by the driver's word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedGpu {
    /// The GPU's UUID.
    pub uuid: [u8; 16],
    /// Processes on it.
    pub processes: Vec<ObservedProcess>,
}

/// What a container was granted of a GPU, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantedGpu {
    /// The GPU's UUID.
    pub uuid: [u8; 16],
    /// Bytes that may be used; `u64::MAX` for no limit.
    pub memory: u64,
    /// Bytes one context takes on this card; zero if unknown.
    pub context: u64,
    /// Whether its launches keep to turns, and so are counted.
    pub gated: bool,
}

/// A container: what it was granted, in the order of its limits, and what its processes say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditedContainer {
    /// As processes are attributed to it.
    pub id: String,
    /// Its GPUs.
    pub granted: Vec<GrantedGpu>,
    /// What its region said before the driver was asked.
    pub before: UsageSnapshot,
    /// What it said afterwards. An honest process holds by its account what it truly holds, or more, at any time: so it is
    /// judged by the larger one, and what comes and goes between the readings does not matter.
    pub after: UsageSnapshot,
}

/// Everything that is known at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditRound {
    /// Nanoseconds of the monotonic clock.
    pub now: u64,
    /// All GPUs of the machine.
    pub gpus: Vec<ObservedGpu>,
    /// All containers with a region.
    pub containers: Vec<AuditedContainer>,
    /// Containers whose region cannot be read: damaged, or of an unsupported layout. Their limits go on holding, but what
    /// they use cannot be compared with anything, so nothing is found against them.
    pub unmanaged: Vec<String>,
}

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FindingKind {
    /// Words of `usage` contradict each other, or a process's fell while the driver's did not: somebody wrote them who
    /// did not give memory back. Or the file was made longer, or shorter.
    ForgedUsage,
    /// A process holds memory that its region does not know of.
    UnaccountedMemory,
    /// All processes together took more than the limit, and their words agree: they were not asked.
    OverLimit,
    /// A process works on a GPU whose time is dealt out, and has not asked for as much time.
    UnaccountedWork,
    /// A process uses a GPU that its container was not granted.
    UngrantedGpu,
}

/// Something that has been wrong for longer than the grace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// Whose.
    pub container: String,
    /// On which GPU.
    pub gpu: [u8; 16],
    /// What.
    pub kind: FindingKind,
    /// Which process, on the machine; none where it is the container's as a whole.
    pub pid: Option<u32>,
    /// How much: bytes of memory, nanoseconds of work in the last seconds, bytes by which the file grew; zero for words that
    /// contradict each other.
    pub amount: u64,
    /// Since when, on the monotonic clock.
    pub since: u64,
}

/// What is let pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tolerance {
    /// Nanoseconds for which something must be wrong before it is a finding: a context is there before its process is
    /// known, memory is given back a moment after it was freed.
    pub grace: u64,
    /// Bytes that a driver may take for a process beyond what the shim knows of.
    pub memory: u64,
    /// Likewise in hundredths of what the process holds: what lies between allocations.
    pub memory_percent: u64,
    /// Bytes of a context on a card whose contexts nobody has measured.
    pub context: u64,
    /// Nanoseconds of work that are too few to judge by.
    pub work: u64,
}

impl Default for Tolerance {
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

impl Tolerance {
    /// Bytes that a process's memory may be above what its region says.
    fn of(&self, granted: &GrantedGpu, seen: u64) -> u64 {
        let context = if granted.context == 0 { self.context } else { 0 };
        self.memory.saturating_add(context).max((seen / 100).saturating_mul(self.memory_percent))
    }
}

/// What is remembered from round to round.
#[derive(Debug, Default)]
pub struct BypassAudit {
    tolerance: Tolerance,
    last: Option<u64>,
    suspicions: Vec<Finding>,
    ledgers: Vec<Ledger>,
    works: Vec<Work>,
    ceilings: Vec<Ceiling>,
}

/// What a container may hold of a GPU: its limit, or what it held when the limit was lowered and has not given back.
#[derive(Debug)]
struct Ceiling {
    container: String,
    gpu: [u8; 16],
    bytes: u64,
}

/// What a process's region said when it last agreed with the driver.
#[derive(Debug)]
struct Ledger {
    container: String,
    gpu: [u8; 16],
    pid: u32,
    held: u64,
}

/// What a container did lately on a GPU, by the driver and by itself, in nanoseconds. The past counts half as much after
/// every [`HALF`].
#[derive(Debug)]
struct Work {
    container: String,
    gpu: [u8; 16],
    spent: u64,
    worked: u64,
    accounted: u64,
}

/// Nanoseconds after which work counts half.
const HALF: u64 = 3_000_000_000;

impl BypassAudit {
    /// With a tolerance of one's own.
    #[must_use]
    pub fn new(tolerance: Tolerance) -> Self {
        Self { tolerance, ..Self::default() }
    }

    /// Looks at a round; what has been wrong for longer than the grace.
    pub fn look(&mut self, round: &AuditRound) -> Vec<Finding> {
        let passed = self.last.map_or(0, |last| round.now.saturating_sub(last));
        self.last = Some(round.now);
        let mut wrong = Vec::new();
        for container in &round.containers {
            self.look_at(round, container, passed, &mut wrong);
        }
        for gpu in &round.gpus {
            strangers(round, gpu, &mut wrong);
        }
        // Who is gone is forgotten.
        let has = |container: &str, gpu: &[u8; 16], pid: Option<u32>| {
            let there = round.gpus.iter().find(|there| there.uuid == *gpu);
            let on_it = there.is_some_and(|there| {
                pid.is_none_or(|pid| there.processes.iter().any(|seen| seen.pid == pid))
            });
            on_it && round.containers.iter().any(|known| known.id == container)
        };
        self.ledgers.retain(|ledger| has(&ledger.container, &ledger.gpu, Some(ledger.pid)));
        self.works.retain(|work| has(&work.container, &work.gpu, None));
        self.ceilings.retain(|ceiling| has(&ceiling.container, &ceiling.gpu, None));
        for finding in &mut wrong {
            let same = |before: &&Finding| {
                (&before.container, before.gpu, before.kind, before.pid)
                    == (&finding.container, finding.gpu, finding.kind, finding.pid)
            };
            if let Some(before) = self.suspicions.iter().find(same) {
                finding.since = before.since;
            }
        }
        wrong.sort();
        self.suspicions = wrong;
        // A file does not grow by accident, and is cut back when it is seen: there is nothing to wait for.
        let is_sure = |finding: &Finding| {
            finding.kind == FindingKind::ForgedUsage && finding.pid.is_none() && finding.amount > 0
        };
        let old = |finding: &&Finding| {
            is_sure(finding) || round.now.saturating_sub(finding.since) >= self.tolerance.grace
        };
        self.suspicions.iter().filter(old).cloned().collect()
    }

    fn look_at(
        &mut self,
        round: &AuditRound,
        container: &AuditedContainer,
        passed: u64,
        wrong: &mut Vec<Finding>,
    ) {
        let snapshot = &container.after;
        let grown = snapshot.forged.iter().find_map(|forged| match *forged {
            Forgery::Grown { bytes } => Some(bytes),
            Forgery::Accounts { .. } | Forgery::Slot { .. } | Forgery::Short => None,
        });
        let short = snapshot.forged.contains(&Forgery::Short);
        for (index, granted) in container.granted.iter().enumerate().take(MAX_GPUS) {
            let mut note = |kind, pid, amount| {
                wrong.push(Finding {
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
                Forgery::Short => true,
            };
            if snapshot.forged.iter().any(contradicts) {
                note(FindingKind::ForgedUsage, None, 0);
            }
            if let Some(bytes) = grown.filter(|_| index == 0) {
                note(FindingKind::ForgedUsage, None, bytes);
            }
            // By an account that is not there nobody else can be judged.
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
                if let Some((kind, bytes)) = self.memory(container, granted, index, seen) {
                    note(kind, Some(seen.pid), bytes);
                }
            }
            let excess = self.excess(&container.id, granted, memory);
            if excess > slack {
                note(FindingKind::OverLimit, None, excess);
            }
            let spent = snapshot.gpus.get(index).map_or(0, |gpu| gpu.spent);
            if let Some(nanoseconds) = self.work(&container.id, granted, passed, worked, spent) {
                note(FindingKind::UnaccountedWork, None, nanoseconds);
            }
        }
    }

    /// What is wrong with a process's memory.
    fn memory(
        &mut self,
        container: &AuditedContainer,
        granted: &GrantedGpu,
        index: usize,
        seen: &ObservedProcess,
    ) -> Option<(FindingKind, u64)> {
        let held = [&container.before, &container.after].map(|snapshot| held(snapshot, index, seen.pid));
        let Some(held) = held.into_iter().flatten().max() else {
            return (seen.memory > 0).then_some((FindingKind::UnaccountedMemory, seen.memory));
        };
        let container = container.id.as_str();
        let before = self.ledgers.iter_mut().find(|ledger| {
            (ledger.container.as_str(), ledger.gpu, ledger.pid) == (container, granted.uuid, seen.pid)
        });
        let missing = seen.memory.saturating_sub(held);
        if missing > self.tolerance.of(granted, seen.memory) {
            let fell = before.is_some_and(|before| held < before.held);
            return Some((
                if fell { FindingKind::ForgedUsage } else { FindingKind::UnaccountedMemory },
                missing,
            ));
        }
        match before {
            Some(before) => before.held = held,
            None => self.ledgers.push(Ledger {
                container: container.to_string(),
                gpu: granted.uuid,
                pid: seen.pid,
                held,
            }),
        }
        None
    }

    /// Bytes that a container holds beyond what it may.
    fn excess(&mut self, container: &str, granted: &GrantedGpu, memory: u64) -> u64 {
        let known = self
            .ceilings
            .iter_mut()
            .find(|ceiling| (ceiling.container.as_str(), ceiling.gpu) == (container, granted.uuid));
        let Some(ceiling) = known else {
            // What was before the first look is not known: the limit may just have been lowered.
            let bytes = granted.memory.max(memory);
            self.ceilings.push(Ceiling { container: container.to_string(), gpu: granted.uuid, bytes });
            return 0;
        };
        let excess = memory.saturating_sub(ceiling.bytes.max(granted.memory));
        ceiling.bytes = granted.memory.max(ceiling.bytes.min(memory));
        excess
    }

    /// How much a container worked lately on a GPU beyond what it accounts for.
    fn work(
        &mut self,
        container: &str,
        granted: &GrantedGpu,
        passed: u64,
        worked: u64,
        spent: u64,
    ) -> Option<u64> {
        let known = self
            .works
            .iter_mut()
            .find(|work| (work.container.as_str(), work.gpu) == (container, granted.uuid));
        let Some(work) = known else {
            // From now on.
            let container = container.to_string();
            self.works.push(Work { container, gpu: granted.uuid, spent, worked: 0, accounted: 0 });
            return None;
        };
        // Half after every while, in steps that are fine enough: 1 - t/2h is 2^(-t/h) to some percent.
        let fade = |value: u64| {
            let lost = u128::from(value) * u128::from(passed.min(HALF)) / u128::from(2 * HALF);
            value.saturating_sub(u64::try_from(lost).unwrap_or(u64::MAX))
        };
        work.worked = fade(work.worked).saturating_add(worked);
        // Corrected downwards, it accounts for nothing.
        work.accounted = fade(work.accounted).saturating_add(spent.saturating_sub(work.spent));
        work.spent = spent;
        if !granted.gated {
            // Nobody counts.
            (work.worked, work.accounted) = (0, 0);
            return None;
        }
        // The driver's percents are of whole windows that ended a while ago, and prices of kernels are estimates: half is
        // no accident.
        let bypass = work.worked > self.tolerance.work && work.accounted < work.worked / 2;
        bypass.then(|| work.worked - work.accounted)
    }
}

/// Bytes that a process holds by its region; none if it is not registered. One that uses both of the driver's libraries has
/// two slots.
fn held(snapshot: &UsageSnapshot, index: usize, pid: u32) -> Option<u64> {
    let slots = snapshot.processes.iter().filter(|process| process.pid_here == Some(pid));
    slots.map(|process| process.held.get(index).copied().unwrap_or(0)).reduce(u64::saturating_add)
}

/// Processes on a GPU that their containers were not granted.
fn strangers(round: &AuditRound, gpu: &ObservedGpu, wrong: &mut Vec<Finding>) {
    for seen in &gpu.processes {
        let Some(container) = seen.container.as_ref().filter(|id| !round.unmanaged.contains(id)) else {
            continue;
        };
        let mut own = round.containers.iter().filter(|known| known.id == *container);
        if own.any(|known| known.granted.iter().any(|granted| granted.uuid == gpu.uuid)) {
            continue;
        }
        wrong.push(Finding {
            container: container.clone(),
            gpu: gpu.uuid,
            kind: FindingKind::UngrantedGpu,
            pid: Some(seen.pid),
            amount: seen.memory,
            since: round.now,
        });
    }
}

#[cfg(test)]
mod tests;
