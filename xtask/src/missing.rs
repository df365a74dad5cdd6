//! What cannot be had, why, and what to do.

use crate::binaries::BIN_DIR;
use std::path::PathBuf;

/// Why the programs, the images or the clients of the test bed are not all there.
#[derive(Debug, thiserror::Error)]
pub enum Missing {
    /// Nobody built them yet, or not all.
    #[error(
        "{} of {all} programs of the test bed are not built ({}) in {}; run `make binaries`, once",
        left.len(), left.join(", "), folder.display()
    )]
    NotBuilt {
        /// The programs that are not there.
        left: Vec<&'static str>,
        /// How many there should be.
        all: usize,
        /// Where they will be.
        folder: PathBuf,
    },
    /// `PARTAGE_KUBE_BIN_DIR` names a folder that does not have them all.
    #[error(
        "{BIN_DIR} is {}, which does not have: {}; put them there, or unset {BIN_DIR} and run `make binaries`",
        folder.display(), absent.join(", ")
    )]
    NotInFolder {
        /// The folder of the variable.
        folder: PathBuf,
        /// The programs, each with what is wrong.
        absent: Vec<String>,
    },
    /// Nobody fetched the clients of the simulated driver yet, or not all.
    #[error(
        "{} of {all} clients of the simulated driver are not there ({}) in {}; run `make binaries`, once",
        left.len(), left.join(", "), folder.display()
    )]
    NotFetched {
        /// The clients that are not there.
        left: Vec<&'static str>,
        /// How many there should be.
        all: usize,
        /// Where they will be.
        folder: PathBuf,
    },
    /// Nobody fetched the tools yet that build the shim for every image.
    #[error("the tools that build the shim for every image are not there ({}); run `make shim`, once", folder.display())]
    NoZig {
        /// Where they will be.
        folder: PathBuf,
    },
    /// No Python that pip could work with.
    #[error(
        "{what} need Python {needed} or newer with its venv module, and there is {found}; install it and put it \
         on the PATH"
    )]
    NoPython {
        /// What it is for.
        what: &'static str,
        /// The version that would do.
        needed: &'static str,
        /// What is there.
        found: String,
    },
    /// The folder of the cache is unknown.
    #[error(
        "there is no place to keep what is built: neither XDG_CACHE_HOME nor HOME is set; set one of them"
    )]
    NoCacheFolder,
    /// No Go compiler on the PATH.
    #[error(
        "there is no Go compiler on the PATH, and the programs of the test bed are built with Go {needed} or newer; \
         install it (https://go.dev/dl) and put its bin folder on the PATH, or set {BIN_DIR} to a folder with the programs"
    )]
    NoGo {
        /// The version that would do.
        needed: &'static str,
    },
    /// A Go compiler that is too old, and may not fetch a newer one.
    #[error(
        "Go is {found}, and the programs of the test bed need {needed} or newer; install it (https://go.dev/dl), \
         or, from Go 1.21 on, let Go fetch it: GOTOOLCHAIN=auto make binaries"
    )]
    GoTooOld {
        /// The version that would do.
        needed: &'static str,
        /// The version that is there.
        found: String,
    },
    /// A download did not come.
    #[error(
        "{what} could not be downloaded: {said}; look at the network and at {asked}, then repeat: what is finished stays"
    )]
    NoNetwork {
        /// What was wanted.
        what: String,
        /// The settings that say where it comes from.
        asked: &'static str,
        /// The tool's own words.
        said: String,
    },
    /// The disk is too full.
    #[error(
        "{} has {free_mib} MiB free, and building needs about {needed_mib} MiB there; make room, \
         or point {} to a larger disk",
        folder.display(), places
    )]
    NoSpace {
        /// Where.
        folder: PathBuf,
        /// What is free.
        free_mib: u64,
        /// What is needed.
        needed_mib: u64,
        /// The settings that say where it goes.
        places: &'static str,
    },
    /// The disk ran full on the way.
    #[error("the disk ran full while {doing}; make room and repeat: what is finished stays")]
    DiskFull {
        /// What was being done.
        doing: String,
    },
    /// System packages are needed, and only root may install them.
    #[error(
        "{what} needs the packages {packages}, and only root may install them; as root: apt-get install {packages}; then repeat"
    )]
    NotRoot {
        /// What needs them.
        what: String,
        /// Their names.
        packages: String,
    },
    /// Not a Debian machine.
    #[error("{what} comes from Debian's packages, and there is no {tool} here; {instead}")]
    NoDebian {
        /// What was wanted.
        what: String,
        /// The tool that is absent.
        tool: &'static str,
        /// What can be done without it.
        instead: &'static str,
    },
    /// Something that an image cannot have.
    #[error("{path} cannot go into an image: {why}")]
    Refused {
        /// What it was.
        path: String,
        /// Why not.
        why: String,
    },
    /// Nobody built this image yet.
    #[error("the image {image} is not built ({}); run `make binaries`, once", folder.display())]
    NoImage {
        /// Its name.
        image: &'static str,
        /// Where it will be.
        folder: PathBuf,
    },
    /// A tool failed in another way.
    #[error("{doing} failed: {said}")]
    Failed {
        /// What was being done.
        doing: String,
        /// The tool's own words.
        said: String,
    },
    /// A program or an image is there and is not what it should be.
    #[error("{} is damaged ({why}); remove it and run `make binaries`", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Ctrl-C.
    #[error("interrupted: {done} of {all} {what} are finished; repeat the command to go on")]
    Interrupted {
        /// How many are finished.
        done: usize,
        /// How many there should be.
        all: usize,
        /// Of what: programs, images.
        what: &'static str,
    },
    /// The file system refused.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done.
        doing: String,
        /// What it said.
        source: std::io::Error,
    },
}

impl Missing {
    /// For `map_err`: the disk that ran full has its own words.
    pub(crate) fn io(doing: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let doing = doing.into();
        move |source| match source.kind() {
            std::io::ErrorKind::StorageFull => Self::DiskFull { doing },
            _ => Self::Io { doing, source },
        }
    }
}
