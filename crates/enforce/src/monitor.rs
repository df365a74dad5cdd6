//! The monitor: polls the driver, and audits tenants for bypasses of their limits.
//!
//! A tenant can write anything into its own `usage`, but it cannot hide a process from the driver. A [`Monitor`] reads
//! both once per poll, attributes each process on a GPU to its tenant, and reports where the two differ, together with
//! the health of each GPU. The front ends decide what to do with a finding.

mod findings;
mod gpu_time;

use crate::gpus::FatalErrorLog;
use crate::records::RecordDir;
use findings::FindingLog;
use gpu_time::{GpuTimeReading, GpuTimeRound, GpuTimeTracker};
use partage_core::model::{Bytes, GpuUuid, Node};
use partage_host::gpus::{GpuSample, NvmlSession, uuid_bytes, uuid_from_bytes};
use partage_region::audit::{
    AuditRound, AuditedContainer, BypassAudit, GrantedGpu, ObservedGpu, ObservedProcess,
};
use partage_region::{Forgery, RegionHandle, UsageSnapshot};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// A share that is audited.
#[derive(Clone, Debug)]
pub struct AuditedShare<K> {
    /// The front end's key of the share.
    pub key: K,
    /// The share's region; `None` if it cannot be managed, because it is damaged or of an unsupported layout. The
    /// driver's data about such a tenant are reported, and never counted as a finding.
    pub region: Option<Arc<RegionHandle>>,
}

/// The usage of one GPU by a tenant, as the driver reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ObservedUsage {
    /// Memory of all its processes, contexts included.
    pub memory: Bytes,
    /// Percent of the time since the last poll in which kernels of its processes ran, summed over the processes.
    pub busy: u32,
    /// When the tenant last used compute, in nanoseconds of the monotonic clock; absent if never.
    pub worked: Option<u64>,
}

/// The usage of each GPU by each tenant.
type UsageByGpu<K> = BTreeMap<K, BTreeMap<GpuUuid, ObservedUsage>>;

/// GPU time that a tenant used and did not account for, to be charged with
/// [`ManagedShares::charge_unaccounted`](crate::shares::ManagedShares::charge_unaccounted).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnaccountedTime<K> {
    /// The tenant's share.
    pub key: K,
    /// The GPU.
    pub gpu: GpuUuid,
    /// The time in nanoseconds.
    pub nanoseconds: u64,
}

/// The result of one poll.
#[derive(Clone, Debug)]
pub struct MonitorReport<K> {
    /// The sample of each GPU.
    pub samples: Vec<GpuSample>,
    /// For each of `samples`, the running processes on the GPU that belong to no share.
    pub unowned: Vec<Vec<u32>>,
    /// The usage of each tenant, for each GPU that it uses or was granted.
    pub usage: UsageByGpu<K>,
    /// Findings of the bypass audit as text, by share.
    pub findings: BTreeMap<K, Vec<String>>,
    /// The findings that the poll before did not have.
    pub new_findings: Vec<(K, String)>,
    /// GPU time since the poll before that tenants have not accounted for.
    pub unaccounted: Vec<UnaccountedTime<K>>,
    /// GPUs that became unhealthy, with the reason, or that recovered.
    pub health_changes: Vec<(GpuUuid, Option<String>)>,
}

impl<K> Default for MonitorReport<K> {
    fn default() -> Self {
        MonitorReport {
            samples: Vec::new(),
            unowned: Vec::new(),
            usage: BTreeMap::new(),
            findings: BTreeMap::new(),
            new_findings: Vec::new(),
            unaccounted: Vec::new(),
            health_changes: Vec::new(),
        }
    }
}

