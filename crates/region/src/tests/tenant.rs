use super::*;
use crate::layout::{FileHeader, LIMITS_SIZE, USAGE_SIZE, UsageFile};
use crate::protocol::NO_MEMORY_LIMIT;
use crate::{LIMITS_FILE, MAX_GPUS, RegionError, ReservationRefused, SLOT_COUNT, USAGE_FILE, futex};
use proptest::prelude::*;
use std::mem::offset_of;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;

#[test]
fn process_attaches_is_listed_and_detaches() {
    let (folder, _owner) = region(&[10, 20]);
    let (one, two) = (attach(&folder), attach(&folder));
    assert_eq!((one.gpus(), one.slot(), two.slot()), (2, 0, 1));
    assert_eq!((one.find(&[7; 16]), one.find(&[8; 16])), (Some(0), None));
    one.reserve(1, 3 * MEMORY_UNIT - 1).unwrap();
    let seen: Vec<_> = two.processes().collect();
    assert_eq!(seen.len(), 2);
    assert_eq!((seen[0].pid, seen[0].held[1], seen[1].held[1]), (std::process::id(), 3 * MEMORY_UNIT, 0));
    assert!(seen[0].started > 0 && seen[0].namespace > 0);
    assert_eq!(
        (two.used(1), two.used(0), two.held(1), one.held(1)),
        (3 * MEMORY_UNIT, 0, 0, 3 * MEMORY_UNIT)
    );
    drop(one);
    assert_eq!((two.used(1), two.processes().count()), (0, 1));
    assert_eq!(two.gpu_account(1).peak(), 3 * MEMORY_UNIT);
    assert_eq!(attach(&folder).slot(), 0);
}

#[test]
fn reservations_are_granted_up_to_the_limit() {
    let (folder, _owner) = region(&[10]);
    let (one, two) = (attach(&folder), attach(&folder));
    one.reserve(0, 6 * MEMORY_UNIT).unwrap();
    let refused =
        ReservationRefused { asked: 4 * MEMORY_UNIT + 1, used: 6 * MEMORY_UNIT, limit: 10 * MEMORY_UNIT };
    assert_eq!(two.reserve(0, 4 * MEMORY_UNIT + 1), Err(refused));
    two.reserve(0, 4 * MEMORY_UNIT).unwrap();
    assert!(one.reserve(0, 1).is_err() && one.reserve(0, u64::MAX).is_err());
    one.reserve(0, 0).unwrap();
    assert_eq!(one.gpu_account(0).refusals(), 3);
    // A caller that only tries is not counted as refused until it reports that.
    assert!(!one.try_reserve(0, 1) && one.gpu_account(0).refusals() == 3);
    one.note_refusal(0);
    assert_eq!(one.gpu_account(0).refusals(), 4);
    two.release(0, 4 * MEMORY_UNIT);
    one.reserve(0, 4 * MEMORY_UNIT).unwrap();
    assert_eq!((one.used(0), one.held(0), two.held(0)), (10 * MEMORY_UNIT, 10 * MEMORY_UNIT, 0));
    // A GPU that the container does not have: nothing is granted, and nothing breaks.
    for gpu in [1, MAX_GPUS, usize::MAX] {
        assert!(one.reserve(gpu, 1).is_err());
        one.release(gpu, 1);
        assert_eq!((one.used(gpu), one.held(gpu), one.memory_limit(gpu)), (0, 0, Some(0)));
        one.lane(gpu).waiting.fetch_add(1, Relaxed);
    }
}

#[test]
fn unlimited_gpu_grants_and_counts_everything() {
    let folder = tempfile::tempdir().unwrap();
    let owner = RegionOwner::create(folder.path(), &[GpuShare::default()], RegionPolicy::default()).unwrap();
    let region = attach(&folder);
    region.reserve(0, 5 * MEMORY_UNIT).unwrap();
    assert_eq!((region.used(0), region.memory_limit(0)), (5 * MEMORY_UNIT, None));
    region.reserve(0, u64::MAX).unwrap();
    region.release(0, u64::MAX);
    assert_eq!(region.used(0), 0);
    region.reserve(0, 5 * MEMORY_UNIT).unwrap();
    // A limit that is set later counts what is already in use.
    owner.set(0, &share(6)).unwrap();
    assert!(region.reserve(0, 2 * MEMORY_UNIT).is_err() && region.reserve(0, MEMORY_UNIT).is_ok());
}

