//! Consistency checks: where the ledger, the records, the regions and kubelet disagree.

use super::lifecycle::{ContainerOwner, Containers, Stage, is_older};
use crate::identity::Holder;
use crate::plugin::ContainerKey;
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
        for Mismatch { text, pod, event } in news(&mut lock(&self.reported_mismatches), now) {
            let (namespace, name) = logged_name(pod.as_ref());
            tracing::warn!(namespace, pod = name, "mismatch: {text}");
            if let Some((pod, reason)) = pod.as_ref().zip(event) {
                self.adapters.cluster.pod_event(pod, Severity::Warning, reason, &text);
            }
        }
        count
    }

    /// What cannot be right: what the ledger finds, and where the records, kubelet and the regions disagree.
    fn mismatches(&self) -> Vec<Mismatch> {
        // Kubelet remembers pods that have finished, or are gone, until it gives their devices again.
        let holds = |uid: &PodUid| self.adapters.pods.by_uid(uid).is_some_and(|pod| !pod.is_finished());
        let written = self.adapters.kubelet.written();
        let all = self.adapters.kubelet.all();
        let held = all.iter().flatten().filter(|holder| holds(&holder.uid));
        let held: Vec<Holder> = held.cloned().collect();
        let on_disk = self.adapters.regions.on_disk().into_iter().collect();
        let specs: BTreeSet<String> = self.adapters.cdi.names().unwrap_or_default().into_iter().collect();
        let (containers, live) = (self.containers(), self.adapters.regions.live());
        let kept = live.iter().map(|(key, live)| Kept {
            key,
            uid: &live.uid,
            container: &live.container,
            shares: &live.shares,
        });
        let mut wrong = mismatches(&containers, kept, &on_disk, &held);
        let grants = containers.grants();
        let running = |uid: &PodUid| {
            grants.record(uid).filter(|record| record.boot == self.machine.boot && holds(&record.pod.uid))
        };
        let missing = |key: &ContainerKey, stage: &Stage| {
            let (region, was_prepared) = match stage {
                Stage::Prepared { region, .. } => (region, true),
                // The CDI spec is written after the region, and removed before it.
                _ => (key, specs.contains(&key.0)),
            };
            (was_prepared && !self.adapters.regions.is_whole(region))
                .then(|| self.adapters.regions.folder(region))
        };
        wrong.extend(missing_regions(containers.owned(), running, missing));
        if let Some((all, written)) = all.as_ref().zip(written) {
            let running = grants.records().filter(|record| running(&record.pod.uid).is_some());
            wrong.extend(lost_allocations(running, all, written));
        }
        wrong
    }
}

/// A region, as far as it is compared.
struct Kept<'a> {
    key: &'a ContainerKey,
    uid: &'a PodUid,
    container: &'a ContainerName,
    shares: &'a [Share],
}

/// One disagreement.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mismatch {
    /// What is wrong, in one sentence that stays the same for as long as it is so.
    text: String,
    /// The pod that it is about, where there is one.
    pod: Option<PodId>,
    /// The reason of the event that the pod gets, where its author or an operator has to act.
    event: Option<&'static str>,
}

impl Mismatch {
    fn new(text: String, pod: Option<PodId>) -> Mismatch {
        Mismatch { text, pod, event: None }
    }
}

