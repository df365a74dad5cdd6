//! Consistency checks between the ledger, the records, the regions and kubelet.

use super::lifecycle::{ContainerOwner, ContainerStage, Containers, is_older};
use crate::containers::ContainerKey;
use crate::device_owner::DeviceHolder;
use crate::state::{NodeState, lock, logged_name};
use crate::store::PodRecord;
use partage_cluster::Severity;
use partage_core::model::{ContainerName, PodId, PodUid, Share};
use std::collections::BTreeSet;
use std::path::PathBuf;

impl NodeState {
    /// Runs the consistency checks and reports each mismatch once for as long as it lasts. Returns how many there are now.
    pub(crate) fn check_consistency(&self) -> usize {
        let now = self.mismatches();
        let count = now.len();
        for StateMismatch { text, pod, event } in take_new(&mut lock(&self.reported_mismatches), now) {
            let (namespace, name) = logged_name(pod.as_ref());
            tracing::warn!(namespace, pod = name, mismatch = text, "state mismatch");
            if let Some((pod, reason)) = pod.as_ref().zip(event) {
                self.adapters.cluster.pod_event(pod, Severity::Warning, reason, &text);
            }
        }
        count
    }

    /// Returns what the ledger's audit finds, and where the records, kubelet and the regions disagree.
    fn mismatches(&self) -> Vec<StateMismatch> {
        // Kubelet keeps pods that have finished or are gone in its checkpoint until it allocates their devices again.
        let holds = |uid: &PodUid| self.adapters.pods.by_uid(uid).is_some_and(|pod| !pod.is_finished());
        let written = self.adapters.device_owners.checkpoint_written();
        let all = self.adapters.device_owners.all();
        let held = all.iter().flatten().filter(|holder| holds(&holder.uid));
        let held: Vec<DeviceHolder> = held.cloned().collect();
        let on_disk = self.adapters.regions.on_disk().into_iter().collect();
        let specs: BTreeSet<String> = self.adapters.cdi.names().unwrap_or_default().into_iter().collect();
        let (containers, live) = (self.containers(), self.adapters.regions.live());
        let kept = live.iter().map(|(key, live)| RegionFacts {
            key,
            uid: &live.uid,
            container: &live.container,
            shares: &live.shares,
        });
        let mut found = mismatches(&containers, kept, &on_disk, &held);
        let grants = containers.grants();
        let unmanaged = live.values().filter(|live| live.region().is_none());
        found.extend(unmanaged.map(|live| unmanaged_region(&live.container, grants.record(&live.uid))));
        let running = |uid: &PodUid| {
            grants.record(uid).filter(|record| record.boot == self.machine.boot && holds(&record.pod.uid))
        };
        let missing = |key: &ContainerKey, stage: &ContainerStage| {
            let (region, was_prepared) = match stage {
                ContainerStage::Prepared { region, .. } => (region, true),
                // The CDI spec is written after the region, and removed before it.
                _ => (key, specs.contains(&key.0)),
            };
            (was_prepared && !self.adapters.regions.is_whole(region))
                .then(|| self.adapters.regions.folder(region))
        };
        found.extend(missing_regions(containers.owned(), running, missing));
        if let Some((all, written)) = all.as_ref().zip(written) {
            let running = grants.records().filter(|record| running(&record.pod.uid).is_some());
            found.extend(lost_allocations(running, all, written));
        }
        found
    }
}

/// The facts of a region that are compared.
struct RegionFacts<'a> {
    key: &'a ContainerKey,
    uid: &'a PodUid,
    container: &'a ContainerName,
    shares: &'a [Share],
}

/// One disagreement between two sources.
#[derive(Clone, Debug, PartialEq, Eq)]
struct StateMismatch {
    /// The mismatch in one sentence, which stays the same for as long as the mismatch lasts.
    text: String,
    /// The pod that it concerns, if any.
    pod: Option<PodId>,
    /// The reason of the event on the pod, if its author or an operator has to act.
    event: Option<&'static str>,
}

