use super::*;
use crate::report::{AgentCounters, ContainerReport, DurationHistogram};
use partage_core::dialect::Dialect;
use partage_core::model::{Bytes, Cores, Gpu, PodId, Share};
use partage_enforce::monitor::ObservedUsage;
use partage_enforce::report::GpuStatus;
use partage_host::gpus::GpuSample;
use partage_region::GpuUsage;
use partage_testkit::openmetrics::Exposition;

/// Hostile pod name: the output must remain valid.
const HOSTILE: &str = "a\"} 1\n# TYPE x counter\\n{b=\"\\";
const GIB: u64 = 1 << 30;

fn gpu(index: u32, sample: Option<GpuSample>, withheld: Option<&str>) -> GpuStatus {
    GpuStatus {
        gpu: Gpu {
            uuid: format!("GPU-{index}").as_str().into(),
            minor: index,
            model: "NVIDIA A100-SXM4-40GB".into(),
            memory_bytes: Bytes(40 * GIB),
            numa: None,
            pci: None,
            withheld: withheld.map(String::from),
        },
        sample,
        granted_memory: Bytes(12 * GIB),
        granted_millipercent: 30_000,
        shares: 2,
        unowned_processes: vec![7],
    }
}

fn gpu_sample(index: u32) -> GpuSample {
    GpuSample {
        uuid: format!("GPU-{index}").as_str().into(),
        health: None,
        mig: Some(false),
        memory_used: Some(Bytes(5 * GIB)),
        utilization: Some(70),
        temperature: Some(54),
        power_milliwatts: Some(120_500),
        processes: Vec::new(),
    }
}

fn share(gpu: u32, memory: Option<u64>, cores: Option<u32>) -> Share {
    Share {
        gpu: format!("GPU-{gpu}").as_str().into(),
        memory_bytes: memory.map(Bytes),
        cores: cores.and_then(Cores::percent),
        ceiling: None,
        whole: false,
    }
}

fn usage(used: u64) -> GpuUsage {
    GpuUsage {
        used,
        peak: 6 * GIB,
        refusals: 3,
        throttled: 1_500_000_000,
        spent: 2_250_000_000,
        ..GpuUsage::default()
    }
}

fn container(
    pod: &str,
    uid: &str,
    dialect: Dialect,
    shares: Vec<(Share, Option<GpuUsage>)>,
) -> ContainerReport {
    let seen = |(share, _): &(Share, Option<GpuUsage>)| {
        (share.gpu.clone(), ObservedUsage { memory: Bytes(3 * GIB), busy: 25, worked: Some(98_000_000_000) })
    };
    ContainerReport {
        pod: PodId { uid: uid.into(), namespace: "team".into(), name: pod.into() },
        container: "main".into(),
        dialect,
        observed: shares.iter().map(seen).collect(),
        shares,
        bypass_suspected: false,
    }
}

pub(super) fn report() -> NodeReport {
    NodeReport {
        at: 100_500_000_000,
        node: "node-1".into(),
        driver: "550.163.01".into(),
        simulated: true,
        gpus: vec![gpu(0, Some(gpu_sample(0)), None), gpu(1, None, Some("MIG is on"))],
        containers: vec![
            container(
                "train",
                "uid-1",
                Dialect::Volcano,
                vec![
                    (share(0, Some(8 * GIB), Some(30)), Some(usage(2 * GIB))),
                    (share(1, None, None), Some(usage(u64::MAX))),
                ],
            ),
            ContainerReport {
                bypass_suspected: true,
                ..container("serve", "uid-2", Dialect::Vcuda, vec![(share(0, Some(4 * GIB), Some(50)), None)])
            },
        ],
        counts: AgentCounters {
            allocations: DurationHistogram { counts: [9, 0, 0, 0, 0, 0, 0, 0, 0, 0], nanos: 2_000_000 },
            starts: DurationHistogram { counts: [0, 1, 2, 3, 0, 0, 0, 0, 0, 1], nanos: 3_040_000_000 },
            refused: 4,
            bypasses: 1,
            mismatches: 0,
            quarantined: 2,
        },
    }
}

