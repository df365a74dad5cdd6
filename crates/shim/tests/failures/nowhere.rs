//! Every hooked function, with every pattern of null and of valid places to write to: it answers what the driver answers.

use super::*;
use driver::Library;
use driver::nvml::NVML_ERROR_FUNCTION_NOT_FOUND;
use partage_elf_rewrite::elf;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::fmt::Write as _;

#[test]
fn nowhere_to_put_an_answer_is_what_it_is_to_the_driver() {
    let mut wrong = Vec::new();
    for driver in [DriverVersion::R550, DriverVersion::R535] {
        for state in ["before", "started", "ready"] {
            let node = Node::new(CARD, 1, driver);
            let mut share = shares(&node, u64::MAX);
            // No limit: only the driver's own reasons are left.
            share[0].context = CONTEXT;
            let container = Container::new(&node, &share, RegionPolicy::default());
            let alone = node
                .command(&format!("nowhere {state}"))
                .env(STAND_INS, container.libraries())
                .output()
                .unwrap();
            let with = container
                .command(&format!("nowhere {state}"))
                .env(STAND_INS, container.libraries())
                .output()
                .unwrap();
            let lines = |output: &std::process::Output| {
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                assert!(output.status.success(), "{state}: {}\n{text}", output.status);
                text.lines().filter(|line| line.starts_with("= ")).map(String::from).collect::<Vec<_>>()
            };
            let (alone, with) = (lines(&alone), lines(&with));
            assert!(alone.len() > 100, "{alone:?}");
            // A function that this driver lacks is one that says so.
            let wanted: BTreeMap<_, _> = alone.iter().filter_map(|line| line.rsplit_once(": ")).collect();
            for line in with.iter().filter(|line| !is_control(line)) {
                let (call, code) = line.rsplit_once(": ").unwrap();
                let missing = if call.starts_with("= cu") {
                    CUDA_ERROR_NOT_FOUND
                } else {
                    NVML_ERROR_FUNCTION_NOT_FOUND
                };
                let wanted = wanted.get(call).map_or(missing.to_string(), |code| code.to_string());
                let both_refuse = code != "0" && wanted != "0";
                if code != wanted && !(both_refuse && TWICE_WRONG.iter().any(|name| call.contains(name))) {
                    wrong.push(format!("{driver:?} {state}: {call}: {code}, the driver says {wanted}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// What a container may not do is refused before anybody looks at how it was asked.
fn is_control(line: &str) -> bool {
    line.starts_with("= nvml") && line.ends_with(&format!(": {NVML_ERROR_NO_PERMISSION}"))
}

/// Where two things are wrong at once, which one is said may differ: no library, no device, nothing of this kind here.
const TWICE_WRONG: [&str; 6] = [
    "cuCtxCreate_v3",
    "cuGLCtxCreate",
    "cuVDPAUCtxCreate",
    "cuGreenCtxCreate",
    "nvmlGpm",
    "nvmlDeviceGetProcessesUtilizationInfo",
];

const STAND_INS: &str = "PARTAGE_TEST_STAND_INS";

/// More than any structure of the driver's, twice over.
static mut PLACE: [u64; 1 << 13] = [0; 1 << 13];

/// Calls functions by name with a pattern of places.
macro_rules! callers {
    ($caller:ident, $code:ident, $($(#[$doc:meta])* trait $family:ident {
        $(fn $name:ident $args:tt $(twin $twin:ident)?;)*
    })*) => {
        pub(super) fn $caller(library: &Library, wanted: &str, pattern: u32) -> Option<i64> {
            $($(
                callers! { @one library wanted pattern $name $args $code }
                $(callers! { @one library wanted pattern $twin $args $code })?
            )*)*
            None
        }
    };
    (@one $library:ident $wanted:ident $pattern:ident $name:ident($($arg:ident: $type:ty),* $(,)?) $code:ident) => {
        if $wanted == stringify!($name) {
            let address = $library.symbol(stringify!($name))?;
            // SAFETY: the symbol has this signature.
            let function = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> $code>(address) };
            #[allow(unused_mut)]
            let mut bits = $pattern;
            $(let $arg: $type = {
                let place = bits & 1 == 1;
                if is_pointer::<$type>() { bits >>= 1 }
                argument::<$type>(place)
            };)*
            // Patterns beyond the places there are have been seen.
            if bits != 0 {
                return None;
            }
            // SAFETY: null, or a place with room.
            let code = unsafe { function($($arg),*) };
            return Some(i64::from(code));
        }
    };
}

/// A place for what is passed by its address, if there is to be one; else zeros.
fn argument<T>(place: bool) -> T {
    if is_pointer::<T>() && place {
        let address: *mut u64 = (&raw mut PLACE).cast();
        // SAFETY: pointers are as large as this one, and every address is a value of theirs.
        return unsafe { std::mem::transmute_copy(&address) };
    }
    // SAFETY: of C's types that these functions take, zeros are a value; no function calls back on nothing.
    unsafe { std::mem::zeroed() }
}

/// Pointers' types are named as such.
fn is_pointer<T>() -> bool {
    std::any::type_name::<T>().starts_with('*')
}

macro_rules! expand { ($($table:tt)*) => { callers! { call_cuda, CUresult, $($table)* } }; }
partage_driver_api::cuda_functions!(expand);

mod of_nvml {
    use super::{Library, argument, c_void, is_pointer};
    use partage_driver_api::nvml::*;
    macro_rules! expand { ($($table:tt)*) => { callers! { call, nvmlReturn_t, $($table)* } }; }
    partage_driver_api::nvml_functions!(expand);
}

pub fn client(state: &str) {
    let stand_ins = std::env::var_os(STAND_INS).unwrap();
    let names = |file| elf::exports(&fs::read(Path::new(&stand_ins).join(file)).unwrap()).unwrap();
    let cuda = Cuda(Library::open("libcuda.so.1").unwrap());
    let nvml = Nvml::open();
    let mut context = null_mut();
    if state != "before" {
        ok!(cuda.cuInit(0));
        ok!(nvml.nvmlInit_v2());
    }
    if state == "ready" {
        ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    }
    let mut said = String::new();
    for (library, names) in [(&cuda.0, names("libcuda.so.1")), (&nvml.0, names("libnvidia-ml.so.1"))] {
        let names: BTreeSet<_> = names.iter().map(String::as_str).collect();
        for name in names {
            for pattern in 0..256 {
                // SAFETY: nobody else uses it.
                unsafe { (&raw mut PLACE).write([0; 1 << 13]) };
                if state == "ready" {
                    ok!(cuda.cuCtxSetCurrent(context));
                }
                let code = if name.starts_with("cu") {
                    call_cuda(library, name, pattern)
                } else {
                    of_nvml::call(library, name, pattern)
                };
                let Some(code) = code else { continue };
                writeln!(said, "= {name} {pattern:b}: {code}").unwrap();
            }
        }
    }
    say(&said);
}
