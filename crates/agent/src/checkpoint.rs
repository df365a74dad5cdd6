//! What outlives the agent: which name was answered for which devices, and what each pod was granted.
//!
//! ```text
//! /run/partage/names/<nonce>.json      an answer of Allocate
//! /var/lib/partage/pods/<uid>.json     a pod's grant, and everything that follows from it
//! /var/lib/partage/inventory.json      the node's GPUs, for when one does not answer
//! /var/lib/partage/health.json         what makes GPUs unusable until they are reset
//! /var/lib/partage/settings.json       the settings that were last in force
//! /var/lib/partage/quarantine/         what could not be read, for people
//! ```
//!
//! Answers need not outlive the boot: kubelet keeps them too, and it asks for one pod after the other, so that waiting for a
//! disk in each would hold up all pods behind it.
//!
//! A pod's record is written when its container is ready, not before: what [`crate::node`] says of that.
//!
//! One file for each, whole at every moment, also after a power cut: what is no record costs one pod and not the node.
//! What is in them is also in kubelet's checkpoint, in the CDI files and on the pods; they are the quickest way to know it.

use crate::plugin::{DeviceId, Nonce};
use partage_core::dialect::Dialect;
use partage_core::model::{ContainerName, PodGrant, PodId, PodUid};
use partage_host::files;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Goes up when an older agent could not read what a newer one wrote.
const VERSION: u32 = 1;
/// What is put aside is for people, and they need not see all of it.
const MOST_QUARANTINED: usize = 100;

/// An answer of `Allocate`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Name {
    /// The name.
    pub(crate) nonce: Nonce,
    /// The resource whose devices they are.
    pub(crate) resource: String,
    /// The devices.
    pub(crate) ids: BTreeSet<DeviceId>,
    /// When, in nanoseconds since 1970. Of two names for the same devices the later one holds.
    pub(crate) at: u64,
}

/// What a pod was granted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PodRecord {
    /// The pod.
    pub(crate) pod: PodId,
    /// The boot in which it was decided.
    pub(crate) boot: String,
    /// When, in nanoseconds since 1970.
    pub(crate) at: u64,
    /// What it holds.
    pub(crate) grant: PodGrant,
    /// How each container asked, by the dialect's name.
    pub(crate) dialects: BTreeMap<ContainerName, String>,
    /// What the pod is to say, in every dialect that its users read.
    pub(crate) annotations: BTreeMap<String, String>,
    /// The environment of each container.
    pub(crate) env: BTreeMap<ContainerName, BTreeMap<String, String>>,
    /// The last wish for other amounts that was answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) resize: Option<String>,
}

impl PodRecord {
    /// How a container asked.
    pub(crate) fn dialect(&self, container: &ContainerName) -> Dialect {
        let name = self.dialects.get(container);
        let known = Dialect::ALL.into_iter().find(|dialect| name.is_some_and(|name| name == dialect.name()));
        known.unwrap_or(Dialect::Native)
    }
}

/// A file, with the version in front of everything.
#[derive(Serialize, Deserialize)]
struct Versioned<T> {
    version: u32,
    #[serde(flatten)]
    what: T,
}

#[derive(Deserialize)]
struct OnlyVersion {
    version: u32,
}

/// Everything that was kept.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    pub(crate) names: BTreeMap<Nonce, Name>,
    pub(crate) pods: BTreeMap<PodUid, PodRecord>,
    /// What was put aside, and why.
    pub(crate) quarantined: Vec<(PathBuf, String)>,
}

/// The folders.
#[derive(Clone, Debug)]
pub(crate) struct Checkpoint {
    names: PathBuf,
    pods: PathBuf,
    /// What there is one of.
    single: PathBuf,
    quarantine: PathBuf,
}

