//! Every route to a function of the driver's ends in the hook, and every process of a container is held.
#![allow(unsafe_code, unreachable_pub, missing_docs)]
// Calls of C functions, over and over: what is promised of them is said once, in `ok!`.
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
#[path = "routes/manners.rs"]
mod manners;
#[path = "routes/proc_address.rs"]
mod proc_address;
#[path = "routes/processes.rs"]
mod processes;

use container::{Container, MIB};
use node::{Node, role};
use partage_driver_api::exports::DriverVersion;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Fails with the name of the code.
#[macro_export]
macro_rules! ok {
    ($call:expr) => {{
        // SAFETY: every pointer in these calls is null or to a variable that lives through them.
        let code = unsafe { $call };
        assert_eq!(code, 0, "{}: {:?}", stringify!($call), partage_driver_api::cuda::name(code));
    }};
}

/// The program in the container, of every test here.
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

const CARD: &str = "A100-SXM4-40GB";

/// What a context takes of that card.
const CONTEXT: u64 = 414 * MIB;

/// What a program may have besides its context.
const ROOM: u64 = 64 * MIB;

fn node() -> Node {
    Node::new(CARD, 1, DriverVersion::R550)
}

/// What `route.c` says of a container with that much memory.
fn held() -> String {
    format!("{0} 2 0 {0}", CONTEXT + ROOM)
}
