//! Tests of the simulated libcuda from outside: programs that load it by name, on their own nodes.
#![allow(unsafe_code, unreachable_pub, missing_docs)]
// The many calls of C functions are justified once, in `ok!`.
#![allow(clippy::unwrap_used, clippy::multiple_unsafe_ops_per_block, clippy::macro_metavars_in_unsafe)]
// Callbacks get small numbers as user data.
#![allow(clippy::manual_dangling_ptr)]

#[path = "support/driver.rs"]
mod driver;
#[path = "support/node.rs"]
mod node;
#[path = "support/sequence.rs"]
mod sequence;

#[path = "driver/copies.rs"]
mod copies;
#[path = "driver/devices.rs"]
mod devices;
#[path = "driver/misuse.rs"]
mod misuse;
#[path = "driver/peers.rs"]
mod peers;
#[path = "driver/processes.rs"]
mod processes;
#[path = "driver/sequences.rs"]
mod sequences;
#[path = "driver/streams.rs"]
mod streams;
#[path = "driver/symbols.rs"]
mod symbols;
#[path = "driver/words.rs"]
mod words;

use driver::cuda::*;
use node::role;
use std::ffi::CString;
use std::ptr::null_mut;

/// Calls a function and fails with the name of its error code.
#[macro_export]
macro_rules! ok {
    ($call:expr) => {{
        // SAFETY: every pointer in these calls is null or refers to a variable that outlives the call.
        let code = unsafe { $call };
        assert_eq!(code, 0, "{}: {:?}", stringify!($call), partage_driver_api::cuda::name(code));
    }};
}

/// Calls a function and expects an error code.
#[macro_export]
macro_rules! fails {
    ($code:ident, $call:expr) => {{
        // SAFETY: as in `ok!`; only handles and sizes are invalid.
        let code = unsafe { $call };
        assert_eq!(
            partage_driver_api::cuda::name(code),
            partage_driver_api::cuda::name(partage_driver_api::cuda::$code),
            "{}",
            stringify!($call)
        );
    }};
}

/// Runs the role of a client process; does nothing in the test process itself.
#[test]
fn client() {
    let Some(role) = role() else { return };
    let words: Vec<&str> = role.iter().map(String::as_str).collect();
    let (name, rest) = words.split_first().unwrap();
    match *name {
        "symbols" => symbols::client(rest),
        "copies" => copies::client(rest),
        "devices" => devices::client(rest),
        "misuse" => misuse::client(rest),
        "stream" => streams::client(rest),
        "peers" => peers::client(rest),
        "process" => processes::client(rest),
        "sequences" => sequences::client(rest),
        "words" => words::client(rest),
        other => panic!("{other}"),
    }
}

/// Initializes the driver and creates a context.
fn start() -> (CudaLibrary, CUcontext) {
    let cuda = CudaLibrary::started();
    let mut context = null_mut();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    (cuda, context)
}

fn function(cuda: &CudaLibrary, name: &str) -> CUfunction {
    let (mut module, mut function) = (null_mut(), null_mut());
    let name = CString::new(name).unwrap();
    ok!(cuda.cuModuleLoadData(&mut module, c"any image".as_ptr().cast()));
    ok!(cuda.cuModuleGetFunction(&mut function, module, name.as_ptr()));
    function
}

/// Launches a grid that fills any GPU.
fn launch(cuda: &CudaLibrary, function: CUfunction, stream: CUstream) {
    ok!(cuda.cuLaunchKernel(function, 1 << 20, 1, 1, 256, 1, 1, 0, stream, null_mut(), null_mut()));
}

fn event(cuda: &CudaLibrary) -> CUevent {
    let mut event = null_mut();
    ok!(cuda.cuEventCreate(&mut event, 0));
    event
}

fn stream(cuda: &CudaLibrary, flags: u32) -> CUstream {
    let mut stream = null_mut();
    ok!(cuda.cuStreamCreate(&mut stream, flags));
    stream
}

/// Waits for two events and returns the milliseconds between them.
fn elapsed(cuda: &CudaLibrary, start: CUevent, end: CUevent) -> f64 {
    let mut milliseconds = 0.0;
    ok!(cuda.cuEventSynchronize(start));
    ok!(cuda.cuEventSynchronize(end));
    ok!(cuda.cuEventElapsedTime(&mut milliseconds, start, end));
    f64::from(milliseconds)
}
