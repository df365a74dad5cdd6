//! Pods that share a GPU stay within their shares, and a whole GPU belongs to one pod.

use crate::test_node::{GPU_QUERY_NOUNITS, TestNode, bed, parse_gpus, pod};
use partage_sim_node::profile::GpuProfile;
use partage_testkit::agent::install_driver;
use partage_testkit::bed::{BedProfile, CgroupVersion, NodeProfile, TestBed};
use partage_testkit::eventually;
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};

const GPU_MODEL: &str = "A100-SXM4-40GB";
const SETTINGS: &str = "driver: simulated\nsimulated: {gpus: 3, model: A100-SXM4-40GB}\nmetrics: {address: '127.0.0.1:9394', anonymous: true}\n";
const SIMULATED_DIR: &str = "/var/lib/partage/simulated";
/// The memory of such a GPU that programs can use, in MiB.
const WHOLE_GPU_MIB: u64 = 40340;
/// The size of each program's model, in MiB.
const MODEL_A_MIB: u64 = 1024;
const MODEL_B_MIB: u64 = 2048;

#[test]
fn pods_sharing_a_gpu_stay_within_their_shares() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut test_node = TestNode::start(&bed, SETTINGS).await;
        let train = |mib: u64| format!("/programs/partage-sample trainer --every 1 --memory {mib}Mi");
        let asks = |memory: u64, cores: u64| {
            format!("partage.dev/gpu: 1, partage.dev/memory: {memory}Mi, partage.dev/cores: {cores}")
        };
        // A program without CPU time cannot use a GPU, and without a CPU request it only gets what others leave.
        let computes = |name: &str, asks: &str, command: &str| {
            pod(name, asks, command).replace("resources: {", "resources: {requests: {cpu: 250m}, ")
        };
        test_node.apply(&computes("a", &asks(4096, 30), &train(MODEL_A_MIB)));
        test_node.apply(&computes("b", &asks(8192, 70), &train(MODEL_B_MIB)));
        test_node.wait_until_running("a").await;
        test_node.wait_until_running("b").await;
        let (a, b) = (test_node.visible_gpus("a"), test_node.visible_gpus("b"));
        assert_eq!((a[0].1, b[0].1), (4096, 8192));
        assert_eq!(a[0].0, b[0].0, "both are on the same GPU");

        check_each_sees_its_own(&test_node).await;
        check_compute_split(&test_node).await;
        check_memory_limit(&test_node).await;
        // Other programs of the container have run and ended.
        check_compute_split(&test_node).await;
        // The agent is not needed for it.
        test_node.agent.process().kill();
        check_compute_split(&test_node).await;
        test_node.restart_agent().await;
        check_compute_split(&test_node).await;
        check_whole_gpus_not_shared(&test_node, &a[0].0).await;
    });
}

/// A driver API client runs out of memory at its limit, and not before.
async fn check_memory_limit(test_node: &TestNode<'_>) {
    // The driver's context of a process counts, as on a GPU of that size; twice, because the trainer has one, too.
    let context = GpuProfile::named(GPU_MODEL).unwrap().memory.context >> 20;
    let room = 4096 - MODEL_A_MIB - 2 * context;
    let take = |mib: u64| {
        test_node.exec("a", &format!("/programs/partage-sample trainer --memory {mib}Mi --seconds 0.1"))
    };
    eventually("the trainer's model is loaded", async || {
        let output = test_node.bed.kubectl(&["logs", "a"]).map_err(|error| error.to_string())?;
        if output.contains("the model takes") { Ok(()) } else { Err(output) }
    })
    .await;
    // Kernels take a little, too.
    let fits = take(room - 2).unwrap();
    assert!(fits.contains("the model takes"), "{fits}");
    let beyond = take(room + 1).unwrap_err();
    assert!(beyond.contains("out of memory"), "{beyond}");
    assert!(beyond.contains("of 4.0 GiB"), "the message must have its own total: {beyond}");
}

/// Checks that `nvidia-smi` lists a container's own processes.
async fn check_each_sees_its_own(test_node: &TestNode<'_>) {
    for (name, model) in [("a", MODEL_A_MIB), ("b", MODEL_B_MIB)] {
        wait_until_only_own_process_visible(test_node, name, "nvidia-smi", model).await;
    }
}

/// Waits until the pod sees one process with a model of this many MiB.
async fn wait_until_only_own_process_visible(test_node: &TestNode<'_>, pod: &str, smi: &str, model: u64) {
    let context = GpuProfile::named(GPU_MODEL).unwrap().memory.context >> 20;
    let question = format!("{smi} --query-compute-apps=used_memory --format=csv,noheader,nounits");
    eventually(&format!("{pod} sees its own process"), async || {
        let output = test_node.exec(pod, &question)?;
        let memory: Vec<u64> = output.lines().filter_map(|line| line.trim().parse().ok()).collect();
        if memory == [model + context] { Ok(()) } else { Err(format!("{output}, context {context}")) }
    })
    .await;
}

