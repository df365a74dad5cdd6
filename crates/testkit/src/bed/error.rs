//! The errors of a test bed.

use crate::binaries::MissingPrerequisite;
use std::path::PathBuf;

/// Why a bed did not start, or why an operation on it failed.
#[derive(Debug, thiserror::Error)]
pub enum BedError {
    /// A program, image or client is not built.
    #[error(transparent)]
    MissingPrerequisite(#[from] MissingPrerequisite),
    /// Only root can create namespaces, mounts and cgroups.
    #[error(
        "the test bed requires root to create its own namespaces, mounts and cgroups; run again as root (sudo -E make cluster)"
    )]
    NotRoot,
    /// A system tool is missing.
    #[error(
        "the test bed requires {tool}, which is not on the PATH; install it as root: apt-get install {package}"
    )]
    NoTool {
        /// Name of the missing program.
        tool: &'static str,
        /// The Debian package that contains it.
        package: &'static str,
    },
    /// The kernel, or a sandbox around this process, denies an operation.
    #[error("this kernel does not allow the test bed to {what} ({message}); required: {needs}")]
    Kernel {
        /// Operation that was denied.
        what: String,
        /// Error text of the system.
        message: String,
        /// The required kernel features.
        needs: &'static str,
    },
    /// The host cannot provide the requested cgroup version.
    #[error("cgroup {asked} is not available for a node: {has}; {advice}")]
    NoCgroups {
        /// The requested version, `v1` or `v2`.
        asked: &'static str,
        /// The cgroups of the host.
        has: String,
        /// Action that solves the problem.
        advice: &'static str,
    },
    /// The disk has too little free space.
    #[error(
        "{} has {free_mib} MiB free, and a bed needs about {needed_mib} MiB; free some space, or set TMPDIR to a larger disk",
        folder.display()
    )]
    NoSpace {
        /// The directory of the bed.
        folder: PathBuf,
        /// Free space in MiB.
        free_mib: u64,
        /// Required space in MiB.
        needed_mib: u64,
    },
    /// The profile is not valid.
    #[error("{0}")]
    BedProfile(String),
    /// A component exited unexpectedly.
    #[error("{name} exited ({how}); last lines of its log {}:\n{message}", log.display())]
    Ended {
        /// The name of the component.
        name: String,
        /// Exit status of the component.
        how: String,
        /// The path of its whole log.
        log: PathBuf,
        /// The relevant last lines.
        message: String,
    },
    /// A condition did not hold within the time limit.
    #[error("timed out after {seconds} s waiting for {what}; last state: {last}")]
    TooLate {
        /// Condition that was not met.
        what: String,
        /// The time limit in seconds.
        seconds: u64,
        /// The last observed state.
        last: String,
    },
    /// A command or request failed.
    #[error("{doing} failed: {message}")]
    Failed {
        /// Operation that failed, as in "creating the network".
        doing: String,
        /// Error text of the command.
        message: String,
    },
    /// The start was interrupted by a signal.
    #[error("interrupted; everything was removed")]
    Interrupted,
    /// The operating system reported an error.
    #[error("{doing}: {source}")]
    Io {
        /// Operation that failed, as in "reading the log".
        doing: String,
        /// Error of the operating system.
        source: std::io::Error,
    },
}

impl BedError {
    /// Returns a closure for `map_err` that adds the operation to an I/O error.
    pub(crate) fn io(doing: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let doing = doing.into();
        move |source| Self::Io { doing, source }
    }

    /// Returns a closure for `map_err` that adds the operation to any error.
    pub(crate) fn failed<E: std::fmt::Display>(doing: impl Into<String>) -> impl FnOnce(E) -> Self {
        let doing = doing.into();
        move |error| Self::Failed { doing, message: error.to_string() }
    }
}
