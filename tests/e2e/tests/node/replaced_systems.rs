//! Manifests from the READMEs of the five replaced systems, and what users then see. Changes: the images are the bed's
//! own and never pulled; a command is added where the image's own program was meant; and numbers where the API server
//! only accepts strings are quoted.

use crate::test_node::{GPU_QUERY_NOUNITS, TestNode, bed, parse_gpus};
use partage_testkit::eventually;
use serde_json::Value;
use std::collections::BTreeSet;

const SETTINGS: &str = "driver: simulated\nsimulated: {gpus: 6, model: A100-SXM4-40GB}\nmetrics: {address: '127.0.0.1:9394', anonymous: true}\n";
/// The total memory of such a GPU in MiB, and the part that programs can use.
const WHOLE_GPU_MIB: u64 = 40960;
pub(crate) const USABLE_MIB: u64 = 40339;

const VOLCANO: &str = include_str!("replaced_systems/volcano.yaml");
const VCUDA_SHARE: &str = include_str!("replaced_systems/vcuda-share.yaml");
const VCUDA_TWO_GPUS: &str = include_str!("replaced_systems/vcuda-two-gpus.yaml");
const AWS: &str = include_str!("replaced_systems/aws.yaml");
const GPUMOUNTER: &str = include_str!("replaced_systems/gpumounter.yaml");
/// gpushare's README shows no pod; this one is like those of its demonstrations.
const GPUSHARE: &str = include_str!("../../../../examples/gpushare/binpack.yaml");

/// The command in images whose own program is meant.
pub(crate) const SLEEP_COMMAND: &str = "command: [sh, -c, 'sleep 100000', program]";

/// Returns the manifest with an image that the bed has, and more lines next to it.
pub(crate) fn with_bed_image(manifest: &str, more: &str) -> String {
    let mut text = String::new();
    for line in manifest.lines() {
        match line.find("image: ") {
            Some(at) => {
                let indent = " ".repeat(at);
                text += &format!("{}image: localhost/debian:bed\n", &line[..at]);
                text += &format!("{indent}imagePullPolicy: Never\n{indent}{more}\n");
            }
            None => text += &format!("{line}\n"),
        }
    }
    text
}

/// Waits for the pods with a label, and returns their names.
async fn wait_for_ready_pods(test_node: &TestNode<'_>, label: &str, count: usize) -> Vec<String> {
    eventually(&format!("{count} pods of {label} are running"), async || {
        let arguments = ["get", "pods", "-l", label, "-o", "json"];
        let pods = test_node.bed.kubectl(&arguments).map_err(|error| error.to_string())?;
        let pods: Value = serde_json::from_str(&pods).map_err(|error| error.to_string())?;
        let ready = |pod: &&Value| pod["status"]["containerStatuses"][0]["ready"] == true;
        let pods = pods["items"].as_array().into_iter().flatten().filter(ready);
        let names: Vec<String> =
            pods.map(|pod| pod["metadata"]["name"].as_str().unwrap_or_default().to_string()).collect();
        if names.len() == count { Ok(names) } else { Err(format!("{names:?}\n{}", test_node.agent.log())) }
    })
    .await
}

#[test]
fn manifests_of_the_replaced_systems_work_unchanged() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = TestNode::start(&bed, SETTINGS).await;
        check_node_resources(&test_node).await;
        check_volcano(&test_node).await;
        check_gpushare(&test_node).await;
        check_vcuda(&test_node).await;
        check_aws(&test_node).await;
        check_gpumounter(&test_node).await;
    });
}

/// Checks the resources in `kubectl describe node`.
async fn check_node_resources(test_node: &TestNode<'_>) {
    for (resource, amount) in [
        ("volcano.sh/vgpu-number", 60),
        ("volcano.sh/vgpu-memory", 6 * USABLE_MIB),
        ("volcano.sh/vgpu-cores", 600),
        ("aliyun.com/gpu-count", 6),
        ("aliyun.com/gpu-mem", 6 * (USABLE_MIB / 1024)),
        ("inspur.com/vcuda-core", 600),
        ("inspur.com/vcuda-memory", 6 * USABLE_MIB / 256),
        ("tencent.com/vcuda-core", 600),
        ("k8s.amazonaws.com/vgpu", 60),
        ("partage.dev/gpu", 60),
    ] {
        test_node.wait_until_offered(resource, Some(&amount.to_string())).await;
        let described = test_node.bed.kubectl(&["describe", "node", "node1"]).unwrap();
        let shown = described.lines().filter(|line| {
            let mut words = line.split_whitespace();
            words.next() == Some(&format!("{resource}:")) && words.next() == Some(&amount.to_string())
        });
        assert_eq!(shown.count(), 2, "capacity and allocatable of {resource}: {described}");
    }
}

