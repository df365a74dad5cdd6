//! Correct owners where names and timing could mislead: every pod gets exactly its own grant.

use crate::test_node::{TestNode, bed, long_running_pod};
use partage_testkit::agent::SIMULATED_SETTINGS;
use std::collections::BTreeMap;

const POD_COUNT: usize = 50;

#[test]
fn fifty_concurrent_pods_get_exactly_their_own_share() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node =
            TestNode::start(&bed, &format!("{SIMULATED_SETTINGS}sharesPerGpu: {POD_COUNT}\n")).await;
        let size = |at: usize| 512 + 8 * at as u64;
        let pods: String = (0..POD_COUNT)
            .map(|at| {
                let cores = 1 + at % 2;
                let memory = size(at);
                let limits =
                    format!("partage.dev/gpu: 1, partage.dev/memory: {memory}Mi, partage.dev/cores: {cores}");
                long_running_pod(&format!("p{at}"), &limits)
            })
            .map(|pod| pod.replace("sleep 0.5", "sleep 5"))
            .collect();
        test_node.apply(&pods);
        for at in 0..POD_COUNT {
            test_node.wait_until_running(&format!("p{at}")).await;
        }
        let held = test_node.wait_until_consistent().await;
        let sizes: BTreeMap<String, u64> = held
            .iter()
            .map(|pod| (pod.name.clone(), pod.grant.grants[0].shares[0].memory_bytes.unwrap().0 >> 20))
            .collect();
        assert_eq!(sizes, (0..POD_COUNT).map(|at| (format!("p{at}"), size(at))).collect());
        assert!(held.iter().all(|pod| pod.witness), "every container printed what it sees");
        bed.kubectl(&["delete", "pods", "--all", "--grace-period=1", "--wait"]).unwrap();
        test_node.wait_until_released().await;
    });
}

#[test]
fn successor_with_the_same_name_waits_until_the_share_is_free() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        // Each fills its GPU for any other pod of this size. The first ignores SIGTERM.
        let limits = "partage.dev/gpu: 1, partage.dev/memory: 21Gi";
        let slow = long_running_pod("a", limits)
            .replace("terminationGracePeriodSeconds: 1", "terminationGracePeriodSeconds: 300")
            .replace("nvidia-smi", "trap \"\" TERM; nvidia-smi");
        test_node.apply(&slow);
        test_node.apply(&long_running_pod("b", limits));
        for name in ["a", "b"] {
            test_node.wait_until_running(name).await;
        }
        let first = test_node.wait_until_consistent().await.into_iter().find(|pod| pod.name == "a").unwrap();
        let status = test_node.get_object("pod", "a").unwrap()["status"]["containerStatuses"][0].clone();
        let container =
            status["containerID"].as_str().unwrap().trim_start_matches("containerd://").to_string();
        bed.kubectl(&["delete", "pod", "a", "--force", "--grace-period=0", "--wait"]).unwrap();
        test_node.apply(&long_running_pod("a", limits));
        // The old pod is gone from the API server at once, and holds its GPU until its processes end. Kubelet kills them
        // after two seconds: on a busy machine the new pod starts later than that, and need not wait.
        if test_node.wait_until_waiting_or_running("a", "insufficient GPU capacity on node node1").await {
            test_node.crash_container("a");
        }
        test_node.wait_until_running("a").await;
        let tasks = bed.node("node1").unwrap().run("/bed/bin/ctr", ["-n", "k8s.io", "tasks", "ls"]).unwrap();
        assert!(
            !tasks.contains(&container),
            "{container} must end before its GPU is granted again:\n{tasks}"
        );
        let held = test_node.wait_until_consistent().await;
        let second = held.iter().find(|pod| pod.name == "a").unwrap();
        assert_ne!(second.uid, first.uid);
        assert_eq!(second.grant, first.grant);

        // A StatefulSet creates the same name at once.
        for round in 1..4 {
            test_node.delete_pod("a");
            test_node
                .apply(&long_running_pod("a", &format!("partage.dev/gpu: 1, partage.dev/memory: {round}Gi")));
            test_node.wait_until_running("a").await;
            let held = test_node.wait_until_consistent().await;
            let now = held.iter().find(|pod| pod.name == "a").unwrap();
            assert_eq!(now.grant.grants[0].shares[0].memory_bytes.unwrap().0, round << 30);
        }
        for name in ["a", "b"] {
            test_node.delete_pod(name);
        }
        test_node.wait_until_released().await;
    });
}
