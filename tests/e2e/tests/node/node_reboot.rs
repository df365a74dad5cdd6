//! The node loses power: everything in memory is gone, and every share is granted again or free.

use crate::test_node::{TestNode, bed, long_running_pod};
use partage_testkit::agent::SIMULATED_SETTINGS;
use partage_testkit::eventually;

const REPLICAS: usize = 3;

#[test]
fn rebooted_node_restores_shares_or_replaces_pods() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        test_node.apply(&deployment());
        test_node.apply(&long_running_pod("alone", "partage.dev/gpu: 1, partage.dev/memory: 7Gi"));
        test_node.wait_until_running("alone").await;
        test_node.apply(&pod_with_init_container());
        test_node.wait_until_running("steps").await;
        test_node.wait_for_replicas().await;
        let before = test_node.wait_until_consistent().await;
        let node = bed.node("node1").unwrap();

        // The agent runs before kubelet gets its pods: they are started again as they were.
        node.power_off();
        bed.apiserver().kill();
        node.power_on().unwrap();
        assert!(!test_node.node_path("/run/partage").exists());
        test_node.agent.recreate_after_reboot().unwrap();
        test_node.agent.process().start().unwrap();
        test_node.wait_until_ready().await;
        test_node.start_api_server().await;
        test_node.wait_until_restarted("alone", 1).await;
        // Its init container had finished, and runs again: with a GPU, as before.
        test_node.wait_until_restarted("steps", 1).await;
        test_node.wait_for_replicas().await;
        let after = test_node.wait_until_consistent().await;
        let held = |pods: &[crate::consistency::GrantedPod]| {
            pods.iter().map(|pod| (pod.uid.clone(), pod.grant.clone())).collect::<Vec<_>>()
        };
        assert_eq!(held(&after), held(&before));
        test_node
            .wait_for_event_on(
                ("Node", "node1"),
                "NodeRebooted",
                "pods that kubelet restarts keep their shares",
            )
            .await;

        // The agent starts after kubelet has admitted the pods: kubelet fails all of them.
        node.reboot().unwrap();
        test_node.agent.recreate_after_reboot().unwrap();
        test_node.wait_until_failed("alone", "UnexpectedAdmissionError").await;
        test_node.agent.process().start().unwrap();
        test_node.wait_until_ready().await;
        test_node.wait_for_event_on(("Pod", "alone"), "AgentUnavailable", "the node was rebooted").await;
        test_node.wait_for_replicas().await;
        // The deployment may count pods from before the reboot for a short time.
        let after = eventually("all pods are new", async || {
            let after = test_node.wait_until_consistent().await;
            if after.len() == REPLICAS { Ok(after) } else { Err(format!("{} hold something", after.len())) }
        })
        .await;
        assert!(
            after.iter().all(|pod| before.iter().all(|old| old.uid != pod.uid)),
            "new pods of the same controller"
        );
        bed.kubectl(&["delete", "deployment", "d", "--cascade=foreground", "--wait"]).unwrap();
        test_node.delete_pod("alone");
        test_node.delete_pod("steps");
        test_node.wait_until_released().await;
    });
}

impl TestNode<'_> {
    async fn wait_for_replicas(&self) {
        eventually("all replicas are ready", async || {
            let status = self.get_object("deployment", "d")?["status"].clone();
            if status["readyReplicas"] == REPLICAS {
                Ok(())
            } else {
                Err(format!("{status}\n{}", self.agent.log()))
            }
        })
        .await;
    }
}

/// Returns a pod with an init container and a container, both with a GPU.
fn pod_with_init_container() -> String {
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
    let command = crate::test_node::report_gpus_command("d");
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
