//! Who may read a node's metrics, and what they tell of a pod.

use crate::stage::{Stage, bed, pod};
use partage_testkit::eventually;
use partage_testkit::fetch::{Answer, Fetch};
use partage_testkit::openmetrics::Exposition;
use std::net::SocketAddr;

/// Everything as by default, but for the driver.
const SETTINGS: &str = "driver: simulated\nsimulated: {gpus: 2, model: A100-SXM4-40GB}\n";
const MIB: f64 = (1u64 << 20) as f64;

#[test]
fn metrics_are_for_those_who_may_read_them() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, SETTINGS).await;
        let address = SocketAddr::from((stage.agent.node().address(), 9394));
        let asks = "volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 3000, volcano.sh/vgpu-cores: 50";
        stage.apply(&pod("train", asks, "/programs/partage-sample trainer --memory 1Gi"));
        stage.runs("train").await;

        by_token(&stage, address).await;
        // As Volcano's users have it.
        stage.agent.write_settings(&format!("{SETTINGS}metrics: {{anonymous: true}}\n")).unwrap();
        stage.agent.process().restart().unwrap();
        let answer = eventually("everybody may read of the pod", async || {
            let answer = Fetch::plain(address).get("/metrics").await.map_err(|error| error.to_string())?;
            // It answers before it knows the node.
            let told = answer.status == 200 && answer.body.contains("\nvGPU_device_memory_limit_in_bytes{");
            if told { Ok(answer) } else { Err(answer.body) }
        })
        .await;
        assert!(!answer.body.contains("# EOF"), "who does not ask for OpenMetrics gets the older text");
        // Kubelet fails pods that ask for devices of a plugin that it does not know again.
        stage.is_ready().await;
        // The agent has just begun: it counts one container that it makes ready, and one that it refuses.
        stage.apply(&pod("late", "partage.dev/gpu: 1, partage.dev/memory: 1Gi", "sleep 1000"));
        stage.runs("late").await;
        stage.apply(&pod("wrong", "partage.dev/gpu: 1, volcano.sh/vgpu-number: 1", "sleep 1000"));
        stage.waits("wrong", "this container asks in 2 dialects").await;
        let much = stage.exec("train", "/programs/partage-sample trainer --memory 4Gi --seconds 0.1");
        assert!(much.unwrap_err().contains("out of memory"));
        the_numbers_of_a_pod(&stage, address).await;
    });
}

async fn by_token(stage: &Stage<'_>, address: SocketAddr) {
    for account in ["reader", "stranger"] {
        stage.bed.kubectl(&["create", "serviceaccount", account]).unwrap();
    }
    let role = "--clusterrole=partage-metrics-reader";
    let whom = "--serviceaccount=default:reader";
    stage.bed.kubectl(&["create", "clusterrolebinding", "reads-metrics", role, whom]).unwrap();
    // The API server takes a moment to know of it.
    eventually("the reader may read", async || {
        let reader = "--as=system:serviceaccount:default:reader";
        stage.bed.kubectl(&["auth", "can-i", "get", "/metrics", reader]).map_err(|error| error.to_string())
    })
    .await;
    let token = |account: &str| stage.bed.kubectl(&["create", "token", account]).unwrap().trim().to_string();
    let get = async |token: Option<&str>| -> Answer {
        let fetch = Fetch::tls(address);
        let fetch = match token {
            Some(token) => fetch.header("Authorization", &format!("Bearer {token}")),
            None => fetch,
        };
        // The API server may take longer to answer than is waited for.
        eventually("the API server was asked", async || {
            let answer = fetch.get("/metrics").await.map_err(|error| error.to_string())?;
            if [429, 503].contains(&answer.status) { Err(answer.body) } else { Ok(answer) }
        })
        .await
    };
    let nobody = get(None).await;
    assert_eq!(nobody.status, 401);
    assert!(nobody.body.contains("metrics require a token of this cluster"), "{}", nobody.body);
    let stranger = get(Some(&token("stranger"))).await;
    assert_eq!(stranger.status, 403);
    assert!(stranger.body.contains("partage-metrics-reader"), "{}", stranger.body);
    assert_eq!(get(Some("made.up.token")).await.status, 403);
    let reader = get(Some(&token("reader"))).await;
    assert_eq!(reader.status, 200, "{}", reader.body);
    assert!(reader.body.contains("partage_container_memory_limit_bytes{"), "{}", reader.body);
    // A plain HTTP request learns what to do instead; health requires no token.
    let plain = Fetch::plain(address).get("/metrics").await.unwrap();
    assert_eq!(plain.status, 400, "{}", plain.body);
    assert!(plain.body.contains("use https:// in the URL"), "{}", plain.body);
    let lives =
        eventually("it says whether it lives", async || Fetch::tls(address).get("/healthz").await).await;
    assert_eq!(lives.status, 200);
}

