use super::*;
use partage_core::model::Gpu;
use proptest::prelude::*;

const GIB: u64 = 1 << 30;

fn node() -> Node {
    let gpu = |number: u32| Gpu {
        uuid: format!("GPU-{number:08}-0000-0000-0000-000000000000").as_str().into(),
        minor: number,
        model: "NVIDIA A100-SXM4-40GB".into(),
        memory_bytes: Bytes(40 * GIB),
        numa: None,
        pci: None,
        withheld: None,
    };
    Node::new("this machine", vec![gpu(0), gpu(1)])
}

fn user(uid: u32) -> UserIdentity {
    UserIdentity { uid, gids: vec![uid] }
}

fn request(gib: u64, cores: u32) -> RunRequest {
    RunRequest {
        memory: (gib > 0).then_some(Bytes(gib * GIB)),
        cores: if cores > 0 { Cores::percent(cores) } else { None },
        ..RunRequest::default()
    }
}

/// The shares that are held in a test.
#[derive(Default)]
struct TestShares(Vec<(String, UserIdentity, Vec<Share>)>);

impl TestShares {
    fn held(&self) -> Vec<HeldShares<'_>> {
        self.0.iter().map(|(name, who, shares)| HeldShares { name, who, shares }).collect()
    }

    fn run(
        &mut self,
        name: &str,
        who: UserIdentity,
        settings: &WorkstationSettings,
        request: &RunRequest,
    ) -> Result<Vec<Share>, Refusal> {
        let ask = to_ask(request, &settings.default)?;
        let shares = place(&node(), &self.held(), settings, &who, &ask)?;
        self.0.push((name.into(), who, shares.clone()));
        Ok(shares)
    }
}

fn plain() -> WorkstationSettings {
    WorkstationSettings::default()
}

#[test]
fn two_users_get_different_gpus() {
    let mut held = TestShares::default();
    let first = held.run("a", user(1), &plain(), &request(4, 30)).unwrap();
    let second = held.run("b", user(2), &plain(), &request(4, 30)).unwrap();
    assert_ne!(first[0].gpu, second[0].gpu);
    assert_eq!(
        (first[0].cores, first[0].ceiling),
        (Cores::percent(30), Some(Cores::WHOLE)),
        "a share may use idle time"
    );
    let hard = RunRequest { mode: Some(ComputeMode::Hard), ..request(4, 30) };
    assert_eq!(held.run("c", user(1), &plain(), &hard).unwrap()[0].ceiling, None);
}

#[test]
fn refusal_has_hints_that_would_fit() {
    let mut held = TestShares::default();
    held.run("a", user(1), &plain(), &request(30, 50)).unwrap();
    held.run("b", user(1), &plain(), &request(20, 50)).unwrap();
    let refused = held.run("c", user(2), &plain(), &request(24, 10)).unwrap_err();
    assert_eq!(refused.reason, RefusalReason::NoCapacity);
    assert!(refused.message.contains("24 GiB"), "{refused:?}");
    assert!(refused.hints.iter().any(|hint| hint.contains("20 GiB")), "{refused:?}");
    let whole = RunRequest { whole: true, ..RunRequest::default() };
    let refused = held.run("d", user(2), &plain(), &whole).unwrap_err();
    assert!(refused.message.starts_with("GPU 0 has 1 share, a whole GPU is requested"), "{refused:?}");
    let large = held.run("e", user(2), &plain(), &request(41, 0)).unwrap_err();
    assert!(large.message.contains("40 GiB"), "{large:?}");
}

