//! Programs shaped like those that share GPUs, alone in a share and beside each other.
//!
//! `make bench-compute` measures how exact their shares are. The bounds of these tests are wide enough for a busy
//! machine: a limit is exceeded by no more than a few points, and every program gets a good part of its share. The tests
//! sleep for the time that they measure: a share can only be observed over time.
#![allow(unsafe_code, dead_code, unreachable_pub, missing_docs)]
#![allow(clippy::unwrap_used, clippy::multiple_unsafe_ops_per_block, clippy::macro_metavars_in_unsafe)]
#![allow(clippy::print_stdout)]

#[path = "../../sim-driver/tests/support/driver.rs"]
mod driver;
#[path = "../benches/compute/measure.rs"]
mod measure;
#[path = "../benches/compute/pairs.rs"]
mod pairs;
#[path = "../benches/compute/programs.rs"]
mod programs;
#[path = "../benches/shim/setup.rs"]
mod setup;

use measure::{Access, Running, TenantSpec};
use pairs::{QUICK_PAIRS, SPLITS, tenant};
use programs::{PROGRAMS, Program, named};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Environment variable with the words of the program that this process is to run.
const ROLE_VARIABLE: &str = "PARTAGE_TEST_ROLE";
/// Points by which a limit may be exceeded on a busy machine.
const LIMIT_MARGIN: f64 = 8.0;
/// Windows in which a program may reach the part of its share that is required.
const MAX_WINDOWS: usize = 5;
const WARM_UP: Duration = Duration::from_millis(200);
const WINDOW: Duration = Duration::from_millis(700);

/// Returns a command that runs a tenant: this binary again, with its test `client` only.
fn tenant_command(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["client", "--exact", "--nocapture", "--test-threads=1"]);
    command.env(ROLE_VARIABLE, arguments.join(" ")).env_remove("CUDA_VISIBLE_DEVICES");
    command
}

/// The program that every test here runs in the container.
#[test]
fn client() {
    let Ok(role) = std::env::var(ROLE_VARIABLE) else { return };
    programs::run(named(role.strip_prefix("zoo ").unwrap()).unwrap());
}

/// Measurements that run at once would disturb each other.
static EXCLUSIVE: Mutex<()> = Mutex::new(());

/// Checks that tenants keep to their limits over all windows together, and reach a third of what they are entitled to
/// in one of them: a program that gets no processor for a while cannot use its share.
fn check(programs: &[&Program], tenants: &[TenantSpec]) -> Result<(), String> {
    let running = Running::start(tenants, Access::Shares);
    std::thread::sleep(WARM_UP);
    let longest = Duration::from_micros(programs.iter().map(|it| it.longest_kernel_us).max().unwrap_or(0));
    let window = WINDOW.max(longest * 2);
    let mut seen: Vec<Vec<f64>> = Vec::new();
    while seen.len() < MAX_WINDOWS {
        seen.push(running.measure(window).iter().map(|got| got.percent).collect());
        let passed = window * seen.len() as u32;
        // A kernel cannot be interrupted, neither a program's own nor its neighbor's.
        let kernel = longest.as_secs_f64() / passed.as_secs_f64() * 100.0;
        let keeps = |at: usize| {
            let mean = seen.iter().map(|got| got[at]).sum::<f64>() / seen.len() as f64;
            let limit = f64::from(tenants[at].ceiling) + LIMIT_MARGIN + kernel;
            let least = (f64::from(tenants[at].cores.min(programs[at].demand)) - kernel) / 3.0;
            mean <= limit && seen.iter().any(|got| got[at] >= least)
        };
        if (0..tenants.len()).all(keeps) {
            return Ok(());
        }
    }
    let names: Vec<&str> = programs.iter().map(|program| program.name).collect();
    let asked: Vec<(u32, u32)> = tenants.iter().map(|tenant| (tenant.cores, tenant.ceiling)).collect();
    Err(format!("{names:?} with shares and limits {asked:?} got {seen:.1?}"))
}

#[track_caller]
fn assert_all_pass(results: impl Iterator<Item = Result<(), String>>) {
    let failed: Vec<String> = results.filter_map(Result::err).collect();
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn every_program_keeps_to_a_hard_share() {
    let _exclusive = EXCLUSIVE.lock().unwrap_or_else(PoisonError::into_inner);
    assert_all_pass(PROGRAMS.iter().map(|program| check(&[program], &[tenant(program, 30, true)])));
}

#[test]
fn pairs_of_programs_get_their_shares() {
    let _exclusive = EXCLUSIVE.lock().unwrap_or_else(PoisonError::into_inner);
    let one = |(at, (first, second)): (usize, &(&str, &str))| {
        let split = SPLITS[at % SPLITS.len()];
        let pair = [named(first).unwrap(), named(second).unwrap()];
        check(&pair, &[0, 1].map(|at| tenant(pair[at], split.cores[at], split.hard)))
    };
    assert_all_pass(QUICK_PAIRS.iter().enumerate().map(one));
}
