//! Errors of opening, creating and changing a region, and of reserving memory in it.

use crate::memory_account::MAX_BYTES;
use crate::protocol::{MAX_GPUS, SLOT_COUNT};
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// The reason why a region cannot be used or changed.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// A file of the region does not exist.
    #[error("{} does not exist: the region was not created, or is not mounted here", .0.display())]
    Missing(PathBuf),
    /// The system refused an operation on a file of the region.
    #[error("cannot {action} {}: {error}; check its owner, mode and mount", path.display())]
    Io {
        /// The operation, as a verb: "open", "map".
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// The error of the operating system.
        error: io::Error,
    },
    /// The region has a layout that this build does not support. It must be left unchanged: a container may be using it.
    #[error(
        "{} has layout {found}, and this release works with layouts {} to {}: it is left unchanged; run the release that \
         wrote it, or restart the container that uses it",
        path.display(), supported.start(), supported.end()
    )]
    UnsupportedVersion {
        /// Path of the file.
        path: PathBuf,
        /// The layout version in the file's header.
        found: u32,
        /// The layout versions that this build supports.
        supported: RangeInclusive<u32>,
    },
    /// A file is of another kind than its name says, or incomplete.
    #[error("{} is damaged: {why}; restart its container to have the region created again", path.display())]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// Description of the damage.
        why: &'static str,
    },
    /// A file belongs to another user, who could change it.
    #[error(
        "{} belongs to user {owner}, not to user {expected}: it is not used; restart its container to have the region \
         created again",
        path.display()
    )]
    ForeignOwner {
        /// Path of the file.
        path: PathBuf,
        /// The user that owns the file.
        owner: u32,
        /// The user that must own it.
        expected: u32,
    },
    /// The region is for other GPUs than those of the grant.
    #[error("{} is for other GPUs than the grant; restart its container to have the region created again", .0.display())]
    OtherGpus(PathBuf),
    /// Every slot is taken by a live process.
    #[error(
        "{SLOT_COUNT} processes of this container already use its GPUs, which is the maximum: end some of them"
    )]
    NoFreeSlot,
    /// There are more GPUs than a region can hold.
    #[error("a region holds at most {MAX_GPUS} GPUs, {0} requested: grant the container fewer")]
    TooManyGpus(usize),
    /// The region has no GPU with this index.
    #[error("the region has {gpus} GPUs and none with index {gpu}: extend it first")]
    NoSuchGpu {
        /// The requested index, which is not below `gpus`.
        gpu: usize,
        /// The number of GPUs in the region.
        gpus: usize,
    },
    /// The GPU to attach is already in the region.
    #[error("this GPU is already in the region, with index {0}: change its share instead")]
    DuplicateGpu(usize),
    /// The region's layout cannot hold attachments.
    #[error(
        "the region has layout {0}, which cannot grow: restart its container to create a region of the current layout"
    )]
    CannotGrow(u32),
    /// The memory limit is too large to be counted.
    #[error(
        "a memory limit of {0} bytes cannot be counted: use at most {max}, or u64::MAX for no limit",
        max = MAX_BYTES
    )]
    MemoryLimitTooLarge(u64),
}

impl RegionError {
    pub(crate) fn io(action: &'static str, path: &Path, error: io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), error }
    }

    pub(crate) fn damaged(path: &Path, why: &'static str) -> Self {
        Self::Damaged { path: path.to_path_buf(), why }
    }
}

/// A memory reservation that exceeded the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{asked} bytes were requested, {used} of {limit} are in use: free memory, or request a higher limit")]
pub struct ReservationRefused {
    /// Bytes that were requested.
    pub asked: u64,
    /// Bytes that all processes of the container had in use when it was refused.
    pub used: u64,
    /// Bytes that the container may have in use.
    pub limit: u64,
}
