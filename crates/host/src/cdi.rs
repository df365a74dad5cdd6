//! Reads and writes specs of the Container Device Interface (CDI), by which a container runtime edits a container.
//!
//! Each container has a device and a spec of its own, `partage.dev-grant-<name>.json`. The driver files and stand-ins,
//! which are the same for all containers, are one more device in a shared spec, `partage.dev-driver.json`. A runtime
//! parses every spec again when one of them changes, so the specs that come with each container must be small.
//!
//! A runtime may read the directory at any time, so each spec is replaced atomically. Specs of other vendors are left
//! alone.

use crate::atomic_file;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Vendor and class of the devices of single containers.
pub const GRANT_KIND: &str = "partage.dev/grant";
/// The shared device with the driver files and stand-ins, as kubelet passes it to the container runtime.
///
/// The name is the same for every driver version: kubelet stores the devices of a container, and a container that
/// restarts after a driver update must find the new driver's files under the name that kubelet has.
pub const SHARED_DEVICE: &str = "partage.dev/driver=current";
/// Vendor and class of [`SHARED_DEVICE`].
const SHARED_KIND: &str = "partage.dev/driver";
/// The name of [`SHARED_DEVICE`] within its class.
const SHARED_NAME: &str = "current";
/// The file name of the shared spec. It differs from the file names of containers, so that listing those leaves it out.
const SHARED_FILE: &str = "partage.dev-driver.json";
/// The first version with annotations.
const CDI_VERSION: &str = "0.6.0";
/// The prefix and suffix of the file names of our specs.
const FILE_PREFIX: &str = "partage.dev-grant-";
const FILE_SUFFIX: &str = ".json";
/// The maximum length of a device name in bytes: file systems allow 255 bytes for prefix, name and suffix.
const MAX_NAME_LENGTH: usize = 128;

/// The changes that a CDI device makes to a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CdiEdits {
    /// Environment variables as `NAME=value`. They override those of the image and the pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes that the container may use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<CdiDeviceNode>,
    /// Bind mounts of host files and directories.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<CdiMount>,
}

/// A device node of the host that appears in a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CdiDeviceNode {
    /// The path in the container.
    pub path: PathBuf,
    /// The path on the host, if it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<PathBuf>,
}

/// A file or directory of the host that is mounted into a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CdiMount {
    /// The path on the host.
    pub host_path: PathBuf,
    /// The path in the container.
    pub container_path: PathBuf,
    /// Options as for mount(8), such as `ro` and `bind`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct CdiSpec {
    cdi_version: String,
    kind: String,
    devices: Vec<SpecDevice>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SpecDevice {
    name: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
    container_edits: CdiEdits,
}

/// A spec file of a container, as found in the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredSpec {
    /// The device name, from the file name.
    pub name: String,
    /// The content, or why the file cannot be used.
    pub content: Result<SpecContent, SpecError>,
}

/// Why a file is not a spec that [`SpecDir::put`] wrote.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// The file cannot be read.
    #[error("{0}")]
    Unreadable(String),
    /// The file is not the JSON of a CDI spec.
    #[error("{0}")]
    Malformed(String),
    /// The spec is of another vendor or class.
    #[error("CDI kind is {0:?}, expected {GRANT_KIND}")]
    WrongKind(String),
    /// The spec has no device, or several.
    #[error("spec has {0} devices, expected one")]
    DeviceCount(usize),
    /// The spec is for a device other than the one in its file name.
    #[error("spec is for device {0:?}")]
    WrongDevice(String),
}

/// The content of a container's spec.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecContent {
    /// Annotations of the device, which a runtime ignores. The agent recovers its records from them.
    pub annotations: BTreeMap<String, String>,
    /// The changes to the container.
    pub edits: CdiEdits,
}

/// A directory in which container runtimes look for CDI specs.
#[derive(Clone, Debug)]
pub struct SpecDir {
    path: PathBuf,
}

impl SpecDir {
    /// Returns the directory at a path. It is created with the first spec.
    pub fn new(path: impl Into<PathBuf>) -> SpecDir {
        SpecDir { path: path.into() }
    }

    /// Returns the path of a device's spec file.
    pub fn spec_path(&self, name: &str) -> PathBuf {
        self.path.join(format!("{FILE_PREFIX}{name}{FILE_SUFFIX}"))
    }

