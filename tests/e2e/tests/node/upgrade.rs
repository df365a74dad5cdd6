//! An upgrade of the agent while containers run: it manages regions of the last release, and leaves those of an unknown one alone.

use crate::stage::{Stage, bed, pod};
use partage_region::RegionOwner;
use partage_testkit::agent::SETTINGS;
use partage_testkit::eventually;
use serde_json::json;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

#[path = "../../../../crates/region/tests/support/layout_1.rs"]
mod layout_1;

/// Where the layout's version is in the header of both files.
const VERSION_OFFSET: u64 = 8;
/// A layout that no release has had.
const UNKNOWN_LAYOUT: u32 = 77;

#[test]
fn regions_of_the_last_release_are_managed_and_unknown_ones_are_left_alone() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut stage = Stage::set(&bed, &format!("{SETTINGS}onBypass: evict\n")).await;
        let trainer = "until [ -e /tmp/start ]; do sleep 0.1; done; exec /programs/partage-sample trainer --memory 1Gi --seconds 3000";
        // The amounts of the region that the last release wrote.
        stage.apply(&pod("old", "partage.dev/gpu: 1, partage.dev/memory: 2Gi, partage.dev/cores: 30", trainer));
        stage.runs("old").await;
        stage.agrees().await;

        // The agent of the last release ends; its container goes on, and a program starts in it.
        stage.agent.process().kill();
        let region = region_of(&stage);
        let gpu = stage.grant("old").await.grants[0].shares[0].gpu.to_string();
        let uuid = RegionOwner::open(&region).unwrap().share(0).unwrap().uuid;
        layout_1::put(layout_1::FRESH, &region);
        layout_1::set_uuid(&region, 0, uuid);
        stage.exec("old", "touch /tmp/start").unwrap();

        stage.start_again().await;
        stage.agrees().await;
        assert_eq!(stage.sees("old"), [(gpu.clone(), 2048)]);
        memory_in_use(&stage).await;
        resize(&stage, "memory=3Gi,cores=20");
        stage.told(("Pod", "old"), "Resized", "memory=3Gi").await;
        stage.agrees().await;
        assert_eq!(stage.sees("old"), [(gpu.clone(), 3072)]);
        assert_eq!(RegionOwner::open(&region).unwrap().layout(), 1, "it is not replaced while the container runs");

        // An agent after a downgrade finds a region that it does not know.
        stage.agent.process().kill();
        for file in ["limits", "usage"] {
            let file = fs::File::options().write(true).open(region.join(file)).unwrap();
            file.write_all_at(&UNKNOWN_LAYOUT.to_le_bytes(), VERSION_OFFSET).unwrap();
        }
        let limits = fs::read(region.join("limits")).unwrap();
        stage.start_again().await;
        assert!(stage.agent.log().contains("region is not managed"), "{}", stage.agent.log());
        resize(&stage, "memory=4Gi");
        stage.told(("Pod", "old"), "ResizeRefused", "keeps the limits that it has").await;
        assert_eq!(fs::read(region.join("limits")).unwrap(), limits);
        let now = stage.object("pod", "old").unwrap();
        assert_eq!(now["status"]["phase"], "Running", "it is not evicted for a region that cannot be read");
        assert_eq!(now["status"]["containerStatuses"][0]["restartCount"], json!(0));
        stage.delete("old");
        stage.nothing_is_kept().await;
    });
}

/// The directory of the only region on the node.
fn region_of(stage: &Stage<'_>) -> PathBuf {
    let regions: Vec<PathBuf> = fs::read_dir(stage.node_path("/run/partage/regions"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    let [region] = regions.as_slice() else { panic!("{regions:?}") };
    region.clone()
}

fn resize(stage: &Stage<'_>, amounts: &str) {
    let annotation = format!("partage.dev/resize={amounts}");
    stage.bed.kubectl(&["annotate", "pod", "old", "--overwrite", &annotation]).unwrap();
}

/// Waits until the agent reads the program's memory from its region.
async fn memory_in_use(stage: &Stage<'_>) {
    eventually("the program's memory is counted", async || {
        let used = stage.metric("partage_container_memory_used_bytes")?;
        if used >= f64::from(1 << 30) { Ok(()) } else { Err(format!("{used} bytes\n{}", stage.agent.log())) }
    })
    .await;
}
