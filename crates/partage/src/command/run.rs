//! `partage run`: runs a command inside a share.

use super::state_dir::StateDirArgs;
use super::{CommandExit, write_client_error};
use crate::output::write_line;
use crate::terminal::can_move_cursor;
use crate::value_parsers;
use clap::{Args, ValueEnum};
use partage_core::model::{Bytes, Cores};
use partage_enforce::error_chain::describe;
use partage_host::confine::Confinement;
use partage_workstation::protocol::{self, RunRequest};
use partage_workstation::run::{RunError, RunEvent, run};
use std::ffi::OsString;
use std::io::{self, Write};

/// Run a command with a share of a GPU
///
/// The command and all processes that it starts see GPUs of the requested size and cannot exceed it. The share is released when the
/// last process exits. Terminal, signals and exit code are those of the command itself.
#[derive(Args)]
#[command(after_help = EXAMPLES, override_usage = "partage run [OPTIONS] -- COMMAND...")]
pub(crate) struct RunCommand {
    /// Number of GPUs [default: 1]
    #[arg(long, value_name = "N")]
    gpus: Option<u32>,

    /// Memory limit on each GPU, such as 4Gi or 500Mi [default: all memory of the GPU]
    #[arg(long, value_name = "AMOUNT", value_parser = value_parsers::parse_memory)]
    memory: Option<Bytes>,

    /// Memory limit on each GPU, in percent of its memory
    #[arg(long, value_name = "N", value_parser = value_parsers::parse_percent, conflicts_with = "memory")]
    memory_percent: Option<u32>,

    /// Guaranteed compute on each GPU, in percent [default: no guarantee, idle time only]
    #[arg(long, value_name = "N", value_parser = value_parsers::parse_cores)]
    cores: Option<Cores>,

    /// Exclusive use of each GPU
    #[arg(long)]
    whole: bool,

    /// Whether the share may also use idle GPU time [default: work-conserving]
    #[arg(long, value_enum)]
    mode: Option<ComputeMode>,

    /// Latency class: low makes launches start soon beside long kernels of other shares
    ///
    /// While a launch of this share waits and is within its guarantee, turns of other shares on the same GPU last 2 ms at most, and less
    /// of their work is queued: the launch waits for the kernel that runs, and not for a whole turn. Handovers are more frequent, which
    /// costs all shares of the GPU some throughput. The amount of compute stays the same. Requires --cores.
    #[arg(long, value_enum, value_name = "CLASS")]
    latency: Option<LatencyClass>,

    /// Priority among shares that want the same turn, 0 to 10: the higher goes first within its guarantee [default: 0]
    ///
    /// The share with the higher priority also gets idle time first. Every share receives its guarantee whatever the priorities are. On
    /// a machine with several users, the settings allow or refuse priorities.
    #[arg(long, value_name = "N", value_parser = value_parsers::parse_priority)]
    priority: Option<u32>,

    /// Put allocations above the memory limit into host memory instead of failing them
    ///
    /// The program can allocate as much as the host has. Memory above the limit stays in host memory, and the GPU accesses it over
    /// the bus: kernels that use it are several to many times slower. Applies to cuMemAlloc and managed memory; the limit still
    /// holds for pools, arrays and mapped physical memory.
    #[arg(long)]
    oversubscribe: bool,

    /// Word in the name of the GPU model, such as A100; repeat to allow several models
    #[arg(long = "model", value_name = "WORD")]
    models: Vec<String>,

    /// Name of the share [default: name of the command and a number]
    #[arg(long)]
    name: Option<String>,

    /// Wait in the queue until enough capacity is free, instead of failing
    #[arg(long)]
    wait: bool,

    /// Print only errors
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    state_dir: StateDirArgs,

    /// Command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// How soon the launches of a share start.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum LatencyClass {
    /// Soon, at some cost in throughput
    Low,
}

/// Whether a share may use GPU time above its guarantee.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum ComputeMode {
    /// At most --cores, even if the GPU is idle
    Hard,
    /// Idle time in addition to --cores
    WorkConserving,
}

impl From<ComputeMode> for protocol::ComputeMode {
    fn from(mode: ComputeMode) -> protocol::ComputeMode {
        match mode {
            ComputeMode::Hard => protocol::ComputeMode::Hard,
            ComputeMode::WorkConserving => protocol::ComputeMode::WorkConserving,
        }
    }
}