async fn check_volcano(test_node: &TestNode<'_>) {
    test_node.apply(&with_bed_image(VOLCANO, ""));
    // Volcano's scheduler is not installed. It would bind the pod this way; `schedulerName: volcano` keeps other
    // schedulers from it.
    let binding = r#"{"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "gpu-pod1"},
        "target": {"apiVersion": "v1", "kind": "Node", "name": "node1"}}"#;
    let path = "/api/v1/namespaces/default/pods/gpu-pod1/binding";
    test_node.bed.kubectl_with(&["create", "--raw", path, "-f", "-"], binding).unwrap();
    test_node.wait_until_running("gpu-pod1").await;
    let seen = test_node.visible_gpus("gpu-pod1");
    assert_eq!(seen.iter().map(|(_, memory)| *memory).collect::<Vec<_>>(), [3000, 3000]);
    assert_ne!(seen[0].0, seen[1].0, "on two GPUs");
    let environment = test_node.exec("gpu-pod1", "env").unwrap();
    for line in [
        "CUDA_DEVICE_MEMORY_LIMIT_0=3000m".to_string(),
        "CUDA_DEVICE_MEMORY_LIMIT_1=3000m".to_string(),
        "CUDA_DEVICE_SM_LIMIT=50".to_string(),
        format!("NVIDIA_VISIBLE_DEVICES={},{}", seen[0].0, seen[1].0),
    ] {
        assert!(environment.lines().any(|have| have == line), "{line} is not in {environment}");
    }
    let devices = test_node.wait_for_annotation("gpu-pod1", "volcano.sh/vgpu-ids-new").await;
    assert_eq!(devices, format!("{},NVIDIA,3000,50:{},NVIDIA,3000,50:", seen[0].0, seen[1].0));
    assert_eq!(test_node.wait_for_annotation("gpu-pod1", "volcano.sh/bind-phase").await, "success");
}

async fn check_gpushare(test_node: &TestNode<'_>) {
    test_node.apply(&with_bed_image(GPUSHARE, SLEEP_COMMAND));
    let mut cards = BTreeSet::new();
    for pod in wait_for_ready_pods(test_node, "app=binpack", 3).await {
        let seen = test_node.visible_gpus(&pod);
        assert_eq!(seen.iter().map(|(_, memory)| *memory).collect::<Vec<_>>(), [2048]);
        cards.extend(seen);
        let environment = test_node.exec(&pod, "env").unwrap();
        let index = test_node.wait_for_annotation(&pod, "ALIYUN_COM_GPU_MEM_IDX").await;
        for line in [
            format!("ALIYUN_COM_GPU_MEM_IDX={index}"),
            "ALIYUN_COM_GPU_MEM_POD=2".to_string(),
            "ALIYUN_COM_GPU_MEM_CONTAINER=2".to_string(),
            "ALIYUN_COM_GPU_MEM_DEV=39".to_string(),
        ] {
            assert!(environment.lines().any(|have| have == line), "{line} is not in {environment}");
        }
        assert_eq!(test_node.wait_for_annotation(&pod, "ALIYUN_COM_GPU_MEM_ASSIGNED").await, "true");
        assert_eq!(test_node.wait_for_annotation(&pod, "ALIYUN_COM_GPU_MEM_POD").await, "2");
    }
    assert_eq!(cards.len(), 1, "all on one GPU");
}

