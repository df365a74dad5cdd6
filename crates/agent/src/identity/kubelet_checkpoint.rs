//! Kubelet's own record of what it gave, `device-plugins/kubelet_internal_checkpoint`. Only read.
//!
//! Its checksum is kubelet's business: a torn file is no JSON, kubelet renames a whole one into its place, and an entry counts
//! only if it carries a name of ours.

use super::Holder;
use crate::plugin::{ContainerKey, DeviceId};
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

#[derive(Debug)]
pub(super) struct Checkpoint {
    path: PathBuf,
    /// What was wrong with it last: the same is not said again.
    complaint: Mutex<Option<String>>,
}

impl Checkpoint {
    /// Of the kubelet with this folder.
    pub(super) fn new(kubelet: &Path) -> Checkpoint {
        let path = kubelet.join("device-plugins/kubelet_internal_checkpoint");
        Checkpoint { path, complaint: Mutex::default() }
    }

    /// When kubelet wrote it, in nanoseconds since 1970.
    pub(super) fn written(&self) -> Option<u64> {
        let at = std::fs::metadata(&self.path).and_then(|file| file.modified()).ok()?;
        u64::try_from(at.duration_since(UNIX_EPOCH).ok()?.as_nanos()).ok()
    }

    /// Who was given what, with our names. `None` where it cannot be read.
    pub(super) fn holders(&self) -> Option<Vec<Holder>> {
        let read = std::fs::read(&self.path).map_err(|error| error.to_string()).and_then(|bytes| {
            holders(&bytes).map_err(|error| format!("not in the shape that is known: {error}"))
        });
        let mut complaint = self.complaint.lock().unwrap_or_else(PoisonError::into_inner);
        match read {
            Ok(holders) => {
                *complaint = None;
                Some(holders)
            }
            Err(why) => {
                if complaint.as_ref() != Some(&why) {
                    let path = self.path.display();
                    if self.path.try_exists().is_ok_and(|exists| !exists) {
                        // As on every new node, before the first pod with a device.
                        tracing::info!(%path, "kubelet has written no checkpoint yet");
                    } else {
                        tracing::warn!(%path, why, "kubelet's checkpoint cannot be read; kubelet and the runtime are asked instead");
                    }
                    *complaint = Some(why);
                }
                None
            }
        }
    }
}

/// The holders in a checkpoint, as far as their names are ours.
fn holders(bytes: &[u8]) -> Result<Vec<Holder>, serde_json::Error> {
    let file: File = serde_json::from_slice(bytes)?;
    Ok(file.data.pod_device_entries.unwrap_or_default().into_iter().filter_map(Entry::holder).collect())
}

/// The file, as far as it matters here.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct File {
    data: Data,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    /// `null` where there are none. A file without it is of another shape: that nothing was given must not be read from it.
    #[serde(deserialize_with = "Option::deserialize")]
    pod_device_entries: Option<Vec<Entry>>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    #[serde(rename = "PodUID")]
    pod_uid: String,
    container_name: String,
    resource_name: String,
    /// By memory node; a device near to two nodes is there twice.
    #[serde(rename = "DeviceIDs")]
    device_ids: Option<BTreeMap<String, Option<Vec<String>>>>,
    /// The plugin's answer, in base64. `null` where it was empty.
    alloc_resp: Option<String>,
}

impl Entry {
    /// `None` where the answer is not ours.
    fn holder(self) -> Option<Holder> {
        let devices = cdi_devices(self.alloc_resp.as_deref()?)?;
        let key = devices.iter().find_map(|device| ContainerKey::of_cdi_device(device))?;
        let ids =
            self.device_ids.unwrap_or_default().into_values().flatten().flatten().map(DeviceId).collect();
        Some(Holder {
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

/// Decodes the CDI devices of an answer; `None` where it is malformed.
fn cdi_devices(answer: &str) -> Option<Vec<String>> {
    let answer = STANDARD.decode(answer).ok()?;
    let answer = ContainerAllocateResponse::decode(answer.as_slice()).ok()?;
    Some(answer.cdi_devices.into_iter().map(|device| device.name).collect())
}

#[cfg(test)]
mod tests;
