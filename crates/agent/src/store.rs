//! What outlives the agent: which name was answered for which devices, and what each pod was granted.
//!
//! ```text
//! /run/partage/names/<key>.json      an answer of Allocate
//! /run/partage/quarantine/             names that could not be read
//! /var/lib/partage/pods/<uid>.json     a pod's grant, and everything that follows from it
//! /var/lib/partage/inventory.json      the node's GPUs, used if one does not respond
//! /var/lib/partage/health.json         what makes GPUs unusable until they are reset
//! /var/lib/partage/settings.json       the settings that were last in force
//! /var/lib/partage/quarantine/         unreadable files, kept for administrators
//! ```
//!
//! Names need not outlive the boot: kubelet keeps them too, and it asks for one pod after the other, so that waiting for a
//! disk in each would hold up all pods behind it. Everything else is synced to the disk.
//!
//! A pod's record is written when its container is prepared, not before: see [`crate::containers::persist`].
//!
//! Versioning, replacement and quarantine of records are in [`partage_enforce::records`]. Their content is also in kubelet's
//! checkpoint, in the CDI files and on the pods; they are the quickest way to know it.

use crate::containers::ContainerKey;
use crate::device_plugin::DeviceId;
use partage_core::dialect::Dialect;
use partage_core::model::{ContainerName, Grant, PodGrant, PodId, PodUid, TurnPreferences};
use partage_enforce::records::{self, Durability, LoadedRecords, RecordDir, RecordError, VersionedRecord};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

/// The record of an answer to `Allocate`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct AllocationRecord {
    /// The key that was answered.
    #[serde(rename = "nonce")]
    pub(crate) key: ContainerKey,
    /// The resource whose devices they are.
    pub(crate) resource: String,
    /// The ids of the devices that kubelet allocated together.
    pub(crate) ids: BTreeSet<DeviceId>,
    /// When it was answered, in nanoseconds since the epoch. Of two keys for the same devices the later one counts.
    pub(crate) at: u64,
    /// Whether the answer also has [`partage_host::cdi::SHARED_DEVICE`]. Answers of earlier agents do not, and kubelet keeps an answer as
    /// long as its pod: the CDI spec of such a container must be complete.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) shared: bool,
}

impl VersionedRecord for AllocationRecord {
    const VERSION: u32 = 1;

    fn is_named(&self, name: &str) -> bool {
        self.key.0 == name
    }
}

/// The record of a pod's grant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PodRecord {
    /// The pod's UID, which names the file, with its namespace and name.
    pub(crate) pod: PodId,
    /// The boot in which it was decided.
    pub(crate) boot: String,
    /// When it was decided, in nanoseconds since the epoch.
    pub(crate) at: u64,
    /// The grant of all its containers.
    pub(crate) grant: PodGrant,
    /// The dialect that each container asked in, by its name.
    pub(crate) dialects: BTreeMap<ContainerName, String>,
    /// The annotations that the pod gets, in every dialect that its users read.
    pub(crate) annotations: BTreeMap<String, String>,
    /// The environment of each container.
    pub(crate) env: BTreeMap<ContainerName, BTreeMap<String, String>>,
    /// The last resize request that was answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) resize: Option<String>,
    /// Whether memory above the limits of its containers is placed on the host.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) oversubscribe: bool,
    /// How its containers take turns on shared GPUs; the priority as the node allowed it.
    #[serde(default, skip_serializing_if = "TurnPreferences::is_default")]
    pub(crate) turns: TurnPreferences,
}

impl PodRecord {
    /// Returns the grant of one container.
    pub(crate) fn grant_of(&self, container: &ContainerName) -> Option<&Grant> {
        self.grant.grants.iter().find(|grant| grant.container == *container)
    }

    /// Returns the dialect that a container asked in.
    pub(crate) fn dialect(&self, container: &ContainerName) -> Dialect {
        let name = self.dialects.get(container);
        let known = Dialect::ALL.into_iter().find(|dialect| name.is_some_and(|name| name == dialect.name()));
        known.unwrap_or(Dialect::Native)
    }
}

impl VersionedRecord for PodRecord {
    const VERSION: u32 = 1;

