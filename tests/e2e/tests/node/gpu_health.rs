//! A GPU is lost and comes back: pods on another one are not affected, and pods on it wait for it.

use crate::test_node::{TestNode, bed, long_running_pod};
use partage_core::model::GpuLink;
use partage_core::quantity::Quantity;
use partage_sim_node::state::{GpuFault, SimNodeState};
use partage_testkit::agent::SIMULATED_SETTINGS;
use partage_testkit::eventually;

/// What a node with two of these GPUs offers of each resource that kubelet counts.
const DEVICE_COUNTS: [(&str, u32); 6] = [
    ("partage.dev/gpu", 20),
    ("volcano.sh/vgpu-number", 20),
    ("tencent.com/vcuda-core", 200),
    ("inspur.com/vcuda-core", 200),
    ("k8s.amazonaws.com/vgpu", 20),
    ("aliyun.com/gpu-mem", 78),
];

/// The devices that pod `a` of these tests holds.
const HELD_BY_A: (&str, u32) = ("partage.dev/gpu", 1);
const NONE_HELD: (&str, u32) = ("", 0);

#[test]
fn lost_gpu_is_withdrawn_and_restored_also_across_kubelet_restart() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        // Each requests more than half of a GPU.
        for name in ["a", "b"] {
            test_node.apply(&long_running_pod(name, "partage.dev/gpu: 1, partage.dev/memory: 21Gi"));
        }
        for name in ["a", "b"] {
            test_node.wait_until_running(name).await;
        }
        test_node.wait_until_consistent().await;
        let gpu = test_node.wait_for_grant("a").await.grants[0].shares[0].gpu.to_string();
        let (gpus, at) = (test_node.agent.simulated_gpus().unwrap(), test_node.gpu_index(&gpu));

        let both = test_node.allocatable_amount("partage.dev/memory").unwrap();
        gpus.inject(at, GpuFault::Lost);
        test_node.wait_until_gpus_offered(1, HELD_BY_A).await;
        for object in [("Node", "node1"), ("Pod", "a")] {
            test_node.wait_for_event_on(object, "GpuUnhealthy", "XID 79").await;
        }
        test_node.wait_until_listed(at, Some("XID 79")).await;
        // The memory of the healthy GPU plus the request of the pod on the lost one: the scheduler subtracts both pods'
        // requests, and with both requests covered kubelet does not fail the pods when it restarts.
        test_node.wait_for_amount("partage.dev/memory", both / 2 + (21 << 30)).await;
        test_node.exec("b", "/programs/partage-sample trainer --memory 20Gi --seconds 0.5").unwrap();
        test_node.crash_container("a");
        let message = test_node.wait_until_waiting("a", "starts when the GPU recovers").await;
        assert!(message.contains(&gpu) && message.contains("XID 79"), "{message}");
        gpus.inject(at, GpuFault::Returned);
        test_node
            .wait_for_event_on(("Node", "node1"), "GpuRecovered", "has recovered and is offered again")
            .await;
        test_node.wait_until_restarted("a", 1).await;
        test_node.wait_until_gpus_offered(2, NONE_HELD).await;
        test_node.wait_until_consistent().await;

        test_node.check_kubelet_restart_while_lost(&gpus, at).await;
        gpus.inject(at, GpuFault::Returned);
        test_node.wait_until_gpus_offered(2, NONE_HELD).await;
        test_node.wait_until_listed(at, None).await;
        test_node.wait_for_amount("partage.dev/memory", both).await;
        test_node.wait_until_consistent().await;

        bed.kubectl(&["delete", "pods", "--all", "--grace-period=1", "--wait"]).unwrap();
        test_node.wait_until_released().await;
        test_node.check_mig_mode_switch(&gpus, at).await;
    });
}

/// An agent that starts while a GPU does not respond offers what the other one has, as the agent before did, and
/// everything when the GPU is back.
#[test]
fn agent_started_with_a_lost_gpu_offers_the_same_counts() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        // Devices of every number: kubelet may pick any.
        let asks = [("a", "partage.dev/gpu: 1, partage.dev/memory: 21Gi"), ("b", "aliyun.com/gpu-mem: 21")];
        for (name, limits) in asks {
            test_node.apply(&long_running_pod(name, limits));
            test_node.wait_until_running(name).await;
        }
        let gpu_of = async |test_node: &TestNode<'_>, pod| {
            test_node.wait_for_grant(pod).await.grants[0].shares[0].gpu.clone()
        };
        let (lost, left) = (gpu_of(&test_node, "a").await, gpu_of(&test_node, "b").await);
        let (gpus, at) = (test_node.agent.simulated_gpus().unwrap(), test_node.gpu_index(lost.as_str()));
        gpus.inject(at, GpuFault::Lost);
        test_node.wait_until_gpus_offered(1, HELD_BY_A).await;
        test_node.restart_agent().await;
        test_node.wait_until_listed(at, Some("no response since")).await;
        test_node.wait_until_gpus_offered(1, HELD_BY_A).await;
        test_node.apply(&long_running_pod("c", "aliyun.com/gpu-mem: 1"));
        test_node.wait_until_running("c").await;
        assert_eq!(gpu_of(&test_node, "c").await, left);
        test_node.wait_until_consistent().await;
        gpus.inject(at, GpuFault::Returned);
        test_node.wait_for_event_on(("Node", "node1"), "GpusChanged", "responds again").await;
        test_node.wait_until_gpus_offered(2, NONE_HELD).await;
        test_node.wait_until_consistent().await;
    });
}

