//! Calls every service over a socket, restarts servers, and sends invalid bytes.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use partage_kubelet_api::cri::runtime_service_client::RuntimeServiceClient;
use partage_kubelet_api::cri::runtime_service_server::{RuntimeService, RuntimeServiceServer};
use partage_kubelet_api::cri::{self};
use partage_kubelet_api::deviceplugin::device_plugin_client::DevicePluginClient;
use partage_kubelet_api::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use partage_kubelet_api::deviceplugin::registration_client::RegistrationClient;
use partage_kubelet_api::deviceplugin::registration_server::{Registration, RegistrationServer};
use partage_kubelet_api::deviceplugin::{self as plugin, Empty, HEALTHY, UNHEALTHY, VERSION};
use partage_kubelet_api::podresources::pod_resources_lister_client::PodResourcesListerClient;
use partage_kubelet_api::podresources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use partage_kubelet_api::podresources::{self as resources};
use partage_kubelet_api::unix::{self, SocketError, SocketFile};
use proptest::prelude::*;
use prost::Message;
use std::collections::HashMap;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use tokio::sync::{oneshot, watch};
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status};

/// Serves every call and records registrations.
#[derive(Clone)]
struct FakeNode {
    registered: Arc<Mutex<Vec<plugin::RegisterRequest>>>,
    health: watch::Sender<&'static str>,
}

#[tonic::async_trait]
impl Registration for FakeNode {
    async fn register(&self, request: Request<plugin::RegisterRequest>) -> Result<Response<Empty>, Status> {
        self.registered.lock().unwrap().push(request.into_inner());
        Ok(Response::new(Empty {}))
    }
}

fn options() -> plugin::DevicePluginOptions {
    plugin::DevicePluginOptions { pre_start_required: true, get_preferred_allocation_available: true }
}

fn allocated(ids: &[String]) -> plugin::ContainerAllocateResponse {
    plugin::ContainerAllocateResponse {
        envs: HashMap::from([("IDS".to_string(), ids.join(","))]),
        mounts: vec![plugin::Mount {
            container_path: "/in".into(),
            host_path: "/out".into(),
            read_only: true,
        }],
        devices: vec![plugin::DeviceSpec {
            container_path: "/dev/in".into(),
            host_path: "/dev/out".into(),
            permissions: "rw".into(),
        }],
        annotations: HashMap::from([("a".to_string(), "b".to_string())]),
        cdi_devices: vec![plugin::CdiDevice { name: "example.com/late=n".into() }],
    }
}

#[tonic::async_trait]
impl DevicePlugin for FakeNode {
    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<plugin::DevicePluginOptions>, Status> {
        Ok(Response::new(options()))
    }

