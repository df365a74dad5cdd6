//! Changes of the settings at run time.

use crate::replaced_systems::{SLEEP_COMMAND, USABLE_MIB, with_bed_image};
use crate::test_node::{TestNode, bed, pod};
use partage_testkit::agent::SIMULATED_SETTINGS;
use partage_testkit::binaries;
use partage_testkit::eventually;
use std::collections::BTreeSet;
use std::process::Command;

/// A pod as HAMi's users write them.
const HAMI: &str = include_str!("../../../../examples/hami/one-share.yaml");

#[test]
fn changed_settings_are_applied_without_harming_pods() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        let write =
            |more: &str| test_node.agent.write_settings(&format!("{SIMULATED_SETTINGS}{more}\n")).unwrap();
        test_node.wait_until_offered("partage.dev/gpu", Some("20")).await;

        write("sharesPerGpu: 3");
        test_node.wait_until_offered("partage.dev/gpu", Some("6")).await;
        test_node.wait_until_offered("volcano.sh/vgpu-number", Some("6")).await;
        write("sharesPerGpu: 25\nawsSlots: 4");
        test_node.wait_until_offered("partage.dev/gpu", Some("50")).await;
        test_node.wait_until_offered("k8s.amazonaws.com/vgpu", Some("8")).await;

        check_labels(&test_node, &write).await;
        check_labels_of_replaced_systems(&test_node, &write).await;
        check_per_node_settings(&test_node, &write).await;
        check_invalid_settings_are_refused(&test_node, &write).await;
        check_memory_overcommit(&test_node, &write).await;
        check_dialect_enabled(&test_node, &write).await;
        check_dialect_disabled(&test_node, &write).await;
        check_gpushare_unit_mebibytes(&test_node).await;
    });
}

/// A label that the installation does not allow is reported, and blocks nothing else.
async fn check_labels(test_node: &TestNode<'_>, write: &impl Fn(&str)) {
    let shown = async |wanted: Option<&str>| {
        eventually(&format!("the label is {wanted:?}"), async || {
            let node = test_node.get_object("node", "node1")?;
            let label = node["metadata"]["labels"]["partage.dev/pool"].as_str();
            if label == wanted { Ok(()) } else { Err(format!("{label:?}\n{}", test_node.agent.log())) }
        })
        .await;
    };
    write("labels: {foreign: \"true\"}\nvolcanoMemoryFactor: 1000");
    test_node.wait_for_event("NodeUpdateRefused", "label foreign of a node does not belong to Partage").await;
    test_node.wait_until_offered("volcano.sh/vgpu-memory", Some("80")).await;
    write("labels: {partage.dev/pool: a}");
    shown(Some("a")).await;
    write("labels: {partage.dev/pool: b}");
    shown(Some("b")).await;
    // Labels of others are not removed.
    test_node.bed.kubectl(&["label", "node", "node1", "foreign=yes"]).unwrap();
    write("");
    shown(None).await;
    assert_eq!(test_node.get_object("node", "node1").unwrap()["metadata"]["labels"]["foreign"], "yes");
}

/// Labels by which users of the replaced systems select nodes, if the installation names them.
async fn check_labels_of_replaced_systems(test_node: &TestNode<'_>, write: &impl Fn(&str)) {
    let theirs =
        [("gpushare", "true"), ("k8s.amazonaws.com/accelerator", "vgpu"), ("nvidia-device-enable", "enable")];
    let shown = async |there: bool| {
        eventually(&format!("labels of the replaced systems are set: {there}"), async || {
            let labels = test_node.get_object("node", "node1")?["metadata"]["labels"].clone();
            if theirs.iter().all(|(key, value)| (labels[key] == *value) == there) {
                Ok(())
            } else {
                Err(format!("{labels}\n{}", test_node.agent.log()))
            }
        })
        .await;
    };
    let helm = match binaries::helm(&binaries::BuildPaths::from_environment()) {
        Ok(helm) => helm,
        Err(missing) => return partage_testkit::skip_or_fail(&missing),
    };
    let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/chart/partage");
    let mut command = Command::new(helm);
    command.args(["template", "partage", chart, "--namespace", "partage-system", "--kube-version", "1.36.4"]);
    command.args(["--show-only", "templates/admission.yaml", "--set", "settings.driver=simulated"]);
    for (key, value) in theirs {
        command.arg("--set-string").arg(format!("settings.labels.{}={value}", key.replace('.', "\\.")));
    }
    let rendered = command.output().unwrap();
    assert!(rendered.status.success(), "{}", String::from_utf8_lossy(&rendered.stderr));
    test_node.apply(&String::from_utf8(rendered.stdout).unwrap());
    let text: Vec<String> = theirs.iter().map(|(key, value)| format!("{key}: '{value}'")).collect();
    write(&format!("labels: {{{}}}", text.join(", ")));
    shown(true).await;
    write("");
    shown(false).await;
}

