//! A simulated node that is shared by the pods of a node, each in a pid namespace of its own: the processes of a GPU
//! and their memory look the same from everywhere, and GPU time is divided fairly.

use partage_sim_node::install;
use partage_sim_node::node::NODE_DIR_VARIABLE;
use partage_sim_node::profile::GpuProfile;
use partage_testkit::bed::{BedNode, BedProfile, TestBed};
use partage_testkit::clients::{Clients, DriverBranch};
use partage_testkit::eventually;
use partage_testkit::skip_or_fail;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

const GPU_MODEL: &str = "A100-SXM4-40GB";
/// The simulated node's directory, on the node and in its containers. `/run` is in memory.
const SIM_DIR: &str = "/run/sim";
/// The directory of programs, also the same in both. Nodes do not see all of the machine's files.
const PROGRAMS_DIR: &str = "/run/programs";

/// A bed with a simulated node on its node.
struct SimulatedNodeBed<'a> {
    bed: &'a TestBed,
    node: &'a BedNode,
}

/// The values of the GPU from `nvidia-smi`: pids with their memory, and the memory in total, in MiB.
#[derive(Debug)]
struct SmiReport {
    processes: BTreeMap<u32, u64>,
    used: u64,
}

impl SmiReport {
    fn parse(output: &str) -> Self {
        let number = |word: &str| word.trim().parse::<u64>().unwrap_or_else(|_| panic!("{output:?}"));
        let (used, processes) = output.split_once('\n').expect(output);
        let processes = processes.lines().map(|line| {
            let (pid, memory) = line.split_once(',').expect(output);
            (number(pid) as u32, number(memory))
        });
        Self { processes: processes.collect(), used: number(used) }
    }

    /// Returns whether exactly these processes are on the GPU, and no other memory is used.
    fn matches(&self, processes: &[(u32, u64)]) -> bool {
        let memory: u64 = processes.iter().map(|(_, memory)| memory).sum();
        // Each has 64 KiB for its kernel as well. `nvidia-smi` rounds them down for a process and up for the GPU.
        let rest = u64::from(!processes.is_empty());
        self.processes.iter().map(|(pid, memory)| (*pid, *memory)).eq(processes.iter().copied())
            && self.used == memory + rest
    }

    #[track_caller]
    fn assert_matches(&self, processes: &[(u32, u64)]) {
        assert!(self.matches(processes), "{self:?}, expected {processes:?}");
    }
}

/// Returns the shell commands whose output [`SmiReport`] is parsed from.
fn smi_script() -> String {
    let smi = format!("{PROGRAMS_DIR}/nvidia-smi");
    let form = "--format=csv,noheader,nounits";
    format!("{smi} --query-gpu=memory.used {form} && {smi} --query-compute-apps=pid,used_memory {form}")
}

impl<'a> SimulatedNodeBed<'a> {
    /// Makes the simulated node on the node, so that the node's pids are the host's.
    fn start(bed: &'a TestBed, programs: &[(&str, PathBuf)]) -> Self {
        let test_node = Self { bed, node: bed.node("node1").unwrap() };
        let folder = test_node.node.path(PROGRAMS_DIR).unwrap();
        std::fs::create_dir(&folder).unwrap();
        for (name, program) in programs {
            std::fs::copy(program, folder.join(name)).unwrap();
        }
        test_node
            .on_node("partage", &["sim", "env", "--dir", SIM_DIR, "--model", GPU_MODEL, "--driver", "550"]);
        test_node
    }

    /// Runs a program on the node, outside of pods.
    fn on_node(&self, program: &str, arguments: &[&str]) -> String {
        let (sim, libraries) =
            (format!("{NODE_DIR_VARIABLE}={SIM_DIR}"), format!("LD_LIBRARY_PATH={SIM_DIR}/lib"));
        let program = if program.starts_with('/') { program } else { &format!("{PROGRAMS_DIR}/{program}") };
        let before = [sim.as_str(), libraries.as_str(), program];
        self.node.run("/usr/bin/env", before.iter().chain(arguments)).unwrap()
    }

