use super::*;
use crate::report::{DaemonReport, DriverReport, ShareStage, WaitingReport};
use partage_core::model::{Bytes, Cores};
use std::collections::BTreeMap;

/// A sample line: name, labels in order, value.
type MetricSample = (String, Vec<(String, String)>, f64);

/// Parses OpenMetrics text strictly.
fn parsed(text: &str) -> (BTreeMap<String, String>, Vec<MetricSample>) {
    let (mut types, mut samples) = (BTreeMap::new(), Vec::new());
    let body = text.strip_suffix("# EOF\n").expect("the text ends with EOF");
    for line in body.strip_suffix('\n').unwrap_or(body).split('\n') {
        match line.strip_prefix("# ") {
            Some(meta) => {
                let (kind, rest) = meta.split_once(' ').unwrap();
                let (name, rest) = rest.split_once(' ').unwrap();
                match kind {
                    "TYPE" => assert!(types.insert(name.into(), rest.into()).is_none(), "{name} twice"),
                    "UNIT" => assert!(name.ends_with(&format!("_{rest}")), "{line}"),
                    "HELP" => assert!(rest.ends_with('.'), "{line}"),
                    _ => panic!("{line}"),
                }
            }
            None => samples.push(sample(line)),
        }
    }
    (types, samples)
}

fn sample(line: &str) -> MetricSample {
    let end = line.find(['{', ' ']).unwrap();
    let name = line[..end].to_string();
    assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{line}");
    let mut labels = Vec::new();
    let mut rest = &line[end..];
    if let Some(mut inner) = rest.strip_prefix('{') {
        while !inner.starts_with('}') {
            let (key, after) = inner.trim_start_matches(',').split_once("=\"").unwrap();
            let (value, after) = quoted(after);
            labels.push((key.to_string(), value));
            inner = after;
        }
        rest = &inner[1..];
    }
    (name, labels, rest.trim().parse().unwrap_or_else(|_| panic!("{line}")))
}

/// Returns a value up to its closing quote, and the rest.
fn quoted(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut letters = text.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return (value, &text[at + 1..]),
            '\\' => value.push(match letters.next().unwrap().1 {
                'n' => '\n',
                other => other,
            }),
            other => value.push(other),
        }
    }
    panic!("no end: {text}")
}

const HOSTILE: &str = "a\"} 1\n# TYPE x counter\\n{b=\"\\";

fn report() -> MachineReport {
    let gpu = |index: u32| GpuReport {
        index,
        uuid: format!("GPU-{index}").as_str().into(),
        model: "NVIDIA A100-SXM4-40GB".into(),
        memory_bytes: Bytes(40 << 30),
        granted_memory_bytes: Bytes(8 << 30),
        guaranteed_cores: Cores::percent(30).unwrap(),
        reserved_memory_bytes: Bytes::ZERO,
        used_memory_bytes: (index == 0).then_some(Bytes(5 << 30)),
        utilization: Some(70),
        temperature: Some(54),
        power_milliwatts: Some(120_500),
        unhealthy: (index == 1).then(|| "XID 79".into()),
        unowned_processes: vec![7],
    };
    let gpu_share = |gpu: u32| GpuShareReport {
        gpu,
        uuid: format!("GPU-{gpu}").as_str().into(),
        memory_bytes: (gpu == 0).then_some(Bytes(8 << 30)),
        cores: Cores::percent(30),
        ceiling: None,
        whole: false,
        // A tenant can write any value into its region.
        used_bytes: Bytes(u64::MAX),
        peak_bytes: Bytes(6 << 30),
        refusals: 3,
        throttled_nanos: 1_500_000_000,
        spent_nanos: 2_250_000_000,
        waiting: false,
    };
    let share = |name: &str, gpus: &[u32]| ShareReport {
        name: name.into(),
        user: HOSTILE.into(),
        uid: 1000,
        stage: ShareStage::Running,
        since: 0,
        pid: 1,
        command: vec!["work".into()],
        confinement: "mount namespace".into(),
        cgroup: true,
        device_filter: true,
        members: 2,
        processes: Vec::new(),
        oversubscribe: false,
        low_latency: false,
        priority: 0,
        gpu_shares: gpus.iter().map(|gpu| gpu_share(*gpu)).collect(),
        bypass_suspected: vec!["why".into()],
    };
    let waiting = || WaitingReport {
        name: "w".into(),
        user: "u".into(),
        requested: "8 GiB".into(),
        why: "full".into(),
        since: 0,
    };
    MachineReport {
        at: 0,
        machine: "box".into(),
        daemon: DaemonReport {
            pid: 1,
            version: "0.1.0".into(),
            since: 0,
            foreground: true,
            metrics: None,
            warnings: Vec::new(),
        },
        driver: DriverReport { version: "550.163.01".into(), simulated: true },
        gpus: vec![gpu(0), gpu(1)],
        shares: vec![share(HOSTILE, &[0, 1]), share("plain", &[1])],
        waiting: vec![waiting(), waiting()],
    }
}

