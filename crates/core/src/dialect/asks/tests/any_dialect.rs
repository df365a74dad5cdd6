use super::*;

#[test]
fn two_dialects_in_one_container_are_named() {
    let reading =
        read_one(json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 10, "volcano.sh/vgpu-number": 1}));
    assert_eq!(
        message(&reading),
        "this container asks in 2 dialects, volcano (volcano.sh/vgpu-number) and hami (nvidia.com/gpu, nvidia.com/gpumem): keep one"
    );
    assert_eq!((reading.containers[0].dialect, reading.containers[0].want), (None, None));
    // Zero asks nothing, and each container may have its own.
    assert_eq!(read_one(json!({"nvidia.com/gpu": 0, "partage.dev/gpu": 1})).problems, []);
    let other = json!({"name": "other", "resources": {"limits": {"aliyun.com/gpu-mem": 1}}});
    let reading = read_pod(json!({}), vec![limits(json!({"nvidia.com/gpu": 1})), other]);
    assert_eq!((reading.problems.len(), reading.ask.asks.len()), (0, 2));
}

#[test]
fn a_marked_carrier_is_no_dialect() {
    let carried = |mark: &str, amounts: Value| {
        read_one_in(&Settings::default(), json!({"partage.dev/carrier": mark}), amounts)
    };
    let both = json!({"partage.dev/gpu": 1, "aliyun.com/gpu-mem": 2});
    let reading = carried("main=partage.dev/gpu", both.clone());
    assert_eq!(want(&reading), parts(1, mib(2048), CoresAsk::Uncounted));
    let memory = json!({"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 2});
    assert_eq!(want(&carried("main = volcano.sh/vgpu-number,", memory)).count, 1);

    let reading = carried("other=partage.dev/gpu", json!({"aliyun.com/gpu-mem": 2}));
    assert!(message(&reading).starts_with("there is no container \"other\""));
    let reading = carried("main=partage.dev/gpu", json!({"partage.dev/gpu": 2}));
    assert_eq!(
        message(&reading),
        "partage.dev/gpu is marked as carrying another ask, but there is no other: unmark it"
    );
    assert!(message(&carried("main", json!({"partage.dev/gpu": 1}))).starts_with("\"main\" marks nothing"));
    let reading = carried("main=aliyun.com/gpu-mem", json!({"aliyun.com/gpu-mem": 2}));
    assert!(message(&reading).starts_with("aliyun.com/gpu-mem cannot carry an ask"));
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
    assert!(message(&reading).starts_with("the request is 1, the limit 2, and Kubernetes wants them equal"));
    assert_eq!(reading.ask.asks[0].want.count, 2);
    let reading = with(json!({}), json!({"partage.dev/gpu": 1}));
    assert_eq!(
        message(&reading),
        "requested but not limited, which Kubernetes refuses: write partage.dev/gpu: 1 under limits too"
    );
    assert_eq!(reading.ask.asks[0].want.count, 1);
}

#[test]
fn b21_init_containers_and_sidecars_ask_too() {
    let container = |name: &str, policy: Option<&str>| {
        json!({"name": name, "restartPolicy": policy, "resources": {
            "limits": {"aliyun.com/gpu-mem": 2, "cpu": "500m"}, "requests": {"memory": "1Gi"},
        }})
    };
    let spec = json!({
        "initContainers": [container("fetch", None), container("proxy", Some("Always"))],
        "containers": [container("main", None)],
    });
    let reading = read(&Pod::read(&json!({}), &spec).0, &Settings::default());
    assert_eq!(reading.problems, []);
    let roles: Vec<Role> = reading.ask.asks.iter().map(|ask| ask.role).collect();
    assert_eq!(roles, [Role::Init, Role::Sidecar, Role::App]);
    assert_eq!((reading.ask.cpu, reading.ask.memory), (MilliCpu(1000), Bytes(2 << 30)));
}

#[test]
fn c99_containers_between_keep_their_place() {
    let plain = json!({"name": "plain"});
    let asking = |name: &str| json!({"name": name, "resources": {"limits": {"volcano.sh/vgpu-number": 1}}});
    let reading = read_pod(json!({}), vec![asking("a"), plain, asking("b")]);
    let names: Vec<_> = reading.containers.iter().map(|c| (c.name.as_str(), c.want.is_some())).collect();
    assert_eq!(names, [("a", true), ("plain", false), ("b", true)]);
    assert_eq!(reading.ask.asks.len(), 2);
}
