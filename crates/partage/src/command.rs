//! The commands, one file each.

mod check;
mod context_sizes;
mod explain;
mod home;
mod inspect;
mod keep;
mod node;
mod ps;
mod resize;
mod run;
#[cfg(test)]
mod samples;
#[cfg(feature = "simulated-driver")]
mod sim;
#[cfg(not(feature = "simulated-driver"))]
#[path = "command/sim_not_built.rs"]
mod sim;
mod simulate;
mod stop;
mod top;
mod up;
mod words;

use crate::output::line;
use clap::{Args, Subcommand, ValueEnum};
use partage_core::dialect::{MemoryUnit, Settings};
use partage_enforce::error_chain::describe;
use partage_workstation::client::ClientError;
use std::io::{self, Write};
use std::process::ExitCode;

/// What to do.
#[derive(Subcommand)]
pub(crate) enum Command {
    Run(run::Run),
    Up(up::Up),
    Ps(ps::Ps),
    Top(top::Top),
    Inspect(inspect::Inspect),
    Resize(resize::Resize),
    Stop(stop::Stop),
    Check(check::Check),
    Explain(explain::Explain),
    Node(node::Node),
    #[command(name = partage_workstation::daemon::COMMAND, hide = true)]
    Keep(keep::Keep),
    #[command(name = partage_enforce::context_sizes::MEASURE_COMMAND, hide = true)]
    ContextSizes(context_sizes::ContextSizes),
    Sim(sim::Sim),
    Simulate(simulate::Simulate),
}

impl Command {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<Outcome> {
        match self {
            Command::Run(run) => run.run(err),
            Command::Up(up) => up.run(out, err),
            Command::Ps(ps) => ps.run(out, err),
            Command::Top(top) => top.run(out, err),
            Command::Inspect(inspect) => inspect.run(out, err),
            Command::Resize(resize) => resize.run(out, err),
            Command::Stop(stop) => stop.run(out, err),
            Command::Keep(keep) => keep.run(out),
            Command::ContextSizes(sizes) => sizes.run(out, err),
            Command::Check(check) => check.run(out, err),
            Command::Explain(explain) => explain.run(out, err),
            Command::Node(node) => node.run(out, err),
            Command::Sim(sim) => sim.run(out, err),
            Command::Simulate(simulate) => simulate.run(out, err),
        }
    }
}

/// How a command ended, as scripts see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Nothing is wrong: exit code 0.
    Fine,
    /// Something is wrong with what was read: exit code 1.
    Problems,
    /// Something could not be read at all: exit code 2, as for wrong arguments.
    Unreadable,
    /// Another exit code.
    Code(u8),
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> ExitCode {
        ExitCode::from(match outcome {
            Outcome::Fine => 0,
            Outcome::Problems => 1,
            Outcome::Unreadable => 2,
            Outcome::Code(code) => code,
        })
    }
}

/// Says why the keeper did not do it, and what would work.
fn says(err: &mut dyn Write, error: &ClientError) -> io::Result<()> {
    line(err, format_args!("error: {}", describe(error)))?;
    if let ClientError::Refused(refusal) = error {
        for hint in &refusal.hints {
            line(err, format_args!("  try: {hint}"))?;
        }
    }
    Ok(())
}

/// Who the answer is for.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Output {
    /// For people
    Table,
    /// For programs
    Json,
}

/// What the cluster decides about its dialects.
#[derive(Args)]
#[command(next_help_heading = "Settings of the cluster")]
pub(crate) struct DialectArgs {
    /// What one aliyun.com/gpu-mem is
    #[arg(long, value_name = "UNIT", value_enum, ignore_case = true, default_value_t = GpushareUnit::Gib)]
    gpushare_unit: GpushareUnit,

    /// Slots a GPU is split in for k8s.amazonaws.com/vgpu, 1 to 48
    #[arg(long, value_name = "N", value_parser = slots, allow_negative_numbers = true, default_value = "10")]
    aws_slots: u32,

    /// How many MiB one volcano.sh/vgpu-memory is
    #[arg(long, value_name = "N", value_parser = factor, allow_negative_numbers = true, default_value = "1")]
    volcano_memory_factor: u32,
}

impl DialectArgs {
    pub(crate) fn settings(&self) -> Settings {
        Settings {
            gpushare_unit: match self.gpushare_unit {
                GpushareUnit::Gib => MemoryUnit::Gib,
                GpushareUnit::Mib => MemoryUnit::Mib,
            },
            volcano_memory_factor: self.volcano_memory_factor,
            aws_slots: self.aws_slots,
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum GpushareUnit {
    #[value(name = "GiB")]
    Gib,
    #[value(name = "MiB")]
    Mib,
}

fn slots(text: &str) -> Result<u32, String> {
    valid(text, |aws_slots| Settings { aws_slots, ..Settings::default() })
}

fn factor(text: &str) -> Result<u32, String> {
    valid(text, |volcano_memory_factor| Settings { volcano_memory_factor, ..Settings::default() })
}

/// A number that makes valid settings.
fn valid(text: &str, settings: impl Fn(u32) -> Settings) -> Result<u32, String> {
    let number = text.parse().map_err(|_| "write a whole number, 1 or more".to_string())?;
    settings(number).validate().map(|_| number).map_err(|error| error.to_string())
}
