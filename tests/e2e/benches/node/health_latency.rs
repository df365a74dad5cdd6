//! Measures how soon kubelet is informed that a GPU is lost or recovered, by the devices that it can allocate.

use crate::{FigureTable, NodeBench};
use partage_kubelet_api::podresources::AllocatableResourcesRequest;
use partage_kubelet_api::podresources::pod_resources_lister_client::PodResourcesListerClient;
use partage_kubelet_api::unix;
use partage_sim_node::state::GpuFault;
use std::time::{Duration, Instant};

/// Socket on which kubelet reports its allocatable devices. Its checkpoint is not suitable: of two resources that
/// change together, the one that changed first may be written last, with its old state.
const POD_RESOURCES_SOCKET: &str = "/var/lib/kubelet/pod-resources/kubelet.sock";
/// Poll interval: kubelet answers at most 100 requests a second.
const POLL_INTERVAL: Duration = Duration::from_millis(12);
/// How often a GPU is lost. The agent polls the driver at its own times, and the losses are spread over its interval.
const LOSS_COUNT: usize = 20;
const GPU_COUNT: usize = 8;
/// Limit for the time until kubelet is informed, in milliseconds.
const MAX_LATENCY_MILLIS: f64 = 1000.0;
/// Time after which the test fails.
const TIMEOUT: Duration = Duration::from_secs(60);

impl NodeBench<'_> {
    /// Measures the loss and recovery of GPUs.
    pub(crate) async fn measure_health(&self, table: &mut FigureTable) {
        let gpus = self.test_node.agent.simulated_gpus().unwrap();
        let all = self.allocatable_devices().await.unwrap();
        let (mut lost, mut back) = (Vec::new(), Vec::new());
        for time in 0..LOSS_COUNT {
            // Spreads the faults over the agent's poll interval.
            tokio::time::sleep(Duration::from_millis(37 * time as u64)).await;
            gpus.inject(time % GPU_COUNT, GpuFault::Lost);
            lost.push(self.wait_for_devices(all - all / GPU_COUNT).await);
            tokio::time::sleep(Duration::from_millis(37 * time as u64)).await;
            gpus.inject(time % GPU_COUNT, GpuFault::Returned);
            back.push(self.wait_for_devices(all).await);
        }
        table.quantiles("a GPU is lost: kubelet stops allocating it after", lost, Some(MAX_LATENCY_MILLIS));
        table.quantiles(
            "a GPU is recovered: kubelet allocates it again after",
            back,
            Some(MAX_LATENCY_MILLIS),
        );
    }

    /// Returns the milliseconds until kubelet can allocate this many devices.
    async fn wait_for_devices(&self, devices: usize) -> f64 {
        let begun = Instant::now();
        // Not `eventually`, which polls only ten times a second.
        loop {
            let given = self.allocatable_devices().await;
            if given == Some(devices) {
                break;
            }
            assert!(
                begun.elapsed() < TIMEOUT,
                "kubelet can allocate {given:?} devices, expected {devices}\n{}",
                self.test_node.agent.log()
            );
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        begun.elapsed().as_secs_f64() * 1e3
    }

    /// Returns how many devices of all our resources kubelet can allocate; `None` if it does not respond now.
    async fn allocatable_devices(&self) -> Option<usize> {
        let channel = unix::connect(&self.test_node.node_path(POD_RESOURCES_SOCKET)).await.ok()?;
        let mut kubelet = PodResourcesListerClient::new(channel).max_decoding_message_size(64 << 20);
        let answer = kubelet.get_allocatable_resources(AllocatableResourcesRequest {}).await.ok()?;
        Some(answer.into_inner().devices.iter().map(|one| one.device_ids.len()).sum())
    }
}
