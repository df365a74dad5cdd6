//! Who holds a person's cluster, and how to reach it.

use super::{ClusterError, Name};
use crate::bed::BedError;
use crate::binaries::{Missing, Settings};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A cluster that is up.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct State {
    /// Which one.
    pub name: Name,
    /// Its holder.
    pub pid: u32,
    /// For kubectl and its like.
    pub kubeconfig: PathBuf,
    /// The nodes' names.
    pub nodes: Vec<String>,
}

/// The folder that holder and others meet in.
#[derive(Debug)]
pub(super) struct Home {
    folder: PathBuf,
}

impl Home {
    pub(super) fn find(name: &Name) -> Result<Self, BedError> {
        let cache = Settings::from_environment().cache.ok_or(Missing::NoCacheFolder)?;
        let folder = cache.join("partage").join("cluster").join(&name.name);
        fs::create_dir_all(&folder).map_err(BedError::io(format!("making {}", folder.display())))?;
        Ok(Self { folder })
    }

    /// The cluster that is up, if one is.
    pub(super) fn running(&self) -> Result<Option<State>, ClusterError> {
        match self.holder()? {
            None => Ok(None),
            Some(_) => self.read().map(Some).ok_or(ClusterError::Busy),
        }
    }

    /// Becomes the holder; refused while there is another.
    pub(super) fn take(&self) -> Result<File, ClusterError> {
        let lock = self.lock()?;
        // Who only looks holds it for a moment, too.
        let mut taken = lock.try_lock().is_ok();
        for _ in 0..20 {
            if taken {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
            taken = lock.try_lock().is_ok();
        }
        if !taken {
            return Err(self.running()?.map_or(ClusterError::Busy, ClusterError::Running));
        }
        // Left by one that was killed.
        self.forget();
        let mut file = &lock;
        let written = lock.set_len(0).and_then(|()| write!(file, "{}", std::process::id()));
        written.map_err(BedError::io(format!("writing {}", self.lock_path().display())))?;
        Ok(lock)
    }

    /// The holder, while there is one.
    pub(super) fn holder(&self) -> Result<Option<Holder>, BedError> {
        let path = self.lock_path();
        // To look, one need not be its owner.
        let lock = match File::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(BedError::io(format!("opening {}", path.display())))?,
        };
        // Shared: two who look at once do not take each other for the holder.
        if lock.try_lock_shared().is_ok() {
            return Ok(None);
        }
        let text = fs::read_to_string(&path).map_err(BedError::io(format!("reading {}", path.display())))?;
        // It writes its number after it took the lock: until then there may be none, or one of a holder before it.
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

    /// Says that the cluster is up. The kubeconfig holds an administrator's key: it is for its owner's eyes.
    pub(super) fn write(&self, kubeconfig: &str, name: Name, nodes: Vec<String>) -> Result<(), BedError> {
        let path = self.folder.join("kubeconfig");
        private(&path, kubeconfig)?;
        let state = State { name, pid: std::process::id(), kubeconfig: path, nodes };
        let text = serde_json::to_string(&state).map_err(BedError::failed("writing the cluster's state"))?;
        // Last, and whole or not at all: who reads it finds everything in place.
        let (new, path) = (self.folder.join("state.json.new"), self.folder.join("state.json"));
        private(&new, &text)?;
        fs::rename(&new, &path).map_err(BedError::io(format!("writing {}", path.display())))
    }

    fn read(&self) -> Option<State> {
        serde_json::from_slice(&fs::read(self.folder.join("state.json")).ok()?).ok()
    }

    pub(super) fn forget(&self) {
        for file in ["state.json", "kubeconfig"] {
            let _ = fs::remove_file(self.folder.join(file));
        }
    }

    pub(super) fn log_path(&self) -> PathBuf {
        self.folder.join("holder.log")
    }

    /// Where the holder's complaints go, empty.
    pub(super) fn log(&self) -> Result<File, BedError> {
        let path = self.log_path();
        File::create(&path).map_err(BedError::io(format!("writing {}", path.display())))
    }

    /// What the holder complained of.
    pub(super) fn last_words(&self) -> Option<String> {
        let text = fs::read_to_string(self.log_path()).ok()?;
        let text = text.trim().trim_start_matches("error: ").to_string();
        (!text.is_empty()).then_some(text)
    }
}

/// Who holds the lock.
#[derive(Clone, Copy, Debug)]
pub(super) enum Holder {
    Process(i32),
    /// It has not said yet.
    Unknown,
}

/// No other process is ever taken for a holder, and signalled.
fn is_holder(process: i32) -> bool {
    let words = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
    let mut words = words.split(|byte| *byte == 0).skip(1);
    (words.next(), words.next()) == (Some(b"cluster"), Some(b"hold"))
}

fn private(path: &Path, text: &str) -> Result<(), BedError> {
    let doing = || format!("writing {}", path.display());
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
    let mut file = file.map_err(BedError::io(doing()))?;
    // It may have been there before, and open to all.
    file.set_permissions(Permissions::from_mode(0o600)).map_err(BedError::io(doing()))?;
    file.write_all(text.as_bytes()).map_err(BedError::io(doing()))?;
    // Behind sudo the owner is somebody else.
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse().ok());
    match (number("SUDO_UID"), number("SUDO_GID")) {
        (Some(user), group) => fchown(&file, Some(user), group).map_err(BedError::io(doing())),
        _ => Ok(()),
    }
}
