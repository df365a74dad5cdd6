//! What cannot be given is said in words: where there is no room now, where there never is, and where nobody knows what is meant.

use crate::stage::{SMI, Stage, bed, gpus, pod};
use partage_core::model::{Bytes, Cores};
use partage_testkit::agent::SETTINGS;
use partage_testkit::eventually;

#[test]
fn what_cannot_be_given_is_said_and_starts_when_it_can() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, SETTINGS).await;
        let asks = |memory: &str| format!("partage.dev/gpu: 1, partage.dev/memory: {memory}");
        // The node has as much, and no GPU ever has.
        stage.apply(&pod("large", &asks("45Gi"), "sleep 1000"));
        let said = stage.waits("large", "no room on node node1, also with nobody else on it").await;
        assert!(
            said.contains("delete the pod, and ask for 39 GiB of GPU memory instead of 45 GiB"),
            "{said}"
        );
        stage.delete("large");
        for name in ["first", "second"] {
            stage.apply(&pod(name, &asks("25Gi"), "sleep 1000"));
            stage.runs(name).await;
        }
        // The node has as much left, and no GPU has.
        stage.apply(&pod("third", &asks("20Gi"), "sleep 1000"));
        let said = stage.waits("third", "no room on node node1 now").await;
        assert!(said.contains("the container starts by itself when there is"), "{said}");
        logged_once(&stage, "third").await;
        // The scheduler itself sees that the node never has as much.
        stage.apply(&pod("never", &asks("100Gi"), "sleep 1000"));
        eventually("the scheduler says no", async || {
            let pod = stage.object("pod", "never")?;
            let said = pod["status"]["conditions"][0]["message"].as_str().unwrap_or_default().to_string();
            if said.contains("Insufficient partage.dev/memory") { Ok(()) } else { Err(said) }
        })
        .await;
        stage.delete("first");
        stage.runs("third").await;
        assert_eq!(stage.sees("third")[0].1, 20 << 10);
        // Kubelet calls no plugin for an amount: the container runs, and an event says why it has no GPU.
        stage.apply(&pod("uncounted", "partage.dev/memory: 1Gi", "sleep 1000"));
        stage.runs("uncounted").await;
        stage.event("NoGpuGiven", "add partage.dev/gpu").await;
        assert!(stage.exec("uncounted", "ls /usr/bin/nvidia-smi").is_err());
        stage.delete("uncounted");
        // What never started holds nothing.
        wrong_asks(&stage).await;
        stage.keeps([2, 2, 2]).await;
    });
}

/// Kubelet retries again and again; the agent's log says once whom it refused and why.
async fn logged_once(stage: &Stage<'_>, pod: &str) {
    let whose = format!("namespace=\"default\" pod=\"{pod}\" container=\"main\"");
    let lines = |message: &str| {
        let log = stage.agent.log();
        let of_pod = log.lines().filter(|line| line.contains(message) && line.contains(&whose));
        of_pod.map(String::from).collect::<Vec<_>>()
    };
    eventually("kubelet has retried", async || match lines("container start refused again").len() {
        2.. => Ok(()),
        retries => Err(format!("{retries} retries\n{}", stage.agent.log())),
    })
    .await;
    let logged = lines(" container start refused ").into_iter().filter(|line| line.contains(" INFO "));
    let logged: Vec<String> = logged.collect();
    assert!(logged.len() == 1 && logged[0].contains("no room on node node1 now"), "{logged:#?}");
}

async fn wrong_asks(stage: &Stage<'_>) {
    let wrong = [
        (
            "two-dialects",
            "partage.dev/gpu: 1, volcano.sh/vgpu-number: 1",
            "",
            "this container asks in 2 dialects",
        ),
        (
            "one-and-a-half",
            "tencent.com/vcuda-core: 150, tencent.com/vcuda-memory: 4",
            "",
            "150 is neither a part of a GPU nor whole ones",
        ),
        ("no-memory", "tencent.com/vcuda-core: 20", "", "20 % of a GPU needs memory too"),
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
        stage.apply(&pod(name, limits, "sleep 1000").replace(&named, &annotated));
    }
    for (name, _, _, words) in wrong {
        let said = stage.waits(name, words).await;
        assert!(said.contains(':'), "{said}");
    }
    for (name, ..) in wrong {
        stage.delete(name);
    }
}

