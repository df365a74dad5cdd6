//! `partage-xtask`: builds what tests and releases need, for developers and for `make`.

use clap::{Parser, Subcommand};
use partage_xtask::binaries::{self, BuildPaths, MissingPrerequisite};
use partage_xtask::clients;
use partage_xtask::image::{self, ProductImage};
use partage_xtask::manifests;
use partage_xtask::portable_shim;
use partage_xtask::test_run::{self, TestRunError, TestRunOptions};
use partage_xtask::text_check;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Exit code after a signal, as shells report it.
const INTERRUPTED_EXIT_CODE: u8 = 130;

/// Build the programs, images and clients of tests and releases
#[derive(Parser)]
#[command(name = "partage-xtask", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build the programs of the test bed, once, into the user's cache directory
    ///
    /// Safe to interrupt and repeat: finished programs are kept. With PARTAGE_KUBE_BIN_DIR set, nothing is built: the
    /// programs in that directory are checked and used.
    Binaries {
        /// List the programs; build nothing
        #[arg(long)]
        check: bool,
    },
    /// Fetch the real clients of the simulated driver, once, into the user's cache directory
    ///
    /// nvidia-smi 535 and 550 and nvtop from Debian, nvidia-ml-py, gpustat, nvitop, cuda-python and numba from pip.
    /// Safe to interrupt and repeat: finished clients are kept.
    Clients {
        /// List the clients; fetch nothing
        #[arg(long)]
        check: bool,
    },
    /// Build the images of the test bed, once, into the user's cache directory
    ///
    /// Safe to interrupt and repeat: finished images are kept. Requires the programs.
    Images {
        /// List the images; build nothing
        #[arg(long, conflicts_with = "fresh")]
        check: bool,
        /// Fetch newer packages from Debian first
        #[arg(long)]
        fresh: bool,
    },
    /// Build Partage's own image
    Image {
        /// Path of the program
        #[arg(long, value_name = "FILE", default_value = "target/release/partage")]
        program: PathBuf,
        /// Path of the portable shim
        #[arg(long, value_name = "FILE", default_value = "target/portable/libpartage_shim.so")]
        shim: PathBuf,
        /// Path of the archive to write
        #[arg(long, value_name = "FILE", default_value = "dist/partage.oci.tar")]
        archive: PathBuf,
        /// Fetch newer packages from Debian first
        #[arg(long)]
        fresh: bool,
    },
    /// Build the portable shim, which runs in every image: against glibc 2.17
    ///
    /// The required tools (zig and cargo-zigbuild, from pip) are fetched once, into the user's cache directory.
    Shim,
    /// Render the chart into the plain manifests of `deploy/`
    Manifests,
    /// Package the chart as an archive
    Chart {
        /// Directory for the archive
        #[arg(long, value_name = "DIR", default_value = "dist/release")]
        into: PathBuf,
    },
    /// Build and run all tests of the workspace, and list the slowest
    Test {
        /// Directory for the list of skipped tests and the durations
        #[arg(long, value_name = "DIR", default_value = "target/tests")]
        records: PathBuf,
        /// Seconds without a finished test after which a test binary is killed
        #[arg(long, value_name = "SECONDS", default_value = "900")]
        stall_limit: u64,
    },
    /// Check names and prose against the writing rules
    ///
    /// With paths, only findings below them are printed, with their short type names and terse doc comments.
    TextCheck {
        /// Paths relative to the root of the repository
        #[arg(value_name = "PATH")]
        paths: Vec<String>,
    },
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        // Without the handler a signal ends the program, and the next run cleans up.
        let _ = signal_hook::flag::register(signal, Arc::clone(&stop));
    }
    let mut out = io::stdout();
    let settings = BuildPaths::from_environment();
    let done = match command {
        Command::Binaries { check: true } => binaries::check(&settings, &mut out, &stop).map(drop),
        Command::Binaries { check: false } => binaries::build(&settings, &mut out, &stop).map(drop),
        Command::Clients { check: true } => clients::check(&settings, &mut out, &stop).map(drop),
        Command::Clients { check: false } => clients::fetch_all(&settings, &mut out, &stop).map(drop),
        Command::Images { check: true, .. } => image::check(&settings, &mut out, &stop).map(drop),
        Command::Images { check: false, fresh } => image::build(&settings, fresh, &mut out, &stop).map(drop),
        Command::Image { program, shim, archive, fresh } => {
            let product = ProductImage { program, shim, archive, fresh };
            image::build_product_image(&product, &settings, &mut out, &stop).map(drop)
        }
        Command::Manifests => manifests::write(&settings),
        Command::Chart { into } => manifests::package_chart(&settings, &into),
        Command::Test { records, stall_limit } => {
            let stall_limit = Duration::from_secs(stall_limit);
            return test(&TestRunOptions { records: &records, stall_limit, stop: &stop }, &mut out);
        }
        Command::TextCheck { paths } => return check_text(&paths, &mut out),
        Command::Shim => portable_shim::build(&settings, &mut out, &stop).map(drop),
    };
    let Err(missing) = done else { return ExitCode::SUCCESS };
    // If this cannot be written, only the exit code reports the failure.
    let _ = writeln!(io::stderr(), "error: {missing}");
    match missing {
        MissingPrerequisite::Interrupted { .. } => ExitCode::from(INTERRUPTED_EXIT_CODE),
        _ => ExitCode::FAILURE,
    }
}

fn check_text(paths: &[String], out: &mut dyn Write) -> ExitCode {
    match text_check::run(Path::new("."), paths, out) {
        Ok(summary) if summary.is_clean() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            let _ = writeln!(io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn test(options: &TestRunOptions<'_>, out: &mut (dyn Write + Send)) -> ExitCode {
    let error = match test_run::run(options, out) {
        Ok(true) => return ExitCode::SUCCESS,
        Ok(false) => return ExitCode::FAILURE,
        Err(error) => error,
    };
    // If this cannot be written, only the exit code reports the failure.
    let _ = writeln!(io::stderr(), "error: {}", error.with_causes());
    match error {
        TestRunError::Interrupted => ExitCode::from(INTERRUPTED_EXIT_CODE),
        _ => ExitCode::FAILURE,
    }
}
