//! Records that a tenant forged or that no longer match the cluster.

use super::*;
use proptest::prelude::*;

fn pod_with_all_dialects() -> PodManifest {
    let limits = [
        (gpushare::MEMORY, "2"),
        ("volcano.sh/vgpu-number", "1"),
        ("tencent.com/vcuda-core", "20"),
        ("tencent.com/vcuda-memory", "1"),
        ("nvidia.com/gpu", "1"),
    ];
    pod(vec![app("main", &limits)])
}

fn refused(annotations: &[(&str, &str)]) -> String {
    read_back(&annotated(pod_with_all_dialects(), annotations), &DialectSettings::default()).unwrap_err()
}

#[test]
fn invalid_records_are_refused_with_the_reason() {
    let grant = |rest: &str| format!(r#"{{"version":1,"node":"n1","grants":[{rest}]}}"#);
    let main = |rest: &str| grant(&format!(r#"{{"container":"main"{rest}}}"#));
    for (key, text, error) in [
        (gpushare::INDEX, "7", "names GPU 7, but node n1 has 2 GPUs, counted from 0"),
        (gpushare::INDEX, "-1", "\"-1\" is not a GPU index"),
        (gpushare::INDEX, "01", "\"01\" is not a GPU index"),
        (gpushare::INDEX, "99999999999999999999", "\"99999999999999999999\" is not a GPU index"),
        (
            gpushare::ALLOCATION,
            r#"{"0":{"0":-2}}"#,
            "allocates -2 units of GPU 0: amounts cannot be negative",
        ),
        (
            gpushare::ALLOCATION,
            r#"{"1":{"0":2}}"#,
            "names container \"1\", but the pod has 1, counted from 0",
        ),
        (gpushare::ALLOCATION, r#"{"0":{"9":2}}"#, "names GPU 9, but node n1 has 2 GPUs, counted from 0"),
        (
            gpushare::ALLOCATION,
            r#"{"0":{"0":0}}"#,
            "allocates nothing to container \"main\", which requests 2 aliyun.com/gpu-mem",
        ),
        (
            gpushare::ALLOCATION,
            r#"{"0":{"0":1}}"#,
            "allocates 1 units to container \"main\", but its limits request 2",
        ),
        (
            gpushare::ALLOCATION,
            r#"{"0":{"0":9223372036854775807}}"#,
            "names 9223372036854775807 units of 1 GiB, which is more memory than any GPU has",
        ),
        (volcano::IDS, "abc:", "1 entries are invalid, the first is \"abc\""),
        (volcano::IDS, "GPU-a,NVIDIA,1,101:", "allocates 101 % of GPU \"GPU-a\": the maximum is 100"),
        (volcano::IDS, ";", "lists 0 containers, but 1 of the pod request GPUs"),
        (volcano::IDS, "GPU-a,NVIDIA,1,0:GPU-a,NVIDIA,1,0:", "allocates GPU GPU-a to container main twice"),
        ("tencent.com/predicate-gpu-idx-0", "1", "names minor 1, but node n1 has 0,3"),
        ("tencent.com/predicate-gpu-idx-0", "", "\"\" is not the minor number of a GPU"),
        ("tencent.com/predicate-gpu-idx-0", "0,0", "names minor 0 twice"),
        ("tencent.com/predicate-gpu-idx-0", "0,3", "names 2 GPUs, but 20 tencent.com/vcuda-core are for 1"),
        (
            native::ANNOTATION,
            &grant(r#"{"container":"x","shares":[{"gpu":"GPU-a"}]}"#),
            "names container \"x\", which the pod does not have",
        ),
        (
            native::ANNOTATION,
            &main(r#","init":true,"shares":[{"gpu":"GPU-a"}]"#),
            "marks container \"main\" as an init container, but it is not one",
        ),
        (
            native::ANNOTATION,
            &main(r#","shares":[]"#),
            "grant.grants[0] (main): has no shares: remove the container",
        ),
        (
            native::ANNOTATION,
            &main(r#","shares":[{"gpu":"GPU-a"},{"gpu":"GPU-a"}]"#),
            "grant.grants[0] (main).shares[1].gpu: GPU-a is listed twice: write one share per GPU",
        ),
        (
            native::ANNOTATION,
            r#"{"version":2,"later":[]}"#,
            "has version 2, but this program supports version 1: upgrade it",
        ),
        (
            native::ANNOTATION,
            r#"{"version":1,"node":"n2","grants":[]}"#,
            "is for node \"n2\", but this is n1",
        ),
    ] {
        assert_eq!(refused(&[(key, text)]), format!("{key}: {error}"), "{text}");
    }
    assert!(refused(&[(native::ANNOTATION, "{}")]).contains("missing field `version`"));
    let elsewhere = refused(&[(volcano::IDS, "GPU-a,NVIDIA,1,0:"), (volcano::NODE, "n2")]);
    assert_eq!(elsewhere, "volcano.sh/vgpu-node: names node \"n2\", but this is n1");
    let two = refused(&[(volcano::IDS, "GPU-a,NVIDIA,1,0:"), (gpushare::INDEX, "0")]);
    assert!(two.contains("a grant of gpushare and one of volcano"), "{two}");
}

#[test]
fn record_below_the_limits_is_refused() {
    let read = |key: &str, text: &str, limits: &[(&str, &str)]| {
        let pod = annotated(pod(vec![app("main", limits), app("log", &[])]), &[(key, text)]);
        read_back(&pod, &DialectSettings::default())
    };
    let asked = [("volcano.sh/vgpu-number", "2"), ("volcano.sh/vgpu-memory", "3000")];
    for (text, (allocated, requested)) in [
        ("GPU-a,NVIDIA,0,0:", ("1 volcano.sh/vgpu-number", "2")),
        ("GPU-a,NVIDIA,0,0:GPU-b,NVIDIA,3000,0:", ("0 volcano.sh/vgpu-memory", "3000")),
        ("GPU-a,NVIDIA,3000,0:GPU-b,NVIDIA,2999,0:", ("2999 volcano.sh/vgpu-memory", "3000")),
    ] {
        let refused = read(volcano::IDS, text, &asked).unwrap_err();
        let expected =
            format!("allocates {allocated} to container \"main\", but its limits request {requested}");
        assert_eq!(refused, format!("volcano.sh/vgpu-ids-new: {expected}"), "{text}");
    }
    let percent = [asked[0], asked[1], ("volcano.sh/vgpu-memory-percentage", "10")];
    assert!(read(volcano::IDS, "GPU-a,NVIDIA,1600,0:GPU-b,NVIDIA,1200,0:", &percent).is_ok());
    let cores = [("nvidia.com/gpu", "1"), ("nvidia.com/gpucores", "30")];
    assert!(read(hami::IDS, "GPU-a,NVIDIA,100,30:", &cores).is_ok());
    assert!(read(hami::IDS, "GPU-a,NVIDIA,100,29:", &cores).is_err());
    // A container that the allocation omits still holds its memory.
    let two = pod(vec![app("one", &[(gpushare::MEMORY, "1")]), app("two", &[(gpushare::MEMORY, "1")])]);
    let two = annotated(two, &[(gpushare::ALLOCATION, r#"{"0":{"0":1}}"#)]);
    let error = read_back(&two, &DialectSettings::default()).unwrap_err();
    assert!(
        error.ends_with("allocates nothing to container \"two\", which requests 1 aliyun.com/gpu-mem"),
        "{error}"
    );
}

#[test]
fn domain_with_nonzero_amounts_is_used() {
    let limits = [("a.com/vcuda-core", "0"), ("b.com/vcuda-core", "50"), ("b.com/vcuda-memory", "4")];
    let pod = pod(vec![app("main", &limits)]);
    assert_eq!(vcuda::domain(&pod.containers[0]), Some("b.com"));
    let pod = annotated(pod, &[("b.com/predicate-gpu-idx-0", "0")]);
    let (dialect, grant) = read_back(&pod, &DialectSettings::default()).unwrap().unwrap();
    assert_eq!((dialect, grant.grants[0].shares[0].cores), (Dialect::Vcuda, Cores::percent(50)));
}

#[test]
fn tenant_text_is_truncated_in_errors() {
    let long = "x\\n".repeat(10_000);
    for rest in [format!(r#""{long}":1"#), format!(r#""grants":[{{"container":"{long}","shares":[]}}]"#)] {
        let error = refused(&[(native::ANNOTATION, &format!(r#"{{"version":1,"node":"n1",{rest}}}"#))]);
        assert!(error.len() < 600 && !error.contains('\n'), "{error}");
    }
}

#[test]
fn native_record_takes_precedence() {
    let text = r#"{"version":1,"node":"n1","grants":[{"container":"main","shares":[{"gpu":"GPU-b"}]}]}"#;
    let pod = annotated(pod_with_all_dialects(), &[(native::ANNOTATION, text), (volcano::IDS, "nonsense")]);
    let grant = pod_grant(vec![granted("main", vec![share("GPU-b", None, None)])]);
    assert_eq!(read_back(&pod, &DialectSettings::default()), Ok(Some((Dialect::Native, grant))));
}

#[test]
fn pod_bound_to_another_node_is_refused() {
    let elsewhere =
        read(&pod_with_all_dialects(), Some(&"n2".into()), &node(), &DialectSettings::default()).unwrap_err();
    assert_eq!(elsewhere.to_string(), "spec.nodeName: the pod runs on node n2: its grant cannot be on n1");
}

#[test]
fn records_of_a_pod_without_requests_are_ignored() {
    let pod = annotated(
        pod(vec![app("main", &[(gpushare::MEMORY, "0")])]),
        &[
            (gpushare::INDEX, "0"),
            (volcano::IDS, "GPU-a,NVIDIA,1,0:"),
            ("tencent.com/predicate-gpu-idx-0", "0"),
            (hami::IDS, "GPU-a,NVIDIA,1,0:"),
        ],
    );
    assert_eq!(read_back(&pod, &DialectSettings::default()), Ok(None));
}

#[test]
fn invalid_amounts_are_ignored_without_a_record() {
    let mut pod = pod_with_all_dialects();
    for limit in pod.containers[0].limits.values_mut() {
        *limit = "many".into();
    }
    assert_eq!(read_back(&pod, &DialectSettings::default()), Ok(None));
    let recorded = annotated(pod, &[(gpushare::INDEX, "0")]);
    let error = read_back(&recorded, &DialectSettings::default()).unwrap_err();
    assert!(error.starts_with("aliyun.com/gpu-mem: container main: \"many\" is not"), "{error}");
}

#[test]
fn oversized_records_are_refused() {
    let long = "x".repeat(MAX_RECORD_BYTES + 1);
    for key in [native::ANNOTATION, gpushare::INDEX, gpushare::ALLOCATION, volcano::IDS, hami::IDS] {
        assert!(refused(&[(key, &long)]).contains("bytes long"), "{key}");
    }
    for text in [":", ";", ",", "GPU-a,NVIDIA,1,0:", "GPU-a,NVIDIA,1,0:;", "0,", "[", "{\"0\":"] {
        let longest = text.repeat(MAX_RECORD_BYTES / text.len());
        for key in [native::ANNOTATION, gpushare::ALLOCATION, volcano::IDS, "tencent.com/predicate-gpu-idx-0"]
        {
            assert!(
                read_back(
                    &annotated(pod_with_all_dialects(), &[(key, &longest)]),
                    &DialectSettings::default()
                )
                .is_err()
            );
        }
    }
}

#[test]
fn grant_that_does_not_match_pod_or_node_is_not_encoded() {
    let pod = pod(vec![app("main", &[("partage.dev/gpu", "1")]), app("log", &[])]);
    let dialects = BTreeMap::from([("main".into(), Dialect::Native)]);
    let pod_dialects = PodDialects::of(&pod, &dialects);
    let error = |grant: PodGrant| {
        write(&grant, &node(), &pod_dialects, &DialectSettings::default(), NOW).unwrap_err().to_string()
    };
    let on = |container: &str, gpu: &str| pod_grant(vec![granted(container, vec![gib(gpu, 1)])]);
    assert_eq!(error(on("main", "GPU-z")), "main: node n1 has no GPU GPU-z: place the pod again");
    assert_eq!(error(on("x", "GPU-a")), "x: the grant names a container that the pod does not have");
    assert_eq!(error(on("log", "GPU-a")), "log: the grant names a container that requests no GPU");
    let mut init = on("main", "GPU-a");
    init.grants[0].init = true;
    assert_eq!(error(init), "main: the grant marks this container as an init container, but it is not one");
    let twice = PodGrant {
        grants: [on("main", "GPU-a").grants, on("main", "GPU-b").grants].concat(),
        ..on("x", "y")
    };
    assert!(error(twice).contains("another grant is for this container"));
    let elsewhere = PodGrant { node: "n2".into(), ..on("main", "GPU-a") };
    assert_eq!(error(elsewhere), "partage.dev/grant: the grant is on node n2, not on n1");
}

proptest! {
    #[test]
    fn arbitrary_record_never_panics(
        text in prop_oneof![".*", "[-{}\\[\\]\":;,0-9A-Za-z ]*", "(GPU-[ab](\\[[a-z0-9-]*\\])?,NVIDIA,-?[0-9]{1,12},[0-9]{1,3}[:;]){0,5}"],
        key in prop::sample::select(vec![
            native::ANNOTATION,
            gpushare::INDEX,
            gpushare::ALLOCATION,
            volcano::IDS,
            volcano::NODE,
            hami::IDS,
            "tencent.com/predicate-gpu-idx-0",
            "tencent.com/vcuda-core-limit",
        ]),
        amount in prop_oneof![Just("1".to_string()), ".*"],
    ) {
        let mut pod = annotated(pod_with_all_dialects(), &[(key, &text)]);
        let _ = read_back(&pod, &DialectSettings::default());
        for limit in pod.containers[0].limits.values_mut() {
            *limit = amount.clone();
        }
        let _ = read_back(&pod, &with_factor(u32::MAX));
    }
}
