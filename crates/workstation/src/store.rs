//! The record of a share: a daemon that was killed is followed by one that reads it.
//!
//! Records are not synced to the disk ([`Durability::UntilReboot`]): a share ends with its processes, and none of them outlives
//! the machine's power. A record that cannot be read stays where it is, and so does its share's folder: processes may use both.

use crate::home::Home;
use crate::users::Who;
use partage_core::model::Share;
use partage_enforce::records::{self, DecodeError, Durability, RecordError, VersionedRecord};
use partage_host::binding::Binding;
use partage_host::cgroup::Cgroup;
use partage_host::members::{self, Mark};
use partage_host::process::{self, Identity};
use partage_region::RegionPolicy;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::path::PathBuf;
use std::time::SystemTime;

const RECORD: &str = "share.json";

/// A share as written down.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Record {
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
    /// Whether memory beyond the limit is placed on the host.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) oversubscribe: bool,
}

/// What ties processes to a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Bond {
    pub(crate) binding: Binding,
    /// Whether devices of other GPUs are closed.
    pub(crate) gate: bool,
}

impl VersionedRecord for Record {
    const VERSION: u32 = 1;
    const VERSION_FIELD: &'static str = "format";

    fn is_named(&self, name: &str) -> bool {
        self.name == name
    }
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
            name: name.into(),
            id: random.iter().map(|byte| format!("{byte:02x}")).collect(),
            who: who.clone(),
            shares,
            since,
            main,
            command: command.to_vec(),
            bound: None,
            cgroup: None,
            oversubscribe: false,
        })
    }

    /// What its region says of all of its GPUs.
    pub(crate) fn region_policy(&self) -> RegionPolicy {
        RegionPolicy { oversubscribe: self.oversubscribe, ..RegionPolicy::default() }
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

    /// Replaces the record's file as a whole.
    pub(crate) fn write(&self, home: &Home) -> Result<(), RecordError> {
        records::write_file(&home.share(&self.name).join(RECORD), self, Durability::UntilReboot)
    }
}

/// The folder of a share, read.
#[derive(Debug)]
pub(crate) enum Found {
    /// A share.
    Share(Box<Record>),
    /// What a daemon left that was killed before it wrote the record.
    Leftover(String),
    /// A record of another version of the daemon, which may have written a share that runs. What it holds must not be granted
    /// again.
    OtherVersion {
        name: String,
        /// What it holds, if that can be read from it.
        held: Option<HeldElsewhere>,
        reason: RecordError,
    },
    /// A record that cannot be read. Its share may run.
    Unreadable(String, RecordError),
}

/// What a share of another version of the daemon holds.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct HeldElsewhere {
    pub(crate) who: Who,
    pub(crate) shares: Vec<Share>,
}

/// Reads the records of all shares.
pub(crate) fn all(home: &Home) -> io::Result<Vec<Found>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(home.shares())? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !entry.file_type()?.is_dir() {
            found.push(Found::Unreadable(name, RecordError::NotAFile { path: entry.path() }));
            continue;
        }
        let path = entry.path().join(RECORD);
        found.push(match records::read_file::<Record>(&path) {
            Ok(Some(record)) if !record.is_named(&name) => {
                Found::Unreadable(name, RecordError::Misnamed { path })
            }
            Ok(Some(record)) => Found::Share(Box::new(record)),
            Ok(None) => Found::Leftover(name),
            Err(reason) if reason.is_unsupported_version() => {
                Found::OtherVersion { name, held: held_elsewhere(&reason), reason }
            }
            Err(reason) => Found::Unreadable(name, reason),
        });
    }
    Ok(found)
}