/// Polls the driver and compares each poll with the ones before: a difference of a moment is not a finding.
#[derive(Debug)]
pub struct Monitor<K> {
    audit: BypassAudit,
    findings: FindingLog<K>,
    /// The usage snapshot of each region in the last poll.
    snapshots: BTreeMap<K, UsageSnapshot>,
    usage: UsageByGpu<K>,
    gpu_time: GpuTimeTracker<K>,
    /// Why GPUs are unhealthy, as last reported.
    health: BTreeMap<GpuUuid, String>,
    fatal_errors: Option<FatalErrorStore>,
}

/// Where fatal errors of GPUs are recorded for the next daemon.
#[derive(Debug)]
struct FatalErrorStore {
    log: FatalErrorLog,
    records: RecordDir,
    boot_id: String,
}

impl<K: Ord + Clone + ToString> Monitor<K> {
    /// Returns a monitor for a node. `previously_unhealthy` are GPUs that were reported as unhealthy before: that one
    /// of them is healthy is reported as a change.
    pub fn new(node: &Node, previously_unhealthy: impl IntoIterator<Item = GpuUuid>) -> Self {
        Monitor {
            audit: BypassAudit::default(),
            findings: FindingLog::new(node),
            snapshots: BTreeMap::new(),
            usage: BTreeMap::new(),
            gpu_time: GpuTimeTracker::default(),
            health: previously_unhealthy.into_iter().map(|gpu| (gpu, String::new())).collect(),
            fatal_errors: None,
        }
    }

    /// Records fatal errors after each poll, so that a daemon that restarts within this boot still knows them.
    #[must_use]
    pub fn recording_fatal_errors(mut self, records: &RecordDir, boot_id: &str) -> Self {
        let log = FatalErrorLog::default();
        self.fatal_errors = Some(FatalErrorStore { log, records: records.clone(), boot_id: boot_id.into() });
        self
    }

    /// Reads the driver and the regions of these shares. `owner` returns the share that a process belongs to; it must
    /// not rely on anything that the process can choose.
    pub fn poll(
        &mut self,
        gpus: &NvmlSession,
        shares: &[AuditedShare<K>],
        owner: &dyn Fn(u32) -> Option<K>,
    ) -> MonitorReport<K> {
        let earlier = snapshots(shares);
        let samples = gpus.sample();
        let mut later = snapshots(shares);
        truncate_grown_usage(shares, &mut later);
        let now = partage_region::clock::monotonic_ns();
        let (attributed, unowned) = attribute(&samples, owner);
        let (times, unaccounted) = self.compare_gpu_time(now, &samples, &attributed, shares, &mut later);
        let usage = self.usage_of(now, &samples, &attributed, shares, &later);

        let mut round = self.audit_round(now, &samples, &attributed, shares, &earlier, &later);
        mark_gated(&mut round, &times);
        let wrong = self.audit.examine(&round);
        let owners = attributed.iter().flatten().filter_map(|process| process.owner.as_ref());
        let keys: BTreeMap<String, K> = owners
            .chain(shares.iter().map(|share| &share.key))
            .map(|key| (key.to_string(), key.clone()))
            .collect();
        let (findings, new_findings) = self.findings.update(wrong, &keys);
        let health_changes = self.update_health(&samples);
        self.snapshots = later;
        self.usage.clone_from(&usage);
        if let Some(FatalErrorStore { log, records, boot_id }) = &mut self.fatal_errors {
            log.store(records, boot_id, gpus.fatal_errors());
        }
        MonitorReport { samples, unowned, usage, findings, new_findings, unaccounted, health_changes }
    }

