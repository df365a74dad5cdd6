//! Regions that earlier code wrote in layout 2 can be read, changed and used by this one.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/layout_1.rs"]
mod layout_1;

use partage_region::arbiter::Arbiter;
use partage_region::{GpuShare, MEMORY_UNIT, RegionHandle, RegionPolicy, RegionTenant, UsageReader};
use std::sync::Arc;

const GIB: u64 = 1 << 30;

/// A region that no process has used.
const FRESH: [&[u8]; 2] = [
    include_bytes!("fixtures/layout-2/fresh/limits.prefix"),
    include_bytes!("fixtures/layout-2/fresh/usage.prefix"),
];

/// A region with an attached GPU, whose process was killed.
const USED: [&[u8]; 2] = [
    include_bytes!("fixtures/layout-2/used/limits.prefix"),
    include_bytes!("fixtures/layout-2/used/usage.prefix"),
];

/// Compute of the first GPU of the region `used`, in thousandths of a percent.
const USED_CORES: u32 = 12_345;

#[test]
fn region_of_layout_2_is_read_as_it_was_written() {
    let folder = tempfile::tempdir().unwrap();
    layout_1::put(USED, folder.path());
    let handle = RegionHandle::open(folder.path()).unwrap();
    let owner = handle.owner();
    assert_eq!((owner.layout(), owner.gpus(), owner.base_gpus()), (2, 2, 1));
    assert_eq!([0, 1].map(|gpu| owner.share(gpu).unwrap()), layout_1::used_shares(USED_CORES));
    assert_eq!(owner.policy(), RegionPolicy { oversubscribe: true, throttle_copies: false });
    let seen = handle.reader().snapshot().unwrap();
    assert_eq!((seen.forged, seen.processes), (vec![], vec![]), "its process is dead");
    let [first, second] = [seen.gpus[0], seen.gpus[1]];
    assert_eq!((first.used, first.dead, second.dead), (0, GIB + 2 * MEMORY_UNIT, 5 * GIB));
    assert_eq!((first.peak, first.refusals), (GIB + 3 * MEMORY_UNIT, 1));
    assert_eq!((first.spent, first.throttled, first.doorbell), (123_456_789, 4_321, 17));
    // Adopting unchanged shares changes no limit.
    let adopted = RegionHandle::adopt(
        folder.path(),
        &layout_1::used_shares(USED_CORES),
        layout_1::owner_of(folder.path()),
    )
    .unwrap();
    assert!(!adopted.apply(&layout_1::used_shares(USED_CORES)).unwrap());
}

#[test]
fn process_takes_over_what_the_dead_one_held_in_layout_2() {
    let folder = tempfile::tempdir().unwrap();
    layout_1::put(USED, folder.path());
    let tenant = RegionTenant::attach(folder.path()).unwrap();
    assert_eq!((tenant.cores(0), tenant.ceiling(0)), (12_345, 50_010));
    assert_eq!((tenant.used(0), tenant.used(1)), (0, 0), "reclaimed on attach");
    tenant.reserve(0, 8 * GIB).unwrap();
    assert!(tenant.reserve(0, 1).is_err());
    let reader = UsageReader::open(folder.path()).unwrap();
    assert_eq!(reader.snapshot().unwrap().gpus[0].used, 8 * GIB);
    drop(tenant);
    assert_eq!(reader.snapshot().unwrap().gpus[0].used, 0);
}

/// A shim of layout 2 puts no markers, so its work cannot be charged: it keeps its share by its own account, which it
/// does as long as no scheduler sends heartbeats.
#[test]
fn region_of_layout_2_gets_no_heartbeat() {
    let folder = tempfile::tempdir().unwrap();
    layout_1::put(FRESH, folder.path());
    let share = GpuShare {
        uuid: [0x11; 16],
        memory: 3 * GIB,
        cores: 60_000,
        ceiling: 60_000,
        ..layout_1::used_shares(USED_CORES)[0].clone()
    };
    let handle =
        Arc::new(RegionHandle::adopt(folder.path(), &[share], layout_1::owner_of(folder.path())).unwrap());
    let arbiter = Arbiter::new();
    arbiter.add(Arc::clone(&handle)).unwrap();
    let tenant = RegionTenant::attach(folder.path()).unwrap();
    assert_eq!((tenant.memory_limit(0), tenant.cores(0)), (Some(3 * GIB), 60_000), "limits are changed");
    arbiter.stop();
    assert_eq!((handle.owner().heartbeat(0), handle.owner().limits(0).unwrap().charged()), (0, 0));
}
