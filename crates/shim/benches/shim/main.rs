//! What the shim costs and how exact shares are, compared with the bare simulated driver in the same run. Run by `make
//! bench`; `cargo bench -p partage-shim -- shares` runs one part.
#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::multiple_unsafe_ops_per_block,
    clippy::print_stdout,
    unreachable_pub,
    missing_docs
)]

mod calls;
#[path = "../../../sim-driver/tests/support/driver.rs"]
mod driver;
mod memory;
mod setup;
mod shares;
mod start;
mod tenant;

/// Returns a command that runs a tenant.
fn tenant_command(arguments: &[&str]) -> std::process::Command {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.arg("tenant").args(arguments);
    command
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    if let Some(("tenant", rest)) = arguments.split_first().map(|(first, rest)| (first.as_str(), rest)) {
        return tenant::play(rest);
    }
    let wanted = |part: &str| arguments.is_empty() || arguments.iter().any(|word| word == part);
    if wanted("calls") {
        calls::all();
    }
    if arguments.iter().any(|word| word == "launches") {
        calls::launches();
    }
    if wanted("start") {
        start::all();
    }
    if wanted("memory") {
        memory::all();
    }
    if wanted("shares") {
        shares::all();
    }
}
