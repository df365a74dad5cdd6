//! The components that the agent depends on stop and come back: the API server, kubelet, containerd, its own sockets.

use crate::test_node::{GPU_QUERY, TestNode, bed, long_running_pod};
use partage_core::model::Bytes;
use partage_testkit::agent::SIMULATED_SETTINGS;
use partage_testkit::eventually;
use std::fs;

#[test]
fn containers_restart_while_the_api_server_is_down() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        for name in ["a", "b"] {
            test_node.apply(&long_running_pod(name, "partage.dev/gpu: 1, partage.dev/memory: 5Gi"));
        }
        for name in ["a", "b"] {
            test_node.wait_until_running(name).await;
        }
        let held = test_node.wait_until_consistent().await;
        // The third pod is decided and ready, and its annotation is not written yet.
        test_node.agent.restart(Some("after-cdi")).unwrap();
        test_node.wait_until_ready().await;
        test_node.apply(&long_running_pod("c", "partage.dev/gpu: 1, partage.dev/memory: 6Gi"));
        test_node.wait_until_agent_exits().await;
        bed.apiserver().kill();

        test_node.restart_agent().await;
        let of = |name: &str| held.iter().find(|pod| pod.name == name).unwrap();
        test_node.crash_container("a");
        test_node.wait_for_report_after_restart(of("a"), 1).await;
        test_node.restart_agent().await;
        test_node.crash_container("b");
        test_node.wait_for_report_after_restart(of("b"), 1).await;

        test_node.start_api_server().await;
        test_node.wait_until_running("c").await;
        let held = test_node.wait_until_consistent().await;
        assert_eq!(held.len(), 3);
        test_node.delete_pod("a");
        assert_eq!(test_node.wait_until_consistent().await.len(), 2);
    });
}

#[test]
fn agent_recovers_after_kubelet_containerd_and_socket_restarts() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        let node = bed.node("node1").unwrap();
        test_node.apply(&long_running_pod("a", "partage.dev/gpu: 1, partage.dev/memory: 5Gi"));
        test_node.wait_until_running("a").await;

        test_node.restart_kubelet().await;
        test_node.check_new_pod_runs("b").await;
        node.containerd().restart().unwrap();
        test_node.check_new_pod_runs("c").await;
        let sockets = test_node.plugin_sockets();
        for name in sockets.keys() {
            fs::remove_file(test_node.node_path("/var/lib/kubelet/device-plugins").join(name)).unwrap();
        }
        test_node.wait_until_sockets_replaced(&sockets).await;
        test_node.check_new_pod_runs("d").await;

        // Kubelet's own socket goes with the directory, and so does its checkpoint; it creates both only when it
        // starts. Running containers keep running. For others it calls `Allocate` again, once it knows its pods and the
        // agent is registered.
        let container =
            test_node.get_object("pod", "a").unwrap()["status"]["containerStatuses"][0]["containerID"]
                .clone();
        let container = container.as_str().unwrap().trim_start_matches("containerd://").to_string();
        bed.apiserver().kill();
        node.kubelet().kill();
        test_node.crash_container("a");
        eventually("a's container has ended", async || {
            let tasks = node
                .run("/bed/bin/ctr", ["-n", "k8s.io", "tasks", "ls"])
                .map_err(|error| error.to_string())?;
            let ended = tasks.lines().all(|line| !line.contains(&container) || line.contains("STOPPED"));
            if ended { Ok(()) } else { Err(tasks) }
        })
        .await;
        let aside = test_node.node_path("/var/lib/kubelet/aside");
        fs::rename(test_node.node_path("/var/lib/kubelet/device-plugins"), &aside).unwrap();
        fs::remove_dir_all(aside).unwrap();
        node.kubelet().start().unwrap();
        test_node.wait_until_ready().await;
        test_node.start_api_server().await;
        test_node.wait_until_serving().await;
        test_node.wait_until_restarted("a", 1).await;
        for name in ["b", "c", "d"] {
            assert_eq!(
                test_node.get_object("pod", name).unwrap()["status"]["containerStatuses"][0]["restartCount"],
                0
            );
            assert!(test_node.exec(name, GPU_QUERY).unwrap().contains("2048 MiB"));
            test_node.delete_pod(name);
        }
        test_node.apply(&long_running_pod("e", "partage.dev/gpu: 1, partage.dev/memory: 2Gi"));
        test_node.wait_until_running("e").await;
        assert_eq!(test_node.wait_until_consistent().await.len(), 2);

        // Without an agent a restarted kubelet cannot call the plugin; containers that were ready keep their files.
        test_node.agent.process().kill();
        node.kubelet().restart().unwrap();
        // Its devices are not registered then.
        test_node.wait_until_offered("partage.dev/gpu", Some("0")).await;
        test_node.crash_container("e");
        test_node.wait_until_restarted("e", 1).await;
        test_node.restart_agent().await;
        assert_eq!(test_node.wait_until_consistent().await.len(), 2);
        bed.kubectl(&["delete", "pods", "--all", "--grace-period=1", "--wait"]).unwrap();
        test_node.wait_until_released().await;
        test_node.check_agent_refuses_runtime_without_cdi().await;
    });
}

