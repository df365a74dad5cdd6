//! Why a region cannot be had, or memory not be given.

use crate::layout::{MAX_GPUS, SLOTS, VERSION};
use crate::memory_account::MAX_BYTES;
use std::io;
use std::path::{Path, PathBuf};

/// Why a region cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// A file of it is not there.
    #[error("{} is not there: its owner has not made this region, or it is not mounted here", .0.display())]
    Missing(PathBuf),
    /// A file of it cannot be used as asked.
    #[error("cannot {what} {}: {source}; check its owner, mode and mount", path.display())]
    Unreadable {
        /// What was asked of it.
        what: &'static str,
        /// Which.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// Made by another version.
    #[error(
        "{} has layout {found}, this program knows layout {VERSION}: use the agent and the shim of one release",
        path.display()
    )]
    Version {
        /// Which.
        path: PathBuf,
        /// The version it has.
        found: u32,
    },
    /// Not what it should be.
    #[error("{} is broken: {why}; have its owner make the region anew", path.display())]
    Broken {
        /// Which.
        path: PathBuf,
        /// In which way.
        why: &'static str,
    },
    /// Every slot is taken by a living process.
    #[error(
        "{SLOTS} processes use the GPUs of this container already, and its region has room for no more: end some of them"
    )]
    NoFreeSlot,
    /// There cannot be as many GPUs.
    #[error("a region has room for {MAX_GPUS} GPUs, not for {0}: give the container fewer")]
    TooManyGpus(usize),
    /// There is no such GPU in the region.
    #[error("there is no GPU {gpu} in this region of {gpus}: name one of them, or the next to add it")]
    NoSuchGpu {
        /// The one asked for.
        gpu: usize,
        /// How many there are.
        gpus: usize,
    },
    /// A limit that cannot be counted.
    #[error(
        "a memory limit of {0} bytes cannot be counted: give at most {max}, or u64::MAX for no limit",
        max = MAX_BYTES
    )]
    TooMuchMemory(u64),
}

impl RegionError {
    pub(crate) fn unreadable(what: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Unreadable { what, path: path.to_path_buf(), source }
    }

    pub(crate) fn broken(path: &Path, why: &'static str) -> Self {
        Self::Broken { path: path.to_path_buf(), why }
    }
}

/// Memory that was not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{asked} bytes were asked for, {used} of {limit} are used: free some, or have the limit raised")]
pub struct Refused {
    /// Bytes asked for.
    pub asked: u64,
    /// Bytes used by all processes of the container when it was refused.
    pub used: u64,
    /// Bytes there may be.
    pub limit: u64,
}