/// Looks for what a record of another version holds under the names that this version uses.
fn held_elsewhere(reason: &RecordError) -> Option<HeldElsewhere> {
    match reason {
        RecordError::Invalid { source: DecodeError::UnsupportedVersion { fields, .. }, .. } => {
            serde_json::from_value(fields.clone().into()).ok()
        }
        _ => None,
    }
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

/// The user that the `usage` of a share belongs to: see [`open_to`].
pub(crate) fn usage_owner(uid: u32) -> u32 {
    if uid == 0 { rustix::process::geteuid().as_raw() } else { uid }
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

#[cfg(test)]
mod tests {
    use super::*;
    use partage_core::model::{Bytes, Cores};
    use std::os::unix::fs::symlink;
    use std::path::Path;

    fn home(folder: &tempfile::TempDir) -> Home {
        let home = Home::at(folder.path()).unwrap();
        home.make().unwrap();
        home
    }

    /// Puts a record of format 1, as an earlier build wrote it, into the home.
    fn put_format_1(home: &Home, name: &str) -> PathBuf {
        let written = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/shares-format-1");
        fs::create_dir_all(home.share(name)).unwrap();
        let path = home.share(name).join(RECORD);
        fs::copy(written.join(name).join(RECORD), &path).unwrap();
        path
    }

    fn one(home: &Home) -> Found {
        let mut found = all(home).unwrap();
        assert_eq!(found.len(), 1);
        found.remove(0)
    }

    #[test]
    fn records_of_format_1_are_read_and_written_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let home = home(&folder);
        for name in ["trainer", "starting", "whole"] {
            let path = put_format_1(&home, name);
            let before: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            let record = match one(&home) {
                Found::Share(record) => record,
                other => panic!("{other:?}"),
            };
            match name {
                "trainer" => {
                    assert_eq!(record.shares.len(), 2);
                    let Share { memory_bytes, cores, ceiling, .. } = &record.shares[0];
                    let expected = (Some(Bytes(4 << 30)), Cores::percent(30), Some(Cores::WHOLE));
                    assert_eq!((*memory_bytes, *cores, *ceiling), expected);
                    assert_eq!(record.who, Who { uid: 1000, gids: vec![1000, 44] });
                    assert_eq!(record.bound, Some(Bond { binding: Binding::MountNamespace, gate: true }));
                    assert!(record.cgroup.is_some());
                }
                "starting" => assert!(record.bound.is_none() && record.cgroup.is_none()),
                _ => assert!(record.shares[0].whole),
            }
            record.write(&home).unwrap();
            let after: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            assert_eq!(after, before);
            fs::remove_dir_all(home.share(name)).unwrap();
        }
    }

    #[test]
    fn record_of_a_newer_format_is_left_alone_with_what_it_holds() {
        let folder = tempfile::tempdir().unwrap();
        let home = home(&folder);
        let path = put_format_1(&home, "trainer");
        let newer = fs::read_to_string(&path).unwrap().replacen("\"format\": 1", "\"format\": 2", 1);
        fs::write(&path, &newer).unwrap();
        let Found::OtherVersion { name, held: Some(held), reason } = one(&home) else { panic!() };
        assert_eq!((name.as_str(), held.who.uid, held.shares.len()), ("trainer", 1000, 2));
        assert!(reason.to_string().contains("trainer/share.json"), "{reason}");
        assert_eq!(fs::read_to_string(&path).unwrap(), newer);
        // What it holds cannot be known where it is called otherwise.
        fs::write(&path, r#"{"format": 2, "name": "trainer"}"#).unwrap();
        assert!(matches!(one(&home), Found::OtherVersion { held: None, .. }));
    }

    #[test]
    fn damaged_record_is_reported_and_stays_with_its_share() {
        let folder = tempfile::tempdir().unwrap();
        let home = home(&folder);
        let path = put_format_1(&home, "trainer");
        let whole = fs::read_to_string(&path).unwrap();
        for text in [&whole[..100], "", "{}", &whole.replacen("\"trainer\"", "\"other\"", 1)] {
            fs::write(&path, text).unwrap();
            assert!(matches!(one(&home), Found::Unreadable(name, _) if name == "trainer"), "{text}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        fs::remove_file(&path).unwrap();
        symlink("/nowhere", &path).unwrap();
        assert!(matches!(one(&home), Found::Unreadable(_, RecordError::NotAFile { .. })));
        fs::remove_file(&path).unwrap();
        assert!(matches!(one(&home), Found::Leftover(name) if name == "trainer"));
        fs::remove_dir_all(home.share("trainer")).unwrap();
        symlink("/nowhere", home.share("link")).unwrap();
        assert!(matches!(one(&home), Found::Unreadable(name, _) if name == "link"));
        assert!(home.share("link").symlink_metadata().is_ok());
    }
}
