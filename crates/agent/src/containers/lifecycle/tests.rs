//! Single transitions; [`super::model`] has their interleavings.

use super::*;
use crate::resources::tests::node;
use crate::store::tests::record;
use proptest::prelude::*;

fn empty() -> Containers {
    Containers::recover(node(&[1000, 1000]), RecoveryInput::default()).0
}

/// Grants `record` to a pod, from the list or, if it is not `listed`, from a single GET while the list lags behind.
fn grant(containers: &mut Containers, record: &PodRecord, listed: bool) {
    containers.grants.replace(record.clone());
    containers.note_grant(record, listed);
}

fn ends(containers: &mut Containers, phase: PodPhase, now: u64) -> Vec<PodEndCause> {
    containers.ended_pods(|_| phase, now).into_iter().map(|(_, end)| end).collect()
}

/// A grant of a pod that was in the list is released when the pod is gone, however young it is.
#[test]
fn young_pod_that_was_listed_ends_when_it_is_deleted() {
    let young = record("a", 1);
    let mut containers = empty();
    grant(&mut containers, &young, false);
    assert_eq!(ends(&mut containers, PodPhase::Absent, young.at), [], "the list may lag behind kubelet");
    let old = young.at + ORPHAN_GRACE_PERIOD.as_nanos() as u64 + 1;
    assert_eq!(
        ends(&mut containers, PodPhase::Absent, old),
        [PodEndCause::NeverListed],
        "the grace period is over"
    );
    assert_eq!(ends(&mut containers, PodPhase::Active, young.at), []);
    assert_eq!(ends(&mut containers, PodPhase::Absent, young.at), [PodEndCause::Deleted]);
    assert_eq!(ends(&mut containers, PodPhase::Finished, young.at), [PodEndCause::Finished]);
    let mut containers = empty();
    grant(&mut containers, &young, true);
    assert_eq!(ends(&mut containers, PodPhase::Absent, young.at), [PodEndCause::Deleted]);
}

#[test]
fn record_of_another_version_is_not_replaced_until_the_grant_changes() {
    let uid = PodUid::from("a");
    let left = RecoveryInput { foreign_records: [uid.clone()].into(), ..RecoveryInput::default() };
    let (mut containers, recovered) = Containers::recover(node(&[1000]), left);
    assert_eq!(recovered, []);
    assert_eq!(
        containers.unresolved_pods(),
        [uid.clone()].into(),
        "nothing is placed before it is known what it holds"
    );
    grant(&mut containers, &record("a", 1), true);
    containers.resolved(&uid);
    assert_eq!(containers.unresolved_pods(), [].into());
    assert_eq!((containers.unsaved_pods(), containers.unsaved_record(&uid)), (vec![], None));
    containers.replace(record("a", 2));
    assert_eq!(containers.unsaved_record(&uid), Some(record("a", 2)));
    containers.record_saved(&record("a", 1));
    assert_eq!(containers.unsaved_record(&uid), Some(record("a", 2)), "it was replaced while it was written");
    containers.record_saved(&record("a", 2));
    assert_eq!(containers.unsaved_pods(), []);
}

#[test]
fn spec_of_another_version_is_adopted_as_it_is() {
    let holder = |key: &str| DeviceHolder {
        uid: "a".into(),
        container: "main".into(),
        resource: "partage.dev/gpu".into(),
        ids: [DeviceId(key.into())].into(),
        key: Some(ContainerKey(key.into())),
        shared: true,
        name: None,
    };
    let left = RecoveryInput {
        records: [("a".into(), record("a", 1))].into(),
        foreign_specs: [ContainerKey("k1".into())].into(),
        kubelet: vec![holder("k1"), holder("k2")],
        ..RecoveryInput::default()
    };
    let (containers, recovered) = Containers::recover(node(&[1000]), left);
    let has_spec: Vec<(&str, bool)> =
        recovered.iter().map(|one| (one.key.0.as_str(), one.has_spec)).collect();
    assert_eq!(has_spec, [("k1", true), ("k2", false)]);
    assert!(matches!(containers.stage(&ContainerKey("k1".into())), Some(ContainerStage::Granted { .. })));
}

