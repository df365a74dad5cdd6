//! Reads kubelet's own record of allocated devices, `device-plugins/kubelet_internal_checkpoint`.
//!
//! Its checksum is not verified: kubelet renames a complete file into place, a torn file is not JSON, and an entry counts only
//! if it carries one of the agent's keys.

use super::DeviceHolder;
use crate::device_plugin::{DeviceId, key_of_cdi_device};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use partage_host::cdi::SHARED_DEVICE;
use partage_kubelet_api::deviceplugin::ContainerAllocateResponse;
use prost::Message;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::UNIX_EPOCH;

/// A reader of kubelet's checkpoint file, which kubelet may replace at any time.
#[derive(Debug)]
pub(super) struct KubeletCheckpoint {
    path: PathBuf,
    /// The error that was logged last: the same one is not logged again.
    last_error: Mutex<Option<String>>,
}

impl KubeletCheckpoint {
    /// Creates a reader for the checkpoint of the kubelet with this directory.
    pub(super) fn new(kubelet: &Path) -> KubeletCheckpoint {
        let path = kubelet.join("device-plugins/kubelet_internal_checkpoint");
        KubeletCheckpoint { path, last_error: Mutex::default() }
    }

    /// Returns when kubelet wrote it, in nanoseconds since the epoch.
    pub(super) fn written(&self) -> Option<u64> {
        let at = std::fs::metadata(&self.path).and_then(|file| file.modified()).ok()?;
        u64::try_from(at.duration_since(UNIX_EPOCH).ok()?.as_nanos()).ok()
    }

    /// Returns the containers that hold devices by one of the agent's answers. `None` if the file cannot be read.
    pub(super) fn holders(&self) -> Option<Vec<DeviceHolder>> {
        let read = std::fs::read(&self.path)
            .map_err(|error| error.to_string())
            .and_then(|bytes| holders(&bytes).map_err(|error| format!("unknown format: {error}")));
        let mut last_error = self.last_error.lock().unwrap_or_else(PoisonError::into_inner);
        match read {
            Ok(holders) => {
                *last_error = None;
                Some(holders)
            }
            Err(error) => {
                if last_error.as_ref() != Some(&error) {
                    let path = self.path.display();
                    if self.path.try_exists().is_ok_and(|exists| !exists) {
                        // As on every new node, before the first pod with a device.
                        tracing::info!(%path, "kubelet has not written a checkpoint yet");
                    } else {
                        tracing::warn!(%path, error, "cannot read kubelet's checkpoint, using PodResources and the runtime instead");
                    }
                    *last_error = Some(error);
                }
                None
            }
        }
    }
}

/// Parses a checkpoint. Entries without one of the agent's keys are left out.
fn holders(bytes: &[u8]) -> Result<Vec<DeviceHolder>, serde_json::Error> {
    let file: CheckpointFile = serde_json::from_slice(bytes)?;
    Ok(file
        .data
        .pod_device_entries
        .unwrap_or_default()
        .into_iter()
        .filter_map(CheckpointEntry::holder)
        .collect())
}

/// The parts of the file that the agent uses.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct CheckpointFile {
    data: CheckpointData,
}

/// The data that the checksum covers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct CheckpointData {
    /// `null` if there are none. A file without this field has another format, and must not be read as "nothing is allocated".
    #[serde(deserialize_with = "Option::deserialize")]
    pod_device_entries: Option<Vec<CheckpointEntry>>,
}

/// The devices of one resource that a container holds.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct CheckpointEntry {
    #[serde(rename = "PodUID")]
    pod_uid: String,
    container_name: String,
    resource_name: String,
    /// Device ids by NUMA node; a device with two NUMA nodes is listed twice.
    #[serde(rename = "DeviceIDs")]
    device_ids: Option<BTreeMap<String, Option<Vec<String>>>>,
    /// The plugin's answer to `Allocate`, in base64. `null` if it was empty.
    alloc_resp: Option<String>,
}

impl CheckpointEntry {
    /// Returns the holder, or `None` if the answer is not the agent's.
    fn holder(self) -> Option<DeviceHolder> {
        let devices = cdi_devices(self.alloc_resp.as_deref()?)?;
        let key = devices.iter().find_map(|device| key_of_cdi_device(device))?;
        let ids =
            self.device_ids.unwrap_or_default().into_values().flatten().flatten().map(DeviceId).collect();
        Some(DeviceHolder {
            uid: self.pod_uid.into(),
            container: self.container_name.into(),
            resource: self.resource_name,
            ids,
            key: Some(key),
            shared: devices.iter().any(|device| device == SHARED_DEVICE),
            name: None,
        })
    }
}

/// Decodes the CDI devices of an answer; `None` if it is malformed.
fn cdi_devices(answer: &str) -> Option<Vec<String>> {
    let answer = STANDARD.decode(answer).ok()?;
    let answer = ContainerAllocateResponse::decode(answer.as_slice()).ok()?;
    Some(answer.cdi_devices.into_iter().map(|device| device.name).collect())
}

#[cfg(test)]
mod tests;
