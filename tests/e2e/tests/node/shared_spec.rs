//! The CDI spec that all containers of a node share: driver updates, removal by hand, and containers of agents without it.

use crate::stage::{SEES, Stage, bed, lasting};
use partage_testkit::agent::SETTINGS;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;

const SHARED_SPEC: &str = "/run/cdi/partage.dev-driver.json";
/// A path that the shared spec mounts for every driver.
const LIBRARY: &str = "/usr/lib64/libcuda.so.1";
/// A program of the driver that the node does not have at first: with it the set of driver files is another one.
const PROGRAM: &str = "/usr/bin/nvidia-debugdump";

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
        let earlier = installed_builds(&stage);
        assert_eq!(earlier.len(), 1);
        restarted_container_has_the_updated_driver(&mut stage).await;
        assert_eq!(installed_builds(&stage).len(), 2, "container a still uses the earlier build");
        container_of_an_earlier_agent_gets_a_complete_spec(&mut stage).await;

        // No container uses the earlier build any more.
        stage.start_again().await;
        let current = installed_builds(&stage);
        assert_eq!((current.len(), current.intersection(&earlier).count()), (1, 0));
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

async fn restarted_container_has_the_updated_driver(stage: &mut Stage<'_>) {
    let program = stage.node_path(PROGRAM);
    fs::write(&program, "#!/bin/sh\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    stage.start_again().await;
    assert!(shared_spec(stage).contains(PROGRAM));
    stage.crash("b");
    stage.restarted("b", 1).await;
    assert!(stage.exec("b", PROGRAM).is_ok());
    // The other one runs on with what it was started with.
    assert!(stage.exec("a", PROGRAM).is_err());
    assert!(stage.exec("a", SEES).unwrap().contains("5120 MiB"));
}

/// Kubelet keeps the answer to `Allocate` as long as the pod, and passes the same devices whenever the container starts. An earlier agent
/// answered without the shared device, and wrote no such field into its record of the name.
async fn container_of_an_earlier_agent_gets_a_complete_spec(stage: &mut Stage<'_>) {
    stage.agent.process().kill();
    for entry in fs::read_dir(stage.node_path("/run/partage/names")).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        let mut name: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(name.as_object_mut().unwrap().remove("shared"), Some(true.into()), "{text}");
        fs::write(path, name.to_string()).unwrap();
    }
    stage.start_again().await;
    stage.crash("a");
    stage.restarted("a", 2).await;
    assert_eq!(complete_specs(stage), 1, "that of container a");
    assert!(stage.exec("a", PROGRAM).is_ok());
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

/// Lists the directories with stand-ins.
fn installed_builds(stage: &Stage<'_>) -> BTreeSet<String> {
    let entries = fs::read_dir(stage.node_path("/var/lib/partage/lib")).unwrap().map(Result::unwrap);
    let builds = entries.filter(|entry| entry.path().join("lib64").is_dir());
    builds.map(|entry| entry.file_name().into_string().unwrap()).collect()
}
