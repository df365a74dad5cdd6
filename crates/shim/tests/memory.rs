//! GPU memory of a process: every way to allocate it, up to the limit and no further, and counted exactly.
#![allow(unsafe_code, unreachable_pub, missing_docs)]
// Many calls of C functions: their safety is explained once, in `ok!`.
#![allow(clippy::unwrap_used, clippy::multiple_unsafe_ops_per_block, clippy::macro_metavars_in_unsafe)]

#[path = "support/container.rs"]
mod container;
#[path = "../../sim-driver/tests/support/driver.rs"]
mod driver;
#[path = "../../sim-driver/tests/support/node.rs"]
mod node;

#[path = "../../sim-driver/tests/support/sequence.rs"]
mod sequence;

#[path = "memory/attached_gpu.rs"]
mod attached_gpu;
#[path = "memory/contexts.rs"]
mod contexts;
#[path = "memory/graphs.rs"]
mod graphs;
#[path = "memory/linear.rs"]
mod linear;
#[path = "memory/other_memory.rs"]
mod other_memory;
#[path = "memory/pools.rs"]
mod pools;
#[path = "memory/processes.rs"]
mod processes;
#[path = "memory/sequences.rs"]
mod sequences;

use container::{MIB, Observer, TestContainer};
use driver::cuda::*;
use node::{TestNode, role};
use partage_driver_api::exports::DriverVersion;
use std::ptr::null_mut;

/// Fails with the call and the name of its error code.
#[macro_export]
macro_rules! ok {
    ($call:expr) => {{
        // SAFETY: every pointer in these calls is null or to a variable that lives through them.
        let code = unsafe { $call };
        assert_eq!(code, 0, "{}: {:?}", stringify!($call), partage_driver_api::cuda::name(code));
    }};
}

/// Returns the result of a call.
#[macro_export]
macro_rules! result_of {
    ($call:expr) => {{
        // SAFETY: every pointer in these calls is null or to a variable that lives through them.
        unsafe { $call }
    }};
}

/// Expects a call to fail with this error.
#[macro_export]
macro_rules! fails {
    ($code:ident, $call:expr) => {{
        // SAFETY: every pointer in these calls is null or to a variable that lives through them; only handles and sizes
        // are invalid.
        let code = unsafe { $call };
        assert_eq!(
            partage_driver_api::cuda::name(code),
            partage_driver_api::cuda::name(partage_driver_api::cuda::$code),
            "{}",
            stringify!($call)
        );
    }};
}

/// The program that every test here runs in the container.
#[test]
fn client() {
    let Some(role) = role() else { return };
    let words: Vec<&str> = role.iter().map(String::as_str).collect();
    let (name, rest) = words.split_first().unwrap();
    match *name {
        "linear" => linear::client(rest),
        "contexts" => contexts::client(rest),
        "graphs" => graphs::client(rest),
        "attached_gpu" => attached_gpu::client(rest),
        "other_memory" => other_memory::client(rest),
        "pools" => pools::client(rest),
        "processes" => processes::client(rest),
        "sequences" => sequences::client(rest),
        other => panic!("{other}"),
    }
}

fn node() -> TestNode {
    TestNode::new("A100-SXM4-40GB", 2, DriverVersion::R550)
}

/// Bytes that a context takes of the simulated GPU.
const CONTEXT_BYTES: u64 = 414 * MIB;

/// Runs a role in a container with this much memory, in addition to one context.
fn run_role(role: &str, memory: u64) {
    let node = node();
    TestContainer::with_memory(&node, CONTEXT_BYTES + memory).run_role(role);
}

/// Returns an initialized driver with a context, and an observer of the true usage.
fn start() -> (CudaLibrary, CUcontext, Observer) {
    let cuda = CudaLibrary::started();
    let mut context = null_mut();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    (cuda, context, Observer::new())
}
