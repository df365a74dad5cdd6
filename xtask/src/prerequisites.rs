//! Errors about missing prerequisites, each with the cause and the action that solves it.

use crate::binaries::BIN_DIR_VARIABLE;
use std::path::PathBuf;

/// Why the programs, images or clients of the test bed are not complete.
#[derive(Debug, thiserror::Error)]
pub enum MissingPrerequisite {
    /// Programs are not built yet.
    #[error(
        "{} of {all} programs of the test bed are not built ({}) in {}; run `make binaries`",
        missing.len(), missing.join(", "), folder.display()
    )]
    NotBuilt {
        /// The programs that are missing.
        missing: Vec<&'static str>,
        /// The total number of programs.
        all: usize,
        /// The directory in which they will be.
        folder: PathBuf,
    },
    /// The directory in `PARTAGE_KUBE_BIN_DIR` does not have all programs.
    #[error(
        "{BIN_DIR_VARIABLE} is {}, which lacks: {}; put them there, or unset {BIN_DIR_VARIABLE} and run `make binaries`",
        folder.display(), absent.join(", ")
    )]
    NotInBinDir {
        /// The directory of the variable.
        folder: PathBuf,
        /// The programs, each with the reason.
        absent: Vec<String>,
    },
    /// Clients of the simulated driver are not fetched yet.
    #[error(
        "{} of {all} clients of the simulated driver are not fetched ({}) in {}; run `make binaries`",
        missing.len(), missing.join(", "), folder.display()
    )]
    NotFetched {
        /// The clients that are missing.
        missing: Vec<&'static str>,
        /// The total number of clients.
        all: usize,
        /// The directory in which they will be.
        folder: PathBuf,
    },
    /// The tools that build the portable shim are not fetched yet.
    #[error("the tools that build the portable shim are not fetched ({}); run `make shim`", folder.display())]
    NoZig {
        /// The directory in which they will be.
        folder: PathBuf,
    },
    /// No suitable Python is installed.
    #[error(
        "{what} require Python {needed} or newer with its venv module, found: {found}; install it and put it \
         on the PATH"
    )]
    NoPython {
        /// What it is needed for.
        what: &'static str,
        /// Minimum version that is required.
        needed: &'static str,
        /// Versions that are installed.
        found: String,
    },
    /// The cache directory is unknown.
    #[error("no cache directory: neither XDG_CACHE_HOME nor HOME is set; set one of them")]
    NoCacheDir,
    /// There is no Go compiler on the PATH.
    #[error(
        "no Go compiler on the PATH: the programs of the test bed are built with Go {needed} or newer; \
         install it (https://go.dev/dl) and put its bin directory on the PATH, or set {BIN_DIR_VARIABLE} to a directory with the programs"
    )]
    NoGo {
        /// Minimum version that is required.
        needed: &'static str,
    },
    /// The Go compiler is too old, and cannot download a newer one.
    #[error(
        "Go {found} is too old: the programs of the test bed require {needed} or newer; install it (https://go.dev/dl), \
         or, from Go 1.21 on, let Go download it: GOTOOLCHAIN=auto make binaries"
    )]
    GoTooOld {
        /// Minimum version that is required.
        needed: &'static str,
        /// Version that is installed.
        found: String,
    },
    /// A download from the network failed.
    #[error(
        "cannot download {what}: {message}; check the network and {asked}, and try again: finished parts are kept"
    )]
    NoNetwork {
        /// The item to download.
        what: String,
        /// The settings that determine the source.
        asked: &'static str,
        /// The error text of the tool.
        message: String,
    },
    /// The disk has too little free space.
    #[error(
        "{} has {free_mib} MiB free, and building needs about {needed_mib} MiB; free some space, \
         or set {} to a larger disk",
        folder.display(), places
    )]
    NoSpace {
        /// The directory that needs the space.
        folder: PathBuf,
        /// Free space in MiB.
        free_mib: u64,
        /// Required space in MiB.
        needed_mib: u64,
        /// The settings that determine the directory.
        places: &'static str,
    },
    /// The disk ran full during an operation.
    #[error("disk full while {doing}; free some space and try again: finished parts are kept")]
    DiskFull {
        /// Operation that failed, as a verb phrase.
        doing: String,
    },
    /// System packages are missing, and only root can install them.
    #[error(
        "{what} requires the packages {packages}; install them as root: apt-get install {packages}; then try again"
    )]
    NotRoot {
        /// Feature that requires the packages.
        what: String,
        /// Names of the missing packages.
        packages: String,
    },
    /// Debian's tools are not available.
    #[error("{what} comes from Debian packages, and {tool} is not installed; {alternative}")]
    NoDebian {
        /// The item that was requested.
        what: String,
        /// Name of the missing tool.
        tool: &'static str,
        /// What to do without it.
        alternative: &'static str,
    },
    /// A file or name is not valid in an image.
    #[error("{path} cannot be added to an image: {why}")]
    Refused {
        /// The path or name.
        path: String,
        /// Reason of the refusal.
        why: String,
    },
    /// An image is not built yet.
    #[error("the image {image} is not built ({}); run `make binaries`", folder.display())]
    NoImage {
        /// The name of the image.
        image: &'static str,
        /// The directory in which it will be.
        folder: PathBuf,
    },
    /// A tool failed for another reason.
    #[error("{doing} failed: {message}")]
    Failed {
        /// Operation that failed, as a verb phrase.
        doing: String,
        /// The error text of the tool.
        message: String,
    },
    /// A program, image or client does not match its record.
    #[error("{} is damaged ({why}); remove it and run `make binaries`", path.display())]
    Damaged {
        /// The path of the file.
        path: PathBuf,
        /// Difference to the expected content.
        why: String,
    },
    /// The run was interrupted by a signal.
    #[error("interrupted: {done} of {all} {what} are finished; run the command again to continue")]
    Interrupted {
        /// The number of finished items.
        done: usize,
        /// The total number of items.
        all: usize,
        /// The kind of items: programs, images.
        what: &'static str,
    },
    /// The operating system reported an error.
    #[error("{doing}: {source}")]
    Io {
        /// Operation that failed, as a verb phrase.
        doing: String,
        /// Error of the operating system.
        source: std::io::Error,
    },
}

impl MissingPrerequisite {
    /// Returns a closure for `map_err` that adds the operation. A full disk becomes [`MissingPrerequisite::DiskFull`].
    pub(crate) fn io(doing: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let doing = doing.into();
        move |source| match source.kind() {
            std::io::ErrorKind::StorageFull => Self::DiskFull { doing },
            _ => Self::Io { doing, source },
        }
    }
}