/// Compares what everybody says. `held` is what kubelet gave to pods that are there; `on_disk` are all regions, also those that
/// belong to no container.
fn mismatches<'a>(
    containers: &Containers,
    regions: impl IntoIterator<Item = Kept<'a>>,
    on_disk: &BTreeSet<ContainerKey>,
    held: &[Holder],
) -> Vec<Mismatch> {
    let grants = containers.grants();
    let pod = |uid: &PodUid| grants.record(uid).map(|record| record.pod.clone());
    let audited = grants.audit().into_iter().map(|finding| Mismatch::new(finding.to_string(), None));
    let mut wrong: Vec<Mismatch> = audited.collect();
    for Kept { key, uid, container, shares } in regions {
        let granted = grants.record(uid).and_then(|record| record.grant_of(container));
        if granted.is_none_or(|grant| grant.shares != shares) {
            let text = format!("the region {key} does not match the recorded grant of pod {uid}");
            wrong.push(Mismatch::new(text, pod(uid)));
        }
        let other = held.iter().find(|holder| holder.key.as_ref() == Some(key) && holder.uid != *uid);
        if let Some(other) = other {
            let text = format!("kubelet gave {key} to pod {}, its region is of pod {uid}", other.uid);
            wrong.push(Mismatch::new(text, pod(uid)));
        }
    }
    for holder in held.iter().filter(|holder| grants.record(&holder.uid).is_none()) {
        if let Some(key) = holder.key.as_ref().filter(|key| on_disk.contains(key)) {
            let text = format!("pod {} has the region {key} and no recorded grant", holder.uid);
            wrong.push(Mismatch::new(text, None));
        }
    }
    let unknown = held.iter().filter_map(|holder| holder.key.as_ref().map(|key| (key, &holder.uid)));
    let unknown = unknown.filter(|(key, _)| containers.stage(key).is_none());
    wrong
        .extend(unknown.map(|(key, uid)| {
            Mismatch::new(format!("kubelet has {key}, which is not known here"), pod(uid))
        }));
    wrong
}

/// Containers that were prepared and whose region is no longer on the node. `running` returns the record of a pod that runs;
/// `missing` returns where the region of a prepared container should be, if it is not there.
fn missing_regions<'a>(
    owned: impl Iterator<Item = (&'a ContainerKey, &'a ContainerOwner, &'a Stage)>,
    running: impl Fn(&PodUid) -> Option<&'a PodRecord>,
    missing: impl Fn(&ContainerKey, &Stage) -> Option<PathBuf>,
) -> Vec<Mismatch> {
    let mut wrong = Vec::new();
    for (key, ContainerOwner { pod, container }, stage) in owned {
        let Some(record) = running(pod).filter(|record| record.grant_of(container).is_some()) else {
            continue;
        };
        let Some(folder) = missing(key, stage) else { continue };
        let text = format!(
            "the region of container {container} was removed from the node ({}): its amounts cannot be changed, and programs that start \
             in it may find no GPU; restart the container to create the region again, as by deleting the pod",
            folder.display()
        );
        wrong.push(Mismatch { text, pod: Some(record.pod.clone()), event: Some("RegionMissing") });
    }
    wrong
}

/// Running pods whose devices kubelet no longer has a record of. `held` is all that kubelet's checkpoint has, and `written` is when it
/// was written: one that was not written again since the grant may lag behind what kubelet knows.
fn lost_allocations<'a>(
    running: impl Iterator<Item = &'a PodRecord>,
    held: &[Holder],
    written: u64,
) -> Vec<Mismatch> {
    let is_lost = |record: &&PodRecord| {
        is_older(record.at, written) && held.iter().all(|holder| holder.uid != record.pod.uid)
    };
    let mismatch = |record: &PodRecord| {
        let PodId { namespace, name, .. } = &record.pod;
        let text = format!(
            "kubelet has lost its record of the devices of pod {namespace}/{name}: its containers run on, and one that restarts waits \
             forever (\"no devices found allocated in local cache\"); delete the pod, so that its controller creates a replacement"
        );
        Mismatch { text, pod: Some(record.pod.clone()), event: Some("KubeletAllocationLost") }
    };
    running.filter(is_lost).map(mismatch).collect()
}