#[test]
fn contradictory_requests_are_refused() {
    let ask = |request: RunRequest| to_ask(&request, &DefaultShare::default()).unwrap_err();
    let cases = [
        (RunRequest { whole: true, ..request(4, 0) }, "--whole"),
        (RunRequest { memory_percent: Some(10), ..request(4, 0) }, "omit one of them"),
        (RunRequest { memory: Some(Bytes(4)), ..RunRequest::default() }, "less than 1 MiB"),
        (RunRequest { gpus: Some(0), ..RunRequest::default() }, "number of GPUs 0"),
        (RunRequest { gpus: Some(17), ..RunRequest::default() }, "number of GPUs 17"),
        (RunRequest { memory_percent: Some(101), ..RunRequest::default() }, "1 to 100"),
        (RunRequest { cores: Some(Cores::NONE), ..RunRequest::default() }, "0 %"),
        (RunRequest { mode: Some(ComputeMode::Hard), ..RunRequest::default() }, "--cores"),
        (
            RunRequest { mode: Some(ComputeMode::WorkConserving), whole: true, ..RunRequest::default() },
            "--whole",
        ),
        (RunRequest { oversubscribe: true, whole: true, ..RunRequest::default() }, "no memory limit"),
        (RunRequest { low_latency: true, whole: true, ..RunRequest::default() }, "not shared in turns"),
        (RunRequest { low_latency: true, ..RunRequest::default() }, "--latency low requires --cores"),
        (RunRequest { priority: Some(1), whole: true, ..RunRequest::default() }, "not shared in turns"),
        (RunRequest { priority: Some(11), ..RunRequest::default() }, "use 0 to 10"),
    ];
    for (request, expected) in cases {
        let refused = ask(request.clone());
        assert!(
            refused.reason == RefusalReason::Invalid && refused.message.contains(expected),
            "{request:?}: {refused:?}"
        );
    }
}

#[test]
fn oversubscription_is_allowed_unless_the_settings_refuse_it() {
    let mut held = TestShares::default();
    let beyond = RunRequest { oversubscribe: true, ..request(4, 0) };
    assert!(to_ask(&beyond, &DefaultShare::default()).unwrap().oversubscribe);
    held.run("a", user(1), &plain(), &beyond).unwrap();
    let settings = WorkstationSettings::from_yaml("oversubscribe: refused").unwrap();
    let refused = held.run("b", user(1), &settings, &beyond).unwrap_err();
    assert_eq!(refused.reason, RefusalReason::NotAllowed);
    for expected in ["oversubscription is not allowed", "oversubscribe: refused", "omit --oversubscribe"] {
        assert!(refused.message.contains(expected), "{expected}: {refused:?}");
    }
    held.run("b", user(1), &settings, &request(4, 0)).unwrap();
}

#[test]
fn priority_of_other_users_is_refused_above_the_highest_allowed() {
    let mut held = TestShares::default();
    let first = RunRequest { priority: Some(5), low_latency: true, ..request(4, 10) };
    let turns = TurnPreferences { low_latency: true, priority: 5 };
    assert_eq!(to_ask(&first, &DefaultShare::default()).unwrap().turns, turns);
    for (text, expected) in [("", "maxPriority: 0"), ("maxPriority: 4", "use at most --priority 4")] {
        let settings = WorkstationSettings::from_yaml(text).unwrap();
        let refused = held.run("a", user(4242), &settings, &first).unwrap_err();
        assert!(
            refused.reason == RefusalReason::NotAllowed && refused.message.contains(expected),
            "{refused:?}"
        );
    }
    let settings = WorkstationSettings::from_yaml("maxPriority: 5").unwrap();
    held.run("a", user(4242), &settings, &first).unwrap();
    held.run("b", user(0), &plain(), &first).unwrap();
}

#[test]
fn default_share_applies_to_requests_without_a_size() {
    let settings = WorkstationSettings::from_yaml("default: {memory: 4Gi, cores: 25}").unwrap();
    let mut held = TestShares::default();
    let nothing_said = held.run("a", user(1), &settings, &RunRequest::default()).unwrap();
    assert_eq!(
        (nothing_said[0].memory_bytes, nothing_said[0].cores),
        (Some(Bytes(4 * GIB)), Cores::percent(25))
    );
    let memory_said = held.run("b", user(1), &settings, &request(2, 0)).unwrap();
    assert_eq!((memory_said[0].memory_bytes, memory_said[0].cores), (Some(Bytes(2 * GIB)), None));
    let mut held = TestShares::default();
    let all = held.run("a", user(1), &plain(), &RunRequest::default()).unwrap();
    assert_eq!(all[0].memory_bytes, Some(Bytes(40 * GIB)), "without settings: the GPU's memory");
}