    /// Starts a pod that holds memory and always keeps the GPU busy, and waits until it does.
    async fn start_training_pod(&self, name: &str, memory_mib: u64, user: u32) {
        let (memory, libraries) = (memory_mib.to_string(), format!("{SIM_DIR}/lib"));
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "restartPolicy": "Never",
                "securityContext": {"runAsUser": user},
                "containers": [{
                    "name": "main",
                    "image": "localhost/debian:bed",
                    "imagePullPolicy": "Never",
                    "command": [format!("{PROGRAMS_DIR}/partage-testkit"), "workload"],
                    "args": ["--memory-mib", memory, "--busy", "100"],
                    // It ends when its input is closed.
                    "stdin": true,
                    "env": [
                        {"name": NODE_DIR_VARIABLE, "value": SIM_DIR},
                        {"name": "LD_LIBRARY_PATH", "value": libraries},
                    ],
                    "volumeMounts": [
                        {"name": "sim", "mountPath": SIM_DIR},
                        {"name": "programs", "mountPath": PROGRAMS_DIR, "readOnly": true},
                    ],
                }],
                "volumes": [
                    {"name": "sim", "hostPath": {"path": SIM_DIR, "type": "Directory"}},
                    {"name": "programs", "hostPath": {"path": PROGRAMS_DIR, "type": "Directory"}},
                ],
            },
        });
        self.bed.kubectl_with(&["apply", "-f", "-"], &pod.to_string()).unwrap();
        eventually("the pod is ready", async || {
            let output = self.bed.kubectl(&["logs", name]).map_err(|error| error.to_string())?;
            if output == "ready\n" { Ok(()) } else { Err(format!("{name}: {output}")) }
        })
        .await;
    }

    /// Returns the pid of a pod's workload on the node, from the node's own `/proc`. In its container it has another.
    fn workload_pid(&self, pod: &str) -> u32 {
        let proc = self.node.path("/proc").unwrap();
        let name = format!("HOSTNAME={pod}");
        let is_it = |folder: &Path| {
            let has = |file: &str, word: &str| {
                let text = std::fs::read(folder.join(file)).unwrap_or_default();
                text.split(|&byte| byte == 0).any(|part| part == word.as_bytes())
            };
            has("cmdline", "workload") && has("environ", &name)
        };
        let folders = std::fs::read_dir(proc).unwrap().map(|entry| entry.unwrap().path());
        let found: Vec<PathBuf> = folders.filter(|folder| is_it(folder)).collect();
        let [folder] = found.as_slice() else { panic!("{pod} is {found:?}") };
        let status = std::fs::read_to_string(folder.join("status")).unwrap();
        let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:")).expect(&status);
        let pids: Vec<u32> = pids.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
        let [on_node, in_container] = pids[..] else { panic!("{pod} has the pids {pids:?}") };
        assert_eq!(in_container, 1, "the workload is process 1 of its container");
        on_node
    }

    /// Returns what the node sees.
    fn node_report(&self) -> SmiReport {
        SmiReport::parse(&self.on_node("/bin/sh", &["-c", &smi_script()]))
    }

    /// Returns what a pod sees.
    fn pod_report(&self, pod: &str) -> SmiReport {
        SmiReport::parse(&self.bed.kubectl(&["exec", pod, "--", "sh", "-c", &smi_script()]).unwrap())
    }

    /// Waits until the node sees these processes.
    async fn wait_until_reported(&self, what: &str, processes: &[(u32, u64)]) {
        eventually(what, async || {
            let seen = self.node_report();
            if seen.matches(processes) { Ok(()) } else { Err(format!("{seen:?}")) }
        })
        .await;
    }

    /// Returns the seconds in which the GPU was busy so far, and those of each process, by pid.
    fn gpu_seconds(&self) -> (f64, BTreeMap<u64, f64>) {
        let top = self.on_node("partage", &["sim", "top", "--once", "--interval", "0.1", "-o", "json"]);
        let top: Value = serde_json::from_str(&top).unwrap();
        let gpu = &top["gpus"][0];
        let served = |process: &Value| (process["pid"].as_u64(), process["gpuSeconds"].as_f64());
        let processes = gpu["processes"].as_array().unwrap().iter().map(served);
        let processes = processes.map(|(pid, seconds)| (pid.unwrap(), seconds.unwrap())).collect();
        (gpu["busySeconds"].as_f64().unwrap(), processes)
    }
}

#[test]
fn pods_share_a_simulated_node() {
    let testkit = Path::new(partage_e2e::testkit()).to_path_buf();
    // Built with the tests whenever the whole workspace is tested.
    let partage = testkit.with_file_name("partage");
    if !partage.exists() {
        return skip_or_fail(&format!("{} is not built: cargo build --package partage", partage.display()));
    }
    let clients = match Clients::ready() {
        Ok(clients) => clients,
        Err(missing) => return skip_or_fail(&missing),
    };
    let programs = [
        ("partage", partage),
        (install::SHARED_OBJECT, install::shared_object().unwrap()),
        ("partage-testkit", testkit),
        ("nvidia-smi", clients.nvidia_smi(DriverBranch::R550)),
    ];
    let Some(bed) = TestBed::for_test(BedProfile::one_node().debian()) else { return };
    bed.block_on(async {
        let test_node = SimulatedNodeBed::start(&bed, &programs);
        test_node.node_report().assert_matches(&[]);
        // A pod of another user behaves the same.
        tokio::join!(
            test_node.start_training_pod("train-a", 1024, 0),
            test_node.start_training_pod("train-b", 2048, 1000)
        );
        let (a, b) = (test_node.workload_pid("train-a"), test_node.workload_pid("train-b"));
        let context = GpuProfile::named(GPU_MODEL).unwrap().memory.context >> 20;
        let (in_a, in_b) = ((a, 1024 + context), (b, 2048 + context));

        // Pids are the node's, on the node and in the pods.
        let mut both = [in_a, in_b];
        both.sort_unstable();
        test_node.node_report().assert_matches(&both);
        test_node.pod_report("train-a").assert_matches(&both);
        test_node.pod_report("train-b").assert_matches(&both);

        // Half of the GPU time for each. Retries if the machine had no CPU time for one of them, so that it used less.
        eventually("GPU time is divided fairly", async || {
            let before = test_node.gpu_seconds();
            tokio::time::sleep(Duration::from_secs(1)).await;
            let after = test_node.gpu_seconds();
            let half = |pid: u32| {
                let had = after.1[&u64::from(pid)] - before.1[&u64::from(pid)];
                (0.475..0.525).contains(&(had / (after.0 - before.0)))
            };
            if half(a) && half(b) { Ok(()) } else { Err(format!("{before:?}, then {after:?}")) }
        })
        .await;

        // An ended process holds nothing: ended with its pod, or killed by the pid that NVML returns.
        bed.kubectl(&["delete", "pod", "train-a", "--grace-period=0", "--force"]).unwrap();
        test_node.wait_until_reported("memory of a deleted pod is free", &[in_b]).await;
        test_node.pod_report("train-b").assert_matches(&[in_b]);
        test_node.on_node("/bin/sh", &["-c", &format!("kill -KILL {b}")]);
        test_node.wait_until_reported("memory of a killed process is free", &[]).await;
    });
}
