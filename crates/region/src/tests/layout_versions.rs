//! Tests of regions of several layouts, and of regions that grow.

use super::*;
use crate::layout::FileHeader;
use crate::{
    Forgery, LIMITS_FILE, MAX_GPUS, RegionError, RegionHandle, USAGE_FILE, UsageReader, UsageSnapshot,
    WHOLE_GPU, is_in_use,
};
use std::fs;
use std::mem::offset_of;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;

fn gpu(name: u8) -> GpuShare {
    GpuShare { uuid: [name; 16], cores: 12_345, ceiling: 50_000, ..share(10) }
}

fn create(shares: &[GpuShare]) -> (TempDir, RegionHandle) {
    let folder = tempfile::tempdir().unwrap();
    let handle = RegionHandle::create(folder.path(), shares, RegionPolicy::default()).unwrap();
    (folder, handle)
}

fn effective_user() -> u32 {
    crate::owner::effective_user()
}

fn contents(folder: &Path) -> [Vec<u8>; 2] {
    [LIMITS_FILE, USAGE_FILE].map(|file| fs::read(folder.join(file)).unwrap())
}

/// Length of `usage` in layouts 1 and 2.
const USAGE_WITHOUT_MARKERS: u64 = 2_367_488;

/// Ends `usage` with its slots, as before layout 3.
fn remove_markers(folder: &TempDir) {
    let usage = fs::File::options().write(true).open(folder.path().join(USAGE_FILE)).unwrap();
    usage.set_len(USAGE_WITHOUT_MARKERS).unwrap();
    overwrite(folder, USAGE_FILE, offset_of!(FileHeader, size), &USAGE_WITHOUT_MARKERS.to_le_bytes());
}

/// Rewrites the region as a release before layout 3 wrote it.
fn make_layout_2(folder: &TempDir) {
    for file in [LIMITS_FILE, USAGE_FILE] {
        overwrite(folder, file, offset_of!(FileHeader, version), &2u32.to_le_bytes());
    }
    remove_markers(folder);
}

/// Rewrites the region as a release before layout 2 wrote it.
fn make_layout_1(folder: &TempDir) {
    for file in [LIMITS_FILE, USAGE_FILE] {
        overwrite(folder, file, offset_of!(FileHeader, version), &1u32.to_le_bytes());
    }
    remove_markers(folder);
    // Layout 1 has neither base nor generation.
    overwrite(folder, LIMITS_FILE, 28, &[0; 8]);
    let path = folder.path().join(LIMITS_FILE);
    for gpu in 0..MAX_GPUS {
        for word in [32, 36] {
            let at = 128 + gpu * 256 + word;
            let bytes = fs::read(&path).unwrap()[at..at + 4].try_into().unwrap();
            overwrite(folder, LIMITS_FILE, at, &(u32::from_le_bytes(bytes) / 10).to_le_bytes());
        }
    }
}

#[test]
fn new_region_has_the_current_layout_and_zero_reserved_words() {
    let (folder, handle) = create(&[gpu(1), gpu(2)]);
    assert_eq!((handle.owner().layout(), handle.owner().gpus(), handle.owner().base_gpus()), (3, 2, 2));
    let [limits, usage] = contents(folder.path());
    assert!(limits[36..128].iter().all(|byte| *byte == 0));
    for gpu in 0..2 {
        let at = 128 + gpu * 256;
        assert!(limits[at + 48..at + 256].iter().all(|byte| *byte == 0), "reserved words, and no turn yet");
    }
    assert!(usage[24..].iter().all(|byte| *byte == 0));
}

#[test]
fn layout_1_is_adopted_in_its_own_unit() {
    let (folder, handle) = create(&[gpu(1), gpu(2)]);
    drop(handle);
    make_layout_1(&folder);
    let tenant = attach(&folder);
    tenant.reserve(0, 3 * MEMORY_UNIT).unwrap();
    // The unit is hundredths of a percent: finer digits are lost.
    assert_eq!((tenant.cores(0), tenant.ceiling(0), tenant.cores(2)), (12_340, 50_000, 0));
    let wanted = [gpu(1), GpuShare { cores: 9, ceiling: WHOLE_GPU, memory: 5 * MEMORY_UNIT, ..gpu(2) }];
    let handle = RegionHandle::adopt(folder.path(), &wanted, effective_user()).unwrap();
    assert_eq!((handle.owner().layout(), handle.owner().base_gpus(), handle.owner().gpus()), (1, 2, 2));
    assert_eq!(
        (tenant.cores(1), tenant.ceiling(1), tenant.memory_limit(1)),
        (10, WHOLE_GPU, Some(5 * MEMORY_UNIT))
    );
    // The file keeps its layout and its unit.
    let [limits, _] = contents(folder.path());
    let word = |at: usize| u32::from_le_bytes(limits[at..at + 4].try_into().unwrap());
    assert_eq!((word(8), word(128 + 256 + 32), word(128 + 256 + 36)), (1, 1, 10_000));
    assert_eq!(handle.reader().snapshot().unwrap().gpus[0].used, 3 * MEMORY_UNIT);
    // The same shares again change nothing, although the file cannot hold all digits.
    assert!(!handle.apply(&wanted).unwrap());
    assert!(handle.apply(&[GpuShare { memory: 9 * MEMORY_UNIT, ..gpu(1) }]).unwrap());
    assert_eq!(
        (tenant.memory_limit(0), tenant.memory_limit(1)),
        (Some(9 * MEMORY_UNIT), Some(5 * MEMORY_UNIT))
    );
    drop(tenant);
    assert_eq!(handle.reader().snapshot().unwrap().gpus[0].used, 0);
}

