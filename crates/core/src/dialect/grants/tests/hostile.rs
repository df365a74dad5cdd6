//! Records that a tenant forged, or that no longer fit the cluster.

use super::*;
use proptest::prelude::*;

fn asking_all() -> Pod {
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
    read_back(&annotated(asking_all(), annotations), &Settings::default()).unwrap_err()
}

#[test]
fn errors_say_what_is_there_and_what_is_wrong() {
    let grant = |rest: &str| format!(r#"{{"version":1,"node":"n1","grants":[{rest}]}}"#);
    let main = |rest: &str| grant(&format!(r#"{{"container":"main"{rest}}}"#));
    for (key, text, error) in [
        (gpushare::INDEX, "7", "names GPU 7, but node n1 has 2 GPUs, from 0 on"),
        (gpushare::INDEX, "-1", "\"-1\" is no GPU index"),
        (gpushare::INDEX, "01", "\"01\" is no GPU index"),
        (gpushare::INDEX, "99999999999999999999", "\"99999999999999999999\" is no GPU index"),
        (gpushare::ALLOCATION, r#"{"0":{"0":-2}}"#, "gives -2 units of GPU 0: an amount is not negative"),
        (gpushare::ALLOCATION, r#"{"1":{"0":2}}"#, "names container \"1\", but the pod has 1, from 0 on"),
        (gpushare::ALLOCATION, r#"{"0":{"9":2}}"#, "names GPU 9, but node n1 has 2 GPUs, from 0 on"),
        (
            gpushare::ALLOCATION,
            r#"{"0":{"0":0}}"#,
            "gives nothing to container \"main\", which asks for 2 aliyun.com/gpu-mem",
        ),
        (
            gpushare::ALLOCATION,
            r#"{"0":{"0":1}}"#,
            "gives container \"main\" 1 units, and its limits ask for 2",
        ),
        (
            gpushare::ALLOCATION,
            r#"{"0":{"0":9223372036854775807}}"#,
            "says 9223372036854775807 units of 1 GiB, more memory than any GPU has",
        ),
        (volcano::IDS, "abc:", "1 entries are no devices, the first is \"abc\""),
        (volcano::IDS, "GPU-a,NVIDIA,1,101:", "gives 101 % of GPU \"GPU-a\": there are 100"),
        (volcano::IDS, ";", "lists 0 containers, but 1 of the pod's ask for GPUs"),
        (volcano::IDS, "GPU-a,NVIDIA,1,0:GPU-a,NVIDIA,1,0:", "gives container main twice GPU GPU-a"),
        ("tencent.com/predicate-gpu-idx-0", "1", "names minor 1, but node n1 has 0,3"),
        ("tencent.com/predicate-gpu-idx-0", "", "\"\" is no minor number of a GPU"),
        ("tencent.com/predicate-gpu-idx-0", "0,0", "names minor 0 twice"),
        ("tencent.com/predicate-gpu-idx-0", "0,3", "names 2 GPUs for 20 tencent.com/vcuda-core, which are 1"),
        (
            native::ANNOTATION,
            &grant(r#"{"container":"x","shares":[{"gpu":"GPU-a"}]}"#),
            "names container \"x\", which the pod does not have",
        ),
        (
            native::ANNOTATION,
            &main(r#","init":true,"shares":[{"gpu":"GPU-a"}]"#),
            "says container \"main\" is an init container, and it is none",
        ),
        (
            native::ANNOTATION,
            &main(r#","shares":[]"#),
            "grant.grants[0] (main): has no shares: leave the container out",
        ),
        (
            native::ANNOTATION,
            &main(r#","shares":[{"gpu":"GPU-a"},{"gpu":"GPU-a"}]"#),
            "grant.grants[0] (main).shares[1].gpu: GPU-a is listed twice: write one share per GPU",
        ),
        (
            native::ANNOTATION,
            r#"{"version":2,"later":[]}"#,
            "is of version 2, this Partage reads version 1: upgrade this part of it",
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
    assert_eq!(elsewhere, "volcano.sh/vgpu-node: says node \"n2\", but this is n1");
    let two = refused(&[(volcano::IDS, "GPU-a,NVIDIA,1,0:"), (gpushare::INDEX, "0")]);
    assert!(two.contains("a grant of gpushare and one of volcano"), "{two}");
}

#[test]
fn a_record_of_less_than_the_limits_is_refused() {
    let read = |key: &str, text: &str, limits: &[(&str, &str)]| {
        let pod = annotated(pod(vec![app("main", limits), app("log", &[])]), &[(key, text)]);
        read_back(&pod, &Settings::default())
    };
    let asked = [("volcano.sh/vgpu-number", "2"), ("volcano.sh/vgpu-memory", "3000")];
    for (text, error) in [
        ("GPU-a,NVIDIA,0,0:", "1 volcano.sh/vgpu-number, and its limits ask for 2"),
        ("GPU-a,NVIDIA,0,0:GPU-b,NVIDIA,3000,0:", "0 volcano.sh/vgpu-memory, and its limits ask for 3000"),
        (
            "GPU-a,NVIDIA,3000,0:GPU-b,NVIDIA,2999,0:",
            "2999 volcano.sh/vgpu-memory, and its limits ask for 3000",
        ),
    ] {
        let refused = read(volcano::IDS, text, &asked).unwrap_err();
        assert_eq!(refused, format!("volcano.sh/vgpu-ids-new: gives container \"main\" {error}"), "{text}");
    }
    let percent = [asked[0], asked[1], ("volcano.sh/vgpu-memory-percentage", "10")];
    assert!(read(volcano::IDS, "GPU-a,NVIDIA,1600,0:GPU-b,NVIDIA,1200,0:", &percent).is_ok());
    let cores = [("nvidia.com/gpu", "1"), ("nvidia.com/gpucores", "30")];
    assert!(read(hami::IDS, "GPU-a,NVIDIA,100,30:", &cores).is_ok());
    assert!(read(hami::IDS, "GPU-a,NVIDIA,100,29:", &cores).is_err());
    // A second container that the allocation forgot holds its memory all the same.
    let two = pod(vec![app("one", &[(gpushare::MEMORY, "1")]), app("two", &[(gpushare::MEMORY, "1")])]);
    let two = annotated(two, &[(gpushare::ALLOCATION, r#"{"0":{"0":1}}"#)]);
    let error = read_back(&two, &Settings::default()).unwrap_err();
    assert!(
        error.ends_with("gives nothing to container \"two\", which asks for 1 aliyun.com/gpu-mem"),
        "{error}"
    );
}

#[test]
fn the_domain_that_asks_decides() {
    let limits = [("a.com/vcuda-core", "0"), ("b.com/vcuda-core", "50"), ("b.com/vcuda-memory", "4")];
    let pod = pod(vec![app("main", &limits)]);
    assert_eq!(vcuda::domain(&pod.containers[0]), Some("b.com"));
    let pod = annotated(pod, &[("b.com/predicate-gpu-idx-0", "0")]);
    let (dialect, grant) = read_back(&pod, &Settings::default()).unwrap().unwrap();
    assert_eq!((dialect, grant.grants[0].shares[0].cores), (Dialect::Vcuda, Cores::percent(50)));
}

#[test]
fn errors_never_quote_a_tenant_at_length() {
    let long = "x\\n".repeat(10_000);
    for rest in [format!(r#""{long}":1"#), format!(r#""grants":[{{"container":"{long}","shares":[]}}]"#)] {
        let error = refused(&[(native::ANNOTATION, &format!(r#"{{"version":1,"node":"n1",{rest}}}"#))]);
        assert!(error.len() < 600 && !error.contains('\n'), "{error}");
    }
}

#[test]
fn the_native_record_wins() {
    let text = r#"{"version":1,"node":"n1","grants":[{"container":"main","shares":[{"gpu":"GPU-b"}]}]}"#;
    let pod = annotated(asking_all(), &[(native::ANNOTATION, text), (volcano::IDS, "nonsense")]);
    let grant = pod_grant(vec![granted("main", vec![share("GPU-b", None, None)])]);
    assert_eq!(read_back(&pod, &Settings::default()), Ok(Some((Dialect::Native, grant))));
}

#[test]
fn another_node_is_refused() {
    let elsewhere = read(&asking_all(), Some(&"n2".into()), &node(), &Settings::default()).unwrap_err();
    assert_eq!(elsewhere.to_string(), "spec.nodeName: the pod runs on node n2: its grant cannot be on n1");
}

#[test]
fn records_on_a_pod_that_asks_for_nothing_are_no_grant() {
    let pod = annotated(
        pod(vec![app("main", &[(gpushare::MEMORY, "0")])]),
        &[
            (gpushare::INDEX, "0"),
            (volcano::IDS, "GPU-a,NVIDIA,1,0:"),
            ("tencent.com/predicate-gpu-idx-0", "0"),
            (hami::IDS, "GPU-a,NVIDIA,1,0:"),
        ],
    );
    assert_eq!(read_back(&pod, &Settings::default()), Ok(None));
}

#[test]
fn amounts_nobody_can_read_are_no_matter_without_a_record() {
    let mut pod = asking_all();
    for limit in pod.containers[0].limits.values_mut() {
        *limit = "many".into();
    }
    assert_eq!(read_back(&pod, &Settings::default()), Ok(None));
    let recorded = annotated(pod, &[(gpushare::INDEX, "0")]);
    let error = read_back(&recorded, &Settings::default()).unwrap_err();
    assert!(error.starts_with("aliyun.com/gpu-mem: container main: \"many\" is not"), "{error}");
}

#[test]
fn a_record_of_any_length_is_refused_or_read_in_one_pass() {
    let long = "x".repeat(MOST_TEXT + 1);
    for key in [native::ANNOTATION, gpushare::INDEX, gpushare::ALLOCATION, volcano::IDS, hami::IDS] {
        assert!(refused(&[(key, &long)]).contains("bytes long"), "{key}");
    }
    for text in [":", ";", ",", "GPU-a,NVIDIA,1,0:", "GPU-a,NVIDIA,1,0:;", "0,", "[", "{\"0\":"] {
        let most = text.repeat(MOST_TEXT / text.len());
        for key in [native::ANNOTATION, gpushare::ALLOCATION, volcano::IDS, "tencent.com/predicate-gpu-idx-0"]
        {
            assert!(read_back(&annotated(asking_all(), &[(key, &most)]), &Settings::default()).is_err());
        }
    }
}

#[test]
fn a_grant_that_does_not_fit_pod_or_node_is_not_written() {
    let pod = pod(vec![app("main", &[("partage.dev/gpu", "1")]), app("log", &[])]);
    let dialects = BTreeMap::from([("main".into(), Dialect::Native)]);
    let spelling = Spelling::of(&pod, &dialects);
    let error = |grant: PodGrant| {
        write(&grant, &node(), &spelling, &Settings::default(), NOW).unwrap_err().to_string()
    };
    let on = |container: &str, gpu: &str| pod_grant(vec![granted(container, vec![gib(gpu, 1)])]);
    assert_eq!(error(on("main", "GPU-z")), "main: node n1 has no GPU GPU-z: place the pod again");
    assert_eq!(error(on("x", "GPU-a")), "x: the grant names a container that the pod does not have");
    assert_eq!(error(on("log", "GPU-a")), "log: the grant names a container that asks for no GPU");
    let mut init = on("main", "GPU-a");
    init.grants[0].init = true;
    assert_eq!(error(init), "main: the grant says this is an init container, and it is none");
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
    fn no_text_panics(
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
        let mut pod = annotated(asking_all(), &[(key, &text)]);
        let _ = read_back(&pod, &Settings::default());
        for limit in pod.containers[0].limits.values_mut() {
            *limit = amount.clone();
        }
        let _ = read_back(&pod, &with_factor(u32::MAX));
    }
}