/// Without a driver nothing is offered, even if kubelet still remembers a device of a deleted pod.
#[test]
fn node_offers_nothing_while_the_driver_is_unloaded() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        for name in ["a", "gone"] {
            test_node.apply(&long_running_pod(name, "partage.dev/gpu: 1, partage.dev/memory: 5Gi"));
            test_node.wait_until_running(name).await;
        }
        // Kubelet remembers its device until it allocates it to another pod.
        test_node.delete_pod("gone");
        let gpus = test_node.agent.simulated_gpus().unwrap();
        gpus.set_loaded(false);
        for (resource, _) in DEVICE_COUNTS {
            test_node.wait_until_offered(resource, Some("0")).await;
        }
        gpus.set_loaded(true);
        for (resource, both) in DEVICE_COUNTS {
            test_node.wait_until_offered(resource, Some(&both.to_string())).await;
        }
        test_node.wait_until_consistent().await;
    });
}

impl TestNode<'_> {
    async fn check_kubelet_restart_while_lost(&self, gpus: &SimNodeState, at: usize) {
        let containers = |test_node: &Self| {
            ["a", "b"].map(|name| {
                test_node.get_object("pod", name).unwrap()["status"]["containerStatuses"][0]["containerID"].clone()
            })
        };
        let before = containers(self);
        gpus.inject(at, GpuFault::Lost);
        self.wait_until_gpus_offered(1, HELD_BY_A).await;
        self.restart_kubelet().await;
        self.wait_until_gpus_offered(1, HELD_BY_A).await;
        // The healthy GPU has 39 GiB, of which one pod holds 21: requests on the lost one take nothing from it.
        self.apply(&long_running_pod("c", "partage.dev/gpu: 1, partage.dev/memory: 18Gi"));
        self.wait_until_running("c").await;
        assert_eq!(containers(self), before, "running containers keep running");
        let beside = self.wait_for_grant("b").await.grants[0].shares[0].gpu.clone();
        assert_eq!(
            self.wait_for_grant("c").await.grants[0].shares[0].gpu,
            beside,
            "no pod is placed on a lost GPU"
        );
    }

    /// A GPU in MIG mode is listed with the reason and not offered. The agent notices both changes of the mode and
    /// counts again.
    async fn check_mig_mode_switch(&self, gpus: &SimNodeState, at: usize) {
        let expected = "MIG mode is enabled, and MIG instances cannot be shared further";
        gpus.inject(at, GpuFault::Mig(true));
        self.wait_for_event_on(("Node", "node1"), "GpusChanged", "was enabled").await;
        self.wait_for_event_on(("Node", "node1"), "GpuNotOffered", expected).await;
        self.wait_until_listed(at, Some(expected)).await;
        self.wait_until_gpus_offered(1, NONE_HELD).await;
        self.wait_until_ready().await;
        let offered = self.inventory().unwrap().gpus[1 - at].uuid.clone();
        for name in ["d", "e"] {
            self.apply(&long_running_pod(name, "partage.dev/gpu: 1, partage.dev/memory: 15Gi"));
            self.wait_until_running(name).await;
            assert_eq!(self.wait_for_grant(name).await.grants[0].shares[0].gpu, offered);
        }
        gpus.inject(at, GpuFault::Mig(false));
        self.wait_for_event_on(("Node", "node1"), "GpusChanged", "was disabled").await;
        self.wait_until_listed(at, None).await;
        self.wait_until_gpus_offered(2, NONE_HELD).await;
        self.wait_until_consistent().await;
    }

    /// Waits until the inventory shows this state of a GPU, at its index; the links between the GPUs must be in it,
    /// too.
    async fn wait_until_listed(&self, at: usize, withheld: Option<&str>) {
        eventually(&format!("GPU {at} is listed as {withheld:?}"), async || {
            let node = self.inventory()?;
            let right = match (&node.gpus[at].withheld, withheld) {
                (Some(output), Some(words)) => output.contains(words),
                (output, words) => output.is_none() && words.is_none(),
            };
            // Two of these GPUs have links to each other.
            let linked = node.links.is_some() && node.link(0, 1) == GpuLink::NvLink;
            if right && linked { Ok(()) } else { Err(format!("{node:?}\n{}", self.agent.log())) }
        })
        .await;
    }

    /// Waits until the node offers what this number of its two GPUs have, plus the devices that pods hold on the other
    /// one.
    async fn wait_until_gpus_offered(&self, gpus: u32, held: (&str, u32)) {
        for (resource, both) in DEVICE_COUNTS {
            let held = if resource == held.0 { held.1 } else { 0 };
            self.wait_until_offered(resource, Some(&(both / 2 * gpus + held).to_string())).await;
        }
    }

    /// Waits until the node offers this amount of a resource.
    pub(crate) async fn wait_for_amount(&self, resource: &str, amount: u64) {
        eventually(&format!("the node offers {amount} of {resource}"), async || {
            match self.allocatable_amount(resource) {
                Ok(has) if has == amount => Ok(()),
                has => Err(format!("{has:?}")),
            }
        })
        .await;
    }

    /// Returns the amount of a resource that the node offers.
    pub(crate) fn allocatable_amount(&self, resource: &str) -> Result<u64, String> {
        let node = self.get_object("node", "node1")?;
        let text = node["status"]["allocatable"][resource].as_str().unwrap_or("0").to_string();
        let amount = text.parse::<Quantity>().and_then(Quantity::to_units);
        amount.map_err(|error| error.to_string())
    }

    /// Returns the index of a GPU in the driver's order, from the node's inventory.
    pub(crate) fn gpu_index(&self, gpu: &str) -> usize {
        self.inventory().unwrap().gpu_index(&gpu.into()).unwrap()
    }
}
