//! What is known of a share, in a file: a keeper that was killed is followed by one that reads it.

use crate::home::Home;
use crate::users::Who;
use partage_core::model::Share;
use partage_host::binding::Binding;
use partage_host::cgroup::Cgroup;
use partage_host::members::{self, Mark};
use partage_host::process::{self, Identity};
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const RECORD: &str = "share.json";
/// How records are written. One of another program's may be of a share that runs.
const FORMAT: u32 = 1;

/// A share as written down.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Record {
    /// How it is written: [`FORMAT`].
    format: u32,
    pub(crate) name: String,
    /// What nobody else can know or have by chance.
    pub(crate) id: String,
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
    /// A share that was decided, of a process that asked.
    pub(crate) fn new(
        name: &str,
        who: &Who,
        shares: Vec<Share>,
        main: Identity,
        command: &[String],
    ) -> io::Result<Record> {
        let mut random = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut random)?;
        let since =
            SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Ok(Record {
            format: FORMAT,
            name: name.into(),
            id: random.iter().map(|byte| format!("{byte:02x}")).collect(),
            who: who.clone(),
            shares,
            since,
            main,
            command: command.to_vec(),
            bound: None,
            cgroup: None,
        })
    }

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
                Some(Mark::Variable { name: crate::run::ID_VARIABLE.into(), value: self.id.clone() })
            }
        }
    }

    /// Its processes.
    pub(crate) fn members(&self, home: &Home) -> io::Result<Vec<Identity>> {
        let mut members = members::members(&self.marks(home))?;
        members.retain(|process| self.is_of(process));
        Ok(members)
    }

    /// Whether it has processes. A cgroup that has one answers at once.
    pub(crate) fn has_members(&self, home: &Home) -> io::Result<bool> {
        let held = self.cgroup.as_ref().map(|cgroup| cgroup.pids()).transpose()?.unwrap_or_default();
        let living = |pid: u32| Identity::of(pid).is_ok_and(|process| process.lives());
        Ok(held.into_iter().any(living) || !self.members(home)?.is_empty())
    }

    /// Whether a process that carries a mark is the share's: what a cgroup holds is; a name of a file or a variable can be
    /// had by anybody, so of those only the owner's own are. Root's programs may have become anybody.
    pub(crate) fn is_of(&self, process: &Identity) -> bool {
        let is_owners = || process::owner(process.pid).is_ok_and(|uid| uid == self.who.uid);
        let is_held = || {
            self.cgroup
                .as_ref()
                .is_some_and(|cgroup| cgroup.pids().is_ok_and(|pids| pids.contains(&process.pid)))
        };
        self.who.uid == 0 || is_owners() || is_held()
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

fn write(file: &Path, bytes: &[u8], mode: u32) -> io::Result<File> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(file)?;
    file.write_all(bytes)?;
    Ok(file)
}

/// A folder of a share, read.
pub(crate) enum Found {
    /// A share.
    Share(Box<Record>),
    /// What a keeper left that was killed half way: there is no record.
    Leftover(String),
    /// A record that cannot be read. Its share may run.
    Unreadable(String, io::Error),
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
            Ok(record) if record.name == name && record.format == FORMAT => Found::Share(Box::new(record)),
            Ok(_) => Found::Unreadable(name, io::Error::other("it is of another share or another version")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Found::Leftover(name),
            Err(error) => Found::Unreadable(name, error),
        });
    }
    Ok(found)
}

/// Removes libraries of shares that are not there any more.
pub(crate) fn tidy(home: &Home) -> io::Result<()> {
    for entry in fs::read_dir(home.own_stand_ins())? {
        let entry = entry?;
        if !home.shares().join(entry.file_name()).exists() {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
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
