//! What is injected, in pods of a real kubelet, containerd and runc: any image, any user, any environment finds the driver
//! behind the stand-ins, and keeps to its limits.
//!
//! This test binary is also the agent on the node, and the program in the pods: see [`on_the_node`] and [`client`].

use partage_agent::inject::{Container, Materials};
use partage_core::model::{Bytes, Node, Share};
use partage_driver_api::exports::DriverVersion;
use partage_e2e::late_plugin::{self, LatePlugin, Settings};
use partage_enforce::shares::region_limits;
use partage_host::cdi::Edits;
use partage_host::driver::Driver;
use partage_host::gpus::Gpus;
use partage_host::root::Root;
use partage_region::{RegionOwner as Region, RegionPolicy};
use partage_sim_node::node::{NodeConfig, NodeDir};
use partage_sim_node::profile::Profile as Card;
use partage_testkit::bed::{Bed, Profile};
use partage_testkit::clients::{Branch, Clients};
use partage_testkit::image::BedImage;
use partage_testkit::skip_or_fail;
use partage_testkit::workload::{self, Load};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use tokio::runtime::Handle;

/// Where programs are on the node and in pods. Nodes do not see all of the machine's files.
const PROGRAMS: &str = "/run/programs";
/// How this binary is called there.
const SELF: &str = "inject";
/// Set where this binary plays the agent: the pods that it makes regions for.
const PODS: &str = "PARTAGE_TEST_PODS";
const SIMULATED: &str = "/var/lib/partage/simulated";
const CARD: &str = "A100-SXM4-40GB";
const RESOURCE: &str = "example.com/late";
/// The GPU that is granted, and how much of its memory.
const GRANTED: usize = 1;
const MEMORY: Bytes = Bytes(2 << 30);

/// On the node: makes a simulated node, gathers what containers get, and says what each pod's is.
#[test]
fn on_the_node() {
    let Ok(pods) = std::env::var(PODS) else { return };
    let config = NodeConfig::new(DriverVersion::R550, Card::named(CARD).unwrap(), 2, 7).unwrap();
    let simulated = NodeDir::keep(Path::new(SIMULATED), &config, false).unwrap();
    let object = partage_sim_node::install::trusted_object().unwrap();
    partage_sim_node::install::libraries(&object, &simulated.libraries(), config.driver, simulated.path())
        .unwrap();
    let driver = Driver::simulated(simulated.path()).unwrap();
    let gpus = Gpus::open(&driver).unwrap();
    let node = gpus.node("node1").unwrap();
    let lib = Path::new("/var/lib/partage/lib");
    let materials = Materials::gather(&Root::here(), &driver, gpus.driver_version(), lib).unwrap();
    for pod in pods.split(',') {
        println!("@{pod} {}", serde_json::to_string(&granted(&materials, &node, pod)).unwrap());
    }
}

/// Makes a pod's region and device files, as the agent does.
fn granted(materials: &Materials, node: &Node, pod: &str) -> Edits {
    let gpu = &node.gpus[GRANTED];
    let share =
        Share { gpu: gpu.uuid.clone(), memory_bytes: Some(MEMORY), cores: None, ceiling: None, whole: false };
    let [region, devices] = ["regions", "devices"].map(|kind| Path::new("/run/partage").join(kind).join(pod));
    for folder in [&region, &devices] {
        fs::create_dir_all(folder).unwrap();
    }
    fs::write(devices.join(format!("nvidia{}", gpu.minor)), "").unwrap();
    let context = Bytes(Card::named(CARD).unwrap().memory.context);
    let limits = region_limits(&share, context, false).unwrap();
    Region::create(&region, &[limits], RegionPolicy::default()).unwrap();
    let env = BTreeMap::from([("NVIDIA_VISIBLE_DEVICES".to_string(), gpu.uuid.to_string())]);
    let container = Container {
        node,
        shares: &[share],
        region: &region,
        devices: Some(&devices),
        env: &env,
        nvidia_runtime: false,
    };
    materials.edits(&container).unwrap()
}