#[test]
fn a_running_pod_gets_other_amounts_where_there_is_room() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, SETTINGS).await;
        let asks = "partage.dev/gpu: 1, partage.dev/memory: 4Gi, partage.dev/cores: 30";
        stage.apply(&pod("r", asks, "/programs/partage-sample trainer --memory 2Gi"));
        stage.apply(&pod("beside", "partage.dev/gpu: 1, partage.dev/memory: 8Gi", "sleep 1000"));
        stage.runs("r").await;
        stage.runs("beside").await;
        assert_eq!(stage.sees("r")[0].0, stage.sees("beside")[0].0, "on one GPU");
        eventually("its model is there", async || {
            let said = stage.bed.kubectl(&["logs", "r"]).map_err(|error| error.to_string())?;
            if said.contains("the model takes") { Ok(()) } else { Err(said) }
        })
        .await;

        resize(&stage, "r", "memory=6Gi, cores=40").await;
        stage.event("Resized", "memory=6Gi, cores=40").await;
        shows(&stage, 6).await;
        resize(&stage, "r", "memory=3Gi").await;
        shows(&stage, 3).await;
        for (wish, words) in [
            ("memory=33Gi", "of memory free for this pod, 33 GiB requested"),
            ("memory=1Gi", "free memory in the program first"),
            ("memory=lots", "memory=lots"),
            ("other: memory=4Gi", "container other has no share"),
        ] {
            resize(&stage, "r", wish).await;
            stage.event("ResizeRefused", words).await;
            assert_eq!(stage.sees("r")[0].1, 3 << 10, "{wish}");
        }
        several_containers(&stage).await;
        nobody_may(&stage).await;

        // What was granted last holds, also for an agent that has just come.
        stage.agent.process().kill();
        resize(&stage, "r", "memory=5Gi").await;
        assert_eq!(stage.sees("r")[0].1, 3 << 10);
        stage.agent.process().start().unwrap();
        shows(&stage, 5).await;
        stage.agent.process().restart().unwrap();
        shows(&stage, 5).await;
        let grant = stage.grant("r").await;
        assert_eq!(grant.grants[0].shares[0].memory_bytes, Some(Bytes(5 << 30)));
        assert_eq!(grant.grants[0].shares[0].cores.map(|cores| cores.as_millipercent()), Some(40_000));
    });
}

/// Each of a pod's containers by its name.
async fn several_containers(stage: &Stage<'_>) {
    let one = |name: &str, memory: &str| {
        format!(
            "  - {{name: {name}, image: 'localhost/debian:bed', imagePullPolicy: Never, command: [sleep, '1000'], \
             resources: {{limits: {{partage.dev/gpu: 1, partage.dev/memory: {memory}, partage.dev/cores: 5}}}}}}\n"
        )
    };
    let head = "apiVersion: v1\nkind: Pod\nmetadata: {name: both}\nspec:\n  terminationGracePeriodSeconds: 1\n  containers:\n";
    stage.apply(&[head, &one("train", "2Gi"), &one("serve", "1Gi")].concat());
    stage.runs("both").await;
    let sees = |container: &str| gpus(&stage.exec_in("both", container, SMI).unwrap())[0].1;
    resize(stage, "both", "memory=3Gi").await;
    stage.event("ResizeRefused", "several containers have shares: write whose").await;
    assert_eq!((sees("train"), sees("serve")), (2 << 10, 1 << 10));
    // One of the two does not fit, and neither is changed.
    resize(stage, "both", "train: memory=3Gi; serve: memory=39Gi").await;
    stage.told(("Pod", "both"), "ResizeRefused", "of memory free for this pod, ").await;
    assert_eq!((sees("train"), sees("serve")), (2 << 10, 1 << 10));
    resize(stage, "both", "train: memory=3Gi; serve: memory=2Gi, cores=10").await;
    stage.event("Resized", "train: memory=3Gi; serve: memory=2Gi, cores=10").await;
    assert_eq!((sees("train"), sees("serve")), (3 << 10, 2 << 10));
    eventually("the pod says so, too", async || {
        let grant = stage.grant("both").await;
        let shares = grant.grants.iter().map(|one| &one.shares[0]);
        let said: Vec<_> = shares.map(|share| (share.memory_bytes, share.cores)).collect();
        let wanted = [(3, 5), (2, 10)].map(|(gib, cores)| (Some(Bytes(gib << 30)), Cores::percent(cores)));
        if said == wanted { Ok(()) } else { Err(format!("{said:?}")) }
    })
    .await;
    stage.delete("both");
}

/// Where the settings say so, wishes are refused.
async fn nobody_may(stage: &Stage<'_>) {
    stage.agent.write_settings(&format!("{SETTINGS}resize: off\n")).unwrap();
    settings_are_read(stage, 1).await;
    resize(stage, "r", "memory=4Gi").await;
    stage.event("ResizeRefused", "(resize: off): change the manifest").await;
    assert_eq!(stage.sees("r")[0].1, 3 << 10);
    stage.agent.write_settings(SETTINGS).unwrap();
    settings_are_read(stage, 2).await;
}

/// Waits until the agent has read other settings so many times.
async fn settings_are_read(stage: &Stage<'_>, times: usize) {
    eventually("the settings are read", async || {
        let read = stage.agent.log().matches("the settings have changed").count();
        if read >= times { Ok(()) } else { Err(stage.agent.log()) }
    })
    .await;
}

async fn resize(stage: &Stage<'_>, pod: &str, wish: &str) {
    let wish = format!("partage.dev/resize={wish}");
    stage.bed.kubectl(&["annotate", "--overwrite", "pod", pod, &wish]).unwrap();
}

/// Waits until the pod and its annotation show so many GiB.
async fn shows(stage: &Stage<'_>, gib: u64) {
    eventually(&format!("{gib} GiB"), async || {
        let seen = stage.sees("r")[0].1;
        let granted = stage.grant("r").await.grants[0].shares[0].memory_bytes;
        match seen == gib << 10 && granted == Some(Bytes(gib << 30)) {
            true => Ok(()),
            false => Err(format!("{seen} MiB, {granted:?}\n{}", stage.agent.log())),
        }
    })
    .await;
}