const EXAMPLES: &str = "\
Examples:
  partage run --memory 4Gi --cores 30 -- python train.py
  partage run --memory-percent 25 --mode hard --cores 25 -- ./bench
  partage run --whole --model A100 --wait -- python train.py
  partage run --gpus 2 --memory 16Gi --name alice-train -- torchrun --nproc-per-node 2 train.py

Exit code: that of the command; 125 no share was granted, 126 the command cannot be executed, 127 the command was not found";

/// Exit codes of failures before the command runs; the same as those of `env` and `docker run`.
const EXIT_NO_SHARE: u8 = 125;
const EXIT_NOT_EXECUTABLE: u8 = 126;
const EXIT_COMMAND_NOT_FOUND: u8 = 127;

impl RunCommand {
    pub(crate) fn run(&self, err: &mut dyn Write) -> io::Result<CommandExit> {
        let state_dir = match self.state_dir.resolve() {
            Ok(state_dir) => state_dir,
            Err(error) => {
                write_line(err, format_args!("error: {error}"))?;
                return Ok(CommandExit::Code(EXIT_NO_SHARE));
            }
        };
        let request = RunRequest {
            name: self.name.clone(),
            gpus: self.gpus,
            memory: self.memory,
            memory_percent: self.memory_percent,
            cores: self.cores,
            whole: self.whole,
            oversubscribe: self.oversubscribe,
            low_latency: matches!(self.latency, Some(LatencyClass::Low)),
            priority: self.priority,
            mode: self.mode.map(Into::into),
            models: self.models.clone(),
            wait: self.wait,
            command: protocol::shorten_command(
                self.command.iter().map(|word| word.to_string_lossy().into_owned()),
            ),
        };
        let mut reporter =
            StartReporter { err, quiet: self.quiet, live: can_move_cursor(&io::stderr()), drawn: false };
        let error = run(&state_dir, &request, &self.command, &mut |news| reporter.report(&news));
        reporter.clear_line();
        match &error {
            RunError::Client(error) => write_client_error(err, error)?,
            error => write_line(err, format_args!("error: {}", describe(error)))?,
        }
        Ok(CommandExit::Code(match &error {
            RunError::Command { error, .. } if error.kind() == io::ErrorKind::NotFound => {
                EXIT_COMMAND_NOT_FOUND
            }
            RunError::Command { .. } => EXIT_NOT_EXECUTABLE,
            _ => EXIT_NO_SHARE,
        }))
    }
}

/// Reports on standard error what happens before the command starts. Write errors are ignored: the command must start anyway.
struct StartReporter<'a> {
    err: &'a mut dyn Write,
    quiet: bool,
    live: bool,
    /// Whether the current line was drawn by this reporter and must be replaced.
    drawn: bool,
}

impl StartReporter<'_> {
    fn clear_line(&mut self) {
        if std::mem::take(&mut self.drawn) {
            let _ = write!(self.err, "\r\x1b[K");
        }
    }

    fn report(&mut self, news: &RunEvent<'_>) {
        self.clear_line();
        if self.quiet {
            return;
        }
        let _ = match news {
            RunEvent::Queued { place, of, why } if self.live => {
                self.drawn = true;
                let text = format!("partage: queued, position {place} of {of}: {why}");
                let (_, columns) = crate::terminal::size();
                let text: String =
                    text.chars().filter(|letter| !letter.is_control()).take(columns - 1).collect();
                write!(self.err, "{text}").and_then(|()| self.err.flush())
            }
            RunEvent::Queued { place, of, why } => {
                write_line(self.err, format_args!("partage: queued, position {place} of {of}: {why}"))
            }
            RunEvent::Confined { name, description, confinement, why } => {
                let written = write_line(
                    self.err,
                    format_args!("partage: {name}: {description}; confined by a {confinement}"),
                );
                match (confinement, why) {
                    (Confinement::LibraryPath, Some(why)) => written.and_then(|()| {
                        write_line(
                            self.err,
                            format_args!(
                                "partage: programs that clear their environment escape the share: {why}"
                            ),
                        )
                    }),
                    _ => written,
                }
            }
            RunEvent::Note(note) => write_line(self.err, format_args!("partage: {note}")),
        };
    }
}