/// Checks the GPU time of each process, identified by its memory. Retries if the machine had no CPU time for one of
/// them.
async fn check_compute_split(test_node: &TestNode<'_>) {
    let served = || {
        let home = "/var/lib/agent-test/partage";
        let arguments = [
            &format!("PARTAGE_SIM_DIR={SIMULATED_DIR}"),
            home,
            "sim",
            "top",
            "--once",
            "--interval",
            "0.1",
            "-o",
            "json",
        ];
        let top: Value =
            serde_json::from_str(&test_node.agent.node().run("/usr/bin/env", arguments).unwrap()).unwrap();
        let mut processes: Vec<(u64, f64)> = top["gpus"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|gpu| gpu["processes"].as_array().unwrap())
            .map(|process| (process["usedBytes"].as_u64().unwrap(), process["gpuSeconds"].as_f64().unwrap()))
            .collect();
        processes.sort_by_key(|(memory, _)| *memory);
        processes
    };
    // One correct result could be a coincidence.
    let mut right = 0;
    eventually("shares of 30 % and 70 %, twice in a row", async || {
        let (began, before) = (Instant::now(), served());
        tokio::time::sleep(Duration::from_secs(2)).await;
        let (took, after) = (began.elapsed(), served());
        let ([(_, a0), (_, b0)], [(_, a1), (_, b1)]) = (&before[..], &after[..]) else {
            right = 0;
            return Err(format!("{before:?} {after:?}"));
        };
        let both = a1 - a0 + b1 - b0;
        let part = (a1 - a0) / both;
        // If the GPU waits for programs without CPU time, the CPU scheduler decides the shares, but only within this
        // bound.
        let starved = both < 0.85 * took.as_secs_f64();
        right = if (0.27..0.33).contains(&part) || (starved && part < 0.4) { right + 1 } else { 0 };
        if right == 2 { Ok(()) } else { Err(format!("{part}: {before:?}, then {after:?}")) }
    })
    .await;
}

/// Uses the second and the third of three GPUs.
async fn check_whole_gpus_not_shared(test_node: &TestNode<'_>, shared: &str) {
    let exclusive = pod("alone", "partage.dev/gpu: 1", "sleep 1000")
        .replace("{name: alone}", "{name: alone, annotations: {partage.dev/exclusive: \"true\"}}");
    test_node.apply(&exclusive);
    test_node.apply(&pod("card", "tencent.com/vcuda-core: 100", "sleep 1000"));
    test_node.wait_until_running("alone").await;
    test_node.wait_until_running("card").await;
    let (alone, card) = (test_node.visible_gpus("alone"), test_node.visible_gpus("card"));
    assert_eq!((alone[0].1, card[0].1), (WHOLE_GPU_MIB, WHOLE_GPU_MIB));
    assert!(alone[0].0 != card[0].0 && alone[0].0 != shared && card[0].0 != shared);
    // The compute of the first GPU is fully granted, and the others are exclusive.
    test_node.apply(&pod("third", "partage.dev/gpu: 1, partage.dev/memory: 1Gi", "sleep 1000"));
    let message = test_node.wait_until_waiting("third", "insufficient GPU capacity on node node1").await;
    assert_eq!(message.matches("is exclusive to another pod").count(), 2, "{message}");
    test_node.delete_pod("alone");
    test_node.wait_until_running("third").await;
    assert_eq!(test_node.visible_gpus("third"), [(alone[0].0.clone(), 1024)]);
    test_node.delete_pod("third");
    test_node.delete_pod("card");
    test_node.apply(&pod("cards", "tencent.com/vcuda-core: 200", "sleep 1000"));
    test_node.wait_until_running("cards").await;
    let cards = test_node.visible_gpus("cards");
    assert_eq!(cards.len(), 2);
    assert!(cards.iter().all(|(gpu, memory)| gpu != shared && *memory == WHOLE_GPU_MIB), "{cards:?}");
}

/// Runs on nodes with both versions of cgroups, with the driver's files where a host has them.
#[test]
fn pod_has_only_the_device_nodes_of_its_gpus() {
    let profile = BedProfile::control_plane()
        .node(NodeProfile::new("old").cgroups(CgroupVersion::V1))
        .node(NodeProfile::new("new").cgroups(CgroupVersion::V2))
        .debian();
    let Some(bed) = TestBed::for_test(profile) else { return };
    for node in ["old", "new"] {
        install_driver(
            bed.node(node).unwrap(),
            Path::new(partage_e2e::partage()),
            GPU_MODEL,
            "/var/lib/driver",
        )
        .unwrap();
        bed.block_on(async {
            let settings = "driver: nvidia\nmetrics: {address: '127.0.0.1:9394', anonymous: true}\n";
            let test_node = TestNode::start_on(&bed, node, settings).await;
            check_own_device_nodes(&test_node, node).await;
            check_limits_hold(&test_node, node).await;
        });
    }
}