/// In a pod: takes memory within its limit, and beyond it.
#[test]
fn client() {
    if std::env::current_exe().unwrap() != Path::new(PROGRAMS).join(SELF) {
        return;
    }
    for memory_mib in [1024, 4096] {
        let load = Load { gpu: 0, memory_mib, busy: 0 };
        let done = workload::run(&load, &mut Vec::new(), &AtomicBool::new(true));
        let said = done.map_or_else(|error| error.to_string(), |()| "held".to_string());
        println!("@{memory_mib} {said}");
    }
}

/// Asks for memory again and again, in every way that a program may be started.
const EVERY_WAY: &str = r#"
client="/run/programs/inject --exact inject::client --nocapture"
echo "@plain";        $client
echo "@no variables"; env -i $client
echo "@path";         LD_LIBRARY_PATH=/usr/local/nvidia/lib64 $client
echo "@path in vain"; LD_LIBRARY_PATH=/nowhere $client
echo "@path to ours"; LD_LIBRARY_PATH=/usr/local/partage/driver $client
if [ "$(id -u)" = 0 ]; then echo "@login"; su - user -c "$client"; fi
echo "@visible $NVIDIA_VISIBLE_DEVICES"
for smi in nvidia-smi /usr/local/nvidia/bin/nvidia-smi; do
  echo "@smi $($smi --query-gpu=uuid,memory.total --format=csv,noheader)"
done
if echo x > /usr/local/partage/region/limits; then echo "@limits are written"; fi
if [ -e /var/lib/partage/simulated/dev/nvidia0 ]; then echo "@another GPU is there"; fi
# Not from where the driver's own libraries can be seen, either.
echo "@driver"; LD_LIBRARY_PATH=/var/lib/partage/simulated/lib $client
"#;

/// musl cannot load what is made for glibc, also where it is led to it, and goes on.
const MUSL: &str = "musl-program && LD_LIBRARY_PATH=/usr/lib64:/usr/local/nvidia/lib64 musl-program";

