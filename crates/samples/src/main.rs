//! `partage-sample`: three small GPU programs with typical workloads, to demonstrate shares.

mod greedy;
mod notebook;
mod sample_run;
mod trainer;

use clap::{Parser, Subcommand};
use sample_run::{CommonArgs, SampleError, SampleRun};
use std::io::{self, Write};
use std::process::ExitCode;

/// Run a sample GPU workload.
///
/// Each sample runs until Ctrl-C or for the given --seconds, and prints a summary at the end. The samples use only the
/// driver API, so they run with NVIDIA's driver and with a simulated one.
#[derive(Parser)]
#[command(name = "partage-sample", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    sample: SampleCommand,
}

const EXAMPLES: &str = "\
Examples:
  partage-sample trainer --memory 6Gi
  partage-sample notebook --memory 4Gi --seed 7 --seconds 60
  partage run --memory 4Gi --cores 30 -- partage-sample greedy

Exit code: 0 completed, 1 the GPU cannot be used, 2 invalid arguments";

#[derive(Subcommand)]
enum SampleCommand {
    Trainer(trainer::Trainer),
    Notebook(notebook::Notebook),
    Greedy(greedy::Greedy),
}

impl SampleCommand {
    fn common(&self) -> &CommonArgs {
        match self {
            SampleCommand::Trainer(trainer) => &trainer.common,
            SampleCommand::Notebook(notebook) => &notebook.common,
            SampleCommand::Greedy(greedy) => &greedy.common,
        }
    }

    fn run(&self, run: &mut SampleRun<'_>) -> Result<String, SampleError> {
        match self {
            SampleCommand::Trainer(trainer) => trainer.run(run),
            SampleCommand::Notebook(notebook) => notebook.run(run),
            SampleCommand::Greedy(greedy) => greedy.run(run),
        }
    }
}

fn main() -> ExitCode {
    let sample = Cli::parse().sample;
    let mut out = io::stdout();
    let result =
        SampleRun::begin(sample.common(), &mut out).map_err(SampleError::from).and_then(|mut run| {
            let summary = sample.run(&mut run)?;
            run.print_summary(&summary)
        });
    match result {
        // The reader closed the output, so the summary cannot be printed.
        Ok(()) | Err(SampleError::OutputClosed) => ExitCode::SUCCESS,
        Err(SampleError::Failed(message)) => {
            // If standard error cannot be written, either, the exit code still reports the failure.
            let _ = writeln!(io::stderr(), "error: {message}");
            ExitCode::FAILURE
        }
    }
}
