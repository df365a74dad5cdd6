//! `cuGetProcAddress`: for every name, version and default stream it returns the hook exactly if the driver returns a
//! function that is hooked.

use super::*;
use driver::LoadedLibrary;
use partage_driver_api::cuda::*;
use partage_driver_api::exports::twin;
use partage_elf_rewrite::elf;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, c_char, c_void};
use std::ptr::null_mut;

/// Directories with a `libcuda.so.1` of a real driver, separated by colons: it loads and answers without a GPU.
const REAL_DRIVERS_VARIABLE: &str = "PARTAGE_TEST_REAL_DRIVERS";

/// Returns every name in two drivers, and some that do not exist.
fn names() -> BTreeSet<&'static str> {
    let told = [
        include_str!("../../../driver-api/tests/symbols/cuGetProcAddress-535.txt"),
        include_str!("../../../driver-api/tests/symbols/cuGetProcAddress-550.txt"),
    ];
    let names = told.into_iter().flat_map(str::lines).filter_map(|line| line.split(' ').next());
    let names: BTreeSet<_> = names.filter(|name| name.starts_with("cu")).collect();
    assert!(names.len() > 400, "{}", names.len());
    names
        .into_iter()
        .chain(["", "cuNotYetInvented", "cuMemAlloc_v2", "cuLaunchKernel_ptsz", "nvmlInit"])
        .collect()
}

/// Versions at which an answer changes, and values beyond both ends.
const VERSIONS: &[i32] = &[
    i32::MIN,
    -1,
    0,
    1,
    1999,
    2000,
    2010,
    2020,
    2030,
    3000,
    3010,
    3020,
    4000,
    4010,
    4020,
    5000,
    5050,
    6000,
    6050,
    7000,
    7050,
    8000,
    9000,
    9020,
    10000,
    10010,
    10020,
    11000,
    11010,
    11020,
    11030,
    11040,
    11050,
    11060,
    11070,
    11080,
    12000,
    12010,
    12020,
    12030,
    12040,
    12050,
    12080,
    13000,
    13020,
    i32::MAX,
];

const FLAGS: &[u64] = &[0, 1, 2, 3, 4, u64::MAX];

#[test]
fn every_hooked_function_is_returned_as_its_hook() {
    for driver in DriverVersion::ALL {
        let node = TestNode::new(GPU_MODEL, 1, driver);
        let container = TestContainer::with_memory(&node, CONTEXT_BYTES + FREE_BYTES);
        let output = container.run_role(&format!("proc_address {}", node.0.libraries().display()));
        assert!(output.contains("routed"), "{output}");
    }
}

/// Checks every hooked function with the files of real drivers, which may not be distributed with this project.
#[test]
#[ignore = "PARTAGE_TEST_REAL_DRIVERS must name folders with a libcuda.so.1 of a real driver"]
fn every_hooked_function_of_a_real_driver_is_returned_as_its_hook() {
    let folders = std::env::var_os(REAL_DRIVERS_VARIABLE).expect("PARTAGE_TEST_REAL_DRIVERS names folders");
    let node = node();
    for real in std::env::split_paths(&folders) {
        let folder = tempfile::tempdir().unwrap();
        let settings = partage_shim::install::StandInPaths {
            region: Path::new("/nowhere"),
            real_cuda: &real.join("libcuda.so.1"),
            real_nvml: &real.join("libnvidia-ml.so.1"),
            version: None,
        };
        let object = partage_shim::install::shared_object().unwrap();
        partage_shim::install::write_stand_ins(&object, folder.path(), &settings).unwrap();
        let mut command = node.command(&format!("proc_address {} real", real.display()));
        let output = program::stdout_of(&command.env("LD_LIBRARY_PATH", folder.path()).output().unwrap());
        assert!(output.contains("routed"), "{output}");
    }
}

type ProcAddressFn = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64) -> CUresult;
type ProcAddressV2Fn = unsafe extern "C" fn(
    *const c_char,
    *mut *mut c_void,
    i32,
    u64,
    *mut CUdriverProcAddressQueryResult,
) -> CUresult;

struct ProcAddressFunctions {
    old: ProcAddressFn,
    new: ProcAddressV2Fn,
}

/// Codes, addresses and the status, from both functions; the status is requested or not.
type ProcAddressAnswers = (CUresult, usize, CUresult, usize, u32, CUresult, usize);

impl ProcAddressFunctions {
    fn of(library: &LoadedLibrary) -> Self {
        // SAFETY: the functions have these types.
        unsafe {
            Self {
                old: std::mem::transmute::<*mut c_void, ProcAddressFn>(
                    library.symbol("cuGetProcAddress").unwrap(),
                ),
                new: std::mem::transmute::<*mut c_void, ProcAddressV2Fn>(
                    library.symbol("cuGetProcAddress_v2").unwrap(),
                ),
            }
        }
    }