/// The region of a running container is removed: the agent reports it with the remedy, and creates the region again
/// when the container restarts.
#[test]
fn region_removed_by_hand_is_reported_and_created_again() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        for name in ["a", "b"] {
            test_node.apply(&long_running_pod(name, "partage.dev/gpu: 1, partage.dev/memory: 5Gi"));
        }
        for name in ["a", "b"] {
            test_node.wait_until_running(name).await;
        }
        let held = test_node.wait_until_consistent().await;
        let regions = test_node.node_path("/run/partage/regions");
        let is_missing = async |test_node: &TestNode<'_>| {
            eventually("both missing regions are counted", async || {
                match test_node.metric_sum("partage_ledger_mismatch")? {
                    2.0 => Ok(()),
                    other => Err(format!("{other}\n{}", test_node.agent.log())),
                }
            })
            .await;
        };
        for region in fs::read_dir(&regions).unwrap().flatten() {
            fs::remove_dir_all(region.path()).unwrap();
        }
        is_missing(&test_node).await;
        for name in ["a", "b"] {
            test_node
                .wait_for_event_on(
                    ("Pod", name),
                    "RegionMissing",
                    "restart the container to create the region again",
                )
                .await;
        }
        // An agent that starts now has never seen the regions.
        test_node.restart_agent().await;
        is_missing(&test_node).await;
        // The container still has the removed limits mapped: its memory must not be granted to others.
        bed.kubectl(&["annotate", "pod", "a", "partage.dev/resize=memory=1Gi"]).unwrap();
        test_node.wait_for_event_on(("Pod", "a"), "ResizeRefused", "is missing").await;
        assert_eq!(
            test_node.wait_for_grant("a").await.grants[0].shares[0].memory_bytes,
            Some(Bytes(5 << 30))
        );
        for pod in &held {
            test_node.crash_container(&pod.name);
            test_node.wait_until_restarted(&pod.name, 1).await;
        }
        assert_eq!(test_node.wait_until_consistent().await.len(), 2);
    });
}

impl TestNode<'_> {
    /// A runtime without CDI support: the agent reports it with the remedy, and ends.
    async fn check_agent_refuses_runtime_without_cdi(&mut self) {
        let config = self.node_path("/bed/containerd.toml");
        let text = fs::read_to_string(&config).unwrap();
        self.agent.process().kill();
        fs::write(&config, text.replace("enable_cdi = true", "enable_cdi = false")).unwrap();
        self.agent.node().containerd().restart().unwrap();
        let output = self.agent.log().len();
        self.agent.restart(None).unwrap();
        self.wait_until_agent_exits().await;
        let log = self.agent.log();
        let expected = "set enable_cdi = true under [plugins.'io.containerd.cri.v1.runtime'] in /etc/containerd/config.toml";
        let log = log.get(output..).unwrap_or(&log);
        assert!(log.contains("CDI is off in containerd v2") && log.contains(expected), "{log}");
        // Apply the remedy of the message.
        fs::write(&config, text).unwrap();
        self.agent.node().containerd().restart().unwrap();
        self.restart_agent().await;
        self.check_new_pod_runs("f").await;
    }

    /// Waits until kubelet has registered the agent and the node offers shares.
    async fn wait_until_serving(&self) {
        self.wait_until_ready().await;
        self.wait_until_offered("partage.dev/gpu", Some("20")).await;
    }

    /// Checks that a new pod gets its share, and that all others still run without a restart.
    async fn check_new_pod_runs(&self, name: &str) {
        self.wait_until_serving().await;
        self.apply(&long_running_pod(name, "partage.dev/gpu: 1, partage.dev/memory: 2Gi"));
        self.wait_until_running(name).await;
        self.wait_until_consistent().await;
        let pods = self.bed.kubectl(&[
            "get",
            "pods",
            "-o",
            "jsonpath={.items[*].status.containerStatuses[*].restartCount}",
        ]);
        assert!(pods.unwrap().split(' ').all(|restarts| restarts == "0"));
    }

    /// Waits until a container that was restarted this number of times prints what it sees, without using the API
    /// server.
    async fn wait_for_report_after_restart(&self, pod: &crate::consistency::GrantedPod, times: u32) {
        let log = format!("/var/log/pods/default_{}_{}/main/{times}.log", pod.name, pod.uid);
        eventually(&format!("{} prints what it sees", pod.name), async || match self.reported_gpus(pod) {
            Some(output) if output == pod.expected_view() && self.node_path(&log).exists() => Ok(()),
            output => Err(format!("{output:?}\n{}", self.agent.log())),
        })
        .await;
    }
}
