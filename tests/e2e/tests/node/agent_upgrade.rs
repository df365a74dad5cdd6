//! An upgrade of the agent while containers run: it manages regions of the last release, and leaves those of an unknown
//! layout unchanged.

use crate::test_node::{TestNode, bed, pod};
use partage_region::RegionOwner;
use partage_testkit::agent::SIMULATED_SETTINGS;
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
fn agent_adopts_regions_of_the_last_release_and_ignores_unknown_layouts() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut test_node = TestNode::start(&bed, &format!("{SIMULATED_SETTINGS}onBypass: evict\n")).await;
        let trainer = "until [ -e /tmp/start ]; do sleep 0.1; done; exec /programs/partage-sample trainer --memory 1Gi --seconds 3000";
        // The amounts of the region that the last release wrote.
        test_node.apply(&pod("old", "partage.dev/gpu: 1, partage.dev/memory: 2Gi, partage.dev/cores: 30", trainer));
        test_node.wait_until_running("old").await;
        test_node.wait_until_consistent().await;

        // The agent of the last release ends; its container keeps running, and a program starts in it.
        test_node.agent.process().kill();
        let region = only_region(&test_node);
        let gpu = test_node.wait_for_grant("old").await.grants[0].shares[0].gpu.to_string();
        let uuid = RegionOwner::open(&region).unwrap().share(0).unwrap().uuid;
        layout_1::put(layout_1::FRESH, &region);
        layout_1::set_uuid(&region, 0, uuid);
        test_node.exec("old", "touch /tmp/start").unwrap();

        test_node.restart_agent().await;
        test_node.wait_until_consistent().await;
        assert_eq!(test_node.visible_gpus("old"), [(gpu.clone(), 2048)]);
        wait_until_memory_counted(&test_node).await;
        request_resize(&test_node, "memory=3Gi,cores=20");
        test_node.wait_for_event_on(("Pod", "old"), "Resized", "memory=3Gi").await;
        test_node.wait_until_consistent().await;
        assert_eq!(test_node.visible_gpus("old"), [(gpu.clone(), 3072)]);
        assert_eq!(RegionOwner::open(&region).unwrap().layout(), 1, "the region is not replaced while the container runs");

        // After a downgrade the agent finds a region with an unknown layout.
        test_node.agent.process().kill();
        for file in ["limits", "usage"] {
            let file = fs::File::options().write(true).open(region.join(file)).unwrap();
            file.write_all_at(&UNKNOWN_LAYOUT.to_le_bytes(), VERSION_OFFSET).unwrap();
        }
        let limits = fs::read(region.join("limits")).unwrap();
        test_node.restart_agent().await;
        let log = test_node.agent.log();
        let reported = log.lines().find(|line| line.contains("region is not managed"));
        assert!(reported.is_some_and(|line| line.contains("pod=\"old\"")), "{log}");
        // A scrape compares the sources of the node's state at once.
        test_node.metric_sum("partage_ledger_mismatch").unwrap();
        test_node.wait_for_event_on(("Pod", "old"), "RegionNotManaged", "run the agent version that wrote it").await;
        request_resize(&test_node, "memory=4Gi");
        test_node.wait_for_event_on(("Pod", "old"), "ResizeRefused", "keeps its current limits").await;
        assert_eq!(fs::read(region.join("limits")).unwrap(), limits);
        let now = test_node.get_object("pod", "old").unwrap();
        assert_eq!(now["status"]["phase"], "Running", "the pod is not evicted for a region that cannot be read");
        assert_eq!(now["status"]["containerStatuses"][0]["restartCount"], json!(0));
        test_node.delete_pod("old");
        test_node.wait_until_released().await;
    });
}

/// Returns the directory of the only region on the node.
fn only_region(test_node: &TestNode<'_>) -> PathBuf {
    let regions: Vec<PathBuf> = fs::read_dir(test_node.node_path("/run/partage/regions"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    let [region] = regions.as_slice() else { panic!("{regions:?}") };
    region.clone()
}

fn request_resize(test_node: &TestNode<'_>, amounts: &str) {
    let annotation = format!("partage.dev/resize={amounts}");
    test_node.bed.kubectl(&["annotate", "pod", "old", "--overwrite", &annotation]).unwrap();
}

/// Waits until the agent reads the program's memory from its region.
async fn wait_until_memory_counted(test_node: &TestNode<'_>) {
    eventually("the program's memory is counted", async || {
        let used = test_node.metric_sum("partage_container_memory_used_bytes")?;
        if used >= f64::from(1 << 30) {
            Ok(())
        } else {
            Err(format!("{used} bytes\n{}", test_node.agent.log()))
        }
    })
    .await;
}