#[test]
fn limits_change_while_processes_run() {
    let (folder, owner) = region(&[10]);
    let region = attach(&folder);
    region.reserve(0, 8 * MEMORY_UNIT).unwrap();
    owner.set(0, &share(4)).unwrap();
    assert_eq!(region.memory_limit(0), Some(4 * MEMORY_UNIT));
    assert!(region.reserve(0, 1).is_err());
    assert_eq!(region.memory_limit(0).unwrap().saturating_sub(region.used(0)), 0);
    region.release(0, 5 * MEMORY_UNIT);
    region.reserve(0, MEMORY_UNIT).unwrap();
    assert_eq!(region.used(0), 4 * MEMORY_UNIT);
    // A GPU is attached while the process runs.
    let added = GpuShare {
        uuid: [9; 16],
        cores: 30_000,
        ceiling: 50_000,
        priority: 2,
        waits_for_turns: true,
        ..share(2)
    };
    assert!(matches!(owner.set(1, &added), Err(RegionError::NoSuchGpu { gpu: 1, gpus: 1 })));
    assert_eq!(owner.extend(&added).unwrap(), 1);
    assert_eq!((region.gpus(), region.find(&[9; 16]), owner.share(1)), (2, Some(1), Some(added)));
    let limits = region.limits(1);
    assert_eq!(
        (region.cores(1), region.ceiling(1), limits.priority(), limits.waits_for_turns()),
        (30_000, 50_000, 2, true)
    );
    region.reserve(1, 2 * MEMORY_UNIT).unwrap();
    let policy = RegionPolicy { oversubscribe: true, throttle_copies: true };
    owner.set_policy(policy);
    assert_eq!((region.policy(), owner.policy()), (policy, policy));
    let too_much = GpuShare { memory: NO_MEMORY_LIMIT - 1, ..share(0) };
    assert!(matches!(owner.set(0, &too_much), Err(RegionError::MemoryLimitTooLarge(_))));
}

#[test]
fn reopened_region_keeps_its_usage() {
    let (folder, owner) = region(&[10]);
    let region = attach(&folder);
    region.reserve(0, 8 * MEMORY_UNIT).unwrap();
    owner.beat(0, 77);
    owner.beat(1, 78);
    drop(owner);
    let owner = RegionOwner::open(folder.path()).unwrap();
    assert_eq!((owner.gpus(), owner.heartbeat(0), region.heartbeat(0)), (1, 77, 77));
    // The region has no such GPU, so there is no heartbeat.
    assert_eq!((owner.heartbeat(1), region.heartbeat(1)), (0, 0));
    owner.set(0, &share(9)).unwrap();
    assert_eq!(region.memory_limit(0), Some(9 * MEMORY_UNIT));
    RegionOwner::create(folder.path(), &[share(20)], RegionPolicy::default()).unwrap();
    assert_eq!(
        (attach(&folder).used(0), attach(&folder).memory_limit(0)),
        (8 * MEMORY_UNIT, Some(20 * MEMORY_UNIT))
    );
    // A `usage` that cannot be used is created again.
    overwrite(&folder, USAGE_FILE, 0, b"nonsense");
    RegionOwner::create(folder.path(), &[share(20)], RegionPolicy::default()).unwrap();
    assert_eq!(attach(&folder).used(0), 0);
    let many = vec![share(1); MAX_GPUS + 1];
    assert!(matches!(
        RegionOwner::create(folder.path(), &many, RegionPolicy::default()),
        Err(RegionError::TooManyGpus(17))
    ));
    let names: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
}