    fn audit_round(
        &self,
        now: u64,
        samples: &[GpuSample],
        attributed: &[Vec<AttributedProcess<K>>],
        shares: &[AuditedShare<K>],
        earlier: &BTreeMap<K, UsageSnapshot>,
        later: &BTreeMap<K, UsageSnapshot>,
    ) -> AuditRound {
        let containers = shares.iter().filter_map(|share| {
            let region = share.region.as_ref()?;
            let after = later.get(&share.key)?.clone();
            let before = earlier.get(&share.key).or_else(|| self.snapshots.get(&share.key))?.clone();
            Some(AuditedContainer { id: share.key.to_string(), granted: granted(region), before, after })
        });
        let unmanaged = shares.iter().filter(|share| share.region.is_none());
        let gpus = samples.iter().zip(attributed).filter_map(|(sample, processes)| {
            let observed = |process: &AttributedProcess<K>| ObservedProcess {
                pid: process.pid,
                memory: process.memory,
                busy: process.busy,
                container: process.owner.as_ref().map(K::to_string),
            };
            let uuid = uuid_bytes(&sample.uuid)?;
            Some(ObservedGpu { uuid, processes: processes.iter().map(observed).collect() })
        });
        AuditRound {
            now,
            gpus: gpus.collect(),
            containers: containers.collect(),
            unmanaged: unmanaged.map(|share| share.key.to_string()).collect(),
        }
    }

    /// Compares the GPU time that the driver reports with what the regions account for. Where a container is not
    /// charged because it is not gated, the driver's time is added to its region.
    ///
    /// Afterwards the snapshots have the time that the containers account for, without charges that this monitor caused.
    fn compare_gpu_time(
        &mut self,
        now: u64,
        samples: &[GpuSample],
        attributed: &[Vec<AttributedProcess<K>>],
        shares: &[AuditedShare<K>],
        later: &mut BTreeMap<K, UsageSnapshot>,
    ) -> (GpuTimes, Vec<UnaccountedTime<K>>) {
        let passed = self.gpu_time.begin_round(now);
        let (mut times, mut unaccounted) = (GpuTimes::new(), Vec::new());
        for AuditedShare { key, region } in shares {
            let (Some(region), Some(snapshot)) = (region, later.get_mut(key)) else { continue };
            let owner = region.owner();
            for (gpu, usage) in snapshot.gpus.iter_mut().enumerate().take(owner.gpus()) {
                let (Some(share), Some(gate)) = (owner.share(gpu), owner.gate(gpu)) else { continue };
                let at = samples.iter().position(|sample| uuid_bytes(&sample.uuid) == Some(share.uuid));
                let worked = at.map_or(0, |at| worked_by(&samples[at], &attributed[at], key, passed));
                let reading = GpuTimeReading { gate, accounted: usage.spent, worked };
                let round = self.gpu_time.update(key, gpu, reading);
                usage.spent = round.accounted;
                // Regions without markers are neither charged nor given turns by this daemon.
                if owner.has_markers() {
                    region.add_observed_time(gpu, round.uncharged);
                    if round.unaccounted > 0 {
                        let gpu = uuid_from_bytes(share.uuid);
                        unaccounted.push(UnaccountedTime {
                            key: key.clone(),
                            gpu,
                            nanoseconds: round.unaccounted,
                        });
                    }
                }
                times.insert((key.to_string(), gpu), round);
            }
        }
        self.gpu_time.end_round();
        (times, unaccounted)
    }

    fn usage_of(
        &self,
        now: u64,
        samples: &[GpuSample],
        attributed: &[Vec<AttributedProcess<K>>],
        shares: &[AuditedShare<K>],
        later: &BTreeMap<K, UsageSnapshot>,
    ) -> UsageByGpu<K> {
        let mut usage: UsageByGpu<K> = BTreeMap::new();
        for (sample, processes) in samples.iter().zip(attributed) {
            for process in processes {
                let Some(key) = &process.owner else { continue };
                let of = usage.entry(key.clone()).or_default().entry(sample.uuid.clone()).or_default();
                of.memory.0 = of.memory.0.saturating_add(process.memory);
                of.busy = of.busy.saturating_add(process.busy);
            }
        }
        for AuditedShare { key, region } in shares {
            for (at, granted) in region.iter().flat_map(|region| granted(region)).enumerate() {
                let of =
                    usage.entry(key.clone()).or_default().entry(uuid_from_bytes(granted.uuid)).or_default();
                let spent =
                    |snapshots: &BTreeMap<K, UsageSnapshot>| Some(snapshots.get(key)?.gpus.get(at)?.spent);
                // The driver reports work in whole percents, and only of the last moments.
                if spent(&self.snapshots).zip(spent(later)).is_some_and(|(before, after)| before != after) {
                    of.worked = Some(now);
                }
            }
        }
        for (key, gpus) in &mut usage {
            for (uuid, of) in gpus {
                let before = self.usage.get(key).and_then(|gpus| gpus.get(uuid)).and_then(|was| was.worked);
                of.worked = if of.busy > 0 { Some(now) } else { of.worked.or(before) };
            }
        }
        usage
    }