/// Settings that differ on some nodes: the first entry that matches the node applies, key by key.
async fn check_per_node_settings(test_node: &TestNode<'_>, write: &impl Fn(&str)) {
    write(
        "sharesPerGpu: 3\nawsSlots: 5\nnodes:\n- {names: [other], sharesPerGpu: 6}\n- {names: [node*], sharesPerGpu: 4}\n- {names: ['*'], awsSlots: 7}",
    );
    test_node.wait_until_offered("partage.dev/gpu", Some("8")).await;
    test_node.wait_until_offered("k8s.amazonaws.com/vgpu", Some("10")).await;
}

/// Memory is overcommitted by 50 %: three pods of three quarters of a GPU each run on two GPUs.
async fn check_memory_overcommit(test_node: &TestNode<'_>, write: &impl Fn(&str)) {
    let once = test_node.allocatable_amount("partage.dev/memory").unwrap();
    write("memoryOvercommitPercent: 150");
    test_node.wait_for_amount("partage.dev/memory", once / 2 * 3).await;
    test_node.wait_until_offered("partage.dev/memory-percent", Some("300")).await;
    let names = ["one", "two", "three"];
    for name in names {
        test_node.apply(&pod(name, "partage.dev/gpu: 1, partage.dev/memory: 29Gi", "sleep 1000"));
    }
    let mut cards = BTreeSet::new();
    for name in names {
        test_node.wait_until_running(name).await;
        let seen = test_node.visible_gpus(name);
        assert_eq!(seen[0].1, 29 << 10, "{name}");
        cards.insert(seen[0].0.clone());
    }
    assert_eq!(cards.len(), 2);
    // Pods with a grant keep it, and no other pod gets as much.
    write("");
    test_node.wait_for_amount("partage.dev/memory", 3 * (29 << 30)).await;
    test_node.restart_kubelet().await;
    for name in names {
        let pod = test_node.wait_until_running(name).await;
        assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);
    }
    test_node.bed.kubectl(&["delete", "pods", "--all", "--grace-period=1", "--wait"]).unwrap();
    test_node.wait_for_amount("partage.dev/memory", once).await;
}

/// HAMi's pods, on a node where no other plugin serves `nvidia.com/gpu`.
async fn check_dialect_enabled(test_node: &TestNode<'_>, write: &impl Fn(&str)) {
    write("dialects: [native, volcano, vcuda, aws, gpushare, hami]");
    for (resource, amount) in [
        ("nvidia.com/gpu", 20),
        ("nvidia.com/gpumem", 2 * USABLE_MIB),
        ("nvidia.com/gpumem-percentage", 200),
        ("nvidia.com/gpucores", 200),
    ] {
        test_node.wait_until_offered(resource, Some(&amount.to_string())).await;
    }
    test_node.apply(&with_bed_image(HAMI, SLEEP_COMMAND));
    test_node.wait_until_running("hami").await;
    let seen = test_node.visible_gpus("hami");
    assert_eq!(seen.iter().map(|(_, memory)| *memory).collect::<Vec<_>>(), [3000]);
    let environment = test_node.exec("hami", "env").unwrap();
    for line in [
        "CUDA_DEVICE_MEMORY_LIMIT_0=3000m".to_string(),
        "CUDA_DEVICE_SM_LIMIT=30".to_string(),
        format!("NVIDIA_VISIBLE_DEVICES={}", seen[0].0),
    ] {
        assert!(environment.lines().any(|have| have == line), "{line} is not in {environment}");
    }
    let grant = test_node.wait_for_grant("hami").await;
    assert_eq!(grant.grants[0].shares[0].cores.map(|cores| cores.as_millipercent()), Some(30_000));
    assert_eq!(test_node.wait_until_consistent().await.len(), 1);
    test_node.delete_pod("hami");
    write("");
    test_node.wait_until_offered("nvidia.com/gpu", Some("0")).await;
}

