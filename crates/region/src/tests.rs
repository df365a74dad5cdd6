//! What needs to see or spoil the inside of the files.

mod counting;
mod layouts;
mod reading;
mod sharing;

use crate::{GpuShare, RegionOwner, RegionPolicy, RegionTenant, UNIT};
use proptest::prelude::ProptestConfig;
use proptest::test_runner::RngSeed;
use std::os::unix::fs::FileExt;
use tempfile::TempDir;

/// The same cases in every run: a change is judged by what it changed. `make soak` looks for others.
pub(crate) fn same_cases(cases: u32) -> ProptestConfig {
    match std::env::var_os("PROPTEST_CASES") {
        Some(_) => ProptestConfig::default(),
        None => ProptestConfig { cases, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() },
    }
}

fn share(units: u64) -> GpuShare {
    GpuShare { uuid: [7; 16], memory: units * UNIT, ..GpuShare::default() }
}

/// A region with one GPU for each number of units.
fn region(units: &[u64]) -> (TempDir, RegionOwner) {
    let folder = tempfile::tempdir().unwrap();
    let shares: Vec<GpuShare> = units.iter().map(|&units| share(units)).collect();
    let owner = RegionOwner::create(folder.path(), &shares, RegionPolicy::default()).unwrap();
    (folder, owner)
}

fn attach(folder: &TempDir) -> RegionTenant {
    RegionTenant::attach(folder.path()).unwrap()
}

/// Its process is dead: its lock is gone, and nothing of it was cleaned up.
fn bury_alive(region: RegionTenant) -> usize {
    let slot = region.slot();
    region.end_as_if_killed();
    slot
}

fn overwrite(folder: &TempDir, file: &str, at: usize, bytes: &[u8]) {
    let file = std::fs::OpenOptions::new().write(true).open(folder.path().join(file)).unwrap();
    file.write_all_at(bytes, at as u64).unwrap();
}