    fn is_named(&self, name: &str) -> bool {
        self.pod.uid.as_str() == name
    }
}

/// All records on disk.
#[derive(Debug, Default)]
pub(crate) struct StoredRecords {
    pub(crate) allocations: BTreeMap<ContainerKey, AllocationRecord>,
    pub(crate) pods: BTreeMap<PodUid, PodRecord>,
    /// Pods whose record another version of the agent wrote. Their files stay as they are.
    pub(crate) unsupported: BTreeSet<PodUid>,
    /// Number of files that were not records and were quarantined.
    pub(crate) quarantined: usize,
}

/// The agent's records on disk: allocations are kept until a reboot, all others across reboots.
#[derive(Clone, Debug)]
pub(crate) struct AgentStore {
    allocations: RecordDir,
    pods: RecordDir,
    /// Records that there is one of each.
    singletons: RecordDir,
}

impl AgentStore {
    /// Opens the directories, and creates those that are missing.
    pub(crate) fn open(state: &Path, run: &Path) -> io::Result<AgentStore> {
        let quarantine = state.join("quarantine");
        Ok(AgentStore {
            allocations: RecordDir::open(
                &run.join("names"),
                &run.join("quarantine"),
                Durability::UntilReboot,
            )?,
            pods: RecordDir::open(&state.join("pods"), &quarantine, Durability::AcrossReboots)?,
            singletons: RecordDir::open(state, &quarantine, Durability::AcrossReboots)?,
        })
    }

    /// Reads all records. A file that is not a record is quarantined; one that the system does not let the agent read is an error.
    pub(crate) fn read(&self) -> Result<StoredRecords, RecordError> {
        let allocations: LoadedRecords<AllocationRecord> = self.allocations.load_all()?;
        let pods: LoadedRecords<PodRecord> = self.pods.load_all()?;
        Ok(StoredRecords {
            quarantined: allocations.quarantined.len() + pods.quarantined.len(),
            allocations: allocations
                .records
                .into_values()
                .map(|allocation| (allocation.key.clone(), allocation))
                .collect(),
            pods: pods.records.into_values().map(|record| (record.pod.uid.clone(), record)).collect(),
            unsupported: pods.unsupported.into_iter().map(|record| PodUid::from(record.name)).collect(),
        })
    }

    /// Returns the directory of the records that exist once.
    pub(crate) fn singletons(&self) -> &RecordDir {
        &self.singletons
    }

    /// Reads a record that there is one of; `None` if it was never written, or cannot be used.
    pub(crate) fn singleton<T: VersionedRecord>(&self, name: &str) -> Result<Option<T>, RecordError> {
        self.singletons.load(name)
    }

    /// Writes a record that there is one of.
    pub(crate) fn put_singleton<T: VersionedRecord>(&self, name: &str, what: &T) -> Result<(), RecordError> {
        self.singletons.store(name, what)
    }

    /// Writes the record of an allocation.
    pub(crate) fn put_allocation(&self, allocation: &AllocationRecord) -> Result<(), RecordError> {
        self.allocations.store(&allocation.key.0, allocation)
    }

    /// Writes the record of a pod.
    pub(crate) fn put_pod(&self, record: &PodRecord) -> Result<(), RecordError> {
        self.pods.store(record.pod.uid.as_str(), record)
    }

    /// Removes the record of an allocation, if there is one.
    pub(crate) fn remove_allocation(&self, key: &ContainerKey) -> Result<(), RecordError> {
        self.allocations.remove::<AllocationRecord>(&key.0)
    }

    /// Removes the record of a pod, if there is one.
    pub(crate) fn remove_pod(&self, uid: &PodUid) -> Result<(), RecordError> {
        self.pods.remove::<PodRecord>(uid.as_str())
    }
}

/// Encodes a pod's record as text, for the copy in its CDI specs.
pub(crate) fn encode(record: &PodRecord) -> serde_json::Result<String> {
    records::encode(record)
}

