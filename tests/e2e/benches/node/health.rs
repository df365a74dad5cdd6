//! How soon kubelet knows that a GPU is lost, and back: by what it says that it may give.

use crate::{Bench, Table};
use partage_kubelet_api::podresources::AllocatableResourcesRequest;
use partage_kubelet_api::podresources::pod_resources_lister_client::PodResourcesListerClient;
use partage_kubelet_api::unix;
use partage_sim_node::state::Fault;
use std::time::{Duration, Instant};

/// Where kubelet tells what it may give. Its checkpoint would not do: of two resources that change at once the one that changed first may
/// be written last, and then stands there as it was before.
const SOCKET: &str = "/var/lib/kubelet/pod-resources/kubelet.sock";
/// Kubelet answers 100 times a second.
const AGAIN: Duration = Duration::from_millis(12);
/// How often a GPU is lost. The agent asks the driver at its own times: all of these are met.
const TIMES: usize = 20;
const GPUS: usize = 8;
/// How late kubelet may know, in milliseconds.
const LIMIT: f64 = 1000.0;
/// How late it may know before something is broken.
const PATIENCE: Duration = Duration::from_secs(60);

impl Bench<'_> {
    /// GPUs are lost and come back.
    pub(crate) async fn health(&self, table: &mut Table) {
        let gpus = self.stage.agent.gpus().unwrap();
        let all = self.given().await.unwrap();
        let (mut lost, mut back) = (Vec::new(), Vec::new());
        for time in 0..TIMES {
            // Every moment between two of the agent's looks is as good as any other.
            tokio::time::sleep(Duration::from_millis(37 * time as u64)).await;
            gpus.inject(time % GPUS, Fault::Lost);
            lost.push(self.told(all - all / GPUS).await);
            tokio::time::sleep(Duration::from_millis(37 * time as u64)).await;
            gpus.inject(time % GPUS, Fault::Returned);
            back.push(self.told(all).await);
        }
        table.quantiles("a GPU is lost: kubelet gives none of it after", lost, Some(LIMIT));
        table.quantiles("a GPU is back: kubelet gives all of it after", back, Some(LIMIT));
    }

    /// How many milliseconds it takes until kubelet may give so many devices.
    async fn told(&self, devices: usize) -> f64 {
        let begun = Instant::now();
        // Not `eventually`, which looks ten times a second.
        loop {
            let given = self.given().await;
            if given == Some(devices) {
                break;
            }
            assert!(
                begun.elapsed() < PATIENCE,
                "kubelet may give {given:?} devices, and not {devices}\n{}",
                self.stage.agent.log()
            );
            tokio::time::sleep(AGAIN).await;
        }
        begun.elapsed().as_secs_f64() * 1e3
    }

    /// How many devices of all our resources kubelet may give. `None` where it does not say now.
    async fn given(&self) -> Option<usize> {
        let channel = unix::connect(&self.stage.node_path(SOCKET)).await.ok()?;
        let mut kubelet = PodResourcesListerClient::new(channel).max_decoding_message_size(64 << 20);
        let answer = kubelet.get_allocatable_resources(AllocatableResourcesRequest {}).await.ok()?;
        Some(answer.into_inner().devices.iter().map(|one| one.device_ids.len()).sum())
    }
}