fn parsed(report: NodeReport) -> Exposition {
    let text = render(report);
    Exposition::parse(&text).unwrap_or_else(|why| panic!("{why}\n{text}"))
}

#[test]
fn exposition_matches_the_golden_file() {
    let text = render(report());
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/metrics/tests/node.txt");
    if std::env::var_os("PARTAGE_WRITE_GOLDEN").is_some() {
        std::fs::write(&file, &text).unwrap();
    }
    let golden = std::fs::read_to_string(&file).unwrap();
    for (line, (is, was)) in text.lines().zip(golden.lines()).enumerate() {
        assert_eq!(is, was, "line {}", line + 1);
    }
    assert_eq!(text.lines().count(), golden.lines().count());
}

#[test]
fn gpu_metrics_have_native_and_compatible_names() {
    let all = parsed(report());
    let ours = [("gpu", "0"), ("uuid", "GPU-0"), ("model", "NVIDIA A100-SXM4-40GB")];
    for (name, figure) in [
        ("memory_bytes", (40 * GIB) as f64),
        ("memory_granted_bytes", (12 * GIB) as f64),
        ("memory_used_bytes", (5 * GIB) as f64),
        ("cores_guaranteed_ratio", 0.3),
        ("utilization_ratio", 0.7),
        ("temperature_celsius", 54.0),
        ("power_watts", 120.5),
        ("healthy", 1.0),
        ("unowned_processes", 1.0),
        ("shares", 2.0),
    ] {
        assert_eq!(all.value(&format!("partage_gpu_{name}"), &ours), Some(figure), "{name}");
    }
    assert_eq!(all.value("partage_gpu_healthy", &[("gpu", "1")]), Some(0.0));
    assert_eq!(
        all.value("partage_gpu_memory_used_bytes", &[("gpu", "1")]),
        None,
        "unknown is absent, and not zero"
    );
    let theirs = [("deviceidx", "0"), ("deviceuuid", "GPU-0"), ("zone", "vGPU"), ("nodeid", "node-1")];
    assert_eq!(all.value("HostGPUMemoryUsage", &theirs), Some((5 * GIB) as f64));
    assert_eq!(all.value("HostCoreUtilization", &theirs), Some(70.0));
    assert_eq!(all.value("hami_host_gpu_utilization_ratio", &[("device_index", "0")]), Some(70.0));
}

#[test]
fn container_metrics_have_native_and_compatible_names() {
    let all = parsed(report());
    let ours = [("namespace", "team"), ("pod", "train"), ("container", "main"), ("share", "0"), ("gpu", "0")];
    for (name, figure) in [
        ("memory_limit_bytes", (8 * GIB) as f64),
        ("memory_used_bytes", (2 * GIB) as f64),
        ("memory_peak_bytes", (6 * GIB) as f64),
        ("memory_seen_bytes", (3 * GIB) as f64),
        ("cores_guaranteed_ratio", 0.3),
        ("cores_ceiling_ratio", 0.3),
        ("utilization_ratio", 0.25),
        ("gpu_seconds_total", 2.25),
        ("throttled_seconds_total", 1.5),
        ("refusals_total", 3.0),
    ] {
        assert_eq!(all.value(&format!("partage_container_{name}"), &ours), Some(figure), "{name}");
    }
    let suspected = |pod| all.value("partage_container_bypass_suspected", &[("pod", pod)]);
    assert_eq!((suspected("train"), suspected("serve")), (Some(0.0), Some(1.0)));
    assert_eq!(all.value("partage_container_memory_limit_bytes", &[("share", "1")]), None, "no limit");
    assert_eq!(
        all.value("partage_container_memory_used_bytes", &[("pod", "serve")]),
        None,
        "the region cannot be read"
    );

    let theirs = [("podnamespace", "team"), ("podname", "train"), ("ctrname", "main"), ("zone", "vGPU")];
    let volcano = |name: &str, at: &str, uuid: &str| {
        all.value(name, &[&theirs[..], &[("vdeviceid", at), ("deviceuuid", uuid)]].concat())
    };
    assert_eq!(volcano("vGPU_device_memory_usage_in_bytes", "0", "GPU-0"), Some((2 * GIB) as f64));
    assert_eq!(volcano("vGPU_device_memory_limit_in_bytes", "0", "GPU-0"), Some((8 * GIB) as f64));
    assert_eq!(volcano("vGPU_device_memory_limit_in_bytes", "1", "GPU-1"), Some((40 * GIB) as f64));
    let most = Some((40 * GIB) as f64);
    assert_eq!(
        volcano("vGPU_device_memory_usage_in_bytes", "1", "GPU-1"),
        most,
        "limited to the memory of the GPU"
    );
    assert_eq!(volcano("Device_memory_desc_of_container", "0", "GPU-0"), Some((2 * GIB) as f64));
    assert_eq!(volcano("Device_utilization_desc_of_container", "0", "GPU-0"), Some(25.0));
    assert_eq!(volcano("Device_last_kernel_of_container", "0", "GPU-0"), Some(2.5));

    let vcuda =
        [("pod_name", "train"), ("namespace", "team"), ("node", "node-1"), ("container_name", "main")];
    let vcuda = |name: &str, key, value| all.value(name, &[&vcuda[..], &[(key, value)]].concat());
    assert_eq!(vcuda("container_gpu_utilization", "gpu", "gpu0"), Some(25.0));
    assert_eq!(vcuda("container_gpu_utilization", "gpu", "total"), Some(50.0));
    assert_eq!(vcuda("container_gpu_memory_total", "gpu_memory", "gpu1"), Some(3072.0));
    assert_eq!(vcuda("container_request_gpu_utilization", "req_of_gpu", "total"), Some(0.3));
    assert_eq!(
        vcuda("container_request_gpu_memory", "req_of_gpu_memory", "total"),
        Some((48u64 << 10) as f64)
    );
}

