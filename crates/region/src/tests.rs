//! Tests that need to read or corrupt the contents of the files.

mod layout_versions;
mod marker_pages;
mod memory_account;
mod reader;
mod tenant;

use crate::{GpuShare, MEMORY_UNIT, RegionOwner, RegionPolicy, RegionTenant};
use proptest::prelude::ProptestConfig;
use proptest::test_runner::RngSeed;
use std::os::unix::fs::FileExt;
use tempfile::TempDir;

/// Runs the same cases every time, so that a failure is due to a change. `make soak` searches for other cases.
pub(crate) fn fixed_cases(cases: u32) -> ProptestConfig {
    match std::env::var_os("PROPTEST_CASES") {
        Some(_) => ProptestConfig::default(),
        None => ProptestConfig { cases, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() },
    }
}

fn share(units: u64) -> GpuShare {
    GpuShare { uuid: [7; 16], memory: units * MEMORY_UNIT, ..GpuShare::default() }
}

/// Creates a region with one GPU per number of units.
fn region(units: &[u64]) -> (TempDir, RegionOwner) {
    let folder = tempfile::tempdir().unwrap();
    let shares: Vec<GpuShare> = units.iter().map(|&units| share(units)).collect();
    let owner = RegionOwner::create(folder.path(), &shares, RegionPolicy::default()).unwrap();
    (folder, owner)
}

fn attach(folder: &TempDir) -> RegionTenant {
    RegionTenant::attach(folder.path()).unwrap()
}

/// Ends the process as if it was killed: its lock is released, and nothing is cleaned up. Returns its slot.
fn end_as_killed(region: RegionTenant) -> usize {
    let slot = region.slot();
    region.end_as_if_killed();
    slot
}

fn overwrite(folder: &TempDir, file: &str, at: usize, bytes: &[u8]) {
    let file = std::fs::OpenOptions::new().write(true).open(folder.path().join(file)).unwrap();
    file.write_all_at(bytes, at as u64).unwrap();
}
