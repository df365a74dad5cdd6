//! What was there when the agent started is not what is there later, and the other way round.

use crate::stage::{SEES, Stage, bed, lasting, pod};
use partage_sim_node::state::Fault;
use partage_testkit::agent::SETTINGS;

#[test]
fn a_gpu_that_was_missing_is_taken_in_without_a_restart() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut stage = Stage::set(&bed, SETTINGS).await;
        stage.apply(&lasting("a", "partage.dev/gpu: 1, partage.dev/memory: 5Gi"));
        stage.runs("a").await;
        let gpu = stage.grant("a").await.grants[0].shares[0].gpu.to_string();
        let (gpus, other) = (stage.agent.gpus().unwrap(), 1 - stage.index_of(&gpu));
        gpus.inject(other, Fault::Lost);
        // To an agent that starts now it does not even tell its name.
        stage.start_again().await;
        stage.told(("Node", "node1"), "GpuNotOffered", "does not answer").await;
        let agent = stage.agent.process().process();
        gpus.inject(other, Fault::Returned);
        stage.told(("Node", "node1"), "GpusChanged", "answers again").await;
        stage.offers("partage.dev/gpu", Some("20")).await;
        stage.is_ready().await;
        assert_eq!(stage.agent.process().process(), agent, "{}", stage.agent.log());
        stage.agrees().await;
        // There is room for this one on the GPU that is back only.
        stage.apply(&lasting("b", "partage.dev/gpu: 1, partage.dev/memory: 38Gi"));
        stage.runs("b").await;
        let after = stage.runs("a").await;
        assert_eq!(after["status"]["containerStatuses"][0]["restartCount"], 0);
        assert!(stage.exec("a", SEES).unwrap().contains("5120 MiB"));
        stage.agrees().await;
    });
}

#[test]
fn an_agent_starts_with_the_settings_that_were_last_in_force() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut stage = Stage::set(&bed, SETTINGS).await;
        stage.agent.write_settings(&format!("{SETTINGS}sharesPerGpu: 3\n")).unwrap();
        stage.offers("partage.dev/gpu", Some("6")).await;
        stage.agent.write_settings(&format!("{SETTINGS}sharesPerGpu: 0\n")).unwrap();
        stage.event("SettingsRefused", "the old ones stay").await;
        stage.start_again().await;
        stage.event("SettingsRefused", "those that were last in force are").await;
        stage.offers("partage.dev/gpu", Some("6")).await;
        stage.agent.write_settings(&format!("{SETTINGS}sharesPerGpu: 4\n")).unwrap();
        stage.offers("partage.dev/gpu", Some("8")).await;
    });
}

#[test]
fn who_comes_to_a_gpu_past_partage_is_told_of() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, SETTINGS).await;
        // A pod that asks for nothing and has the node's own driver; the same as a container beside one with a grant.
        let driver = "{name: driver, hostPath: {path: /var/lib/partage/simulated}}";
        let mount = "{name: driver, mountPath: /var/lib/partage/simulated}";
        let works = "LD_LIBRARY_PATH=/var/lib/partage/simulated/lib /programs/partage-sample trainer --memory 1Gi --seconds 3000";
        let past = |manifest: String| {
            manifest
                .replace("/var/lib/programs}}]", &format!("/var/lib/programs}}}}, {driver}]"))
                .replace("readOnly: true}]", &format!("readOnly: true}}, {mount}]"))
        };
        stage.apply(&past(pod("past", "cpu: 1", works)));
        let beside = format!(
            "  - name: beside\n    image: localhost/debian:bed\n    imagePullPolicy: Never\n    command: [sh, -c, '{works}']\n    \
             volumeMounts: [{{name: programs, mountPath: /programs, readOnly: true}}]\n  volumes:"
        );
        let manifest = lasting("granted", "partage.dev/gpu: 1, partage.dev/memory: 5Gi");
        stage.apply(&past(manifest.replace("  volumes:", &beside)));
        stage.told(("Pod", "past"), "BypassSuspected", "container main uses a GPU past Partage: process ").await;
        let words = "container beside goes around its limits: process ";
        stage.told(("Pod", "granted"), "BypassSuspected", words).await;
        assert!(stage.metric("partage_bypass_total").unwrap() >= 2.0);

        bed.kubectl(&["create", "clusterrole", "evict", "--verb=delete", "--resource=pods"]).unwrap();
        let account = "--serviceaccount=partage-system:partage-node";
        bed.kubectl(&["create", "clusterrolebinding", "evict", "--clusterrole=evict", account]).unwrap();
        stage.agent.write_settings(&format!("{SETTINGS}onBypass: evict\n")).unwrap();
        partage_testkit::eventually("the pod with a grant is gone", async || match stage.object("pod", "granted") {
            Err(_) => Ok(()),
            Ok(pod) => Err(pod["status"].to_string()),
        })
        .await;
        assert!(stage.object("pod", "past").unwrap()["metadata"]["deletionTimestamp"].is_null());
    });
}
