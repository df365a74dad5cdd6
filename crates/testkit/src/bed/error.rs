//! Why there is no bed.

use crate::binaries::Missing;
use std::path::PathBuf;

/// Why a bed did not come up, or does not do what it was told.
#[derive(Debug, thiserror::Error)]
pub enum BedError {
    /// A program is not there.
    #[error(transparent)]
    Missing(#[from] Missing),
    /// Namespaces, mounts and cgroups are root's.
    #[error(
        "the test bed needs root: it makes namespaces, mounts and cgroups, all of its own; repeat as root (sudo -E make cluster)"
    )]
    NotRoot,
    /// A tool of the system is not there.
    #[error("the test bed needs {tool}, and it is not on the PATH; as root: apt-get install {package}")]
    NoTool {
        /// The program.
        tool: &'static str,
        /// The Debian package that has it.
        package: &'static str,
    },
    /// The kernel, or what confines us in it, does not allow something.
    #[error("this kernel does not let us {what} ({said}); the test bed needs {needs}")]
    Kernel {
        /// What was tried.
        what: String,
        /// What the kernel said.
        said: String,
        /// The feature, in the kernel's words.
        needs: &'static str,
    },
    /// The machine has not the cgroups that a node was to see.
    #[error("a node cannot have cgroup {asked} here: {has}; {advice}")]
    NoCgroups {
        /// `v1` or `v2`.
        asked: &'static str,
        /// What the machine has.
        has: String,
        /// What to do.
        advice: &'static str,
    },
    /// A full disk.
    #[error(
        "{} has {free_mib} MiB free, and a bed takes about {needed_mib} MiB there; make room, or point TMPDIR to a larger disk",
        folder.display()
    )]
    NoSpace {
        /// Where.
        folder: PathBuf,
        /// What is free.
        free_mib: u64,
        /// What is needed.
        needed_mib: u64,
    },
    /// The profile cannot be.
    #[error("{0}")]
    Profile(String),
    /// A component ended by itself.
    #[error("{name} ended ({how}); its log, {}, says:\n{said}", log.display())]
    Ended {
        /// Which.
        name: String,
        /// Its exit status.
        how: String,
        /// All of its words.
        log: PathBuf,
        /// The last that matter.
        said: String,
    },
    /// Something did not come about in time.
    #[error("{what} did not come about within {seconds} s; last seen: {last}")]
    TooLate {
        /// What was waited for.
        what: String,
        /// How long.
        seconds: u64,
        /// How far it had come.
        last: String,
    },
    /// A tool failed.
    #[error("{doing} failed: {said}")]
    Failed {
        /// What was being done.
        doing: String,
        /// The tool's own words.
        said: String,
    },
    /// Ctrl-C.
    #[error("interrupted; nothing is left behind")]
    Interrupted,
    /// The file system refused.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done.
        doing: String,
        /// What it said.
        source: std::io::Error,
    },
}

impl BedError {
    /// For `map_err`.
    pub(crate) fn io(doing: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let doing = doing.into();
        move |source| Self::Io { doing, source }
    }

    /// For `map_err`, whatever the error is.
    pub(crate) fn failed<E: std::fmt::Display>(doing: impl Into<String>) -> impl FnOnce(E) -> Self {
        let doing = doing.into();
        move |error| Self::Failed { doing, said: error.to_string() }
    }
}
