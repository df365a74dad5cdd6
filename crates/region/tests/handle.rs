//! Tests what a daemon has open per container: one file and two mappings, whatever uses its region.
#![allow(clippy::unwrap_used, missing_docs)]

use partage_region::arbiter::Arbiter;
use partage_region::{GpuShare, RegionHandle, RegionPolicy};
use std::path::Path;
use std::sync::Arc;

/// Returns the number of descriptors and mappings of this process that refer to files in a directory.
fn open_files(folder: &Path) -> (usize, usize) {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let descriptors = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (
        descriptors.filter(|path| path.starts_with(folder)).count(),
        maps.lines().filter(|line| line.contains(folder.to_str().unwrap())).count(),
    )
}

#[test]
fn region_is_opened_once_for_all_users() {
    for gpus in [1, 8] {
        let folder = tempfile::tempdir().unwrap();
        let shares: Vec<GpuShare> = (0..gpus)
            .map(|gpu| GpuShare { uuid: [gpu; 16], waits_for_turns: true, ..GpuShare::default() })
            .collect();
        let handle = RegionHandle::create(folder.path(), &shares, RegionPolicy::default()).unwrap();
        assert_eq!(open_files(folder.path()), (1, 2), "{gpus} GPUs");
        let (handle, arbiter) = (Arc::new(handle), Arbiter::new());
        let member = arbiter.add(Arc::clone(&handle)).unwrap();
        assert!(handle.reader().snapshot().is_ok());
        assert_eq!(open_files(folder.path()), (1, 2), "{gpus} GPUs with turns");
        arbiter.remove(member);
        drop(handle);
        assert_eq!(open_files(folder.path()), (0, 0), "{gpus} GPUs, dropped");
    }
}