impl Checkpoint {
    /// Makes the folders where they are not there.
    pub(crate) fn open(state: &Path, run: &Path) -> io::Result<Checkpoint> {
        let (names, pods, quarantine) = (run.join("names"), state.join("pods"), state.join("quarantine"));
        for folder in [&names, &pods, &quarantine] {
            fs::create_dir_all(folder)?;
        }
        Ok(Checkpoint { names, pods, single: state.into(), quarantine })
    }

    /// Reads everything. What is no record is put aside; what the system does not give is an error.
    pub(crate) fn read(&self) -> io::Result<Kept> {
        let mut kept = Kept::default();
        for (path, name) in self.each::<Name>(&self.names, &mut kept.quarantined)? {
            match path.file_stem().is_some_and(|stem| stem == name.nonce.0.as_str())
                && is_plain(&name.nonce.0)
            {
                true => drop(kept.names.insert(name.nonce.clone(), name)),
                false => self.quarantine(&path, "it is called otherwise inside", &mut kept.quarantined),
            }
        }
        for (path, record) in self.each::<PodRecord>(&self.pods, &mut kept.quarantined)? {
            match path.file_stem().is_some_and(|stem| stem == record.pod.uid.as_str()) {
                true => drop(kept.pods.insert(record.pod.uid.clone(), record)),
                false => self.quarantine(&path, "it is called otherwise inside", &mut kept.quarantined),
            }
        }
        Ok(kept)
    }

    fn each<T: DeserializeOwned>(
        &self,
        folder: &Path,
        quarantined: &mut Vec<(PathBuf, String)>,
    ) -> io::Result<Vec<(PathBuf, T)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
            if hidden {
                // Half a file of an agent that was killed while it wrote.
                let _ = fs::remove_file(&path);
                continue;
            }
            match read_one(&path) {
                Ok(what) => found.push((path, what)),
                Err(Unreadable::Wrong(why)) => self.quarantine(&path, &why, quarantined),
                // What is in it may be right: whoever is without it would give away what others have.
                Err(Unreadable::Io(error)) => return Err(unread(&path, &error)),
            }
        }
        Ok(found)
    }

    fn quarantine(&self, path: &Path, why: &str, quarantined: &mut Vec<(PathBuf, String)>) {
        let folder = &self.quarantine;
        let full = fs::read_dir(folder).is_ok_and(|entries| entries.count() >= MOST_QUARANTINED);
        let to = folder.join(path.file_name().unwrap_or_default());
        let moved = if full { fs::remove_file(path) } else { fs::rename(path, &to) };
        // One that can be neither read nor moved is met again at the next start.
        let _ = moved;
        quarantined.push((to, why.into()));
    }

    /// Something that there is one of; `None` where it was never put, or is no record and was put aside.
    pub(crate) fn one<T: DeserializeOwned>(&self, name: &str) -> io::Result<Option<T>> {
        let path = path(&self.single, name)?;
        match read_one(&path) {
            Ok(what) => Ok(Some(what)),
            Err(Unreadable::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(Unreadable::Io(error)) => Err(unread(&path, &error)),
            Err(Unreadable::Wrong(why)) => {
                tracing::warn!("{}: a record is put aside: {why}", path.display());
                self.quarantine(&path, &why, &mut Vec::new());
                Ok(None)
            }
        }
    }

    pub(crate) fn put_one<T: Serialize>(&self, name: &str, what: &T) -> io::Result<()> {
        put(&self.single, name, what)
    }

    pub(crate) fn put_name(&self, name: &Name) -> io::Result<()> {
        put(&self.names, &name.nonce.0, name)
    }

    pub(crate) fn put_pod(&self, record: &PodRecord) -> io::Result<()> {
        put(&self.pods, record.pod.uid.as_str(), record)
    }

    pub(crate) fn remove_name(&self, nonce: &Nonce) -> io::Result<()> {
        remove(&self.names, &nonce.0)
    }

    pub(crate) fn remove_pod(&self, uid: &PodUid) -> io::Result<()> {
        remove(&self.pods, uid.as_str())
    }
}