#[test]
fn invalid_files_are_reported_by_cause() {
    let (folder, _owner) = region(&[1]);
    let say = || RegionTenant::attach(folder.path()).err().unwrap();
    for (file, size) in [(LIMITS_FILE, LIMITS_SIZE), (USAGE_FILE, USAGE_SIZE)] {
        let path = folder.path().join(file);
        let sound = std::fs::read(&path).unwrap();
        for version in [0, 4, 255] {
            overwrite(&folder, file, offset_of!(FileHeader, version), &[version]);
            let RegionError::UnsupportedVersion { path: of, found, supported } = say() else {
                panic!("{}", say())
            };
            assert_eq!((of, found, supported), (path.clone(), version.into(), 1..=3));
            assert!(say().to_string().contains(&format!("layout {version},")), "{}", say());
        }
        for (at, bytes) in [(0, 1u8), (offset_of!(FileHeader, size), 1)] {
            std::fs::write(&path, &sound).unwrap();
            overwrite(&folder, file, at, &[bytes]);
            assert!(matches!(say(), RegionError::Damaged { .. }), "{}", say());
        }
        for length in [0, 1, 23, 24, 4096, size - 4096, size - 1] {
            std::fs::write(&path, &sound[..length]).unwrap();
            assert!(matches!(say(), RegionError::Damaged { .. }), "{length}: {}", say());
        }
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(say(), RegionError::Missing(ref missing) if *missing == path));
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        assert!(say().to_string().contains("is damaged: it is a symbolic link"), "{}", say());
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(say().to_string().contains("is damaged: it is not a regular file"), "{}", say());
        std::fs::remove_dir(&path).unwrap();
        std::fs::write(&path, &sound).unwrap();
        assert!(RegionTenant::attach(folder.path()).is_ok());
    }
}

#[test]
fn attach_is_refused_when_all_slots_are_taken() {
    let (folder, _owner) = region(&[10]);
    let observer = attach(&folder);
    // Takes every other slot as live processes would.
    let holder = observer.another_opening();
    assert!((1..SLOT_COUNT).all(|slot| holder.try_acquire(slot)));
    assert!(matches!(RegionTenant::attach(folder.path()), Err(RegionError::NoFreeSlot)));
    holder.release(500);
    assert_eq!(attach(&folder).slot(), 500);
    // Slots that are marked but dead are found as well.
    for word in 0..SLOT_COUNT / 64 {
        overwrite(&folder, USAGE_FILE, 128 + 8 * word, &[0xff; 8]);
    }
    assert_eq!(attach(&folder).slot(), 500);
    drop(holder);
    observer.reserve(0, 10 * MEMORY_UNIT).unwrap();
}

#[test]
fn reservation_reclaims_memory_of_dead_processes() {
    let (folder, _owner) = region(&[10]);
    let (dead, living) = (attach(&folder), attach(&folder));
    dead.reserve(0, 9 * MEMORY_UNIT).unwrap();
    dead.lane(0).waiting.store(3, Relaxed);
    let slot = end_as_killed(dead);
    living.reserve(0, 10 * MEMORY_UNIT).unwrap();
    assert_eq!(living.gpu_account(0).refusals(), 0);
    let heir = attach(&folder);
    assert_eq!((heir.slot(), heir.lane(0).waiting.load(Relaxed), heir.held(0)), (slot, 0, 0));
}

#[test]
fn reused_pid_does_not_keep_a_dead_slot_alive() {
    let (folder, _owner) = region(&[10]);
    let (dead, living) = (attach(&folder), attach(&folder));
    dead.reserve(0, 9 * MEMORY_UNIT).unwrap();
    living.reserve(0, MEMORY_UNIT).unwrap();
    let slots = offset_of!(UsageFile, slots);
    let slot_size = size_of::<crate::layout::ProcessSlot>();
    // The dead process's pid is in use again; the live process's recorded pid is not in use.
    overwrite(&folder, USAGE_FILE, slots + dead.slot() * slot_size, &std::process::id().to_le_bytes());
    overwrite(&folder, USAGE_FILE, slots + living.slot() * slot_size, &i32::MAX.to_le_bytes());
    end_as_killed(dead);
    let observer = attach(&folder);
    observer.reclaim_dead_processes();
    assert_eq!((observer.used(0), living.held(0)), (MEMORY_UNIT, MEMORY_UNIT));
}

/// Threads of one process that find the same dead process at once leave the next process in its slot alone.
#[test]
fn concurrent_reclaims_do_not_change_new_processes() {
    let (folder, _owner) = region(&[1000]);
    let observer = attach(&folder);
    observer.reserve(0, 100 * MEMORY_UNIT).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Relaxed) {
                    observer.reclaim_dead_processes();
                }
            });
        }
        for _ in 0..200 {
            let living = attach(&folder);
            living.reserve(0, 10 * MEMORY_UNIT).unwrap();
            assert_eq!(living.held(0), 10 * MEMORY_UNIT);
            end_as_killed(living);
        }
        done.store(true, SeqCst);
    });
    observer.reclaim_dead_processes();
    assert_eq!(observer.used(0), 100 * MEMORY_UNIT);
}

