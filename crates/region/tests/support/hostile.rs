//! A region whose files have arbitrary contents, and everything that a process does with it.

use partage_region::{
    GpuShare, MEMORY_UNIT, RegionHandle, RegionOwner, RegionPolicy, RegionTenant, UsageReader, is_in_use,
};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Length of `usage` in layouts 1 and 2.
const USAGE_WITHOUT_MARKERS: u64 = 2_367_488;

/// Creates a region with two GPUs, in one of the supported layouts.
pub(crate) fn make(folder: &Path, layout: u32) -> RegionOwner {
    let share = |uuid: u8| GpuShare { uuid: [uuid; 16], memory: 100 * MEMORY_UNIT, ..GpuShare::default() };
    let owner = RegionOwner::create(folder, &[share(1), share(2)], RegionPolicy::default());
    let owner = owner.expect("the folder is writable");
    if layout == owner.layout() {
        return owner;
    }
    let files = open(folder);
    for file in &files {
        file.write_all_at(&layout.to_le_bytes(), 8).expect("the file exists");
    }
    // Before layout 3, `usage` ended with the slots.
    files[1].set_len(USAGE_WITHOUT_MARKERS).expect("the file exists");
    files[1].write_all_at(&USAGE_WITHOUT_MARKERS.to_le_bytes(), 16).expect("the file exists");
    if layout > 1 {
        return RegionOwner::open(folder).expect("the layout is supported");
    }
    // Layout 1 has every word in the same place, no base and no generation, and compute in hundredths of a percent.
    files[0].write_all_at(&[0; 8], 28).expect("the file exists");
    for gpu in 0..2 {
        files[0].write_all_at(&10_000u32.to_le_bytes(), 128 + gpu * 256 + 36).expect("the file exists");
    }
    RegionOwner::open(folder).expect("the layout is supported")
}

/// Opens both files for writing.
pub(crate) fn open(folder: &Path) -> [File; 2] {
    ["limits", "usage"].map(|name| {
        OpenOptions::new().read(true).write(true).open(folder.join(name)).expect("the file was created")
    })
}

/// Corrupts the files: of every 16 bytes, eight choose a place and eight are written there, sometimes repeatedly.
pub(crate) fn corrupt(files: &[File; 2], bytes: &[u8]) {
    for order in bytes.chunks_exact(16) {
        let (place, value) = order.split_at(8);
        let file = &files[usize::from(place[0] & 3 != 0)];
        let length = file.metadata().expect("the file exists").len();
        let raw = u32::from_le_bytes([place[2], place[3], place[4], place[5]]);
        // Most of what matters is at the beginning of the file and of its first slots.
        let at = u64::from(raw) % if place[0] & 4 == 0 { length.min(16 << 10) } else { length };
        // The header survives more often than not; otherwise nothing after it would be read.
        let at = if place[0] & 0x38 != 0 && at < 24 { at + 24 } else { at / 8 * 8 };
        let times = if place[0] & 0xc0 == 0xc0 { usize::from(place[1]) * 32 } else { 1 };
        let value = value.repeat(times.max(1));
        let room = usize::try_from(length.saturating_sub(at)).unwrap_or(usize::MAX);
        file.write_all_at(&value[..value.len().min(room)], at).expect("the range is inside the file");
    }
}

/// Does everything that a process can do; results do not matter, but every call must return.
pub(crate) fn use_region(folder: &Path, amounts: [u64; 4]) {
    if let Ok(region) = RegionTenant::attach(folder) {
        let _ = (region.find(&[2; 16]), region.policy());
        for gpu in [0, 1, region.gpus(), region.gpus().wrapping_sub(1), 15, 16, usize::MAX] {
            for amount in amounts {
                let given = region.reserve(gpu, amount).is_ok();
                if let (true, Some(limit)) = (given && amount > 0, region.memory_limit(gpu)) {
                    assert!(amount <= limit, "{amount} granted of {limit}");
                }
                let _ = (region.used(gpu), region.held(gpu), region.memory_limit(gpu), region.heartbeat(gpu));
                let limits = region.limits(gpu);
                let _ = (
                    limits.turn().next_open(),
                    limits.charged(),
                    limits.run_ahead(),
                    region.cores(gpu),
                    region.is_gated(gpu),
                );
                let account = region.gpu_account(gpu);
                let _ = (account.peak(), account.refusals());
                region.release(gpu, amount);
            }
            let _ = region.activity(gpu);
            if let Some(page) = region.take_marker_page(gpu) {
                for index in [0, 62, 63, usize::MAX] {
                    let Some(stream) = page.stream(index) else { continue };
                    stream.open(amounts[0]);
                    stream.set_issued(stream.issued().next(true));
                    let _ = (stream.outstanding(), stream.is_at_boundary());
                }
                let _ = region.activity(gpu);
                region.return_marker_page(page);
            }
        }
        region.reclaim_dead_processes_if_due();
        region.reclaim_dead_processes();
        assert!(region.processes().count() <= partage_region::SLOT_COUNT);
    }
    if let Ok(reader) = UsageReader::open(folder) {
        if let Ok(seen) = reader.snapshot() {
            assert!(seen.processes.len() <= partage_region::SLOT_COUNT);
        }
        for gpu in [0, 1, 15, 16, usize::MAX] {
            let _ = reader.gpu_activity(gpu);
        }
    }
    let _ = is_in_use(folder);
    if let Ok(handle) = RegionHandle::open(folder) {
        let owner = handle.owner();
        let shares: Vec<GpuShare> = (0..owner.gpus()).filter_map(|gpu| owner.share(gpu)).collect();
        assert_eq!(shares.len(), owner.gpus());
        assert!(owner.base_gpus() <= owner.gpus());
        let _ = (handle.apply(&shares), owner.is_for(shares.iter().map(|share| &share.uuid)));
        let attached = GpuShare { uuid: [9; 16], memory: amounts[0], ..GpuShare::default() };
        let before = owner.gpus();
        match owner.extend(&attached) {
            Ok(index) => assert_eq!((index, owner.gpus()), (before, before + 1)),
            Err(_) => assert_eq!(owner.gpus(), before),
        }
    }
}
