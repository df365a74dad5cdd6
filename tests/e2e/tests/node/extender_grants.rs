//! Grants of a scheduler extender: the node follows them exactly, or refuses with the reason.

use crate::consistency::GrantedPod;
use crate::test_node::{TestNode, bed, long_running_pod};
use partage_core::dialect::grants::device_list::{self, DeviceEntry};
use partage_core::dialect::grants::native;
use partage_core::model::{Bytes, Grant, PodGrant, Share};
use partage_testkit::agent::SIMULATED_SETTINGS;
use partage_testkit::eventually;
use serde_json::{Value, json};

#[test]
fn extender_grant_is_applied_exactly_or_refused_with_the_reason() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = TestNode::start(&bed, &format!("{SIMULATED_SETTINGS}extender: true\n")).await;
        // Here the test writes the grants; in a cluster the policy names the extender.
        bed.kubectl(&["delete", "validatingadmissionpolicybinding", "partage-grants"]).unwrap();
        let gpu = test_node.inventory().unwrap().gpus[1].uuid.to_string();

        // The allocator would have chosen the first GPU.
        test_node
            .create_bound_pod(
                "a",
                "partage.dev/gpu: 1, partage.dev/memory: 5Gi",
                json!({
                    native::ANNOTATION: encode_grant("node1", "main", &gpu, 5),
                }),
            )
            .await;
        test_node.wait_until_running("a").await;
        let entry = DeviceEntry {
            gpu: gpu.as_str().into(),
            mig: None,
            kind: "NVIDIA".into(),
            memory: 3000,
            cores: 0,
        };
        test_node
            .create_bound_pod(
                "volcano",
                "volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 3000",
                json!({
                    "volcano.sh/vgpu-ids-new": device_list::encode(&[vec![entry]]),
                    "volcano.sh/vgpu-node": "node1",
                }),
            )
            .await;
        test_node.wait_until_running("volcano").await;
        let held = test_node.wait_until_consistent().await;
        let sees: Vec<String> = held.iter().map(GrantedPod::expected_view).collect();
        assert_eq!(sees, [format!("{gpu}, 5120 MiB"), format!("{gpu}, 3000 MiB")]);

        let refused = [
            ("none", None, "without a grant"),
            ("much", Some(encode_grant("node1", "main", &gpu, 38)), "the pod's grant cannot be applied"),
            (
                "unknown",
                Some(encode_grant("node1", "main", "GPU-00000000-0000-0000-0000-000000000000", 1)),
                "GPU-00000000",
            ),
            (
                "elsewhere",
                Some(encode_grant("node2", "main", &gpu, 1)),
                "is for node \\\"node2\\\", but this is node1",
            ),
            (
                "other",
                Some(encode_grant("node1", "other", &gpu, 1)),
                "names container \\\"other\\\", which the pod does not have",
            ),
            ("garbage", Some("{\"version\":1".to_string()), "is not a grant"),
        ];
        for (name, text, _) in &refused {
            let annotations = text.as_ref().map_or(json!({}), |text| json!({ native::ANNOTATION: text }));
            test_node
                .create_bound_pod(name, "partage.dev/gpu: 1, partage.dev/memory: 1Gi", annotations)
                .await;
        }
        for (name, _, expected) in &refused {
            test_node.wait_until_waiting(name, &expected.replace("\\\"", "\"")).await;
        }
        assert_eq!(test_node.agent_files()[..3], [2, 2, 2], "refused pods hold nothing");
        bed.kubectl(&["delete", "pods", "--all", "--grace-period=1", "--wait"]).unwrap();
        test_node.wait_until_released().await;
    });
}

impl TestNode<'_> {
    /// Creates a pod and binds it with these annotations, as an extender does.
    /// The API server applies a deleted policy for up to another second.
    async fn create_bound_pod(&self, name: &str, limits: &str, annotations: Value) {
        self.apply(&long_running_pod(name, limits).replace("spec:\n", "spec:\n  schedulerName: none\n"));
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding",
            "metadata": {"name": name, "annotations": annotations},
            "target": {"apiVersion": "v1", "kind": "Node", "name": "node1"},
        });
        let path = format!("/api/v1/namespaces/default/pods/{name}/binding");
        eventually(&format!("{name} is bound"), async || {
            self.bed.kubectl_with(&["create", "--raw", &path, "-f", "-"], &binding.to_string())
        })
        .await;
    }
}

fn encode_grant(node: &str, container: &str, gpu: &str, gib: u64) -> String {
    let share = Share {
        gpu: gpu.into(),
        memory_bytes: Some(Bytes(gib << 30)),
        cores: None,
        ceiling: None,
        whole: false,
    };
    let grants = vec![Grant { container: container.into(), init: false, shares: vec![share] }];
    native::encode(&PodGrant { node: node.into(), grants }).unwrap()
}