#[test]
fn compatible_metrics_have_the_labels_of_dashboards() {
    let all = parsed(report());
    let host = ["deviceidx", "devicetype", "deviceuuid", "nodeid", "zone"];
    let device = ["ctrname", "deviceuuid", "podname", "podnamespace", "vdeviceid", "zone"];
    let request = |last| ["container_name", "namespace", "node", "pod_name", last];
    for (name, labels) in [
        ("HostGPUMemoryUsage", &host[..]),
        ("HostCoreUtilization", &host),
        ("vGPU_device_memory_usage_in_bytes", &device),
        ("vGPU_device_memory_limit_in_bytes", &device),
        ("Device_memory_desc_of_container", &device),
        ("Device_utilization_desc_of_container", &device),
        ("Device_last_kernel_of_container", &device),
        ("container_request_gpu_utilization", &request("req_of_gpu")),
        ("container_request_gpu_memory", &request("req_of_gpu_memory")),
    ] {
        assert_eq!(all.families[name], "gauge");
        let mut found = all.samples.iter().filter(|sample| sample.name == name).peekable();
        assert!(found.peek().is_some(), "{name}");
        assert!(found.all(|sample| sample.labels.keys().eq(labels)), "{name}");
    }
}

#[test]
fn agent_metrics_are_exposed() {
    let all = parsed(report());
    let info = [("version", env!("CARGO_PKG_VERSION")), ("driver", "550.163.01"), ("simulated", "true")];
    assert_eq!(all.value("partage_info", &info), Some(1.0));
    for (name, figure) in [
        ("partage_refused_total", 4.0),
        ("partage_bypass_total", 1.0),
        ("partage_quarantined_total", 2.0),
        ("partage_ledger_mismatch", 0.0),
        ("partage_allocate_seconds_count", 9.0),
        ("partage_start_seconds_count", 7.0),
        ("partage_start_seconds_sum", 3.04),
    ] {
        assert_eq!(all.value(name, &[]), Some(figure), "{name}");
    }
    let up_to = |bound| all.value("partage_start_seconds_bucket", &[("le", bound)]);
    assert_eq!(
        (up_to("0.001"), up_to("0.005"), up_to("2.0"), up_to("+Inf")),
        (Some(0.0), Some(3.0), Some(6.0), Some(7.0))
    );
    assert_eq!(all.value("partage_containers", &[("dialect", "vcuda")]), Some(1.0));
    assert_eq!(all.value("partage_containers", &[("dialect", "hami")]), Some(0.0));
}