    type ListAndWatchStream =
        Pin<Box<dyn Stream<Item = Result<plugin::ListAndWatchResponse, Status>> + Send + 'static>>;

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let list = WatchStream::new(self.health.subscribe()).map(|health| {
            let topology = Some(plugin::TopologyInfo { nodes: vec![plugin::NumaNode { id: 1 }] });
            let device = plugin::Device { id: "a".into(), health: health.into(), topology };
            Ok(plugin::ListAndWatchResponse { devices: vec![device] })
        });
        Ok(Response::new(Box::pin(list)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<plugin::PreferredAllocationRequest>,
    ) -> Result<Response<plugin::PreferredAllocationResponse>, Status> {
        let answer = |ask: plugin::ContainerPreferredAllocationRequest| {
            let ids = ask.must_include_device_i_ds.into_iter().chain(ask.available_device_i_ds);
            let device_i_ds = ids.take(ask.allocation_size as usize).collect();
            plugin::ContainerPreferredAllocationResponse { device_i_ds }
        };
        let container_responses = request.into_inner().container_requests.into_iter().map(answer).collect();
        Ok(Response::new(plugin::PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<plugin::AllocateRequest>,
    ) -> Result<Response<plugin::AllocateResponse>, Status> {
        let asks = request.into_inner().container_requests;
        let container_responses = asks.iter().map(|ask| allocated(&ask.devices_ids)).collect();
        Ok(Response::new(plugin::AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<plugin::PreStartContainerRequest>,
    ) -> Result<Response<plugin::PreStartContainerResponse>, Status> {
        if request.into_inner().devices_ids.is_empty() {
            Err(Status::failed_precondition("no capacity on this node"))
        } else {
            Ok(Response::new(plugin::PreStartContainerResponse {}))
        }
    }
}

fn pod() -> resources::PodResources {
    let topology = Some(resources::TopologyInfo { nodes: vec![resources::NumaNode { id: 1 }] });
    let container = resources::ContainerResources {
        name: "main".into(),
        devices: vec![resources::ContainerDevices {
            resource_name: "example.com/late".into(),
            device_ids: vec!["a".into()],
            topology: topology.clone(),
        }],
        cpu_ids: vec![0, 3],
        memory: vec![resources::ContainerMemory { memory_type: "memory".into(), size: 1 << 40, topology }],
        dynamic_resources: vec![resources::DynamicResource {
            claim_name: "claim".into(),
            claim_namespace: "team".into(),
            claim_resources: vec![resources::ClaimResource {
                cdi_devices: vec![resources::CdiDevice { name: "example.com/late=n".into() }],
                driver_name: "driver".into(),
                pool_name: "pool".into(),
                device_name: "device".into(),
                share_id: Some("share".into()),
            }],
        }],
    };
    resources::PodResources { name: "train".into(), namespace: "team".into(), containers: vec![container] }
}

#[tonic::async_trait]
impl PodResourcesLister for FakeNode {
    async fn list(
        &self,
        _: Request<resources::ListPodResourcesRequest>,
    ) -> Result<Response<resources::ListPodResourcesResponse>, Status> {
        Ok(Response::new(resources::ListPodResourcesResponse { pod_resources: vec![pod()] }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<resources::AllocatableResourcesRequest>,
    ) -> Result<Response<resources::AllocatableResourcesResponse>, Status> {
        let container = pod().containers.remove(0);
        Ok(Response::new(resources::AllocatableResourcesResponse {
            devices: container.devices,
            cpu_ids: container.cpu_ids,
            memory: container.memory,
        }))
    }

    async fn get(
        &self,
        request: Request<resources::GetPodResourcesRequest>,
    ) -> Result<Response<resources::GetPodResourcesResponse>, Status> {
        let request = request.into_inner();
        match (request.pod_namespace.as_str(), request.pod_name.as_str()) {
            ("team", "train") => {
                Ok(Response::new(resources::GetPodResourcesResponse { pod_resources: Some(pod()) }))
            }
            (namespace, name) => Err(Status::not_found(format!("no pod {namespace}/{name}"))),
        }
    }
}

fn sandbox() -> cri::PodSandbox {
    let metadata =
        cri::PodSandboxMetadata { name: "n".into(), uid: "u".into(), namespace: "s".into(), attempt: 1 };
    let state = cri::PodSandboxState::SandboxNotready.into();
    cri::PodSandbox { id: "a".into(), metadata: Some(metadata), state, created_at: 2 }
}

fn container() -> cri::Container {
    cri::Container {
        id: "a".into(),
        pod_sandbox_id: "b".into(),
        metadata: Some(cri::ContainerMetadata { name: "c".into(), attempt: 1 }),
        state: cri::ContainerState::ContainerExited.into(),
        created_at: 3,
        labels: HashMap::from([("k".to_string(), "v".to_string())]),
    }
}

fn version() -> cri::VersionResponse {
    cri::VersionResponse {
        version: "v".into(),
        runtime_name: "n".into(),
        runtime_version: "2".into(),
        runtime_api_version: "1".into(),
    }
}

#[tonic::async_trait]
impl RuntimeService for FakeNode {
    async fn version(
        &self,
        _: Request<cri::VersionRequest>,
    ) -> Result<Response<cri::VersionResponse>, Status> {
        Ok(Response::new(version()))
    }

    async fn status(
        &self,
        request: Request<cri::StatusRequest>,
    ) -> Result<Response<cri::StatusResponse>, Status> {
        let info = request.into_inner().verbose.then(|| ("k".to_string(), "v".to_string()));
        Ok(Response::new(cri::StatusResponse {
            info: info.into_iter().collect(),
            runtime_handlers: vec![cri::RuntimeHandler { name: "runc".into() }],
        }))
    }

    async fn list_pod_sandbox(
        &self,
        _: Request<cri::ListPodSandboxRequest>,
    ) -> Result<Response<cri::ListPodSandboxResponse>, Status> {
        Ok(Response::new(cri::ListPodSandboxResponse { items: vec![sandbox()] }))
    }

    async fn list_containers(
        &self,
        _: Request<cri::ListContainersRequest>,
    ) -> Result<Response<cri::ListContainersResponse>, Status> {
        Ok(Response::new(cri::ListContainersResponse { containers: vec![container()] }))
    }
}

impl FakeNode {
    fn new() -> FakeNode {
        FakeNode { registered: Arc::default(), health: watch::Sender::new(HEALTHY) }
    }

    /// Serves all services, each on its own socket, until the returned senders are dropped.
    async fn serve(&self, folder: &Path) -> [oneshot::Sender<()>; 4] {
        [
            serve(RegistrationServer::new(self.clone()), &folder.join("registration.sock")).await,
            serve(DevicePluginServer::new(self.clone()), &folder.join("plugin.sock")).await,
            serve(PodResourcesListerServer::new(self.clone()), &folder.join("resources.sock")).await,
            serve(RuntimeServiceServer::new(self.clone()), &folder.join("runtime.sock")).await,
        ]
    }
}

async fn serve<S>(service: S, socket: &Path) -> oneshot::Sender<()>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>>,
    S: Clone + Send + 'static,
    S::Future: Send,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
{
    let listener = unix::listen(socket).await.unwrap();
    let (stop, stopped) = oneshot::channel();
    let stopped = async move { drop(stopped.await) };
    let server = Server::builder().serve_with_incoming_shutdown(service, listener, stopped);
    tokio::spawn(async move { server.await.unwrap() });
    stop
}

#[tokio::test]
async fn plugin_registers_and_serves_every_call() {
    let folder = tempfile::tempdir().unwrap();
    let node = FakeNode::new();
    let _serving = node.serve(folder.path()).await;
    let socket = |name: &str| folder.path().join(name);

    let request = plugin::RegisterRequest {
        version: VERSION.into(),
        endpoint: "late.sock".into(),
        resource_name: "example.com/late".into(),
        options: Some(options()),
    };
    let channel = unix::connect(socket("registration.sock")).await.unwrap();
    RegistrationClient::new(channel).register(request.clone()).await.unwrap();
    assert_eq!(*node.registered.lock().unwrap(), [request]);

    let mut client = DevicePluginClient::new(unix::connect(socket("plugin.sock")).await.unwrap());
    assert_eq!(client.get_device_plugin_options(Empty {}).await.unwrap().into_inner(), options());
    let ask = plugin::ContainerPreferredAllocationRequest {
        available_device_i_ds: vec!["a".into(), "b".into()],
        must_include_device_i_ds: vec!["c".into()],
        allocation_size: 2,
    };
    let ask = plugin::PreferredAllocationRequest { container_requests: vec![ask] };
    let answer = client.get_preferred_allocation(ask).await.unwrap().into_inner();
    assert_eq!(answer.container_responses[0].device_i_ds, ["c", "a"]);
    let ids = vec!["a".to_string(), "b".to_string()];
    let ask = plugin::ContainerAllocateRequest { devices_ids: ids.clone() };
    let ask = plugin::AllocateRequest { container_requests: vec![ask] };
    let answer = client.allocate(ask).await.unwrap().into_inner();
    assert_eq!(answer.container_responses, [allocated(&ids)]);
    client.pre_start_container(plugin::PreStartContainerRequest { devices_ids: ids }).await.unwrap();
}

#[tokio::test]
async fn device_list_is_sent_again_after_every_change() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, node) = (folder.path().join("plugin.sock"), FakeNode::new());
    let _serving = node.serve(folder.path()).await;
    let mut client = DevicePluginClient::new(unix::connect(&socket).await.unwrap());
    let mut lists = client.list_and_watch(Empty {}).await.unwrap().into_inner();
    for health in [HEALTHY, UNHEALTHY, HEALTHY] {
        node.health.send_replace(health);
        let list = lists.message().await.unwrap().unwrap();
        assert_eq!(list.devices[0].health, health);
        assert_eq!(list.devices[0].topology.as_ref().unwrap().nodes[0].id, 1);
    }
}

#[tokio::test]
async fn pod_resources_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    let _serving = FakeNode::new().serve(folder.path()).await;
    let socket = folder.path().join("resources.sock");
    let mut client = PodResourcesListerClient::new(unix::connect(&socket).await.unwrap());
    let list = client.list(resources::ListPodResourcesRequest {}).await.unwrap().into_inner();
    assert_eq!(list.pod_resources, [pod()]);
    let all = client.get_allocatable_resources(resources::AllocatableResourcesRequest {}).await.unwrap();
    assert_eq!(all.into_inner().cpu_ids, [0, 3]);
    let ask = |name: &str| resources::GetPodResourcesRequest {
        pod_name: name.into(),
        pod_namespace: "team".into(),
    };
    assert_eq!(client.get(ask("train")).await.unwrap().into_inner().pod_resources, Some(pod()));
    let refused = client.get(ask("gone")).await.unwrap_err();
    assert_eq!((refused.code(), refused.message()), (Code::NotFound, "no pod team/gone"));
}

#[tokio::test]
async fn runtime_version_status_and_lists_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let _serving = FakeNode::new().serve(folder.path()).await;
    let channel = unix::connect(folder.path().join("runtime.sock")).await.unwrap();
    let mut client = RuntimeServiceClient::new(channel);
    assert_eq!(client.version(cri::VersionRequest::default()).await.unwrap().into_inner(), version());
    for verbose in [false, true] {
        let status = client.status(cri::StatusRequest { verbose }).await.unwrap().into_inner();
        assert_eq!(status.info.len(), usize::from(verbose));
    }
    let sandboxes = client.list_pod_sandbox(cri::ListPodSandboxRequest {}).await.unwrap().into_inner();
    assert_eq!(sandboxes.items, [sandbox()]);
    let containers = client.list_containers(cri::ListContainersRequest {}).await.unwrap().into_inner();
    assert_eq!(containers.containers, [container()]);
}

#[tokio::test]
async fn error_status_keeps_its_message() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, node) = (folder.path().join("plugin.sock"), FakeNode::new());
    let _serving = node.serve(folder.path()).await;
    let mut client = DevicePluginClient::new(unix::connect(&socket).await.unwrap());
    let refused = client.pre_start_container(plugin::PreStartContainerRequest::default()).await.unwrap_err();
    assert_eq!((refused.code(), refused.message()), (Code::FailedPrecondition, "no capacity on this node"));
}

#[tokio::test]
async fn stale_socket_is_replaced_and_served_one_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s.sock");
    assert!(matches!(unix::connect(&socket).await, Err(SocketError::Connect { .. })), "no server listens");
    // A killed process leaves a stale socket.
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let left_behind = SocketFile::at(&socket).unwrap();
    let stop = serve(DevicePluginServer::new(FakeNode::new()), &socket).await;
    assert!(!left_behind.is_in_place());
    assert!(matches!(unix::listen(&socket).await, Err(SocketError::InUse(path)) if path == socket));
    drop(stop);
    while socket.exists() {
        tokio::task::yield_now().await;
    }

