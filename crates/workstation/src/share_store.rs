//! Stores the records of shares, from which the next daemon restores them.
//!
//! Records are not synced to the disk ([`Durability::UntilReboot`]): a share ends with its processes, and no process
//! survives a reboot. A record that cannot be read stays in place, and so does the directory of its share: processes
//! may use both.

use crate::state_dir::StateDir;
use crate::users::UserIdentity;
use partage_core::model::{Share, TurnPreferences};
use partage_enforce::records::{self, DecodeError, Durability, RecordError, VersionedRecord};
use partage_host::cgroup::Cgroup;
use partage_host::confine::Confinement;
use partage_host::process::{self, ProcessIdentity};
use partage_host::share_processes::{self, Membership};
use partage_region::RegionPolicy;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const RECORD_FILE: &str = "share.json";

/// The record of a share.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ShareRecord {
    pub(crate) name: String,
    /// A random id that other users can neither know nor guess.
    pub(crate) id: String,
    pub(crate) who: UserIdentity,
    /// The shares of GPUs, in the order of the region.
    pub(crate) shares: Vec<Share>,
    /// When the share was granted, in seconds since 1970.
    pub(crate) since: u64,
    /// The process that requested the share and becomes the command.
    pub(crate) main: ProcessIdentity,
    pub(crate) command: Vec<String>,
    /// How the process is confined; absent until it is.
    #[serde(rename = "bound")]
    pub(crate) confinement: Option<ConfinementRecord>,
    /// The cgroup, from its creation on.
    pub(crate) cgroup: Option<Cgroup>,
    /// Whether memory beyond the limit is allocated on the host.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) oversubscribe: bool,
    /// How it takes its turns.
    #[serde(default, skip_serializing_if = "TurnPreferences::is_default")]
    pub(crate) turns: TurnPreferences,
}

/// How the processes of a share are confined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ConfinementRecord {
    #[serde(rename = "binding")]
    pub(crate) confinement: Confinement,
    /// Whether the device filter denies other GPUs.
    #[serde(rename = "gate")]
    pub(crate) device_filter: bool,
}

impl VersionedRecord for ShareRecord {
    const VERSION: u32 = 1;
    const VERSION_FIELD: &'static str = "format";

    fn is_named(&self, name: &str) -> bool {
        self.name == name
    }
}

impl ShareRecord {
    /// Returns the record of a granted share, with a new random id.
    pub(crate) fn new(
        name: &str,
        who: &UserIdentity,
        shares: Vec<Share>,
        main: ProcessIdentity,
        command: &[String],
    ) -> io::Result<ShareRecord> {
        let mut random = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut random)?;
        let since =
            SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Ok(ShareRecord {
            name: name.into(),
            id: random.iter().map(|byte| format!("{byte:02x}")).collect(),
            who: who.clone(),
            shares,
            since,
            main,
            command: command.to_vec(),
            confinement: None,
            cgroup: None,
            oversubscribe: false,
            turns: TurnPreferences::default(),
        })
    }

    /// Returns the policy of the share's region.
    pub(crate) fn region_policy(&self) -> RegionPolicy {
        RegionPolicy { oversubscribe: self.oversubscribe, ..RegionPolicy::default() }
    }

    /// Returns the memberships by which the share's processes are found.
    pub(crate) fn memberships(&self, state_dir: &StateDir) -> Vec<Membership> {
        let cgroup = self.cgroup.iter().cloned().map(Membership::Cgroup);
        cgroup
            .chain(self.confinement.and_then(|record| self.membership(state_dir, record.confinement)))
            .collect()
    }

    /// Returns the membership of processes with a kind of confinement; `None` if the region does not exist.
    pub(crate) fn membership(&self, state_dir: &StateDir, confinement: Confinement) -> Option<Membership> {
        match confinement {
            Confinement::MountNamespace | Confinement::UserNamespace => {
                let limits = region_dir(state_dir, &self.name).join(partage_region::LIMITS_FILE);
                share_processes::region_membership(
                    &limits,
                    &state_dir.region_at().join(partage_region::LIMITS_FILE),
                )
                .ok()
            }
            Confinement::LibraryPath => {
                Some(Membership::Variable { name: crate::run::ID_VARIABLE.into(), value: self.id.clone() })
            }
        }
    }

    /// Returns the running processes of the share.
    pub(crate) fn members(&self, state_dir: &StateDir) -> io::Result<Vec<ProcessIdentity>> {
        let mut members = share_processes::find_members(&self.memberships(state_dir))?;
        members.retain(|process| self.is_of(process));
        Ok(members)
    }

    /// Returns whether the share has running processes. The cgroup is checked first, because that is fast.
    pub(crate) fn has_members(&self, state_dir: &StateDir) -> io::Result<bool> {
        let held = self.cgroup.as_ref().map(|cgroup| cgroup.pids()).transpose()?.unwrap_or_default();
        let living = |pid: u32| ProcessIdentity::of(pid).is_ok_and(|process| process.is_running());
        Ok(held.into_iter().any(living) || !self.members(state_dir)?.is_empty())
    }

    /// Returns whether a process that has a membership belongs to the share. A process in the cgroup does. A path or a
    /// variable can be copied by other users, so of those only processes of the owner do. Programs of root may have
    /// changed their user.
    pub(crate) fn is_of(&self, process: &ProcessIdentity) -> bool {
        let is_owners = || process::real_uid(process.pid).is_ok_and(|uid| uid == self.who.uid);
        let is_held = || {
            self.cgroup
                .as_ref()
                .is_some_and(|cgroup| cgroup.pids().is_ok_and(|pids| pids.contains(&process.pid)))
        };
        self.who.uid == 0 || is_owners() || is_held()
    }

    /// Replaces the record's file atomically.
    pub(crate) fn write(&self, state_dir: &StateDir) -> Result<(), RecordError> {
        records::write_file(&state_dir.share(&self.name).join(RECORD_FILE), self, Durability::UntilReboot)
    }
}

