//! Access to a node's metrics, and their values for a pod.

use crate::test_node::{TestNode, bed, pod};
use partage_testkit::eventually;
use partage_testkit::http_client::{HttpClient, HttpResponse};
use partage_testkit::openmetrics::Exposition;
use std::net::SocketAddr;

/// Defaults, except for the driver.
const SETTINGS: &str = "driver: simulated\nsimulated: {gpus: 2, model: A100-SXM4-40GB}\n";
const MIB: f64 = (1u64 << 20) as f64;

#[test]
fn metrics_require_permission_unless_anonymous() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let test_node = TestNode::start(&bed, SETTINGS).await;
        let address = SocketAddr::from((test_node.agent.node().address(), 9394));
        let asks = "volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 3000, volcano.sh/vgpu-cores: 50";
        test_node.apply(&pod("train", asks, "/programs/partage-sample trainer --memory 1Gi"));
        test_node.wait_until_running("train").await;

        check_token_access(&test_node, address).await;
        // With Volcano's settings.
        test_node.agent.write_settings(&format!("{SETTINGS}metrics: {{anonymous: true}}\n")).unwrap();
        test_node.agent.process().restart().unwrap();
        let answer = eventually("metrics of the pod are readable without a token", async || {
            let answer =
                HttpClient::plain(address).get("/metrics").await.map_err(|error| error.to_string())?;
            // It responds before the node is read.
            let told = answer.status == 200 && answer.body.contains("\nvGPU_device_memory_limit_in_bytes{");
            if told { Ok(answer) } else { Err(answer.body) }
        })
        .await;
        assert!(!answer.body.contains("# EOF"), "without OpenMetrics in Accept the older format is used");
        // Kubelet fails pods that request devices of a plugin that has not registered again.
        test_node.wait_until_ready().await;
        // The agent has just started: it counts one container that it prepares, and one that it refuses.
        test_node.apply(&pod("late", "partage.dev/gpu: 1, partage.dev/memory: 1Gi", "sleep 1000"));
        test_node.wait_until_running("late").await;
        test_node.apply(&pod("wrong", "partage.dev/gpu: 1, volcano.sh/vgpu-number: 1", "sleep 1000"));
        test_node.wait_until_waiting("wrong", "this container uses 2 dialects").await;
        let much = test_node.exec("train", "/programs/partage-sample trainer --memory 4Gi --seconds 0.1");
        assert!(much.unwrap_err().contains("out of memory"));
        check_pod_metrics(&test_node, address).await;
    });
}

async fn check_token_access(test_node: &TestNode<'_>, address: SocketAddr) {
    for account in ["reader", "outsider"] {
        test_node.bed.kubectl(&["create", "serviceaccount", account]).unwrap();
    }
    let role = "--clusterrole=partage-metrics-reader";
    let account = "--serviceaccount=default:reader";
    test_node.bed.kubectl(&["create", "clusterrolebinding", "reads-metrics", role, account]).unwrap();
    // The API server needs some time to apply it.
    eventually("the reader has the permission", async || {
        let reader = "--as=system:serviceaccount:default:reader";
        test_node
            .bed
            .kubectl(&["auth", "can-i", "get", "/metrics", reader])
            .map_err(|error| error.to_string())
    })
    .await;
    let token =
        |account: &str| test_node.bed.kubectl(&["create", "token", account]).unwrap().trim().to_string();
    let get = async |token: Option<&str>| -> HttpResponse {
        let http_client = HttpClient::tls(address);
        let http_client = match token {
            Some(token) => http_client.header("Authorization", &format!("Bearer {token}")),
            None => http_client,
        };
        // The API server may respond later than the timeout of the request.
        eventually("the API server responded", async || {
            let answer = http_client.get("/metrics").await.map_err(|error| error.to_string())?;
            if [429, 503].contains(&answer.status) { Err(answer.body) } else { Ok(answer) }
        })
        .await
    };
    let nobody = get(None).await;
    assert_eq!(nobody.status, 401);
    assert!(nobody.body.contains("metrics require a token of this cluster"), "{}", nobody.body);
    let outsider = get(Some(&token("outsider"))).await;
    assert_eq!(outsider.status, 403);
    assert!(outsider.body.contains("partage-metrics-reader"), "{}", outsider.body);
    assert_eq!(get(Some("made.up.token")).await.status, 403);
    let reader = get(Some(&token("reader"))).await;
    assert_eq!(reader.status, 200, "{}", reader.body);
    assert!(reader.body.contains("partage_container_memory_limit_bytes{"), "{}", reader.body);
    // A plain HTTP request gets a message with the solution; health requires no token.
    let plain = HttpClient::plain(address).get("/metrics").await.unwrap();
    assert_eq!(plain.status, 400, "{}", plain.body);
    assert!(plain.body.contains("use https:// in the URL"), "{}", plain.body);
    let lives =
        eventually("/healthz responds", async || HttpClient::tls(address).get("/healthz").await).await;
    assert_eq!(lives.status, 200);
}

async fn check_pod_metrics(test_node: &TestNode<'_>, address: SocketAddr) {
    let uuid = test_node.visible_gpus("train")[0].0.clone();
    let of_pod = [
        ("podnamespace", "default"),
        ("podname", "train"),
        ("ctrname", "main"),
        ("vdeviceid", "0"),
        ("deviceuuid", uuid.as_str()),
    ];
    let ours = [("namespace", "default"), ("pod", "train"), ("container", "main")];
    eventually("the pod's metrics", async || {
        let accept = "application/openmetrics-text; version=1.0.0";
        let answer = HttpClient::plain(address).header("Accept", accept).get("/metrics").await;
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
        // The model and the driver's context, within the limit; the GPU works for it.
        if !((1024.0 * MIB..3000.0 * MIB).contains(&used) && host >= used && spent > 0.0 && busy > 0.0) {
            return Err(format!("{used} {host} {spent} {busy}"));
        }
        let newer = [("namespace", "default"), ("pod", "train"), ("device_uuid", uuid.as_str())];
        assert_eq!(value("hami_vgpu_memory_limit_bytes", &newer)?, 3000.0 * MIB);
        // The program uses all of the GPU and may have half: it is throttled for the other half. One allocation was
        // refused, and two other pods were started.
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
                return Err(format!("{name} is zero: {text}"));
            }
        }
        Ok(())
    })
    .await;
}
