use super::*;
use crate::layout::{GpuAccount, ProcessLane, ProcessSlot, USAGE_SIZE, UsageFile};
use crate::markers::ActivitySample;
use crate::{ComputeActivity, Forgery, MAX_GPUS, RegionError, USAGE_FILE, UsageReader};
use std::io::Write;
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::Relaxed;

#[test]
fn snapshot_reports_usage_of_live_and_dead_processes() {
    let (folder, _owner) = region(&[10, 10]);
    let (one, two, dead) = (attach(&folder), attach(&folder), attach(&folder));
    one.reserve(0, 3 * MEMORY_UNIT).unwrap();
    two.reserve(0, 4 * MEMORY_UNIT).unwrap();
    two.reserve(1, 5 * MEMORY_UNIT).unwrap();
    dead.reserve(0, 2 * MEMORY_UNIT).unwrap();
    assert!(one.reserve(0, 3 * MEMORY_UNIT).is_err());
    two.lane(1).waiting.store(u32::MAX, Relaxed);
    two.lane(1).busy_until.store(99, Relaxed);
    two.lane(1).spent.store(98, Relaxed);
    one.gpu_account(1).spent().store(97, Relaxed);
    one.gpu_account(1).throttled().store(96, Relaxed);
    one.gpu_account(1).doorbell().store(95, Relaxed);
    dead.lane(1).waiting.store(5, Relaxed);
    end_as_killed(dead);
    let reader = UsageReader::open(folder.path()).unwrap();
    let seen = reader.snapshot().unwrap();
    assert_eq!(seen.forged, []);
    assert_eq!(
        (seen.gpus[0].used, seen.gpus[0].dead, seen.gpus[0].peak),
        (7 * MEMORY_UNIT, 2 * MEMORY_UNIT, 9 * MEMORY_UNIT)
    );
    assert_eq!((seen.gpus[0].refusals, seen.gpus[1].refusals, seen.gpus[1].used), (1, 0, 5 * MEMORY_UNIT));
    assert_eq!((seen.gpus[1].spent, seen.gpus[1].throttled, seen.gpus[1].doorbell), (97, 96, 95));
    assert_eq!(seen.processes.len(), 2);
    let process = &seen.processes[1];
    assert_eq!((process.slot, process.pid), (two.slot(), std::process::id()));
    assert_eq!((process.held[0], process.held[1]), (4 * MEMORY_UNIT, 5 * MEMORY_UNIT));
    assert_eq!((process.waiting[1], process.busy_until[1], process.spent[1]), (1 << 22, 99, 98));
    let activity = ComputeActivity { doorbell: 95, waiting: 1 << 22, streams: ActivitySample::default() };
    assert_eq!(reader.gpu_activity(1).unwrap(), activity);
    assert_eq!(reader.gpu_activity(MAX_GPUS).unwrap(), ComputeActivity::default());
}

#[test]
fn inconsistent_accounts_are_reported_as_forged() {
    let (folder, _owner) = region(&[10]);
    let region = attach(&folder);
    region.reserve(0, 3 * MEMORY_UNIT).unwrap();
    let reader = UsageReader::open(folder.path()).unwrap();
    let word = offset_of!(UsageFile, accounts) + offset_of!(GpuAccount, word);
    let lane = offset_of!(UsageFile, slots)
        + region.slot() * size_of::<ProcessSlot>()
        + offset_of!(ProcessSlot, lanes);
    overwrite(&folder, USAGE_FILE, word, &[0; 3]);
    let forged = reader.snapshot().unwrap().forged;
    assert_eq!(forged, [Forgery::Accounts { gpu: 0, word: 0, slots: 3 * MEMORY_UNIT }]);
    overwrite(&folder, USAGE_FILE, word, &[3, 0, 0]);
    assert_eq!(reader.snapshot().unwrap().forged, []);
    overwrite(&folder, USAGE_FILE, lane + offset_of!(ProcessLane, intent) + 4, &[77]);
    let forged = reader.snapshot().unwrap().forged;
    assert!(forged.contains(&Forgery::Slot { slot: region.slot(), gpu: 0 }), "{forged:?}");
}

#[test]
fn truncated_file_is_an_error_and_not_a_signal() {
    let (folder, _owner) = region(&[10]);
    let reader = UsageReader::open(folder.path()).unwrap();
    drop(attach(&folder));
    let file = std::fs::OpenOptions::new().write(true).open(folder.path().join(USAGE_FILE)).unwrap();
    for length in [4096, 100, 0] {
        file.set_len(length).unwrap();
        assert!(matches!(reader.snapshot(), Err(RegionError::Damaged { .. })));
        assert!(matches!(reader.gpu_activity(0), Err(RegionError::Damaged { .. })));
        assert!(matches!(UsageReader::open(folder.path()), Err(RegionError::Damaged { .. })));
    }
}

#[test]
fn enlarged_file_is_truncated_to_its_length_and_not_below() {
    let (folder, _owner) = region(&[10]);
    let reader = UsageReader::open(folder.path()).unwrap();
    let region = attach(&folder);
    region.reserve(0, 3 * MEMORY_UNIT).unwrap();
    assert_eq!(reader.truncate_excess().unwrap(), None);
    let path = folder.path().join(USAGE_FILE);
    let mut tenant = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
    tenant.write_all(&[7; 5000]).unwrap();
    assert!(reader.truncate_excess().unwrap().is_some_and(|bytes| bytes >= 5000));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), USAGE_SIZE as u64);
    assert_eq!(reader.truncate_excess().unwrap(), None);
    assert_eq!(reader.snapshot().unwrap().gpus[0].used, 3 * MEMORY_UNIT, "its contents are kept");
    // Blocks that are allocated beyond the end do not make the file longer.
    #[allow(unsafe_code)]
    // SAFETY: the call takes no pointers, and the file descriptor is open.
    let kept = unsafe {
        libc::fallocate(tenant.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, USAGE_SIZE as libc::off_t, 64 << 20)
    };
    assert_eq!(kept, 0);
    assert!(reader.truncate_excess().unwrap().is_some_and(|bytes| bytes >= 60 << 20));
    assert_eq!(reader.truncate_excess().unwrap(), None);
    // A truncated file stays as it is: it is reported in another way.
    tenant.set_len(100).unwrap();
    assert_eq!(reader.truncate_excess().unwrap(), None);
    // A symbolic link in place of the file is not followed.
    let other = folder.path().join("other");
    std::fs::write(&other, "another file").unwrap();
    tenant.set_len(USAGE_SIZE as u64 + 1).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(&other, &path).unwrap();
    assert!(reader.truncate_excess().is_err());
    assert_eq!(std::fs::read(&other).unwrap(), b"another file");
}

/// Programs change their accounts while the daemon reads: no snapshot mistakes a change for a forgery.
#[test]
fn accounts_changed_during_a_read_are_not_reported_as_forged() {
    let (folder, _owner) = region(&[100]);
    let reader = UsageReader::open(folder.path()).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for units in 1..=2 {
            let (folder, done) = (&folder, &done);
            scope.spawn(move || {
                let region = attach(folder);
                while !done.load(Relaxed) {
                    region.reserve(0, units * MEMORY_UNIT).unwrap();
                    region.release(0, units * MEMORY_UNIT);
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
            assert!(seen.gpus[0].used <= 3 * MEMORY_UNIT, "{:?}", seen.gpus[0]);
        }
        done.store(true, Relaxed);
    });
}
