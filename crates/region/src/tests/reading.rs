use super::*;
use crate::layout::{GpuAccount, ProcessLane, Slot, USAGE_SIZE, UsageFile};
use crate::{ComputeDemand, Forgery, MAX_GPUS, RegionError, USAGE, UsageReader};
use std::io::Write;
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::Relaxed;

#[test]
fn the_reader_sees_what_processes_have() {
    let (folder, _owner) = region(&[10, 10]);
    let (one, two, dead) = (attach(&folder), attach(&folder), attach(&folder));
    one.reserve(0, 3 * UNIT).unwrap();
    two.reserve(0, 4 * UNIT).unwrap();
    two.reserve(1, 5 * UNIT).unwrap();
    dead.reserve(0, 2 * UNIT).unwrap();
    assert!(one.reserve(0, 3 * UNIT).is_err());
    two.lane(1).waiting.store(u32::MAX, Relaxed);
    two.lane(1).busy_until.store(99, Relaxed);
    two.lane(1).spent.store(98, Relaxed);
    one.gpu_account(1).spent().store(97, Relaxed);
    one.gpu_account(1).throttled().store(96, Relaxed);
    one.gpu_account(1).doorbell().store(95, Relaxed);
    dead.lane(1).waiting.store(5, Relaxed);
    bury_alive(dead);
    let reader = UsageReader::open(folder.path()).unwrap();
    let seen = reader.snapshot().unwrap();
    assert_eq!(seen.forged, []);
    assert_eq!((seen.gpus[0].used, seen.gpus[0].dead, seen.gpus[0].peak), (7 * UNIT, 2 * UNIT, 9 * UNIT));
    assert_eq!((seen.gpus[0].refusals, seen.gpus[1].refusals, seen.gpus[1].used), (1, 0, 5 * UNIT));
    assert_eq!((seen.gpus[1].spent, seen.gpus[1].throttled, seen.gpus[1].doorbell), (97, 96, 95));
    assert_eq!(seen.processes.len(), 2);
    let process = &seen.processes[1];
    assert_eq!((process.slot, process.pid), (two.slot(), std::process::id()));
    assert_eq!((process.held[0], process.held[1]), (4 * UNIT, 5 * UNIT));
    assert_eq!((process.waiting[1], process.busy_until[1], process.spent[1]), (1 << 22, 99, 98));
    let demand = ComputeDemand { spent: 97, doorbell: 95, waiting: 1 << 22, busy_until: 99 };
    assert_eq!(reader.demand(1, 50).unwrap(), demand);
    assert_eq!(reader.demand(MAX_GPUS, 50).unwrap(), ComputeDemand::default());
}

#[test]
fn forged_books_are_noted() {
    let (folder, _owner) = region(&[10]);
    let region = attach(&folder);
    region.reserve(0, 3 * UNIT).unwrap();
    let reader = UsageReader::open(folder.path()).unwrap();
    let word = offset_of!(UsageFile, accounts) + offset_of!(GpuAccount, word);
    let lane = offset_of!(UsageFile, slots) + region.slot() * size_of::<Slot>() + offset_of!(Slot, lanes);
    overwrite(&folder, USAGE, word, &[0; 3]);
    let forged = reader.snapshot().unwrap().forged;
    assert_eq!(forged, [Forgery::Accounts { gpu: 0, word: 0, slots: 3 * UNIT }]);
    overwrite(&folder, USAGE, word, &[3, 0, 0]);
    assert_eq!(reader.snapshot().unwrap().forged, []);
    overwrite(&folder, USAGE, lane + offset_of!(ProcessLane, intent) + 4, &[77]);
    let forged = reader.snapshot().unwrap().forged;
    assert!(forged.contains(&Forgery::Slot { slot: region.slot(), gpu: 0 }), "{forged:?}");
}

#[test]
fn a_file_cut_short_is_an_error_and_no_signal() {
    let (folder, _owner) = region(&[10]);
    let reader = UsageReader::open(folder.path()).unwrap();
    drop(attach(&folder));
    let file = std::fs::OpenOptions::new().write(true).open(folder.path().join(USAGE)).unwrap();
    for length in [4096, 100, 0] {
        file.set_len(length).unwrap();
        assert!(matches!(reader.snapshot(), Err(RegionError::Damaged { .. })));
        assert!(matches!(reader.demand(0, 0), Err(RegionError::Damaged { .. })));
        assert!(matches!(UsageReader::open(folder.path()), Err(RegionError::Damaged { .. })));
    }
}

#[test]
fn a_file_made_longer_is_cut_back_and_never_shorter() {
    let (folder, _owner) = region(&[10]);
    let reader = UsageReader::open(folder.path()).unwrap();
    let region = attach(&folder);
    region.reserve(0, 3 * UNIT).unwrap();
    assert_eq!(reader.cut().unwrap(), None);
    let path = folder.path().join(USAGE);
    let mut tenant = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
    tenant.write_all(&[7; 5000]).unwrap();
    assert!(reader.cut().unwrap().is_some_and(|bytes| bytes >= 5000));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), USAGE_SIZE as u64);
    assert_eq!(reader.cut().unwrap(), None);
    assert_eq!(reader.snapshot().unwrap().gpus[0].used, 3 * UNIT, "what it said stands");
    // Room behind the end makes no file longer.
    #[allow(unsafe_code)]
    // SAFETY: no pointers.
    let kept = unsafe {
        libc::fallocate(tenant.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, USAGE_SIZE as libc::off_t, 64 << 20)
    };
    assert_eq!(kept, 0);
    assert!(reader.cut().unwrap().is_some_and(|bytes| bytes >= 60 << 20));
    assert_eq!(reader.cut().unwrap(), None);
    // One that was cut short stays so: it is told of otherwise.
    tenant.set_len(100).unwrap();
    assert_eq!(reader.cut().unwrap(), None);
    // Nobody is led elsewhere.
    let other = folder.path().join("other");
    std::fs::write(&other, "of somebody else").unwrap();
    tenant.set_len(USAGE_SIZE as u64 + 1).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(&other, &path).unwrap();
    assert!(reader.cut().is_err());
    assert_eq!(std::fs::read(&other).unwrap(), b"of somebody else");
}

/// Programs never stop while the agent looks: no snapshot takes their changes for forgeries.
#[test]
fn books_that_change_are_not_forged() {
    let (folder, _owner) = region(&[100]);
    let reader = UsageReader::open(folder.path()).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for units in 1..=2 {
            let (folder, done) = (&folder, &done);
            scope.spawn(move || {
                let region = attach(folder);
                while !done.load(Relaxed) {
                    region.reserve(0, units * UNIT).unwrap();
                    region.release(0, units * UNIT);
                }
            });
        }
        for _ in 0..500 {
            let seen = reader.snapshot();
            if seen.as_ref().is_err() || !seen.as_ref().unwrap().forged.is_empty() {
                done.store(true, Relaxed);
            }
            let seen = seen.unwrap();
            assert_eq!(seen.forged, []);
            assert!(seen.gpus[0].used <= 3 * UNIT, "{:?}", seen.gpus[0]);
        }
        done.store(true, Relaxed);
    });
}
