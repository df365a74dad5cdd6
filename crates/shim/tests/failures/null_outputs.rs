//! Every hooked function, with every combination of null and valid output pointers, returns what the driver returns.

use super::*;
use driver::LoadedLibrary;
use driver::nvml::NVML_ERROR_FUNCTION_NOT_FOUND;
use partage_elf_rewrite::elf;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::fmt::Write as _;

#[test]
fn null_outputs_get_the_drivers_answer() {
    let mut wrong = Vec::new();
    for driver in [DriverVersion::R550, DriverVersion::R535] {
        for state in ["before", "started", "ready"] {
            let node = TestNode::new(GPU_MODEL, 1, driver);
            let mut share = shares(&node, u64::MAX);
            // No limit, so that only the driver's own errors are left.
            share[0].context = CONTEXT_BYTES;
            let container = TestContainer::new(&node, &share, RegionPolicy::default());
            let alone = node
                .command(&format!("null_outputs {state}"))
                .env(STAND_INS, container.libraries())
                .output()
                .unwrap();
            let with = container
                .command(&format!("null_outputs {state}"))
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
            // A function that this driver lacks returns "not found".
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
                if code != wanted
                    && !(both_refuse && INTERCHANGEABLE_ERRORS.iter().any(|name| call.contains(name)))
                {
                    wrong.push(format!("{driver:?} {state}: {call}: {code}, the driver says {wanted}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Returns whether a control was refused: that happens before its arguments are examined.
fn is_control(line: &str) -> bool {
    line.starts_with("= nvml") && line.ends_with(&format!(": {NVML_ERROR_NO_PERMISSION}"))
}

/// Error codes whose order may differ if two errors apply at once: no library, no device, not supported here.
const INTERCHANGEABLE_ERRORS: [&str; 6] = [
    "cuCtxCreate_v3",
    "cuGLCtxCreate",
    "cuVDPAUCtxCreate",
    "cuGreenCtxCreate",
    "nvmlGpm",
    "nvmlDeviceGetProcessesUtilizationInfo",
];

const STAND_INS: &str = "PARTAGE_TEST_STAND_INS";

/// Larger than any structure of the driver, twice over.
static mut BUFFER: [u64; 1 << 13] = [0; 1 << 13];

/// Calls functions by name with a combination of null and valid pointers.
macro_rules! callers {
    ($caller:ident, $code:ident, $($(#[$doc:meta])* trait $family:ident {
        $(fn $name:ident $args:tt $(twin $twin:ident)?;)*
    })*) => {
        pub(super) fn $caller(library: &LoadedLibrary, wanted: &str, pattern: u32) -> Option<i64> {
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
            // Patterns with more bits than pointers were tried before.
            if bits != 0 {
                return None;
            }
            // SAFETY: every pointer is null, or to a buffer that is large enough.
            let code = unsafe { function($($arg),*) };
            return Some(i64::from(code));
        }
    };
}

/// Returns a pointer to the buffer for a pointer argument, if `place`; otherwise zeros.
fn argument<T>(place: bool) -> T {
    if is_pointer::<T>() && place {
        let address: *mut u64 = (&raw mut BUFFER).cast();
        // SAFETY: all pointers have the same size, and every address is a valid value of a pointer type.
        return unsafe { std::mem::transmute_copy(&address) };
    }
    // SAFETY: all zeros is a valid value of the C types that these functions take; a null callback is not called.
    unsafe { std::mem::zeroed() }
}

/// Returns whether a type is a pointer, by its name.
fn is_pointer<T>() -> bool {
    std::any::type_name::<T>().starts_with('*')
}

macro_rules! expand { ($($table:tt)*) => { callers! { call_cuda, CUresult, $($table)* } }; }
partage_driver_api::cuda_functions!(expand);

mod of_nvml {
    use super::{LoadedLibrary, argument, c_void, is_pointer};
    use partage_driver_api::nvml::*;
    macro_rules! expand { ($($table:tt)*) => { callers! { call, nvmlReturn_t, $($table)* } }; }
    partage_driver_api::nvml_functions!(expand);
}

pub fn client(state: &str) {
    let stand_ins = std::env::var_os(STAND_INS).unwrap();
    let names = |file| elf::exports(&fs::read(Path::new(&stand_ins).join(file)).unwrap()).unwrap();
    let cuda = CudaLibrary(LoadedLibrary::open("libcuda.so.1").unwrap());
    let nvml = NvmlLibrary::open();
    let mut context = null_mut();
    if state != "before" {
        ok!(cuda.cuInit(0));
        ok!(nvml.nvmlInit_v2());
    }
    if state == "ready" {
        ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    }
    let mut output = String::new();
    for (library, names) in [(&cuda.0, names("libcuda.so.1")), (&nvml.0, names("libnvidia-ml.so.1"))] {
        let names: BTreeSet<_> = names.iter().map(String::as_str).collect();
        for name in names {
            for pattern in 0..256 {
                // SAFETY: no other thread uses the buffer.
                unsafe { (&raw mut BUFFER).write([0; 1 << 13]) };
                if state == "ready" {
                    ok!(cuda.cuCtxSetCurrent(context));
                }
                let code = if name.starts_with("cu") {
                    call_cuda(library, name, pattern)
                } else {
                    of_nvml::call(library, name, pattern)
                };
                let Some(code) = code else { continue };
                writeln!(output, "= {name} {pattern:b}: {code}").unwrap();
            }
        }
    }
    print_line(&output);
}
