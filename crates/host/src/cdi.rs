//! Specs of the Container Device Interface (CDI): what a container runtime changes in a container that has a CDI device.
//!
//! Each container has a device and a spec of its own, `partage.dev-grant-<name>.json`. The driver files and stand-ins, which are the same for
//! all containers, are one more device in a shared spec, `partage.dev-driver.json`. A runtime parses every spec again when one of them
//! changes, so the specs that come with each container must be small.
//!
//! A runtime may read the directory at any time, so each spec is replaced atomically. Specs of other vendors are left alone.

use crate::files;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Vendor and class of the devices of single containers.
pub const KIND: &str = "partage.dev/grant";
/// The shared device with the driver files and stand-ins, as kubelet passes it to the container runtime.
///
/// The name is the same for every driver version: kubelet stores the devices of a container, and a container that restarts after a driver
/// update must find the new driver's files under the name that kubelet has.
pub const SHARED_DEVICE: &str = "partage.dev/driver=current";
/// Vendor and class of [`SHARED_DEVICE`].
const SHARED_KIND: &str = "partage.dev/driver";
/// The name of [`SHARED_DEVICE`] within its class.
const SHARED_NAME: &str = "current";
/// The file name of the shared spec. It differs from the file names of containers, so that listing those leaves it out.
const SHARED_FILE: &str = "partage.dev-driver.json";
/// The first version with annotations.
const VERSION: &str = "0.6.0";
/// How names of our files begin and end.
const BEGINNING: &str = "partage.dev-grant-";
const ENDING: &str = ".json";
/// Longer ones may not be names of files.
const LONGEST_NAME: usize = 128;

/// What is changed in a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Edits {
    /// `NAME=value`. They win over the image's and the pod's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes, with the right to use them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Files and folders.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
}

/// A device node of the host in a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceNode {
    /// Where it appears.
    pub path: PathBuf,
    /// Where it is on the host, where that is another path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<PathBuf>,
}

/// A file or folder of the host in a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    /// Where it is.
    pub host_path: PathBuf,
    /// Where it appears.
    pub container_path: PathBuf,
    /// As for mount(8), such as `ro` and `bind`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    cdi_version: String,
    kind: String,
    devices: Vec<Device>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    name: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
    container_edits: Edits,
}

/// A file of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The name.
    pub name: String,
    /// What it says, or why it cannot be read.
    pub content: Result<Content, SpecError>,
}

/// Why a file is not a spec that [`Folder::put`] wrote.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// The system does not let it be read.
    #[error("{0}")]
    Unreadable(String),
    /// It is not the JSON of a CDI spec.
    #[error("{0}")]
    Malformed(String),
    /// It is of another vendor or class.
    #[error("it is of the kind {0:?}, not {KIND}")]
    WrongKind(String),
    /// It has none or several devices.
    #[error("it has {0} devices, not one")]
    DeviceCount(usize),
    /// It is for another device than its file name says.
    #[error("it is for {0:?}")]
    WrongDevice(String),
}

/// What a file says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// For people and for ourselves; a runtime ignores them.
    pub annotations: BTreeMap<String, String>,
    /// What the container gets.
    pub edits: Edits,
}

