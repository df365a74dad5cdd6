//! A GPU is lost and comes back: who is on another one does not notice, and who is on it waits for it.

use crate::stage::{Stage, bed, lasting};
use partage_core::model::Link;
use partage_core::quantity::Quantity;
use partage_sim_node::state::{Fault, State};
use partage_testkit::agent::SETTINGS;
use partage_testkit::eventually;

/// What a node with two of these GPUs gives of each resource that kubelet counts.
const COUNTS: [(&str, u32); 6] = [
    ("partage.dev/gpu", 20),
    ("volcano.sh/vgpu-number", 20),
    ("tencent.com/vcuda-core", 200),
    ("inspur.com/vcuda-core", 200),
    ("k8s.amazonaws.com/vgpu", 20),
    ("aliyun.com/gpu-mem", 78),
];

/// The devices that pod `a` of these tests holds.
const HELD_BY_A: (&str, u32) = ("partage.dev/gpu", 1);
const NOTHING: (&str, u32) = ("", 0);

#[test]
fn a_gpu_is_lost_and_back_while_others_run_and_kubelet_is_restarted() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, SETTINGS).await;
        // More than half of a GPU each.
        for name in ["a", "b"] {
            stage.apply(&lasting(name, "partage.dev/gpu: 1, partage.dev/memory: 21Gi"));
        }
        for name in ["a", "b"] {
            stage.runs(name).await;
        }
        stage.agrees().await;
        let gpu = stage.grant("a").await.grants[0].shares[0].gpu.to_string();
        let (gpus, at) = (stage.agent.gpus().unwrap(), stage.index_of(&gpu));

        let both = stage.has("partage.dev/memory").unwrap();
        gpus.inject(at, Fault::Lost);
        stage.offers_parts(1, HELD_BY_A).await;
        for object in [("Node", "node1"), ("Pod", "a")] {
            stage.told(object, "GpuUnhealthy", "XID 79").await;
        }
        stage.lists(at, Some("XID 79")).await;
        // What the healthy GPU has and what the pod on the lost one requests: the scheduler subtracts both pods' requests, and at
        // what both request kubelet does not fail them when it starts again.
        stage.amount("partage.dev/memory", both / 2 + (21 << 30)).await;
        stage.exec("b", "/programs/partage-sample trainer --memory 20Gi --seconds 0.5").unwrap();
        stage.crash("a");
        let said = stage.waits("a", "it starts by itself when the GPU is well").await;
        assert!(said.contains(&gpu) && said.contains("XID 79"), "{said}");
        gpus.inject(at, Fault::Returned);
        stage.told(("Node", "node1"), "GpuHealthy", "is well again").await;
        stage.restarted("a", 1).await;
        stage.offers_parts(2, NOTHING).await;
        stage.agrees().await;

        stage.kubelet_restarts_while_lost(&gpus, at).await;
        gpus.inject(at, Fault::Returned);
        stage.offers_parts(2, NOTHING).await;
        stage.lists(at, None).await;
        stage.amount("partage.dev/memory", both).await;
        stage.agrees().await;

        bed.kubectl(&["delete", "pods", "--all", "--grace-period=1", "--wait"]).unwrap();
        stage.nothing_is_kept().await;
        stage.mig_mode_is_switched(&gpus, at).await;
    });
}

/// An agent that finds a GPU silent gives what the other one has, as the one before did, and all when it is back.
#[test]
fn an_agent_that_starts_while_a_gpu_is_lost_counts_as_the_one_before() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut stage = Stage::set(&bed, SETTINGS).await;
        // Of all numbers: kubelet takes any.
        let asks = [("a", "partage.dev/gpu: 1, partage.dev/memory: 21Gi"), ("b", "aliyun.com/gpu-mem: 21")];
        for (name, limits) in asks {
            stage.apply(&lasting(name, limits));
            stage.runs(name).await;
        }
        let gpu_of = async |stage: &Stage<'_>, pod| stage.grant(pod).await.grants[0].shares[0].gpu.clone();
        let (lost, left) = (gpu_of(&stage, "a").await, gpu_of(&stage, "b").await);
        let (gpus, at) = (stage.agent.gpus().unwrap(), stage.index_of(lost.as_str()));
        gpus.inject(at, Fault::Lost);
        stage.offers_parts(1, HELD_BY_A).await;
        stage.start_again().await;
        stage.lists(at, Some("it does not answer, since")).await;
        stage.offers_parts(1, HELD_BY_A).await;
        stage.apply(&lasting("c", "aliyun.com/gpu-mem: 1"));
        stage.runs("c").await;
        assert_eq!(gpu_of(&stage, "c").await, left);
        stage.agrees().await;
        gpus.inject(at, Fault::Returned);
        stage.told(("Node", "node1"), "GpusChanged", "answers again").await;
        stage.offers_parts(2, NOTHING).await;
        stage.agrees().await;
    });
}