/// Decodes a record from text.
pub(crate) fn decode(text: &str) -> Result<PodRecord, records::DecodeError> {
    records::decode(text.as_bytes())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::settings::SettingsWatcher;
    use partage_core::model::{Bytes, Cores, Share};
    use partage_enforce::error_chain::describe;
    use std::fs;
    use std::path::PathBuf;

    fn name(key: &str) -> AllocationRecord {
        let ids = ["slot-1", "slot-7"].map(|id| DeviceId(id.into()));
        let resource = "partage.dev/gpu".into();
        AllocationRecord { key: ContainerKey(key.into()), resource, ids: ids.into(), at: 3, shared: true }
    }

    /// Returns a pod with one share of the GPU `GPU-1`.
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
            oversubscribe: false,
            turns: TurnPreferences::default(),
        }
    }

    fn open(folder: &tempfile::TempDir) -> AgentStore {
        AgentStore::open(folder.path(), folder.path()).unwrap()
    }

    fn pod_file(folder: &tempfile::TempDir, uid: &str) -> PathBuf {
        folder.path().join("pods").join(format!("{uid}.json"))
    }

    #[test]
    fn records_are_read_until_they_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let store = open(&folder);
        store.put_allocation(&name("ab")).unwrap();
        store.put_pod(&record("u-1", 1)).unwrap();
        store.put_pod(&record("u-1", 2)).unwrap();
        let kept = open(&folder).read().unwrap();
        assert_eq!(kept.allocations.values().collect::<Vec<_>>(), [&name("ab")]);
        assert_eq!(kept.pods.values().collect::<Vec<_>>(), [&record("u-1", 2)]);
        assert_eq!(kept.pods["u-1"].dialect(&"main".into()), Dialect::Volcano);
        for _ in 0..2 {
            store.remove_allocation(&ContainerKey("ab".into())).unwrap();
            store.remove_pod(&"u-1".into()).unwrap();
        }
        let kept = store.read().unwrap();
        assert!(kept.allocations.is_empty() && kept.pods.is_empty() && kept.quarantined == 0);
    }

    #[test]
    fn damaged_record_is_quarantined_and_other_records_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let store = open(&folder);
        store.put_pod(&record("good", 1)).unwrap();
        for (uid, text) in [("cut", "{\"version\": 1, \"po"), ("empty", ""), ("other", "{\"version\": 1}")] {
            fs::write(pod_file(&folder, uid), text).unwrap();
        }
        // A copy under another name would count twice.
        let good = fs::read(pod_file(&folder, "good")).unwrap();
        fs::write(pod_file(&folder, "copy"), &good).unwrap();
        fs::write(folder.path().join("names").join("copy.json"), good).unwrap();
        std::os::unix::fs::symlink("/nowhere", pod_file(&folder, "link")).unwrap();
        let kept = store.read().unwrap();
        assert_eq!((kept.pods.len(), kept.quarantined), (1, 6));
        assert!(folder.path().join("quarantine").join("cut.json").is_file());
        let again = store.read().unwrap();
        assert_eq!((again.pods.len(), again.quarantined), (1, 0));
    }

    #[test]
    fn record_of_a_newer_agent_is_neither_read_nor_replaced_nor_removed() {
        let folder = tempfile::tempdir().unwrap();
        let store = open(&folder);
        let newer = r#"{"version": 2, "new": true}"#;
        fs::write(pod_file(&folder, "u-1"), newer).unwrap();
        let kept = store.read().unwrap();
        assert_eq!((kept.pods.len(), kept.quarantined), (0, 0));
        assert_eq!(kept.unsupported, BTreeSet::from(["u-1".into()]));
        let error = describe(&store.put_pod(&record("u-1", 1)).unwrap_err());
        assert!(error.contains("u-1.json: unsupported record (start the version that wrote it"), "{error}");
        assert!(error.ends_with("record of version 2, this build reads version 1"), "{error}");
        store.remove_pod(&"u-1".into()).unwrap();
        assert_eq!(fs::read_to_string(pod_file(&folder, "u-1")).unwrap(), newer);
    }

    #[test]
    fn records_of_version_1_are_read() {
        let written = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/records-version-1");
        let folder = tempfile::tempdir().unwrap();
        let store = open(&folder);
        for file in [
            "pods/5f1c1e0a-7a39-4f0e-9a3f-2f6a4a1d9c11.json",
            "pods/c0ffee00-0000-4000-8000-000000000001.json",
            "names/0123456789abcdef0123456789abcdef.json",
            "settings.json",
        ] {
            fs::copy(written.join(file), folder.path().join(file)).unwrap();
        }
        let kept = store.read().unwrap();
        assert_eq!((kept.quarantined, kept.unsupported.len()), (0, 0));
        let key = "0123456789abcdef0123456789abcdef";
        let expected = AllocationRecord { at: 1_762_000_000_123_456_789, shared: false, ..name(key) };
        assert_eq!(kept.allocations.into_values().collect::<Vec<_>>(), [expected]);
        assert_eq!(
            kept.pods["5f1c1e0a-7a39-4f0e-9a3f-2f6a4a1d9c11"],
            record("5f1c1e0a-7a39-4f0e-9a3f-2f6a4a1d9c11", 8 << 30)
        );
        let resized = &kept.pods["c0ffee00-0000-4000-8000-000000000001"];
        assert_eq!(resized.resize.as_deref(), Some("memory=1Gi"));
        let init = &resized.grant.grants[1];
        assert!(init.init && init.shares[0].whole && init.shares[0].ceiling == Some(Cores::WHOLE));
        let watcher = SettingsWatcher::new(Some(folder.path().join("node.yaml")), &"gpu-1".into(), &store);
        assert_eq!(watcher.earlier().unwrap().shares_per_gpu, 7, "the settings that were last in force");
        // A record that is written again is the same.
        let text =
            fs::read_to_string(written.join("pods/c0ffee00-0000-4000-8000-000000000001.json")).unwrap();
        let written_again: serde_json::Value = serde_json::from_str(&encode(resized).unwrap()).unwrap();
        assert_eq!(written_again, serde_json::from_str::<serde_json::Value>(&text).unwrap());
    }

    #[test]
    fn encoded_copy_is_decoded_unless_it_has_another_version() {
        let text = encode(&record("u-1", 1)).unwrap();
        assert_eq!(decode(&text).unwrap(), record("u-1", 1));
        let later = text.replacen("\"version\":1", "\"version\":2", 1);
        let error = decode(&later).unwrap_err().to_string();
        assert_eq!(error, "record of version 2, this build reads version 1");
        assert!(decode("{").is_err());
    }

    #[test]
    fn singleton_record_is_replaced_and_quarantined_when_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let store = open(&folder);
        assert_eq!(store.singleton::<AllocationRecord>("thing").unwrap(), None);
        for key in ["ab", "cd"] {
            store
                .put_singleton("thing", &AllocationRecord { key: ContainerKey("thing".into()), ..name(key) })
                .unwrap();
            assert!(store.singleton::<AllocationRecord>("thing").unwrap().is_some());
        }
        fs::write(folder.path().join("thing.json"), "{").unwrap();
        assert_eq!(store.singleton::<AllocationRecord>("thing").unwrap(), None);
        assert_eq!(fs::read(folder.path().join("quarantine").join("thing.json")).unwrap(), b"{");
        assert!(!folder.path().join("thing.json").exists());
    }

    #[test]
    fn allocation_without_shared_field_has_no_shared_device() {
        let folder = tempfile::tempdir().unwrap();
        let earlier =
            r#"{"version":1,"nonce":"ab","resource":"partage.dev/gpu","ids":["slot-1","slot-7"],"at":3}"#;
        fs::create_dir_all(folder.path().join("names")).unwrap();
        fs::write(folder.path().join("names").join("ab.json"), earlier).unwrap();
        let kept = open(&folder).read().unwrap();
        assert_eq!(
            kept.allocations[&ContainerKey("ab".into())],
            AllocationRecord { shared: false, ..name("ab") }
        );
    }

    #[test]
    fn key_that_is_a_path_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let store = open(&folder);
        for wrong in ["", "..", "a/b", "../../x", "a.b", "é"] {
            assert!(store.put_allocation(&name(wrong)).is_err(), "{wrong:?}");
            assert!(store.remove_pod(&wrong.into()).is_err(), "{wrong:?}");
        }
    }
}
