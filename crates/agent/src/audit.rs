//! Consistency checks: where the ledger, the records, the regions and kubelet disagree.

use crate::checkpoint::PodRecord;
use crate::containers::lifecycle::{ContainerOwner, Containers, Stage, is_older};
use crate::identity::Holder;
use crate::plugin::Nonce;
use partage_core::model::{ContainerName, PodId, PodUid, Share};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// A region, as far as it is compared.
pub(crate) struct Kept<'a> {
    pub(crate) nonce: &'a Nonce,
    pub(crate) uid: &'a PodUid,
    pub(crate) container: &'a ContainerName,
    pub(crate) shares: &'a [Share],
}

/// One disagreement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    /// What is wrong, in one sentence that stays the same for as long as it is so.
    pub(crate) text: String,
    /// The pod that it is about, where there is one.
    pub(crate) pod: Option<PodId>,
    /// The reason of the event that the pod gets, where its author or an operator has to act.
    pub(crate) event: Option<&'static str>,
}

impl Mismatch {
    fn new(text: String, pod: Option<PodId>) -> Mismatch {
        Mismatch { text, pod, event: None }
    }
}

/// Compares what everybody says. `held` is what kubelet gave to pods that are there; `on_disk` are all regions, also those that
/// belong to no container.
pub(crate) fn mismatches<'a>(
    containers: &Containers,
    regions: impl IntoIterator<Item = Kept<'a>>,
    on_disk: &BTreeSet<Nonce>,
    held: &[Holder],
) -> Vec<Mismatch> {
    let grants = containers.grants();
    let pod = |uid: &PodUid| grants.record(uid).map(|record| record.pod.clone());
    let audited = grants.audit().into_iter().map(|finding| Mismatch::new(finding.to_string(), None));
    let mut wrong: Vec<Mismatch> = audited.collect();
    for Kept { nonce, uid, container, shares } in regions {
        let granted = grants.record(uid).and_then(|record| record.grant_of(container));
        if granted.is_none_or(|grant| grant.shares != shares) {
            let text = format!("the region {nonce} does not match the recorded grant of pod {uid}");
            wrong.push(Mismatch::new(text, pod(uid)));
        }
        let other = held.iter().find(|holder| holder.nonce.as_ref() == Some(nonce) && holder.uid != *uid);
        if let Some(other) = other {
            let text = format!("kubelet gave {nonce} to pod {}, its region is of pod {uid}", other.uid);
            wrong.push(Mismatch::new(text, pod(uid)));
        }
    }
    for holder in held.iter().filter(|holder| grants.record(&holder.uid).is_none()) {
        if let Some(nonce) = holder.nonce.as_ref().filter(|nonce| on_disk.contains(nonce)) {
            let text = format!("pod {} has the region {nonce} and no recorded grant", holder.uid);
            wrong.push(Mismatch::new(text, None));
        }
    }
    let unknown = held.iter().filter_map(|holder| holder.nonce.as_ref().map(|nonce| (nonce, &holder.uid)));
    let unknown = unknown.filter(|(nonce, _)| containers.stage(nonce).is_none());
    wrong.extend(unknown.map(|(nonce, uid)| {
        Mismatch::new(format!("kubelet has {nonce}, which is not known here"), pod(uid))
    }));
    wrong
}

/// Containers that were prepared and whose region is no longer on the node. `running` returns the record of a pod that runs;
/// `missing` returns where the region of a prepared container should be, if it is not there.
pub(crate) fn missing_regions<'a>(
    owned: impl Iterator<Item = (&'a Nonce, &'a ContainerOwner, &'a Stage)>,
    running: impl Fn(&PodUid) -> Option<&'a PodRecord>,
    missing: impl Fn(&Nonce, &Stage) -> Option<PathBuf>,
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
pub(crate) fn lost_allocations<'a>(
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
pub(crate) fn news(before: &mut BTreeSet<String>, now: Vec<Mismatch>) -> Vec<Mismatch> {
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
    use crate::checkpoint::tests::record;
    use crate::containers::lifecycle::LeftBehind;
    use crate::resources::tests::node;

    #[test]
    fn agreement_is_silent_and_every_disagreement_is_told() {
        let holder = |uid: &str, nonce: &str| Holder {
            uid: uid.into(),
            container: "main".into(),
            resource: "partage.dev/gpu".into(),
            ids: ["slot-1"].map(|id| crate::plugin::DeviceId(id.into())).into(),
            nonce: Some(Nonce(nonce.into())),
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
                containers.allocate(Nonce((*key).into()), &resource, ids, 1);
            }
            containers
        };
        let told = |memory: &[u64], region: u64, held: &[Holder], names: &[&str]| {
            let (nonce, uid, container) = (Nonce("a".into()), "u-0".into(), "main".into());
            let share = record("u-0", region << 20).grant.grants.remove(0).shares;
            let kept = Kept { nonce: &nonce, uid: &uid, container: &container, shares: &share };
            let containers = containers(memory, names);
            let wrong = mismatches(&containers, [kept], &[Nonce("a".into())].into(), held);
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
            (Nonce(key.into()), owner)
        };
        let owned = [
            container("a", "u-0", "main"),
            container("b", "u-0", "without-a-grant"),
            container("c", "ended", "main"),
        ];
        let owned = || owned.iter().map(|(key, owner)| (key, owner, &Stage::Named));
        let running = |uid: &PodUid| (*uid == record.pod.uid).then_some(&record);
        let folder = |key: &Nonce| PathBuf::from("/run/partage/regions").join(&key.0);
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
            nonce: Some(Nonce("a".into())),
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
