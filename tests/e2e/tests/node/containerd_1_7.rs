//! The oldest supported container runtime, configured for CDI as the documentation describes.

use crate::test_node::{TestNode, long_running_pod};
use partage_testkit::agent::SIMULATED_SETTINGS;
use partage_testkit::bed::{BedProfile, ContainerdVersion, NodeProfile, TestBed};
use partage_testkit::binaries;
use partage_testkit::eventually;
use partage_testkit::skip_or_fail;

#[test]
fn pod_gets_its_share_with_containerd_1_7() {
    if let Err(missing) = binaries::containerd_1_7(&binaries::BuildPaths::from_environment()) {
        return skip_or_fail(&missing);
    }
    let node = NodeProfile::new("node1").containerd(ContainerdVersion::Oldest);
    let Some(bed) = TestBed::for_test(BedProfile::control_plane().node(node).debian()) else { return };
    bed.block_on(async {
        let test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        let about =
            test_node.get_object("node", "node1").unwrap()["status"]["nodeInfo"]["containerRuntimeVersion"]
                .clone();
        assert!(about.as_str().unwrap().contains("1.7."), "{about}");
        for name in ["a", "b"] {
            test_node.apply(&long_running_pod(
                name,
                "partage.dev/gpu: 1, partage.dev/memory: 5Gi, partage.dev/cores: 30",
            ));
        }
        for name in ["a", "b"] {
            test_node.wait_until_running(name).await;
            let seen =
                test_node.exec(name, "nvidia-smi --query-gpu=memory.total --format=csv,noheader").unwrap();
            assert_eq!(seen.trim(), "5120 MiB");
        }
        // A container that has printed what it sees waits for the crash.
        test_node.wait_until_consistent().await;
        test_node.crash_container("a");
        test_node.wait_until_restarted("a", 1).await;
        test_node.wait_until_consistent().await;
        bed.kubectl(&["delete", "pods", "--all", "--grace-period=1", "--wait"]).unwrap();
        test_node.wait_until_released().await;

        // After a restart without CDI, containers would get nothing of their grants, without an error.
        let config = test_node.node_path("/bed/containerd.toml");
        let without =
            std::fs::read_to_string(&config).unwrap().replace("enable_cdi = true", "enable_cdi = false");
        std::fs::write(&config, without).unwrap();
        test_node.agent.node().containerd().restart().unwrap();
        eventually("the agent stops serving", async || {
            let log = test_node.agent.log();
            let output = log.contains("CDI is off in containerd") && test_node.plugin_sockets().is_empty();
            if output { Ok(()) } else { Err(log) }
        })
        .await;
    });
}
