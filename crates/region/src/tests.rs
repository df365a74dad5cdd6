//! What needs to see or spoil the inside of the files.

mod counting;
mod reading;
mod sharing;

use crate::{GpuShare, Owner, Policy, Region, UNIT};
use std::os::unix::fs::FileExt;
use tempfile::TempDir;

fn share(units: u64) -> GpuShare {
    GpuShare { uuid: [7; 16], memory: units * UNIT, ..GpuShare::default() }
}

/// A region with one GPU for each number of units.
fn region(units: &[u64]) -> (TempDir, Owner) {
    let folder = tempfile::tempdir().unwrap();
    let shares: Vec<GpuShare> = units.iter().map(|&units| share(units)).collect();
    let owner = Owner::create(folder.path(), &shares, Policy::default()).unwrap();
    (folder, owner)
}

fn attach(folder: &TempDir) -> Region {
    Region::attach(folder.path()).unwrap()
}

/// Its process is dead: its lock is gone, and nothing of it was cleaned up.
fn bury_alive(region: Region) -> usize {
    let slot = region.slot();
    region.let_go_as_if_killed();
    slot
}

fn overwrite(folder: &TempDir, file: &str, at: usize, bytes: &[u8]) {
    let file = std::fs::OpenOptions::new().write(true).open(folder.path().join(file)).unwrap();
    file.write_all_at(bytes, at as u64).unwrap();
}
