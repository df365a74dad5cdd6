//! What a process may have of a GPU's memory: every way to get some, to the limit and no further, and exactly counted.
#![allow(unsafe_code, unreachable_pub, missing_docs)]
// Calls of C functions, over and over: what is promised of them is said once, in `ok!`.
#![allow(clippy::unwrap_used, clippy::multiple_unsafe_ops_per_block, clippy::macro_metavars_in_unsafe)]

#[path = "support/container.rs"]
mod container;
#[path = "../../sim-driver/tests/support/driver.rs"]
mod driver;
#[path = "../../sim-driver/tests/support/node.rs"]
mod node;

#[path = "../../sim-driver/tests/support/sequence.rs"]
mod sequence;

#[path = "memory/contexts.rs"]
mod contexts;
#[path = "memory/graphs.rs"]
mod graphs;
#[path = "memory/growth.rs"]
mod growth;
#[path = "memory/others.rs"]
mod others;
#[path = "memory/plain.rs"]
mod plain;
#[path = "memory/pools.rs"]
mod pools;
#[path = "memory/processes.rs"]
mod processes;
#[path = "memory/sequences.rs"]
mod sequences;

use container::{Container, MIB, Observer};
use driver::cuda::*;
use node::{Node, role};
use partage_driver_api::exports::DriverVersion;
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

/// What the driver says to it.
#[macro_export]
macro_rules! says {
    ($call:expr) => {{
        // SAFETY: as in `ok`.
        unsafe { $call }
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

/// The program in the container, of every test here.
#[test]
fn client() {
    let Some(role) = role() else { return };
    let words: Vec<&str> = role.iter().map(String::as_str).collect();
    let (name, rest) = words.split_first().unwrap();
    match *name {
        "plain" => plain::client(rest),
        "contexts" => contexts::client(rest),
        "graphs" => graphs::client(rest),
        "growth" => growth::client(rest),
        "others" => others::client(rest),
        "pools" => pools::client(rest),
        "processes" => processes::client(rest),
        "sequences" => sequences::client(rest),
        other => panic!("{other}"),
    }
}

fn node() -> Node {
    Node::new("A100-SXM4-40GB", 2, DriverVersion::R550)
}

/// What a context takes of that card.
const CONTEXT: u64 = 414 * MIB;

/// Plays a role in a container with that much memory for programs, besides one context.
fn play(role: &str, memory: u64) {
    let node = node();
    Container::with_memory(&node, CONTEXT + memory).play(role);
}

/// A started driver with a context, and who knows the truth.
fn start() -> (Cuda, CUcontext, Observer) {
    let cuda = Cuda::started();
    let mut context = null_mut();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    (cuda, context, Observer::new())
}
