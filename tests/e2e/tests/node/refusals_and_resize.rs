//! Requests that cannot be granted, and their messages: no capacity now, or never enough, or an unclear request. Also
//! changes of the amounts of a running pod.

use crate::test_node::{GPU_QUERY_NOUNITS, TestNode, bed, parse_gpus, pod};
use partage_core::model::{Bytes, Cores};
use partage_testkit::agent::SIMULATED_SETTINGS;
use partage_testkit::eventually;

#[test]
fn unsatisfiable_request_is_reported_and_starts_when_capacity_is_free() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        let asks = |memory: &str| format!("partage.dev/gpu: 1, partage.dev/memory: {memory}");
        // The node has this much memory in total, and no single GPU has.
        test_node.apply(&pod("large", &asks("45Gi"), "sleep 1000"));
        let message = test_node
            .wait_until_waiting("large", "insufficient GPU capacity on node node1, even when empty")
            .await;
        assert!(
            message.contains("delete the pod, and request 39 GiB of GPU memory instead of 45 GiB"),
            "{message}"
        );
        test_node.delete_pod("large");
        for name in ["first", "second"] {
            test_node.apply(&pod(name, &asks("25Gi"), "sleep 1000"));
            test_node.wait_until_running(name).await;
        }
        // The node has this much memory left in total, and no single GPU has.
        test_node.apply(&pod("third", &asks("20Gi"), "sleep 1000"));
        let message = test_node.wait_until_waiting("third", "insufficient GPU capacity on node node1").await;
        assert!(message.contains("the container starts when capacity is released"), "{message}");
        assert_refusal_logged_once(&test_node, "third").await;
        // The scheduler itself sees that the node never has this much.
        test_node.apply(&pod("never", &asks("100Gi"), "sleep 1000"));
        eventually("the scheduler rejects the pod", async || {
            let pod = test_node.get_object("pod", "never")?;
            let message = pod["status"]["conditions"][0]["message"].as_str().unwrap_or_default().to_string();
            if message.contains("Insufficient partage.dev/memory") { Ok(()) } else { Err(message) }
        })
        .await;
        test_node.delete_pod("first");
        test_node.wait_until_running("third").await;
        assert_eq!(test_node.visible_gpus("third")[0].1, 20 << 10);
        // Kubelet calls no plugin for an amount: the container runs, and an event explains why it has no GPU.
        test_node.apply(&pod("uncounted", "partage.dev/memory: 1Gi", "sleep 1000"));
        test_node.wait_until_running("uncounted").await;
        test_node.wait_for_event("NoGpuAllocated", "add partage.dev/gpu").await;
        assert!(test_node.exec("uncounted", "ls /usr/bin/nvidia-smi").is_err());
        test_node.delete_pod("uncounted");
        // A container that never started holds nothing.
        check_invalid_requests(&test_node).await;
        test_node.wait_for_agent_files([2, 2, 2]).await;
    });
}

/// Kubelet retries again and again; the agent's log reports the refused container and the reason once.
async fn assert_refusal_logged_once(test_node: &TestNode<'_>, pod: &str) {
    let whose = format!("namespace=\"default\" pod=\"{pod}\" container=\"main\"");
    let lines = |message: &str| {
        let log = test_node.agent.log();
        let of_pod = log.lines().filter(|line| line.contains(message) && line.contains(&whose));
        of_pod.map(String::from).collect::<Vec<_>>()
    };
    eventually("kubelet has retried", async || match lines("container start refused again").len() {
        2.. => Ok(()),
        retries => Err(format!("{retries} retries\n{}", test_node.agent.log())),
    })
    .await;
    let logged = lines(" container start refused ").into_iter().filter(|line| line.contains(" INFO "));
    let logged: Vec<String> = logged.collect();
    assert!(
        logged.len() == 1 && logged[0].contains("insufficient GPU capacity on node node1"),
        "{logged:#?}"
    );
}