/// Without a driver nothing is offered, also where a device still belongs to a pod that is gone.
#[test]
fn node_offers_nothing_while_the_driver_is_unloaded() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, SETTINGS).await;
        for name in ["a", "gone"] {
            stage.apply(&lasting(name, "partage.dev/gpu: 1, partage.dev/memory: 5Gi"));
            stage.runs(name).await;
        }
        // Kubelet remembers its device until it gives it to another pod.
        stage.delete("gone");
        let gpus = stage.agent.gpus().unwrap();
        gpus.set_loaded(false);
        for (resource, _) in COUNTS {
            stage.offers(resource, Some("0")).await;
        }
        gpus.set_loaded(true);
        for (resource, both) in COUNTS {
            stage.offers(resource, Some(&both.to_string())).await;
        }
        stage.agrees().await;
    });
}

impl Stage<'_> {
    async fn kubelet_restarts_while_lost(&self, gpus: &State, at: usize) {
        let containers = |stage: &Self| {
            ["a", "b"].map(|name| {
                stage.object("pod", name).unwrap()["status"]["containerStatuses"][0]["containerID"].clone()
            })
        };
        let before = containers(self);
        gpus.inject(at, Fault::Lost);
        self.offers_parts(1, HELD_BY_A).await;
        self.kubelet_restarts().await;
        self.offers_parts(1, HELD_BY_A).await;
        // The healthy GPU has 39 GiB, of which one pod holds 21: what is requested on the lost one takes nothing from it.
        self.apply(&lasting("c", "partage.dev/gpu: 1, partage.dev/memory: 18Gi"));
        self.runs("c").await;
        assert_eq!(containers(self), before, "all that ran goes on");
        let beside = self.grant("b").await.grants[0].shares[0].gpu.clone();
        assert_eq!(
            self.grant("c").await.grants[0].shares[0].gpu,
            beside,
            "nobody is put on a GPU that is lost"
        );
    }

    /// A GPU in MIG mode is listed with the reason and not offered. The agent that finds it so, or so no longer, counts anew.
    async fn mig_mode_is_switched(&self, gpus: &State, at: usize) {
        let words = "MIG mode is enabled, and its parts are not shared further";
        gpus.inject(at, Fault::Mig(true));
        self.told(("Node", "node1"), "GpusChanged", "was enabled").await;
        self.told(("Node", "node1"), "GpuNotOffered", words).await;
        self.lists(at, Some(words)).await;
        self.offers_parts(1, NOTHING).await;
        self.is_ready().await;
        let offered = self.inventory().unwrap().gpus[1 - at].uuid.clone();
        for name in ["d", "e"] {
            self.apply(&lasting(name, "partage.dev/gpu: 1, partage.dev/memory: 15Gi"));
            self.runs(name).await;
            assert_eq!(self.grant(name).await.grants[0].shares[0].gpu, offered);
        }
        gpus.inject(at, Fault::Mig(false));
        self.told(("Node", "node1"), "GpusChanged", "was disabled").await;
        self.lists(at, None).await;
        self.offers_parts(2, NOTHING).await;
        self.agrees().await;
    }

    /// Waits until the inventory says so of a GPU, in its place; how GPUs are linked is in it, too.
    async fn lists(&self, at: usize, withheld: Option<&str>) {
        eventually(&format!("GPU {at} is listed as {withheld:?}"), async || {
            let node = self.inventory()?;
            let right = match (&node.gpus[at].withheld, withheld) {
                (Some(said), Some(words)) => said.contains(words),
                (said, words) => said.is_none() && words.is_none(),
            };
            // Two of these have links to each other.
            let linked = node.links.is_some() && node.link(0, 1) == Link::NvLink;
            if right && linked { Ok(()) } else { Err(format!("{node:?}\n{}", self.agent.log())) }
        })
        .await;
    }

    /// Waits until the node offers what so many of its two GPUs have, and the devices that pods hold on the other one.
    async fn offers_parts(&self, gpus: u32, held: (&str, u32)) {
        for (resource, both) in COUNTS {
            let held = if resource == held.0 { held.1 } else { 0 };
            self.offers(resource, Some(&(both / 2 * gpus + held).to_string())).await;
        }
    }

    /// Waits until the node says this amount of a resource.
    pub(crate) async fn amount(&self, resource: &str, amount: u64) {
        eventually(&format!("the node has {amount} of {resource}"), async || match self.has(resource) {
            Ok(has) if has == amount => Ok(()),
            has => Err(format!("{has:?}")),
        })
        .await;
    }

    /// How much of a resource the node says that it has.
    pub(crate) fn has(&self, resource: &str) -> Result<u64, String> {
        let node = self.object("node", "node1")?;
        let text = node["status"]["allocatable"][resource].as_str().unwrap_or("0").to_string();
        let amount = text.parse::<Quantity>().and_then(Quantity::to_units);
        amount.map_err(|error| error.to_string())
    }

    /// The place of a GPU in the driver's order, as the node's inventory has it.
    pub(crate) fn index_of(&self, gpu: &str) -> usize {
        self.inventory().unwrap().gpu_index(&gpu.into()).unwrap()
    }
}
