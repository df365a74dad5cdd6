//! Injection in pods of a real kubelet, containerd and runc: with any image, any user and any environment a program
//! loads the driver through the shim, and its limits apply.
//! This test binary is also the agent on the node, and the program in the pods: see [`prepare_edits_on_the_node`] and
//! [`run_client_in_pod`].

use partage_agent::cdi_edits::{CdiTarget, DriverBundle};
use partage_core::model::{Bytes, Node, Share, TurnPreferences};
use partage_driver_api::exports::DriverVersion;
use partage_e2e::late_plugin::{self, LatePlugin, LatePluginSettings};
use partage_enforce::shares::region_limits;
use partage_host::cdi::CdiEdits;
use partage_host::driver::InstalledDriver;
use partage_host::gpus::NvmlSession;
use partage_host::host_root::HostRoot;
use partage_region::{RegionOwner as Region, RegionPolicy};
use partage_sim_node::node::{NodeConfig, NodeDir};
use partage_sim_node::profile::GpuProfile;
use partage_testkit::bed::{BedProfile, TestBed};
use partage_testkit::clients::{Clients, DriverBranch};
use partage_testkit::image::BedImage;
use partage_testkit::skip_or_fail;
use partage_testkit::workload::{self, WorkloadOptions};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use tokio::runtime::Handle;

/// Where programs are on the node and in pods. Nodes do not see all of the machine's files.
const PROGRAMS_DIR: &str = "/run/programs";
/// The name of this binary there.
const OWN_NAME: &str = "inject";
/// Set if this binary acts as the agent: the pods that it makes regions for.
const PODS_VARIABLE: &str = "PARTAGE_TEST_PODS";
const SIMULATED_DIR: &str = "/var/lib/partage/simulated";
const CARD: &str = "A100-SXM4-40GB";
const RESOURCE: &str = "example.com/late";
/// The index of the granted GPU, and the granted memory.
const GRANTED_GPU: usize = 1;
const MEMORY: Bytes = Bytes(2 << 30);

/// Runs on the node: makes a simulated node, collects what containers get, and prints each pod's edits.
#[test]
fn prepare_edits_on_the_node() {
    let Ok(pods) = std::env::var(PODS_VARIABLE) else { return };
    let config = NodeConfig::new(DriverVersion::R550, GpuProfile::named(CARD).unwrap(), 2, 7).unwrap();
    let simulated = NodeDir::open_or_recreate(Path::new(SIMULATED_DIR), &config, false).unwrap();
    let object = partage_sim_node::install::trusted_object().unwrap();
    partage_sim_node::install::write_libraries(
        &object,
        &simulated.libraries(),
        config.driver,
        simulated.path(),
    )
    .unwrap();
    let driver = InstalledDriver::simulated(simulated.path()).unwrap();
    let gpus = NvmlSession::open(&driver).unwrap();
    let node = gpus.node("node1").unwrap();
    let lib = Path::new("/var/lib/partage/lib");
    let materials = DriverBundle::install(&HostRoot::here(), &driver, gpus.driver_version(), lib).unwrap();
    for pod in pods.split(',') {
        println!("@{pod} {}", serde_json::to_string(&prepare_pod(&materials, &node, pod)).unwrap());
    }
}

/// Makes a pod's region and device files, as the agent does.
fn prepare_pod(materials: &DriverBundle, node: &Node, pod: &str) -> CdiEdits {
    let gpu = &node.gpus[GRANTED_GPU];
    let share =
        Share { gpu: gpu.uuid.clone(), memory_bytes: Some(MEMORY), cores: None, ceiling: None, whole: false };
    let [region, devices] = ["regions", "devices"].map(|kind| Path::new("/run/partage").join(kind).join(pod));
    for folder in [&region, &devices] {
        fs::create_dir_all(folder).unwrap();
    }
    fs::write(devices.join(format!("nvidia{}", gpu.minor)), "").unwrap();
    let context = Bytes(GpuProfile::named(CARD).unwrap().memory.context);
    let limits = region_limits(&share, context, false, TurnPreferences::default()).unwrap();
    Region::create(&region, &[limits], RegionPolicy::default()).unwrap();
    let env = BTreeMap::from([("NVIDIA_VISIBLE_DEVICES".to_string(), gpu.uuid.to_string())]);
    let container = CdiTarget {
        node,
        shares: &[share],
        region: &region,
        devices: Some(&devices),
        env: &env,
        nvidia_runtime: false,
    };
    materials.edits(&container).unwrap()
}