async fn check_vcuda(test_node: &TestNode<'_>) {
    // Annotations and commands are strings in the API, however YAML parses them.
    for part in ["inspur.com/vcuda-core-limit: 50", "    - 10\n"] {
        assert_eq!(VCUDA_SHARE.matches(part).count(), 1, "the README must have {part:?}");
    }
    let refused = test_node.bed.kubectl_with(&["apply", "-f", "-"], VCUDA_SHARE).unwrap_err();
    assert!(refused.to_string().contains("cannot unmarshal number"), "{refused}");
    let quoted = |text: &str| text.replace("    - 10\n", "    - \"10\"\n");
    let refused = test_node
        .bed
        .kubectl_with(&["apply", "-f", "-"], &with_bed_image(&quoted(VCUDA_SHARE), ""))
        .unwrap_err();
    assert!(refused.to_string().contains("annotations"), "{refused}");
    let right = quoted(VCUDA_SHARE).replace("vcuda-core-limit: 50", "vcuda-core-limit: \"50\"");

    test_node.apply(&with_bed_image(&right, ""));
    test_node.wait_until_running("vcuda").await;
    let usual = GPU_QUERY_NOUNITS.replace("nvidia-smi", "/usr/local/nvidia/bin/nvidia-smi");
    let seen = parse_gpus(&test_node.exec("vcuda", &usual).unwrap());
    assert_eq!(seen.iter().map(|(_, memory)| *memory).collect::<Vec<_>>(), [30 * 256]);
    eventually("its own program prints its first line", async || {
        let output = test_node.bed.kubectl(&["logs", "vcuda"]).map_err(|error| error.to_string())?;
        if output.starts_with("# gpu") { Ok(()) } else { Err(output) }
    })
    .await;
    assert_eq!(test_node.wait_for_annotation("vcuda", "inspur.com/gpu-assigned").await, "true");
    let minor: usize =
        test_node.wait_for_annotation("vcuda", "inspur.com/predicate-gpu-idx-0").await.parse().unwrap();
    assert!(minor < 6);
    assert_eq!(test_node.wait_for_annotation("vcuda", "inspur.com/predicate-node").await, "node1");
    test_node.delete_pod("vcuda");

    test_node.apply(&with_bed_image(&quoted(VCUDA_TWO_GPUS), ""));
    test_node.wait_until_running("vcuda").await;
    let seen = test_node.visible_gpus("vcuda");
    assert_eq!(seen.iter().map(|(_, memory)| *memory).collect::<Vec<_>>(), [60 * 256, 60 * 256]);
    assert_ne!(seen[0].0, seen[1].0, "on two GPUs");
    assert_eq!(
        test_node.wait_for_annotation("vcuda", "inspur.com/predicate-gpu-idx-0").await.split(',').count(),
        2
    );
}

async fn check_aws(test_node: &TestNode<'_>) {
    test_node.apply(&with_bed_image(AWS, SLEEP_COMMAND));
    for pod in wait_for_ready_pods(test_node, "app=resnet-server", 3).await {
        let seen = test_node.visible_gpus(&pod);
        assert_eq!(
            seen.iter().map(|(_, memory)| *memory).collect::<Vec<_>>(),
            [WHOLE_GPU_MIB],
            "no memory limit"
        );
        let environment = test_node.exec(&pod, "env").unwrap();
        for line in [
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=10".to_string(),
            format!("NVIDIA_VISIBLE_DEVICES={}", seen[0].0),
        ] {
            assert!(environment.lines().any(|have| have == line), "{line} is not in {environment}");
        }
        test_node.exec(&pod, "touch /tmp/nvidia-mps/it-is-theirs").unwrap();
    }
}

/// Checks a pod that requests no GPU: nothing is added to it or changed.
async fn check_gpumounter(test_node: &TestNode<'_>) {
    test_node.apply(&with_bed_image(GPUMOUNTER, ""));
    let pod = test_node.wait_until_running("gpu-pod").await;
    assert_eq!(pod["metadata"]["annotations"]["partage.dev/grant"], Value::Null);
    let seen = test_node.exec("gpu-pod", "echo $NVIDIA_VISIBLE_DEVICES; ls -d /usr/local/partage /usr/local/nvidia 2>&1; ls /usr/bin/nvidia-smi 2>&1; true");
    let seen = seen.unwrap();
    assert!(seen.starts_with("none\n") && seen.matches("No such file").count() == 3, "{seen}");
}