#[test]
fn rules_apply_to_the_sum_of_a_users_shares() {
    let settings = WorkstationSettings::from_yaml(
        "users: [{applyTo: '*', shares: 3, memory: 10Gi, cores: 60, gpus: 1, whole: false}]",
    )
    .unwrap();
    let mut held = TestShares::default();
    held.run("a", user(1), &settings, &request(6, 40)).unwrap();
    let refused = |held: &mut TestShares, settings: &_, who, request: &RunRequest, expected: &str| {
        let refused = held.run("x", user(who), settings, request).unwrap_err();
        assert!(
            refused.reason == RefusalReason::NotAllowed && refused.message.contains(expected),
            "{refused:?}"
        );
    };
    refused(
        &mut held,
        &settings,
        1,
        &request(5, 10),
        "10 GiB of GPU memory in total, has 6 GiB and requests 5 GiB",
    );
    refused(
        &mut held,
        &settings,
        1,
        &request(1, 30),
        "60 % of GPU time in total, has 40 % and requests 30 %",
    );
    refused(
        &mut held,
        &settings,
        2,
        &RunRequest { gpus: Some(2), ..request(1, 1) },
        "1 GPUs per share, requested 2",
    );
    refused(
        &mut held,
        &settings,
        2,
        &RunRequest { whole: true, ..RunRequest::default() },
        "may not have a whole GPU",
    );
    held.run("b", user(1), &settings, &request(1, 1)).unwrap();
    held.run("c", user(1), &settings, &request(1, 1)).unwrap();
    refused(&mut held, &settings, 1, &request(1, 1), "3 shares at a time and has a, b, c");
    held.run("d", user(2), &settings, &request(10, 60)).unwrap();
    let strict = WorkstationSettings::from_yaml("users: [{applyTo: root}]").unwrap();
    let unmatched = held.run("x", user(3), &strict, &request(1, 1)).unwrap_err();
    assert!(unmatched.message.contains("no rule under users"), "{unmatched:?}");
    let exact = WorkstationSettings::from_yaml("users: [{applyTo: '*', cores: 40.5}]").unwrap();
    refused(&mut held, &exact, 3, &request(1, 41), "40.5 % of GPU time in total, has 0 % and requests 41 %");
    let only = WorkstationSettings::from_yaml("users: [{applyTo: '*', only: [1]}]").unwrap();
    for name in ["e", "f"] {
        assert_eq!(held.run(name, user(4), &only, &request(1, 1)).unwrap()[0].gpu, node().gpus[1].uuid);
    }
}

#[test]
fn reservation_is_available_to_its_users_only() {
    let settings =
        WorkstationSettings::from_yaml("reservations: [{applyTo: 7, gpu: 0, memory: 30Gi, cores: 50}]")
            .unwrap();
    let mut held = TestShares::default();
    held.run("a", user(1), &settings, &request(40, 50)).unwrap();
    let refused = held.run("b", user(1), &settings, &request(11, 10)).unwrap_err();
    assert!(refused.message.contains("30 GiB and 50 % of GPU 0 are reserved for 7"), "{refused:?}");
    held.run("c", user(1), &settings, &request(10, 50)).unwrap();
    assert_eq!(reserved(&node(), &held.held(), &settings, &node().gpus[0].uuid), Bytes(30 * GIB));
    held.run("d", user(7), &settings, &request(20, 40)).unwrap();
    assert_eq!(reserved(&node(), &held.held(), &settings, &node().gpus[0].uuid), Bytes(10 * GIB));
    held.run("e", user(7), &settings, &request(10, 10)).unwrap();
    assert_eq!(reserved(&node(), &held.held(), &settings, &node().gpus[0].uuid), Bytes::ZERO);
}

