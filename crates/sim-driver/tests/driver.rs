//! The simulated libcuda from outside: programs that open it by name, on nodes of their own.
#![allow(unsafe_code, unreachable_pub, missing_docs)]
// Calls of C functions, over and over: what is promised of them is said once, in `ok!`.
#![allow(clippy::unwrap_used, clippy::multiple_unsafe_ops_per_block, clippy::macro_metavars_in_unsafe)]
// Numbers as the program's own arguments of its callbacks.
#![allow(clippy::manual_dangling_ptr)]

#[path = "support/driver.rs"]
mod driver;
#[path = "support/node.rs"]
mod node;
#[path = "support/sequence.rs"]
mod sequence;

#[path = "driver/devices.rs"]
mod devices;
#[path = "driver/misuse.rs"]
mod misuse;
#[path = "driver/processes.rs"]
mod processes;
#[path = "driver/sequences.rs"]
mod sequences;
#[path = "driver/streams.rs"]
mod streams;
#[path = "driver/symbols.rs"]
mod symbols;

use driver::cuda::*;
use node::role;
use std::ffi::CString;
use std::ptr::null_mut;

/// Fails with the name of the code.
#[macro_export]
macro_rules! ok {
    ($call:expr) => {{
        // SAFETY: every pointer in these calls is null or to a variable that lives through them.
        let code = unsafe { $call };
        assert_eq!(code, 0, "{}: {:?}", stringify!($call), partage_driver_api::cuda::name(code));
    }};
}

/// Expects a failure.
#[macro_export]
macro_rules! fails {
    ($code:ident, $call:expr) => {{
        // SAFETY: as in `ok`; what is wrong is handles and sizes.
        let code = unsafe { $call };
        assert_eq!(
            partage_driver_api::cuda::name(code),
            partage_driver_api::cuda::name(partage_driver_api::cuda::$code),
            "{}",
            stringify!($call)
        );
    }};
}

/// The other side of every test here.
#[test]
fn client() {
    let Some(role) = role() else { return };
    let words: Vec<&str> = role.iter().map(String::as_str).collect();
    let (name, rest) = words.split_first().unwrap();
    match *name {
        "symbols" => symbols::client(rest),
        "devices" => devices::client(rest),
        "misuse" => misuse::client(rest),
        "stream" => streams::client(rest),
        "process" => processes::client(rest),
        "sequences" => sequences::client(rest),
        other => panic!("{other}"),
    }
}

/// A started driver with a context.
fn start() -> (Cuda, CUcontext) {
    let cuda = Cuda::started();
    let mut context = null_mut();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    (cuda, context)
}

fn function(cuda: &Cuda, name: &str) -> CUfunction {
    let (mut module, mut function) = (null_mut(), null_mut());
    let name = CString::new(name).unwrap();
    ok!(cuda.cuModuleLoadData(&mut module, c"any image".as_ptr().cast()));
    ok!(cuda.cuModuleGetFunction(&mut function, module, name.as_ptr()));
    function
}

/// Launches a grid that fills any GPU.
fn launch(cuda: &Cuda, function: CUfunction, stream: CUstream) {
    ok!(cuda.cuLaunchKernel(function, 1 << 20, 1, 1, 256, 1, 1, 0, stream, null_mut(), null_mut()));
}

fn event(cuda: &Cuda) -> CUevent {
    let mut event = null_mut();
    ok!(cuda.cuEventCreate(&mut event, 0));
    event
}

fn stream(cuda: &Cuda, flags: u32) -> CUstream {
    let mut stream = null_mut();
    ok!(cuda.cuStreamCreate(&mut stream, flags));
    stream
}

/// Milliseconds between two events, both of which are waited for.
fn elapsed(cuda: &Cuda, start: CUevent, end: CUevent) -> f64 {
    let mut milliseconds = 0.0;
    ok!(cuda.cuEventSynchronize(start));
    ok!(cuda.cuEventSynchronize(end));
    ok!(cuda.cuEventElapsedTime(&mut milliseconds, start, end));
    f64::from(milliseconds)
}
