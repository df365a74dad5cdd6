//! Conformance cases: what each replaced system writes for a grant. The numbers only order the cases.

use super::*;

const GPU_MEM: &str = gpushare::MEMORY;
const NUMBER: &str = "volcano.sh/vgpu-number";

#[test]
fn native_annotation_is_compact_versioned_json() {
    let pod = pod(vec![app("main", &[("partage.dev/gpu", "1")])]);
    let grant = pod_grant(vec![granted("main", vec![mib("GPU-a", 1, Some(30)), mib("GPU-b", 1, Some(100))])]);
    let written = written(&pod, &grant, Dialect::Native, &DialectSettings::default());
    assert_eq!(
        written.annotations[native::ANNOTATION],
        r#"{"version":1,"node":"n1","grants":[{"container":"main","shares":[{"gpu":"GPU-a","memoryBytes":1048576,"cores":30},{"gpu":"GPU-b","memoryBytes":1048576,"cores":100,"whole":true}]}]}"#
    );
    assert_eq!(env(&written, "main"), [("NVIDIA_VISIBLE_DEVICES", "GPU-a,GPU-b")]);
    assert_eq!(written.annotations.len(), 1);
}

#[test]
fn b14_bind_sets_every_annotation() {
    let pod = pod(vec![app("main", &[(GPU_MEM, "3")])]);
    let grant = pod_grant(vec![granted("main", vec![gib("GPU-b", 3)])]);
    let written = written(&pod, &grant, Dialect::Gpushare, &DialectSettings::default());
    assert_eq!(
        annotations(&written),
        [
            ("ALIYUN_COM_GPU_MEM_ASSIGNED", "false"),
            ("ALIYUN_COM_GPU_MEM_ASSUME_TIME", "1700000000123456789"),
            // The size of this GPU; the first GPU of the node has 15.
            ("ALIYUN_COM_GPU_MEM_DEV", "12"),
            ("ALIYUN_COM_GPU_MEM_IDX", "1"),
            ("ALIYUN_COM_GPU_MEM_POD", "3"),
            ("scheduler.framework.gpushare.allocation", r#"{"0":{"1":3}}"#),
        ]
    );
}

#[test]
fn b36_environment_has_exactly_these_variables() {
    let pod = pod(vec![app("main", &[(GPU_MEM, "2000")])]);
    let grant = pod_grant(vec![granted("main", vec![mib("GPU-a", 2000, None)])]);
    let written = written(&pod, &grant, Dialect::Gpushare, &in_mib());
    assert_eq!(
        env(&written, "main"),
        [
            ("ALIYUN_COM_GPU_MEM_CONTAINER", "2000"),
            ("ALIYUN_COM_GPU_MEM_DEV", "16276"),
            ("ALIYUN_COM_GPU_MEM_IDX", "0"),
            ("ALIYUN_COM_GPU_MEM_POD", "2000"),
            ("NVIDIA_VISIBLE_DEVICES", "GPU-a"),
        ]
    );
}

#[test]
fn b20_b40_two_containers_on_one_gpu() {
    let pod = pod(vec![app("one", &[(GPU_MEM, "1")]), app("log", &[]), app("two", &[(GPU_MEM, "2")])]);
    let grant = pod_grant(vec![granted("one", vec![gib("GPU-a", 1)]), granted("two", vec![gib("GPU-a", 2)])]);
    let settings = DialectSettings::default();
    let written = written(&pod, &grant, Dialect::Gpushare, &settings);
    assert_eq!(written.annotations[gpushare::POD], "3");
    assert_eq!(written.annotations[gpushare::INDEX], "0");
    assert_eq!(written.annotations[gpushare::ALLOCATION], r#"{"0":{"0":1},"2":{"0":2}}"#);
    for (container, units) in [("one", "1"), ("two", "2")] {
        assert_eq!(written.env[container][gpushare::CONTAINER], units);
        assert_eq!(written.env[container][gpushare::INDEX], "0");
        assert_eq!(written.env[container][gpushare::POD], "3");
    }
    assert!(!written.env.contains_key("log"));
    let foreign = as_foreign(pod, &written);
    assert_eq!(read_back(&foreign, &settings), Ok(Some((Dialect::Gpushare, grant.clone()))));
    // The older record alone gives the same grant.
    let mut old = foreign;
    old.annotations.remove(gpushare::ALLOCATION);
    assert_eq!(read_back(&old, &settings), Ok(Some((Dialect::Gpushare, grant))));
}

#[test]
fn b21_single_init_container_is_counted() {
    let pod = pod(vec![container("init", ContainerRole::Init, &[(GPU_MEM, "2")]), app("main", &[])]);
    let mut grant = pod_grant(vec![granted("init", vec![gib("GPU-b", 2)])]);
    grant.grants[0].init = true;
    let settings = DialectSettings::default();
    let written = written(&pod, &grant, Dialect::Gpushare, &settings);
    assert_eq!(written.annotations[gpushare::POD], "2");
    assert!(!written.annotations.contains_key(gpushare::ALLOCATION));
    let foreign = as_foreign(pod, &written);
    assert_eq!(read_back(&foreign, &settings), Ok(Some((Dialect::Gpushare, grant))));
}

#[test]
fn b51_allocation_lists_several_gpus() {
    let pod = pod(vec![app("one", &[(GPU_MEM, "5")]), app("two", &[(GPU_MEM, "1")])]);
    let text = r#"{"0":{"0":2,"1":3},"1":{"1":1}}"#;
    let foreign = annotated(pod.clone(), &[(gpushare::ALLOCATION, text)]);
    let grant = pod_grant(vec![
        granted("one", vec![gib("GPU-a", 2), gib("GPU-b", 3)]),
        granted("two", vec![gib("GPU-b", 1)]),
    ]);
    let settings = DialectSettings::default();
    assert_eq!(read_back(&foreign, &settings), Ok(Some((Dialect::Gpushare, grant.clone()))));
    let written = written(&pod, &grant, Dialect::Gpushare, &settings);
    assert_eq!(written.annotations[gpushare::ALLOCATION], text);
    // A single index would be wrong.
    assert!(!written.annotations.contains_key(gpushare::INDEX));
    assert_eq!(written.env["one"][gpushare::INDEX], "0,1");
    assert_eq!(written.env["one"][gpushare::DEVICE], "15,12");
}

#[test]
fn b52_index_is_used_if_the_json_is_invalid() {
    let pod = pod(vec![app("main", &[(GPU_MEM, "4")])]);
    let expected = pod_grant(vec![granted("main", vec![gib("GPU-b", 4)])]);
    for text in ["{", "[]", "{}", r#"{"0":3}"#, r#"{"0":{"1":"4"}}"#] {
        let both = annotated(pod.clone(), &[(gpushare::ALLOCATION, text), (gpushare::INDEX, "1")]);
        let read = read_back(&both, &DialectSettings::default());
        assert_eq!(read, Ok(Some((Dialect::Gpushare, expected.clone()))), "{text}");
    }
    let alone = annotated(pod, &[(gpushare::ALLOCATION, "{")]);
    assert!(
        read_back(&alone, &DialectSettings::default()).unwrap_err().contains("is not a valid allocation")
    );
}

#[test]
fn records_of_every_dialect_are_marked_prepared() {
    let before = [
        ("ALIYUN_COM_GPU_MEM_ASSIGNED", "false"),
        ("ALIYUN_COM_GPU_MEM_IDX", "1"),
        ("inspur.com/gpu-assigned", "false"),
        ("inspur.com/predicate-node", "n1"),
        ("volcano.sh/bind-phase", "allocating"),
        ("volcano.sh/devices-to-allocate", "GPU-a,NVIDIA,3000,50:"),
        ("volcano.sh/vgpu-ids-new", "GPU-a,NVIDIA,3000,50:"),
    ];
    let mut annotations = annotated(PodManifest::default(), &before).annotations;
    mark_prepared(&mut annotations);
    let changed = before.iter().filter(|(key, value)| annotations[*key] != *value);
    let changed: Vec<_> = changed.map(|(key, _)| (*key, annotations[*key].as_str())).collect();
    assert_eq!(
        changed,
        [
            ("ALIYUN_COM_GPU_MEM_ASSIGNED", "true"),
            ("inspur.com/gpu-assigned", "true"),
            ("volcano.sh/bind-phase", "success"),
            ("volcano.sh/devices-to-allocate", ""),
        ]
    );
}

#[test]
fn c17_c94_volcano_bind_and_environment() {
    let pod = pod(vec![
        app("one", &[(NUMBER, "2")]),
        app("log", &[]),
        app("two", &[("volcano.sh/vgpu-memory", "1000")]),
    ]);
    let grant = pod_grant(vec![
        granted("one", vec![mib("GPU-a", 3000, Some(50)), mib("GPU-b", 3000, Some(50))]),
        granted("two", vec![mib("GPU-a", 1000, None)]),
    ]);
    let settings = DialectSettings::default();
    let written = written(&pod, &grant, Dialect::Volcano, &settings);
    let list = "GPU-a,NVIDIA,3000,50:GPU-b,NVIDIA,3000,50:;GPU-a,NVIDIA,1000,0:";
    assert_eq!(
        annotations(&written),
        [
            ("volcano.sh/bind-phase", "allocating"),
            ("volcano.sh/bind-time", "1700000000"),
            ("volcano.sh/devices-to-allocate", list),
            ("volcano.sh/vgpu-ids-new", list),
            ("volcano.sh/vgpu-node", "n1"),
            ("volcano.sh/vgpu-time", "1700000000"),
        ]
    );
    assert_eq!(
        env(&written, "one"),
        [
            ("CUDA_DEVICE_MEMORY_LIMIT_0", "3000m"),
            ("CUDA_DEVICE_MEMORY_LIMIT_1", "3000m"),
            ("CUDA_DEVICE_SM_LIMIT", "50"),
            ("NVIDIA_VISIBLE_DEVICES", "GPU-a,GPU-b"),
        ]
    );
    // c99: a container without a GPU in between shifts no positions.
    assert_eq!(read_back(&as_foreign(pod, &written), &settings), Ok(Some((Dialect::Volcano, grant))));
}

#[test]
fn c95_memory_uses_the_factor() {
    let pod = pod(vec![app("main", &[("volcano.sh/vgpu-memory", "300")])]);
    let grant = pod_grant(vec![granted("main", vec![mib("GPU-a", 3000, None)])]);
    let written = written(&pod, &grant, Dialect::Volcano, &with_factor(10));
    assert_eq!(written.annotations[volcano::IDS], "GPU-a,NVIDIA,300,0:");
    assert_eq!(written.env["main"]["CUDA_DEVICE_MEMORY_LIMIT_0"], "3000m");
    let read = read_back(&as_foreign(pod, &written), &with_factor(10));
    assert_eq!(read, Ok(Some((Dialect::Volcano, grant))));
}

#[test]
fn exclusive_gpu_has_100_cores_for_volcano() {
    let pod = pod(vec![app("main", &[(NUMBER, "1")])]);
    let exclusive = Share { whole: true, ..mib("GPU-a", 3000, Some(30)) };
    let grant = pod_grant(vec![granted("main", vec![exclusive])]);
    let written = written(&pod, &grant, Dialect::Volcano, &DialectSettings::default());
    assert_eq!(written.annotations[volcano::IDS], "GPU-a,NVIDIA,3000,100:");
    assert_eq!(written.env["main"]["CUDA_DEVICE_SM_LIMIT"], "30");
}

#[test]
fn b30_16276_mib_are_15_units() {
    let pod = pod(vec![app("main", &[(GPU_MEM, "1")])]);
    let grant = pod_grant(vec![granted("main", vec![gib("GPU-a", 1)])]);
    let mib =
        DialectSettings { gpushare_unit: crate::dialect::MemoryUnit::Mib, ..DialectSettings::default() };
    for (settings, units) in [(DialectSettings::default(), "15"), (mib, "16276")] {
        assert_eq!(written(&pod, &grant, Dialect::Gpushare, &settings).annotations[gpushare::DEVICE], units);
    }
}

#[test]
fn units_are_rounded_up_to_at_most_those_of_the_gpu() {
    // 16276 MiB are 15 GiB and a remainder that no tool counts.
    for (memory, units) in [(Some(1), "1"), (Some(1025), "2"), (Some(16276), "15"), (None, "15")] {
        let pod = pod(vec![app("main", &[(GPU_MEM, "1")])]);
        let memory = memory.and_then(Bytes::mib);
        let grant = pod_grant(vec![granted("main", vec![share("GPU-a", memory, None)])]);
        let written = written(&pod, &grant, Dialect::Gpushare, &DialectSettings::default());
        assert_eq!(written.annotations[gpushare::POD], units);
    }
}

#[test]
fn containers_of_one_pod_may_use_different_dialects() {
    let pod = pod(vec![
        app("one", &[(GPU_MEM, "1")]),
        app("two", &[(NUMBER, "1")]),
        app("three", &[(CORE, "10"), (BLOCKS, "1")]),
    ]);
    let dialects = [("one", Dialect::Gpushare), ("two", Dialect::Volcano), ("three", Dialect::Vcuda)];
    let dialects = dialects.map(|(name, dialect)| (name.into(), dialect)).into();
    let grant = pod_grant(vec![
        granted("one", vec![gib("GPU-a", 1)]),
        granted("two", vec![gib("GPU-a", 2)]),
        granted("three", vec![mib("GPU-b", 256, Some(10))]),
    ]);
    let written =
        write(&grant, &node(), &PodDialects::of(&pod, &dialects), &DialectSettings::default(), NOW).unwrap();
    assert_eq!(written.annotations[gpushare::ALLOCATION], r#"{"0":{"0":1}}"#);
    assert_eq!(written.annotations[volcano::IDS], "GPU-a,NVIDIA,2048,0:");
    assert_eq!(written.annotations["inspur.com/predicate-gpu-idx-2"], "3");
    let carried = PodManifest { annotations: written.annotations, ..pod };
    assert_eq!(read_back(&carried, &DialectSettings::default()), Ok(Some((Dialect::Native, grant))));
}

#[test]
fn c19_mig_instance_is_an_error() {
    let pod = pod(vec![app("main", &[(NUMBER, "1")])]);
    let pod = annotated(pod, &[(volcano::IDS, "GPU-a[default-0],NVIDIA,10240,0:")]);
    assert_eq!(
        read_back(&pod, &DialectSettings::default()).unwrap_err(),
        "volcano.sh/vgpu-ids-new: names MIG instance \"default-0\" of GPU \"GPU-a\": MIG is not supported yet"
    );
}

#[test]
fn c51_unknown_uuid_is_an_error() {
    let pod = pod(vec![app("main", &[(NUMBER, "1")])]);
    let pod = annotated(pod, &[(volcano::IDS, "GPU-z,NVIDIA,10,0:")]);
    assert_eq!(
        read_back(&pod, &DialectSettings::default()).unwrap_err(),
        "volcano.sh/vgpu-ids-new: names GPU \"GPU-z\", which node n1 does not have"
    );
}

#[test]
fn hami_record_keeps_empty_positions() {
    let pod = pod(vec![app("log", &[]), app("main", &[("nvidia.com/gpu", "1")])]);
    let pod = annotated(pod, &[(hami::IDS, ";GPU-b,NVIDIA,3000,30:;"), (hami::NODE, "n1")]);
    let grant = pod_grant(vec![granted("main", vec![mib("GPU-b", 3000, Some(30))])]);
    assert_eq!(read_back(&pod, &DialectSettings::default()), Ok(Some((Dialect::Hami, grant.clone()))));
    let written = written(&pod, &grant, Dialect::Hami, &DialectSettings::default());
    assert_eq!(annotations(&written), []);
    assert_eq!(
        env(&written, "main"),
        [
            ("CUDA_DEVICE_MEMORY_LIMIT_0", "3000m"),
            ("CUDA_DEVICE_SM_LIMIT", "30"),
            ("NVIDIA_VISIBLE_DEVICES", "GPU-b"),
        ]
    );
}

#[test]
fn a14_thread_percentage_is_that_of_the_smallest_share() {
    let pod = pod(vec![app("main", &[("k8s.amazonaws.com/vgpu", "12")])]);
    let shares = vec![share("GPU-a", None, Some(100)), share("GPU-b", None, Some(20))];
    let grant = pod_grant(vec![granted("main", shares)]);
    let written = written(&pod, &grant, Dialect::Aws, &DialectSettings::default());
    assert_eq!(
        env(&written, "main"),
        [("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "20"), ("NVIDIA_VISIBLE_DEVICES", "GPU-a,GPU-b")]
    );
    assert_eq!(annotations(&written), []);
    assert_eq!(read_back(&as_foreign(pod, &written), &DialectSettings::default()), Ok(None));
}

/// The node of the admission cases: GPUs of 1 GiB, four blocks each.
fn admission_node() -> Node {
    Node::new("testnode", vec![gpu("GPU-0", 0, 1024), gpu("GPU-1", 1, 1024)])
}

/// Encodes vcuda shares, checks the indexes per container, and decodes them.
fn encode_and_check(
    limits: &[&[(&str, &str)]],
    shares: &[Vec<Share>],
    indexes: &[Option<&str>],
) -> EncodedGrant {
    let node = admission_node();
    let name = |index: usize| format!("c{index}");
    let containers = limits.iter().enumerate().map(|(index, limits)| app(&name(index), limits)).collect();
    let pod = pod(containers);
    let grants = shares.iter().enumerate().filter(|(_, shares)| !shares.is_empty());
    let grants = grants.map(|(index, shares)| granted(&name(index), shares.clone())).collect();
    let grant = PodGrant { node: node.name.clone(), grants };
    let settings = DialectSettings::default();
    let written = written_on(&node, &pod, &grant, Dialect::Vcuda, &settings);
    for (index, minors) in indexes.iter().enumerate() {
        let key = vcuda::index_key("inspur.com", index);
        assert_eq!(written.annotations.get(&key).map(String::as_str), *minors, "{key}");
    }
    let read = read(&as_foreign(pod, &written), None, &node, &settings).unwrap();
    assert_eq!(read, Some((Dialect::Vcuda, grant)));
    written
}

const CORE: &str = "inspur.com/vcuda-core";
const BLOCKS: &str = "inspur.com/vcuda-memory";

#[test]
fn d1_two_shares_of_one_gpu() {
    let on_gpu = || vec![mib("GPU-0", 256, Some(10))];
    let limits: &[(&str, &str)] = &[(CORE, "10"), (BLOCKS, "1")];
    let written = encode_and_check(&[limits, limits], &[on_gpu(), on_gpu()], &[Some("0"), Some("0")]);
    assert_eq!(
        annotations(&written),
        [
            ("inspur.com/gpu-assigned", "false"),
            ("inspur.com/predicate-gpu-idx-0", "0"),
            ("inspur.com/predicate-gpu-idx-1", "0"),
            ("inspur.com/predicate-node", "testnode"),
            ("inspur.com/predicate-time", "1700000000123456789"),
        ]
    );
    let for_runtime: Vec<_> = written.container_annotations["c0"].values().map(String::as_str).collect();
    assert_eq!(for_runtime, ["10", "/dev/nvidia0", "268435456"]);
    assert_eq!(env(&written, "c0"), [("NVIDIA_VISIBLE_DEVICES", "GPU-0")]);
}

#[test]
fn d2_whole_gpu_and_share_of_another() {
    encode_and_check(
        &[&[(CORE, "100"), (BLOCKS, "3")], &[(CORE, "80"), (BLOCKS, "3")]],
        &[vec![mib("GPU-0", 768, Some(100))], vec![mib("GPU-1", 768, Some(80))]],
        &[Some("0"), Some("1")],
    );
}

#[test]
fn d3_two_whole_gpus_and_a_container_without() {
    // Ten blocks are more than the GPU has, so the limit is the memory of the GPU.
    let whole = vec![mib("GPU-0", 1024, Some(100)), mib("GPU-1", 1024, Some(100))];
    let written =
        encode_and_check(&[&[(CORE, "200"), (BLOCKS, "10")], &[]], &[whole, vec![]], &[Some("0,1"), None]);
    let for_runtime: Vec<_> = written.container_annotations["c0"].values().map(String::as_str).collect();
    assert_eq!(for_runtime, ["200", "/dev/nvidia0,/dev/nvidia1", "2147483648"]);
}

#[test]
fn d4_d5_d6_shares_by_minor_number() {
    encode_and_check(
        &[&[(CORE, "10"), (BLOCKS, "2")], &[]],
        &[vec![mib("GPU-0", 512, Some(10))], vec![]],
        &[Some("0"), None],
    );
    encode_and_check(&[&[(CORE, "90"), (BLOCKS, "2")]], &[vec![mib("GPU-1", 512, Some(90))]], &[Some("1")]);
    // Minor numbers, not positions: the second GPU of this node is /dev/nvidia3.
    let pod = pod(vec![app("main", &[(CORE, "20"), (BLOCKS, "1")])]);
    let grant = pod_grant(vec![granted("main", vec![mib("GPU-b", 256, Some(20))])]);
    let written = written(&pod, &grant, Dialect::Vcuda, &DialectSettings::default());
    assert_eq!(written.annotations["inspur.com/predicate-gpu-idx-0"], "3");
    assert_eq!(written.container_annotations["main"]["inspur.com/vcuda-device"], "/dev/nvidia3");
}

#[test]
fn vcuda_ceiling_is_read_from_the_pod_and_clamped_to_100() {
    for (text, ceiling) in [("50", 50), ("150", 100), ("10", 20)] {
        let pod = pod(vec![app("main", &[(CORE, "20"), (BLOCKS, "1")])]);
        let pod =
            annotated(pod, &[("inspur.com/vcuda-core-limit", text), ("inspur.com/predicate-gpu-idx-0", "3")]);
        let (_, grant) = read_back(&pod, &DialectSettings::default()).unwrap().unwrap();
        assert_eq!(grant.grants[0].shares[0].ceiling, Cores::percent(ceiling));
    }
}

#[test]
fn a3_container_without_a_gpu_has_no_entry() {
    let pod = pod(vec![app("log", &[]), app("main", &[(CORE, "20"), (BLOCKS, "1")])]);
    let grant = pod_grant(vec![granted("main", vec![mib("GPU-a", 256, Some(20))])]);
    let written = written(&pod, &grant, Dialect::Vcuda, &DialectSettings::default());
    assert!(!written.env.contains_key("log") && !written.container_annotations.contains_key("log"));
    assert!(!written.annotations.contains_key("inspur.com/predicate-gpu-idx-0"));
    assert_eq!(written.annotations["inspur.com/predicate-gpu-idx-1"], "0");
}

#[test]
fn a12_two_pods_have_separate_memory() {
    // Both have the same cores, so only the pod distinguishes them.
    for (blocks, held) in [("4", 1024), ("8", 2048)] {
        let pod = pod(vec![app("main", &[(CORE, "20"), (BLOCKS, blocks)])]);
        let grant = pod_grant(vec![granted("main", vec![mib("GPU-a", held, Some(20))])]);
        let written = written(&pod, &grant, Dialect::Vcuda, &DialectSettings::default());
        let memory = &written.container_annotations["main"][BLOCKS];
        assert_eq!(*memory, (held << 20).to_string());
        let read = read_back(&as_foreign(pod, &written), &DialectSettings::default());
        assert_eq!(read, Ok(Some((Dialect::Vcuda, grant))));
    }
}