#[test]
fn share_is_resized_on_its_gpu() {
    let mut held = TestShares::default();
    let before = held.run("a", user(1), &plain(), &request(4, 30)).unwrap();
    held.run("b", user(2), &plain(), &RunRequest { gpus: Some(2), ..request(30, 60) }).unwrap();
    let change = |memory: u64, cores: u32| ResizeChange {
        memory: (memory > 0).then_some(Bytes(memory * GIB)),
        cores: if cores > 0 { Cores::percent(cores) } else { None },
        ..ResizeChange::default()
    };
    let resized = |change: &ResizeChange| resize(&node(), &held.held(), &plain(), "a", change);
    let after = resized(&change(6, 0)).unwrap();
    assert_eq!((&after[0].gpu, after[0].memory_bytes), (&before[0].gpu, Some(Bytes(6 * GIB))));
    assert_eq!(after[0].cores, Cores::percent(30), "absent amounts stay the same");
    assert_eq!(resized(&change(0, 40)).unwrap()[0].memory_bytes, Some(Bytes(4 * GIB)));
    assert_eq!(resized(&change(11, 0)).unwrap_err().reason, RefusalReason::NoCapacity);
    assert_eq!(resized(&change(0, 41)).unwrap_err().reason, RefusalReason::NoCapacity);
    let hard = resized(&ResizeChange { mode: Some(ComputeMode::Hard), ..ResizeChange::default() }).unwrap();
    assert_eq!(hard[0].ceiling, None);
    assert_eq!(
        resize(&node(), &held.held(), &plain(), "z", &change(1, 0)).unwrap_err().reason,
        RefusalReason::NotFound
    );
}

proptest! {
    /// No sequence of requests, resizes and releases grants more of a GPU than it has.
    #[test]
    fn no_gpu_is_overcommitted(steps in proptest::collection::vec((0u32..4, 0u64..45, 0u32..=100, 0u32..3, any::<bool>()), 1..40)) {
        let settings = WorkstationSettings::from_yaml("reservations: [{applyTo: 3, gpu: 1, memory: 8Gi, cores: 20}]").unwrap();
        let mut held = TestShares::default();
        for (at, (who, gib, cores, kind, whole)) in steps.into_iter().enumerate() {
            match kind {
                0 => {
                    let request = if whole && gib % 4 == 0 {
                        RunRequest { whole, ..RunRequest::default() }
                    } else {
                        request(gib, cores)
                    };
                    let _ = held.run(&format!("s{at}"), user(who), &settings, &request);
                }
                1 if !held.0.is_empty() => {
                    let which = at % held.0.len();
                    let name = held.0[which].0.clone();
                    let change = ResizeChange { memory: (gib > 0).then_some(Bytes(gib * GIB)), cores: if cores > 0 { Cores::percent(cores) } else { None }, ..ResizeChange::default() };
                    if let Ok(shares) = resize(&node(), &held.held(), &settings, &name, &change) {
                        held.0[which].2 = shares;
                    }
                }
                _ if !held.0.is_empty() => {
                    let which = at % held.0.len();
                    held.0.remove(which);
                }
                _ => {}
            }
            for gpu in &node().gpus {
                let here: Vec<&Share> = held.0.iter().flat_map(|(_, _, shares)| shares).filter(|share| share.gpu == gpu.uuid).collect();
                let memory: u64 = here.iter().filter_map(|share| share.memory_bytes).map(|bytes| bytes.0).sum();
                let cores: u32 = here.iter().filter_map(|share| share.cores).map(Cores::as_millipercent).sum();
                prop_assert!(memory <= gpu.memory_bytes.0 && cores <= Cores::WHOLE.as_millipercent());
                prop_assert!(here.len() <= 1 || here.iter().all(|share| !share.whole));
            }
        }
    }
}