/// The directory of a share, as found on disk.
#[derive(Debug)]
pub(crate) enum StoredShare {
    /// A share with a valid record.
    Share(Box<ShareRecord>),
    /// The directory of a daemon that was killed before it wrote the record.
    Leftover(String),
    /// A share that this daemon cannot manage. It may be running, and what it holds must not be granted again.
    Unmanaged { name: String, held: UnmanagedHold, cause: UnmanagedCause },
}

/// Why a share cannot be managed.
#[derive(Debug)]
pub(crate) enum UnmanagedCause {
    /// The record was removed, and the region is in use.
    RecordLost,
    /// The record has an unsupported version.
    OtherVersion(RecordError),
    /// The record cannot be read.
    Unreadable(RecordError),
}

/// What a share that this daemon cannot manage holds, as far as it is known.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum UnmanagedHold {
    /// The shares of GPUs in its record or in the limits of its region.
    Known(HeldElsewhere),
    /// Processes use its region, and neither its record nor its limits can be read: it may hold any GPU.
    Unknown {
        /// The owner of the region.
        who: UserIdentity,
    },
    /// Nothing can be read, and no process uses its region.
    NotInUse,
}

/// The owner and the shares of GPUs of a share that this daemon cannot manage.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct HeldElsewhere {
    pub(crate) who: UserIdentity,
    pub(crate) shares: Vec<Share>,
}

/// Reads the records of all shares.
pub(crate) fn load_all(state_dir: &StateDir) -> io::Result<Vec<StoredShare>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(state_dir.shares())? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let region = region_dir(state_dir, &name);
        let path = entry.path().join(RECORD_FILE);
        let read = if entry.file_type()?.is_dir() {
            records::read_file::<ShareRecord>(&path)
        } else {
            Err(RecordError::NotAFile { path: entry.path() })
        };
        let cause = match read {
            Ok(Some(record)) if record.is_named(&name) => {
                found.push(StoredShare::Share(Box::new(record)));
                continue;
            }
            Ok(None) if !partage_region::is_in_use(&region) => {
                found.push(StoredShare::Leftover(name));
                continue;
            }
            Ok(Some(_)) => UnmanagedCause::Unreadable(RecordError::Misnamed { path }),
            Ok(None) => UnmanagedCause::RecordLost,
            Err(reason) if reason.is_unsupported_version() => UnmanagedCause::OtherVersion(reason),
            Err(reason) => UnmanagedCause::Unreadable(reason),
        };
        let held = match held_by_record(&cause) {
            Some(held) => UnmanagedHold::Known(held),
            None => held_by_region(&region),
        };
        found.push(StoredShare::Unmanaged { name, held, cause });
    }
    Ok(found)
}

