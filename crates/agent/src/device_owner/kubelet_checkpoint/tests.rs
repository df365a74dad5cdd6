#![allow(clippy::unwrap_used)]

use super::*;
use crate::containers::ContainerKey;
use crate::device_plugin::cdi_device;
use partage_kubelet_api::deviceplugin::CdiDevice;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// An answer of a plugin, as kubelet stores it.
fn answer(devices: &[String]) -> String {
    let cdi_devices = devices.iter().map(|name| CdiDevice { name: name.clone() }).collect();
    STANDARD.encode(ContainerAllocateResponse { cdi_devices, ..Default::default() }.encode_to_vec())
}

fn entry(holder: &DeviceHolder) -> CheckpointEntry {
    // A device with two NUMA nodes is written under both.
    let ids: Vec<String> = holder.ids.iter().map(|id| id.0.clone()).collect();
    let half = ids.len() / 2;
    let by_node = [("0".to_string(), Some(ids[half..].to_vec())), ("1".to_string(), Some(ids.clone()))];
    CheckpointEntry {
        pod_uid: holder.uid.to_string(),
        container_name: holder.container.to_string(),
        resource_name: holder.resource.clone(),
        device_ids: Some(BTreeMap::from(by_node)),
        alloc_resp: holder.key.as_ref().map(|key| {
            let shared = holder.shared.then(|| SHARED_DEVICE.to_string());
            answer(&[cdi_device(key)].into_iter().chain(shared).collect::<Vec<_>>())
        }),
    }
}

fn holder() -> impl Strategy<Value = DeviceHolder> {
    let ids = prop::collection::btree_set("[a-z0-9-]{1,20}", 0..6);
    ("[a-f0-9-]{1,36}", "[a-z]{1,10}", "[a-z.]{1,10}/[a-z]{1,8}", ids, "[0-9a-f]{32}", any::<bool>())
        .prop_map(|(uid, container, resource, ids, key, shared)| DeviceHolder {
            uid: uid.into(),
            container: container.into(),
            resource,
            ids: ids.into_iter().map(DeviceId).collect(),
            key: Some(ContainerKey(key)),
            shared,
            name: None,
        })
}

fn file(entries: Vec<CheckpointEntry>) -> Vec<u8> {
    serde_json::to_vec(&CheckpointFile { data: CheckpointData { pod_device_entries: Some(entries) } })
        .unwrap()
}

proptest! {
    #[test]
    fn encoded_checkpoint_is_parsed(expected in prop::collection::vec(holder(), 0..8)) {
        let read = holders(&file(expected.iter().map(entry).collect())).unwrap();
        prop_assert_eq!(read, expected);
    }

    #[test]
    fn any_bytes_are_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
        let _ = holders(&bytes);
    }

    /// Random bytes are seldom JSON; a checkpoint with a few wrong bytes often is.
    #[test]
    fn damaged_checkpoint_is_parsed_or_refused(
        holder in holder(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        end in any::<prop::sample::Index>(),
    ) {
        let mut bytes = file(vec![entry(&holder)]);
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = holders(&bytes);
        let _ = holders(&bytes[..end.index(bytes.len())]);
    }

    /// Only a complete key makes an entry the agent's.
    #[test]
    fn only_complete_keys_are_accepted(device in "(partage\\.dev/grant=)?[0-9a-fA-F]{30,34}") {
        let ours = device.strip_prefix("partage.dev/grant=");
        let ours = ours.filter(|name| name.len() == 32 && name.to_lowercase() == *name);
        let devices = cdi_devices(&answer(std::slice::from_ref(&device))).unwrap();
        let key = devices.iter().find_map(|device| key_of_cdi_device(device));
        prop_assert_eq!(key.map(|key| key.0), ours.map(String::from));
    }
}

/// Written by kubelet 1.36 for two pods, one of them with an init container that passed its device on.
const REAL: &str = include_str!("real.json");

#[test]
fn checkpoint_of_a_real_kubelet_is_parsed() {
    let read = holders(REAL.as_bytes()).unwrap();
    let found: BTreeSet<(&str, usize)> =
        read.iter().map(|holder| (holder.container.as_str(), holder.ids.len())).collect();
    assert_eq!(found, BTreeSet::from([("fetch", 1), ("main", 1), ("wide", 2)]));
    let keys: BTreeSet<&ContainerKey> = read.iter().filter_map(|holder| holder.key.as_ref()).collect();
    assert_eq!(keys.len(), 3);
}

#[test]
fn entries_of_other_plugins_are_skipped() {
    let ours = ContainerKey("0123456789abcdef0123456789abcdef".into());
    let text = format!(
        r#"{{"Data": {{"PodDeviceEntries": [
            {{"PodUID": "u1", "ContainerName": "a", "ResourceName": "x/y", "DeviceIDs": null, "AllocResp": null}},
            {{"PodUID": "u2", "ContainerName": "b", "ResourceName": "x/y", "DeviceIDs": {{"-1": null}}, "AllocResp": "!"}},
            {{"PodUID": "u3", "ContainerName": "c", "ResourceName": "x/y", "DeviceIDs": {{"-1": ["d"]}}, "AllocResp": "{}"}},
            {{"PodUID": "u4", "ContainerName": "d", "ResourceName": "x/y", "DeviceIDs": {{"-1": ["e"]}}, "AllocResp": "{}"}}
        ], "RegisteredDevices": {{}}}}, "Checksum": 1}}"#,
        answer(&["nvidia.com/gpu=0".to_string()]),
        answer(&["nvidia.com/gpu=0".to_string(), cdi_device(&ours)]),
    );
    let read = holders(text.as_bytes()).unwrap();
    assert_eq!(read.len(), 1);
    assert_eq!((read[0].uid.as_str(), read[0].key.as_ref()), ("u4", Some(&ours)));
}

#[test]
fn empty_checkpoint_is_not_an_error() {
    assert_eq!(holders(br#"{"Data": {"PodDeviceEntries": null}, "Checksum": 1}"#).unwrap(), []);
    // The format of kubelet before 1.20, a torn file, and another document.
    let old = r#"{"Data": {"PodDeviceEntries": [{"PodUID": "u", "ContainerName": "c", "ResourceName": "r", "DeviceIDs": ["a"], "AllocResp": ""}]}}"#;
    for text in [old, r#"{"Data":{"PodDev"#, r#"{"Data": {"Other": []}}"#, "[]", "{}", ""] {
        assert!(holders(text.as_bytes()).is_err(), "{text}");
    }
}

#[test]
fn unreadable_file_is_none_until_it_can_be_read() {
    let kubelet = tempfile::tempdir().unwrap();
    let checkpoint = KubeletCheckpoint::new(kubelet.path());
    assert_eq!(checkpoint.holders(), None);
    std::fs::create_dir(kubelet.path().join("device-plugins")).unwrap();
    std::fs::write(&checkpoint.path, "{").unwrap();
    assert_eq!(checkpoint.holders(), None);
    std::fs::write(&checkpoint.path, file(Vec::new())).unwrap();
    assert_eq!(checkpoint.holders(), Some(Vec::new()));
    assert_eq!(*checkpoint.last_error.lock().unwrap(), None, "the next error is logged again");
}
