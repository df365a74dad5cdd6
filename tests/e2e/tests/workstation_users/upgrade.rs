//! An upgrade of the daemon while shares run: it manages regions of the last release, and leaves those of an unknown one alone.

use crate::support::{GIB, Home, eventually, sample, signal};
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
fn regions_of_the_last_release_are_managed_and_unknown_ones_are_left_alone() {
    let home = Home::new();
    let start = home.path().join("start");
    let program = format!(
        "until [ -e {} ]; do sleep 0.1; done; exec {} trainer --memory 1Gi --seconds 3000",
        start.display(),
        sample()
    );
    // The amounts of the region that the last release wrote.
    let mut old = home.share("old", &["--memory", "2Gi", "--cores", "30"], &["sh", "-c", &program]);
    let region = home.path().join("shares/old/region");

    // The daemons of the last release end; the command goes on, and a program starts in it.
    end_daemons(&home);
    let uuid = RegionOwner::open(&region).unwrap().share(0).unwrap().uuid;
    layout_1::put(layout_1::FRESH, &region);
    layout_1::set_uuid(&region, 0, uuid);
    fs::write(&start, "").unwrap();

    // Whoever asks starts a daemon of this release.
    let used = |home: &Home| home.find("old")?["parts"][0]["usedBytes"].as_u64();
    eventually("the program's memory is counted", || used(&home).filter(|used| *used >= GIB));
    home.fine(&["resize", "old", "--memory", "3Gi", "--cores", "20"]);
    let limits = RegionOwner::open(&region).unwrap();
    assert_eq!((limits.layout(), limits.share(0).unwrap().memory), (1, 3 * GIB));
    assert!(old.goes_on());

    // A daemon after a downgrade finds a region that it does not know.
    end_daemons(&home);
    for file in ["limits", "usage"] {
        let file = fs::File::options().write(true).open(region.join(file)).unwrap();
        file.write_all_at(&UNKNOWN_LAYOUT.to_le_bytes(), VERSION_OFFSET).unwrap();
    }
    let limits = fs::read(region.join("limits")).unwrap();
    assert!(home.find("old").is_some());
    let (code, why) = home.refused(&["resize", "old", "--memory", "4Gi"]);
    assert!(code != 0 && why.contains("limits that it has"), "{why}");
    assert_eq!(fs::read(region.join("limits")).unwrap(), limits);
    assert!(old.goes_on());
    home.fine(&["stop", "old"]);
    home.nothing_left();
}

fn end_daemons(home: &Home) {
    eventually("no daemon runs", || {
        // A standby takes over from the daemon, and calls the next standby.
        let daemons: Vec<u32> = [home.standby(), home.keeper()].into_iter().flatten().collect();
        daemons.iter().for_each(|daemon| signal(*daemon, libc::SIGKILL));
        daemons.is_empty().then_some(())
    });
}