    /// Replaces the spec of a container's device atomically and durably. Returns whether its content changed: a spec
    /// that is already identical is not written again.
    pub fn put(
        &self,
        name: &str,
        annotations: &BTreeMap<String, String>,
        edits: &CdiEdits,
    ) -> io::Result<bool> {
        if !is_name(name) {
            let why = format!("{name:?} is not a valid CDI device name");
            return Err(io::Error::new(ErrorKind::InvalidInput, why));
        }
        let device = SpecDevice {
            name: name.into(),
            annotations: annotations.clone(),
            container_edits: edits.clone(),
        };
        self.write(&self.spec_path(name), GRANT_KIND, device)
    }

    /// Replaces the shared spec, with the same guarantees as [`SpecDir::put`].
    pub fn put_shared(&self, edits: &CdiEdits) -> io::Result<bool> {
        let device = SpecDevice {
            name: SHARED_NAME.into(),
            annotations: BTreeMap::new(),
            container_edits: edits.clone(),
        };
        self.write(&self.path.join(SHARED_FILE), SHARED_KIND, device)
    }

    /// Returns whether the shared spec exists.
    pub fn has_shared(&self) -> bool {
        self.path.join(SHARED_FILE).is_file()
    }

    /// Removes the shared spec durably. Succeeds if it does not exist.
    pub fn remove_shared(&self) -> io::Result<()> {
        let file = self.path.join(SHARED_FILE);
        if !file.try_exists()? {
            return Ok(());
        }
        atomic_file::remove_if_exists(&file)?;
        atomic_file::sync_directory(&self.path)
    }

    fn write(&self, file: &Path, kind: &str, device: SpecDevice) -> io::Result<bool> {
        let spec = CdiSpec { cdi_version: CDI_VERSION.into(), kind: kind.into(), devices: vec![device] };
        let bytes = serde_json::to_vec_pretty(&spec)?;
        if fs::read(file).is_ok_and(|there| there == bytes) {
            return Ok(false);
        }
        fs::create_dir_all(&self.path)?;
        atomic_file::replace_durably(file, &bytes, 0o644)?;
        tracing::debug!(file = %file.display(), "CDI spec written");
        Ok(true)
    }

    /// Reads the spec of a device. Returns `None` if it does not exist.
    pub fn get(&self, name: &str) -> Option<StoredSpec> {
        if !is_name(name) {
            return None;
        }
        let content = match fs::read(self.spec_path(name)) {
            Ok(bytes) => parse_spec(name, &bytes),
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            Err(error) => Err(SpecError::Unreadable(error.to_string())),
        };
        Some(StoredSpec { name: name.into(), content })
    }

