//! The node loses its power: what was in memory is gone, and everything that was granted is granted again or free.

use crate::stage::{Stage, bed, lasting};
use partage_testkit::agent::SETTINGS;
use partage_testkit::eventually;

const REPLICAS: usize = 3;

#[test]
fn after_a_boot_pods_get_their_shares_again_or_are_made_again() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut stage = Stage::set(&bed, SETTINGS).await;
        stage.apply(&deployment());
        stage.apply(&lasting("alone", "partage.dev/gpu: 1, partage.dev/memory: 7Gi"));
        stage.runs("alone").await;
        stage.apply(&with_init());
        stage.runs("steps").await;
        stage.has_replicas().await;
        let before = stage.agrees().await;
        let node = bed.node("node1").unwrap();

        // The agent is there before kubelet hears of its pods: they are started again as they were.
        node.switch_off();
        bed.apiserver().kill();
        node.switch_on().unwrap();
        assert!(!stage.node_path("/run/partage").exists());
        stage.agent.rebooted().unwrap();
        stage.agent.process().start().unwrap();
        stage.is_ready().await;
        stage.api_server_is_back().await;
        stage.restarted("alone", 1).await;
        // Its init container had finished, and runs again: with a GPU, as before.
        stage.restarted("steps", 1).await;
        stage.has_replicas().await;
        let after = stage.agrees().await;
        let held = |pods: &[crate::agreement::Held]| {
            pods.iter().map(|pod| (pod.uid.clone(), pod.grant.clone())).collect::<Vec<_>>()
        };
        assert_eq!(held(&after), held(&before));
        stage.told(("Node", "node1"), "Booted", "those that kubelet starts again get theirs").await;

        // It comes after kubelet has looked: kubelet fails all of them.
        node.reboot().unwrap();
        stage.agent.rebooted().unwrap();
        stage.fails("alone", "UnexpectedAdmissionError").await;
        stage.agent.process().start().unwrap();
        stage.is_ready().await;
        stage.told(("Pod", "alone"), "AgentUnavailable", "the node was rebooted").await;
        stage.has_replicas().await;
        // The deployment may count those from before the boot for a moment.
        let after = eventually("all of them are others", async || {
            let after = stage.agrees().await;
            if after.len() == REPLICAS { Ok(after) } else { Err(format!("{} hold something", after.len())) }
        })
        .await;
        assert!(
            after.iter().all(|pod| before.iter().all(|old| old.uid != pod.uid)),
            "others of the same controller"
        );
        bed.kubectl(&["delete", "deployment", "d", "--cascade=foreground", "--wait"]).unwrap();
        stage.delete("alone");
        stage.delete("steps");
        stage.nothing_is_kept().await;
    });
}

impl Stage<'_> {
    async fn has_replicas(&self) {
        eventually("all replicas are ready", async || {
            let status = self.object("deployment", "d")?["status"].clone();
            match status["readyReplicas"] == REPLICAS {
                true => Ok(()),
                false => Err(format!("{status}\n{}", self.agent.log())),
            }
        })
        .await;
    }
}

/// A pod in two steps, as a Job has them: what is fetched is used.
fn with_init() -> String {
    let container = |name: &str, command: &str| {
        format!(
            "  - {{name: {name}, image: 'localhost/debian:bed', imagePullPolicy: Never, command: [sh, -c, '{command}'], \
             resources: {{limits: {{partage.dev/gpu: 1, partage.dev/memory: 2Gi}}}}}}\n"
        )
    };
    [
        "apiVersion: v1\nkind: Pod\nmetadata: {name: steps}\nspec:\n  restartPolicy: OnFailure\n  terminationGracePeriodSeconds: 1\n",
        "  initContainers:\n",
        &container("fetch", "nvidia-smi -L"),
        "  containers:\n",
        &container("use", "nvidia-smi -L && sleep 10000"),
    ]
    .concat()
}

fn deployment() -> String {
    let command = crate::stage::witness("d");
    format!(
        "apiVersion: apps/v1
kind: Deployment
metadata: {{name: d}}
spec:
  replicas: {REPLICAS}
  selector: {{matchLabels: {{app: d}}}}
  template:
    metadata: {{labels: {{app: d}}}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: main
        image: localhost/debian:bed
        imagePullPolicy: Never
        command: [sh, -c, '{command}']
        resources: {{limits: {{partage.dev/gpu: 1, partage.dev/memory: 6Gi}}}}
        volumeMounts: [{{name: programs, mountPath: /programs, readOnly: true}}]
      volumes: [{{name: programs, hostPath: {{path: /var/lib/programs}}}}]
---
"
    )
}