#[test]
fn layout_1_cannot_grow() {
    let (folder, handle) = create(&[gpu(1)]);
    drop(handle);
    make_layout_1(&folder);
    let handle = RegionHandle::open(folder.path()).unwrap();
    let before = contents(folder.path());
    assert!(matches!(handle.owner().extend(&gpu(2)), Err(RegionError::CannotGrow(1))));
    assert!(matches!(handle.apply(&[gpu(1), gpu(2)]), Err(RegionError::CannotGrow(1))));
    assert!(contents(folder.path())[0][12] == before[0][12]);
}

#[test]
fn unsupported_layout_is_left_untouched_by_every_side() {
    for (file, other) in [(LIMITS_FILE, USAGE_FILE), (USAGE_FILE, LIMITS_FILE)] {
        let (folder, handle) = create(&[gpu(1)]);
        drop(handle);
        overwrite(&folder, file, offset_of!(FileHeader, version), &4u32.to_le_bytes());
        if file == LIMITS_FILE {
            // A daemon of another version writes the same version into both files.
            overwrite(&folder, other, offset_of!(FileHeader, version), &4u32.to_le_bytes());
        }
        let before = contents(folder.path());
        let user = effective_user();
        let is_unsupported = |error: RegionError| {
            let RegionError::UnsupportedVersion { path, found: 4, supported } = &error else {
                panic!("{error}")
            };
            assert_eq!((path, supported), (&folder.path().join(file), &(1..=3)), "not {other}");
        };
        if file == LIMITS_FILE {
            is_unsupported(RegionHandle::open(folder.path()).unwrap_err());
            is_unsupported(RegionHandle::adopt(folder.path(), &[gpu(1)], user).unwrap_err());
        }
        is_unsupported(RegionHandle::create(folder.path(), &[gpu(1)], RegionPolicy::default()).unwrap_err());
        is_unsupported(RegionTenant::attach(folder.path()).unwrap_err());
        if file == USAGE_FILE {
            is_unsupported(UsageReader::open(folder.path()).unwrap_err());
        }
        assert!(contents(folder.path()) == before);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}

/// A function that damages a file.
type DamageFn = fn(&Path);

fn truncate(path: &Path) {
    fs::File::options().write(true).open(path).unwrap().set_len(4096).unwrap();
}

fn fill_with_garbage(path: &Path) {
    fs::write(path, vec![7; 3 << 20]).unwrap();
}

#[test]
fn damaged_files_are_refused_by_name_and_not_changed() {
    let damage: [(&str, DamageFn); 4] = [
        ("truncated", truncate),
        ("magic number", fill_with_garbage),
        ("symbolic link", |path| {
            let elsewhere = path.with_extension("elsewhere");
            fs::rename(path, &elsewhere).unwrap();
            symlink(&elsewhere, path).unwrap();
        }),
        ("regular file", |path| {
            fs::remove_file(path).unwrap();
            fs::create_dir(path).unwrap();
        }),
    ];
    for file in [LIMITS_FILE, USAGE_FILE] {
        for (word, break_it) in damage {
            if file == USAGE_FILE && matches!(word, "truncated" | "magic number") {
                continue; // A container can do that to its own usage: see the next test.
            }
            let (folder, handle) = create(&[gpu(1)]);
            let tenant = attach(&folder);
            let path = folder.path().join(file);
            drop(handle);
            break_it(&path);
            let about = fs::symlink_metadata(&path).unwrap();
            let error = RegionHandle::adopt(folder.path(), &[gpu(1)], effective_user()).unwrap_err();
            assert!(matches!(&error, RegionError::Damaged { path: of, .. } if *of == path), "{error}");
            assert!(error.to_string().contains(word), "{error}");
            assert!(error.to_string().contains("restart its container"), "{error}");
            let after = fs::symlink_metadata(&path).unwrap();
            assert_eq!((after.len(), after.modified().unwrap()), (about.len(), about.modified().unwrap()));
            if matches!(word, "symbolic link" | "regular file") {
                // A process that has the old file mapped is still limited by it.
                assert!(
                    tenant.reserve(0, 11 * MEMORY_UNIT).is_err()
                        && tenant.reserve(0, 10 * MEMORY_UNIT).is_ok()
                );
            }
            // The memory of a truncated file is gone: dropping the tenant would touch it and be killed.
            std::mem::forget(tenant);
        }
    }
}

#[test]
fn container_that_damages_its_usage_stays_managed() {
    let set_version = |path: &Path| {
        let file = fs::File::options().write(true).open(path).unwrap();
        file.write_all_at(&4u32.to_le_bytes(), offset_of!(FileHeader, version) as u64).unwrap();
    };
    let give_away = |path: &Path| drop(chown(path, Some(4321), None));
    let damage: [(DamageFn, Forgery); 4] = [
        (set_version, Forgery::Header),
        (fill_with_garbage, Forgery::Header),
        (truncate, Forgery::Truncated),
        (give_away, Forgery::Owner),
    ];
    for (break_it, expected) in damage {
        if expected == Forgery::Owner && effective_user() != 0 {
            continue; // Only root can give files away.
        }
        let (folder, handle) = create(&[gpu(1)]);
        let usage = folder.path().join(USAGE_FILE);
        let forged = |handle: &RegionHandle| match handle.reader().snapshot() {
            Ok(snapshot) => snapshot.forged,
            Err(_) => UsageSnapshot::of_truncated_file().forged,
        };
        assert_eq!(forged(&handle), []);
        break_it(&usage);
        // The daemon itself gives a new file to its user, so only the next daemon knows who must own it.
        let is_seen_at_once = expected != Forgery::Owner;
        assert_eq!(forged(&handle).contains(&expected), is_seen_at_once, "{expected:?}");
        drop(handle);
        let adopted = RegionHandle::adopt(folder.path(), &[gpu(1)], effective_user()).unwrap();
        assert!(forged(&adopted).contains(&expected), "{expected:?} after a restart");
        let longer = fs::File::options().write(true).open(&usage).unwrap();
        longer.set_len(64 << 20).unwrap();
        assert!(adopted.reader().truncate_excess().unwrap().is_some(), "it cannot fill the disk either");
    }
}

#[test]
fn another_users_files_are_refused() {
    if effective_user() != 0 {
        eprintln!("skipped: only root can give files away");
        return;
    }
    let (folder, handle) = create(&[gpu(1)]);
    drop(handle);
    let adopt = |user| RegionHandle::adopt(folder.path(), &[gpu(1)], user);
    // Any user can put a file into this directory.
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    chown(folder.path().join(USAGE_FILE), Some(4321), None).unwrap();
    let error = adopt(0).unwrap_err();
    assert!(matches!(error, RegionError::ForeignOwner { owner: 4321, expected: 0, .. }), "{error}");
    // A region of that user's container is adopted.
    adopt(4321).unwrap();
    chown(folder.path().join(LIMITS_FILE), Some(4321), None).unwrap();
    let error = adopt(4321).unwrap_err();
    assert!(
        matches!(&error, RegionError::ForeignOwner { path, .. } if path.ends_with(LIMITS_FILE)),
        "{error}"
    );
    assert!(error.to_string().contains("belongs to user 4321, not to user 0"), "{error}");
}

#[test]
fn region_grows_in_place_under_a_running_process() {
    let (folder, handle) = create(&[gpu(1)]);
    let tenant = attach(&folder);
    assert_eq!((tenant.gpus(), tenant.find(&[2; 16]), tenant.memory_limit(1)), (1, None, Some(0)));
    let generation = tenant.generation();
    let before = contents(folder.path());
    let inode = |file: &str| fs::metadata(folder.path().join(file)).unwrap().ino();
    let inodes = [LIMITS_FILE, USAGE_FILE].map(inode);
    assert_eq!(handle.owner().extend(&gpu(2)).unwrap(), 1);
    assert_ne!(tenant.generation(), generation);
    assert_eq!(
        (tenant.gpus(), tenant.find(&[2; 16]), tenant.memory_limit(1)),
        (2, Some(1), Some(10 * MEMORY_UNIT))
    );
    tenant.reserve(1, 10 * MEMORY_UNIT).unwrap();
    assert!(tenant.reserve(1, 1).is_err());
    assert_eq!(handle.reader().snapshot().unwrap().gpus[1].used, 10 * MEMORY_UNIT);
    assert_eq!((handle.owner().gpus(), handle.owner().base_gpus()), (2, 1));
    // The words of the base are unchanged.
    assert!(contents(folder.path())[0][128..384] == before[0][128..384]);
    assert_eq!([LIMITS_FILE, USAGE_FILE].map(inode), inodes);
    assert!(matches!(handle.owner().extend(&gpu(1)), Err(RegionError::DuplicateGpu(0))));
    for name in 3..=16 {
        handle.owner().extend(&gpu(name)).unwrap();
    }
    assert!(matches!(handle.owner().extend(&gpu(17)), Err(RegionError::TooManyGpus(17))));
    assert_eq!((tenant.gpus(), handle.owner().base_gpus()), (MAX_GPUS, 1));
}

#[test]
fn grown_region_is_the_same_region() {
    let (folder, handle) = create(&[gpu(1), gpu(2)]);
    handle.owner().extend(&gpu(3)).unwrap();
    drop(handle);
    let adopt = |names: &[u8]| {
        let shares: Vec<_> = names.iter().map(|name| gpu(*name)).collect();
        RegionHandle::adopt(folder.path(), &shares, effective_user()).map(|handle| handle.owner().gpus())
    };
    assert_eq!(adopt(&[1, 2]).unwrap(), 3, "the base alone");
    assert_eq!(adopt(&[1, 2, 3]).unwrap(), 3);
    for other in [&[][..], &[1], &[2, 1], &[1, 3], &[1, 2, 4], &[1, 2, 4, 3]] {
        assert!(matches!(adopt(other), Err(RegionError::OtherGpus(_))), "{other:?}");
    }
    // An attachment that was recorded before a crash, and not made yet.
    assert_eq!(adopt(&[1, 2, 3, 4]).unwrap(), 4);
    assert_eq!(RegionHandle::open(folder.path()).unwrap().owner().base_gpus(), 2);
}

#[test]
fn region_in_use_is_detected_by_its_locks_in_any_layout() {
    let (folder, handle) = create(&[gpu(1)]);
    assert!(!is_in_use(folder.path()));
    let tenant = attach(&folder);
    assert!(is_in_use(folder.path()));
    overwrite(&folder, USAGE_FILE, offset_of!(FileHeader, version), &9u32.to_le_bytes());
    assert!(is_in_use(folder.path()));
    drop(tenant);
    assert!(!is_in_use(folder.path()) && !is_in_use(&folder.path().join("nowhere")));
    drop(handle);
}

/// Containers that a release with layout 2 started go on running under this one.
#[test]
fn layout_2_is_adopted_without_markers() {
    let (folder, handle) = create(&[gpu(1)]);
    drop(handle);
    make_layout_2(&folder);
    let tenant = attach(&folder);
    tenant.reserve(0, 3 * MEMORY_UNIT).unwrap();
    assert!(!tenant.has_shared_markers() && tenant.take_marker_page(0).is_some(), "of its own");
    let low_latency = GpuShare { low_latency: true, waits_for_turns: true, ..gpu(1) };
    let handle = RegionHandle::adopt(folder.path(), &[low_latency], effective_user()).unwrap();
    assert_eq!((handle.owner().layout(), handle.owner().has_markers()), (2, false));
    // The word is reserved in this layout.
    assert!(!handle.owner().share(0).unwrap().low_latency);
    // In layout 3 the daemon decides whether launches look at the turn. A shim of layout 2 always does.
    handle.owner().turns(0).unwrap().set_gated(false);
    assert!(tenant.is_gated(0));
    let seen = handle.reader().snapshot().unwrap();
    assert_eq!((seen.forged, seen.gpus[0].used), (vec![], 3 * MEMORY_UNIT));
    assert_eq!(handle.reader().gpu_activity(0).unwrap(), crate::ComputeActivity::default());
    assert_eq!(handle.owner().extend(&gpu(2)).unwrap(), 1);
    assert_eq!(fs::metadata(folder.path().join(USAGE_FILE)).unwrap().len(), USAGE_WITHOUT_MARKERS);
    assert_eq!(handle.reader().truncate_excess().unwrap(), None);
}

/// A container that starts again gets the current layout, whatever its last region had.
#[test]
fn region_created_over_an_older_one_has_markers() {
    for make_older in [make_layout_1, make_layout_2] {
        let (folder, handle) = create(&[gpu(1)]);
        drop(handle);
        make_older(&folder);
        let handle = RegionHandle::create(folder.path(), &[gpu(1)], RegionPolicy::default()).unwrap();
        assert_eq!((handle.owner().layout(), handle.owner().has_markers()), (3, true));
        let tenant = attach(&folder);
        assert!(tenant.has_shared_markers() && tenant.take_marker_page(0).is_some());
        drop(handle);
        let handle = RegionHandle::adopt(folder.path(), &[gpu(1)], effective_user()).unwrap();
        assert_eq!(handle.reader().snapshot().unwrap().forged, []);
        assert!(handle.reader().gpu_activity(0).is_ok());
    }
}