    /// Removes the spec of a device durably. Succeeds if it does not exist.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        let file = self.spec_path(name);
        if !is_name(name) || !file.try_exists()? {
            return Ok(());
        }
        atomic_file::remove_if_exists(&file)?;
        tracing::debug!(file = %file.display(), "CDI spec removed");
        atomic_file::sync_directory(&self.path)
    }

    /// Returns the names of all devices that have a spec, sorted.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let mut names: Vec<String> = atomic_file::list_names(&self.path)?
            .iter()
            .filter_map(|file| device_name_of(file.to_str()?))
            .collect();
        names.sort();
        Ok(names)
    }

    /// Reads the specs of all containers, sorted by name.
    pub fn all(&self) -> io::Result<Vec<StoredSpec>> {
        Ok(self.names()?.iter().filter_map(|name| self.get(name)).collect())
    }

    /// Removes temporary files of a writer that was killed. Callers must be the only writer of the directory.
    pub fn remove_temp_files(&self) -> io::Result<()> {
        for beginning in [FILE_PREFIX, SHARED_FILE] {
            match atomic_file::remove_temp_files(&self.path, beginning) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Returns the device name that a spec's file name contains.
fn device_name_of(file: &str) -> Option<String> {
    let name = file.strip_prefix(FILE_PREFIX)?.strip_suffix(FILE_SUFFIX)?;
    is_name(name).then(|| name.to_string())
}

/// Returns whether container runtimes accept a device name.
fn is_name(name: &str) -> bool {
    let inside = |letter: char| letter.is_ascii_alphanumeric() || "-_.:".contains(letter);
    let ends = [name.chars().next(), name.chars().last()];
    let alphanumeric = |end: Option<char>| end.is_some_and(|letter| letter.is_ascii_alphanumeric());
    name.len() <= MAX_NAME_LENGTH && name.chars().all(inside) && ends.into_iter().all(alphanumeric)
}

/// Parses a spec as [`SpecDir::put`] writes it.
fn parse_spec(name: &str, bytes: &[u8]) -> Result<SpecContent, SpecError> {
    let spec: CdiSpec =
        serde_json::from_slice(bytes).map_err(|error| SpecError::Malformed(error.to_string()))?;
    if spec.kind != GRANT_KIND {
        return Err(SpecError::WrongKind(spec.kind));
    }
    let [device] =
        <[SpecDevice; 1]>::try_from(spec.devices).map_err(|devices| SpecError::DeviceCount(devices.len()))?;
    if device.name != name {
        return Err(SpecError::WrongDevice(device.name));
    }
    Ok(SpecContent { annotations: device.annotations, edits: device.container_edits })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::MetadataExt;

    fn edits() -> CdiEdits {
        CdiEdits {
            env: vec!["A=b".into()],
            device_nodes: vec![
                CdiDeviceNode { path: "/dev/nvidia0".into(), host_path: None },
                CdiDeviceNode { path: "/dev/nvidiactl".into(), host_path: Some("/x/nvidiactl".into()) },
            ],
            mounts: vec![CdiMount {
                host_path: "/host/file".into(),
                container_path: "/usr/file".into(),
                options: vec!["ro".into(), "bind".into()],
            }],
        }
    }

    #[test]
    fn spec_has_the_format_of_the_cdi_specification() {
        let at = tempfile::tempdir().unwrap();
        let folder = SpecDir::new(at.path().join("cdi"));
        let annotations = BTreeMap::from([("partage.dev/pod".to_string(), "team/train".to_string())]);
        assert!(folder.put("0af1", &annotations, &edits()).unwrap());
        let text = fs::read_to_string(at.path().join("cdi/partage.dev-grant-0af1.json")).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let expected = serde_json::json!({
            "cdiVersion": "0.6.0",
            "kind": "partage.dev/grant",
            "devices": [{
                "name": "0af1",
                "annotations": {"partage.dev/pod": "team/train"},
                "containerEdits": {
                    "env": ["A=b"],
                    "deviceNodes": [
                        {"path": "/dev/nvidia0"},
                        {"path": "/dev/nvidiactl", "hostPath": "/x/nvidiactl"},
                    ],
                    "mounts": [
                        {"hostPath": "/host/file", "containerPath": "/usr/file", "options": ["ro", "bind"]},
                    ],
                },
            }],
        });
        assert_eq!(json, expected);
    }

    #[test]
    fn shared_spec_is_not_listed_with_those_of_containers() {
        let at = tempfile::tempdir().unwrap();
        let folder = SpecDir::new(at.path().join("cdi"));
        assert!(!folder.has_shared());
        folder.remove_shared().unwrap();
        assert!(folder.put_shared(&edits()).unwrap());
        assert!(!folder.put_shared(&edits()).unwrap(), "unchanged");
        let text = fs::read_to_string(at.path().join("cdi/partage.dev-driver.json")).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let device =
            format!("{}={}", json["kind"].as_str().unwrap(), json["devices"][0]["name"].as_str().unwrap());
        assert_eq!(device, SHARED_DEVICE);
        assert_eq!(json["devices"][0]["containerEdits"], serde_json::to_value(edits()).unwrap());
        assert_eq!(folder.names().unwrap(), [""; 0]);
        // A driver update changes the content and keeps the name.
        assert!(folder.put_shared(&CdiEdits::default()).unwrap());
        fs::write(at.path().join("cdi/.partage.dev-driver.json.1-1.unfinished"), "").unwrap();
        folder.remove_temp_files().unwrap();
        assert_eq!(atomic_file::list_names(&at.path().join("cdi")).unwrap(), ["partage.dev-driver.json"]);
        folder.remove_shared().unwrap();
        assert!(!folder.has_shared());
    }

    #[test]
    fn unchanged_spec_is_not_written_again() {
        let at = tempfile::tempdir().unwrap();
        let folder = SpecDir::new(at.path());
        let none = BTreeMap::new();
        let inode = || fs::metadata(folder.spec_path("a")).unwrap().ino();
        assert!(folder.put("a", &none, &edits()).unwrap());
        let before = inode();
        assert!(!folder.put("a", &none, &edits()).unwrap());
        assert_eq!(inode(), before);
        assert!(folder.put("a", &none, &CdiEdits::default()).unwrap());
        assert_eq!(folder.get("a").unwrap().content, Ok(SpecContent::default()));
    }

    #[test]
    fn own_specs_are_listed_and_invalid_ones_have_a_reason() {
        let at = tempfile::tempdir().unwrap();
        let folder = SpecDir::new(at.path());
        assert_eq!(SpecDir::new(at.path().join("nowhere")).all().unwrap(), []);
        SpecDir::new(at.path().join("nowhere")).remove_temp_files().unwrap();
        folder.put("b", &BTreeMap::new(), &edits()).unwrap();
        folder.put("moved", &BTreeMap::new(), &edits()).unwrap();
        fs::rename(folder.spec_path("moved"), folder.spec_path("a")).unwrap();
        fs::write(folder.spec_path("broken"), "{").unwrap();
        fs::write(
            folder.spec_path("other"),
            r#"{"cdiVersion":"0.6.0","kind":"nvidia.com/gpu","devices":[]}"#,
        )
        .unwrap();
        fs::write(
            folder.spec_path("empty"),
            r#"{"cdiVersion":"0.6.0","kind":"partage.dev/grant","devices":[]}"#,
        )
        .unwrap();
        for others in ["nvidia.json", "partage.dev-grant-.json", ".partage.dev-grant-a.json.1-1.unfinished"] {
            fs::write(at.path().join(others), "").unwrap();
        }
        let all = folder.all().unwrap();
        let why = |at: usize| all[at].content.clone().unwrap_err().to_string();
        let names: Vec<&str> = all.iter().map(|found| found.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "broken", "empty", "other"]);
        assert_eq!(why(0), "spec is for device \"moved\"");
        assert_eq!(all[1].content.as_ref().unwrap().edits, edits());
        assert!(why(2).contains("EOF"), "{}", why(2));
        assert_eq!(why(3), "spec has 0 devices, expected one");
        assert_eq!(why(4), "CDI kind is \"nvidia.com/gpu\", expected partage.dev/grant");
        for found in &all {
            folder.remove(&found.name).unwrap();
        }
        folder.remove("b").unwrap();
        folder.remove_temp_files().unwrap();
        let mut left = atomic_file::list_names(at.path()).unwrap();
        left.sort();
        assert_eq!(left, ["nvidia.json", "partage.dev-grant-.json"]);
    }

    #[test]
    fn invalid_device_names_are_refused() {
        let at = tempfile::tempdir().unwrap();
        let folder = SpecDir::new(at.path().join("cdi"));
        let long = "a".repeat(MAX_NAME_LENGTH + 1);
        for name in ["", ".", "..", "a/b", "../a", "-a", "a-", "a b", "a\0", "é", &long] {
            let error = folder.put(name, &BTreeMap::new(), &CdiEdits::default()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{name}");
            assert_eq!(folder.get(name), None);
            folder.remove(name).unwrap();
        }
        assert!(!at.path().join("cdi").exists());
    }

    fn path() -> impl Strategy<Value = PathBuf> {
        "/[ -~é]{0,20}".prop_map(PathBuf::from)
    }

    prop_compose! {
        fn any_edits()(
            env in prop::collection::vec("[A-Z]{1,5}=[ -~\n]{0,10}", 0..4),
            device_nodes in prop::collection::vec(
                (path(), prop::option::of(path())).prop_map(|(path, host_path)| CdiDeviceNode { path, host_path }), 0..4),
            mounts in prop::collection::vec(
                (path(), path(), prop::collection::vec("[a-z]{1,5}", 0..3)).prop_map(
                    |(host_path, container_path, options)| CdiMount { host_path, container_path, options }), 0..4),
        ) -> CdiEdits {
            CdiEdits { env, device_nodes, mounts }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn written_spec_is_read_back(
            name in "[a-z0-9]([a-z0-9._:-]{0,30}[a-z0-9])?",
            annotations in prop::collection::btree_map("[a-z./]{1,10}", "[ -~é\n]{0,20}", 0..4),
            edits in any_edits(),
        ) {
            let at = tempfile::tempdir().unwrap();
            let folder = SpecDir::new(at.path());
            prop_assert!(folder.put(&name, &annotations, &edits).unwrap());
            let found = StoredSpec { name: name.clone(), content: Ok(SpecContent { annotations, edits }) };
            prop_assert_eq!(folder.all().unwrap(), [found]);
        }

        #[test]
        fn random_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        // Random bytes are not a spec of our kind and this name.
            prop_assert!(parse_spec("a", &bytes).is_err());
        }

        #[test]
        fn corrupt_spec_is_read_or_refused(at in any::<prop::sample::Index>(), byte in any::<u8>(), edits in any_edits()) {
            let device = SpecDevice { name: "a".into(), annotations: BTreeMap::new(), container_edits: edits };
            let spec = CdiSpec { cdi_version: CDI_VERSION.into(), kind: GRANT_KIND.into(), devices: vec![device] };
            let mut bytes = serde_json::to_vec(&spec).unwrap();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            if let Err(why) = parse_spec("a", &bytes) {
                prop_assert!(!why.to_string().is_empty());
            }
        }
    }
}