/// Returns a pod on a node with the driver's files. The simulated driver's own files would not be in a container of
/// NVIDIA's.
fn pod_on_node(node: &str, name: &str, gib: u64) -> String {
    pod(name, &format!("partage.dev/gpu: 1, partage.dev/memory: {gib}Gi"), "sleep 1000")
        .replace("  volumes: [", &format!("  nodeName: {node}\n  volumes: ["))
        .replace(
            "hostPath: {path: /var/lib/programs}}]",
            "hostPath: {path: /var/lib/programs}}, {name: driver, hostPath: {path: /var/lib/driver}}]",
        )
        .replace("readOnly: true}]", "readOnly: true}, {name: driver, mountPath: /var/lib/driver}]")
}

/// Checks memory, own processes, and detection of bypassed limits on both versions of cgroups.
async fn check_limits_hold(test_node: &TestNode<'_>, node: &str) {
    let beside = format!("{node}-2");
    test_node.apply(&pod_on_node(node, &beside, 4));
    test_node.wait_until_running(&beside).await;
    let gpu = test_node.wait_for_grant(&beside).await.grants[0].shares[0].gpu.to_string();
    // The simulated driver's own files, which a container of NVIDIA's would not have, show all GPUs.
    let trainer = format!("CUDA_VISIBLE_DEVICES={gpu} /programs/partage-sample trainer");
    let smi = format!("nvidia-smi --id={gpu}");
    let mut neighbor = None;
    for name in [format!("{node}-0"), format!("{node}-1")] {
        if test_node.wait_for_grant(&name).await.grants[0].shares[0].gpu.as_str() == gpu {
            neighbor = Some(name);
        }
    }
    let pods = [(neighbor.unwrap(), 1024), (beside.clone(), 2048)];
    for (name, mib) in &pods {
        let works = format!("{trainer} --memory {mib}Mi --seconds 3000 > /dev/null 2>&1 &");
        test_node.exec(name, &works).unwrap();
    }
    for (name, mib) in &pods {
        wait_until_only_own_process_visible(test_node, name, &smi, *mib).await;
    }
    let much = test_node.exec(&beside, &format!("{trainer} --memory 2Gi --seconds 0.1")).unwrap_err();
    assert!(much.contains("out of memory") && much.contains("of 4.0 GiB"), "{much}");
    let usage = "/usr/local/partage/region/usage";
    let forget = format!("head -c $(stat -c %s {usage}) /dev/zero | dd of={usage} conv=notrunc status=none");
    test_node.exec(&beside, &forget).unwrap();
    test_node.wait_for_event_on(("Pod", &beside), "BypassSuspected", "bypasses its limits").await;
    wait_until_only_own_process_visible(test_node, &pods[0].0, &smi, pods[0].1).await;
}

async fn check_own_device_nodes(test_node: &TestNode<'_>, node: &str) {
    for number in [0, 1] {
        let name = format!("{node}-{number}");
        test_node.apply(&pod_on_node(node, &name, 30));
        test_node.wait_until_running(&name).await;
        let inventory = test_node.inventory().unwrap();
        let granted = test_node.wait_for_grant(&name).await.grants[0].shares[0].gpu.to_string();
        let seen = test_node.exec(&name, &format!("{GPU_QUERY_NOUNITS} --id={granted}")).unwrap();
        assert_eq!(parse_gpus(&seen), [(granted.clone(), 30 << 10)]);
        let own = inventory.gpus.iter().find(|gpu| gpu.uuid.as_str() == granted).unwrap().minor;
        let other = 1 - own;
        let nodes = test_node.exec(&name, "cd /dev; ls -d nvidia*").unwrap();
        assert_eq!(nodes, format!("nvidia-uvm\nnvidia{own}\nnvidiactl\n"));
        let opened =
            |device: &str| test_node.exec(&name, &format!("exec 2>&1; true < {device}; true")).unwrap();
        assert!(
            opened(&format!("/dev/nvidia{own}")).contains("No such device or address"),
            "its own device must be open to it"
        );
        assert!(
            opened("/dev/nvidiactl").contains("No such device or address"),
            "the control device must be open to it"
        );
        test_node.exec(&name, &format!("mknod /dev/other c 195 {other}")).unwrap();
        let refused = opened("/dev/other");
        assert!(refused.contains("Operation not permitted"), "{refused}");
    }
}