/// Runs in a pod: allocates memory within its limit, and above it.
#[test]
fn run_client_in_pod() {
    if std::env::current_exe().unwrap() != Path::new(PROGRAMS_DIR).join(OWN_NAME) {
        return;
    }
    for memory_mib in [1024, 4096] {
        let load = WorkloadOptions { gpu: 0, memory_mib, busy: 0 };
        let done = workload::run(&load, &mut Vec::new(), &AtomicBool::new(true));
        let message = done.map_or_else(|error| error.to_string(), |()| "held".to_string());
        println!("@{memory_mib} {message}");
    }
}

/// Allocates memory in every way that a program may be started.
const ALL_START_METHODS: &str = r#"
client="/run/programs/inject --exact cdi_injection::run_client_in_pod --nocapture"
echo "@plain";        $client
echo "@no variables"; env -i $client
echo "@path";         LD_LIBRARY_PATH=/usr/local/nvidia/lib64 $client
echo "@wrong path"; LD_LIBRARY_PATH=/nowhere $client
echo "@path to the shim"; LD_LIBRARY_PATH=/usr/local/partage/driver $client
if [ "$(id -u)" = 0 ]; then echo "@login"; su - user -c "$client"; fi
echo "@visible $NVIDIA_VISIBLE_DEVICES"
for smi in nvidia-smi /usr/local/nvidia/bin/nvidia-smi; do
  echo "@smi $($smi --query-gpu=uuid,memory.total --format=csv,noheader)"
done
if echo x > /usr/local/partage/region/limits; then echo "@limits are written"; fi
if [ -e /var/lib/partage/simulated/dev/nvidia0 ]; then echo "@another GPU is there"; fi
# The driver's own directory does not help either.
echo "@driver"; LD_LIBRARY_PATH=/var/lib/partage/simulated/lib $client
"#;

/// musl cannot load a library for glibc, even when its search path leads to one, and continues.
const MUSL: &str = "musl-program && LD_LIBRARY_PATH=/usr/lib64:/usr/local/nvidia/lib64 musl-program";

fn pod(name: &str, image: &str, script: &str, container: Value, volumes: &[(&str, &str)]) -> String {
    let mut mounts = vec![json!({"name": "programs", "mountPath": PROGRAMS_DIR, "readOnly": true})];
    let mut all = vec![json!({"name": "programs", "hostPath": {"path": PROGRAMS_DIR, "type": "Directory"}})];
    for (volume, at) in volumes {
        mounts.push(json!({"name": volume, "mountPath": at}));
        all.push(json!({"name": volume, "emptyDir": {}}));
    }
    let mut main = json!({
        "name": "main",
        "image": format!("localhost/{image}:bed"),
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", script],
        "resources": {"limits": {RESOURCE: 1}},
        "volumeMounts": mounts,
    });
    main.as_object_mut().unwrap().extend(container.as_object().unwrap().clone());
    let spec = json!({"restartPolicy": "Never", "containers": [main], "volumes": all});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}).to_string()
}

/// Converts the edits to the plugin's type.
fn to_plugin_edits(edits: CdiEdits) -> late_plugin::ContainerEdits {
    let text = |path: PathBuf| path.to_str().unwrap().to_string();
    assert_eq!(edits.device_nodes, []);
    let mount = |mount: partage_host::cdi::CdiMount| late_plugin::EditMount {
        host_path: text(mount.host_path),
        container_path: text(mount.container_path),
        options: mount.options,
    };
    late_plugin::ContainerEdits {
        env: edits.env,
        device_nodes: Vec::new(),
        mounts: edits.mounts.into_iter().map(mount).collect(),
    }
}