    std::fs::write(&socket, "not a socket").unwrap();
    assert!(matches!(unix::listen(&socket).await, Err(SocketError::NotASocket(_))));
    assert_eq!(std::fs::read_to_string(&socket).unwrap(), "not a socket");
}

#[tokio::test]
async fn server_keeps_the_socket_of_its_successor() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s.sock");
    let first = unix::listen(&socket).await.unwrap();
    assert!(first.file().is_in_place());
    std::fs::remove_file(&socket).unwrap();
    assert!(!first.file().is_in_place());
    let second = unix::listen(&socket).await.unwrap();
    drop(first);
    assert!(second.file().is_in_place());
}

#[tokio::test]
async fn channel_reconnects_to_a_restarted_server() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s.sock");
    let stop = serve(DevicePluginServer::new(FakeNode::new()), &socket).await;
    let mut client = DevicePluginClient::new(unix::connect(&socket).await.unwrap());
    client.get_device_plugin_options(Empty {}).await.unwrap();
    drop(stop);
    while socket.exists() {
        tokio::task::yield_now().await;
    }
    let _serving = serve(DevicePluginServer::new(FakeNode::new()), &socket).await;
    // The call on the broken connection may fail; later ones reconnect.
    for _ in 0..100 {
        if client.get_device_plugin_options(Empty {}).await.is_ok() {
            return;
        }
    }
    panic!("the channel did not reconnect");
}