#[test]
fn threads_of_one_process_share_its_lane() {
    let (folder, _owner) = region(&[100]);
    let region = attach(&folder);
    std::thread::scope(|scope| {
        for thread in 1..=4u64 {
            let region = &region;
            scope.spawn(move || {
                for _ in 0..5_000 {
                    region.reserve(0, thread * MEMORY_UNIT).unwrap();
                    region.release(0, thread * MEMORY_UNIT);
                }
                region.reserve(0, thread * MEMORY_UNIT).unwrap();
            });
        }
    });
    assert_eq!((region.used(0), region.held(0)), (10 * MEMORY_UNIT, 10 * MEMORY_UNIT));
}

#[test]
fn waiter_is_woken_through_a_read_only_mapping() {
    let (folder, owner) = region(&[1]);
    let region = attach(&folder);
    let (limits, turns) = (region.limits(0), owner.turns(0).unwrap());
    let before = limits.turn();
    assert_eq!((before.number(), before.is_open()), (0, false));
    assert_eq!(futex::wait(limits.turn_word(), 9, None), futex::WaitOutcome::Changed);
    let brief = Some(Duration::from_millis(1));
    assert_eq!(futex::wait(limits.turn_word(), before.0, brief), futex::WaitOutcome::TimedOut);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            while limits.turn() == before {
                // A long timeout for the test: the thread is woken and need not poll.
                let waited = futex::wait(limits.turn_word(), before.0, Some(Duration::from_secs(60)));
                assert_ne!(waited, futex::WaitOutcome::TimedOut);
            }
            limits.turn()
        });
        // The thread usually waits by then; if not, it finds the turn open, which is also correct.
        std::thread::sleep(Duration::from_millis(20));
        let opened = turns.open();
        assert_eq!(waiter.join().unwrap(), opened);
    });
    assert_eq!((limits.turn().number(), limits.turn().is_open()), (1, true));
    turns.close();
    assert_eq!((limits.turn().number(), limits.turn().is_open()), (1, false));
    turns.drain();
    let word = limits.turn();
    assert_eq!((word.number(), word.is_open(), word.is_draining()), (1, false, true));
    turns.open();
    let word = limits.turn();
    assert_eq!((word.number(), word.is_open(), word.is_draining()), (2, true, false));
    assert!(owner.turns(1).is_none());
}

#[test]
fn errno_is_preserved() {
    let (folder, _owner) = region(&[1]);
    let region = attach(&folder);
    futex::set_errno(1234);
    assert!(region.reserve(0, 2 * MEMORY_UNIT).is_err());
    region.reclaim_dead_processes();
    region.reclaim_dead_processes_if_due();
    futex::wake(&region.lane(0).waiting, 1);
    let _ = futex::wait(&region.lane(0).waiting, 7, None);
    assert_eq!(futex::errno(), 1234);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// After any sequence of reservations, releases, limit changes and kills, the account is the sum of what live
    /// processes hold, and a request is granted exactly if it fits.
    #[test]
    fn account_equals_what_live_processes_hold(
        operations in prop::collection::vec((0..3usize, 0..40u64, 0..8u8), 1..120)
    ) {
        let (folder, owner) = region(&[100]);
        let mut regions: Vec<RegionTenant> = (0..3).map(|_| attach(&folder)).collect();
        let (mut held, mut limit) = ([0u64; 3], 100);
        for (who, units, what) in operations {
            let total: u64 = held.iter().sum();
            match what {
                0..4 => {
                    let fits = units == 0 || total + units <= limit;
                    prop_assert_eq!(regions[who].reserve(0, units * MEMORY_UNIT).is_ok(), fits);
                    held[who] += if fits { units } else { 0 };
                }
                4..6 => {
                    let units = units.min(held[who]);
                    regions[who].release(0, units * MEMORY_UNIT);
                    held[who] -= units;
                }
                6 => {
                    limit = 60 + units;
                    owner.set(0, &share(limit)).unwrap();
                }
                _ => {
                    let next = attach(&folder);
                    end_as_killed(std::mem::replace(&mut regions[who], next));
                    regions[who].reclaim_dead_processes();
                    held[who] = 0;
                }
            }
            prop_assert_eq!(regions[0].used(0), held.iter().sum::<u64>() * MEMORY_UNIT);
            prop_assert_eq!(regions[who].held(0), held[who] * MEMORY_UNIT);
        }
    }
}
