//! Settings change while everything runs.

use crate::seeds::{OWN_PROGRAM, USABLE, with_image};
use crate::stage::{Stage, bed, pod};
use partage_testkit::agent::SETTINGS;
use partage_testkit::binaries;
use partage_testkit::eventually;
use std::collections::BTreeSet;
use std::process::Command;

/// A pod as HAMi's users have them.
const HAMI: &str = include_str!("../../../../examples/hami/one-part.yaml");

#[test]
fn changed_settings_hold_and_harm_nobody() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, SETTINGS).await;
        let write = |more: &str| stage.agent.write_settings(&format!("{SETTINGS}{more}\n")).unwrap();
        stage.offers("partage.dev/gpu", Some("20")).await;

        write("sharesPerGpu: 3");
        stage.offers("partage.dev/gpu", Some("6")).await;
        stage.offers("volcano.sh/vgpu-number", Some("6")).await;
        write("sharesPerGpu: 25\nawsSlots: 4");
        stage.offers("partage.dev/gpu", Some("50")).await;
        stage.offers("k8s.amazonaws.com/vgpu", Some("8")).await;

        labels(&stage, &write).await;
        labels_of_the_replaced_systems(&stage, &write).await;
        this_node_differs(&stage, &write).await;
        a_file_that_cannot_be_used(&stage, &write).await;
        more_is_promised_than_there_is(&stage, &write).await;
        a_dialect_comes(&stage, &write).await;
        a_dialect_goes(&stage, &write).await;
        memory_in_mebibytes(&stage).await;
    });
}

/// A label that the installation does not allow is told of, and holds up nothing else.
async fn labels(stage: &Stage<'_>, write: &impl Fn(&str)) {
    let shown = async |wanted: Option<&str>| {
        eventually(&format!("the label is {wanted:?}"), async || {
            let node = stage.object("node", "node1")?;
            let label = node["metadata"]["labels"]["partage.dev/pool"].as_str();
            if label == wanted { Ok(()) } else { Err(format!("{label:?}\n{}", stage.agent.log())) }
        })
        .await;
    };
    write("labels: {foreign: \"true\"}\nvolcanoMemoryFactor: 1000");
    stage.event("PublishRefused", "label foreign of a node is none of Partage's").await;
    stage.offers("volcano.sh/vgpu-memory", Some("80")).await;
    write("labels: {partage.dev/pool: a}");
    shown(Some("a")).await;
    write("labels: {partage.dev/pool: b}");
    shown(Some("b")).await;
    // Others' labels are nobody's to remove.
    stage.bed.kubectl(&["label", "node", "node1", "foreign=yes"]).unwrap();
    write("");
    shown(None).await;
    assert_eq!(stage.object("node", "node1").unwrap()["metadata"]["labels"]["foreign"], "yes");
}

