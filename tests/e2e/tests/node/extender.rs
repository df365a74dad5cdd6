//! Where a scheduler extender grants, the node obeys, and refuses what cannot be obeyed in words.

use crate::agreement::Held;
use crate::stage::{Stage, bed, lasting};
use partage_core::dialect::grants::device_list::{self, Device};
use partage_core::dialect::grants::native;
use partage_core::model::{Bytes, Grant, PodGrant, Share};
use partage_testkit::agent::SETTINGS;
use partage_testkit::eventually;
use serde_json::{Value, json};

#[test]
fn grants_are_obeyed_exactly_or_refused_in_words() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, &format!("{SETTINGS}extender: true\n")).await;
        // Here the test grants; in a cluster the policy names who does.
        bed.kubectl(&["delete", "validatingadmissionpolicybinding", "partage-grants"]).unwrap();
        let gpu = stage.inventory().unwrap().gpus[1].uuid.to_string();

        // The allocator would have taken the first GPU.
        stage
            .bind(
                "a",
                "partage.dev/gpu: 1, partage.dev/memory: 5Gi",
                json!({
                    native::ANNOTATION: grant("node1", "main", &gpu, 5),
                }),
            )
            .await;
        stage.runs("a").await;
        let entry =
            Device { gpu: gpu.as_str().into(), mig: None, kind: "NVIDIA".into(), memory: 3000, cores: 0 };
        stage
            .bind(
                "volcano",
                "volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 3000",
                json!({
                    "volcano.sh/vgpu-ids-new": device_list::encode(&[vec![entry]]),
                    "volcano.sh/vgpu-node": "node1",
                }),
            )
            .await;
        stage.runs("volcano").await;
        let held = stage.agrees().await;
        let sees: Vec<String> = held.iter().map(Held::sees).collect();
        assert_eq!(sees, [format!("{gpu}, 5120 MiB"), format!("{gpu}, 3000 MiB")]);

        let refused = [
            ("none", None, "without a grant"),
            ("much", Some(grant("node1", "main", &gpu, 38)), "the pod's grant cannot be obeyed"),
            (
                "unknown",
                Some(grant("node1", "main", "GPU-00000000-0000-0000-0000-000000000000", 1)),
                "GPU-00000000",
            ),
            (
                "elsewhere",
                Some(grant("node2", "main", &gpu, 1)),
                "is for node \\\"node2\\\", but this is node1",
            ),
            (
                "other",
                Some(grant("node1", "other", &gpu, 1)),
                "names container \\\"other\\\", which the pod does not have",
            ),
            ("garbage", Some("{\"version\":1".to_string()), "is no grant"),
        ];
        for (name, text, _) in &refused {
            let annotations = text.as_ref().map_or(json!({}), |text| json!({ native::ANNOTATION: text }));
            stage.bind(name, "partage.dev/gpu: 1, partage.dev/memory: 1Gi", annotations).await;
        }
        for (name, _, words) in &refused {
            stage.waits(name, &words.replace("\\\"", "\"")).await;
        }
        assert_eq!(stage.kept()[..3], [2, 2, 2], "who is refused holds nothing");
        bed.kubectl(&["delete", "pods", "--all", "--grace-period=1", "--wait"]).unwrap();
        stage.nothing_is_kept().await;
    });
}

impl Stage<'_> {
    /// Makes a pod and binds it with these annotations, as an extender does.
    ///
    /// The API server goes by a deleted policy for another second.
    async fn bind(&self, name: &str, limits: &str, annotations: Value) {
        self.apply(&lasting(name, limits).replace("spec:\n", "spec:\n  schedulerName: nobody\n"));
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

fn grant(node: &str, container: &str, gpu: &str, gib: u64) -> String {
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