impl StateMismatch {
    fn new(text: String, pod: Option<PodId>) -> StateMismatch {
        StateMismatch { text, pod, event: None }
    }
}

/// Compares all sources. `held` has the allocations in kubelet's checkpoint of pods that exist; `on_disk` has all regions, also
/// those that belong to no container.
fn mismatches<'a>(
    containers: &Containers,
    regions: impl IntoIterator<Item = RegionFacts<'a>>,
    on_disk: &BTreeSet<ContainerKey>,
    held: &[DeviceHolder],
) -> Vec<StateMismatch> {
    let grants = containers.grants();
    let pod = |uid: &PodUid| grants.record(uid).map(|record| record.pod.clone());
    let audited = grants.audit().into_iter().map(|finding| StateMismatch::new(finding.to_string(), None));
    let mut mismatches: Vec<StateMismatch> = audited.collect();
    for RegionFacts { key, uid, container, shares } in regions {
        let granted = grants.record(uid).and_then(|record| record.grant_of(container));
        if granted.is_none_or(|grant| grant.shares != shares) {
            let text = format!("the region {key} does not match the recorded grant of pod {uid}");
            mismatches.push(StateMismatch::new(text, pod(uid)));
        }
        let other = held.iter().find(|holder| holder.key.as_ref() == Some(key) && holder.uid != *uid);
        if let Some(other) = other {
            let text =
                format!("kubelet allocated {key} to pod {}, and its region belongs to pod {uid}", other.uid);
            mismatches.push(StateMismatch::new(text, pod(uid)));
        }
    }
    for holder in held.iter().filter(|holder| grants.record(&holder.uid).is_none()) {
        if let Some(key) = holder.key.as_ref().filter(|key| on_disk.contains(key)) {
            let text = format!("pod {} has the region {key} and no recorded grant", holder.uid);
            mismatches.push(StateMismatch::new(text, None));
        }
    }
    let unknown = held.iter().filter_map(|holder| holder.key.as_ref().map(|key| (key, &holder.uid)));
    let unknown = unknown.filter(|(key, _)| containers.stage(key).is_none());
    mismatches.extend(unknown.map(|(key, uid)| {
        StateMismatch::new(
            format!("kubelet's checkpoint has {key}, which is not in the agent's records"),
            pod(uid),
        )
    }));
    mismatches
}

/// Returns the containers that were prepared and whose region is no longer on the node. `running` returns the record of a pod that runs;
/// `missing` returns where the region of a prepared container should be, if it is not there.
fn missing_regions<'a>(
    owned: impl Iterator<Item = (&'a ContainerKey, &'a ContainerOwner, &'a ContainerStage)>,
    running: impl Fn(&PodUid) -> Option<&'a PodRecord>,
    missing: impl Fn(&ContainerKey, &ContainerStage) -> Option<PathBuf>,
) -> Vec<StateMismatch> {
    let mut mismatches = Vec::new();
    for (key, ContainerOwner { pod, container }, stage) in owned {
        let Some(record) = running(pod).filter(|record| record.grant_of(container).is_some()) else {
            continue;
        };
        let Some(folder) = missing(key, stage) else { continue };
        let text = format!(
            "the region of container {container} was removed from the node ({}): its amounts cannot be changed, and programs that start \
             in it may find no GPU; restart the container to create the region again, for example by deleting the pod",
            folder.display()
        );
        mismatches.push(StateMismatch { text, pod: Some(record.pod.clone()), event: Some("RegionMissing") });
    }
    mismatches
}

/// Returns the mismatch of a container whose region this agent cannot manage.
fn unmanaged_region(container: &ContainerName, record: Option<&PodRecord>) -> StateMismatch {
    let text = format!(
        "the region of container {container} has a layout of another agent version or is damaged: its limits stay in force, but \
         cannot be changed and are not audited; run the agent version that wrote it, or restart the container"
    );
    StateMismatch { text, pod: record.map(|record| record.pod.clone()), event: Some("RegionNotManaged") }
}