#[test]
fn limits_hold_for_every_way_to_start_a_program() {
    let clients = match Clients::ready() {
        Ok(clients) => clients,
        Err(missing) => return skip_or_fail(&missing),
    };
    let other = match BedImage::Other.ready() {
        Ok(archive) => archive,
        Err(missing) => return skip_or_fail(&missing),
    };
    let Some(bed) = TestBed::for_test(BedProfile::one_node().debian().image(other)) else { return };
    let node = bed.node("node1").unwrap();
    let at = |path: &str| node.path(path).unwrap();
    fs::create_dir(at(PROGRAMS_DIR)).unwrap();
    let put = |file: &Path, to: &str| fs::copy(file, at(to)).unwrap();
    let this = format!("{PROGRAMS_DIR}/{OWN_NAME}");
    put(&std::env::current_exe().unwrap(), &this);
    let objects = [
        (partage_shim::install::shared_object(), partage_shim::install::LIBRARY_VARIABLE),
        (partage_sim_node::install::shared_object(), partage_sim_node::install::LIBRARY_VARIABLE),
    ];
    let [shim, sim] = objects.map(|(object, variable)| {
        let to = format!("{PROGRAMS_DIR}/{variable}.so");
        put(&object.unwrap(), &to);
        format!("{variable}={to}")
    });
    put(&clients.nvidia_smi(DriverBranch::R550), "/usr/bin/nvidia-smi");

    let pods = ["root", "user", "covered", "other", "musl", "static"];
    let named = format!("{PODS_VARIABLE}={}", pods.join(","));
    let role =
        [&shim, &sim, &named, &this, "--exact", "cdi_injection::prepare_edits_on_the_node", "--nocapture"];
    let output = node.run("/usr/bin/env", role).unwrap();
    let edits: BTreeMap<String, CdiEdits> = output
        .lines()
        .filter_map(|line| line.split_once('@')?.1.split_once(' '))
        .map(|(pod, edits)| (pod.to_string(), serde_json::from_str(edits).expect(&output)))
        .collect();
    let granted = edits["root"].env[0].split_once('=').unwrap().1.to_string();

    fs::create_dir_all(at("/etc/cdi")).unwrap();
    let record = at("/var/lib/late-record.json");
    let mut settings = LatePluginSettings::new(
        &at("/var/lib/kubelet"),
        &at("/var/log/pods"),
        &at("/run/containerd/containerd.sock"),
        &at("/etc/cdi"),
        &record,
    );
    settings.edits = Arc::new(move |owner| to_plugin_edits(edits[&owner.pod].clone()));
    bed.block_on(async {
        let plugin = LatePlugin::start(&Handle::current(), settings).unwrap();
        plugin.wait_until_watched().await;
        let user = json!({
            "securityContext": {"runAsUser": 1000, "readOnlyRootFilesystem": true},
            "env": [
                {"name": "LD_LIBRARY_PATH", "value": "/nowhere"},
                {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
            ],
        });
        // Volumes above the injected paths, and at the same paths.
        let above = [
            ("a", "/usr/local/partage"),
            ("b", "/usr/local/partage/region/limits"),
            ("c", "/usr/local/nvidia"),
            ("d", "/usr/lib64"),
        ];
        let manifests = [
            pod("root", "debian", ALL_START_METHODS, json!({}), &[]),
            pod("user", "debian", ALL_START_METHODS, user, &[]),
            pod("covered", "debian", ALL_START_METHODS, json!({}), &above[..3]),
            pod("other", "other", ALL_START_METHODS, json!({}), &[]),
            pod("musl", "other", MUSL, json!({}), &[]),
            pod("static", "busybox", "ls /usr/lib64 && echo @unharmed", json!({}), &above[3..]),
        ];
        for manifest in &manifests {
            bed.kubectl_with(&["apply", "-f", "-"], manifest).unwrap();
        }
        for pod in pods {
            let over = format!("pod/{pod}");
            let over = ["wait", "--for=jsonpath={.status.phase}=Succeeded", &over, "--timeout=300s"];
            if let Err(error) = bed.kubectl(&over) {
                let described = bed.kubectl(&["describe", "pod", pod]).unwrap_or_default();
                panic!("{pod}: {error}\n{described}\n{}", bed.kubectl(&["logs", pod]).unwrap_or_default());
            }
        }
        for pod in ["root", "user", "covered", "other"] {
            assert_limits_held(pod, &bed.kubectl(&["logs", pod]).unwrap(), &granted);
        }
        let logs = bed.kubectl(&["logs", "musl"]).unwrap();
        let unharmed = |line: &str| line.starts_with("musl works, libcuda.so.1 Error ");
        assert!(logs.lines().count() == 2 && logs.lines().all(unharmed), "{logs}");
        let logs = bed.kubectl(&["logs", "static"]).unwrap();
        assert!(logs.contains("libcuda.so.1") && logs.ends_with("@unharmed\n"), "{logs}");
    });
}

/// Checks that a pod's limits applied in every way that its programs started.
#[track_caller]
fn assert_limits_held(pod: &str, logs: &str, granted: &str) {
    // The test harness prints before this program does.
    let found: Vec<&str> = logs.lines().filter_map(|line| Some(line.split_once('@')?.1)).collect();
    let mut ways = vec!["plain", "no variables", "path", "wrong path", "path to the shim"];
    if pod != "user" {
        ways.push("login");
    }
    let refused = "4096 cuMemAlloc_v2 failed: out of memory (CUDA_ERROR_OUT_OF_MEMORY)";
    let mut expected: Vec<String> =
        ways.iter().flat_map(|way| [way, "1024 held", refused].map(String::from)).collect();
    expected.push(format!("visible {granted}"));
    let seen = format!("smi {granted}, {} MiB", MEMORY.0 >> 20);
    expected.extend([seen.clone(), seen, "driver".to_string()]);
    let (first, last) = found.split_at(expected.len().min(found.len()));
    assert_eq!(first, expected, "{pod}:\n{logs}");
    // The last lines explain why the driver cannot be loaded from elsewhere.
    assert!(last.len() == 2 && last.iter().all(|line| line.contains("libcuda")), "{pod}:\n{logs}");
}
