//! The commands, one module each, and what they share: exit codes, output formats and dialect options.

mod check;
mod context_sizes;
mod daemon;
mod explain;
mod format;
mod inspect;
mod node;
mod ps;
mod replay;
mod resize;
mod run;
mod share_not_found;
#[cfg(feature = "simulated-driver")]
mod sim;
#[cfg(not(feature = "simulated-driver"))]
#[path = "command/sim_not_built.rs"]
mod sim;
mod state_dir;
mod stop;
#[cfg(test)]
mod test_reports;
mod top;
mod up;

use crate::output::write_line;
use clap::{Args, Subcommand, ValueEnum};
use partage_core::dialect::{DialectSettings, MemoryUnit};
use partage_enforce::error_chain::describe;
use partage_workstation::client::ClientError;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::process::ExitCode;

/// The command to run.
#[derive(Subcommand)]
pub(crate) enum Command {
    Run(run::RunCommand),
    Up(up::UpCommand),
    Ps(ps::PsCommand),
    Top(top::TopCommand),
    Inspect(inspect::InspectCommand),
    Resize(resize::ResizeCommand),
    Stop(stop::StopCommand),
    Check(check::CheckCommand),
    Explain(explain::ExplainCommand),
    Node(node::NodeCommand),
    #[command(name = partage_workstation::daemon::DAEMON_COMMAND, hide = true)]
    Daemon(daemon::DaemonCommand),
    #[command(name = partage_enforce::context_sizes::MEASURE_COMMAND, hide = true)]
    ContextSizes(context_sizes::ContextSizes),
    Sim(sim::SimCommand),
    Replay(replay::ReplayCommand),
}

impl Command {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<CommandExit> {
        match self {
            Command::Run(run) => run.run(err),
            Command::Up(up) => up.run(out, err),
            Command::Ps(ps) => ps.run(out, err),
            Command::Top(top) => top.run(out, err),
            Command::Inspect(inspect) => inspect.run(out, err),
            Command::Resize(resize) => resize.run(out, err),
            Command::Stop(stop) => stop.run(out, err),
            Command::Daemon(daemon) => daemon.run(out),
            Command::ContextSizes(sizes) => sizes.run(out, err),
            Command::Check(check) => check.run(out, err),
            Command::Explain(explain) => explain.run(out, err),
            Command::Node(node) => node.run(out, err),
            Command::Sim(sim) => sim.run(out, err),
            Command::Replay(replay) => replay.run(out, err),
        }
    }
}

/// Headings of `partage --help` and the commands below each, in the order in which they are shown.
pub(crate) const GROUPS: [(&str, &[&str]); 3] = [
    ("Workstation commands", &["run", "up", "ps", "top", "inspect", "resize", "stop"]),
    ("Cluster commands", &["node", "check", "explain"]),
    ("Tools", &["replay", "sim"]),
];

/// Returns the list of commands for the help text: each group's heading, and a line per command with its summary.
pub(crate) fn group_list(cli: &clap::Command) -> String {
    let width = GROUPS.iter().flat_map(|(_, names)| names.iter()).map(|name| name.len()).max().unwrap_or(0);
    let mut list = String::new();
    for (heading, names) in GROUPS {
        let _ = writeln!(list, "{heading}:");
        for name in names {
            let about = cli.find_subcommand(name).and_then(clap::Command::get_about);
            let _ = writeln!(list, "  {name:width$}  {}", about.map(ToString::to_string).unwrap_or_default());
        }
        list.push('\n');
    }
    list
}

/// The result of a command, as scripts see it in the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommandExit {
    /// Exit code 0: the command did what was requested and found no problem.
    Success,
    /// Exit code 1: the request was refused, or the input has problems.
    ProblemsFound,
    /// Exit code 2: the input could not be read at all, or no daemon is running; also used for wrong arguments.
    InputError,
    /// Any other exit code.
    Code(u8),
}

impl From<CommandExit> for ExitCode {
    fn from(exit: CommandExit) -> ExitCode {
        ExitCode::from(match exit {
            CommandExit::Success => 0,
            CommandExit::ProblemsFound => 1,
            CommandExit::InputError => 2,
            CommandExit::Code(code) => code,
        })
    }
}

/// Writes why a request to the daemon failed, and a line for each hint that the daemon gave.
fn write_client_error(err: &mut dyn Write, error: &ClientError) -> io::Result<()> {
    write_line(err, format_args!("error: {}", describe(error)))?;
    if let ClientError::Refused(refusal) = error {
        for hint in &refusal.hints {
            write_line(err, format_args!("  try: {hint}"))?;
        }
    }
    Ok(())
}

/// Writes an error and its sources on one line.
fn write_error(err: &mut dyn Write, error: &anyhow::Error) -> io::Result<()> {
    write_line(err, format_args!("error: {}", describe(error.as_ref())))
}

/// The format of a command's standard output.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum OutputFormat {
    /// Human-readable text
    Table,
    /// One JSON document
    Json,
}

/// Settings of the cluster that decide how dialects are read.
#[derive(Args)]
#[command(next_help_heading = "Cluster settings")]
pub(crate) struct DialectArgs {
    /// Unit of aliyun.com/gpu-mem
    #[arg(long, value_name = "UNIT", value_enum, ignore_case = true, default_value_t = GpushareUnit::Gib)]
    gpushare_unit: GpushareUnit,

    /// Slots per GPU for k8s.amazonaws.com/vgpu, 1 to 48
    #[arg(long, value_name = "N", value_parser = parse_aws_slots, allow_negative_numbers = true, default_value = "10")]
    aws_slots: u32,

    /// Size of one unit of volcano.sh/vgpu-memory, in MiB
    #[arg(long, value_name = "N", value_parser = parse_volcano_factor, allow_negative_numbers = true, default_value = "1")]
    volcano_memory_factor: u32,
}

impl DialectArgs {
    pub(crate) fn settings(&self) -> DialectSettings {
        DialectSettings {
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

fn parse_aws_slots(text: &str) -> Result<u32, String> {
    parse_setting(text, |aws_slots| DialectSettings { aws_slots, ..DialectSettings::default() })
}

fn parse_volcano_factor(text: &str) -> Result<u32, String> {
    parse_setting(text, |volcano_memory_factor| DialectSettings {
        volcano_memory_factor,
        ..DialectSettings::default()
    })
}

/// Parses a number and checks it with the settings' own validation.
fn parse_setting(text: &str, settings: impl Fn(u32) -> DialectSettings) -> Result<u32, String> {
    let number = text.parse().map_err(|_| "use a whole number, 1 or more".to_string())?;
    settings(number).validate().map(|_| number).map_err(|error| error.to_string())
}
