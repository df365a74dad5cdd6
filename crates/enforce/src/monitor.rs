//! The monitor: polls the driver, and audits tenants for bypasses of their limits.
//!
//! A tenant can write anything into its own `usage`, but it cannot hide a process from the driver. A [`Monitor`] reads
//! both once per poll, attributes each process on a GPU to its tenant, and reports where the two differ, together with
//! the health of each GPU. The front ends decide what to do with a finding.

mod findings;

use crate::gpus::FatalErrorLog;
use crate::records::RecordDir;
use findings::FindingLog;
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
        let usage = self.usage_of(now, &samples, &attributed, shares, &later);

        let round = self.audit_round(now, &samples, &attributed, shares, &earlier, &later);
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
        MonitorReport { samples, unowned, usage, findings, new_findings, health_changes }
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

/// Returns the grants of a region that the audit compares.
fn granted(region: &RegionHandle) -> Vec<GrantedGpu> {
    let shares = (0..region.owner().gpus()).filter_map(|gpu| region.owner().share(gpu));
    shares
        .map(|share| GrantedGpu {
            uuid: share.uuid,
            memory: share.memory,
            context: share.context,
            waits_for_turns: share.waits_for_turns,
        })
        .collect()
}

/// A process on a GPU with the share that it belongs to.
struct AttributedProcess<K> {
    pid: u32,
    /// The memory in bytes, including contexts.
    memory: u64,
    /// Percent of the time since the last poll.
    busy: u32,
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
    let snapshot = |region: &Arc<RegionHandle>| {
        region.reader().snapshot().unwrap_or_else(|_| UsageSnapshot::of_truncated_file())
    };
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
