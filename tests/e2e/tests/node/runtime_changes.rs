//! GPUs and settings that change while the agent runs, or between two starts.

use crate::test_node::{GPU_QUERY, TestNode, bed, long_running_pod, pod};
use partage_sim_node::state::GpuFault;
use partage_testkit::agent::SIMULATED_SETTINGS;

#[test]
fn recovered_gpu_is_offered_without_an_agent_restart() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        test_node.apply(&long_running_pod("a", "partage.dev/gpu: 1, partage.dev/memory: 5Gi"));
        test_node.wait_until_running("a").await;
        let gpu = test_node.wait_for_grant("a").await.grants[0].shares[0].gpu.to_string();
        let (gpus, other) = (test_node.agent.simulated_gpus().unwrap(), 1 - test_node.gpu_index(&gpu));
        gpus.inject(other, GpuFault::Lost);
        // A lost GPU does not even return its UUID to an agent that starts now.
        test_node.restart_agent().await;
        test_node.wait_for_event_on(("Node", "node1"), "GpuNotOffered", "no response").await;
        let agent = test_node.agent.process().pid();
        gpus.inject(other, GpuFault::Returned);
        test_node.wait_for_event_on(("Node", "node1"), "GpusChanged", "responds again").await;
        test_node.wait_until_offered("partage.dev/gpu", Some("20")).await;
        test_node.wait_until_ready().await;
        assert_eq!(test_node.agent.process().pid(), agent, "{}", test_node.agent.log());
        test_node.wait_until_consistent().await;
        // Only the returned GPU has room for this pod.
        test_node.apply(&long_running_pod("b", "partage.dev/gpu: 1, partage.dev/memory: 38Gi"));
        test_node.wait_until_running("b").await;
        let after = test_node.wait_until_running("a").await;
        assert_eq!(after["status"]["containerStatuses"][0]["restartCount"], 0);
        assert!(test_node.exec("a", GPU_QUERY).unwrap().contains("5120 MiB"));
        test_node.wait_until_consistent().await;
    });
}

#[test]
fn agent_with_invalid_settings_starts_with_the_last_valid_ones() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        test_node.agent.write_settings(&format!("{SIMULATED_SETTINGS}sharesPerGpu: 3\n")).unwrap();
        test_node.wait_until_offered("partage.dev/gpu", Some("6")).await;
        test_node.agent.write_settings(&format!("{SIMULATED_SETTINGS}sharesPerGpu: 0\n")).unwrap();
        test_node.wait_for_event("SettingsRefused", "the previous ones stay in force").await;
        test_node.restart_agent().await;
        test_node.wait_for_event("SettingsRefused", "using the last valid settings").await;
        test_node.wait_until_offered("partage.dev/gpu", Some("6")).await;
        test_node.agent.write_settings(&format!("{SIMULATED_SETTINGS}sharesPerGpu: 4\n")).unwrap();
        test_node.wait_until_offered("partage.dev/gpu", Some("8")).await;
    });
}

#[test]
fn gpu_use_without_a_grant_is_reported_as_bypass() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        // A pod without a request that mounts the node's own driver; and the same as a container next to one with a
        // grant.
        let driver = "{name: driver, hostPath: {path: /var/lib/partage/simulated}}";
        let mount = "{name: driver, mountPath: /var/lib/partage/simulated}";
        let works = "LD_LIBRARY_PATH=/var/lib/partage/simulated/lib /programs/partage-sample trainer --memory 1Gi --seconds 3000";
        let past = |manifest: String| {
            manifest
                .replace("/var/lib/programs}}]", &format!("/var/lib/programs}}}}, {driver}]"))
                .replace("readOnly: true}]", &format!("readOnly: true}}, {mount}]"))
        };
        test_node.apply(&past(pod("past", "cpu: 1", works)));
        let beside = format!(
            "  - name: beside\n    image: localhost/debian:bed\n    imagePullPolicy: Never\n    command: [sh, -c, '{works}']\n    \
             volumeMounts: [{{name: programs, mountPath: /programs, readOnly: true}}]\n  volumes:"
        );
        let manifest = long_running_pod("granted", "partage.dev/gpu: 1, partage.dev/memory: 5Gi");
        test_node.apply(&past(manifest.replace("  volumes:", &beside)));
        test_node.wait_for_event_on(("Pod", "past"), "BypassSuspected", "container main uses a GPU without a share of it: process ").await;
        let expected = "container beside bypasses its limits: process ";
        test_node.wait_for_event_on(("Pod", "granted"), "BypassSuspected", expected).await;
        assert!(test_node.metric_sum("partage_bypass_total").unwrap() >= 2.0);

        bed.kubectl(&["create", "clusterrole", "evict", "--verb=delete", "--resource=pods"]).unwrap();
        let account = "--serviceaccount=partage-system:partage-node";
        bed.kubectl(&["create", "clusterrolebinding", "evict", "--clusterrole=evict", account]).unwrap();
        test_node.agent.write_settings(&format!("{SIMULATED_SETTINGS}onBypass: evict\n")).unwrap();
        partage_testkit::eventually("the pod with a grant is deleted", async || match test_node.get_object("pod", "granted") {
            Err(_) => Ok(()),
            Ok(pod) => Err(pod["status"].to_string()),
        })
        .await;
        assert!(test_node.get_object("pod", "past").unwrap()["metadata"]["deletionTimestamp"].is_null());
    });
}
