//! A pod gets what it requests, and its share is free for the next pod after its end.

use crate::test_node::{TestNode, bed, pod};
use partage_core::model::Bytes;
use partage_testkit::agent::SIMULATED_SETTINGS;

#[test]
fn pod_gets_its_share_and_releases_it() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        test_node.apply(&pod(
            "a",
            "partage.dev/gpu: 1, partage.dev/memory: 4Gi, partage.dev/cores: 30",
            "sleep 1000",
        ));
        test_node.wait_until_running("a").await;
        let grant = test_node.wait_for_grant("a").await;
        assert_eq!(grant.grants[0].shares[0].memory_bytes, Some(Bytes(4 << 30)));
        let seen =
            test_node.exec("a", "nvidia-smi --query-gpu=uuid,memory.total --format=csv,noheader").unwrap();
        assert_eq!(seen.trim(), format!("{}, 4096 MiB", grant.grants[0].shares[0].gpu));
        test_node.wait_for_agent_files([1, 1, 1]).await;
        test_node.delete_pod("a");
        test_node.wait_until_released().await;

        // As a Job's pod does: it ends by itself, and its object stays. It holds nothing, in every component.
        test_node.apply(&pod("ends", "partage.dev/gpu: 1, partage.dev/memory: 4Gi", "nvidia-smi -L"));
        test_node.wait_until_running("ends").await;
        test_node.wait_until_released().await;
        assert_eq!(test_node.get_object("pod", "ends").unwrap()["status"]["phase"], "Succeeded");
        assert_eq!(
            test_node.metric_sum("partage_ledger_mismatch").unwrap(),
            0.0,
            "{}",
            test_node.agent.log()
        );
        test_node.apply(&pod("next", "partage.dev/gpu: 1, partage.dev/memory: 39Gi", "sleep 1000"));
        test_node.wait_until_running("next").await;
        assert_eq!(test_node.wait_until_consistent().await.len(), 1);
    });
}

/// Deletes pods by force as soon as their grant is written: the API server forgets them at once, and their share is
/// free as soon as the runtime reports that nothing of them runs, without the grace period for pods that the API server
/// has not listed yet.
#[test]
fn force_deleted_young_pod_releases_its_share_at_once() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        for at in 0..4 {
            let name = format!("young-{at}");
            // Two of these fill both GPUs.
            test_node.apply(&pod(&name, "partage.dev/gpu: 1, partage.dev/memory: 30Gi", "sleep 1000"));
            test_node.wait_for_grant(&name).await;
            bed.kubectl(&["delete", "pod", &name, "--force", "--grace-period=0"]).unwrap();
        }
        test_node.wait_until_released().await;
        let log = test_node.agent.log();
        for at in 0..4 {
            let is_its =
                |line: &&str| line.contains("pod ended") && line.contains(&format!("pod=young-{at} "));
            let line = log.lines().find(is_its).unwrap_or_else(|| panic!("young-{at}:\n{log}"));
            assert!(line.contains("namespace=default") && line.contains("cause=deleted"), "{line}");
        }
    });
}

/// A tenant's own annotations leave no space for the grant: the limit holds, and one event reports it.
#[test]
fn grant_that_cannot_be_written_is_reported_once_and_holds() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        let filler = format!("{{name: full, annotations: {{filler: {}}}}}", "x".repeat((256 << 10) - 10));
        let full = pod("full", "partage.dev/gpu: 1, partage.dev/memory: 3Gi", "sleep 1000");
        // `kubectl apply` would write an annotation of its own.
        bed.kubectl_with(&["create", "-f", "-"], &full.replace("{name: full}", &filler)).unwrap();
        test_node.wait_until_running("full").await;
        test_node
            .wait_for_event_on(
                ("Pod", "full"),
                "GrantNotWritten",
                "the grant is in force, but cannot be written to the pod",
            )
            .await;
        assert_eq!(test_node.visible_gpus("full")[0].1, 3 << 10);
        bed.kubectl(&["annotate", "pod", "full", "filler-"]).unwrap();
        let grant = test_node.wait_for_grant("full").await;
        assert_eq!(grant.grants[0].shares[0].memory_bytes, Some(Bytes(3 << 30)));
        let log = test_node.agent.log();
        let found = log.lines().filter(|line| line.contains("cannot write the grant to the pod"));
        let found: Vec<&str> = found.collect();
        assert!(found.len() == 1 && found[0].contains("pod=full"), "{found:#?}");
    });
}