fn value(samples: &[MetricSample], name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    let has = |sample: &&MetricSample| {
        let all = labels.iter().map(|(key, value)| (key.to_string(), value.to_string()));
        sample.0 == name && all.collect::<Vec<_>>().iter().all(|label| sample.1.contains(label))
    };
    let found: Vec<&MetricSample> = samples.iter().filter(has).collect();
    assert!(found.len() < 2, "{name} {labels:?} twice");
    found.first().map(|sample| sample.2)
}

#[test]
fn gpu_metrics_have_names_and_labels() {
    let (types, samples) = parsed(&text(&report()));
    for (name, figure) in [
        ("memory_bytes", (40u64 << 30) as f64),
        ("memory_granted_bytes", (8u64 << 30) as f64),
        ("memory_used_bytes", (5u64 << 30) as f64),
        ("cores_guaranteed_ratio", 0.3),
        ("utilization_ratio", 0.7),
        ("temperature_celsius", 54.0),
        ("power_watts", 120.5),
        ("healthy", 1.0),
        ("unowned_processes", 1.0),
        ("shares", 1.0),
    ] {
        let name = format!("partage_gpu_{name}");
        assert_eq!(types[&name], "gauge");
        let labels = [("gpu", "0"), ("uuid", "GPU-0"), ("model", "NVIDIA A100-SXM4-40GB")];
        assert_eq!(value(&samples, &name, &labels), Some(figure), "{name}");
    }
    assert_eq!(value(&samples, "partage_gpu_healthy", &[("gpu", "1")]), Some(0.0));
    assert_eq!(
        value(&samples, "partage_gpu_memory_used_bytes", &[("gpu", "1")]),
        None,
        "an unknown value is left out"
    );
}

#[test]
fn share_metrics_escape_hostile_names() {
    let (types, samples) = parsed(&text(&report()));
    let labels = [("share", HOSTILE), ("user", HOSTILE), ("gpu", "0")];
    for (name, kind, figure) in [
        ("memory_limit_bytes", "gauge", (8u64 << 30) as f64),
        ("memory_used_bytes", "gauge", u64::MAX as f64),
        ("memory_peak_bytes", "gauge", (6u64 << 30) as f64),
        ("cores_guaranteed_ratio", "gauge", 0.3),
        ("cores_ceiling_ratio", "gauge", 0.3),
        ("gpu_seconds_total", "counter", 2.25),
        ("throttled_seconds_total", "counter", 1.5),
        ("refusals_total", "counter", 3.0),
    ] {
        let name = format!("partage_share_{name}");
        assert_eq!(types[name.trim_end_matches("_total")], kind);
        assert_eq!(value(&samples, &name, &labels), Some(figure), "{name}");
    }
    assert_eq!(value(&samples, "partage_share_memory_limit_bytes", &[("share", "plain")]), None);
    for (name, figure) in [("bypass_suspected", 1.0), ("processes", 2.0)] {
        let name = format!("partage_share_{name}");
        assert_eq!(value(&samples, &name, &labels[..2]), Some(figure), "{name}");
    }
}

#[test]
fn machine_metrics_are_rendered() {
    let (types, samples) = parsed(&text(&report()));
    assert_eq!((types["partage"].as_str(), types["partage_waiting"].as_str()), ("info", "gauge"));
    let labels = [("version", "0.1.0"), ("driver", "550.163.01"), ("simulated", "true")];
    assert_eq!(value(&samples, "partage_info", &labels), Some(1.0));
    assert_eq!(value(&samples, "partage_waiting", &[]), Some(2.0));
    // No name of a share created a line of its own.
    let known = |name: &str| types.keys().any(|family| name.starts_with(family.as_str()));
    assert!(samples.iter().all(|(name, ..)| known(name)) && !types.contains_key("x"));
    assert_eq!(types.len(), 2 + 10 + 2 + 8);
}