async fn check_invalid_requests(test_node: &TestNode<'_>) {
    let wrong = [
        (
            "two-dialects",
            "partage.dev/gpu: 1, volcano.sh/vgpu-number: 1",
            "",
            "this container uses 2 dialects",
        ),
        (
            "one-and-a-half",
            "tencent.com/vcuda-core: 150, tencent.com/vcuda-memory: 4",
            "",
            "150 is neither a share of one GPU nor whole GPUs",
        ),
        ("no-memory", "tencent.com/vcuda-core: 20", "", "20 % of a GPU needs memory, too"),
        ("little", "partage.dev/gpu: 1, partage.dev/memory: 8", "", "partage.dev/memory"),
        (
            "misspelt",
            "partage.dev/gpu: 1, partage.dev/memory: 1Gi",
            "partage.dev/exclusiv: \"true\"",
            "did you mean partage.dev/exclusive?",
        ),
    ];
    for (name, limits, annotations, _) in wrong {
        let named = format!("{{name: {name}}}");
        let annotated = format!("{{name: {name}, annotations: {{{annotations}}}}}");
        test_node.apply(&pod(name, limits, "sleep 1000").replace(&named, &annotated));
    }
    for (name, _, _, expected) in wrong {
        let message = test_node.wait_until_waiting(name, expected).await;
        assert!(message.contains(':'), "{message}");
    }
    for (name, ..) in wrong {
        test_node.delete_pod(name);
    }
}

#[test]
fn running_pod_is_resized_within_free_capacity() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        let asks = "partage.dev/gpu: 1, partage.dev/memory: 4Gi, partage.dev/cores: 30";
        test_node.apply(&pod("r", asks, "/programs/partage-sample trainer --memory 2Gi"));
        test_node.apply(&pod("beside", "partage.dev/gpu: 1, partage.dev/memory: 8Gi", "sleep 1000"));
        test_node.wait_until_running("r").await;
        test_node.wait_until_running("beside").await;
        assert_eq!(
            test_node.visible_gpus("r")[0].0,
            test_node.visible_gpus("beside")[0].0,
            "both are on the same GPU"
        );
        eventually("its model is loaded", async || {
            let output = test_node.bed.kubectl(&["logs", "r"]).map_err(|error| error.to_string())?;
            if output.contains("the model takes") { Ok(()) } else { Err(output) }
        })
        .await;

        request_resize(&test_node, "r", "memory=6Gi, cores=40").await;
        test_node.wait_for_event("Resized", "memory=6Gi, cores=40").await;
        wait_until_resized(&test_node, 6).await;
        request_resize(&test_node, "r", "memory=3Gi").await;
        wait_until_resized(&test_node, 3).await;
        for (request, expected) in [
            ("memory=33Gi", "of memory free for this pod, 33 GiB requested"),
            ("memory=1Gi", "free memory in the program first"),
            ("memory=lots", "memory=lots"),
            ("other: memory=4Gi", "container other has no share"),
        ] {
            request_resize(&test_node, "r", request).await;
            test_node.wait_for_event("ResizeRefused", expected).await;
            assert_eq!(test_node.visible_gpus("r")[0].1, 3 << 10, "{request}");
        }
        check_resize_per_container(&test_node).await;
        check_resize_disabled_by_settings(&test_node).await;

        // The last amounts remain in force after the agent restarts.
        test_node.agent.process().kill();
        request_resize(&test_node, "r", "memory=5Gi").await;
        assert_eq!(test_node.visible_gpus("r")[0].1, 3 << 10);
        test_node.agent.process().start().unwrap();
        wait_until_resized(&test_node, 5).await;
        test_node.agent.process().restart().unwrap();
        wait_until_resized(&test_node, 5).await;
        let grant = test_node.wait_for_grant("r").await;
        assert_eq!(grant.grants[0].shares[0].memory_bytes, Some(Bytes(5 << 30)));
        assert_eq!(grant.grants[0].shares[0].cores.map(|cores| cores.as_millipercent()), Some(40_000));
    });
}