/// Bytes that are not HTTP/2 and a truncated call end only their own connection.
#[tokio::test]
async fn invalid_bytes_end_only_their_connection() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let folder = tempfile::tempdir().unwrap();
    let (socket, node) = (folder.path().join("plugin.sock"), FakeNode::new());
    let _serving = node.serve(folder.path()).await;
    let mut client = DevicePluginClient::new(unix::connect(&socket).await.unwrap());
    for garbage in
        [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 64], &[0xff; 4096], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff"]
    {
        let mut stream = tokio::net::UnixStream::connect(&socket).await.unwrap();
        // The server may close the connection during the write.
        let _ = stream.write_all(garbage).await;
        let _ = stream.shutdown().await;
        let _ = stream.read_to_end(&mut Vec::new()).await;
        client.get_device_plugin_options(Empty {}).await.unwrap();
    }
}

/// Compares encoded bytes: a wrong field number would not be detected between two programs of this project.
#[test]
fn field_numbers_match_kubelet() {
    let bytes = |hex: &str| -> Vec<u8> {
        hex.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect()
    };
    assert_eq!(options().encode_to_vec(), bytes("08 01 10 01"));
    let cdi = plugin::ContainerAllocateResponse {
        cdi_devices: vec![plugin::CdiDevice { name: "n".into() }],
        ..Default::default()
    };
    assert_eq!(cdi.encode_to_vec(), bytes("2a 03 0a 01 6e"));
    let topology = Some(plugin::TopologyInfo { nodes: vec![plugin::NumaNode { id: 2 }] });
    let device = plugin::Device { id: "a".into(), health: "h".into(), topology };
    assert_eq!(device.encode_to_vec(), bytes("0a 01 61 12 01 68 1a 04 0a 02 08 02"));
    let register = plugin::RegisterRequest {
        version: "v".into(),
        endpoint: "e".into(),
        resource_name: "r".into(),
        options: Some(Default::default()),
    };
    assert_eq!(register.encode_to_vec(), bytes("0a 01 76 12 01 65 1a 01 72 22 00"));
    let preferred = plugin::ContainerPreferredAllocationRequest {
        available_device_i_ds: vec!["a".into()],
        must_include_device_i_ds: vec!["b".into()],
        allocation_size: 3,
    };
    assert_eq!(preferred.encode_to_vec(), bytes("0a 01 61 12 01 62 18 03"));
    let claim = resources::ClaimResource { share_id: Some(String::new()), ..Default::default() };
    assert_eq!(claim.encode_to_vec(), bytes("2a 00"));
    let dynamic = resources::DynamicResource { claim_name: "c".into(), ..Default::default() };
    assert_eq!(dynamic.encode_to_vec(), bytes("12 01 63"));
    let devices = resources::ContainerDevices {
        resource_name: "r".into(),
        device_ids: vec!["a".into(), "b".into()],
        topology: None,
    };
    assert_eq!(devices.encode_to_vec(), bytes("0a 01 72 12 01 61 12 01 62"));
}

