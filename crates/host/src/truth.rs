//! What the driver says, beside what shares say of themselves.
//!
//! A tenant can write what it likes into its own account; nobody can talk the driver into not seeing a process. An
//! [`Auditor`] asks both, once in a while, and tells where they differ.

use crate::gpus::{Gpus, Look, uuid_bytes};
use partage_core::model::{Bytes, GpuUuid, Node};
use partage_region::audit::{
    self, AuditRound, AuditedContainer, BypassAudit, Finding, FindingKind, GrantedGpu, ObservedProcess,
};
use partage_region::{Forgery, RegionHandle, UsageSnapshot};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// A container or share that is audited.
#[derive(Clone, Debug)]
pub struct Watched<K> {
    /// Identifies it.
    pub key: K,
    /// Its region; none where the region is there and cannot be managed, because it is damaged or of an unsupported
    /// layout. What its processes use is then reported by the driver's word, and never held against it.
    pub region: Option<Arc<RegionHandle>>,
}

/// What a region grants, as far as the audit compares it.
fn granted(region: &RegionHandle) -> Vec<GrantedGpu> {
    let shares = (0..region.owner().gpus()).filter_map(|gpu| region.owner().share(gpu));
    shares
        .map(|share| GrantedGpu {
            uuid: share.uuid,
            memory: share.memory,
            context: share.context,
            gated: share.gated,
        })
        .collect()
}

/// What one has of one GPU, as the driver says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// What its processes hold, their contexts included.
    pub memory: Bytes,
    /// Percent of the time since the last round in which its work ran, all processes together.
    pub busy: u32,
    /// When it was last seen at work, on the monotonic clock; absent if never.
    pub worked: Option<u64>,
}

/// Sentences about each.
pub type Words<K> = BTreeMap<K, Vec<String>>;

/// What was found in one round.
#[derive(Clone, Debug)]
pub struct Truth<K> {
    /// How each GPU is.
    pub looks: Vec<Look>,
    /// Processes on each of these GPUs that are nobody's.
    pub strangers: Vec<Vec<u32>>,
    /// What everybody has of each GPU that they use or may use.
    pub used: BTreeMap<K, BTreeMap<GpuUuid, Used>>,
    /// What looks like a way around limits.
    pub suspicions: Words<K>,
    /// What of it was not there in the round before.
    pub raised: Vec<(K, String)>,
    /// GPUs that fell ill, with what is wrong, or that are well again.
    pub health_changes: Vec<(GpuUuid, Option<String>)>,
}

impl<K> Default for Truth<K> {
    fn default() -> Self {
        Truth {
            looks: Vec::new(),
            strangers: Vec::new(),
            used: BTreeMap::new(),
            suspicions: BTreeMap::new(),
            raised: Vec::new(),
            health_changes: Vec::new(),
        }
    }
}

/// Compares, round after round: a difference of a moment is nothing.
#[derive(Debug)]
pub struct Auditor<K> {
    /// A GPU's index is its place here.
    gpus: Vec<GpuUuid>,
    audit: BypassAudit,
    /// What everybody said in the last round.
    before: BTreeMap<K, UsageSnapshot>,
    used: BTreeMap<K, BTreeMap<GpuUuid, Used>>,
    health: BTreeMap<GpuUuid, String>,
    /// What was wrong in the last round. Its amounts change, and it is still the same.
    wrong: BTreeSet<(K, [u8; 16], FindingKind, Option<u32>)>,
}

impl<K: Ord + Clone + ToString> Auditor<K> {
    /// Of a machine.
    pub fn new(node: &Node) -> Self {
        Auditor {
            gpus: node.gpus.iter().map(|gpu| gpu.uuid.clone()).collect(),
            audit: BypassAudit::default(),
            before: BTreeMap::new(),
            used: BTreeMap::new(),
            health: BTreeMap::new(),
            wrong: BTreeSet::new(),
        }
    }

    /// Somebody said earlier that these GPUs are ill: that they are well is news, too.
    pub fn after(mut self, ill: impl IntoIterator<Item = GpuUuid>) -> Self {
        self.health.extend(ill.into_iter().map(|gpu| (gpu, String::new())));
        self
    }