/// Each container of a pod is changed by its name.
async fn check_resize_per_container(test_node: &TestNode<'_>) {
    let one = |name: &str, memory: &str| {
        format!(
            "  - {{name: {name}, image: 'localhost/debian:bed', imagePullPolicy: Never, command: [sleep, '1000'], \
             resources: {{limits: {{partage.dev/gpu: 1, partage.dev/memory: {memory}, partage.dev/cores: 5}}}}}}\n"
        )
    };
    let head = "apiVersion: v1\nkind: Pod\nmetadata: {name: both}\nspec:\n  terminationGracePeriodSeconds: 1\n  containers:\n";
    test_node.apply(&[head, &one("train", "2Gi"), &one("serve", "1Gi")].concat());
    test_node.wait_until_running("both").await;
    let sees =
        |container: &str| parse_gpus(&test_node.exec_in("both", container, GPU_QUERY_NOUNITS).unwrap())[0].1;
    request_resize(test_node, "both", "memory=3Gi").await;
    test_node.wait_for_event("ResizeRefused", "several containers have shares: name one").await;
    assert_eq!((sees("train"), sees("serve")), (2 << 10, 1 << 10));
    // One of the two does not fit, so neither is changed.
    request_resize(test_node, "both", "train: memory=3Gi; serve: memory=39Gi").await;
    test_node.wait_for_event_on(("Pod", "both"), "ResizeRefused", "of memory free for this pod, ").await;
    assert_eq!((sees("train"), sees("serve")), (2 << 10, 1 << 10));
    request_resize(test_node, "both", "train: memory=3Gi; serve: memory=2Gi, cores=10").await;
    test_node.wait_for_event("Resized", "train: memory=3Gi; serve: memory=2Gi, cores=10").await;
    assert_eq!((sees("train"), sees("serve")), (3 << 10, 2 << 10));
    eventually("the annotation has the new amounts", async || {
        let grant = test_node.wait_for_grant("both").await;
        let shares = grant.grants.iter().map(|one| &one.shares[0]);
        let found: Vec<_> = shares.map(|share| (share.memory_bytes, share.cores)).collect();
        let wanted = [(3, 5), (2, 10)].map(|(gib, cores)| (Some(Bytes(gib << 30)), Cores::percent(cores)));
        if found == wanted { Ok(()) } else { Err(format!("{found:?}")) }
    })
    .await;
    test_node.delete_pod("both");
}

/// With `resize: off` in the settings, requests to resize are refused.
async fn check_resize_disabled_by_settings(test_node: &TestNode<'_>) {
    test_node.agent.write_settings(&format!("{SIMULATED_SETTINGS}resize: off\n")).unwrap();
    wait_for_settings_reloads(test_node, 1).await;
    request_resize(test_node, "r", "memory=4Gi").await;
    test_node.wait_for_event("ResizeRefused", "(resize: off): change the manifest").await;
    assert_eq!(test_node.visible_gpus("r")[0].1, 3 << 10);
    test_node.agent.write_settings(SIMULATED_SETTINGS).unwrap();
    wait_for_settings_reloads(test_node, 2).await;
}

/// Waits until the agent has read changed settings this number of times.
async fn wait_for_settings_reloads(test_node: &TestNode<'_>, times: usize) {
    eventually("the settings are read", async || {
        let read = test_node.agent.log().matches("settings reloaded").count();
        if read >= times { Ok(()) } else { Err(test_node.agent.log()) }
    })
    .await;
}

async fn request_resize(test_node: &TestNode<'_>, pod: &str, request: &str) {
    let request = format!("partage.dev/resize={request}");
    test_node.bed.kubectl(&["annotate", "--overwrite", "pod", pod, &request]).unwrap();
}

/// Waits until the pod and its annotation show this many GiB.
async fn wait_until_resized(test_node: &TestNode<'_>, gib: u64) {
    eventually(&format!("{gib} GiB"), async || {
        let seen = test_node.visible_gpus("r")[0].1;
        let granted = test_node.wait_for_grant("r").await.grants[0].shares[0].memory_bytes;
        if seen == gib << 10 && granted == Some(Bytes(gib << 30)) {
            Ok(())
        } else {
            Err(format!("{seen} MiB, {granted:?}\n{}", test_node.agent.log()))
        }
    })
    .await;
}
