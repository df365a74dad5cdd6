//! What users of the five replaced systems apply, as their READMEs have it, and what they then see. Changed are the images, which
//! are the bed's own and never pulled; where an image's own program was meant, one is named; and numbers in places for texts, which
//! no API server takes, are quoted.

use crate::stage::{SMI, Stage, bed, gpus};
use partage_testkit::eventually;
use serde_json::Value;
use std::collections::BTreeSet;

const SETTINGS: &str = "driver: simulated\nsimulated: {gpus: 6, model: A100-SXM4-40GB}\nmetrics: {address: '127.0.0.1:9394', anonymous: true}\n";
/// All memory of such a GPU, in MiB, and what of it programs can have.
const WHOLE: u64 = 40960;
pub(crate) const USABLE: u64 = 40339;

const VOLCANO: &str = include_str!("seeds/volcano.yaml");
const VCUDA_PART: &str = include_str!("seeds/vcuda-part.yaml");
const VCUDA_TWO_GPUS: &str = include_str!("seeds/vcuda-two-gpus.yaml");
const AWS: &str = include_str!("seeds/aws.yaml");
const GPUMOUNTER: &str = include_str!("seeds/gpumounter.yaml");
/// The README of gpushare shows no pod; this is one as its demonstrations have them.
const GPUSHARE: &str = include_str!("../../../../examples/gpushare/binpack.yaml");

/// What runs in images whose own program is meant.
pub(crate) const OWN_PROGRAM: &str = "command: [sh, -c, 'sleep 100000', program]";

/// The manifest with an image that the bed has, and more lines beside it.
pub(crate) fn with_image(manifest: &str, more: &str) -> String {
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

/// The names of the pods with a label.
async fn pods_of(stage: &Stage<'_>, label: &str, count: usize) -> Vec<String> {
    eventually(&format!("{count} pods of {label} run"), async || {
        let words = ["get", "pods", "-l", label, "-o", "json"];
        let pods = stage.bed.kubectl(&words).map_err(|error| error.to_string())?;
        let pods: Value = serde_json::from_str(&pods).map_err(|error| error.to_string())?;
        let ready = |pod: &&Value| pod["status"]["containerStatuses"][0]["ready"] == true;
        let pods = pods["items"].as_array().into_iter().flatten().filter(ready);
        let names: Vec<String> =
            pods.map(|pod| pod["metadata"]["name"].as_str().unwrap_or_default().to_string()).collect();
        if names.len() == count { Ok(names) } else { Err(format!("{names:?}\n{}", stage.agent.log())) }
    })
    .await
}

#[test]
fn manifests_of_the_replaced_systems_work_unchanged() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, SETTINGS).await;
        the_node_shows_what_it_showed(&stage).await;
        volcano(&stage).await;
        gpushare(&stage).await;
        vcuda(&stage).await;
        aws(&stage).await;
        gpumounter(&stage).await;
    });
}

/// `kubectl describe node`.
async fn the_node_shows_what_it_showed(stage: &Stage<'_>) {
    for (resource, amount) in [
        ("volcano.sh/vgpu-number", 60),
        ("volcano.sh/vgpu-memory", 6 * USABLE),
        ("volcano.sh/vgpu-cores", 600),
        ("aliyun.com/gpu-count", 6),
        ("aliyun.com/gpu-mem", 6 * (USABLE / 1024)),
        ("inspur.com/vcuda-core", 600),
        ("inspur.com/vcuda-memory", 6 * USABLE / 256),
        ("tencent.com/vcuda-core", 600),
        ("k8s.amazonaws.com/vgpu", 60),
        ("partage.dev/gpu", 60),
    ] {
        stage.offers(resource, Some(&amount.to_string())).await;
        let described = stage.bed.kubectl(&["describe", "node", "node1"]).unwrap();
        let shown = described.lines().filter(|line| {
            let mut words = line.split_whitespace();
            words.next() == Some(&format!("{resource}:")) && words.next() == Some(&amount.to_string())
        });
        assert_eq!(shown.count(), 2, "capacity and allocatable of {resource}: {described}");
    }
}

async fn volcano(stage: &Stage<'_>) {
    stage.apply(&with_image(VOLCANO, ""));
    // Volcano's scheduler is not here. It would bind so; the pod says `schedulerName: volcano`, and nobody else takes it.
    let binding = r#"{"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "gpu-pod1"},
        "target": {"apiVersion": "v1", "kind": "Node", "name": "node1"}}"#;
    let path = "/api/v1/namespaces/default/pods/gpu-pod1/binding";
    stage.bed.kubectl_with(&["create", "--raw", path, "-f", "-"], binding).unwrap();
    stage.runs("gpu-pod1").await;
    let seen = stage.sees("gpu-pod1");
    assert_eq!(seen.iter().map(|(_, memory)| *memory).collect::<Vec<_>>(), [3000, 3000]);
    assert_ne!(seen[0].0, seen[1].0, "two cards");
    let environment = stage.exec("gpu-pod1", "env").unwrap();
    for line in [
        "CUDA_DEVICE_MEMORY_LIMIT_0=3000m".to_string(),
        "CUDA_DEVICE_MEMORY_LIMIT_1=3000m".to_string(),
        "CUDA_DEVICE_SM_LIMIT=50".to_string(),
        format!("NVIDIA_VISIBLE_DEVICES={},{}", seen[0].0, seen[1].0),
    ] {
        assert!(environment.lines().any(|have| have == line), "{line} is not in {environment}");
    }
    let devices = stage.annotation("gpu-pod1", "volcano.sh/vgpu-ids-new").await;
    assert_eq!(devices, format!("{},NVIDIA,3000,50:{},NVIDIA,3000,50:", seen[0].0, seen[1].0));
    assert_eq!(stage.annotation("gpu-pod1", "volcano.sh/bind-phase").await, "success");
}

