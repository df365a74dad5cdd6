//! `partage-sample`: three small programs that use a GPU as people's programs do, to see a share at work.

mod act;
mod greedy;
mod notebook;
mod trainer;

use act::{Act, Ended, Usual};
use clap::{Parser, Subcommand};
use std::io::{self, Write};
use std::process::ExitCode;

/// Use a GPU as people's programs do.
///
/// Each goes on until Ctrl-C, or for so many --seconds, and ends with a line that sums it up. They use the driver API
/// only, so they run with NVIDIA's driver and with a simulated one.
#[derive(Parser)]
#[command(name = "partage-sample", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    sample: Sample,
}

const EXAMPLES: &str = "\
Examples:
  partage-sample trainer --memory 6Gi
  partage-sample notebook --memory 4Gi --seed 7 --seconds 60
  partage run --memory 4Gi --cores 30 -- partage-sample greedy

Exit code: 0 ended as told, 1 the GPU cannot be used, 2 wrong arguments";

#[derive(Subcommand)]
enum Sample {
    Trainer(trainer::Trainer),
    Notebook(notebook::Notebook),
    Greedy(greedy::Greedy),
}

impl Sample {
    fn usual(&self) -> &Usual {
        match self {
            Sample::Trainer(trainer) => &trainer.usual,
            Sample::Notebook(notebook) => &notebook.usual,
            Sample::Greedy(greedy) => &greedy.usual,
        }
    }

    fn play(&self, act: &mut Act<'_>) -> Result<String, Ended> {
        match self {
            Sample::Trainer(trainer) => trainer.play(act),
            Sample::Notebook(notebook) => notebook.play(act),
            Sample::Greedy(greedy) => greedy.play(act),
        }
    }
}

fn main() -> ExitCode {
    let sample = Cli::parse().sample;
    let mut out = io::stdout();
    let played = Act::begin(sample.usual(), &mut out).map_err(Ended::from).and_then(|mut act| {
        let summary = sample.play(&mut act)?;
        act.sum_up(&summary)
    });
    match played {
        // Nobody reads any more: there is nobody to tell.
        Ok(()) | Err(Ended::Unheard) => ExitCode::SUCCESS,
        Err(Ended::Failed(words)) => {
            // Where even this cannot be written, the exit code is all that is left to say.
            let _ = writeln!(io::stderr(), "error: {words}");
            ExitCode::FAILURE
        }
    }
}