#[test]
fn field_numbers_match_the_runtime() {
    let hex =
        |message: Vec<u8>| message.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ");
    assert_eq!(hex(version().encode_to_vec()), "0a 01 76 12 01 6e 1a 01 32 22 01 31");
    assert_eq!(hex(cri::StatusRequest { verbose: true }.encode_to_vec()), "08 01");
    let info = HashMap::from([("k".to_string(), "v".to_string())]);
    let runtime_handlers = vec![cri::RuntimeHandler { name: "n".into() }];
    assert_eq!(
        hex(cri::StatusResponse { info, runtime_handlers }.encode_to_vec()),
        "12 06 0a 01 6b 12 01 76 1a 03 0a 01 6e"
    );
    assert_eq!(hex(sandbox().encode_to_vec()), "0a 01 61 12 0b 0a 01 6e 12 01 75 1a 01 73 20 01 18 01 20 02");
    assert_eq!(
        hex(container().encode_to_vec()),
        "0a 01 61 12 01 62 1a 05 0a 01 63 10 01 30 02 38 03 42 06 0a 01 6b 12 01 76"
    );
    let list = cri::ListPodSandboxResponse { items: vec![cri::PodSandbox::default()] };
    assert_eq!(hex(list.encode_to_vec()), "0a 00");
    let list = cri::ListContainersResponse { containers: vec![cri::Container::default()] };
    assert_eq!(hex(list.encode_to_vec()), "0a 00");
}

