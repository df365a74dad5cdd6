//! Kubelet and the runtime in states that a real node passes through too fast to test.
#![allow(clippy::unwrap_used)]

use super::pod_resources::tests::RateLimitedKubelet;
use super::*;
use crate::device_plugin::cdi_device;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use partage_kubelet_api::cri::runtime_service_server::{RuntimeService, RuntimeServiceServer};
use partage_kubelet_api::cri::{self, PodSandboxState};
use partage_kubelet_api::deviceplugin::{CdiDevice, ContainerAllocateResponse};
use partage_kubelet_api::unix;
use prost::Message;
use serde_json::json;
use std::fs;
use std::sync::{Arc, Mutex};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// A runtime with the sandboxes that a test sets.
#[derive(Clone, Default)]
struct FakeSandboxes(Arc<Mutex<Vec<cri::PodSandbox>>>);

impl FakeSandboxes {
    /// Sets the sandboxes: each is a name, a UID, whether it is ready, and when it was created.
    fn set(&self, sandboxes: &[(&str, &str, bool, i64)]) {
        let sandbox = |&(name, uid, ready, created_at): &(&str, &str, bool, i64)| cri::PodSandbox {
            id: uid.into(),
            metadata: Some(cri::PodSandboxMetadata {
                name: name.into(),
                uid: uid.into(),
                namespace: "team".into(),
                attempt: 0,
            }),
            state: if ready { PodSandboxState::SandboxReady } else { PodSandboxState::SandboxNotready }
                .into(),
            created_at,
        };
        *self.0.lock().unwrap() = sandboxes.iter().map(sandbox).collect();
    }
}

#[tonic::async_trait]
impl RuntimeService for FakeSandboxes {
    async fn list_pod_sandbox(
        &self,
        _: Request<cri::ListPodSandboxRequest>,
    ) -> Result<Response<cri::ListPodSandboxResponse>, Status> {
        Ok(Response::new(cri::ListPodSandboxResponse { items: self.0.lock().unwrap().clone() }))
    }

    async fn version(
        &self,
        _: Request<cri::VersionRequest>,
    ) -> Result<Response<cri::VersionResponse>, Status> {
        Err(Status::unimplemented("not used here"))
    }

    async fn status(&self, _: Request<cri::StatusRequest>) -> Result<Response<cri::StatusResponse>, Status> {
        Err(Status::unimplemented("not used here"))
    }

    async fn list_containers(
        &self,
        _: Request<cri::ListContainersRequest>,
    ) -> Result<Response<cri::ListContainersResponse>, Status> {
        Err(Status::unimplemented("not used here"))
    }
}

async fn node(folder: &Path) -> (DeviceOwners, FakeSandboxes) {
    let sandboxes = FakeSandboxes::default();
    let socket = folder.join("containerd.sock");
    let listener = unix::listen(&socket).await.unwrap();
    let server = RuntimeServiceServer::new(sandboxes.clone());
    tokio::spawn(Server::builder().serve_with_incoming(server, listener));
    (DeviceOwners::new(folder, ContainerRuntime::new(&socket)), sandboxes)
}

/// Writes a checkpoint in which each of these pods holds the same device.
fn write_checkpoint(kubelet: &Path, uids: &[&str]) {
    write_checkpoint_of(kubelet, uids, &["a1"]);
}

fn write_checkpoint_of(kubelet: &Path, uids: &[&str], ids: &[&str]) {
    let entry = |(number, uid): (usize, &&str)| {
        let cdi_devices = vec![CdiDevice { name: cdi_device(&ContainerKey(format!("{number:032x}"))) }];
        let answer = ContainerAllocateResponse { cdi_devices, ..Default::default() };
        let answer = STANDARD.encode(answer.encode_to_vec());
        json!({"PodUID": uid, "ContainerName": "main", "ResourceName": "example.com/gpu", "DeviceIDs": {"-1": ids},
               "AllocResp": answer})
    };
    let entries: Vec<_> = uids.iter().enumerate().map(entry).collect();
    fs::create_dir_all(kubelet.join("device-plugins")).unwrap();
    let path = kubelet.join("device-plugins/kubelet_internal_checkpoint");
    fs::write(path, json!({"Data": {"PodDeviceEntries": entries}}).to_string()).unwrap();
}

