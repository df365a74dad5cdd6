//! What a pod asks is what it gets, and what it leaves is there for the next.

use crate::stage::{Stage, bed, pod};
use partage_core::model::Bytes;
use partage_testkit::agent::SETTINGS;

#[test]
fn a_pod_gets_its_share_and_gives_it_back() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, SETTINGS).await;
        stage.apply(&pod(
            "a",
            "partage.dev/gpu: 1, partage.dev/memory: 4Gi, partage.dev/cores: 30",
            "sleep 1000",
        ));
        stage.runs("a").await;
        let grant = stage.grant("a").await;
        assert_eq!(grant.grants[0].shares[0].memory_bytes, Some(Bytes(4 << 30)));
        let seen = stage.exec("a", "nvidia-smi --query-gpu=uuid,memory.total --format=csv,noheader").unwrap();
        assert_eq!(seen.trim(), format!("{}, 4096 MiB", grant.grants[0].shares[0].gpu));
        stage.keeps([1, 1, 1]).await;
        stage.delete("a");
        stage.nothing_is_kept().await;

        // As a Job's pods do: it ends by itself, and stays to be looked at. It holds nothing, and everybody knows that.
        stage.apply(&pod("ends", "partage.dev/gpu: 1, partage.dev/memory: 4Gi", "nvidia-smi -L"));
        stage.runs("ends").await;
        stage.nothing_is_kept().await;
        assert_eq!(stage.object("pod", "ends").unwrap()["status"]["phase"], "Succeeded");
        assert_eq!(stage.metric("partage_ledger_mismatch").unwrap(), 0.0, "{}", stage.agent.log());
        stage.apply(&pod("next", "partage.dev/gpu: 1, partage.dev/memory: 39Gi", "sleep 1000"));
        stage.runs("next").await;
        assert_eq!(stage.agrees().await.len(), 1);
    });
}

/// Deletes pods by force as soon as their grant is written: the API server forgets them at once, and their share is free as soon as
/// the runtime reports that nothing of them runs, without the grace period for pods that the API server has not listed yet.
#[test]
fn force_deleted_young_pod_releases_its_share_at_once() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, SETTINGS).await;
        for at in 0..4 {
            let name = format!("young-{at}");
            // Two of these fill both GPUs.
            stage.apply(&pod(&name, "partage.dev/gpu: 1, partage.dev/memory: 30Gi", "sleep 1000"));
            stage.grant(&name).await;
            bed.kubectl(&["delete", "pod", &name, "--force", "--grace-period=0"]).unwrap();
        }
        stage.nothing_is_kept().await;
        let log = stage.agent.log();
        for at in 0..4 {
            let is_its =
                |line: &&str| line.contains("pod ended") && line.contains(&format!("pod=young-{at} "));
            let line = log.lines().find(is_its).unwrap_or_else(|| panic!("young-{at}:\n{log}"));
            assert!(line.contains("namespace=default") && line.contains("cause=deleted"), "{line}");
        }
    });
}

/// A tenant's own annotations leave no space for the grant: the limit holds, and the pod says once what is wrong.
#[test]
fn grant_that_cannot_be_written_is_reported_once_and_holds() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, SETTINGS).await;
        let filler = format!("{{name: full, annotations: {{filler: {}}}}}", "x".repeat((256 << 10) - 10));
        let full = pod("full", "partage.dev/gpu: 1, partage.dev/memory: 3Gi", "sleep 1000");
        // `kubectl apply` would write an annotation of its own.
        bed.kubectl_with(&["create", "-f", "-"], &full.replace("{name: full}", &filler)).unwrap();
        stage.runs("full").await;
        stage
            .told(("Pod", "full"), "GrantNotWritten", "the grant holds, but cannot be written on the pod")
            .await;
        assert_eq!(stage.sees("full")[0].1, 3 << 10);
        bed.kubectl(&["annotate", "pod", "full", "filler-"]).unwrap();
        let grant = stage.grant("full").await;
        assert_eq!(grant.grants[0].shares[0].memory_bytes, Some(Bytes(3 << 30)));
        let log = stage.agent.log();
        let said = log.lines().filter(|line| line.contains("grant cannot be written on the pod"));
        let said: Vec<&str> = said.collect();
        assert!(said.len() == 1 && said[0].contains("pod=full"), "{said:#?}");
    });
}