async fn gpushare(stage: &Stage<'_>) {
    stage.apply(&with_image(GPUSHARE, OWN_PROGRAM));
    let mut cards = BTreeSet::new();
    for pod in pods_of(stage, "app=binpack", 3).await {
        let seen = stage.sees(&pod);
        assert_eq!(seen.iter().map(|(_, memory)| *memory).collect::<Vec<_>>(), [2048]);
        cards.extend(seen);
        let environment = stage.exec(&pod, "env").unwrap();
        let index = stage.annotation(&pod, "ALIYUN_COM_GPU_MEM_IDX").await;
        for line in [
            format!("ALIYUN_COM_GPU_MEM_IDX={index}"),
            "ALIYUN_COM_GPU_MEM_POD=2".to_string(),
            "ALIYUN_COM_GPU_MEM_CONTAINER=2".to_string(),
            "ALIYUN_COM_GPU_MEM_DEV=39".to_string(),
        ] {
            assert!(environment.lines().any(|have| have == line), "{line} is not in {environment}");
        }
        assert_eq!(stage.annotation(&pod, "ALIYUN_COM_GPU_MEM_ASSIGNED").await, "true");
        assert_eq!(stage.annotation(&pod, "ALIYUN_COM_GPU_MEM_POD").await, "2");
    }
    assert_eq!(cards.len(), 1, "packed on one card");
}

async fn vcuda(stage: &Stage<'_>) {
    // Annotations and commands are texts to the API server, whatever YAML takes them for.
    for part in ["inspur.com/vcuda-core-limit: 50", "    - 10\n"] {
        assert_eq!(VCUDA_PART.matches(part).count(), 1, "the README has {part:?}");
    }
    let refused = stage.bed.kubectl_with(&["apply", "-f", "-"], VCUDA_PART).unwrap_err();
    assert!(refused.to_string().contains("cannot unmarshal number"), "{refused}");
    let quoted = |text: &str| text.replace("    - 10\n", "    - \"10\"\n");
    let refused =
        stage.bed.kubectl_with(&["apply", "-f", "-"], &with_image(&quoted(VCUDA_PART), "")).unwrap_err();
    assert!(refused.to_string().contains("annotations"), "{refused}");
    let right = quoted(VCUDA_PART).replace("vcuda-core-limit: 50", "vcuda-core-limit: \"50\"");

    stage.apply(&with_image(&right, ""));
    stage.runs("vcuda").await;
    let usual = SMI.replace("nvidia-smi", "/usr/local/nvidia/bin/nvidia-smi");
    let seen = gpus(&stage.exec("vcuda", &usual).unwrap());
    assert_eq!(seen.iter().map(|(_, memory)| *memory).collect::<Vec<_>>(), [30 * 256]);
    eventually("its own program says its first line", async || {
        let said = stage.bed.kubectl(&["logs", "vcuda"]).map_err(|error| error.to_string())?;
        if said.starts_with("# gpu") { Ok(()) } else { Err(said) }
    })
    .await;
    assert_eq!(stage.annotation("vcuda", "inspur.com/gpu-assigned").await, "true");
    let minor: usize = stage.annotation("vcuda", "inspur.com/predicate-gpu-idx-0").await.parse().unwrap();
    assert!(minor < 6);
    assert_eq!(stage.annotation("vcuda", "inspur.com/predicate-node").await, "node1");
    stage.delete("vcuda");

    stage.apply(&with_image(&quoted(VCUDA_TWO_GPUS), ""));
    stage.runs("vcuda").await;
    let seen = stage.sees("vcuda");
    assert_eq!(seen.iter().map(|(_, memory)| *memory).collect::<Vec<_>>(), [60 * 256, 60 * 256]);
    assert_ne!(seen[0].0, seen[1].0, "two cards");
    assert_eq!(stage.annotation("vcuda", "inspur.com/predicate-gpu-idx-0").await.split(',').count(), 2);
}

async fn aws(stage: &Stage<'_>) {
    stage.apply(&with_image(AWS, OWN_PROGRAM));
    for pod in pods_of(stage, "app=resnet-server", 3).await {
        let seen = stage.sees(&pod);
        assert_eq!(seen.iter().map(|(_, memory)| *memory).collect::<Vec<_>>(), [WHOLE], "no limit of memory");
        let environment = stage.exec(&pod, "env").unwrap();
        for line in [
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=10".to_string(),
            format!("NVIDIA_VISIBLE_DEVICES={}", seen[0].0),
        ] {
            assert!(environment.lines().any(|have| have == line), "{line} is not in {environment}");
        }
        stage.exec(&pod, "touch /tmp/nvidia-mps/it-is-theirs").unwrap();
    }
}

/// It asks for no GPU: nothing is in it that was not before, and nothing that it says is changed.
async fn gpumounter(stage: &Stage<'_>) {
    stage.apply(&with_image(GPUMOUNTER, ""));
    let pod = stage.runs("gpu-pod").await;
    assert_eq!(pod["metadata"]["annotations"]["partage.dev/grant"], Value::Null);
    let seen = stage.exec("gpu-pod", "echo $NVIDIA_VISIBLE_DEVICES; ls -d /usr/local/partage /usr/local/nvidia 2>&1; ls /usr/bin/nvidia-smi 2>&1; true");
    let seen = seen.unwrap();
    assert!(seen.starts_with("none\n") && seen.matches("No such file").count() == 3, "{seen}");
}