/// What the replaced systems' users select nodes by, where the installation names them.
async fn labels_of_the_replaced_systems(stage: &Stage<'_>, write: &impl Fn(&str)) {
    let theirs =
        [("gpushare", "true"), ("k8s.amazonaws.com/accelerator", "vgpu"), ("nvidia-device-enable", "enable")];
    let shown = async |there: bool| {
        eventually(&format!("labels of the replaced systems are there: {there}"), async || {
            let labels = stage.object("node", "node1")?["metadata"]["labels"].clone();
            match theirs.iter().all(|(key, value)| (labels[key] == *value) == there) {
                true => Ok(()),
                false => Err(format!("{labels}\n{}", stage.agent.log())),
            }
        })
        .await;
    };
    let helm = match binaries::helm(&binaries::Settings::from_environment()) {
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
    stage.apply(&String::from_utf8(rendered.stdout).unwrap());
    let text: Vec<String> = theirs.iter().map(|(key, value)| format!("{key}: '{value}'")).collect();
    write(&format!("labels: {{{}}}", text.join(", ")));
    shown(true).await;
    write("");
    shown(false).await;
}

/// What is different on some nodes: the first that names this one holds, key by key.
async fn this_node_differs(stage: &Stage<'_>, write: &impl Fn(&str)) {
    write(
        "sharesPerGpu: 3\nawsSlots: 5\nnodes:\n- {names: [other], sharesPerGpu: 6}\n- {names: [node*], sharesPerGpu: 4}\n- {names: ['*'], awsSlots: 7}",
    );
    stage.offers("partage.dev/gpu", Some("8")).await;
    stage.offers("k8s.amazonaws.com/vgpu", Some("10")).await;
}

/// Memory is promised one and a half times: three pods of three quarters of a GPU each are on two of them.
async fn more_is_promised_than_there_is(stage: &Stage<'_>, write: &impl Fn(&str)) {
    let once = stage.has("partage.dev/memory").unwrap();
    write("memoryOvercommitPercent: 150");
    stage.amount("partage.dev/memory", once / 2 * 3).await;
    stage.offers("partage.dev/memory-percent", Some("300")).await;
    let names = ["one", "two", "three"];
    for name in names {
        stage.apply(&pod(name, "partage.dev/gpu: 1, partage.dev/memory: 29Gi", "sleep 1000"));
    }
    let mut cards = BTreeSet::new();
    for name in names {
        stage.runs(name).await;
        let seen = stage.sees(name);
        assert_eq!(seen[0].1, 29 << 10, "{name}");
        cards.insert(seen[0].0.clone());
    }
    assert_eq!(cards.len(), 2);
    // Who was promised it keeps it, and nobody else gets as much.
    write("");
    stage.amount("partage.dev/memory", 3 * (29 << 30)).await;
    stage.kubelet_restarts().await;
    for name in names {
        let pod = stage.runs(name).await;
        assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);
    }
    stage.bed.kubectl(&["delete", "pods", "--all", "--grace-period=1", "--wait"]).unwrap();
    stage.amount("partage.dev/memory", once).await;
}

/// HAMi's pods, where `nvidia.com/gpu` is nobody else's.
async fn a_dialect_comes(stage: &Stage<'_>, write: &impl Fn(&str)) {
    write("dialects: [native, volcano, vcuda, aws, gpushare, hami]");
    for (resource, amount) in [
        ("nvidia.com/gpu", 20),
        ("nvidia.com/gpumem", 2 * USABLE),
        ("nvidia.com/gpumem-percentage", 200),
        ("nvidia.com/gpucores", 200),
    ] {
        stage.offers(resource, Some(&amount.to_string())).await;
    }
    stage.apply(&with_image(HAMI, OWN_PROGRAM));
    stage.runs("hami").await;
    let seen = stage.sees("hami");
    assert_eq!(seen.iter().map(|(_, memory)| *memory).collect::<Vec<_>>(), [3000]);
    let environment = stage.exec("hami", "env").unwrap();
    for line in [
        "CUDA_DEVICE_MEMORY_LIMIT_0=3000m".to_string(),
        "CUDA_DEVICE_SM_LIMIT=30".to_string(),
        format!("NVIDIA_VISIBLE_DEVICES={}", seen[0].0),
    ] {
        assert!(environment.lines().any(|have| have == line), "{line} is not in {environment}");
    }
    let grant = stage.grant("hami").await;
    assert_eq!(grant.grants[0].shares[0].cores.map(|cores| cores.as_millipercent()), Some(30_000));
    assert_eq!(stage.agrees().await.len(), 1);
    stage.delete("hami");
    write("");
    stage.offers("nvidia.com/gpu", Some("0")).await;
}