fn pod(name: &str, image: &str, script: &str, container: Value, volumes: &[(&str, &str)]) -> String {
    let mut mounts = vec![json!({"name": "programs", "mountPath": PROGRAMS, "readOnly": true})];
    let mut all = vec![json!({"name": "programs", "hostPath": {"path": PROGRAMS, "type": "Directory"}})];
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

/// The same in the words of the plugin.
fn in_its_words(edits: Edits) -> late_plugin::Edits {
    let text = |path: PathBuf| path.to_str().unwrap().to_string();
    assert_eq!(edits.device_nodes, []);
    let mount = |mount: partage_host::cdi::Mount| late_plugin::Mount {
        host_path: text(mount.host_path),
        container_path: text(mount.container_path),
        options: mount.options,
    };
    late_plugin::Edits {
        env: edits.env,
        device_nodes: Vec::new(),
        mounts: edits.mounts.into_iter().map(mount).collect(),
    }
}

#[test]
fn pods_keep_to_their_limits_however_programs_start() {
    let clients = match Clients::ready() {
        Ok(clients) => clients,
        Err(missing) => return skip_or_fail(&missing),
    };
    let other = match BedImage::Other.ready() {
        Ok(archive) => archive,
        Err(missing) => return skip_or_fail(&missing),
    };
    let Some(bed) = Bed::for_test(Profile::one_node().debian().image(other)) else { return };
    let node = bed.node("node1").unwrap();
    let at = |path: &str| node.path(path).unwrap();
    fs::create_dir(at(PROGRAMS)).unwrap();
    let put = |file: &Path, to: &str| fs::copy(file, at(to)).unwrap();
    let this = format!("{PROGRAMS}/{SELF}");
    put(&std::env::current_exe().unwrap(), &this);
    let objects = [
        (partage_shim::install::shared_object(), partage_shim::install::VARIABLE),
        (partage_sim_node::install::shared_object(), partage_sim_node::install::VARIABLE),
    ];
    let [shim, sim] = objects.map(|(object, variable)| {
        let to = format!("{PROGRAMS}/{variable}.so");
        put(&object.unwrap(), &to);
        format!("{variable}={to}")
    });
    put(&clients.nvidia_smi(Branch::R550), "/usr/bin/nvidia-smi");

    let pods = ["root", "user", "covered", "other", "musl", "static"];
    let named = format!("{PODS}={}", pods.join(","));
    let role = [&shim, &sim, &named, &this, "--exact", "inject::on_the_node", "--nocapture"];
    let said = node.run("/usr/bin/env", role).unwrap();
    let edits: BTreeMap<String, Edits> = said
        .lines()
        .filter_map(|line| line.split_once('@')?.1.split_once(' '))
        .map(|(pod, edits)| (pod.to_string(), serde_json::from_str(edits).expect(&said)))
        .collect();
    let granted = edits["root"].env[0].split_once('=').unwrap().1.to_string();

    fs::create_dir_all(at("/etc/cdi")).unwrap();
    let record = at("/var/lib/late-record.json");
    let mut settings = Settings::new(
        &at("/var/lib/kubelet"),
        &at("/var/log/pods"),
        &at("/run/containerd/containerd.sock"),
        &at("/etc/cdi"),
        &record,
    );
    settings.edits = Arc::new(move |owner| in_its_words(edits[&owner.pod].clone()));
    bed.block_on(async {
        let plugin = LatePlugin::start(&Handle::current(), settings).unwrap();
        plugin.watched().await;
        let user = json!({
            "securityContext": {"runAsUser": 1000, "readOnlyRootFilesystem": true},
            "env": [
                {"name": "LD_LIBRARY_PATH", "value": "/nowhere"},
                {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
            ],
        });
        // Volumes above what is injected, and in its very place.
        let above = [
            ("a", "/usr/local/partage"),
            ("b", "/usr/local/partage/region/limits"),
            ("c", "/usr/local/nvidia"),
            ("d", "/usr/lib64"),
        ];
        let manifests = [
            pod("root", "debian", EVERY_WAY, json!({}), &[]),
            pod("user", "debian", EVERY_WAY, user, &[]),
            pod("covered", "debian", EVERY_WAY, json!({}), &above[..3]),
            pod("other", "other", EVERY_WAY, json!({}), &[]),
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
            must_be_kept(pod, &bed.kubectl(&["logs", pod]).unwrap(), &granted);
        }
        let logs = bed.kubectl(&["logs", "musl"]).unwrap();
        let unharmed = |line: &str| line.starts_with("musl works, libcuda.so.1 Error ");
        assert!(logs.lines().count() == 2 && logs.lines().all(unharmed), "{logs}");
        let logs = bed.kubectl(&["logs", "static"]).unwrap();
        assert!(logs.contains("libcuda.so.1") && logs.ends_with("@unharmed\n"), "{logs}");
    });
}

/// A pod's limits held in every way that its programs started.
#[track_caller]
fn must_be_kept(pod: &str, logs: &str, granted: &str) {
    // The harness writes its own words before ours.
    let said: Vec<&str> = logs.lines().filter_map(|line| Some(line.split_once('@')?.1)).collect();
    let mut ways = vec!["plain", "no variables", "path", "path in vain", "path to ours"];
    if pod != "user" {
        ways.push("login");
    }
    let refused = "4096 cuMemAlloc_v2 was refused: out of memory (CUDA_ERROR_OUT_OF_MEMORY)";
    let mut expected: Vec<String> =
        ways.iter().flat_map(|way| [way, "1024 held", refused].map(String::from)).collect();
    expected.push(format!("visible {granted}"));
    let seen = format!("smi {granted}, {} MiB", MEMORY.0 >> 20);
    expected.extend([seen.clone(), seen, "driver".to_string()]);
    let (first, last) = said.split_at(expected.len().min(said.len()));
    assert_eq!(first, expected, "{pod}:\n{logs}");
    // Then comes why the driver cannot be loaded from elsewhere.
    assert!(last.len() == 2 && last.iter().all(|line| line.contains("libcuda")), "{pod}:\n{logs}");
}