#[test]
fn files_of_another_version_and_regions_in_use_are_not_orphans() {
    let key = |name: &str| ContainerKey(name.into());
    let left = RecoveryInput { foreign_specs: [key("foreign")].into(), ..RecoveryInput::default() };
    let (containers, _) = Containers::recover(node(&[1000]), left);
    let orphans = containers.orphans(&OrphanCriteria {
        on_disk: &["foreign", "in-use", "left"].map(key).into(),
        kept: &[key("in-use")].into(),
        held: &BTreeSet::new(),
        checkpoint_written: Some(0),
        pods_waiting: false,
        now: u64::MAX,
    });
    assert_eq!(orphans, [key("left")]);
}

#[test]
fn container_with_several_keys_has_one_region() {
    let owner = ContainerOwner { pod: "a".into(), container: "main".into() };
    let keys = ["k2", "k1"].map(|key| ContainerKey(key.into()));
    let mut containers = empty();
    grant(&mut containers, &record("a", 1), true);
    containers.prepared(&keys, &owner);
    assert_eq!(containers.prepared_of(&owner.pod), [(keys[0].clone(), owner.container.clone())]);
    assert_eq!(containers.superseded(&keys[1], &owner), [keys[0].clone()]);
}

#[derive(Clone, Debug)]
enum Step {
    /// The watch reports the pod.
    Appears(u8),
    /// The watch reports that it is gone.
    Vanishes(u8),
    /// It is granted, from the list or from a single GET while the list lags behind.
    Granted(u8),
    /// Time passes, in seconds.
    Passes(u64),
    /// One pass of garbage collection.
    Pass,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0..4_u8).prop_map(Step::Appears),
        (0..4_u8).prop_map(Step::Vanishes),
        (0..4_u8).prop_map(Step::Granted),
        (1..90_u64).prop_map(Step::Passes),
        Just(Step::Pass),
    ];
    proptest::collection::vec(step, 0..80)
}

proptest! {
    /// In any order of events, a pass ends exactly the pods that were listed and are gone, and those that were not listed
    /// for the whole grace period.
    #[test]
    fn grants_end_with_their_pods(steps in steps()) {
        let mut containers = empty();
        let mut granted: BTreeMap<u8, u64> = BTreeMap::new();
        let mut there: BTreeSet<u8> = BTreeSet::new();
        // The expectation, computed from all events.
        let mut known: BTreeSet<u8> = BTreeSet::new();
        let mut clock = 0_u64;
        for step in steps {
            match step {
                Step::Appears(pod) => drop(there.insert(pod)),
                Step::Vanishes(pod) => drop(there.remove(&pod)),
                Step::Granted(pod) => {
                    let at = *granted.entry(pod).or_insert(clock);
                    grant(&mut containers, &PodRecord { at, ..record(&pod.to_string(), 1) }, there.contains(&pod));
                    if there.contains(&pod) {
                        known.insert(pod);
                    }
                }
                Step::Passes(seconds) => clock += seconds * 1_000_000_000,
                Step::Pass => {
                    let number = |uid: &PodUid| uid.as_str().parse::<u8>().unwrap();
                    let phase = |uid: &PodUid| {
                        if there.contains(&number(uid)) { PodPhase::Active } else { PodPhase::Absent }
                    };
                    let ended = containers.ended_pods(phase, clock);
                    known.extend(granted.keys().filter(|pod| there.contains(pod)));
                    let expected = granted.iter().filter(|(pod, _)| !there.contains(pod)).filter_map(|(pod, at)| {
                        let end = if known.contains(pod) {
                            Some(PodEndCause::Deleted)
                        } else {
                            is_older(*at, clock).then_some(PodEndCause::NeverListed)
                        };
                        Some((*pod, end?))
                    });
                    let expected: Vec<(u8, PodEndCause)> = expected.collect();
                    let found: Vec<(u8, PodEndCause)> = ended.iter().map(|(pod, end)| (number(&pod.uid), *end)).collect();
                    prop_assert_eq!(&found, &expected);
                    for (pod, _) in ended {
                        containers.release(&pod.uid);
                        granted.remove(&number(&pod.uid));
                        known.remove(&number(&pod.uid));
                    }
                }
            }
        }
    }
}
