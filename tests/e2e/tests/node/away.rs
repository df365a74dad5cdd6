//! Those the agent works with go away and come back: the API server, kubelet, containerd, its own sockets.

use crate::stage::{SEES, Stage, bed, lasting};
use partage_testkit::agent::SETTINGS;
use partage_testkit::eventually;
use std::fs;

#[test]
fn containers_start_again_while_the_api_server_is_away() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut stage = Stage::set(&bed, SETTINGS).await;
        for name in ["a", "b"] {
            stage.apply(&lasting(name, "partage.dev/gpu: 1, partage.dev/memory: 5Gi"));
        }
        for name in ["a", "b"] {
            stage.runs(name).await;
        }
        let held = stage.agrees().await;
        // The third is decided and ready, and does not say so yet.
        stage.agent.start_again(Some("after-cdi")).unwrap();
        stage.is_ready().await;
        stage.apply(&lasting("c", "partage.dev/gpu: 1, partage.dev/memory: 6Gi"));
        stage.dies().await;
        bed.apiserver().kill();

        stage.start_again().await;
        let of = |name: &str| held.iter().find(|pod| pod.name == name).unwrap();
        stage.crash("a");
        stage.says_again(of("a"), 1).await;
        stage.start_again().await;
        stage.crash("b");
        stage.says_again(of("b"), 1).await;

        stage.api_server_is_back().await;
        stage.runs("c").await;
        let held = stage.agrees().await;
        assert_eq!(held.len(), 3);
        stage.delete("a");
        assert_eq!(stage.agrees().await.len(), 2);
    });
}

#[test]
fn kubelet_containerd_and_the_sockets_go_and_come_back() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut stage = Stage::set(&bed, SETTINGS).await;
        let node = bed.node("node1").unwrap();
        stage.apply(&lasting("a", "partage.dev/gpu: 1, partage.dev/memory: 5Gi"));
        stage.runs("a").await;

        stage.kubelet_restarts().await;
        stage.goes_on("b").await;
        node.containerd().restart().unwrap();
        stage.goes_on("c").await;
        let sockets = stage.sockets();
        for name in sockets.keys() {
            fs::remove_file(stage.node_path("/var/lib/kubelet/device-plugins").join(name)).unwrap();
        }
        stage.serves_anew(&sockets).await;
        stage.goes_on("d").await;

        // Kubelet's own socket goes with the folder, and what it knew of its pods; it makes both anew only when it starts. What runs
        // goes on. For what does not it asks anew, once it hears of its pods and knows the agent.
        let container =
            stage.object("pod", "a").unwrap()["status"]["containerStatuses"][0]["containerID"].clone();
        let container = container.as_str().unwrap().trim_start_matches("containerd://").to_string();
        bed.apiserver().kill();
        node.kubelet().kill();
        stage.crash("a");
        eventually("a's container has ended", async || {
            let tasks = node
                .run("/bed/bin/ctr", ["-n", "k8s.io", "tasks", "ls"])
                .map_err(|error| error.to_string())?;
            let ended = tasks.lines().all(|line| !line.contains(&container) || line.contains("STOPPED"));
            if ended { Ok(()) } else { Err(tasks) }
        })
        .await;
        let aside = stage.node_path("/var/lib/kubelet/aside");
        fs::rename(stage.node_path("/var/lib/kubelet/device-plugins"), &aside).unwrap();
        fs::remove_dir_all(aside).unwrap();
        node.kubelet().start().unwrap();
        stage.is_ready().await;
        stage.api_server_is_back().await;
        stage.listens().await;
        stage.restarted("a", 1).await;
        for name in ["b", "c", "d"] {
            assert_eq!(
                stage.object("pod", name).unwrap()["status"]["containerStatuses"][0]["restartCount"],
                0
            );
            assert!(stage.exec(name, SEES).unwrap().contains("2048 MiB"));
            stage.delete(name);
        }
        stage.apply(&lasting("e", "partage.dev/gpu: 1, partage.dev/memory: 2Gi"));
        stage.runs("e").await;
        assert_eq!(stage.agrees().await.len(), 2);

        // Without an agent there is nobody to ask, for a kubelet that has just started: what was ready stays so.
        stage.agent.process().kill();
        node.kubelet().restart().unwrap();
        // Its devices are nobody's then.
        stage.offers("partage.dev/gpu", Some("0")).await;
        stage.crash("e");
        stage.restarted("e", 1).await;
        stage.start_again().await;
        assert_eq!(stage.agrees().await.len(), 2);
        bed.kubectl(&["delete", "pods", "--all", "--grace-period=1", "--wait"]).unwrap();
        stage.nothing_is_kept().await;
        stage.cannot_begin_without_cdi().await;
    });
}

