use super::*;
use crate::layout::MARKERS_OFFSET;
use crate::markers::{ActivitySample, MarkerPage, MarkerValue, PageOwner};
use crate::protocol::{MARKER_PAGE_COUNT, MARKER_PAGE_SIZE, STREAMS_PER_PAGE};
use crate::{MAX_GPUS, SLOT_COUNT, USAGE_FILE, UsageReader};
use std::collections::BTreeSet;
use std::sync::Mutex;

/// Launches one kernel and a marker into the first stream of the page.
fn launch(page: &MarkerPage) -> MarkerValue {
    let stream = page.stream(0).unwrap();
    let marker = stream.issued().next(false);
    stream.open(1);
    stream.set_issued(marker);
    stream.close();
    marker
}

fn is_occupied(folder: &TempDir, gpu: usize) -> bool {
    UsageReader::open(folder.path()).unwrap().gpu_activity(gpu).unwrap().streams.occupied
}

/// Takes all pages that are free, and returns their number.
fn take_all(region: &RegionTenant) -> usize {
    std::iter::from_fn(|| region.take_marker_page(0)).count()
}

#[test]
fn pages_are_taken_and_returned() {
    let (folder, _owner) = region(&[10, 10]);
    let (one, two) = (attach(&folder), attach(&folder));
    let page = one.take_marker_page(1).unwrap();
    assert_eq!(page.address() % MARKER_PAGE_SIZE, 0);
    let marker = launch(page);
    assert_eq!([0, 1].map(|gpu| is_occupied(&folder, gpu)), [false, true]);
    assert!(two.activity(1).occupied && !two.activity(0).occupied);
    page.stream(0).unwrap();
    assert!(!is_occupied(&folder, 1), "a new stream in the place of the old one has done nothing");
    launch(page);
    one.return_marker_page(page);
    assert!(!is_occupied(&folder, 1) && marker.number() == 1);
    assert_eq!(take_all(&two), MARKER_PAGE_COUNT);
    assert!(one.take_marker_page(0).is_none(), "all are taken");
    drop(two);
    assert_eq!(take_all(&one), MARKER_PAGE_COUNT);
    assert!([MAX_GPUS, usize::MAX].iter().all(|&gpu| attach(&folder).take_marker_page(gpu).is_none()));
}

#[test]
fn stream_beyond_the_page_is_refused() {
    let (folder, _owner) = region(&[10]);
    let tenant = attach(&folder);
    let page = tenant.take_marker_page(0).unwrap();
    let addresses: BTreeSet<u64> =
        (0..STREAMS_PER_PAGE).map(|index| page.stream(index).unwrap().passed_address()).collect();
    assert_eq!(addresses.len(), STREAMS_PER_PAGE);
    let end = (page.address() + MARKER_PAGE_SIZE) as u64;
    assert!(addresses.iter().all(|&at| at > page.address() as u64 && at + 64 <= end));
    assert!(page.stream(STREAMS_PER_PAGE).is_none() && page.stream(usize::MAX).is_none());
}

#[test]
fn page_of_a_killed_process_is_ignored_and_reclaimed() {
    let (folder, _owner) = region(&[10]);
    let (dead, living) = (attach(&folder), attach(&folder));
    launch(dead.take_marker_page(0).unwrap());
    let own = launch(living.take_marker_page(0).unwrap());
    let slot = end_as_killed(dead);
    assert!(is_occupied(&folder, 0));
    living.reclaim_dead_processes();
    assert_eq!(take_all(&living), MARKER_PAGE_COUNT - 1);
    assert!(living.activity(0).occupied, "by {own:?} of the living process");
    drop(living);
    // A process that takes the slot before it was reclaimed starts without pages as well.
    let dead = attach(&folder);
    assert_eq!(dead.slot(), slot);
    launch(dead.take_marker_page(0).unwrap());
    end_as_killed(dead);
    assert!(!is_occupied(&folder, 0), "its work is not the container's any more");
    let heir = attach(&folder);
    heir.reclaim_dead_processes();
    assert!(!heir.activity(0).occupied);
    assert_eq!(take_all(&heir), MARKER_PAGE_COUNT);
}

/// Processes take and return pages at once. Each writes its own number to every page that it has.
#[test]
fn page_is_never_given_twice() {
    let (folder, _owner) = region(&[10]);
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for number in 1..=4_u64 {
            let (folder, failed) = (&folder, &failed);
            scope.spawn(move || {
                for _ in 0..20 {
                    let tenant = attach(folder);
                    let pages: Vec<_> = (0..20).filter_map(|_| tenant.take_marker_page(0)).collect();
                    let streams: Vec<_> = pages.iter().map(|page| page.stream(0).unwrap()).collect();
                    for (index, stream) in (0..).zip(&streams) {
                        stream.set_issued(MarkerValue(number << 32 | index << 1));
                    }
                    std::thread::yield_now();
                    for (index, stream) in (0..).zip(&streams) {
                        if stream.issued() != MarkerValue(number << 32 | index << 1) {
                            failed.lock().unwrap().push((number, index, stream.issued()));
                        }
                    }
                    pages.iter().step_by(2).for_each(|page| tenant.return_marker_page(page));
                }
            });
        }
    });
    assert_eq!(*failed.lock().unwrap(), []);
    assert_eq!(take_all(&attach(&folder)), MARKER_PAGE_COUNT);
}

/// A process of the container can write any owner into the directory. It can use up its container's pages, and nothing
/// else.
#[test]
fn forged_directory_entries_are_harmless() {
    let (folder, _owner) = region(&[10]);
    let victim = attach(&folder);
    let page = victim.take_marker_page(0).unwrap();
    let marker = launch(page);
    let forged = [
        PageOwner { slot: 0xfffe, gpu: 0xffff }.pack(),
        PageOwner { slot: SLOT_COUNT, gpu: 0 }.pack(),
        PageOwner { slot: victim.slot(), gpu: MAX_GPUS }.pack(),
        PageOwner { slot: victim.slot() + 1, gpu: 0 }.pack(),
        PageOwner { slot: victim.slot(), gpu: 1 }.pack(),
    ];
    for index in 1..MARKER_PAGE_COUNT {
        let entry = forged[index % forged.len()];
        overwrite(&folder, USAGE_FILE, MARKERS_OFFSET + index * 4, &entry.to_le_bytes());
        overwrite(&folder, USAGE_FILE, MARKERS_OFFSET + (index + 1) * MARKER_PAGE_SIZE, &[0xff; 512]);
    }
    let reader = UsageReader::open(folder.path()).unwrap();
    let seen = reader.gpu_activity(0).unwrap().streams;
    // Only the victim's own page is about this GPU.
    assert_eq!(seen, ActivitySample { occupied: true, ..ActivitySample::default() });
    for gpu in [1, MAX_GPUS - 1, MAX_GPUS, usize::MAX] {
        assert!(reader.gpu_activity(gpu).is_ok());
        let _ = victim.activity(gpu);
    }
    assert!(victim.take_marker_page(0).is_none());
    page.stream(0).unwrap().set_settled(marker);
    // Entries in the names of other processes are dropped when these attach or end.
    let other = attach(&folder);
    assert_eq!((other.slot(), take_all(&other)), (victim.slot() + 1, MARKER_PAGE_COUNT / forged.len()));
    drop((victim, other));
    let left = take_all(&attach(&folder));
    assert_eq!(left, 1 + (1..MARKER_PAGE_COUNT).filter(|index| index % forged.len() >= 2).count());
}