    fn answer(&self, name: &str, version: i32, flags: u64) -> ProcAddressAnswers {
        let name = CString::new(name).unwrap();
        // Values that are not written stay as they were.
        let untouched = std::ptr::without_provenance_mut(0x5555);
        let (mut old, mut new, mut blind, mut status) = (untouched, untouched, untouched, 0x66);
        // SAFETY: the pointers are to local variables, and the name is a C string.
        let first = unsafe { (self.old)(name.as_ptr(), &mut old, version, flags) };
        // SAFETY: the pointers are to local variables, and the name is a C string.
        let second = unsafe { (self.new)(name.as_ptr(), &mut new, version, flags, &mut status) };
        // SAFETY: the pointer is to a local variable, the name is a C string, and a null status is allowed.
        let third = unsafe { (self.new)(name.as_ptr(), &mut blind, version, flags, null_mut()) };
        (first, old.addr(), second, new.addr(), status, third, blind.addr())
    }
}

/// In the container: compares what the stand-in returns with what the driver returns.
pub fn client(arguments: &[&str]) {
    let file = Path::new(arguments[0]).join("libcuda.so.1");
    let own = LoadedLibrary::open("libcuda.so.1").unwrap();
    let real = LoadedLibrary::open(file.to_str().unwrap()).unwrap();
    let stand_in = std::env::split_paths(&std::env::var_os("LD_LIBRARY_PATH").unwrap()).next().unwrap();
    let hooked = elf::exports(&std::fs::read(stand_in.join("libcuda.so.1")).unwrap()).unwrap();
    // A function may have several names.
    let mut hooks: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    for name in &hooked {
        let hook = own.symbol(name).unwrap().addr();
        let Some(address) = real.symbol(name) else { continue };
        assert_ne!(hook, address.addr(), "{name} is not hooked");
        hooks.entry(address.addr()).or_default().insert(hook);
    }
    let shared: Vec<_> = hooks.values().filter(|hooks| hooks.len() > 1).collect();
    assert!(shared.is_empty(), "hooks of one function: {shared:?}");
    let with_twin: BTreeMap<usize, &str> = hooked
        .iter()
        .filter(|name| twin(name).is_some())
        .map(|name| (own.symbol(name).unwrap().addr(), name.as_str()))
        .collect();
    let (asked, truth) = (ProcAddressFunctions::of(&own), ProcAddressFunctions::of(&real));
    let (mut routed, mut passed) = (BTreeSet::new(), 0);
    let route = |address: usize| hooks.get(&address).map_or(address, |hooks| *hooks.first().unwrap());
    for name in names() {
        for &version in VERSIONS {
            for &flags in FLAGS {
                let real = truth.answer(name, version, flags);
                let ours = asked.answer(name, version, flags);
                let wanted = (real.0, route(real.1), real.2, route(real.3), real.4, real.5, route(real.6));
                assert_eq!(ours, wanted, "{name} {version} {flags:#x}; the driver says {real:x?}");
                if real.3 == ours.3 {
                    passed += 1
                } else {
                    let _ = routed.insert(ours.3);
                };
            }
            // The per-thread default stream variant is another function, hooked or not.
            let (plain, threads) = (asked.answer(name, version, 1).3, asked.answer(name, version, 2).3);
            let symbol = with_twin.get(&plain);
            if let Some(symbol) = symbol
                && twin(symbol).is_some()
                && version >= 7000
            {
                assert_ne!(plain, threads, "{name} {version}");
            }
        }
    }
    // Every hook can be returned in this way, except those that have no name there.
    let unnamed: Vec<_> = hooked
        .iter()
        .filter(|name| real.symbol(name).is_some() && !routed.contains(&own.symbol(name).unwrap().addr()))
        .collect();
    node::print_line(&format!("not available by cuGetProcAddress: {unnamed:?}"));
    assert!(passed > 1000);
    // A real driver does not check its arguments.
    if arguments.len() == 1 {
        nothing_to_write_to(&asked, &truth);
    }
    node::print_line(&format!("routed {}", routed.len()));
}

fn nothing_to_write_to(asked: &ProcAddressFunctions, truth: &ProcAddressFunctions) {
    let mut function: *mut c_void = null_mut();
    for name in [
        null_mut(),
        c"cuMemAlloc".as_ptr().cast_mut(),
        c"cuGetProcAddress".as_ptr().cast_mut(),
        c"".as_ptr().cast_mut(),
    ] {
        for to in [null_mut(), &raw mut function] {
            if !name.is_null() && !to.is_null() {
                continue;
            }
            // SAFETY: the driver rejects null.
            let (ours, theirs) =
                unsafe { ((asked.old)(name, to, 12040, 0), (truth.old)(name, to, 12040, 0)) };
            assert_eq!(ours, theirs, "{name:?} {to:?}");
            // SAFETY: the driver rejects null.
            let (ours, theirs) = unsafe {
                ((asked.new)(name, to, 12040, 0, null_mut()), (truth.new)(name, to, 12040, 0, null_mut()))
            };
            assert_eq!(ours, theirs, "{name:?} {to:?}");
        }
    }
}