/// Kubelet counts a device for each MiB of a GPU of 48 GB, and gives some thousand of them to a pod. For more GPUs it would have to
/// count more than it can.
async fn memory_in_mebibytes(stage: &Stage<'_>) {
    stage.agent.write_settings(&format!("{SETTINGS}gpushareUnit: MiB\n")).unwrap();
    let devices = 2 * USABLE;
    let words = format!(
        "aliyun.com/gpu-mem would be {devices} devices on node node1, and kubelet takes 50000 of one resource at the most: count it in GiB"
    );
    stage.event("SettingsRefused", &words).await;
    // Other GPUs than those of a pod that runs would be no machine's.
    stage.delete("next");
    let large = SETTINGS.replace("{gpus: 2, model: A100-SXM4-40GB}", "{gpus: 1, model: L40S}");
    assert_ne!(large, SETTINGS);
    stage.agent.write_settings(&format!("{large}gpushareUnit: MiB\ndialects: [native, gpushare]\n")).unwrap();
    stage.agent.process().restart().unwrap();
    stage.is_ready().await;
    stage.offers("partage.dev/gpu", Some("10")).await;
    // Kubelet hears of every resource on its own, and of this one last: its list is the longest.
    let devices =
        eventually("the node offers a device for each MiB", async || match stage.has("aliyun.com/gpu-mem") {
            Ok(devices) if (45_000..50_000).contains(&devices) => Ok(devices),
            has => Err(format!("{has:?}\n{}", stage.agent.log())),
        })
        .await;
    // Not many more: when it restarts, kubelet compares every device with all that are held.
    stage.apply(&pod("mebibytes", "aliyun.com/gpu-mem: 3000", "sleep 1000"));
    stage.runs("mebibytes").await;
    assert_eq!(stage.sees("mebibytes")[0].1, 3000);
    stage.kubelet_restarts().await;
    stage.amount("aliyun.com/gpu-mem", devices).await;
    assert_eq!(stage.agrees().await.len(), 1);
    stage.delete("mebibytes");
    stage.nothing_is_kept().await;
}

async fn a_file_that_cannot_be_used(stage: &Stage<'_>, write: &impl Fn(&str)) {
    write("sharesPerGpu: 7");
    stage.offers("partage.dev/gpu", Some("14")).await;
    write("sharesPerGPU: 9");
    stage.event("SettingsRefused", "sharesPerGPU").await;
    write("sharesPerGpu: 0");
    stage.event("SettingsRefused", "sharesPerGpu: 0 shares of one GPU").await;
    stage.offers("partage.dev/gpu", Some("14")).await;
    // They are good for a start of containers, too.
    stage.apply(&pod("a", "partage.dev/gpu: 1, partage.dev/memory: 1Gi", "sleep 1000"));
    stage.runs("a").await;
    stage.delete("a");
    write("");
    stage.offers("partage.dev/gpu", Some("20")).await;
}

/// Pods of a dialect that is switched off live on, also through a restart of kubelet, which admits them once more.
async fn a_dialect_goes(stage: &Stage<'_>, write: &impl Fn(&str)) {
    stage.apply(&pod("v", "volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 1000", "sleep 1000"));
    stage.runs("v").await;
    write("dialects: [native]");
    for resource in ["k8s.amazonaws.com/vgpu", "tencent.com/vcuda-core"] {
        stage.offers(resource, Some("0")).await;
    }
    // What is given is all that is left.
    stage.offers("volcano.sh/vgpu-number", Some("1")).await;
    let uid = stage.object("pod", "v").unwrap()["metadata"]["uid"].clone();
    stage.kubelet_restarts().await;
    // Where the next one runs, the others were admitted.
    stage.apply(&pod("next", "partage.dev/gpu: 1, partage.dev/memory: 1Gi", "sleep 1000"));
    stage.runs("next").await;
    let after = stage.runs("v").await;
    assert_eq!((&after["metadata"]["uid"], &after["status"]["phase"]), (&uid, &"Running".into()));
    assert_eq!(after["status"]["containerStatuses"][0]["restartCount"], 0);
    assert_eq!(stage.sees("v")[0].1, 1000);
    stage.delete("v");
    stage.offers("volcano.sh/vgpu-number", Some("0")).await;
    write("");
    stage.offers("volcano.sh/vgpu-number", Some("20")).await;
}
