//! Binding a process to a share: in a mount namespace of its own, the stand-ins are in the place of the driver's
//! libraries. Whatever it starts has them too: children, login shells, and what runs without its variables.

mod mounts;
mod namespace;
mod reasons;

use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What holds a process in its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Binding {
    /// A mount namespace, made by root.
    MountNamespace,
    /// A mount namespace within a user namespace: made without root. Programs that become another user (`sudo`, `su`)
    /// do not work in it.
    UserNamespace,
    /// A variable only: `LD_LIBRARY_PATH`. A program can leave it.
    LibraryPath,
}

impl fmt::Display for Binding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MountNamespace => "mount namespace",
            Self::UserNamespace => "user namespace",
            Self::LibraryPath => "library path",
        })
    }
}

/// What appears where, for the process and all it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The share's region: a folder with the files `limits` and `usage`.
    pub region: PathBuf,
    /// Where it appears, read-only but for `usage`: an empty folder that exists.
    pub region_at: PathBuf,
    /// A folder with our `libcuda.so.1` and `libnvidia-ml.so.1`, which expect `region_at` and `driver_at`.
    pub stand_ins: PathBuf,
    /// The driver's real files, without symbolic links on the way: CUDA and NVML.
    pub driver: [PathBuf; 2],
    /// Where they appear: empty files that exist.
    pub driver_at: [PathBuf; 2],
    /// What is covered, and by what: files or folders, read-only.
    pub covers: Vec<(PathBuf, PathBuf)>,
}

/// The names of the stand-ins, in the order of [`Plan::driver`].
const STAND_INS: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];
/// The one file of a region that its processes write.
const USAGE: &str = "usage";

/// Why a process is not bound.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Neither namespace is possible here. The process is as it was.
    #[error("neither a mount namespace nor a user namespace is possible: {0}")]
    Impossible(String),
    /// The plan names what is not there. The process is as it was.
    #[error("{} cannot be bound: {source}", path.display())]
    Absent {
        /// What should be there.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The driver's library is no longer there. The process is as it was.
    #[error(
        "{}: the driver's library is gone ({source}): the driver was updated or removed since its GPUs are shared; \
         restart partage up, or wait until all shares have ended, then run it again",
        path.display()
    )]
    DriverGone {
        /// Where it was.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The process is in a share already. It is as it was.
    #[error("{} is a stand-in already: this process runs in a share; start the other share outside of it", .0.display())]
    Bound(PathBuf),
    /// Nothing can be executed from where the stand-ins are. The process must end.
    #[error(
        "{} is on a file system mounted noexec, so no program could load it; keep the stand-ins on another one",
        .0.display()
    )]
    NoExec(PathBuf),
    /// The kernel refused something half way. The process must end; nothing outside of it has changed.
    #[error("{doing}: {source}")]
    HalfWay {
        /// What was being done.
        doing: String,
        /// What the kernel said.
        source: io::Error,
    },
}

impl BindError {
    /// Whether the process is as it was, and may go on in another way.
    pub fn unchanged(&self) -> bool {
        matches!(self, Self::Impossible(_) | Self::Absent { .. } | Self::DriverGone { .. } | Self::Bound(_))
    }

    fn half_way(doing: impl Into<String>) -> impl FnOnce(rustix::io::Errno) -> Self {
        let doing = doing.into();
        move |source| Self::HalfWay { doing, source: source.into() }
    }
}

/// Binds this process in the best way that is possible here, or says why there is none: then [`BindError::unchanged`]
/// is true, and the library path is left. The process must have one thread; its working folder stays.
///
/// With CAP_SYS_ADMIN it is a mount namespace. Without, a user namespace, in which this process has no capability that
/// it had not before: what is mounted stays mounted. Both last until the last process in them ends.
pub fn enter(plan: &Plan) -> Result<Binding, BindError> {
    check(plan)?;
    let folder = std::env::current_dir().ok();
    let binding = if namespace::may_mount() {
        namespace::mount()?;
        mounts::apply(plan)?;
        Binding::MountNamespace
    } else {
        let held = namespace::user()?;
        mounts::apply(plan)?;
        held.restore()?;
        Binding::UserNamespace
    };
    if let Some(folder) = folder.filter(|folder| hidden(plan, folder)) {
        // It is still what it was before it was covered: come to it again from above.
        rustix::process::chdir(&folder)
            .map_err(BindError::half_way(format!("going to {}", folder.display())))?;
    }
    Ok(binding)
}

/// Whether the plan puts something else in the place of a folder, or of one above it.
fn hidden(plan: &Plan, folder: &Path) -> bool {
    let covered = |what: &PathBuf| what.canonicalize().is_ok_and(|what| folder.starts_with(what));
    plan.covers.iter().any(|(what, _)| covered(what)) || covered(&plan.region_at)
}

/// What can be known to fail should fail before anything has changed.
fn check(plan: &Plan) -> Result<(), BindError> {
    let usage = plan.region.join(USAGE);
    let stand_ins = STAND_INS.map(|name| plan.stand_ins.join(name));
    let covers = plan.covers.iter().flat_map(|(what, by)| [what, by]);
    let all = [&plan.region, &usage, &plan.region_at].into_iter();
    for path in all.chain(&stand_ins).chain(&plan.driver_at).chain(covers) {
        id(path)?;
    }
    for (driver, stand_in) in plan.driver.iter().zip(&stand_ins) {
        let there = id(driver).map_err(|error| match error {
            BindError::Absent { path, source } => BindError::DriverGone { path, source },
            other => other,
        })?;
        if there == id(stand_in)? {
            return Err(BindError::Bound(driver.clone()));
        }
    }
    Ok(())
}

fn id(path: &Path) -> Result<(u64, u64), BindError> {
    let file = std::fs::metadata(path).map_err(|source| BindError::Absent { path: path.into(), source })?;
    Ok((file.dev(), file.ino()))
}