/// Returns what was not there before. What is no longer there is news when it comes again.
fn news(before: &mut BTreeSet<String>, now: Vec<Mismatch>) -> Vec<Mismatch> {
    let texts: BTreeSet<String> = now.iter().map(|one| one.text.clone()).collect();
    let mut told = BTreeSet::new();
    let is_new = |one: &Mismatch| !before.contains(&one.text) && told.insert(one.text.clone());
    let new = now.into_iter().filter(is_new).collect();
    *before = texts;
    new
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::containers::lifecycle::LeftBehind;
    use crate::resources::tests::node;
    use crate::store::tests::record;

    #[test]
    fn agreement_is_silent_and_every_disagreement_is_told() {
        let holder = |uid: &str, key: &str| Holder {
            uid: uid.into(),
            container: "main".into(),
            resource: "partage.dev/gpu".into(),
            ids: ["slot-1"].map(|id| crate::plugin::DeviceId(id.into())).into(),
            key: Some(ContainerKey(key.into())),
            shared: true,
            name: None,
        };
        let containers = |memory: &[u64], names: &[&str]| {
            let records = memory.iter().enumerate().map(|(at, &mib)| record(&format!("u-{at}"), mib << 20));
            let left = LeftBehind {
                records: records.map(|record| (record.pod.uid.clone(), record)).collect(),
                ..LeftBehind::default()
            };
            let (mut containers, _) = Containers::recover(node(&[1000, 1000]), left);
            for key in names {
                let Holder { resource, ids, .. } = holder("", key);
                containers.allocate(ContainerKey((*key).into()), &resource, ids, 1);
            }
            containers
        };
        let told = |memory: &[u64], region: u64, held: &[Holder], names: &[&str]| {
            let (key, uid, container) = (ContainerKey("a".into()), "u-0".into(), "main".into());
            let share = record("u-0", region << 20).grant.grants.remove(0).shares;
            let kept = Kept { key: &key, uid: &uid, container: &container, shares: &share };
            let containers = containers(memory, names);
            let wrong = mismatches(&containers, [kept], &[ContainerKey("a".into())].into(), held);
            wrong.into_iter().map(|one| one.text).collect::<Vec<_>>()
        };
        let held = [holder("u-0", "a")];
        assert_eq!(told(&[400], 400, &held, &["a"]), [""; 0]);
        assert_eq!(
            told(&[400], 500, &held, &["a"]),
            ["the region a does not match the recorded grant of pod u-0"]
        );
        assert_eq!(
            told(&[], 400, &held, &["a"]),
            [
                "the region a does not match the recorded grant of pod u-0",
                "pod u-0 has the region a and no recorded grant"
            ]
        );
        // One that waits for room has a name, and no region yet.
        assert_eq!(told(&[400], 400, &[held[0].clone(), holder("u-8", "b")], &["a", "b"]), [""; 0]);
        assert_eq!(
            told(&[400], 400, &[holder("u-7", "a")], &["a"]),
            [
                "kubelet gave a to pod u-7, its region is of pod u-0",
                "pod u-7 has the region a and no recorded grant"
            ]
        );
        assert_eq!(told(&[400], 400, &held, &[]), ["kubelet has a, which is not known here"]);
        let over = told(&[400, 700], 400, &held, &["a"]);
        assert!(matches!(over.as_slice(), [one] if one.contains("GPU-1")), "{over:?}");
    }

    #[test]
    fn what_does_not_agree_is_told_once() {
        let mut told = BTreeSet::new();
        let mut news = |now: &[&str]| {
            let now = now.iter().map(|text| Mismatch::new((*text).to_string(), None)).collect();
            news(&mut told, now).into_iter().map(|one| one.text).collect::<Vec<_>>()
        };
        assert_eq!(news(&["a", "b", "a"]), ["a", "b"]);
        assert_eq!(news(&["b", "c"]), ["c"]);
        assert_eq!(news(&["b", "c"]), [""; 0]);
        assert_eq!(news(&[]), [""; 0]);
        assert_eq!(news(&["b"]), ["b"], "it came again");
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
        let owned = || owned.iter().map(|(key, owner)| (key, owner, &Stage::Named));
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
        let holder = |uid: &str| Holder {
            uid: uid.into(),
            container: "main".into(),
            resource: "partage.dev/gpu".into(),
            ids: BTreeSet::new(),
            key: Some(ContainerKey("a".into())),
            shared: true,
            name: None,
        };
        let lost = |held: &[Holder], written| lost_allocations([&record].into_iter(), held, written);
        assert_eq!(lost(&[holder("u-0")], later), []);
        assert_eq!(lost(&[holder("u-1")], record.at), [], "the file is as old as the grant");
        let wrong = lost(&[holder("u-1")], later);
        let [one] = wrong.as_slice() else { panic!("{wrong:?}") };
        assert_eq!((&one.pod, one.event), (&Some(record.pod.clone()), Some("KubeletAllocationLost")));
        assert!(one.text.contains("pod default/p") && one.text.contains("delete the pod"), "{one:?}");
    }
}
