//! `cuGetProcAddress`: for every name, version and default stream, our hook exactly where the driver's own answer is a
//! function that we hook.

use super::*;
use driver::Library;
use partage_driver_api::cuda::*;
use partage_driver_api::exports::twin;
use partage_elf_rewrite::elf;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, c_char, c_void};
use std::ptr::null_mut;

/// Folders with a `libcuda.so.1` of a real driver, with colons between them: without a GPU it loads and answers this.
const REAL: &str = "PARTAGE_TEST_REAL_DRIVERS";

/// Every name there is in two drivers, and some that are none.
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

/// Where an answer changes, and beyond both ends.
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
fn every_answer_is_the_hook_of_the_drivers_answer() {
    for driver in DriverVersion::ALL {
        let node = Node::new(CARD, 1, driver);
        let container = Container::with_memory(&node, CONTEXT + ROOM);
        let output = container.play(&format!("proc_address {}", node.0.libraries().display()));
        assert!(output.contains("routed"), "{output}");
    }
}

/// The same over the files of real drivers, which may not be handed on with this project.
#[test]
#[ignore = "PARTAGE_TEST_REAL_DRIVERS must name folders with a libcuda.so.1 of a real driver"]
fn every_answer_of_a_real_driver_is_routed() {
    let folders = std::env::var_os(REAL).expect("PARTAGE_TEST_REAL_DRIVERS names folders");
    let node = node();
    for real in std::env::split_paths(&folders) {
        let folder = tempfile::tempdir().unwrap();
        let settings = partage_shim::install::Settings {
            region: Path::new("/nowhere"),
            real_cuda: &real.join("libcuda.so.1"),
            real_nvml: &real.join("libnvidia-ml.so.1"),
            version: None,
        };
        let object = partage_shim::install::shared_object().unwrap();
        partage_shim::install::stand_in(&object, folder.path(), &settings).unwrap();
        let mut command = node.command(&format!("proc_address {} real", real.display()));
        let output = program::said(&command.env("LD_LIBRARY_PATH", folder.path()).output().unwrap());
        assert!(output.contains("routed"), "{output}");
    }
}

type Ask = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64) -> CUresult;
type AskV2 = unsafe extern "C" fn(
    *const c_char,
    *mut *mut c_void,
    i32,
    u64,
    *mut CUdriverProcAddressQueryResult,
) -> CUresult;

struct Asked {
    old: Ask,
    new: AskV2,
}

/// Codes, addresses and the status, with both functions; the status is asked for or not.
type Answer = (CUresult, usize, CUresult, usize, u32, CUresult, usize);

impl Asked {
    fn of(library: &Library) -> Self {
        // SAFETY: functions of these types.
        unsafe {
            Self {
                old: std::mem::transmute::<*mut c_void, Ask>(library.symbol("cuGetProcAddress").unwrap()),
                new: std::mem::transmute::<*mut c_void, AskV2>(
                    library.symbol("cuGetProcAddress_v2").unwrap(),
                ),
            }
        }
    }

    fn answer(&self, name: &str, version: i32, flags: u64) -> Answer {
        let name = CString::new(name).unwrap();
        // What is not written stays as it was.
        let untouched = std::ptr::without_provenance_mut(0x5555);
        let (mut old, mut new, mut blind, mut status) = (untouched, untouched, untouched, 0x66);
        // SAFETY: variables of ours.
        let first = unsafe { (self.old)(name.as_ptr(), &mut old, version, flags) };
        // SAFETY: likewise.
        let second = unsafe { (self.new)(name.as_ptr(), &mut new, version, flags, &mut status) };
        // SAFETY: likewise; nobody has to want the status.
        let third = unsafe { (self.new)(name.as_ptr(), &mut blind, version, flags, null_mut()) };
        (first, old.addr(), second, new.addr(), status, third, blind.addr())
    }
}

/// In the container: compares what the stand-in answers with what the driver does.
pub fn client(arguments: &[&str]) {
    let file = Path::new(arguments[0]).join("libcuda.so.1");
    let own = Library::open("libcuda.so.1").unwrap();
    let real = Library::open(file.to_str().unwrap()).unwrap();
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
    let (asked, truth) = (Asked::of(&own), Asked::of(&real));
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
            // A thread's own default stream is another function, hooked or not.
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
    // Every hook can be had in this way, but those that have no name there.
    let unnamed: Vec<_> = hooked
        .iter()
        .filter(|name| real.symbol(name).is_some() && !routed.contains(&own.symbol(name).unwrap().addr()))
        .collect();
    node::say(&format!("not to be had by cuGetProcAddress: {unnamed:?}"));
    assert!(passed > 1000);
    // A real driver takes what it is given for good.
    if arguments.len() == 1 {
        nothing_to_write_to(&asked, &truth);
    }
    node::say(&format!("routed {}", routed.len()));
}

fn nothing_to_write_to(asked: &Asked, truth: &Asked) {
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
            // SAFETY: null is the driver's to refuse.
            let (ours, theirs) =
                unsafe { ((asked.old)(name, to, 12040, 0), (truth.old)(name, to, 12040, 0)) };
            assert_eq!(ours, theirs, "{name:?} {to:?}");
            // SAFETY: likewise.
            let (ours, theirs) = unsafe {
                ((asked.new)(name, to, 12040, 0, null_mut()), (truth.new)(name, to, 12040, 0, null_mut()))
            };
            assert_eq!(ours, theirs, "{name:?} {to:?}");
        }
    }
}
