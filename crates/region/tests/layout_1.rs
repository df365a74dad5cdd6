//! Regions that the last release with layout 1 wrote can be read, changed and used by this one.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/layout_1.rs"]
mod layout_1;

use partage_region::arbiter::Arbiter;
use partage_region::{
    GpuShare, MEMORY_UNIT, RegionHandle, RegionPolicy, RegionTenant, UsageReader, WHOLE_GPU, futex,
};
use std::fs;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

const GIB: u64 = 1 << 30;

/// Compute of the first GPU of the region `used`, in thousandths of a percent.
const USED_CORES: u32 = 12_500;

#[test]
fn limits_and_usage_are_read_as_they_were_written() {
    let folder = tempfile::tempdir().unwrap();
    layout_1::put(layout_1::USED, folder.path());
    let handle = RegionHandle::open(folder.path()).unwrap();
    let owner = handle.owner();
    assert_eq!((owner.layout(), owner.gpus(), owner.base_gpus()), (1, 2, 2));
    assert_eq!([0, 1].map(|gpu| owner.share(gpu).unwrap()), layout_1::used_shares(USED_CORES));
    assert_eq!(owner.policy(), RegionPolicy { oversubscribe: true, throttle_copies: false });
    assert_eq!((owner.heartbeat(0), owner.turns(0).unwrap().turn().is_open()), (55_555, true));
    let seen = handle.reader().snapshot().unwrap();
    assert_eq!((seen.forged, seen.processes), (vec![], vec![]), "its process is dead");
    let [first, second] = [seen.gpus[0], seen.gpus[1]];
    assert_eq!((first.used, first.dead, second.dead), (0, GIB + 2 * MEMORY_UNIT, 5 * GIB));
    assert_eq!((first.peak, first.refusals), (GIB + 3 * MEMORY_UNIT, 1));
    assert_eq!((first.spent, first.throttled, first.doorbell), (123_456_789, 4_321, 17));
    // Adopting unchanged shares changes nothing.
    let before = fs::read(folder.path().join("limits")).unwrap();
    let adopted = RegionHandle::adopt(
        folder.path(),
        &layout_1::used_shares(USED_CORES),
        layout_1::owner_of(folder.path()),
    )
    .unwrap();
    assert!(!adopted.apply(&layout_1::used_shares(USED_CORES)).unwrap());
    assert!(fs::read(folder.path().join("limits")).unwrap() == before);
}

#[test]
fn process_of_this_release_takes_over_what_the_dead_one_held() {
    let folder = tempfile::tempdir().unwrap();
    layout_1::put(layout_1::USED, folder.path());
    let tenant = RegionTenant::attach(folder.path()).unwrap();
    assert_eq!((tenant.gpus(), tenant.find(&[0x33; 16]), tenant.generation()), (2, Some(1), 0));
    assert_eq!((tenant.cores(0), tenant.ceiling(0), tenant.ceiling(1)), (12_500, 50_010, WHOLE_GPU));
    assert_eq!((tenant.used(0), tenant.used(1)), (0, 0), "reclaimed on attach");
    tenant.reserve(0, 8 * GIB).unwrap();
    assert!(tenant.reserve(0, 1).is_err());
    tenant.reserve(1, 100 * GIB).unwrap();
    let reader = UsageReader::open(folder.path()).unwrap();
    let seen = reader.snapshot().unwrap();
    assert_eq!((seen.forged, seen.gpus[0].used, seen.gpus[0].refusals), (vec![], 8 * GIB, 2));
    drop(tenant);
    assert_eq!(reader.snapshot().unwrap().gpus[0].used, 0);
}

#[test]
fn limits_are_resized_in_both_directions_and_no_turns_are_given() {
    let folder = tempfile::tempdir().unwrap();
    layout_1::put(layout_1::FRESH, folder.path());
    let share = GpuShare {
        uuid: [0x11; 16],
        memory: 2 * GIB,
        context: 414 << 20,
        cores: 30_000,
        ceiling: 30_000,
        priority: 0,
        waits_for_turns: true,
        low_latency: false,
    };
    let adopt = |share: &GpuShare| {
        RegionHandle::adopt(folder.path(), std::slice::from_ref(share), layout_1::owner_of(folder.path()))
            .unwrap()
    };
    let handle = Arc::new(adopt(&share));
    let tenant = RegionTenant::attach(folder.path()).unwrap();
    assert!(tenant.reserve(0, 3 * GIB).is_err());
    for (memory, cores) in [(3 * GIB, 60_000), (GIB, 10_010)] {
        assert!(handle.apply(&[GpuShare { memory, cores, ceiling: cores, ..share.clone() }]).unwrap());
        assert_eq!((tenant.memory_limit(0), tenant.cores(0)), (Some(memory), cores));
    }
    assert!(!tenant.has_shared_markers() && tenant.take_marker_page(0).is_some() && tenant.is_gated(0));
    let arbiter = Arbiter::new();
    let member = arbiter.add(Arc::clone(&handle)).unwrap();
    let account = tenant.gpu_account(0);
    tenant.lane(0).waiting.store(1, SeqCst);
    account.doorbell().fetch_add(1, SeqCst);
    futex::wake(account.doorbell(), u32::MAX);
    // The absence of an event can only be observed by waiting.
    std::thread::sleep(Duration::from_millis(100));
    assert!(!tenant.limits(0).turn().is_open());
    assert_eq!((tenant.heartbeat(0), arbiter.decisions()), (0, 0), "its processes limit their own rate");
    assert!(arbiter.refresh(member).is_ok());
    arbiter.remove(member);
}
