//! Confines a process to its share: in a mount namespace of its own, the stand-in libraries are mounted over the
//! driver's. Everything that the process starts inherits them: children, login shells, and programs that run without
//! its environment variables.

mod diagnosis;
mod mounts;
mod namespace;

use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// How a process is confined to its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Confinement {
    /// A mount namespace, created by root.
    MountNamespace,
    /// A mount namespace within a user namespace, created without root. Programs that change to another user (`sudo`,
    /// `su`) do not work in it.
    UserNamespace,
    /// Only the environment variable `LD_LIBRARY_PATH`. A program can escape it.
    LibraryPath,
}

impl fmt::Display for Confinement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MountNamespace => "mount namespace",
            Self::UserNamespace => "user namespace",
            Self::LibraryPath => "library path",
        })
    }
}

/// The mounts that a process and everything it starts are to see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfinementPlan {
    /// The share's region: a directory with the files `limits` and `usage`.
    pub region: PathBuf,
    /// Where the region is mounted, read-only except for `usage`. It must be an empty directory.
    pub region_at: PathBuf,
    /// A directory with our `libcuda.so.1` and `libnvidia-ml.so.1`, which expect `region_at` and `driver_at`.
    pub stand_ins: PathBuf,
    /// The driver's files, CUDA and NVML. The paths must not contain symbolic links.
    pub driver: [PathBuf; 2],
    /// Where the driver's files are mounted. These must be empty files.
    pub driver_at: [PathBuf; 2],
    /// Further read-only mounts: the path to cover, and the file or directory to cover it with.
    pub covers: Vec<(PathBuf, PathBuf)>,
}

/// The names of the stand-ins, in the order of [`ConfinementPlan::driver`].
const STAND_IN_NAMES: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];
/// The one file of a region that its processes write.
const USAGE_FILE: &str = "usage";

/// Why a process cannot be confined.
#[derive(Debug, thiserror::Error)]
pub enum ConfinementError {
    /// Neither kind of namespace can be created here. The process is unchanged.
    #[error("neither a mount namespace nor a user namespace is possible: {0}")]
    Unsupported(String),
    /// The plan names a path that does not exist. The process is unchanged.
    #[error("cannot mount {}: {source}", path.display())]
    NotFound {
        /// The path that does not exist.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The driver's library no longer exists. The process is unchanged.
    #[error(
        "{}: the driver's library does not exist: the driver was updated or removed while its GPUs were shared; \
         restart partage up, or wait until all shares have ended, then run it again",
        path.display()
    )]
    DriverRemoved {
        /// Where the library was.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The process is in a share already. It is unchanged.
    #[error("{} is already a stand-in library: this process runs in a share; start the other share outside of it", .0.display())]
    AlreadyConfined(PathBuf),
    /// The stand-ins are on a file system mounted `noexec`. The process must exit.
    #[error(
        "{} is on a file system mounted noexec, so programs cannot load it; put the state directory on another file system",
        .0.display()
    )]
    NoExec(PathBuf),
    /// The kernel refused a step after others had succeeded. The process must exit; nothing outside of it has changed.
    #[error("{doing}: {source}")]
    Incomplete {
        /// The step that failed.
        doing: String,
        /// The error of the kernel.
        source: io::Error,
    },
}

impl ConfinementError {
    /// Returns whether the process is unchanged, so that another kind of confinement can be tried.
    pub fn is_unchanged(&self) -> bool {
        matches!(
            self,
            Self::Unsupported(_)
                | Self::NotFound { .. }
                | Self::DriverRemoved { .. }
                | Self::AlreadyConfined(_)
        )
    }

    fn incomplete(doing: impl Into<String>) -> impl FnOnce(rustix::io::Errno) -> Self {
        let doing = doing.into();
        move |source| Self::Incomplete { doing, source: source.into() }
    }
}

/// Confines this process by a mount namespace, or by a user namespace if it lacks CAP_SYS_ADMIN.
///
/// In the user namespace this process gets no capability that it did not have before, so it cannot unmount anything.
/// Both namespaces exist until the last process in them exits. If neither is possible, the error satisfies
/// [`ConfinementError::is_unchanged`], and only [`Confinement::LibraryPath`] is left. The process must have a single
/// thread; its working directory stays the same.
pub fn enter(plan: &ConfinementPlan) -> Result<Confinement, ConfinementError> {
    check_plan(plan)?;
    let folder = std::env::current_dir().ok();
    let confinement = if namespace::can_mount() {
        namespace::enter_mount_namespace()?;
        mounts::apply(plan)?;
        Confinement::MountNamespace
    } else {
        let held = namespace::enter_user_namespace()?;
        mounts::apply(plan)?;
        held.restore()?;
        Confinement::UserNamespace
    };
    if let Some(folder) = folder.filter(|folder| is_covered(plan, folder)) {
        // The working directory still refers to the covered directory: enter it again by its path.
        rustix::process::chdir(&folder)
            .map_err(ConfinementError::incomplete(format!("going to {}", folder.display())))?;
    }
    Ok(confinement)
}

/// Returns whether the plan covers a directory or one of its parents.
fn is_covered(plan: &ConfinementPlan, folder: &Path) -> bool {
    let covered = |what: &PathBuf| what.canonicalize().is_ok_and(|what| folder.starts_with(what));
    plan.covers.iter().any(|(what, _)| covered(what)) || covered(&plan.region_at)
}

/// Checks what can be checked before anything changes.
fn check_plan(plan: &ConfinementPlan) -> Result<(), ConfinementError> {
    let usage = plan.region.join(USAGE_FILE);
    let stand_ins = STAND_IN_NAMES.map(|name| plan.stand_ins.join(name));
    let covers = plan.covers.iter().flat_map(|(what, by)| [what, by]);
    let all = [&plan.region, &usage, &plan.region_at].into_iter();
    for path in all.chain(&stand_ins).chain(&plan.driver_at).chain(covers) {
        file_id(path)?;
    }
    for (driver, stand_in) in plan.driver.iter().zip(&stand_ins) {
        let there = file_id(driver).map_err(|error| match error {
            ConfinementError::NotFound { path, source } => ConfinementError::DriverRemoved { path, source },
            other => other,
        })?;
        if there == file_id(stand_in)? {
            return Err(ConfinementError::AlreadyConfined(driver.clone()));
        }
    }
    Ok(())
}

fn file_id(path: &Path) -> Result<(u64, u64), ConfinementError> {
    let file =
        std::fs::metadata(path).map_err(|source| ConfinementError::NotFound { path: path.into(), source })?;
    Ok((file.dev(), file.ino()))
}