/// Somebody removes a running container's region: the agent says so, and what to do; the container has it again when it restarts.
#[test]
fn region_removed_by_hand_is_reported_and_created_again() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut stage = Stage::set(&bed, SETTINGS).await;
        for name in ["a", "b"] {
            stage.apply(&lasting(name, "partage.dev/gpu: 1, partage.dev/memory: 5Gi"));
        }
        for name in ["a", "b"] {
            stage.runs(name).await;
        }
        let held = stage.agrees().await;
        let regions = stage.node_path("/run/partage/regions");
        let is_missing = async |stage: &Stage<'_>| {
            eventually("both are counted", async || match stage.metric("partage_ledger_mismatch")? {
                2.0 => Ok(()),
                other => Err(format!("{other}\n{}", stage.agent.log())),
            })
            .await;
        };
        for region in fs::read_dir(&regions).unwrap().flatten() {
            fs::remove_dir_all(region.path()).unwrap();
        }
        is_missing(&stage).await;
        for name in ["a", "b"] {
            stage
                .told(("Pod", name), "RegionMissing", "restart the container to create the region again")
                .await;
        }
        // An agent that starts now has never seen the regions.
        stage.start_again().await;
        is_missing(&stage).await;
        for pod in &held {
            stage.crash(&pod.name);
            stage.restarted(&pod.name, 1).await;
        }
        assert_eq!(stage.agrees().await.len(), 2);
    });
}

impl Stage<'_> {
    /// A runtime that puts no CDI devices into containers: the agent says so, and what to do, and ends.
    async fn cannot_begin_without_cdi(&mut self) {
        let config = self.node_path("/bed/containerd.toml");
        let text = fs::read_to_string(&config).unwrap();
        self.agent.process().kill();
        fs::write(&config, text.replace("enable_cdi = true", "enable_cdi = false")).unwrap();
        self.agent.node().containerd().restart().unwrap();
        let said = self.agent.log().len();
        self.agent.start_again(None).unwrap();
        self.dies().await;
        let log = self.agent.log();
        let words = "set enable_cdi = true under [plugins.'io.containerd.cri.v1.runtime'] in /etc/containerd/config.toml";
        let log = log.get(said..).unwrap_or(&log);
        assert!(log.contains("CDI is off in containerd v2") && log.contains(words), "{log}");
        // Done as it said.
        fs::write(&config, text).unwrap();
        self.agent.node().containerd().restart().unwrap();
        self.start_again().await;
        self.goes_on("f").await;
    }

    /// Waits until kubelet listens to the agent and the node gives shares.
    async fn listens(&self) {
        self.is_ready().await;
        self.offers("partage.dev/gpu", Some("20")).await;
    }

    /// A new pod gets its share, and all others still run as they did.
    async fn goes_on(&self, name: &str) {
        self.listens().await;
        self.apply(&lasting(name, "partage.dev/gpu: 1, partage.dev/memory: 2Gi"));
        self.runs(name).await;
        self.agrees().await;
        let pods = self.bed.kubectl(&[
            "get",
            "pods",
            "-o",
            "jsonpath={.items[*].status.containerStatuses[*].restartCount}",
        ]);
        assert!(pods.unwrap().split(' ').all(|restarts| restarts == "0"));
    }

    /// Waits until a container that was started again so many times says what it sees, without asking the API server.
    async fn says_again(&self, pod: &crate::agreement::Held, times: u32) {
        let log = format!("/var/log/pods/default_{}_{}/main/{times}.log", pod.name, pod.uid);
        eventually(&format!("{} says what it sees", pod.name), async || match self.said(pod) {
            Some(said) if said == pod.sees() && self.node_path(&log).exists() => Ok(()),
            said => Err(format!("{said:?}\n{}", self.agent.log())),
        })
        .await;
    }
}
