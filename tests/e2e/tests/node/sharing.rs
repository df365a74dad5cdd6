//! Pods that share a GPU keep to their parts, and a whole GPU is one pod's alone.

use crate::stage::{SMI, Stage, bed, gpus, pod};
use partage_sim_node::profile::Profile as Card;
use partage_testkit::agent::install_driver;
use partage_testkit::bed::{Bed, Cgroups, NodeProfile, Profile};
use partage_testkit::eventually;
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};

const CARD: &str = "A100-SXM4-40GB";
const SETTINGS: &str = "driver: simulated\nsimulated: {gpus: 3, model: A100-SXM4-40GB}\nmetrics: {address: '127.0.0.1:9394', anonymous: true}\n";
const SIMULATED: &str = "/var/lib/partage/simulated";
/// All that programs can have of such a GPU, in MiB.
const WHOLE: u64 = 40340;
/// What a process holds while it computes, in MiB: its model.
const MODEL_A: u64 = 1024;
const MODEL_B: u64 = 2048;

#[test]
fn two_pods_on_one_gpu_stay_within_their_parts() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut stage = Stage::set(&bed, SETTINGS).await;
        let train = |mib: u64| format!("/programs/partage-sample trainer --every 1 --memory {mib}Mi");
        let asks = |memory: u64, cores: u64| {
            format!("partage.dev/gpu: 1, partage.dev/memory: {memory}Mi, partage.dev/cores: {cores}")
        };
        // A program that gets no processor cannot use a GPU, and who asks for none gets what all others leave.
        let computes = |name: &str, asks: &str, command: &str| {
            pod(name, asks, command).replace("resources: {", "resources: {requests: {cpu: 250m}, ")
        };
        stage.apply(&computes("a", &asks(4096, 30), &train(MODEL_A)));
        stage.apply(&computes("b", &asks(8192, 70), &train(MODEL_B)));
        stage.runs("a").await;
        stage.runs("b").await;
        let (a, b) = (stage.sees("a"), stage.sees("b"));
        assert_eq!((a[0].1, b[0].1), (4096, 8192));
        assert_eq!(a[0].0, b[0].0, "on one GPU");

        each_sees_its_own(&stage).await;
        compute_is_kept(&stage).await;
        memory_ends_at_the_limit(&stage).await;
        // Others of the container have come and gone.
        compute_is_kept(&stage).await;
        // Nor does it need the agent.
        stage.agent.process().kill();
        compute_is_kept(&stage).await;
        stage.start_again().await;
        compute_is_kept(&stage).await;
        whole_gpus_are_not_shared(&stage, &a[0].0).await;
    });
}

/// A driver API client: out of memory at its limit, and not before.
async fn memory_ends_at_the_limit(stage: &Stage<'_>) {
    // What the driver takes for a process counts, as on a GPU of that size; twice, for the trainer is there, too.
    let context = Card::named(CARD).unwrap().memory.context >> 20;
    let room = 4096 - MODEL_A - 2 * context;
    let take = |mib: u64| {
        stage.exec("a", &format!("/programs/partage-sample trainer --memory {mib}Mi --seconds 0.1"))
    };
    eventually("the trainer has its model", async || {
        let said = stage.bed.kubectl(&["logs", "a"]).map_err(|error| error.to_string())?;
        if said.contains("the model takes") { Ok(()) } else { Err(said) }
    })
    .await;
    // Kernels take a little, too.
    let fits = take(room - 2).unwrap();
    assert!(fits.contains("the model takes"), "{fits}");
    let beyond = take(room + 1).unwrap_err();
    assert!(beyond.contains("out of memory"), "{beyond}");
    assert!(beyond.contains("of 4.0 GiB"), "it sees its own total: {beyond}");
}

/// `nvidia-smi` lists a container's own processes.
async fn each_sees_its_own(stage: &Stage<'_>) {
    for (name, model) in [("a", MODEL_A), ("b", MODEL_B)] {
        sees_itself(stage, name, "nvidia-smi", model).await;
    }
}

