use super::*;

#[test]
fn two_dialects_in_one_container_are_a_problem() {
    let reading =
        read_one(json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 10, "volcano.sh/vgpu-number": 1}));
    assert_eq!(
        message(&reading),
        "this container uses 2 dialects, volcano (volcano.sh/vgpu-number) and hami (nvidia.com/gpu, nvidia.com/gpumem): keep one"
    );
    assert_eq!((reading.containers[0].dialect, reading.containers[0].want), (None, None));
    // Zero requests nothing, and each container may use another dialect.
    assert_eq!(read_one(json!({"nvidia.com/gpu": 0, "partage.dev/gpu": 1})).problems, []);
    let other = json!({"name": "other", "resources": {"limits": {"aliyun.com/gpu-mem": 1}}});
    let reading = read_pod(json!({}), vec![limits(json!({"nvidia.com/gpu": 1})), other]);
    assert_eq!((reading.problems.len(), reading.ask.asks.len()), (0, 2));
}

#[test]
fn carrier_does_not_count_as_a_dialect() {
    let carried = |mark: &str, amounts: Value| {
        read_one_in(&DialectSettings::default(), json!({"partage.dev/carrier": mark}), amounts)
    };
    let both = json!({"partage.dev/gpu": 1, "aliyun.com/gpu-mem": 2});
    let reading = carried("main=partage.dev/gpu", both.clone());
    assert_eq!(want(&reading), shares(1, mib(2048), CoresAsk::Uncounted));
    let memory = json!({"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 2});
    assert_eq!(want(&carried("main = volcano.sh/vgpu-number,", memory)).count, 1);

    let reading = carried("other=partage.dev/gpu", json!({"aliyun.com/gpu-mem": 2}));
    assert!(message(&reading).starts_with("the pod has no container \"other\""));
    let reading = carried("main=partage.dev/gpu", json!({"partage.dev/gpu": 2}));
    assert_eq!(
        message(&reading),
        "partage.dev/gpu is marked as a carrier, but the container requests nothing else: remove the mark"
    );
    assert!(message(&carried("main", json!({"partage.dev/gpu": 1}))).starts_with("invalid entry \"main\""));
    let reading = carried("main=aliyun.com/gpu-mem", json!({"aliyun.com/gpu-mem": 2}));
    assert!(message(&reading).starts_with("aliyun.com/gpu-mem cannot be a carrier"));
}

#[test]
fn requests_must_equal_limits() {
    let with = |limits: Value, requests: Value| {
        read_pod(
            json!({}),
            vec![json!({"name": "main", "resources": {"limits": limits, "requests": requests}})],
        )
    };
    let reading = with(json!({"partage.dev/gpu": 2}), json!({"partage.dev/gpu": "2000m"}));
    assert_eq!(want(&reading).count, 2);
    let reading = with(json!({"partage.dev/gpu": 2}), json!({"partage.dev/gpu": 1}));
    assert!(
        message(&reading)
            .starts_with("the request is 1 and the limit is 2, but Kubernetes requires them to be equal")
    );
    assert_eq!(reading.ask.asks[0].want.count, 2);
    let reading = with(json!({}), json!({"partage.dev/gpu": 1}));
    assert_eq!(
        message(&reading),
        "requested without a limit, which Kubernetes rejects: write partage.dev/gpu: 1 under limits too"
    );
    assert_eq!(reading.ask.asks[0].want.count, 1);
}

#[test]
fn b21_init_containers_and_sidecars_request_gpus() {
    let container = |name: &str, policy: Option<&str>| {
        json!({"name": name, "restartPolicy": policy, "resources": {
            "limits": {"aliyun.com/gpu-mem": 2, "cpu": "500m"}, "requests": {"memory": "1Gi"},
        }})
    };
    let spec = json!({
        "initContainers": [container("fetch", None), container("proxy", Some("Always"))],
        "containers": [container("main", None)],
    });
    let reading = read(&PodManifest::read(&json!({}), &spec).0, &DialectSettings::default());
    assert_eq!(reading.problems, []);
    let roles: Vec<ContainerRole> = reading.ask.asks.iter().map(|ask| ask.role).collect();
    assert_eq!(roles, [ContainerRole::Init, ContainerRole::Sidecar, ContainerRole::App]);
    assert_eq!((reading.ask.cpu, reading.ask.memory), (MilliCpu(1000), Bytes(2 << 30)));
}

#[test]
fn c99_containers_without_gpus_keep_their_position() {
    let plain = json!({"name": "plain"});
    let asking = |name: &str| json!({"name": name, "resources": {"limits": {"volcano.sh/vgpu-number": 1}}});
    let reading = read_pod(json!({}), vec![asking("a"), plain, asking("b")]);
    let names: Vec<_> = reading.containers.iter().map(|c| (c.name.as_str(), c.want.is_some())).collect();
    assert_eq!(names, [("a", true), ("plain", false), ("b", true)]);
    assert_eq!(reading.ask.asks.len(), 2);
}

#[test]
fn carrier_must_equal_the_request() {
    let carried = |count: &str, amounts: Value| {
        let mut amounts = amounts;
        amounts["partage.dev/gpu"] = count.into();
        read_one_in(
            &DialectSettings::default(),
            json!({"partage.dev/carrier": "main=partage.dev/gpu"}),
            amounts,
        )
    };
    let memory = json!({"volcano.sh/vgpu-memory": 100});
    let two = json!({"volcano.sh/vgpu-memory": 100, "volcano.sh/vgpu-number": 2});
    assert_eq!(want(&carried("1", memory.clone())).count, 1);
    assert_eq!(want(&carried("2", two.clone())).count, 2);
    assert_eq!(message(&carried("0", memory.clone())), "carries a request but is 0: write 1");
    assert_eq!(message(&carried("1", two)), "carries a request for 2 GPUs but is 1: write 2");
    assert!(message(&carried("1.5", memory.clone())).ends_with("is not a whole number"));
    assert!(message(&carried("one", memory)).contains("is not a Kubernetes quantity"));
}

#[test]
fn lists_are_bounded() {
    let listed = |key: &str, list: String| {
        read_one_in(&DialectSettings::default(), json!({key: list}), json!({"partage.dev/gpu": 1}))
    };
    let many = |count: usize| (0..count).map(|n| format!("GPU-{n}")).collect::<Vec<_>>().join(",");
    for key in ["partage.dev/gpus", "partage.dev/not-gpus"] {
        assert_eq!(listed(key, many(256) + "," + &many(256)).problems, []);
        assert_eq!(message(&listed(key, many(100_000))), "lists 100000 names: the maximum is 256");
        let long = message(&listed(key, "x".repeat(257))).to_string();
        assert_eq!(long, format!("\"{}…\" is too long for a name: the maximum is 256 bytes", "x".repeat(63)));
    }
}

#[test]
fn tenant_text_is_truncated_in_problems() {
    let long = "x".repeat(10_000);
    let annotations =
        ["policy", "same-gpu", "cores-limit", "carrier", "memory-limit", "models", "nonsense", &long];
    let annotations: serde_json::Map<_, _> =
        annotations.iter().map(|name| (format!("partage.dev/{name}"), json!(long))).collect();
    let amounts =
        json!({"partage.dev/gpu": long, "partage.dev/memory": format!("1{long}"), "vcuda-core": long});
    let reading = read_one_in(&DialectSettings::default(), annotations.into(), amounts);
    assert!(reading.problems.len() > 7);
    for problem in &reading.problems {
        assert!(problem.field.len() < 330 && problem.message.len() < 400, "{problem:?}");
    }
}

#[test]
fn excessive_memory_and_wrong_suffixes_are_problems() {
    assert!(
        message(&read_one(json!({"partage.dev/memory": "2Pi"})))
            .ends_with("any GPU has: write 1 TiB or less")
    );
    for (text, meant) in [
        ("8GB", "8G or 8Gi?"),
        ("8gb", "8G or 8Gi?"),
        ("8g", "8G or 8Gi?"),
        ("8KB", "8k or 8Ki?"),
        ("8gi", "mean 8Gi?"),
        ("8mi", "mean 8Mi?"),
        ("8ki", "mean 8Ki?"),
        ("8GiB", "mean 8Gi?"),
    ] {
        assert!(message(&read_one(json!({"partage.dev/memory": text}))).ends_with(meant), "{text}");
    }
}

#[test]
fn resources_of_other_projects_are_explained_or_ignored() {
    let reading = read_one(json!({"nvidia.com/gpu.shared": 1}));
    assert!(message(&reading).starts_with("this resource is NVIDIA's time-slicing"));
    assert_eq!(
        read_one(json!({"example.com/fpga": 1, "amd.com/gpu": 1, "hugepages-2Mi": "4Mi"})).problems,
        []
    );
}

#[test]
fn memory_in_the_wrong_unit_is_a_problem() {
    for (amounts, expected) in [
        (
            json!({"aliyun.com/gpu-mem": 8138}),
            "this resource counts GiB: 8138 is 7.94 TiB of one GPU; for 8138 MiB write 8, or pass --gpushare-unit MiB if that is the unit of your cluster",
        ),
        (
            json!({"aliyun.com/gpu-mem": 8138, "aliyun.com/gpu-count": 3}),
            "this resource counts GiB: 8138 is 2.64 TiB of each of 3 GPUs; for 8138 MiB write 9, or pass --gpushare-unit MiB if that is the unit of your cluster",
        ),
        (json!({"aliyun.com/gpu-mem": "8Gi"}), "this resource counts GiB: for 8Gi write 8"),
        (
            json!({"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 8000}),
            "this resource counts blocks of 256 MiB: 8000 is 1.95 TiB of one GPU; for 8000 MiB write 32",
        ),
        (
            json!({"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": "8Gi"}),
            "this resource counts blocks of 256 MiB: for 8Gi write 32",
        ),
        (json!({"volcano.sh/vgpu-memory": "3Gi"}), "this resource counts MiB: for 3Gi write 3072"),
        (json!({"volcano.sh/vgpu-memory": "500Mi"}), "this resource counts MiB: for 500Mi write 500"),
        (json!({"nvidia.com/gpumem": "8G"}), "this resource counts MiB: for 8G write 7630"),
        (
            json!({"nvidia.com/gpumem": 3_221_225_472_u64}),
            "this resource counts MiB: 3221225472 is 3072 TiB of one GPU; for 3221225472 bytes write 3072",
        ),
        (
            json!({"nvidia.com/gpumem": "9223372036854775807"}),
            "this resource counts MiB: 9223372036854775807 is far more than any GPU has; write 1048576 or less",
        ),
    ] {
        assert_eq!(message(&read_one(amounts)), expected);
    }
    // Plausible amounts are not problems.
    for amounts in [json!({"aliyun.com/gpu-mem": 1024}), json!({"nvidia.com/gpumem": "1k"})] {
        assert_eq!(read_one(amounts).problems, []);
    }
}

#[test]
fn too_many_gpus_per_container_are_a_problem() {
    for resource in ["partage.dev/gpu", "volcano.sh/vgpu-number", "nvidia.com/gpu"] {
        assert_eq!(want(&read_one(json!({resource: 16}))).count, 16);
        let reading = read_one(json!({resource: 17}));
        assert_eq!(message(&reading), "17 GPUs are more than one container can have: request at most 16");
    }
    assert_eq!(
        message(&read_one(json!({"k8s.amazonaws.com/vgpu": 769}))),
        "769 slots are more than one container can have: request at most 768, 16 GPUs with 48 slots each"
    );
    assert_eq!(read_one(json!({"k8s.amazonaws.com/vgpu": 768})).problems, []);
}