/// Returns the running pods whose devices are no longer in kubelet's checkpoint. `held` is the whole checkpoint, and `written` is
/// when it was written: one that was not written since the grant may lag behind.
fn lost_allocations<'a>(
    running: impl Iterator<Item = &'a PodRecord>,
    held: &[DeviceHolder],
    written: u64,
) -> Vec<StateMismatch> {
    let is_lost = |record: &&PodRecord| {
        is_older(record.at, written) && held.iter().all(|holder| holder.uid != record.pod.uid)
    };
    let mismatch = |record: &PodRecord| {
        let PodId { namespace, name, .. } = &record.pod;
        let text = format!(
            "kubelet has lost its record of the devices of pod {namespace}/{name}: running containers continue; a restarted container \
             cannot start (\"no devices found allocated in local cache\"); delete the pod, so that its controller creates a replacement"
        );
        StateMismatch { text, pod: Some(record.pod.clone()), event: Some("KubeletAllocationLost") }
    };
    running.filter(is_lost).map(mismatch).collect()
}

/// Returns the mismatches that were not reported before. One that ended is new when it occurs again.
fn take_new(before: &mut BTreeSet<String>, now: Vec<StateMismatch>) -> Vec<StateMismatch> {
    let texts: BTreeSet<String> = now.iter().map(|one| one.text.clone()).collect();
    let mut seen = BTreeSet::new();
    let is_new = |one: &StateMismatch| !before.contains(&one.text) && seen.insert(one.text.clone());
    let new = now.into_iter().filter(is_new).collect();
    *before = texts;
    new
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::containers::lifecycle::RecoveryInput;
    use crate::resources::tests::node;
    use crate::store::tests::record;

    #[test]
    fn every_mismatch_is_reported_and_consistent_state_is_not() {
        let holder = |uid: &str, key: &str| DeviceHolder {
            uid: uid.into(),
            container: "main".into(),
            resource: "partage.dev/gpu".into(),
            ids: ["slot-1"].map(|id| crate::device_plugin::DeviceId(id.into())).into(),
            key: Some(ContainerKey(key.into())),
            shared: true,
            name: None,
        };
        let containers = |memory: &[u64], names: &[&str]| {
            let records = memory.iter().enumerate().map(|(at, &mib)| record(&format!("u-{at}"), mib << 20));
            let left = RecoveryInput {
                records: records.map(|record| (record.pod.uid.clone(), record)).collect(),
                ..RecoveryInput::default()
            };
            let (mut containers, _) = Containers::recover(node(&[1000, 1000]), left);
            for key in names {
                let DeviceHolder { resource, ids, .. } = holder("", key);
                containers.allocate(ContainerKey((*key).into()), &resource, ids, 1);
            }
            containers
        };
        let reported = |memory: &[u64], region: u64, held: &[DeviceHolder], names: &[&str]| {
            let (key, uid, container) = (ContainerKey("a".into()), "u-0".into(), "main".into());
            let share = record("u-0", region << 20).grant.grants.remove(0).shares;
            let kept = RegionFacts { key: &key, uid: &uid, container: &container, shares: &share };
            let containers = containers(memory, names);
            let wrong = mismatches(&containers, [kept], &[ContainerKey("a".into())].into(), held);
            wrong.into_iter().map(|one| one.text).collect::<Vec<_>>()
        };
        let held = [holder("u-0", "a")];
        assert_eq!(reported(&[400], 400, &held, &["a"]), [""; 0]);
        assert_eq!(
            reported(&[400], 500, &held, &["a"]),
            ["the region a does not match the recorded grant of pod u-0"]
        );
        assert_eq!(
            reported(&[], 400, &held, &["a"]),
            [
                "the region a does not match the recorded grant of pod u-0",
                "pod u-0 has the region a and no recorded grant"
            ]
        );
        // A container that waits for capacity has a key and no region yet.
        assert_eq!(reported(&[400], 400, &[held[0].clone(), holder("u-8", "b")], &["a", "b"]), [""; 0]);
        assert_eq!(
            reported(&[400], 400, &[holder("u-7", "a")], &["a"]),
            [
                "kubelet allocated a to pod u-7, and its region belongs to pod u-0",
                "pod u-7 has the region a and no recorded grant"
            ]
        );
        assert_eq!(
            reported(&[400], 400, &held, &[]),
            ["kubelet's checkpoint has a, which is not in the agent's records"]
        );
        let over = reported(&[400, 700], 400, &held, &["a"]);
        assert!(matches!(over.as_slice(), [one] if one.contains("GPU-1")), "{over:?}");
    }

    #[test]
    fn mismatch_is_reported_once_while_it_lasts() {
        let mut before = BTreeSet::new();
        let mut take_new = |now: &[&str]| {
            let now = now.iter().map(|text| StateMismatch::new((*text).to_string(), None)).collect();
            super::take_new(&mut before, now).into_iter().map(|one| one.text).collect::<Vec<_>>()
        };
        assert_eq!(take_new(&["a", "b", "a"]), ["a", "b"]);
        assert_eq!(take_new(&["b", "c"]), ["c"]);
        assert_eq!(take_new(&["b", "c"]), [""; 0]);
        assert_eq!(take_new(&[]), [""; 0]);
        assert_eq!(take_new(&["b"]), ["b"], "it occurred again");
    }

    #[test]
    fn region_that_was_removed_is_reported_on_its_pod() {
        let record = record("u-0", 400 << 20);
        let container = |key: &str, pod: &str, container: &str| {
            let owner = ContainerOwner { pod: pod.into(), container: container.into() };
            (ContainerKey(key.into()), owner)
        };
        let owned = [
            container("a", "u-0", "main"),
            container("b", "u-0", "without-a-grant"),
            container("c", "ended", "main"),
        ];
        let owned = || owned.iter().map(|(key, owner)| (key, owner, &ContainerStage::Named));
        let running = |uid: &PodUid| (*uid == record.pod.uid).then_some(&record);
        let folder = |key: &ContainerKey| PathBuf::from("/run/partage/regions").join(&key.0);
        let wrong = missing_regions(owned(), running, |key, _| Some(folder(key)));
        let [one] = wrong.as_slice() else { panic!("{wrong:?}") };
        assert_eq!((&one.pod, one.event), (&Some(record.pod.clone()), Some("RegionMissing")));
        assert!(
            one.text.contains("(/run/partage/regions/a)") && one.text.contains("restart the container"),
            "{one:?}"
        );
        assert_eq!(missing_regions(owned(), running, |_, _| None), [], "nothing is missing");
    }

    #[test]
    fn pod_that_kubelet_has_forgotten_is_reported_once_its_checkpoint_is_newer() {
        let record = record("u-0", 400 << 20);
        let later = record.at + 121_000_000_000;
        let holder = |uid: &str| DeviceHolder {
            uid: uid.into(),
            container: "main".into(),
            resource: "partage.dev/gpu".into(),
            ids: BTreeSet::new(),
            key: Some(ContainerKey("a".into())),
            shared: true,
            name: None,
        };
        let lost = |held: &[DeviceHolder], written| lost_allocations([&record].into_iter(), held, written);
        assert_eq!(lost(&[holder("u-0")], later), []);
        assert_eq!(lost(&[holder("u-1")], record.at), [], "the file is as old as the grant");
        let wrong = lost(&[holder("u-1")], later);
        let [one] = wrong.as_slice() else { panic!("{wrong:?}") };
        assert_eq!((&one.pod, one.event), (&Some(record.pod.clone()), Some("KubeletAllocationLost")));
        assert!(one.text.contains("pod default/p") && one.text.contains("delete the pod"), "{one:?}");
    }
}
