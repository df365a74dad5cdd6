//! The state of a cluster for interactive use: its holder process and how to reach it.

use super::{ClusterName, TestClusterError};
use crate::bed::BedError;
use crate::binaries::{BuildPaths, MissingPrerequisite};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A cluster that is up.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClusterState {
    /// Name of the cluster.
    pub name: ClusterName,
    /// The PID of its holder.
    pub pid: u32,
    /// The kubeconfig for kubectl and other tools.
    pub kubeconfig: PathBuf,
    /// The names of its nodes.
    pub nodes: Vec<String>,
}

/// The directory in which the holder and other processes exchange files.
#[derive(Debug)]
pub(super) struct ClusterDir {
    folder: PathBuf,
}

impl ClusterDir {
    pub(super) fn find(name: &ClusterName) -> Result<Self, BedError> {
        let cache = BuildPaths::from_environment().cache.ok_or(MissingPrerequisite::NoCacheDir)?;
        let folder = cache.join("partage").join("cluster").join(&name.name);
        fs::create_dir_all(&folder).map_err(BedError::io(format!("creating {}", folder.display())))?;
        Ok(Self { folder })
    }

    /// Returns the running cluster, if any.
    pub(super) fn running(&self) -> Result<Option<ClusterState>, TestClusterError> {
        match self.holder()? {
            None => Ok(None),
            Some(_) => self.read_state().map(Some).ok_or(TestClusterError::Busy),
        }
    }

    /// Acquires the holder's lock. Fails while another process holds it.
    pub(super) fn acquire(&self) -> Result<File, TestClusterError> {
        let lock = self.lock()?;
        // A process that only checks the lock also holds it for a moment.
        let mut taken = lock.try_lock().is_ok();
        for _ in 0..20 {
            if taken {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
            taken = lock.try_lock().is_ok();
        }
        if !taken {
            return Err(self.running()?.map_or(TestClusterError::Busy, TestClusterError::Running));
        }
        // A holder that was killed may have left files.
        self.remove_state();
        let mut file = &lock;
        let written = lock.set_len(0).and_then(|()| write!(file, "{}", std::process::id()));
        written.map_err(BedError::io(format!("writing {}", self.lock_path().display())))?;
        Ok(lock)
    }

    /// Returns the holder, if there is one.
    pub(super) fn holder(&self) -> Result<Option<Holder>, BedError> {
        let path = self.lock_path();
        // Reading does not require write permission on the file.
        let lock = match File::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(BedError::io(format!("opening {}", path.display())))?,
        };
        // A shared lock: two concurrent checks must not take each other for the holder.
        if lock.try_lock_shared().is_ok() {
            return Ok(None);
        }
        let text = fs::read_to_string(&path).map_err(BedError::io(format!("reading {}", path.display())))?;
        // The holder writes its PID after it has taken the lock: until then the file is empty, or has the PID of an
        // earlier holder.
        let known = text.trim().parse().ok().filter(|process| is_holder(*process));
        Ok(Some(known.map_or(Holder::Unknown, Holder::Process)))
    }

    fn lock_path(&self) -> PathBuf {
        self.folder.join("holder")
    }

    fn lock(&self) -> Result<File, BedError> {
        let path = self.lock_path();
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        opened.map_err(BedError::io(format!("opening {}", path.display())))
    }

    /// Writes the files that announce the cluster. The kubeconfig has an administrator's key and is readable by its
    /// owner only.
    pub(super) fn write_state(
        &self,
        kubeconfig: &str,
        name: ClusterName,
        nodes: Vec<String>,
    ) -> Result<(), BedError> {
        let path = self.folder.join("kubeconfig");
        write_private(&path, kubeconfig)?;
        let state = ClusterState { name, pid: std::process::id(), kubeconfig: path, nodes };
        let text = serde_json::to_string(&state).map_err(BedError::failed("writing the cluster's state"))?;
        // Written last and atomically: a reader that finds it finds everything else.
        let (new, path) = (self.folder.join("state.json.new"), self.folder.join("state.json"));
        write_private(&new, &text)?;
        fs::rename(&new, &path).map_err(BedError::io(format!("writing {}", path.display())))
    }

    fn read_state(&self) -> Option<ClusterState> {
        serde_json::from_slice(&fs::read(self.folder.join("state.json")).ok()?).ok()
    }

    pub(super) fn remove_state(&self) {
        for file in ["state.json", "kubeconfig"] {
            let _ = fs::remove_file(self.folder.join(file));
        }
    }

    pub(super) fn log_path(&self) -> PathBuf {
        self.folder.join("holder.log")
    }

    /// Creates an empty file for the holder's errors.
    pub(super) fn create_log(&self) -> Result<File, BedError> {
        let path = self.log_path();
        File::create(&path).map_err(BedError::io(format!("writing {}", path.display())))
    }

    /// Returns the holder's error message.
    pub(super) fn last_error(&self) -> Option<String> {
        let text = fs::read_to_string(self.log_path()).ok()?;
        let text = text.trim().trim_start_matches("error: ").to_string();
        (!text.is_empty()).then_some(text)
    }
}

/// The process that holds the lock.
#[derive(Clone, Copy, Debug)]
pub(super) enum Holder {
    Process(i32),
    /// It has not written its PID yet.
    Unknown,
}

/// Checks that a PID belongs to a holder, so that no other process is signaled.
fn is_holder(process: i32) -> bool {
    let words = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
    let mut words = words.split(|byte| *byte == 0).skip(1);
    (words.next(), words.next()) == (Some(b"cluster"), Some(b"hold"))
}

fn write_private(path: &Path, text: &str) -> Result<(), BedError> {
    let doing = || format!("writing {}", path.display());
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
    let mut file = file.map_err(BedError::io(doing()))?;
    // The file may exist with wider permissions.
    file.set_permissions(Permissions::from_mode(0o600)).map_err(BedError::io(doing()))?;
    file.write_all(text.as_bytes()).map_err(BedError::io(doing()))?;
    // Under sudo the owner is the calling user.
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse().ok());
    match (number("SUDO_UID"), number("SUDO_GID")) {
        (Some(user), group) => fchown(&file, Some(user), group).map_err(BedError::io(doing())),
        _ => Ok(()),
    }
}
