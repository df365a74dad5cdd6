//! Every route to a function of the driver ends in the hook, and every process of a container is limited.
#![allow(unsafe_code, unreachable_pub, missing_docs)]
// Many calls of C functions: their safety is explained once, in `ok!`.
#![allow(clippy::unwrap_used, clippy::multiple_unsafe_ops_per_block, clippy::macro_metavars_in_unsafe)]

#[path = "support/container.rs"]
mod container;
#[path = "../../sim-driver/tests/support/driver.rs"]
mod driver;
#[path = "../../sim-driver/tests/support/node.rs"]
mod node;
#[path = "support/program.rs"]
mod program;

#[path = "routes/linker.rs"]
mod linker;
#[path = "routes/proc_address.rs"]
mod proc_address;
#[path = "routes/processes.rs"]
mod processes;
#[path = "routes/unused_library.rs"]
mod unused_library;

use container::{MIB, TestContainer};
use node::{TestNode, role};
use partage_driver_api::exports::DriverVersion;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Fails with the call and the name of its error code.
#[macro_export]
macro_rules! ok {
    ($call:expr) => {{
        // SAFETY: every pointer in these calls is null or to a variable that lives through them.
        let code = unsafe { $call };
        assert_eq!(code, 0, "{}: {:?}", stringify!($call), partage_driver_api::cuda::name(code));
    }};
}

/// The program that every test here runs in the container.
#[test]
fn client() {
    let Some(role) = role() else { return };
    let words: Vec<&str> = role.iter().map(String::as_str).collect();
    let (name, rest) = words.split_first().unwrap();
    match *name {
        "proc_address" => proc_address::client(rest),
        "processes" => processes::client(rest),
        other => panic!("{other}"),
    }
}

const GPU_MODEL: &str = "A100-SXM4-40GB";

/// Bytes that a context takes of the simulated GPU.
const CONTEXT_BYTES: u64 = 414 * MIB;

/// Bytes that a program may allocate in addition to its context.
const FREE_BYTES: u64 = 64 * MIB;

fn node() -> TestNode {
    TestNode::new(GPU_MODEL, 1, DriverVersion::R550)
}

/// Returns what `route.c` prints in a container with that much memory.
fn expected_output() -> String {
    format!("{0} 2 0 {0}", CONTEXT_BYTES + FREE_BYTES)
}
