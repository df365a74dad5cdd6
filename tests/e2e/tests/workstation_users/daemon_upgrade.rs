//! An upgrade of the daemon while shares run: it manages regions of the last release, and leaves those of an unknown
//! layout unchanged.

use crate::support::{GIB, TestStateDir, eventually, sample, signal};
use partage_region::RegionOwner;
use std::fs;
use std::os::unix::fs::FileExt;

#[path = "../../../../crates/region/tests/support/layout_1.rs"]
mod layout_1;

/// Where the layout's version is in the header of both files.
const VERSION_OFFSET: u64 = 8;
/// A layout that no release has had.
const UNKNOWN_LAYOUT: u32 = 77;

#[test]
fn daemon_adopts_regions_of_the_last_release_and_ignores_unknown_layouts() {
    let state_dir = TestStateDir::new();
    let start = state_dir.path().join("start");
    let program = format!(
        "until [ -e {} ]; do sleep 0.1; done; exec {} trainer --memory 1Gi --seconds 3000",
        start.display(),
        sample()
    );
    // The amounts of the region that the last release wrote.
    let mut old =
        state_dir.start_share("old", &["--memory", "2Gi", "--cores", "30"], &["sh", "-c", &program]);
    let region = state_dir.path().join("shares/old/region");

    // The daemons of the last release end; the command keeps running, and starts a program.
    kill_daemons(&state_dir);
    let uuid = RegionOwner::open(&region).unwrap().share(0).unwrap().uuid;
    layout_1::put(layout_1::FRESH, &region);
    layout_1::set_uuid(&region, 0, uuid);
    fs::write(&start, "").unwrap();

    // The next command starts a daemon of this release.
    let used = |state_dir: &TestStateDir| state_dir.find_share("old")?["gpuShares"][0]["usedBytes"].as_u64();
    eventually("the program's memory is counted", || used(&state_dir).filter(|used| *used >= GIB));
    state_dir.run_ok(&["resize", "old", "--memory", "3Gi", "--cores", "20"]);
    let limits = RegionOwner::open(&region).unwrap();
    assert_eq!((limits.layout(), limits.share(0).unwrap().memory), (1, 3 * GIB));
    assert!(old.is_running());

    // After a downgrade the daemon finds a region with an unknown layout.
    kill_daemons(&state_dir);
    for file in ["limits", "usage"] {
        let file = fs::File::options().write(true).open(region.join(file)).unwrap();
        file.write_all_at(&UNKNOWN_LAYOUT.to_le_bytes(), VERSION_OFFSET).unwrap();
    }
    let limits = fs::read(region.join("limits")).unwrap();
    assert!(state_dir.find_share("old").is_some());
    let (code, why) = state_dir.run_err(&["resize", "old", "--memory", "4Gi"]);
    assert!(code != 0 && why.contains("keeps its current limits"), "{why}");
    assert_eq!(fs::read(region.join("limits")).unwrap(), limits);
    assert!(old.is_running());
    state_dir.run_ok(&["stop", "old"]);
    state_dir.wait_until_clean();
}

fn kill_daemons(state_dir: &TestStateDir) {
    eventually("no daemon runs", || {
        // A standby takes over from the daemon, and starts the next standby.
        let daemons: Vec<u32> =
            [state_dir.standby_pid(), state_dir.daemon_pid()].into_iter().flatten().collect();
        daemons.iter().for_each(|daemon| signal(*daemon, libc::SIGKILL));
        daemons.is_empty().then_some(())
    });
}
