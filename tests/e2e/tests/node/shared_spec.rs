//! The CDI spec that all containers of a node share: driver updates, removal by hand, and containers of agents without it.

use crate::stage::{SEES, Stage, bed, lasting};
use partage_testkit::agent::SETTINGS;
use std::fs;

const SHARED_SPEC: &str = "/run/cdi/partage.dev-driver.json";
/// A path that the shared spec mounts for every driver.
const LIBRARY: &str = "/usr/lib64/libcuda.so.1";

#[test]
fn shared_spec_follows_the_driver_and_specs_of_earlier_agents_stay_complete() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut stage = Stage::set(&bed, SETTINGS).await;
        for name in ["a", "b"] {
            stage.apply(&lasting(name, "partage.dev/gpu: 1, partage.dev/memory: 5Gi"));
            stage.runs(name).await;
        }
        assert!(shared_spec(&stage).contains(LIBRARY));
        assert_eq!(complete_specs(&stage), 0);

        removed_spec_is_written_before_the_next_start(&stage).await;
        let installed = installed_builds(&stage);
        assert_eq!(installed.len(), 1);
        let updated = restarted_container_has_the_updated_driver(&mut stage, &installed[0]).await;
        container_of_an_earlier_agent_gets_a_complete_spec(&mut stage, &updated).await;

        // No container uses the earlier build any more.
        stage.start_again().await;
        assert_eq!(installed_builds(&stage), [updated]);
        stage.agrees().await;
        for name in ["a", "b"] {
            stage.delete(name);
        }
        stage.nothing_is_kept().await;
    });
}

async fn removed_spec_is_written_before_the_next_start(stage: &Stage<'_>) {
    let before = shared_spec(stage);
    fs::remove_file(stage.node_path(SHARED_SPEC)).unwrap();
    stage.crash("a");
    stage.restarted("a", 1).await;
    assert_eq!(shared_spec(stage), before);
}

/// Another driver has its files in other places, and another release of Partage has another shim: both change the shared spec.
async fn restarted_container_has_the_updated_driver(stage: &mut Stage<'_>, earlier: &str) -> String {
    let moved = "/usr/local/bin/nvidia-smi";
    fs::create_dir_all(stage.node_path("/usr/local/bin")).unwrap();
    fs::copy(stage.node_path("/usr/bin/nvidia-smi"), stage.node_path(moved)).unwrap();
    fs::remove_file(stage.node_path("/usr/bin/nvidia-smi")).unwrap();
    let shim = stage.node_path("/var/lib/agent-test/libpartage_shim.so");
    let object = fs::read(&shim).unwrap();
    fs::write(shim, [object.as_slice(), b"another build"].concat()).unwrap();
    stage.start_again().await;
    let builds = installed_builds(stage);
    assert_eq!(builds.len(), 2, "containers use the earlier build");
    let updated = builds.into_iter().find(|build| build != earlier).unwrap();
    let spec = shared_spec(stage);
    assert!(spec.contains(moved) && spec.contains(&updated) && !spec.contains(earlier), "{spec}");
    stage.crash("b");
    stage.restarted("b", 1).await;
    assert!(mounts_build(stage, "b", &updated) && !mounts_build(stage, "b", earlier));
    // The other container runs on with what it was started with.
    assert!(mounts_build(stage, "a", earlier) && !mounts_build(stage, "a", &updated));
    for name in ["a", "b"] {
        assert!(stage.exec(name, SEES).unwrap().contains("5120 MiB"));
    }
    updated
}

/// Kubelet keeps the answer to `Allocate` as long as the pod, and passes the same devices whenever the container starts. An earlier agent
/// answered without the shared device, and wrote no such field into its record of the name.
async fn container_of_an_earlier_agent_gets_a_complete_spec(stage: &mut Stage<'_>, build: &str) {
    stage.agent.process().kill();
    for entry in fs::read_dir(stage.node_path("/run/partage/names")).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        let mut name: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(name.as_object_mut().unwrap().remove("shared"), Some(true.into()), "{text}");
        fs::write(path, name.to_string()).unwrap();
    }
    stage.start_again().await;
    assert_eq!(installed_builds(stage).len(), 2, "container a uses the earlier build");
    stage.crash("a");
    stage.restarted("a", 2).await;
    assert_eq!(complete_specs(stage), 1, "that of container a");
    assert!(mounts_build(stage, "a", build));
    stage.agrees().await;
}

fn shared_spec(stage: &Stage<'_>) -> String {
    fs::read_to_string(stage.node_path(SHARED_SPEC)).unwrap()
}

/// Counts the specs of containers that mount the driver files themselves.
fn complete_specs(stage: &Stage<'_>) -> usize {
    let files = fs::read_dir(stage.node_path("/run/cdi")).unwrap().map(|file| file.unwrap().path());
    let grants = files.filter(|path| path.to_str().unwrap().contains("partage.dev-grant-"));
    grants.filter(|path| fs::read_to_string(path).unwrap().contains(LIBRARY)).count()
}

/// Returns whether a pod's container has files of a build mounted.
fn mounts_build(stage: &Stage<'_>, pod: &str, build: &str) -> bool {
    stage.exec(pod, "cat /proc/self/mountinfo").unwrap().contains(build)
}

/// Lists the directories with stand-ins.
fn installed_builds(stage: &Stage<'_>) -> Vec<String> {
    let entries = fs::read_dir(stage.node_path("/var/lib/partage/lib")).unwrap().map(Result::unwrap);
    let builds = entries.filter(|entry| entry.path().join("lib64").is_dir());
    builds.map(|entry| entry.file_name().into_string().unwrap()).collect()
}
