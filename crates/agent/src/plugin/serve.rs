//! What kubelet asks of a plugin.

use super::{DeviceId, Giver, Listed, Refusal, Shared};
use partage_kubelet_api::deviceplugin::device_plugin_server::DevicePlugin;
use partage_kubelet_api::deviceplugin::{self as contract, Empty, HEALTHY, UNHEALTHY};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

/// Kubelet gives any free device: they are all alike until they are granted.
pub(super) const OPTIONS: contract::DevicePluginOptions =
    contract::DevicePluginOptions { pre_start_required: true, get_preferred_allocation_available: false };

pub(super) struct Service<G> {
    pub(super) shared: Arc<Shared<G>>,
    /// Changes, or closes, when the streams that are open have to end.
    pub(super) streams: watch::Receiver<()>,
}

#[tonic::async_trait]
impl<G: Giver> DevicePlugin for Service<G> {
    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<contract::DevicePluginOptions>, Status> {
        Ok(Response::new(OPTIONS))
    }

    type ListAndWatchStream = ReceiverStream<Result<contract::ListAndWatchResponse, Status>>;

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let (send, receive) = mpsc::channel(1);
        let (shared, mut end) = (self.shared.clone(), self.streams.clone());
        end.mark_unchanged();
        tokio::spawn(async move {
            let open = Open::new(&shared.watched);
            shared.opened.fetch_add(1, Ordering::SeqCst);
            let mut devices = shared.devices.clone();
            loop {
                let list = listed(&devices.borrow_and_update());
                if send.send(Ok(list)).await.is_err() {
                    break;
                }
                tokio::select! {
                    () = changed(&mut devices) => {}
                    () = send.closed() => break,
                    _ = end.changed() => break,
                }
            }
            drop(open);
        });
        Ok(Response::new(ReceiverStream::new(receive)))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<contract::PreferredAllocationRequest>,
    ) -> Result<Response<contract::PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("any device is as good as any other"))
    }

    async fn allocate(
        &self,
        request: Request<contract::AllocateRequest>,
    ) -> Result<Response<contract::AllocateResponse>, Status> {
        let mut container_responses = Vec::new();
        for ask in request.into_inner().container_requests {
            let answer = self.shared.giver.allocate(&self.shared.resource, ids(ask.devices_ids)).await;
            let devices = self.shared.giver.cdi_devices(&answer.map_err(refused)?);
            container_responses.push(named(devices));
        }
        Ok(Response::new(contract::AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<contract::PreStartContainerRequest>,
    ) -> Result<Response<contract::PreStartContainerResponse>, Status> {
        let ids = ids(request.into_inner().devices_ids);
        self.shared.giver.start(&self.shared.resource, ids).await.map_err(refused)?;
        Ok(Response::new(contract::PreStartContainerResponse {}))
    }
}

/// One open stream, counted for as long as this lives.
struct Open<'a>(&'a watch::Sender<usize>);

impl<'a> Open<'a> {
    fn new(watched: &'a watch::Sender<usize>) -> Open<'a> {
        watched.send_modify(|streams| *streams += 1);
        Open(watched)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|streams| *streams -= 1);
    }
}

/// Returns when the list has changed. If nobody can change it any more it never does.
async fn changed(devices: &mut watch::Receiver<Vec<Listed>>) {
    if devices.changed().await.is_err() {
        std::future::pending().await
    }
}

fn listed(devices: &[Listed]) -> contract::ListAndWatchResponse {
    let device = |device: &Listed| contract::Device {
        id: device.id.0.clone(),
        health: if device.healthy { HEALTHY } else { UNHEALTHY }.to_string(),
        topology: None,
    };
    contract::ListAndWatchResponse { devices: devices.iter().map(device).collect() }
}

fn ids(ids: Vec<String>) -> BTreeSet<DeviceId> {
    ids.into_iter().map(DeviceId).collect()
}

fn named(devices: Vec<String>) -> contract::ContainerAllocateResponse {
    let cdi_devices = devices.into_iter().map(|name| contract::CdiDevice { name }).collect();
    contract::ContainerAllocateResponse { cdi_devices, ..Default::default() }
}

fn refused(refusal: Refusal) -> Status {
    Status::failed_precondition(refusal.0)
}
