//! Tests of symbol lookup by name and by `cuGetProcAddress`, against the results of real drivers.

use super::*;
use crate::node::TestNode;
use partage_driver_api::exports::DriverVersion;
use std::ffi::c_void;

/// Results of the real drivers, one per row: name, flags, first version, symbol.
const REAL_535: &str = include_str!("../../../driver-api/tests/symbols/cuGetProcAddress-535.txt");
const REAL_550: &str = include_str!("../../../driver-api/tests/symbols/cuGetProcAddress-550.txt");

#[test]
fn get_proc_address_matches_real_driver_tables() {
    TestNode::new("T4", 1, DriverVersion::R535).run_role("symbols 535");
    TestNode::new("T4", 1, DriverVersion::R550).run_role("symbols 550");
}

pub fn client(arguments: &[&str]) {
    let cuda = CudaLibrary(crate::driver::LoadedLibrary::open("libcuda.so.1").unwrap());
    let rows = if arguments == ["535"] { REAL_535 } else { REAL_550 };
    let look_up = |name: &str, version: i32, flags: u64| {
        let name = CString::new(name).unwrap();
        let (mut address, mut status): (*mut c_void, u32) = (null_mut(), 9);
        ok!(cuda.cuGetProcAddress_v2(name.as_ptr(), &mut address, version, flags, &mut status));
        (address, status)
    };
    let mut checked = 0;
    for row in rows.lines().filter(|row| row.starts_with("cu")) {
        let (name, flags, version, symbol) = parse(row);
        let (address, status) = look_up(name, version, flags);
        assert_eq!(Some(address), cuda.0.symbol(symbol), "{row}");
        assert_eq!(status, 0, "{row}");
        checked += 1;
    }
    assert!(checked >= 980, "{checked} rows");
    assert_eq!(look_up("cuMemAlloc_v2", 12040, 0), (null_mut(), 1));
    assert_eq!(look_up("", 12040, 0), (null_mut(), 1));
    assert_eq!(look_up("cuLaunchKernelEx", 11000, 0), (null_mut(), 2));
    // The addresses are those of working functions.
    let (address, _) = look_up("cuDriverGetVersion", 12000, 0);
    // SAFETY: the symbol has this signature.
    let version: unsafe extern "C" fn(*mut i32) -> CUresult = unsafe { std::mem::transmute(address) };
    let mut found = 0;
    // SAFETY: the output is a local variable, valid for writes during the call.
    assert_eq!(unsafe { version(&mut found) }, 0);
    assert_eq!(found, if arguments == ["535"] { 12020 } else { 12040 });
    // Undocumented export tables are refused.
    let mut table = std::ptr::dangling();
    fails!(CUDA_ERROR_INVALID_VALUE, cuda.cuGetExportTable(&mut table, &CUuuid { bytes: [7; 16] }));
    assert!(table.is_null());
}

/// Parses a row: `name f=flags v=version -> symbol (…)`.
fn parse(row: &str) -> (&str, u64, i32, &str) {
    let mut words = row.split_whitespace();
    let name = words.next().unwrap();
    let flags = words.next().unwrap().strip_prefix("f=").unwrap().parse().unwrap();
    let version = words.next().unwrap().strip_prefix("v=").unwrap().parse().unwrap();
    (name, flags, version, words.nth(1).unwrap())
}
