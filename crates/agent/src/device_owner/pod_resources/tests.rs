#![allow(clippy::unwrap_used)]

use super::*;
use partage_kubelet_api::podresources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use partage_kubelet_api::podresources::{self as contract, ContainerDevices, ContainerResources};
use std::sync::atomic::AtomicUsize;
use tonic::transport::Server;
use tonic::{Request, Response};

/// A kubelet with 50 pods that limits the rate of the first lists, which a real one cannot be made to do at a given moment.
#[derive(Clone, Default)]
pub(in crate::device_owner) struct RateLimitedKubelet {
    lists: Arc<AtomicUsize>,
    refuse: Arc<AtomicUsize>,
}

impl RateLimitedKubelet {
    /// Serves in kubelet's directory.
    pub(in crate::device_owner) async fn serve(&self, kubelet: &Path) {
        std::fs::create_dir(kubelet.join("pod-resources")).unwrap();
        let listener = unix::listen(kubelet.join("pod-resources/kubelet.sock")).await.unwrap();
        let server = PodResourcesListerServer::new(self.clone());
        tokio::spawn(Server::builder().serve_with_incoming(server, listener));
    }
}

#[tonic::async_trait]
impl PodResourcesLister for RateLimitedKubelet {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<contract::ListPodResourcesResponse>, Status> {
        self.lists.fetch_add(1, Ordering::SeqCst);
        let refuse = |left: usize| left.checked_sub(1);
        if self.refuse.fetch_update(Ordering::SeqCst, Ordering::SeqCst, refuse).is_ok() {
            return Err(Status::resource_exhausted("rejected by rate limit"));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        let pod = |number: usize| PodResources {
            name: format!("train-{number}"),
            namespace: "team".into(),
            containers: vec![ContainerResources {
                name: "main".into(),
                // One entry for each device, as kubelet sends them.
                devices: [format!("a{number}"), format!("b{number}")]
                    .map(|id| ContainerDevices {
                        resource_name: "example.com/gpu".into(),
                        device_ids: vec![id],
                        topology: None,
                    })
                    .to_vec(),
                ..ContainerResources::default()
            }],
        };
        let pod_resources = (0..50).map(pod).collect();
        Ok(Response::new(contract::ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<contract::AllocatableResourcesRequest>,
    ) -> Result<Response<contract::AllocatableResourcesResponse>, Status> {
        Err(Status::unimplemented("not asked"))
    }

    async fn get(
        &self,
        _: Request<contract::GetPodResourcesRequest>,
    ) -> Result<Response<contract::GetPodResourcesResponse>, Status> {
        Err(Status::unimplemented("not asked"))
    }
}

fn ids(ids: &[&str]) -> BTreeSet<DeviceId> {
    ids.iter().map(|id| DeviceId(id.to_string())).collect()
}

#[tokio::test]
async fn concurrent_callers_share_lists_and_a_rate_limited_list_is_retried() {
    let folder = tempfile::tempdir().unwrap();
    let kubelet = RateLimitedKubelet::default();
    kubelet.refuse.store(3, Ordering::SeqCst);
    kubelet.serve(folder.path()).await;
    let list = Arc::new(PodResourcesList::new(folder.path()));
    let asks: Vec<_> = (0..50)
        .map(|number| {
            let list = list.clone();
            let held = ids(&[&format!("b{number}"), &format!("a{number}")]);
            tokio::spawn(async move { list.holders("example.com/gpu", &held).await })
        })
        .collect();
    for (number, ask) in asks.into_iter().enumerate() {
        let expected = ("team".into(), format!("train-{number}").into(), "main".into());
        assert_eq!(ask.await.unwrap(), Ok(vec![expected]));
    }
    let lists = kubelet.lists.load(Ordering::SeqCst);
    assert!(lists < 50, "{lists} lists for 50 callers");
    // A subset of the devices of a container, or another resource, has no holder.
    for (resource, held) in [("example.com/gpu", ids(&["a1"])), ("example.com/other", ids(&["a1", "b1"]))] {
        assert_eq!(list.holders(resource, &held).await, Ok(Vec::new()));
    }
}

#[tokio::test]
async fn unavailable_kubelet_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let list = PodResourcesList::new(folder.path());
    let refused = list.holders("example.com/gpu", &ids(&["a1"])).await.unwrap_err().to_string();
    assert!(refused.starts_with("kubelet's PodResources API at "), "{refused}");
}