/// A folder that runtimes look for such files in.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// It need not be there: who writes makes it.
    pub fn new(path: impl Into<PathBuf>) -> Folder {
        Folder { path: path.into() }
    }

    /// Where the file of a name is.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(format!("{BEGINNING}{name}{ENDING}"))
    }

    /// Replaces the spec of a container's device atomically and durably. Returns whether its content changed: a spec that is there already
    /// is not written again.
    pub fn put(&self, name: &str, annotations: &BTreeMap<String, String>, edits: &Edits) -> io::Result<bool> {
        if !is_name(name) {
            let why = format!("{name:?} cannot be the name of a device");
            return Err(io::Error::new(ErrorKind::InvalidInput, why));
        }
        let device =
            Device { name: name.into(), annotations: annotations.clone(), container_edits: edits.clone() };
        self.write(&self.file(name), KIND, device)
    }

    /// Replaces the shared spec, with the same guarantees as [`Folder::put`].
    pub fn put_shared(&self, edits: &Edits) -> io::Result<bool> {
        let device =
            Device { name: SHARED_NAME.into(), annotations: BTreeMap::new(), container_edits: edits.clone() };
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
        files::remove(&file)?;
        files::sync_folder(&self.path)
    }

    fn write(&self, file: &Path, kind: &str, device: Device) -> io::Result<bool> {
        let spec = Spec { cdi_version: VERSION.into(), kind: kind.into(), devices: vec![device] };
        let bytes = serde_json::to_vec_pretty(&spec)?;
        if fs::read(file).is_ok_and(|there| there == bytes) {
            return Ok(false);
        }
        fs::create_dir_all(&self.path)?;
        files::write_whole(file, &bytes, 0o644)?;
        tracing::debug!(file = %file.display(), "CDI spec written");
        Ok(true)
    }

    /// The file of a name; `None` where there is none.
    pub fn get(&self, name: &str) -> Option<Found> {
        if !is_name(name) {
            return None;
        }
        let content = match fs::read(self.file(name)) {
            Ok(bytes) => read(name, &bytes),
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            Err(error) => Err(SpecError::Unreadable(error.to_string())),
        };
        Some(Found { name: name.into(), content })
    }

    /// Removes the file of a name, durably, where there is one.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        let file = self.file(name);
        if !is_name(name) || !file.try_exists()? {
            return Ok(());
        }
        files::remove(&file)?;
        tracing::debug!(file = %file.display(), "CDI spec removed");
        files::sync_folder(&self.path)
    }

    /// The names that have a file, in order.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let mut names: Vec<String> =
            files::names(&self.path)?.iter().filter_map(|file| name_of(file.to_str()?)).collect();
        names.sort();
        Ok(names)
    }

    /// All files of ours, by name.
    pub fn all(&self) -> io::Result<Vec<Found>> {
        Ok(self.names()?.iter().filter_map(|name| self.get(name)).collect())
    }

    /// Removes temporary files of a writer that was killed. Callers must be the only writer of the directory.
    pub fn remove_unfinished(&self) -> io::Result<()> {
        for beginning in [BEGINNING, SHARED_FILE] {
            match files::remove_unfinished(&self.path, beginning) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

/// The name that a file of ours is for.
fn name_of(file: &str) -> Option<String> {
    let name = file.strip_prefix(BEGINNING)?.strip_suffix(ENDING)?;
    is_name(name).then(|| name.to_string())
}

/// What runtimes take as a device's name.
fn is_name(name: &str) -> bool {
    let inside = |letter: char| letter.is_ascii_alphanumeric() || "-_.:".contains(letter);
    let ends = [name.chars().next(), name.chars().last()];
    let alphanumeric = |end: Option<char>| end.is_some_and(|letter| letter.is_ascii_alphanumeric());
    name.len() <= LONGEST_NAME && name.chars().all(inside) && ends.into_iter().all(alphanumeric)
}

/// Reads a file that should be what [`Folder::put`] writes.
fn read(name: &str, bytes: &[u8]) -> Result<Content, SpecError> {
    let spec: Spec =
        serde_json::from_slice(bytes).map_err(|error| SpecError::Malformed(error.to_string()))?;
    if spec.kind != KIND {
        return Err(SpecError::WrongKind(spec.kind));
    }
    let [device] =
        <[Device; 1]>::try_from(spec.devices).map_err(|devices| SpecError::DeviceCount(devices.len()))?;
    if device.name != name {
        return Err(SpecError::WrongDevice(device.name));
    }
    Ok(Content { annotations: device.annotations, edits: device.container_edits })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::MetadataExt;

    fn edits() -> Edits {
        Edits {
            env: vec!["A=b".into()],
            device_nodes: vec![
                DeviceNode { path: "/dev/nvidia0".into(), host_path: None },
                DeviceNode { path: "/dev/nvidiactl".into(), host_path: Some("/x/nvidiactl".into()) },
            ],
            mounts: vec![Mount {
                host_path: "/host/file".into(),
                container_path: "/usr/file".into(),
                options: vec!["ro".into(), "bind".into()],
            }],
        }
    }

    #[test]
    fn a_file_is_what_runtimes_read() {
        let at = tempfile::tempdir().unwrap();
        let folder = Folder::new(at.path().join("cdi"));
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
        let folder = Folder::new(at.path().join("cdi"));
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
        assert!(folder.put_shared(&Edits::default()).unwrap());
        fs::write(at.path().join("cdi/.partage.dev-driver.json.1-1.unfinished"), "").unwrap();
        folder.remove_unfinished().unwrap();
        assert_eq!(files::names(&at.path().join("cdi")).unwrap(), ["partage.dev-driver.json"]);
        folder.remove_shared().unwrap();
        assert!(!folder.has_shared());
    }

    #[test]
    fn the_same_is_not_written_again() {
        let at = tempfile::tempdir().unwrap();
        let folder = Folder::new(at.path());
        let none = BTreeMap::new();
        let inode = || fs::metadata(folder.file("a")).unwrap().ino();
        assert!(folder.put("a", &none, &edits()).unwrap());
        let before = inode();
        assert!(!folder.put("a", &none, &edits()).unwrap());
        assert_eq!(inode(), before);
        assert!(folder.put("a", &none, &Edits::default()).unwrap());
        assert_eq!(folder.get("a").unwrap().content, Ok(Content::default()));
    }

    #[test]
    fn ours_are_found_and_what_cannot_be_read_says_why() {
        let at = tempfile::tempdir().unwrap();
        let folder = Folder::new(at.path());
        assert_eq!(Folder::new(at.path().join("nowhere")).all().unwrap(), []);
        Folder::new(at.path().join("nowhere")).remove_unfinished().unwrap();
        folder.put("b", &BTreeMap::new(), &edits()).unwrap();
        folder.put("moved", &BTreeMap::new(), &edits()).unwrap();
        fs::rename(folder.file("moved"), folder.file("a")).unwrap();
        fs::write(folder.file("broken"), "{").unwrap();
        fs::write(folder.file("other"), r#"{"cdiVersion":"0.6.0","kind":"nvidia.com/gpu","devices":[]}"#)
            .unwrap();
        fs::write(folder.file("empty"), r#"{"cdiVersion":"0.6.0","kind":"partage.dev/grant","devices":[]}"#)
            .unwrap();
        for others in ["nvidia.json", "partage.dev-grant-.json", ".partage.dev-grant-a.json.1-1.unfinished"] {
            fs::write(at.path().join(others), "").unwrap();
        }
        let all = folder.all().unwrap();
        let why = |at: usize| all[at].content.clone().unwrap_err().to_string();
        let names: Vec<&str> = all.iter().map(|found| found.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "broken", "empty", "other"]);
        assert_eq!(why(0), "it is for \"moved\"");
        assert_eq!(all[1].content.as_ref().unwrap().edits, edits());
        assert!(why(2).contains("EOF"), "{}", why(2));
        assert_eq!(why(3), "it has 0 devices, not one");
        assert_eq!(why(4), "it is of the kind \"nvidia.com/gpu\", not partage.dev/grant");
        for found in &all {
            folder.remove(&found.name).unwrap();
        }
        folder.remove("b").unwrap();
        folder.remove_unfinished().unwrap();
        let mut left = files::names(at.path()).unwrap();
        left.sort();
        assert_eq!(left, ["nvidia.json", "partage.dev-grant-.json"]);
    }

    #[test]
    fn names_stay_in_the_folder() {
        let at = tempfile::tempdir().unwrap();
        let folder = Folder::new(at.path().join("cdi"));
        let long = "a".repeat(LONGEST_NAME + 1);
        for name in ["", ".", "..", "a/b", "../a", "-a", "a-", "a b", "a\0", "é", &long] {
            let error = folder.put(name, &BTreeMap::new(), &Edits::default()).unwrap_err();
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
                (path(), prop::option::of(path())).prop_map(|(path, host_path)| DeviceNode { path, host_path }), 0..4),
            mounts in prop::collection::vec(
                (path(), path(), prop::collection::vec("[a-z]{1,5}", 0..3)).prop_map(
                    |(host_path, container_path, options)| Mount { host_path, container_path, options }), 0..4),
        ) -> Edits {
            Edits { env, device_nodes, mounts }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn what_is_put_is_got(
            name in "[a-z0-9]([a-z0-9._:-]{0,30}[a-z0-9])?",
            annotations in prop::collection::btree_map("[a-z./]{1,10}", "[ -~é\n]{0,20}", 0..4),
            edits in any_edits(),
        ) {
            let at = tempfile::tempdir().unwrap();
            let folder = Folder::new(at.path());
            prop_assert!(folder.put(&name, &annotations, &edits).unwrap());
            let found = Found { name: name.clone(), content: Ok(Content { annotations, edits }) };
            prop_assert_eq!(folder.all().unwrap(), [found]);
        }

        #[test]
        fn no_bytes_are_too_strange(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            // What could be read is of our kind and for this name.
            prop_assert!(read("a", &bytes).is_err());
        }

        #[test]
        fn a_changed_file_is_read_or_refused(at in any::<prop::sample::Index>(), byte in any::<u8>(), edits in any_edits()) {
            let device = Device { name: "a".into(), annotations: BTreeMap::new(), container_edits: edits };
            let spec = Spec { cdi_version: VERSION.into(), kind: KIND.into(), devices: vec![device] };
            let mut bytes = serde_json::to_vec(&spec).unwrap();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            if let Err(why) = read("a", &bytes) {
                prop_assert!(!why.to_string().is_empty());
            }
        }
    }
}