/// Checks that a decoded message is encoded and decoded again to the same message.
fn assert_round_trip<M: Message + Default + PartialEq + std::fmt::Debug>(bytes: &[u8]) {
    if let Ok(message) = M::decode(bytes) {
        assert_eq!(M::decode(message.encode_to_vec().as_slice()).unwrap(), message);
    }
}

fn decode_as_every_message(bytes: &[u8]) {
    assert_round_trip::<plugin::RegisterRequest>(bytes);
    assert_round_trip::<plugin::ListAndWatchResponse>(bytes);
    assert_round_trip::<plugin::PreferredAllocationRequest>(bytes);
    assert_round_trip::<plugin::PreferredAllocationResponse>(bytes);
    assert_round_trip::<plugin::AllocateRequest>(bytes);
    assert_round_trip::<plugin::AllocateResponse>(bytes);
    assert_round_trip::<plugin::ContainerAllocateResponse>(bytes);
    assert_round_trip::<plugin::PreStartContainerRequest>(bytes);
    assert_round_trip::<resources::ListPodResourcesResponse>(bytes);
    assert_round_trip::<resources::GetPodResourcesRequest>(bytes);
    assert_round_trip::<resources::GetPodResourcesResponse>(bytes);
    assert_round_trip::<resources::AllocatableResourcesResponse>(bytes);
    assert_round_trip::<cri::VersionResponse>(bytes);
    assert_round_trip::<cri::StatusResponse>(bytes);
    assert_round_trip::<cri::ListPodSandboxResponse>(bytes);
    assert_round_trip::<cri::ListContainersResponse>(bytes);
}

proptest! {
    #[test]
    fn random_bytes_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
        decode_as_every_message(&bytes);
    }

    /// Random bytes rarely get past the first field; a real message with a few changed bytes reaches nested fields.
    #[test]
    fn damaged_messages_do_not_panic(
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        end in any::<prop::sample::Index>(),
    ) {
        let list = resources::ListPodResourcesResponse { pod_resources: vec![pod(), pod()] };
        let ids = ["a".to_string()];
        let answer = plugin::AllocateResponse { container_responses: vec![allocated(&ids), allocated(&ids)] };
        let runtime = cri::ListContainersResponse { containers: vec![container(), container()] };
        for mut bytes in [list.encode_to_vec(), answer.encode_to_vec(), runtime.encode_to_vec()] {
            for (at, byte) in &damage {
                let at = at.index(bytes.len());
                bytes[at] = *byte;
            }
            bytes.truncate(end.index(bytes.len()) + 1);
            decode_as_every_message(&bytes);
        }
    }
}