/// Kubelet counts a device for each MiB of a GPU of 48 GB, and allocates some thousand of them to a pod. More GPUs
/// would exceed the number of devices that it can count.
async fn check_gpushare_unit_mebibytes(test_node: &TestNode<'_>) {
    test_node.agent.write_settings(&format!("{SIMULATED_SETTINGS}gpushareUnit: MiB\n")).unwrap();
    let devices = 2 * USABLE_MIB;
    let words = format!(
        "aliyun.com/gpu-mem would have {devices} devices on node node1, and kubelet supports at most 50000 of one resource: set gpushareUnit: GiB"
    );
    test_node.wait_for_event("SettingsRefused", &words).await;
    // The simulated GPUs cannot be replaced while a pod uses one.
    test_node.delete_pod("next");
    let large = SIMULATED_SETTINGS.replace("{gpus: 2, model: A100-SXM4-40GB}", "{gpus: 1, model: L40S}");
    assert_ne!(large, SIMULATED_SETTINGS);
    test_node
        .agent
        .write_settings(&format!("{large}gpushareUnit: MiB\ndialects: [native, gpushare]\n"))
        .unwrap();
    test_node.agent.process().restart().unwrap();
    test_node.wait_until_ready().await;
    test_node.wait_until_offered("partage.dev/gpu", Some("10")).await;
    // Kubelet handles each resource separately, and this one last: its list is the longest.
    let devices = eventually("the node offers a device for each MiB", async || {
        match test_node.allocatable_amount("aliyun.com/gpu-mem") {
            Ok(devices) if (45_000..50_000).contains(&devices) => Ok(devices),
            has => Err(format!("{has:?}\n{}", test_node.agent.log())),
        }
    })
    .await;
    // Not many more: when it restarts, kubelet compares every device with all that are held.
    test_node.apply(&pod("mebibytes", "aliyun.com/gpu-mem: 3000", "sleep 1000"));
    test_node.wait_until_running("mebibytes").await;
    assert_eq!(test_node.visible_gpus("mebibytes")[0].1, 3000);
    test_node.restart_kubelet().await;
    test_node.wait_for_amount("aliyun.com/gpu-mem", devices).await;
    assert_eq!(test_node.wait_until_consistent().await.len(), 1);
    test_node.delete_pod("mebibytes");
    test_node.wait_until_released().await;
}

async fn check_invalid_settings_are_refused(test_node: &TestNode<'_>, write: &impl Fn(&str)) {
    write("sharesPerGpu: 7");
    test_node.wait_until_offered("partage.dev/gpu", Some("14")).await;
    write("sharesPerGPU: 9");
    test_node.wait_for_event("SettingsRefused", "sharesPerGPU").await;
    write("sharesPerGpu: 0");
    test_node.wait_for_event("SettingsRefused", "sharesPerGpu: 0 shares of one GPU").await;
    test_node.wait_until_offered("partage.dev/gpu", Some("14")).await;
    // Containers still start with the old settings.
    test_node.apply(&pod("a", "partage.dev/gpu: 1, partage.dev/memory: 1Gi", "sleep 1000"));
    test_node.wait_until_running("a").await;
    test_node.delete_pod("a");
    write("");
    test_node.wait_until_offered("partage.dev/gpu", Some("20")).await;
}

/// Pods of a disabled dialect keep running, also through a restart of kubelet, which admits them again.
async fn check_dialect_disabled(test_node: &TestNode<'_>, write: &impl Fn(&str)) {
    test_node.apply(&pod("v", "volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 1000", "sleep 1000"));
    test_node.wait_until_running("v").await;
    write("dialects: [native]");
    for resource in ["k8s.amazonaws.com/vgpu", "tencent.com/vcuda-core"] {
        test_node.wait_until_offered(resource, Some("0")).await;
    }
    // Only the granted devices are left.
    test_node.wait_until_offered("volcano.sh/vgpu-number", Some("1")).await;
    let uid = test_node.get_object("pod", "v").unwrap()["metadata"]["uid"].clone();
    test_node.restart_kubelet().await;
    // When the next pod runs, the others have been admitted.
    test_node.apply(&pod("next", "partage.dev/gpu: 1, partage.dev/memory: 1Gi", "sleep 1000"));
    test_node.wait_until_running("next").await;
    let after = test_node.wait_until_running("v").await;
    assert_eq!((&after["metadata"]["uid"], &after["status"]["phase"]), (&uid, &"Running".into()));
    assert_eq!(after["status"]["containerStatuses"][0]["restartCount"], 0);
    assert_eq!(test_node.visible_gpus("v")[0].1, 1000);
    test_node.delete_pod("v");
    test_node.wait_until_offered("volcano.sh/vgpu-number", Some("0")).await;
    write("");
    test_node.wait_until_offered("volcano.sh/vgpu-number", Some("20")).await;
}