/// Reads from a region what its share holds. Limits count whether or not a process uses the region: a program of the
/// share may load the driver later.
fn held_by_region(region: &Path) -> UnmanagedHold {
    let usage = fs::metadata(region.join(partage_region::USAGE_FILE));
    let uid = usage.map_or_else(|_| rustix::process::geteuid().as_raw(), |usage| usage.uid());
    let who = UserIdentity { uid, gids: Vec::new() };
    match partage_enforce::shares::shares_of_region(region) {
        Ok(shares) => UnmanagedHold::Known(HeldElsewhere { who, shares }),
        Err(_) if partage_region::is_in_use(region) => UnmanagedHold::Unknown { who },
        Err(_) => UnmanagedHold::NotInUse,
    }
}

/// Reads the owner and the shares of a record of another version by the field names of this version.
fn held_by_record(cause: &UnmanagedCause) -> Option<HeldElsewhere> {
    match cause {
        UnmanagedCause::OtherVersion(RecordError::Invalid {
            source: DecodeError::UnsupportedVersion { fields, .. },
            ..
        }) => serde_json::from_value(fields.clone().into()).ok(),
        _ => None,
    }
}

/// Removes the libraries of shares that do not exist any more.
pub(crate) fn remove_orphaned_libraries(state_dir: &StateDir) -> io::Result<()> {
    for entry in fs::read_dir(state_dir.own_stand_ins())? {
        let entry = entry?;
        if !state_dir.shares().join(entry.file_name()).exists() {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

/// Returns whether any share has a directory.
pub(crate) fn has_shares(state_dir: &StateDir) -> bool {
    fs::read_dir(state_dir.shares()).is_ok_and(|mut entries| entries.next().is_some())
}

/// Returns the directory of a share's region.
pub(crate) fn region_dir(state_dir: &StateDir, name: &str) -> PathBuf {
    state_dir.share(name).join("region")
}

/// Creates the directory of a share's region. Only the daemon has access to the share until [`grant_access`].
pub(crate) fn create_region_dir(state_dir: &StateDir, name: &str) -> io::Result<PathBuf> {
    let region = region_dir(state_dir, name);
    DirBuilder::new().recursive(true).mode(0o700).create(&region)?;
    fs::set_permissions(&region, Permissions::from_mode(0o755))?;
    Ok(region)
}

/// Gives the owner, and no other user, write access to the `usage` file of a share: truncating the file would kill all
/// programs that have it mapped.
///
/// In a share of root, programs may change to any user, so all users can write the file, but only root can reach it;
/// the mount namespace of the share has another path to it. All other shares have a single user.
pub(crate) fn grant_access(state_dir: &StateDir, name: &str, uid: u32) -> io::Result<()> {
    let folder = state_dir.share(name);
    if uid == 0 {
        return fs::set_permissions(&folder, Permissions::from_mode(0o700));
    }
    let usage = region_dir(state_dir, name).join(partage_region::USAGE_FILE);
    fs::set_permissions(&usage, Permissions::from_mode(0o600))?;
    chown(&usage, Some(uid), None)?;
    fs::set_permissions(&folder, Permissions::from_mode(0o755))
}

/// Returns the user that owns the `usage` file of a share: see [`grant_access`].
pub(crate) fn usage_owner(uid: u32) -> u32 {
    if uid == 0 { rustix::process::geteuid().as_raw() } else { uid }
}

/// Returns the directory of a share's simulated device files.
pub(crate) fn device_dir(state_dir: &StateDir, name: &str) -> PathBuf {
    state_dir.share(name).join("dev")
}

/// Removes all files of a share. The record is removed first: a directory without one is garbage-collected.
pub(crate) fn remove(state_dir: &StateDir, name: &str) -> io::Result<()> {
    let folder = state_dir.share(name);
    for path in [folder.join(RECORD_FILE), folder, state_dir.own_stand_ins().join(name)] {
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

    fn state_dir(folder: &tempfile::TempDir) -> StateDir {
        let state_dir = StateDir::at(folder.path()).unwrap();
        state_dir.create().unwrap();
        state_dir
    }

    /// Copies a record of format 1, as an earlier build wrote it, into the state directory.
    fn put_format_1(state_dir: &StateDir, name: &str) -> PathBuf {
        let written = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/shares-format-1");
        fs::create_dir_all(state_dir.share(name)).unwrap();
        let path = state_dir.share(name).join(RECORD_FILE);
        fs::copy(written.join(name).join(RECORD_FILE), &path).unwrap();
        path
    }

    /// Creates the region of a share that has 4 GiB and 30 % of a GPU, and returns its directory.
    fn put_region(state_dir: &StateDir, name: &str) -> PathBuf {
        let region = create_region_dir(state_dir, name).unwrap();
        let limits = partage_region::GpuShare { memory: 4 << 30, cores: 30_000, ..Default::default() };
        partage_region::RegionHandle::create(&region, &[limits], Default::default()).unwrap();
        region
    }

    fn one(state_dir: &StateDir) -> StoredShare {
        let mut found = load_all(state_dir).unwrap();
        assert_eq!(found.len(), 1);
        found.remove(0)
    }

    /// Returns what the only share holds, which cannot be managed, and why it cannot.
    fn unmanaged(state_dir: &StateDir, expected: &str) -> (UnmanagedHold, UnmanagedCause) {
        match one(state_dir) {
            StoredShare::Unmanaged { name, held, cause } if name == expected => (held, cause),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn records_of_format_1_are_read_and_written_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let state_dir = state_dir(&folder);
        for name in ["trainer", "starting", "whole"] {
            let path = put_format_1(&state_dir, name);
            let before: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            let record = match one(&state_dir) {
                StoredShare::Share(record) => record,
                other => panic!("{other:?}"),
            };
            match name {
                "trainer" => {
                    assert_eq!(record.shares.len(), 2);
                    let Share { memory_bytes, cores, ceiling, .. } = &record.shares[0];
                    let expected = (Some(Bytes(4 << 30)), Cores::percent(30), Some(Cores::WHOLE));
                    assert_eq!((*memory_bytes, *cores, *ceiling), expected);
                    assert_eq!(record.who, UserIdentity { uid: 1000, gids: vec![1000, 44] });
                    assert_eq!(
                        record.confinement,
                        Some(ConfinementRecord {
                            confinement: Confinement::MountNamespace,
                            device_filter: true
                        })
                    );
                    assert!(record.cgroup.is_some());
                }
                "starting" => assert!(record.confinement.is_none() && record.cgroup.is_none()),
                _ => assert!(record.shares[0].whole),
            }
            record.write(&state_dir).unwrap();
            let after: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            assert_eq!(after, before);
            fs::remove_dir_all(state_dir.share(name)).unwrap();
        }
    }

    #[test]
    fn running_share_without_a_record_is_kept_with_what_its_limits_say() {
        let folder = tempfile::tempdir().unwrap();
        let state_dir = state_dir(&folder);
        create_region_dir(&state_dir, "trainer").unwrap();
        assert!(matches!(one(&state_dir), StoredShare::Leftover(_)), "nothing is in it");
        let region = put_region(&state_dir, "trainer");
        assert!(matches!(one(&state_dir), StoredShare::Leftover(_)), "no process uses it");
        let process = partage_region::RegionTenant::attach(&region).unwrap();
        let (held, cause) = unmanaged(&state_dir, "trainer");
        assert!(matches!(cause, UnmanagedCause::RecordLost), "{cause:?}");
        let UnmanagedHold::Known(held) = held else { panic!("{held:?}") };
        assert_eq!(held.shares.len(), 1);
        assert_eq!(
            (held.shares[0].memory_bytes, held.shares[0].cores),
            (Some(Bytes(4 << 30)), Cores::percent(30))
        );
        fs::remove_file(region.join(partage_region::LIMITS_FILE)).unwrap();
        let (held, _) = unmanaged(&state_dir, "trainer");
        assert!(matches!(held, UnmanagedHold::Unknown { .. }), "the process may hold any GPU: {held:?}");
        drop(process);
        assert!(matches!(one(&state_dir), StoredShare::Leftover(_)));
    }

    #[test]
    fn record_of_a_newer_format_is_not_changed_and_keeps_its_gpus() {
        let folder = tempfile::tempdir().unwrap();
        let state_dir = state_dir(&folder);
        let path = put_format_1(&state_dir, "trainer");
        let newer = fs::read_to_string(&path).unwrap().replacen("\"format\": 1", "\"format\": 2", 1);
        fs::write(&path, &newer).unwrap();
        let (held, cause) = unmanaged(&state_dir, "trainer");
        let UnmanagedHold::Known(held) = held else { panic!("{held:?}") };
        let UnmanagedCause::OtherVersion(reason) = cause else { panic!("{cause:?}") };
        assert_eq!((held.who.uid, held.shares.len()), (1000, 2));
        assert!(reason.to_string().contains("trainer/share.json"), "{reason}");
        assert_eq!(fs::read_to_string(&path).unwrap(), newer);
        // If the fields have other names, the limits of its region count.
        fs::write(&path, r#"{"format": 2, "name": "trainer"}"#).unwrap();
        assert_eq!(unmanaged(&state_dir, "trainer").0, UnmanagedHold::NotInUse);
        put_region(&state_dir, "trainer");
        let (held, _) = unmanaged(&state_dir, "trainer");
        let UnmanagedHold::Known(held) = held else { panic!("{held:?}") };
        assert_eq!(held.shares[0].memory_bytes, Some(Bytes(4 << 30)));
    }

    #[test]
    fn damaged_record_is_reported_and_stays_with_its_share() {
        let folder = tempfile::tempdir().unwrap();
        let state_dir = state_dir(&folder);
        let path = put_format_1(&state_dir, "trainer");
        let whole = fs::read_to_string(&path).unwrap();
        let unreadable = |name: &str| match unmanaged(&state_dir, name) {
            (held, UnmanagedCause::Unreadable(reason)) => (held, reason),
            other => panic!("{other:?}"),
        };
        let damaged = [&whole[..100], "", "{}", &whole.replacen("\"trainer\"", "\"other\"", 1)];
        for text in damaged {
            fs::write(&path, text).unwrap();
            assert_eq!(unreadable("trainer").0, UnmanagedHold::NotInUse, "{text}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        // The share keeps what its limits say, before a program of it uses the region and while one does.
        let region = put_region(&state_dir, "trainer");
        let memory = |held: UnmanagedHold| match held {
            UnmanagedHold::Known(held) => held.shares[0].memory_bytes,
            other => panic!("{other:?}"),
        };
        assert_eq!(memory(unreadable("trainer").0), Some(Bytes(4 << 30)));
        let process = partage_region::RegionTenant::attach(&region).unwrap();
        for text in damaged {
            fs::write(&path, text).unwrap();
            assert_eq!(memory(unreadable("trainer").0), Some(Bytes(4 << 30)), "{text}");
        }
        fs::remove_file(&path).unwrap();
        symlink("/nowhere", &path).unwrap();
        let (held, reason) = unreadable("trainer");
        assert!(matches!(reason, RecordError::NotAFile { .. }), "{reason}");
        assert_eq!(memory(held), Some(Bytes(4 << 30)));
        // The file is replaced, because the process has it mapped.
        let limits = region.join(partage_region::LIMITS_FILE);
        fs::remove_file(&limits).unwrap();
        fs::write(&limits, "damaged").unwrap();
        let (held, _) = unreadable("trainer");
        assert!(matches!(held, UnmanagedHold::Unknown { .. }), "the process may hold any GPU: {held:?}");
        drop(process);
        assert_eq!(unreadable("trainer").0, UnmanagedHold::NotInUse);
        fs::remove_file(&path).unwrap();
        assert!(matches!(one(&state_dir), StoredShare::Leftover(name) if name == "trainer"));
        fs::remove_dir_all(state_dir.share("trainer")).unwrap();
        symlink("/nowhere", state_dir.share("link")).unwrap();
        assert_eq!(unreadable("link").0, UnmanagedHold::NotInUse);
        assert!(state_dir.share("link").symlink_metadata().is_ok());
    }
}
