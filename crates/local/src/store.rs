//! What is known of a share, in a file: a keeper that was killed is followed by one that reads it.

use crate::home::Home;
use crate::users::Who;
use partage_core::model::Share;
use partage_host::binding::Binding;
use partage_host::cgroup::Cgroup;
use partage_host::members::{self, Mark};
use partage_host::process::Identity;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

const RECORD: &str = "share.json";

/// A share as written down.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Record {
    pub(crate) name: String,
    pub(crate) who: Who,
    /// The shares of GPUs, in the order of the region.
    pub(crate) shares: Vec<Share>,
    /// Seconds since 1970.
    pub(crate) since: u64,
    /// The process that asked, and becomes the command.
    pub(crate) main: Identity,
    pub(crate) command: Vec<String>,
    /// How it is bound; absent until it is.
    pub(crate) bound: Option<Bond>,
    /// The cgroup, from the moment it is made.
    pub(crate) cgroup: Option<Cgroup>,
}

/// What ties processes to a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Bond {
    pub(crate) binding: Binding,
    /// Whether devices of other GPUs are closed.
    pub(crate) gate: bool,
}

impl Record {
    /// What its processes carry.
    pub(crate) fn marks(&self, home: &Home) -> Vec<Mark> {
        let cgroup = self.cgroup.iter().cloned().map(Mark::Cgroup);
        cgroup.chain(self.bound.and_then(|bond| self.mark(home, bond.binding))).collect()
    }

    /// What processes carry that are bound in a way; none where the region is gone.
    pub(crate) fn mark(&self, home: &Home, binding: Binding) -> Option<Mark> {
        match binding {
            Binding::MountNamespace | Binding::UserNamespace => {
                let limits = region(home, &self.name).join(partage_region::LIMITS);
                members::region(&limits, &home.region_at().join(partage_region::LIMITS)).ok()
            }
            Binding::LibraryPath => {
                Some(Mark::Variable { name: crate::run::SHARE_VARIABLE.into(), value: self.name.clone() })
            }
        }
    }

    /// Writes it down, whole or not at all.
    pub(crate) fn write(&self, home: &Home) -> io::Result<()> {
        let bytes = serde_json::to_vec_pretty(self)?;
        // A command line may hold what others should not read.
        let file = home.share(&self.name).join(RECORD);
        let unfinished = file.with_extension("new");
        // Not forced onto the disk: what outlives the machine's power has no process left.
        write(&unfinished, &bytes, 0o600)?;
        fs::rename(&unfinished, &file)
    }
}

/// Replaces a file as a whole, durably.
pub(crate) fn replace(file: &Path, bytes: &[u8]) -> io::Result<()> {
    let unfinished = file.with_extension("new");
    write(&unfinished, bytes, 0o644)?.sync_all()?;
    fs::rename(&unfinished, file)?;
    match file.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

fn write(file: &Path, bytes: &[u8], mode: u32) -> io::Result<File> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(file)?;
    file.write_all(bytes)?;
    Ok(file)
}

/// A folder of a share, read.
pub(crate) enum Found {
    /// A share.
    Share(Box<Record>),
    /// What a keeper left that was killed half way, or something else: its name, and why it is no share.
    Leftover(String, io::Error),
}

/// All shares that were written down.
pub(crate) fn all(home: &Home) -> io::Result<Vec<Found>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(home.shares())? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let record = fs::read(entry.path().join(RECORD))
            .and_then(|bytes| serde_json::from_slice::<Record>(&bytes).map_err(Into::into));
        found.push(match record {
            Ok(record) if record.name == name => Found::Share(Box::new(record)),
            Ok(_) => Found::Leftover(name, io::Error::other("it is the record of another")),
            Err(error) => Found::Leftover(name, error),
        });
    }
    Ok(found)
}

/// Whether any share is written down.
pub(crate) fn is_any(home: &Home) -> bool {
    fs::read_dir(home.shares()).is_ok_and(|mut entries| entries.next().is_some())
}

/// The folder of a share's region.
pub(crate) fn region(home: &Home, name: &str) -> PathBuf {
    home.share(name).join("region")
}

/// Makes the folder of a share's region, for the time being for the keeper alone: see [`open_to`].
pub(crate) fn make_region(home: &Home, name: &str) -> io::Result<PathBuf> {
    let region = region(home, name);
    DirBuilder::new().recursive(true).mode(0o700).create(&region)?;
    fs::set_permissions(&region, Permissions::from_mode(0o755))?;
    Ok(region)
}

/// Lets the owner's processes, and no other user's, write the account of a share: who can cut that file short ends all
/// programs that use it.
///
/// In a share of root programs may become any user, so the file is for all and the way to it for root: in the share's mount
/// namespace there is another. All other shares have one user only.
pub(crate) fn open_to(home: &Home, name: &str, uid: u32) -> io::Result<()> {
    let folder = home.share(name);
    if uid == 0 {
        return fs::set_permissions(&folder, Permissions::from_mode(0o700));
    }
    let usage = region(home, name).join(partage_region::USAGE);
    fs::set_permissions(&usage, Permissions::from_mode(0o600))?;
    chown(&usage, Some(uid), None)?;
    fs::set_permissions(&folder, Permissions::from_mode(0o755))
}

/// The folder of a share's device files, where they are simulated.
pub(crate) fn devices(home: &Home, name: &str) -> PathBuf {
    home.share(name).join("dev")
}

/// Removes everything of a share. The record goes first: what is left without one is nobody's.
pub(crate) fn remove(home: &Home, name: &str) -> io::Result<()> {
    let folder = home.share(name);
    for path in [folder.join(RECORD), folder, home.own_stand_ins().join(name)] {
        let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}
