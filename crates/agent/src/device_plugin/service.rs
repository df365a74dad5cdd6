//! The gRPC service that kubelet calls: devices, `Allocate` and `PreStartContainer`.

use super::{DeviceAllocator, DeviceId, ListedDevice, PluginContext, Refusal};
use partage_kubelet_api::deviceplugin::device_plugin_server::DevicePlugin;
use partage_kubelet_api::deviceplugin::{self as contract, Empty, HEALTHY, UNHEALTHY};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

/// Kubelet allocates any free device: all devices are equal until they are granted.
pub(super) const OPTIONS: contract::DevicePluginOptions =
    contract::DevicePluginOptions { pre_start_required: true, get_preferred_allocation_available: false };

/// The service of one resource.
pub(super) struct PluginService<A> {
    pub(super) context: Arc<PluginContext<A>>,
    /// Changes, or closes, when the open streams have to end.
    pub(super) streams: watch::Receiver<()>,
}

#[tonic::async_trait]
impl<A: DeviceAllocator> DevicePlugin for PluginService<A> {
    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<contract::DevicePluginOptions>, Status> {
        Ok(Response::new(OPTIONS))
    }

    type ListAndWatchStream = ReceiverStream<Result<contract::ListAndWatchResponse, Status>>;

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let (send, receive) = mpsc::channel(1);
        let context = self.context.clone();
        let mut end = self.streams.clone();
        end.mark_unchanged();
        tokio::spawn(async move {
            let open = OpenStream::new(&context.streams);
            context.opened.fetch_add(1, Ordering::SeqCst);
            let mut devices = context.devices.clone();
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
        Err(Status::unimplemented("all devices are equal: no allocation is preferred"))
    }

    async fn allocate(
        &self,
        request: Request<contract::AllocateRequest>,
    ) -> Result<Response<contract::AllocateResponse>, Status> {
        let mut container_responses = Vec::new();
        for container in request.into_inner().container_requests {
            let ids = device_ids(container.devices_ids);
            let key = self.context.allocator.allocate(&self.context.resource, ids).await;
            let devices = self.context.allocator.cdi_devices(&key.map_err(status)?);
            container_responses.push(allocate_response(devices));
        }
        Ok(Response::new(contract::AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<contract::PreStartContainerRequest>,
    ) -> Result<Response<contract::PreStartContainerResponse>, Status> {
        let ids = device_ids(request.into_inner().devices_ids);
        let prepared = self.context.allocator.prepare_container(&self.context.resource, ids).await;
        prepared.map_err(status)?;
        Ok(Response::new(contract::PreStartContainerResponse {}))
    }
}

/// Counts an open stream for as long as the value exists.
struct OpenStream<'a>(&'a watch::Sender<usize>);

impl<'a> OpenStream<'a> {
    fn new(streams: &'a watch::Sender<usize>) -> OpenStream<'a> {
        streams.send_modify(|count| *count += 1);
        OpenStream(streams)
    }
}

impl Drop for OpenStream<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

/// Returns when the list has changed; never, if its sender is gone.
async fn changed(devices: &mut watch::Receiver<Vec<ListedDevice>>) {
    if devices.changed().await.is_err() {
        std::future::pending().await
    }
}

fn listed(devices: &[ListedDevice]) -> contract::ListAndWatchResponse {
    let device = |device: &ListedDevice| contract::Device {
        id: device.id.0.clone(),
        health: if device.healthy { HEALTHY } else { UNHEALTHY }.to_string(),
        topology: None,
    };
    contract::ListAndWatchResponse { devices: devices.iter().map(device).collect() }
}

fn device_ids(ids: Vec<String>) -> BTreeSet<DeviceId> {
    ids.into_iter().map(DeviceId).collect()
}

fn allocate_response(devices: Vec<String>) -> contract::ContainerAllocateResponse {
    let cdi_devices = devices.into_iter().map(|name| contract::CdiDevice { name }).collect();
    contract::ContainerAllocateResponse { cdi_devices, ..Default::default() }
}

/// Returns a refusal as kubelet shows it on the pod: the message with its first hint.
fn status(refusal: Refusal) -> Status {
    Status::failed_precondition(refusal.sentence())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device_plugin::RefusalReason;

    #[test]
    fn status_carries_the_message_and_the_first_hint() {
        let refusal = Refusal::new(RefusalReason::NoCapacity, "no GPU has 8 GiB free")
            .with_hints(["request at most 6 GiB".to_string(), "wait".to_string()]);
        let status = status(refusal);
        assert_eq!(status.code(), tonic::Code::FailedPrecondition);
        assert_eq!(status.message(), "no GPU has 8 GiB free; request at most 6 GiB");
    }
}
