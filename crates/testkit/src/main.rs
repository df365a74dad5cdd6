//! `partage-testkit`: what a person or `make` asks of the test bed.

use clap::{Parser, Subcommand};
use partage_testkit::binaries::{self, Missing, Settings};
use partage_testkit::image::{self, Product};
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A real Kubernetes for Partage's tests.
#[derive(Parser)]
#[command(name = "partage-testkit", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build the programs of the test bed, once, into the user's cache folder.
    ///
    /// Safe to interrupt and to repeat: finished programs stay. With PARTAGE_KUBE_BIN_DIR set, nothing is built:
    /// the programs in that folder are looked at and used.
    Binaries {
        /// Say what is there; build nothing
        #[arg(long)]
        check: bool,
    },
    /// Build the images of the test bed, once, into the user's cache folder.
    ///
    /// Safe to interrupt and to repeat: finished images stay. The programs must be there.
    Images {
        /// Say what is there; build nothing
        #[arg(long, conflicts_with = "fresh")]
        check: bool,
        /// Ask Debian for newer packages first
        #[arg(long)]
        fresh: bool,
    },
    /// Build Partage's own image.
    Image {
        /// The program
        #[arg(long, value_name = "FILE", default_value = "target/release/partage")]
        program: PathBuf,
        /// Where the archive goes
        #[arg(long, value_name = "FILE", default_value = "dist/partage.oci.tar")]
        archive: PathBuf,
        /// Ask Debian for newer packages first
        #[arg(long)]
        fresh: bool,
    },
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    let mut out = io::stdout().lock();
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        // Without the handler a signal simply ends the program, and the next run tidies up.
        let _ = signal_hook::flag::register(signal, Arc::clone(&stop));
    }
    let settings = Settings::from_environment();
    let done = match command {
        Command::Binaries { check: true } => binaries::check(&settings, &mut out, &stop).map(drop),
        Command::Binaries { check: false } => binaries::build(&settings, &mut out, &stop).map(drop),
        Command::Images { check: true, .. } => image::check(&settings, &mut out, &stop).map(drop),
        Command::Images { check: false, fresh } => image::build(&settings, fresh, &mut out, &stop).map(drop),
        Command::Image { program, archive, fresh } => {
            let product = Product { program, archive, fresh };
            image::product(&product, &settings, &mut out, &stop).map(drop)
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(missing) => {
            // Where even this cannot be written, the exit code is all that is left to say.
            let _ = writeln!(io::stderr(), "error: {missing}");
            match missing {
                Missing::Interrupted { .. } => ExitCode::from(130),
                _ => ExitCode::FAILURE,
            }
        }
    }
}