async fn the_numbers_of_a_pod(stage: &Stage<'_>, address: SocketAddr) {
    let uuid = stage.sees("train")[0].0.clone();
    let of_pod = [
        ("podnamespace", "default"),
        ("podname", "train"),
        ("ctrname", "main"),
        ("vdeviceid", "0"),
        ("deviceuuid", uuid.as_str()),
    ];
    let ours = [("namespace", "default"), ("pod", "train"), ("container", "main")];
    eventually("the numbers of the pod", async || {
        let accept = "application/openmetrics-text; version=1.0.0";
        let answer = Fetch::plain(address).header("Accept", accept).get("/metrics").await;
        let text = answer.map_err(|error| error.to_string())?.body;
        let told = Exposition::parse(&text)?;
        let value = |name: &str, labels: &[(&str, &str)]| {
            told.value(name, labels).ok_or_else(|| format!("no {name}: {text}"))
        };
        assert_eq!(value("vGPU_device_memory_limit_in_bytes", &of_pod)?, 3000.0 * MIB);
        assert_eq!(value("partage_container_memory_limit_bytes", &ours)?, 3000.0 * MIB);
        let used = value("vGPU_device_memory_usage_in_bytes", &of_pod)?;
        let host = value("HostGPUMemoryUsage", &[("deviceuuid", &uuid)])?;
        let spent = value("partage_container_gpu_seconds_total", &ours)?;
        let busy = value("Device_utilization_desc_of_container", &of_pod)?;
        let (mismatch, containers) =
            (value("partage_ledger_mismatch", &[])?, value("partage_containers", &[("dialect", "volcano")])?);
        if (mismatch, containers) != (0.0, 1.0) {
            return Err(format!("{mismatch} {containers}"));
        }
        // The model and what the driver takes for the process, within the limit; the GPU works for it.
        if !((1024.0 * MIB..3000.0 * MIB).contains(&used) && host >= used && spent > 0.0 && busy > 0.0) {
            return Err(format!("{used} {host} {spent} {busy}"));
        }
        let newer = [("namespace", "default"), ("pod", "train"), ("device_uuid", uuid.as_str())];
        assert_eq!(value("hami_vgpu_memory_limit_bytes", &newer)?, 3000.0 * MIB);
        // It wants all of the GPU and may have half: it waits for the other half. It was told no once, and two others came.
        for (name, labels) in [
            ("HostCoreUtilization", &[("deviceuuid", uuid.as_str())][..]),
            ("hami_vgpu_memory_used_bytes", &newer),
            ("partage_container_throttled_seconds_total", &ours),
            ("partage_container_refusals_total", &ours),
            ("partage_refused_total", &[]),
            ("partage_allocate_seconds_count", &[]),
            ("partage_allocate_seconds_sum", &[]),
            ("partage_start_seconds_count", &[]),
            ("partage_start_seconds_sum", &[]),
        ] {
            if value(name, labels)? <= 0.0 {
                return Err(format!("{name} is none: {text}"));
            }
        }
        Ok(())
    })
    .await;
}