/// One process with a model of so many MiB.
async fn sees_itself(stage: &Stage<'_>, pod: &str, smi: &str, model: u64) {
    let context = Card::named(CARD).unwrap().memory.context >> 20;
    let question = format!("{smi} --query-compute-apps=used_memory --format=csv,noheader,nounits");
    eventually(&format!("{pod} sees itself"), async || {
        let said = stage.exec(pod, &question)?;
        let memory: Vec<u64> = said.lines().filter_map(|line| line.trim().parse().ok()).collect();
        if memory == [model + context] { Ok(()) } else { Err(format!("{said}, context {context}")) }
    })
    .await;
}

/// What each had of the GPU, by the memory it holds. Again where the machine had no time for one of them.
async fn compute_is_kept(stage: &Stage<'_>) {
    let served = || {
        let home = "/var/lib/agent-test/partage";
        let words = [
            &format!("PARTAGE_SIM_DIR={SIMULATED}"),
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
            serde_json::from_str(&stage.agent.node().run("/usr/bin/env", words).unwrap()).unwrap();
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
    // One that is right by chance is not enough.
    let mut right = 0;
    eventually("30 and 70 of 100, twice in a row", async || {
        let (began, before) = (Instant::now(), served());
        tokio::time::sleep(Duration::from_secs(2)).await;
        let (took, after) = (began.elapsed(), served());
        let ([(_, a0), (_, b0)], [(_, a1), (_, b1)]) = (&before[..], &after[..]) else {
            right = 0;
            return Err(format!("{before:?} {after:?}"));
        };
        let both = a1 - a0 + b1 - b0;
        let part = (a1 - a0) / both;
        // Where the GPU waits for programs that get no processor, who gets one decides; not more than so much.
        let starved = both < 0.85 * took.as_secs_f64();
        right = if (0.27..0.33).contains(&part) || (starved && part < 0.4) { right + 1 } else { 0 };
        if right == 2 { Ok(()) } else { Err(format!("{part}: {before:?}, then {after:?}")) }
    })
    .await;
}

/// Of three GPUs, the second and the third.
async fn whole_gpus_are_not_shared(stage: &Stage<'_>, shared: &str) {
    let exclusive = pod("alone", "partage.dev/gpu: 1", "sleep 1000")
        .replace("{name: alone}", "{name: alone, annotations: {partage.dev/exclusive: \"true\"}}");
    stage.apply(&exclusive);
    stage.apply(&pod("card", "tencent.com/vcuda-core: 100", "sleep 1000"));
    stage.runs("alone").await;
    stage.runs("card").await;
    let (alone, card) = (stage.sees("alone"), stage.sees("card"));
    assert_eq!((alone[0].1, card[0].1), (WHOLE, WHOLE));
    assert!(alone[0].0 != card[0].0 && alone[0].0 != shared && card[0].0 != shared);
    // One GPU's compute is promised, and the others are not to be shared.
    stage.apply(&pod("third", "partage.dev/gpu: 1, partage.dev/memory: 1Gi", "sleep 1000"));
    let said = stage.waits("third", "no room on node node1 now").await;
    assert_eq!(said.matches("is held whole by another pod").count(), 2, "{said}");
    stage.delete("alone");
    stage.runs("third").await;
    assert_eq!(stage.sees("third"), [(alone[0].0.clone(), 1024)]);
    stage.delete("third");
    stage.delete("card");
    stage.apply(&pod("cards", "tencent.com/vcuda-core: 200", "sleep 1000"));
    stage.runs("cards").await;
    let cards = stage.sees("cards");
    assert_eq!(cards.len(), 2);
    assert!(cards.iter().all(|(gpu, memory)| gpu != shared && *memory == WHOLE), "{cards:?}");
}

/// On nodes of both kinds of cgroups, with the driver's files where a host has them.
#[test]
fn a_pod_has_the_device_nodes_of_its_gpus_and_no_others() {
    let profile = Profile::control_plane()
        .node(NodeProfile::new("old").cgroups(Cgroups::V1))
        .node(NodeProfile::new("new").cgroups(Cgroups::V2))
        .debian();
    let Some(bed) = Bed::for_test(profile) else { return };
    for node in ["old", "new"] {
        install_driver(bed.node(node).unwrap(), Path::new(partage_e2e::partage()), CARD, "/var/lib/driver")
            .unwrap();
        bed.block_on(async {
            let settings = "driver: nvidia\nmetrics: {address: '127.0.0.1:9394', anonymous: true}\n";
            let stage = Stage::set_on(&bed, node, settings).await;
            own_nodes_only(&stage, node).await;
            limits_hold(&stage, node).await;
        });
    }
}

/// A pod on a node with the driver's files. The simulated driver's own would not be in a container of NVIDIA's.
fn on(node: &str, name: &str, gib: u64) -> String {
    pod(name, &format!("partage.dev/gpu: 1, partage.dev/memory: {gib}Gi"), "sleep 1000")
        .replace("  volumes: [", &format!("  nodeName: {node}\n  volumes: ["))
        .replace(
            "hostPath: {path: /var/lib/programs}}]",
            "hostPath: {path: /var/lib/programs}}, {name: driver, hostPath: {path: /var/lib/driver}}]",
        )
        .replace("readOnly: true}]", "readOnly: true}, {name: driver, mountPath: /var/lib/driver}]")
}

/// Memory, own processes, and who goes around limits: on both kinds of cgroups.
async fn limits_hold(stage: &Stage<'_>, node: &str) {
    let beside = format!("{node}-2");
    stage.apply(&on(node, &beside, 4));
    stage.runs(&beside).await;
    let gpu = stage.grant(&beside).await.grants[0].shares[0].gpu.to_string();
    // The simulated driver's own files, which a container of NVIDIA's would not have, show it all of them.
    let trainer = format!("CUDA_VISIBLE_DEVICES={gpu} /programs/partage-sample trainer");
    let smi = format!("nvidia-smi --id={gpu}");
    let mut neighbour = None;
    for name in [format!("{node}-0"), format!("{node}-1")] {
        if stage.grant(&name).await.grants[0].shares[0].gpu.as_str() == gpu {
            neighbour = Some(name);
        }
    }
    let pods = [(neighbour.unwrap(), 1024), (beside.clone(), 2048)];
    for (name, mib) in &pods {
        let works = format!("{trainer} --memory {mib}Mi --seconds 3000 > /dev/null 2>&1 &");
        stage.exec(name, &works).unwrap();
    }
    for (name, mib) in &pods {
        sees_itself(stage, name, &smi, *mib).await;
    }
    let much = stage.exec(&beside, &format!("{trainer} --memory 2Gi --seconds 0.1")).unwrap_err();
    assert!(much.contains("out of memory") && much.contains("of 4.0 GiB"), "{much}");
    let usage = "/usr/local/partage/region/usage";
    let forget = format!("head -c $(stat -c %s {usage}) /dev/zero | dd of={usage} conv=notrunc status=none");
    stage.exec(&beside, &forget).unwrap();
    stage.told(("Pod", &beside), "BypassSuspected", "goes around its limits").await;
    sees_itself(stage, &pods[0].0, &smi, pods[0].1).await;
}

async fn own_nodes_only(stage: &Stage<'_>, node: &str) {
    for number in [0, 1] {
        let name = format!("{node}-{number}");
        stage.apply(&on(node, &name, 30));
        stage.runs(&name).await;
        let inventory = stage.inventory().unwrap();
        let granted = stage.grant(&name).await.grants[0].shares[0].gpu.to_string();
        let seen = stage.exec(&name, &format!("{SMI} --id={granted}")).unwrap();
        assert_eq!(gpus(&seen), [(granted.clone(), 30 << 10)]);
        let own = inventory.gpus.iter().find(|gpu| gpu.uuid.as_str() == granted).unwrap().minor;
        let other = 1 - own;
        let nodes = stage.exec(&name, "cd /dev; ls -d nvidia*").unwrap();
        assert_eq!(nodes, format!("nvidia-uvm\nnvidia{own}\nnvidiactl\n"));
        let opened = |device: &str| stage.exec(&name, &format!("exec 2>&1; true < {device}; true")).unwrap();
        assert!(opened(&format!("/dev/nvidia{own}")).contains("No such device or address"), "its own");
        assert!(opened("/dev/nvidiactl").contains("No such device or address"), "everybody's");
        stage.exec(&name, &format!("mknod /dev/other c 195 {other}")).unwrap();
        let refused = opened("/dev/other");
        assert!(refused.contains("Operation not permitted"), "{refused}");
    }
}
