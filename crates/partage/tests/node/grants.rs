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
