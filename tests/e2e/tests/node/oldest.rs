//! The oldest container runtime that is supported, told to take CDI devices as the pages say.

use crate::stage::{Stage, lasting};
use partage_testkit::agent::SETTINGS;
use partage_testkit::bed::{Bed, Containerd, NodeProfile, Profile};
use partage_testkit::binaries;
use partage_testkit::eventually;
use partage_testkit::skip_or_fail;

#[test]
fn a_pod_gets_its_share_by_containerd_1_7() {
    if let Err(missing) = binaries::containerd_1_7(&binaries::Settings::from_environment()) {
        return skip_or_fail(&missing);
    }
    let node = NodeProfile::new("node1").containerd(Containerd::Oldest);
    let Some(bed) = Bed::for_test(Profile::control_plane().node(node).debian()) else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, SETTINGS).await;
        let about =
            stage.object("node", "node1").unwrap()["status"]["nodeInfo"]["containerRuntimeVersion"].clone();
        assert!(about.as_str().unwrap().contains("1.7."), "{about}");
        for name in ["a", "b"] {
            stage.apply(&lasting(name, "partage.dev/gpu: 1, partage.dev/memory: 5Gi, partage.dev/cores: 30"));
        }
        for name in ["a", "b"] {
            stage.runs(name).await;
            let seen = stage.exec(name, "nvidia-smi --query-gpu=memory.total --format=csv,noheader").unwrap();
            assert_eq!(seen.trim(), "5120 MiB");
        }
        // Who has said what it sees is about to wait for that.
        stage.agrees().await;
        stage.crash("a");
        stage.restarted("a", 1).await;
        stage.agrees().await;
        bed.kubectl(&["delete", "pods", "--all", "--grace-period=1", "--wait"]).unwrap();
        stage.nothing_is_kept().await;

        // Whoever restarts it without CDI would have containers without what they were granted, and no word of that.
        let config = stage.node_path("/bed/containerd.toml");
        let without =
            std::fs::read_to_string(&config).unwrap().replace("enable_cdi = true", "enable_cdi = false");
        std::fs::write(&config, without).unwrap();
        stage.agent.node().containerd().restart().unwrap();
        eventually("the agent does not serve", async || {
            let log = stage.agent.log();
            let said = log.contains("CDI is off in containerd") && stage.sockets().is_empty();
            if said { Ok(()) } else { Err(log) }
        })
        .await;
    });
}
