//! Every container of a pod has a grant of its own, whenever it runs and however often.

use crate::test_node::{GPU_QUERY_NOUNITS, TestNode, bed, parse_gpus, pod};
use partage_core::model::Bytes;
use partage_testkit::agent::SIMULATED_SETTINGS;
use partage_testkit::eventually;
use std::os::unix::fs::MetadataExt;

/// Returns a pod with containers of every kind. Init containers print what they see.
fn pod_with_all_container_kinds() -> String {
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
        &one("small", &asks(1, "1Gi"), GPU_QUERY_NOUNITS, ""),
        &one("beside", &asks(1, "2Gi"), "sleep 1000", ", restartPolicy: Always"),
        &one("large", &asks(1, "20Gi"), GPU_QUERY_NOUNITS, ""),
        "  containers:\n",
        &one("one", &asks(1, "4Gi"), "sleep 1000", ""),
        &one("two", &asks(2, "3Gi"), "sleep 1000", ""),
        &one("none", "", "sleep 1000", ""),
    ]
    .concat()
}

#[test]
fn every_container_kind_gets_its_own_share() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        check_every_container_kind(&test_node).await;
        check_restricted_and_static_images(&test_node).await;
        check_crash_keeps_grant_and_region(&test_node).await;
    });
}

async fn check_every_container_kind(test_node: &TestNode<'_>) {
    test_node.apply(&pod_with_all_container_kinds());
    test_node.wait_until_running("many").await;
    let memory = |output: &str| parse_gpus(output).into_iter().map(|(_, memory)| memory).collect::<Vec<_>>();
    let logged = |container: &str| test_node.bed.kubectl(&["logs", "many", "-c", container]).unwrap();
    assert_eq!(memory(&logged("small")), [1 << 10]);
    assert_eq!(memory(&logged("large")), [20 << 10]);
    for (container, sees) in [("beside", vec![2 << 10]), ("one", vec![4 << 10]), ("two", vec![3 << 10; 2])] {
        assert_eq!(
            memory(&test_node.exec_in("many", container, GPU_QUERY_NOUNITS).unwrap()),
            sees,
            "{container}"
        );
    }
    let two = parse_gpus(&test_node.exec_in("many", "two", GPU_QUERY_NOUNITS).unwrap());
    assert_ne!(two[0].0, two[1].0, "two shares are on two GPUs");
    let grant = test_node.wait_for_grant("many").await;
    let granted: Vec<_> = grant.grants.iter().map(|one| (one.container.as_str(), one.init)).collect();
    assert_eq!(
        granted,
        [("small", true), ("beside", false), ("large", true), ("one", false), ("two", false)]
    );
    // A container without a request, and a debug container that is added later, have no GPU.
    test_node
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
            let output = test_node.exec_in(
                "many",
                container,
                "ls -d /usr/local/partage /usr/bin/nvidia-smi 2>&1; true",
            )?;
            if output.matches("No such file").count() == 2 { Ok(()) } else { Err(output) }
        })
        .await;
    }
    test_node.delete_pod("many");
    test_node.wait_until_released().await;
}

/// A user other than root on a read-only file system; and an image in which the driver's programs cannot run.
async fn check_restricted_and_static_images(test_node: &TestNode<'_>) {
    let asks = "partage.dev/gpu: 1, partage.dev/memory: 2Gi";
    let security = "    securityContext: {runAsUser: 1000, readOnlyRootFilesystem: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}\n";
    let strict = pod("strict", asks, "sleep 1000")
        .replace("    volumeMounts:", &format!("{security}    volumeMounts:"));
    test_node.apply(&strict);
    test_node
        .apply(&pod("small", asks, "sleep 1000").replace("localhost/debian:bed", "localhost/busybox:bed"));
    test_node.wait_until_running("strict").await;
    test_node.wait_until_running("small").await;
    assert_eq!(
        test_node.exec("strict", "id -u; touch /x 2>&1 || true").unwrap(),
        "1000\ntouch: cannot touch '/x': Read-only file system\n"
    );
    assert_eq!(test_node.visible_gpus("strict")[0].1, 2 << 10);
    let takes =
        test_node.exec("strict", "/programs/partage-sample trainer --memory 1Gi --seconds 0.1").unwrap();
    assert!(takes.contains("the model takes 1.0 GiB"), "{takes}");
    assert_eq!(test_node.exec("small", "echo fine | grep -c fine").unwrap(), "1\n");
    test_node.delete_pod("strict");
    test_node.delete_pod("small");
    test_node.wait_until_released().await;
}

/// Checks that a container that crashes starts again with the same grant.
async fn check_crash_keeps_grant_and_region(test_node: &TestNode<'_>) {
    let asks = "partage.dev/gpu: 1, partage.dev/memory: 3Gi, partage.dev/cores: 20";
    let crash = pod("crash", asks, "until rm /crash/now 2>/dev/null; do sleep 0.1; done; exit 1")
        .replace("restartPolicy: Never", "restartPolicy: Always")
        .replace("readOnly: true}]", "readOnly: true}, {name: crash, mountPath: /crash}]")
        .replace("volumes: [", "volumes: [{name: crash, emptyDir: {}}, ");
    test_node.apply(&crash);
    test_node.wait_until_running("crash").await;
    let (grant, seen) = (test_node.wait_for_grant("crash").await, test_node.visible_gpus("crash"));
    assert_eq!(grant.grants[0].shares[0].memory_bytes, Some(Bytes(3 << 30)));
    let regions = test_node.agent.path("/run/partage/regions").unwrap();
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
    // Only after the `exec` command has ended: it would end with the container.
    test_node.exec("crash", "(sleep 1; touch /crash/now) > /dev/null 2>&1 &").unwrap();
    eventually("the container was restarted", async || {
        let pod = test_node.get_object("pod", "crash")?;
        let status = &pod["status"]["containerStatuses"][0];
        if status["restartCount"] == 1 && status["ready"] == true {
            Ok(())
        } else {
            Err(format!("{status}\n{}", test_node.agent.log()))
        }
    })
    .await;
    assert_eq!(test_node.visible_gpus("crash"), seen);
    assert_eq!(test_node.wait_for_grant("crash").await, grant);
    assert_eq!(files(), before, "the region is the same");
}
