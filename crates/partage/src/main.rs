//! The one binary: `partage run|ps|top|inspect|resize|stop|check|explain|sim|simulate`.

mod amounts;
mod command;
mod documents;
mod input;
mod logging;
mod output;
mod plot;
mod progress;
mod screen;

use clap::Parser;
use command::Command;
use std::io::{self, Write};
use std::process::ExitCode;

/// Shares NVIDIA GPUs in exact parts.
#[derive(Parser)]
#[command(name = "partage", version, after_help = "Each command has examples: partage check --help")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let mut out = output::Patient::new(io::BufWriter::new(io::stdout().lock()));
    let mut err = output::Patient::new(io::stderr());
    let done = cli.command.run(&mut out, &mut err).and_then(|outcome| out.flush().map(|()| outcome));
    match done {
        Ok(outcome) => outcome.into(),
        Err(error) => {
            // Where even this cannot be written, the exit code is all that is left to say.
            let _ = writeln!(err, "error: the output cannot be written: {error}");
            command::Outcome::Unreadable.into()
        }
    }
}