fn uids(holders: Vec<DeviceHolder>) -> Vec<String> {
    holders.into_iter().map(|holder| holder.uid.to_string()).collect()
}

#[tokio::test]
async fn device_of_two_pods_belongs_to_the_one_with_a_ready_sandbox() {
    let folder = tempfile::tempdir().unwrap();
    let (kubelet, sandboxes) = node(folder.path()).await;
    write_checkpoint(folder.path(), &["old", "new"]);
    let device = BTreeSet::from([DeviceId("a1".into())]);
    let holders_of = || kubelet.holders("example.com/gpu", &device, None);
    sandboxes.set(&[("train", "old", false, 1), ("train", "new", true, 2), ("other", "x", true, 3)]);
    assert_eq!(uids(holders_of().await.unwrap()), ["new"]);
    for both_or_none in [true, false] {
        sandboxes.set(&[("train", "old", both_or_none, 1), ("train", "new", both_or_none, 2)]);
        let error = holders_of().await.unwrap_err();
        assert!(matches!(error, DeviceOwnerError::Ambiguous { .. }));
        assert!(
            error.to_string().starts_with("kubelet has allocated a1 of example.com/gpu to the pods new, old"),
            "{error}"
        );
    }
    // A single pod needs no sandbox: the key in its answer is the agent's.
    write_checkpoint(folder.path(), &["old"]);
    assert_eq!(uids(holders_of().await.unwrap()), ["old"]);
}

#[tokio::test]
async fn without_a_checkpoint_the_newest_ready_sandbox_has_the_uid() {
    let folder = tempfile::tempdir().unwrap();
    let (kubelet, sandboxes) = node(folder.path()).await;
    RateLimitedKubelet::default().serve(folder.path()).await;
    let devices = BTreeSet::from([DeviceId("a1".into()), DeviceId("b1".into())]);
    let holders_of = || kubelet.holders("example.com/gpu", &devices, None);
    sandboxes.set(&[
        ("train-1", "older", true, 1),
        ("train-1", "newest", true, 3),
        ("train-1", "old", true, 2),
        ("train-1", "ended", false, 4),
        ("train-2", "other", true, 5),
    ]);
    let holders = holders_of().await.unwrap();
    assert_eq!(holders[0].name, Some(("team".into(), "train-1".into())));
    assert_eq!(holders[0].key, None);
    assert_eq!(uids(holders), ["newest"]);
    sandboxes.set(&[("train-1", "ended", false, 4)]);
    let error = holders_of().await.unwrap_err();
    assert!(matches!(error, DeviceOwnerError::SandboxNotReady { .. }));
    assert!(error.to_string().contains("no ready sandbox for team/train-1"), "{error}");
    // PodResources is used if the checkpoint does not have the devices.
    write_checkpoint(folder.path(), &["u"]);
    sandboxes.set(&[("train-1", "newest", true, 3)]);
    assert_eq!(uids(holders_of().await.unwrap()), ["newest"]);
}

#[tokio::test]
async fn checkpoint_without_the_newest_answer_is_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let (kubelet, sandboxes) = node(folder.path()).await;
    RateLimitedKubelet::default().serve(folder.path()).await;
    sandboxes.set(&[("train-1", "new", true, 3)]);
    let devices = BTreeSet::from([DeviceId("a1".into()), DeviceId("b1".into())]);
    write_checkpoint_of(folder.path(), &["old"], &["a1", "b1"]);
    let holders_of = async |newest: &str| {
        let newest = ContainerKey(newest.into());
        uids(kubelet.holders("example.com/gpu", &devices, Some(&newest)).await.unwrap())
    };
    assert_eq!(holders_of(&format!("{:032x}", 0)).await, ["old"], "it has the newest answer");
    assert_eq!(holders_of("another").await, ["new"], "PodResources has the current holder");
}