    /// Asks the driver, and those who are watched. `owner` says whose a process is: it must not be what the process can
    /// choose itself.
    pub fn round(
        &mut self,
        gpus: &Gpus,
        watched: &[Watched<K>],
        owner: &dyn Fn(u32) -> Option<K>,
    ) -> Truth<K> {
        let earlier = snapshots(watched);
        let looks = gpus.look();
        let mut later = snapshots(watched);
        cut(watched, &mut later);
        let now = partage_region::clock::exact();
        let (seen, strangers) = attribute(&looks, owner);
        let used = self.use_of(now, &looks, &seen, watched, &later);

        let containers = watched.iter().filter_map(|one| {
            let region = one.region.as_ref()?;
            let after = later.get(&one.key)?.clone();
            let before = earlier.get(&one.key).or_else(|| self.before.get(&one.key))?.clone();
            Some(AuditedContainer { id: one.key.to_string(), granted: granted(region), before, after })
        });
        let unmanaged = watched.iter().filter(|one| one.region.is_none()).map(|one| one.key.to_string());
        let audited = looks.iter().zip(&seen).filter_map(|(look, seen)| {
            let as_audited = |(pid, memory, busy, key): &(u32, u64, u32, Option<K>)| ObservedProcess {
                pid: *pid,
                memory: *memory,
                busy: *busy,
                container: key.as_ref().map(K::to_string),
            };
            let uuid = uuid_bytes(&look.uuid)?;
            Some(audit::ObservedGpu { uuid, processes: seen.iter().map(as_audited).collect() })
        });
        let round = AuditRound {
            now,
            gpus: audited.collect(),
            containers: containers.collect(),
            unmanaged: unmanaged.collect(),
        };
        let findings = self.audit.look(&round);

        let owners = seen.iter().flatten().filter_map(|(.., key)| key.as_ref());
        let keys: BTreeMap<String, K> = owners
            .chain(watched.iter().map(|one| &one.key))
            .map(|key| (key.to_string(), key.clone()))
            .collect();
        let (suspicions, raised) = self.words(findings, &keys);
        let health_changes = self.health(&looks);
        self.before = later;
        self.used.clone_from(&used);
        Truth { looks, strangers, used, suspicions, raised, health_changes }
    }

    fn use_of(
        &self,
        now: u64,
        looks: &[Look],
        seen: &[Vec<Process<K>>],
        watched: &[Watched<K>],
        later: &BTreeMap<K, UsageSnapshot>,
    ) -> BTreeMap<K, BTreeMap<GpuUuid, Used>> {
        let mut used: BTreeMap<K, BTreeMap<GpuUuid, Used>> = BTreeMap::new();
        for (look, seen) in looks.iter().zip(seen) {
            for (_, memory, busy, key) in seen {
                let Some(key) = key else { continue };
                let of = used.entry(key.clone()).or_default().entry(look.uuid.clone()).or_default();
                of.memory.0 = of.memory.0.saturating_add(*memory);
                of.busy = of.busy.saturating_add(*busy);
            }
        }
        for Watched { key, region } in watched {
            for (at, granted) in region.iter().flat_map(|region| granted(region)).enumerate() {
                let uuid = crate::gpus::uuid_of(granted.uuid);
                let of = used.entry(key.clone()).or_default().entry(uuid).or_default();
                let spent = |said: &BTreeMap<K, UsageSnapshot>| Some(said.get(key)?.gpus.get(at)?.spent);
                // A driver tells of work in whole percents, and only of the last moments.
                if spent(&self.before).zip(spent(later)).is_some_and(|(before, after)| before != after) {
                    of.worked = Some(now);
                }
            }
        }
        for (key, gpus) in &mut used {
            for (uuid, of) in gpus {
                let before = self.used.get(key).and_then(|gpus| gpus.get(uuid)).and_then(|was| was.worked);
                of.worked = if of.busy > 0 { Some(now) } else { of.worked.or(before) };
            }
        }
        used
    }

    fn words(&mut self, findings: Vec<Finding>, keys: &BTreeMap<String, K>) -> (Words<K>, Vec<(K, String)>) {
        let (mut words, mut raised) = (Words::<K>::new(), Vec::new());
        let mut wrong = BTreeSet::new();
        for finding in findings {
            let Some(key) = keys.get(&finding.container) else { continue };
            let word = self.word(&finding);
            let what = (key.clone(), finding.gpu, finding.kind, finding.pid);
            if !self.wrong.contains(&what) {
                raised.push((key.clone(), word.clone()));
            }
            wrong.insert(what);
            words.entry(key.clone()).or_default().push(word);
        }
        self.wrong = wrong;
        (words, raised)
    }

    fn word(&self, finding: &Finding) -> String {
        let at = self.gpus.iter().position(|uuid| uuid_bytes(uuid) == Some(finding.gpu));
        let gpu = at.map_or_else(|| crate::gpus::uuid_of(finding.gpu).to_string(), |at| format!("GPU {at}"));
        let who = finding.pid.map_or_else(|| "its processes".into(), |pid| format!("process {pid}"));
        let one = |singular, plural| if finding.pid.is_some() { singular } else { plural };
        let bytes = Bytes(finding.amount);
        match finding.kind {
            FindingKind::ForgedUsage if finding.pid.is_none() && finding.amount > 0 => {
                format!("{who} made the file of their account {bytes} longer; it was cut back")
            }
            FindingKind::ForgedUsage => format!("{who} wrote over {} account of {gpu}", one("its", "their")),
            FindingKind::UnaccountedMemory => {
                format!(
                    "{who} {} {bytes} on {gpu} that {} did not ask for",
                    one("holds", "hold"),
                    one("it", "they")
                )
            }
            FindingKind::OverLimit => {
                format!("{who} {} {bytes} more on {gpu} than the limit", one("holds", "hold"))
            }
            FindingKind::UnaccountedWork => {
                format!("{who} {} on {gpu} outside {} turns", one("works", "work"), one("its", "their"))
            }
            FindingKind::UngrantedGpu => {
                format!("{who} {} {gpu}, which is not the share's", one("uses", "use"))
            }
        }
    }