#[test]
fn pods_with_the_same_name_are_merged() {
    let mut twice = report();
    let old = ContainerReport {
        pod: PodId { uid: "uid-0".into(), ..twice.containers[0].pod.clone() },
        ..twice.containers[0].clone()
    };
    twice.containers.push(old);
    let all = parsed(twice);
    let labels = [("podname", "train"), ("vdeviceid", "0")];
    assert_eq!(all.value("vGPU_device_memory_usage_in_bytes", &labels), Some((4 * GIB) as f64));
    assert_eq!(all.value("Device_last_kernel_of_container", &labels), Some(2.5), "the one that worked last");
    let ours = [("pod", "train"), ("pod_uid", "uid-0"), ("share", "0")];
    assert_eq!(all.value("partage_container_memory_used_bytes", &ours), Some((2 * GIB) as f64));
}

#[test]
fn usage_of_two_shares_of_one_gpu_is_reported_once() {
    let mut report = report();
    report.containers.truncate(1);
    report.containers[0].shares[1].0.gpu = "GPU-0".into();
    report.containers[0].observed.remove("GPU-1");
    let all = parsed(report);
    assert_eq!(all.value("partage_container_memory_seen_bytes", &[("share", "0")]), Some((3 * GIB) as f64));
    assert_eq!(all.value("partage_container_memory_seen_bytes", &[("share", "1")]), None);
    assert_eq!(all.value("container_gpu_utilization", &[("gpu", "total")]), Some(25.0));
}

#[test]
fn names_are_escaped() {
    let mut report = report();
    report.node = HOSTILE.into();
    report.driver = HOSTILE.into();
    report.containers[0].pod.name = HOSTILE.into();
    report.containers[0].container = HOSTILE.into();
    let all = parsed(report);
    assert!(!all.families.contains_key("x"));
    let labels = [("podname", HOSTILE), ("ctrname", HOSTILE), ("vdeviceid", "0")];
    assert_eq!(all.value("vGPU_device_memory_usage_in_bytes", &labels), Some((2 * GIB) as f64));
}

#[test]
fn node_without_gpus_has_a_valid_exposition() {
    let empty =
        NodeReport { gpus: Vec::new(), containers: Vec::new(), counts: AgentCounters::default(), ..report() };
    assert_eq!(parsed(empty).value("partage_start_seconds_count", &[]), Some(0.0));
}

#[test]
fn text_format_names_families_after_their_samples() {
    let text = render(report());
    let classic = text_format::to_text_format(&text);
    let figures = |text: &str| -> Vec<String> {
        text.lines().filter(|line| !line.starts_with('#')).map(String::from).collect()
    };
    assert_eq!(figures(&classic), figures(&text), "the same figures");
    for line in [
        "# TYPE partage_info gauge",
        "# TYPE partage_refused_total counter",
        "# HELP partage_refused_total Number of refused container starts, including kubelet's retries.",
        "# TYPE partage_start_seconds histogram",
        "# TYPE HostGPUMemoryUsage gauge",
    ] {
        assert!(classic.lines().any(|is| is == line), "{line}\n{classic}");
    }
    assert!(!classic.contains("# UNIT") && !classic.contains("# EOF"));
}

#[test]
fn documentation_lists_exactly_the_exposed_metrics() {
    let page = include_str!("../../../../docs/metrics.md");
    let exposed: std::collections::BTreeSet<String> = parsed(report())
        .families
        .into_iter()
        .map(|(name, kind)| match kind.as_str() {
            "counter" => format!("{name}_total"),
            "info" => format!("{name}_info"),
            _ => name,
        })
        .collect();
    // In the tables, before the section of metrics that are not provided.
    let words =
        page.lines().filter(|line| line.starts_with('|')).flat_map(|line| line.split('`').skip(1).step_by(2));
    let is_ours = |word: &&str| ["partage_", "hami_"].iter().any(|start| word.starts_with(start));
    for word in words.clone().filter(is_ours) {
        assert!(exposed.contains(word), "{word} is not exposed");
    }
    let named: std::collections::BTreeSet<&str> = words.collect();
    for name in &exposed {
        assert!(named.contains(name.as_str()), "{name} is not documented");
    }
}
