//! Every container of a pod by itself: its own part, whenever it runs and however often.

use crate::stage::{SMI, Stage, bed, gpus, pod};
use partage_core::model::Bytes;
use partage_testkit::agent::SETTINGS;
use partage_testkit::eventually;
use std::os::unix::fs::MetadataExt;

/// Containers of every kind. What init containers see is in their logs.
fn many() -> String {
    let one = |name: &str, limits: &str, command: &str, more: &str| {
        format!(
            "  - {{name: {name}, image: 'localhost/debian:bed', imagePullPolicy: Never, command: [sh, -c, '{command}'], \
             resources: {{limits: {{{limits}}}}}{more}}}\n"
        )
    };
    let asks = |count: u32, memory: &str| format!("partage.dev/gpu: {count}, partage.dev/memory: {memory}");
    [
        "apiVersion: v1\nkind: Pod\nmetadata: {name: many}\nspec:\n  restartPolicy: Never\n  terminationGracePeriodSeconds: 1\n",
        "  initContainers:\n",
        &one("small", &asks(1, "1Gi"), SMI, ""),
        &one("beside", &asks(1, "2Gi"), "sleep 1000", ", restartPolicy: Always"),
        &one("large", &asks(1, "20Gi"), SMI, ""),
        "  containers:\n",
        &one("one", &asks(1, "4Gi"), "sleep 1000", ""),
        &one("two", &asks(2, "3Gi"), "sleep 1000", ""),
        &one("none", "", "sleep 1000", ""),
    ]
    .concat()
}

#[test]
fn every_container_has_its_own_part() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, SETTINGS).await;
        every_kind(&stage).await;
        strict_and_small_images(&stage).await;
        a_crash_changes_nothing(&stage).await;
    });
}

async fn every_kind(stage: &Stage<'_>) {
    stage.apply(&many());
    stage.runs("many").await;
    let memory = |said: &str| gpus(said).into_iter().map(|(_, memory)| memory).collect::<Vec<_>>();
    let logged = |container: &str| stage.bed.kubectl(&["logs", "many", "-c", container]).unwrap();
    assert_eq!(memory(&logged("small")), [1 << 10]);
    assert_eq!(memory(&logged("large")), [20 << 10]);
    for (container, sees) in [("beside", vec![2 << 10]), ("one", vec![4 << 10]), ("two", vec![3 << 10; 2])] {
        assert_eq!(memory(&stage.exec_in("many", container, SMI).unwrap()), sees, "{container}");
    }
    let two = gpus(&stage.exec_in("many", "two", SMI).unwrap());
    assert_ne!(two[0].0, two[1].0, "two shares are of two GPUs");
    let grant = stage.grant("many").await;
    let granted: Vec<_> = grant.grants.iter().map(|one| (one.container.as_str(), one.init)).collect();
    assert_eq!(
        granted,
        [("small", true), ("beside", false), ("large", true), ("one", false), ("two", false)]
    );
    // A container that asks nothing, and one that somebody adds later, have nothing.
    stage
        .bed
        .kubectl(&[
            "debug",
            "many",
            "--image=localhost/debian:bed",
            "--container=added",
            "--",
            "sleep",
            "1000",
        ])
        .unwrap();
    for container in ["none", "added"] {
        eventually(&format!("{container} runs without a GPU"), async || {
            let said = stage.exec_in(
                "many",
                container,
                "ls -d /usr/local/partage /usr/bin/nvidia-smi 2>&1; true",
            )?;
            if said.matches("No such file").count() == 2 { Ok(()) } else { Err(said) }
        })
        .await;
    }
    stage.delete("many");
    stage.nothing_is_kept().await;
}

/// A user who is not root, on files that nobody can write; and an image in which nothing of the driver runs.
async fn strict_and_small_images(stage: &Stage<'_>) {
    let asks = "partage.dev/gpu: 1, partage.dev/memory: 2Gi";
    let security = "    securityContext: {runAsUser: 1000, readOnlyRootFilesystem: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}\n";
    let strict = pod("strict", asks, "sleep 1000")
        .replace("    volumeMounts:", &format!("{security}    volumeMounts:"));
    stage.apply(&strict);
    stage.apply(&pod("small", asks, "sleep 1000").replace("localhost/debian:bed", "localhost/busybox:bed"));
    stage.runs("strict").await;
    stage.runs("small").await;
    assert_eq!(
        stage.exec("strict", "id -u; touch /x 2>&1 || true").unwrap(),
        "1000\ntouch: cannot touch '/x': Read-only file system\n"
    );
    assert_eq!(stage.sees("strict")[0].1, 2 << 10);
    let takes = stage.exec("strict", "/programs/partage-sample trainer --memory 1Gi --seconds 0.1").unwrap();
    assert!(takes.contains("the model takes 1.0 GiB"), "{takes}");
    assert_eq!(stage.exec("small", "echo fine | grep -c fine").unwrap(), "1\n");
    stage.delete("strict");
    stage.delete("small");
    stage.nothing_is_kept().await;
}

/// A container that crashes starts again with what it had.
async fn a_crash_changes_nothing(stage: &Stage<'_>) {
    let asks = "partage.dev/gpu: 1, partage.dev/memory: 3Gi, partage.dev/cores: 20";
    let crash = pod("crash", asks, "until rm /crash/now 2>/dev/null; do sleep 0.1; done; exit 1")
        .replace("restartPolicy: Never", "restartPolicy: Always")
        .replace("readOnly: true}]", "readOnly: true}, {name: crash, mountPath: /crash}]")
        .replace("volumes: [", "volumes: [{name: crash, emptyDir: {}}, ");
    stage.apply(&crash);
    stage.runs("crash").await;
    let (grant, seen) = (stage.grant("crash").await, stage.sees("crash"));
    assert_eq!(grant.grants[0].shares[0].memory_bytes, Some(Bytes(3 << 30)));
    let regions = stage.agent.path("/run/partage/regions").unwrap();
    let files = || -> Vec<(std::ffi::OsString, u64)> {
        let folders = std::fs::read_dir(&regions).unwrap().map(|entry| entry.unwrap());
        folders
            .map(|folder| {
                let limits = std::fs::metadata(folder.path().join("limits")).unwrap();
                (folder.file_name(), limits.ino())
            })
            .collect()
    };
    let before = files();
    assert_eq!(before.len(), 1);
    // Not before the command that says so has ended: what runs in a container ends with it.
    stage.exec("crash", "(sleep 1; touch /crash/now) > /dev/null 2>&1 &").unwrap();
    eventually("it started again", async || {
        let pod = stage.object("pod", "crash")?;
        let status = &pod["status"]["containerStatuses"][0];
        match status["restartCount"] == 1 && status["ready"] == true {
            true => Ok(()),
            false => Err(format!("{status}\n{}", stage.agent.log())),
        }
    })
    .await;
    assert_eq!(stage.sees("crash"), seen);
    assert_eq!(stage.grant("crash").await, grant);
    assert_eq!(files(), before, "the same region");
}
