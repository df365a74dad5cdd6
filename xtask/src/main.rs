//! `partage-xtask`: builds what tests and releases need, for a person or for `make`.

use clap::{Parser, Subcommand};
use partage_xtask::binaries::{self, Missing, Settings};
use partage_xtask::clients;
use partage_xtask::image::{self, Product};
use partage_xtask::manifests;
use partage_xtask::portable;
use partage_xtask::test_run::{self, TestRunError, TestRunOptions};
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Exit code of a program that a signal has interrupted, as shells report it.
const INTERRUPTED: u8 = 130;

/// Builds what Partage's tests and releases need.
#[derive(Parser)]
#[command(name = "partage-xtask", version)]
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
    /// Fetch the real clients of the simulated driver, once, into the user's cache folder.
    ///
    /// nvidia-smi 535 and 550 and nvtop from Debian, nvidia-ml-py, gpustat, nvitop, cuda-python and numba from pip.
    /// Safe to interrupt and to repeat: finished clients stay.
    Clients {
        /// Say what is there; fetch nothing
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
        /// The shim for every image
        #[arg(long, value_name = "FILE", default_value = "target/portable/libpartage_shim.so")]
        shim: PathBuf,
        /// Where the archive goes
        #[arg(long, value_name = "FILE", default_value = "dist/partage.oci.tar")]
        archive: PathBuf,
        /// Ask Debian for newer packages first
        #[arg(long)]
        fresh: bool,
    },
    /// Build the shim so that it runs in every image: against a C library of 2012.
    ///
    /// What that needs (zig and cargo-zigbuild, from pip) is fetched once, into the user's cache folder.
    Shim,
    /// Render the chart into the plain manifests of `deploy/`.
    Manifests,
    /// Build and run all tests of the workspace, and list the slowest
    Test {
        /// Folder for the skipped tests and the durations of the run
        #[arg(long, value_name = "FOLDER", default_value = "target/tests")]
        records: PathBuf,
        /// Seconds after which a test binary is killed if none of its tests ends
        #[arg(long, value_name = "SECONDS", default_value = "900")]
        stall_limit: u64,
    },
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        // Without the handler a signal simply ends the program, and the next run tidies up.
        let _ = signal_hook::flag::register(signal, Arc::clone(&stop));
    }
    let mut out = io::stdout();
    let settings = Settings::from_environment();
    let done = match command {
        Command::Binaries { check: true } => binaries::check(&settings, &mut out, &stop).map(drop),
        Command::Binaries { check: false } => binaries::build(&settings, &mut out, &stop).map(drop),
        Command::Clients { check: true } => clients::check(&settings, &mut out, &stop).map(drop),
        Command::Clients { check: false } => clients::build(&settings, &mut out, &stop).map(drop),
        Command::Images { check: true, .. } => image::check(&settings, &mut out, &stop).map(drop),
        Command::Images { check: false, fresh } => image::build(&settings, fresh, &mut out, &stop).map(drop),
        Command::Image { program, shim, archive, fresh } => {
            let product = Product { program, shim, archive, fresh };
            image::product(&product, &settings, &mut out, &stop).map(drop)
        }
        Command::Manifests => manifests::write(&settings),
        Command::Test { records, stall_limit } => {
            let stall_limit = Duration::from_secs(stall_limit);
            return test(&TestRunOptions { records: &records, stall_limit, stop: &stop }, &mut out);
        }
        Command::Shim => portable::build(&settings, &mut out, &stop).map(drop),
    };
    let Err(missing) = done else { return ExitCode::SUCCESS };
    // Where even this cannot be written, the exit code is all that is left to say.
    let _ = writeln!(io::stderr(), "error: {missing}");
    match missing {
        Missing::Interrupted { .. } => ExitCode::from(INTERRUPTED),
        _ => ExitCode::FAILURE,
    }
}

fn test(options: &TestRunOptions<'_>, out: &mut (dyn Write + Send)) -> ExitCode {
    let error = match test_run::run(options, out) {
        Ok(true) => return ExitCode::SUCCESS,
        Ok(false) => return ExitCode::FAILURE,
        Err(error) => error,
    };
    // If even this cannot be written, the exit code is all that remains.
    let _ = writeln!(io::stderr(), "error: {}", error.with_causes());
    match error {
        TestRunError::Interrupted => ExitCode::from(INTERRUPTED),
        _ => ExitCode::FAILURE,
    }
}