    fn health(&mut self, looks: &[Look]) -> Vec<(GpuUuid, Option<String>)> {
        let changed = looks.iter().filter(|look| self.health.get(&look.uuid) != look.health.as_ref());
        let changes = changed.map(|look| (look.uuid.clone(), look.health.clone())).collect();
        self.health =
            looks.iter().filter_map(|look| Some((look.uuid.clone(), look.health.clone()?))).collect();
        changes
    }
}

/// A process on a GPU: its pid, its memory, its work and whose it is.
type Process<K> = (u32, u64, u32, Option<K>);

/// Whose the processes on each GPU are, and which are nobody's.
fn attribute<K>(looks: &[Look], owner: &dyn Fn(u32) -> Option<K>) -> (Vec<Vec<Process<K>>>, Vec<Vec<u32>>) {
    let (mut all, mut strangers) = (Vec::new(), Vec::new());
    for look in looks {
        let processes = look.processes.iter();
        let seen: Vec<Process<K>> = processes
            .map(|one| {
                let memory = one.memory.map_or(0, |memory| memory.0);
                (one.pid, memory, one.busy.unwrap_or(0), owner(one.pid))
            })
            .collect();
        // One that ended meanwhile is nobody's, and no stranger.
        let alone = seen.iter().filter(|(pid, .., key)| key.is_none() && is_there(*pid));
        strangers.push(alone.map(|(pid, ..)| *pid).collect());
        all.push(seen);
    }
    (all, strangers)
}

fn snapshots<K: Ord + Clone>(watched: &[Watched<K>]) -> BTreeMap<K, UsageSnapshot> {
    // The file was whole when it was opened, and only its container writes it.
    let snapshot = |region: &Arc<RegionHandle>| {
        region.reader().snapshot().unwrap_or_else(|_| UsageSnapshot::of_a_short_file())
    };
    watched.iter().filter_map(|one| Some((one.key.clone(), snapshot(one.region.as_ref()?)))).collect()
}

/// Accounts that their tenants made longer are cut back, and that is noted with what they say.
fn cut<K: Ord>(watched: &[Watched<K>], said: &mut BTreeMap<K, UsageSnapshot>) {
    for one in watched {
        // What cannot be cut now is tried again with the next round.
        let cut = one.region.as_ref().and_then(|region| region.reader().cut().ok().flatten());
        if let Some(bytes) = cut
            && let Some(said) = said.get_mut(&one.key)
        {
            said.forged.push(Forgery::Grown { bytes });
        }
    }
}

fn is_there(pid: u32) -> bool {
    Path::new("/proc").join(pid.to_string()).exists()
}

#[cfg(test)]
mod tests {
    use super::*;
    use partage_core::model::Gpu;

    const GPU: &str = "GPU-01234567-89ab-cdef-0123-456789abcdef";

    #[test]
    fn sentences_agree_with_one_process_and_with_several() {
        let gpu = Gpu {
            uuid: GPU.into(),
            minor: 0,
            model: "Tesla T4".into(),
            memory_bytes: Bytes(16 << 30),
            numa: None,
            pci: None,
            withheld: None,
        };
        let auditor: Auditor<String> = Auditor::new(&Node::new("n1", vec![gpu]));
        let word = |kind, pid| {
            let gpu = uuid_bytes(&GPU.into()).unwrap();
            auditor.word(&Finding { container: "a".into(), gpu, kind, pid, amount: 1 << 30, since: 0 })
        };
        for (kind, one, all) in [
            (
                FindingKind::UnaccountedWork,
                "process 7 works on GPU 0 outside its turns",
                "its processes work on GPU 0 outside their turns",
            ),
            (
                FindingKind::UnaccountedMemory,
                "process 7 holds 1 GiB on GPU 0 that it did not ask for",
                "its processes hold 1 GiB on GPU 0 that they did not ask for",
            ),
            (
                FindingKind::OverLimit,
                "process 7 holds 1 GiB more on GPU 0 than the limit",
                "its processes hold 1 GiB more on GPU 0 than the limit",
            ),
            (
                FindingKind::UngrantedGpu,
                "process 7 uses GPU 0, which is not the share's",
                "its processes use GPU 0, which is not the share's",
            ),
            (
                FindingKind::ForgedUsage,
                "process 7 wrote over its account of GPU 0",
                "its processes made the file of their account 1 GiB longer; it was cut back",
            ),
        ] {
            assert_eq!(word(kind, Some(7)), one);
            assert_eq!(word(kind, None), all);
        }
    }
}
