//! `partage run`: a command inside a share.

use super::home::HomeArgs;
use super::{Outcome, says};
use crate::amounts;
use crate::output::line;
use clap::{Args, ValueEnum};
use partage_core::model::{Bytes, Cores};
use partage_enforce::error_chain::describe;
use partage_host::binding::Binding;
use partage_workstation::run::{News, RunError, run};
use partage_workstation::wire::{self, RunRequest};
use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};

/// Run a command inside a share of a GPU
///
/// The command sees GPUs of the size that was asked for, and gets no more; so do all processes that it starts. The share is
/// given back when the last of them has ended. The command has the terminal, the signals and the exit code as if it
/// were run by itself.
#[derive(Args)]
#[command(after_help = EXAMPLES, override_usage = "partage run [OPTIONS] -- COMMAND...")]
pub(crate) struct Run {
    /// How many GPUs [default: 1]
    #[arg(long, value_name = "N")]
    gpus: Option<u32>,

    /// Memory of each GPU, such as 4Gi or 500Mi [default: all of it]
    #[arg(long, value_name = "AMOUNT", value_parser = amounts::memory)]
    memory: Option<Bytes>,

    /// Memory of each GPU, in percent of what it has
    #[arg(long, value_name = "N", value_parser = amounts::percent, conflicts_with = "memory")]
    memory_percent: Option<u32>,

    /// Percent of each GPU's time that is promised [default: none; what nobody else wants]
    #[arg(long, value_name = "N", value_parser = amounts::cores)]
    cores: Option<Cores>,

    /// Each GPU alone, all of it
    #[arg(long)]
    whole: bool,

    /// Whether time that nobody else wants may be used too [default: share]
    #[arg(long, value_enum)]
    mode: Option<Mode>,

    /// Place memory beyond the limit on the host, instead of failing the allocation
    ///
    /// The program allocates as much as the host has. What does not fit the limit stays in the host's memory, and the GPU reads and
    /// writes it there, at the speed of the bus: expect kernels that use it to be several to many times slower. Works for
    /// cuMemAlloc and managed memory; pools, arrays and mapped physical memory are still held to the limit.
    #[arg(long)]
    oversubscribe: bool,

    /// Only GPUs whose model has this word in its name; may be repeated
    #[arg(long = "model", value_name = "WORD")]
    models: Vec<String>,

    /// The share's name [default: the command's, with a number]
    #[arg(long)]
    name: Option<String>,

    /// Wait until there is room, instead of failing
    #[arg(long)]
    wait: bool,

    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    home: HomeArgs,

    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Whether idle time is lent.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Mode {
    /// Never more than --cores
    Hard,
    /// What nobody else wants, too
    Share,
}

impl From<Mode> for wire::Mode {
    fn from(mode: Mode) -> wire::Mode {
        match mode {
            Mode::Hard => wire::Mode::Hard,
            Mode::Share => wire::Mode::Share,
        }
    }
}

const EXAMPLES: &str = "\
Examples:
  partage run --memory 4Gi --cores 30 -- python train.py
  partage run --memory-percent 25 --mode hard --cores 25 -- ./bench
  partage run --whole --model A100 --wait -- python train.py
  partage run --gpus 2 --memory 16Gi --name alice-train -- torchrun --nproc-per-node 2 train.py

Exit code: the command's; 125 no share could be had, 126 the command cannot be executed, 127 there is no such command";

/// Exit codes of what never became the command, as of `env` and `docker run`.
const NO_SHARE: u8 = 125;
const NOT_EXECUTABLE: u8 = 126;
const NO_COMMAND: u8 = 127;

impl Run {
    pub(crate) fn run(&self, err: &mut dyn Write) -> io::Result<Outcome> {
        let home = match self.home.home() {
            Ok(home) => home,
            Err(what) => {
                line(err, format_args!("error: {what}"))?;
                return Ok(Outcome::Code(NO_SHARE));
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
            mode: self.mode.map(Into::into),
            models: self.models.clone(),
            wait: self.wait,
            command: wire::shown(self.command.iter().map(|word| word.to_string_lossy().into_owned())),
        };
        let mut teller = Teller { err, quiet: self.quiet, live: io::stderr().is_terminal(), drawn: false };
        let error = run(&home, &request, &self.command, &mut |news| teller.tell(&news));
        teller.wipe();
        match &error {
            RunError::Client(error) => says(err, error)?,
            error => line(err, format_args!("error: {}", describe(error)))?,
        }
        Ok(Outcome::Code(match &error {
            RunError::Command { error, .. } if error.kind() == io::ErrorKind::NotFound => NO_COMMAND,
            RunError::Command { .. } => NOT_EXECUTABLE,
            _ => NO_SHARE,
        }))
    }
}

/// Says on standard error what happens before the command starts. What cannot be said is no reason not to start it.
struct Teller<'a> {
    err: &'a mut dyn Write,
    quiet: bool,
    live: bool,
    /// Whether a line is there that the next one replaces.
    drawn: bool,
}

impl Teller<'_> {
    fn wipe(&mut self) {
        if std::mem::take(&mut self.drawn) {
            let _ = write!(self.err, "\r\x1b[K");
        }
    }

    fn tell(&mut self, news: &News<'_>) {
        self.wipe();
        if self.quiet {
            return;
        }
        let _ = match news {
            News::Queued { place, of, why } if self.live => {
                self.drawn = true;
                let text = format!("partage: waiting, place {place} of {of}: {why}");
                let (_, columns) = crate::screen::size();
                let text: String =
                    text.chars().filter(|letter| !letter.is_control()).take(columns - 1).collect();
                write!(self.err, "{text}").and_then(|()| self.err.flush())
            }
            News::Queued { place, of, why } => {
                line(self.err, format_args!("partage: waiting, place {place} of {of}: {why}"))
            }
            News::Bound { name, words, binding, why } => {
                let told = line(self.err, format_args!("partage: {name}: {words}; held by a {binding}"));
                match (binding, why) {
                    (Binding::LibraryPath, Some(why)) => told.and_then(|()| {
                        line(
                            self.err,
                            format_args!(
                                "partage: a program that clears its environment leaves the share: {why}"
                            ),
                        )
                    }),
                    _ => told,
                }
            }
            News::Note(note) => line(self.err, format_args!("partage: {note}")),
        };
    }
}