    fn update_health(&mut self, samples: &[GpuSample]) -> Vec<(GpuUuid, Option<String>)> {
        let changed = samples.iter().filter(|sample| self.health.get(&sample.uuid) != sample.health.as_ref());
        let changes = changed.map(|sample| (sample.uuid.clone(), sample.health.clone())).collect();
        self.health =
            samples.iter().filter_map(|sample| Some((sample.uuid.clone(), sample.health.clone()?))).collect();
        changes
    }
}

/// Returns the grants of a region that the audit compares, except whether the container's work is accounted for.
fn granted(region: &RegionHandle) -> Vec<GrantedGpu> {
    let shares = (0..region.owner().gpus()).filter_map(|gpu| region.owner().share(gpu));
    shares
        .map(|share| GrantedGpu {
            uuid: share.uuid,
            memory: share.memory,
            context: share.context,
            waits_for_turns: false,
        })
        .collect()
}

/// The comparison of GPU time by share, and by the index of the GPU in its region.
type GpuTimes = BTreeMap<(String, usize), GpuTimeRound>;

/// Marks the GPUs on which containers were gated, and so charged for their work, since the last poll.
fn mark_gated(round: &mut AuditRound, times: &GpuTimes) {
    for container in &mut round.containers {
        for (gpu, granted) in container.granted.iter_mut().enumerate() {
            let time = times.get(&(container.id.clone(), gpu));
            granted.waits_for_turns = time.is_some_and(|time| time.was_gated);
        }
    }
}

/// Returns the nanoseconds for which a tenant occupied a GPU since the last poll, `passed` nanoseconds ago, by the driver.
///
/// Kernels of several processes may overlap: then the sum of the processes is more than the time in which the GPU was busy,
/// and each counts in proportion, as the turn scheduler charges them.
fn worked_by<K: PartialEq>(
    sample: &GpuSample,
    processes: &[AttributedProcess<K>],
    key: &K,
    passed: u64,
) -> u64 {
    let own = || processes.iter().filter(|process| process.owner.as_ref() == Some(key));
    let sum = own().map(|process| process.worked_ns).fold(0, u64::saturating_add);
    // One process may have more than `passed`: the driver reports the time of a whole window at once.
    let longest = own().map(|process| process.worked_ns).max().unwrap_or(0);
    let worked = sum.min(passed.max(longest));
    let busy_processes = processes.iter().filter(|process| process.busy > 0).count();
    let percents = processes.iter().map(|process| u64::from(process.busy)).fold(0, u64::saturating_add);
    let busy = sample.utilization.map_or(100, |percent| u64::from(percent.min(100)));
    // The utilization of the GPU may be that of a later moment, so it is used only if there may be overlaps.
    if busy_processes < 2 || busy == 0 || percents <= busy { worked } else { worked / percents * busy }
}

/// A process on a GPU with the share that it belongs to.
struct AttributedProcess<K> {
    pid: u32,
    /// The memory in bytes, including contexts.
    memory: u64,
    /// Percent of the time since the last poll.
    busy: u32,
    /// Nanoseconds of GPU time since the last poll.
    worked_ns: u64,
    owner: Option<K>,
}