fn put<T: Serialize>(folder: &Path, name: &str, what: &T) -> io::Result<()> {
    let bytes = serde_json::to_vec(&Versioned { version: VERSION, what })?;
    files::write_whole(&path(folder, name)?, &bytes, 0o600)
}

fn remove(folder: &Path, name: &str) -> io::Result<()> {
    files::remove(&path(folder, name)?)
}

fn path(folder: &Path, name: &str) -> io::Result<PathBuf> {
    match is_plain(name) {
        true => Ok(folder.join(format!("{name}.json"))),
        false => Err(io::Error::other(format!("{name:?} can be no file"))),
    }
}

/// UIDs and nonces become names of files; a UID comes from kubelet, and from nobody worse, but a path it must not be.
fn is_plain(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    !name.is_empty() && name.len() <= 128 && name.bytes().all(plain)
}

/// A pod's record as a text, for where it is kept a second time.
pub(crate) fn encode(record: &PodRecord) -> serde_json::Result<String> {
    serde_json::to_string(&Versioned { version: VERSION, what: record })
}

/// The record in a text; what is of another version is not guessed at.
pub(crate) fn decode(text: &str) -> Result<PodRecord, String> {
    parse(text.as_bytes())
}

fn unread(path: &Path, error: &io::Error) -> io::Error {
    let why = format!(
        "{}: {error}; look after the node's disk, or remove this record and delete its pod",
        path.display()
    );
    io::Error::new(error.kind(), why)
}

/// Why a record is not known.
enum Unreadable {
    /// The system does not give it, now.
    Io(io::Error),
    /// It is no record.
    Wrong(String),
}

