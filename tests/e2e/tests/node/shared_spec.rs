//! The CDI spec that all containers of a node share: driver updates, manual removal, and containers of agents without
//! it.

use crate::test_node::{GPU_QUERY, TestNode, bed, long_running_pod};
use partage_testkit::agent::SIMULATED_SETTINGS;
use std::fs;

const SHARED_SPEC: &str = "/run/cdi/partage.dev-driver.json";
/// A path that the shared spec mounts for every driver.
const LIBRARY: &str = "/usr/lib64/libcuda.so.1";

#[test]
fn shared_spec_follows_the_driver_and_specs_of_earlier_agents_stay_complete() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        for name in ["a", "b"] {
            test_node.apply(&long_running_pod(name, "partage.dev/gpu: 1, partage.dev/memory: 5Gi"));
            test_node.wait_until_running(name).await;
        }
        assert!(shared_spec(&test_node).contains(LIBRARY));
        assert_eq!(complete_specs(&test_node), 0);

        removed_spec_is_written_before_the_next_start(&test_node).await;
        let installed = installed_builds(&test_node);
        assert_eq!(installed.len(), 1);
        let updated = restarted_container_has_the_updated_driver(&mut test_node, &installed[0]).await;
        container_of_an_earlier_agent_gets_a_complete_spec(&mut test_node, &updated).await;

        // No container uses the earlier build any more.
        test_node.restart_agent().await;
        assert_eq!(installed_builds(&test_node), [updated]);
        test_node.wait_until_consistent().await;
        for name in ["a", "b"] {
            test_node.delete_pod(name);
        }
        test_node.wait_until_released().await;
    });
}

async fn removed_spec_is_written_before_the_next_start(test_node: &TestNode<'_>) {
    let before = shared_spec(test_node);
    fs::remove_file(test_node.node_path(SHARED_SPEC)).unwrap();
    test_node.crash_container("a");
    test_node.wait_until_restarted("a", 1).await;
    assert_eq!(shared_spec(test_node), before);
}

/// Another driver has its files in other places, and another release of Partage has another shim: both change the
/// shared spec.
async fn restarted_container_has_the_updated_driver(test_node: &mut TestNode<'_>, earlier: &str) -> String {
    let moved = "/usr/local/bin/nvidia-smi";
    fs::create_dir_all(test_node.node_path("/usr/local/bin")).unwrap();
    fs::copy(test_node.node_path("/usr/bin/nvidia-smi"), test_node.node_path(moved)).unwrap();
    fs::remove_file(test_node.node_path("/usr/bin/nvidia-smi")).unwrap();
    let shim = test_node.node_path("/var/lib/agent-test/libpartage_shim.so");
    let object = fs::read(&shim).unwrap();
    fs::write(shim, [object.as_slice(), b"another build"].concat()).unwrap();
    test_node.restart_agent().await;
    let builds = installed_builds(test_node);
    assert_eq!(builds.len(), 2, "containers use the earlier build");
    let updated = builds.into_iter().find(|build| build != earlier).unwrap();
    let spec = shared_spec(test_node);
    assert!(spec.contains(moved) && spec.contains(&updated) && !spec.contains(earlier), "{spec}");
    test_node.crash_container("b");
    test_node.wait_until_restarted("b", 1).await;
    assert!(mounts_build(test_node, "b", &updated) && !mounts_build(test_node, "b", earlier));
    // The other container keeps running with the earlier files.
    assert!(mounts_build(test_node, "a", earlier) && !mounts_build(test_node, "a", &updated));
    for name in ["a", "b"] {
        assert!(test_node.exec(name, GPU_QUERY).unwrap().contains("5120 MiB"));
    }
    updated
}

/// Kubelet keeps the response of `Allocate` as long as the pod exists, and passes the same devices whenever the
/// container starts. An earlier agent's response had no shared device, and its record of the name had no such field.
async fn container_of_an_earlier_agent_gets_a_complete_spec(test_node: &mut TestNode<'_>, build: &str) {
    test_node.agent.process().kill();
    for entry in fs::read_dir(test_node.node_path("/run/partage/names")).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        let mut name: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(name.as_object_mut().unwrap().remove("shared"), Some(true.into()), "{text}");
        fs::write(path, name.to_string()).unwrap();
    }
    test_node.restart_agent().await;
    assert_eq!(installed_builds(test_node).len(), 2, "container a uses the earlier build");
    test_node.crash_container("a");
    test_node.wait_until_restarted("a", 2).await;
    assert_eq!(complete_specs(test_node), 1, "the spec of container a");
    assert!(mounts_build(test_node, "a", build));
    test_node.wait_until_consistent().await;
}

fn shared_spec(test_node: &TestNode<'_>) -> String {
    fs::read_to_string(test_node.node_path(SHARED_SPEC)).unwrap()
}

/// Counts the specs of containers that mount the driver files themselves.
fn complete_specs(test_node: &TestNode<'_>) -> usize {
    let files = fs::read_dir(test_node.node_path("/run/cdi")).unwrap().map(|file| file.unwrap().path());
    let grants = files.filter(|path| path.to_str().unwrap().contains("partage.dev-grant-"));
    grants.filter(|path| fs::read_to_string(path).unwrap().contains(LIBRARY)).count()
}

/// Returns whether a pod's container has files of a build mounted.
fn mounts_build(test_node: &TestNode<'_>, pod: &str, build: &str) -> bool {
    test_node.exec(pod, "cat /proc/self/mountinfo").unwrap().contains(build)
}

/// Lists the directories with the shim's libraries.
fn installed_builds(test_node: &TestNode<'_>) -> Vec<String> {
    let entries = fs::read_dir(test_node.node_path("/var/lib/partage/lib")).unwrap().map(Result::unwrap);
    let builds = entries.filter(|entry| entry.path().join("lib64").is_dir());
    builds.map(|entry| entry.file_name().into_string().unwrap()).collect()
}