/// Attributes the processes on each GPU to shares. Also returns the running processes that belong to none.
fn attribute<K>(
    samples: &[GpuSample],
    owner: &dyn Fn(u32) -> Option<K>,
) -> (Vec<Vec<AttributedProcess<K>>>, Vec<Vec<u32>>) {
    let mut attributed = Vec::new();
    let mut unowned = Vec::new();
    for sample in samples {
        let processes: Vec<AttributedProcess<K>> = sample
            .processes
            .iter()
            .map(|process| AttributedProcess {
                pid: process.pid,
                memory: process.memory.map_or(0, |memory| memory.0),
                busy: process.busy.unwrap_or(0),
                worked_ns: process.worked_ns,
                owner: owner(process.pid),
            })
            .collect();
        // A process that ended since the driver listed it has no owner either.
        let alive = processes.iter().filter(|process| process.owner.is_none() && exists(process.pid));
        unowned.push(alive.map(|process| process.pid).collect());
        attributed.push(processes);
    }
    (attributed, unowned)
}

fn exists(pid: u32) -> bool {
    Path::new("/proc").join(pid.to_string()).exists()
}

fn snapshots<K: Ord + Clone>(shares: &[AuditedShare<K>]) -> BTreeMap<K, UsageSnapshot> {
    // The file was whole when it was opened, and only its tenant writes it.
    let snapshot =
        |region: &Arc<RegionHandle>| region.snapshot().unwrap_or_else(|_| UsageSnapshot::of_truncated_file());
    shares.iter().filter_map(|share| Some((share.key.clone(), snapshot(share.region.as_ref()?)))).collect()
}

/// Truncates `usage` files that tenants made longer, and notes that in their snapshots.
fn truncate_grown_usage<K: Ord>(shares: &[AuditedShare<K>], snapshots: &mut BTreeMap<K, UsageSnapshot>) {
    for share in shares {
        // A file that cannot be truncated now is tried again with the next poll.
        let truncated =
            share.region.as_ref().and_then(|region| region.reader().truncate_excess().ok().flatten());
        if let Some(bytes) = truncated
            && let Some(snapshot) = snapshots.get_mut(&share.key)
        {
            snapshot.forged.push(Forgery::Grown { bytes });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn worked(utilization: Option<u32>, processes: &[(char, u32, u64)]) -> u64 {
        let sample = GpuSample {
            uuid: "GPU-0".into(),
            health: None,
            mig: None,
            memory_used: None,
            utilization,
            temperature: None,
            power_milliwatts: None,
            processes: Vec::new(),
        };
        let process = |&(owner, busy, worked_ns): &(char, u32, u64)| AttributedProcess {
            pid: 1,
            memory: 0,
            busy,
            worked_ns,
            owner: Some(owner),
        };
        let processes: Vec<_> = processes.iter().map(process).collect();
        worked_by(&sample, &processes, &'a', SECOND)
    }

    #[test]
    fn work_of_all_processes_of_a_tenant_counts_up_to_the_time_that_has_passed() {
        let half = SECOND / 2;
        assert_eq!(worked(Some(80), &[('a', 30, 3 * SECOND / 10), ('b', 50, half)]), 3 * SECOND / 10);
        assert_eq!(worked(Some(100), &[('a', 50, half), ('a', 50, half), ('a', 0, half)]), SECOND);
        assert_eq!(worked(None, &[('a', 100, 2 * SECOND)]), 2 * SECOND, "a window that ended late");
        assert_eq!(worked(Some(1), &[('a', 100, SECOND)]), SECOND, "it has just become idle");
        assert_eq!(worked(Some(50), &[]), 0);
    }

    #[test]
    fn overlapping_work_counts_in_proportion() {
        assert_eq!(worked(Some(60), &[('a', 60, 6 * SECOND / 10), ('b', 60, SECOND)]), 3 * SECOND / 10);
        assert_eq!(worked(None, &[('a', 100, SECOND), ('b', 100, SECOND)]), SECOND / 2);
    }
}