fn read_one<T: DeserializeOwned>(path: &Path) -> Result<T, Unreadable> {
    match fs::read(path) {
        Ok(bytes) => parse(&bytes).map_err(Unreadable::Wrong),
        Err(error) if error.kind() == io::ErrorKind::IsADirectory => {
            Err(Unreadable::Wrong(error.to_string()))
        }
        Err(error) => Err(Unreadable::Io(error)),
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    // A later version may have fields this one does not know: look at the version alone first.
    let OnlyVersion { version } = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if version != VERSION {
        return Err(format!("it is of version {version}, this agent reads version {VERSION}"));
    }
    serde_json::from_slice::<Versioned<T>>(bytes).map(|file| file.what).map_err(|error| error.to_string())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use partage_core::model::{Bytes, Cores, Grant, Share};
    use proptest::prelude::*;

    fn name(nonce: &str) -> Name {
        let ids = ["slot-1", "slot-7"].map(|id| DeviceId(id.into()));
        Name { nonce: Nonce(nonce.into()), resource: "partage.dev/gpu".into(), ids: ids.into(), at: 3 }
    }

    /// A pod with one share of the GPU `GPU-1`.
    pub(crate) fn record(uid: &str, memory: u64) -> PodRecord {
        let share = Share {
            gpu: "GPU-1".into(),
            memory_bytes: Some(Bytes(memory)),
            cores: Cores::percent(30),
            ceiling: None,
            whole: false,
        };
        let grants = vec![Grant { container: "main".into(), init: false, shares: vec![share] }];
        PodRecord {
            pod: PodId { uid: uid.into(), namespace: "default".into(), name: "p".into() },
            boot: "b".into(),
            at: 5,
            grant: PodGrant { node: "node1".into(), grants },
            dialects: [("main".into(), "volcano".into())].into(),
            annotations: [("a".into(), "b".into())].into(),
            env: [("main".into(), [("X".to_string(), "y".to_string())].into())].into(),
            resize: None,
        }
    }

    fn open(folder: &tempfile::TempDir) -> Checkpoint {
        Checkpoint::open(folder.path(), folder.path()).unwrap()
    }

    #[test]
    fn what_is_put_is_read_and_what_is_removed_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = open(&folder);
        checkpoint.put_name(&name("ab")).unwrap();
        checkpoint.put_pod(&record("u-1", 1)).unwrap();
        checkpoint.put_pod(&record("u-1", 2)).unwrap();
        let kept = open(&folder).read().unwrap();
        assert_eq!(kept.names.values().collect::<Vec<_>>(), [&name("ab")]);
        assert_eq!(kept.pods.values().collect::<Vec<_>>(), [&record("u-1", 2)]);
        assert_eq!(kept.pods["u-1"].dialect(&"main".into()), Dialect::Volcano);
        for _ in 0..2 {
            checkpoint.remove_name(&Nonce("ab".into())).unwrap();
            checkpoint.remove_pod(&"u-1".into()).unwrap();
        }
        let kept = checkpoint.read().unwrap();
        assert!(kept.names.is_empty() && kept.pods.is_empty() && kept.quarantined.is_empty());
    }

    #[test]
    fn what_cannot_be_read_is_put_aside_and_costs_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = open(&folder);
        checkpoint.put_pod(&record("good", 1)).unwrap();
        let later = r#"{"version": 2, "new": true}"#;
        for (file, text) in
            [("cut", "{\"version\": 1, \"po"), ("later", later), ("empty", ""), ("other", "{\"version\": 1}")]
        {
            fs::write(folder.path().join("pods").join(format!("{file}.json")), text).unwrap();
        }
        // A copy under another name would count twice.
        let good = fs::read(folder.path().join("pods").join("good.json")).unwrap();
        fs::write(folder.path().join("pods").join("copy.json"), good).unwrap();
        fs::write(folder.path().join("names").join(".half.tmp"), "{").unwrap();
        let kept = checkpoint.read().unwrap();
        assert_eq!((kept.pods.len(), kept.quarantined.len()), (1, 5), "{:?}", kept.quarantined);
        let version = kept.quarantined.iter().find(|(path, _)| path.ends_with("later.json")).unwrap();
        assert_eq!(version.1, "it is of version 2, this agent reads version 1");
        assert_eq!(fs::read_to_string(folder.path().join("quarantine").join("later.json")).unwrap(), later);
        let again = checkpoint.read().unwrap();
        assert_eq!((again.pods.len(), again.quarantined.len()), (1, 0));
    }

    #[test]
    fn a_copy_is_read_as_the_record_is_and_of_another_version_not_at_all() {
        let text = encode(&record("u-1", 1)).unwrap();
        assert_eq!(decode(&text), Ok(record("u-1", 1)));
        let later = text.replacen("\"version\":1", "\"version\":2", 1);
        assert_eq!(decode(&later).unwrap_err(), "it is of version 2, this agent reads version 1");
        assert!(decode("{").is_err());
    }

    #[test]
    fn what_there_is_one_of_is_replaced_and_put_aside_where_it_cannot_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = open(&folder);
        assert_eq!(checkpoint.one::<Name>("thing").unwrap(), None);
        for nonce in ["ab", "cd"] {
            checkpoint.put_one("thing", &name(nonce)).unwrap();
            assert_eq!(checkpoint.one::<Name>("thing").unwrap(), Some(name(nonce)));
        }
        fs::write(folder.path().join("thing.json"), "{").unwrap();
        assert_eq!(checkpoint.one::<Name>("thing").unwrap(), None);
        assert_eq!(fs::read(folder.path().join("quarantine").join("thing.json")).unwrap(), b"{");
        assert!(!folder.path().join("thing.json").exists());
    }

    #[test]
    fn a_name_is_never_a_path() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = open(&folder);
        for wrong in ["", "..", "a/b", "../../x", "a.b", "é"] {
            assert!(checkpoint.put_name(&name(wrong)).is_err(), "{wrong:?}");
            assert!(checkpoint.remove_pod(&wrong.into()).is_err(), "{wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_put_aside(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let folder = tempfile::tempdir().unwrap();
            let checkpoint = open(&folder);
            fs::write(folder.path().join("pods").join("x.json"), bytes).unwrap();
            prop_assert_eq!(checkpoint.read().unwrap().quarantined.len(), 1);
        }
    }
}
