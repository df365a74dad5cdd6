//! A simulated node that the pods of a node share, each in pid namespaces of its own: who is on a GPU and with how much
//! memory is the same from everywhere, and their turns are fair.

use partage_sim_node::install;
use partage_sim_node::node::VARIABLE;
use partage_sim_node::profile::Profile as Card;
use partage_testkit::bed::{Bed, Node, Profile};
use partage_testkit::clients::{Branch, Clients};
use partage_testkit::eventually;
use partage_testkit::skip_or_fail;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

const CARD: &str = "A100-SXM4-40GB";
/// The simulated node's folder, on the node and in its containers. `/run` is in memory.
const SIM: &str = "/run/sim";
/// The programs' folder, likewise. Nodes do not see all of the machine's files.
const PROGRAMS: &str = "/run/programs";

/// A bed with a simulated node on its node.
struct Stage<'a> {
    bed: &'a Bed,
    node: &'a Node,
}

/// What `nvidia-smi` says of the GPU: the processes' pids with their memory, and the memory in all, in MiB.
#[derive(Debug)]
struct Seen {
    processes: BTreeMap<u32, u64>,
    used: u64,
}

impl Seen {
    fn of(words: &str) -> Self {
        let number = |word: &str| word.trim().parse::<u64>().unwrap_or_else(|_| panic!("{words:?}"));
        let (used, processes) = words.split_once('\n').expect(words);
        let processes = processes.lines().map(|line| {
            let (pid, memory) = line.split_once(',').expect(words);
            (number(pid) as u32, number(memory))
        });
        Self { processes: processes.collect(), used: number(used) }
    }

    /// Whether these processes are on the GPU, and nobody else holds memory.
    fn is(&self, processes: &[(u32, u64)]) -> bool {
        let memory: u64 = processes.iter().map(|(_, memory)| memory).sum();
        // Each has 64 KiB for its kernel as well. `nvidia-smi` leaves them off a process and rounds the GPU's up.
        let rest = u64::from(!processes.is_empty());
        self.processes.iter().map(|(pid, memory)| (*pid, *memory)).eq(processes.iter().copied())
            && self.used == memory + rest
    }

    #[track_caller]
    fn must_be(&self, processes: &[(u32, u64)]) {
        assert!(self.is(processes), "{self:?}, not {processes:?}");
    }
}

/// Asks `nvidia-smi` for a [`Seen`].
fn questions() -> String {
    let smi = format!("{PROGRAMS}/nvidia-smi");
    let form = "--format=csv,noheader,nounits";
    format!("{smi} --query-gpu=memory.used {form} && {smi} --query-compute-apps=pid,used_memory {form}")
}

impl<'a> Stage<'a> {
    /// Makes the simulated node on the node, which makes the node's pids the host's.
    fn set(bed: &'a Bed, programs: &[(&str, PathBuf)]) -> Self {
        let stage = Self { bed, node: bed.node("node1").unwrap() };
        let folder = stage.node.path(PROGRAMS).unwrap();
        std::fs::create_dir(&folder).unwrap();
        for (name, program) in programs {
            std::fs::copy(program, folder.join(name)).unwrap();
        }
        stage.on_node("partage", &["sim", "env", "--dir", SIM, "--model", CARD, "--driver", "550"]);
        stage
    }

    /// Runs a program on the node, outside of pods.
    fn on_node(&self, program: &str, arguments: &[&str]) -> String {
        let (sim, libraries) = (format!("{VARIABLE}={SIM}"), format!("LD_LIBRARY_PATH={SIM}/lib"));
        let program = if program.starts_with('/') { program } else { &format!("{PROGRAMS}/{program}") };
        let before = [sim.as_str(), libraries.as_str(), program];
        self.node.run("/usr/bin/env", before.iter().chain(arguments)).unwrap()
    }

    /// Starts a pod that holds memory and never lets the GPU rest, and waits until it does.
    async fn train(&self, name: &str, memory_mib: u64, user: u32) {
        let (memory, libraries) = (memory_mib.to_string(), format!("{SIM}/lib"));
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
                    "command": [format!("{PROGRAMS}/partage-testkit"), "workload"],
                    "args": ["--memory-mib", memory, "--busy", "100"],
                    // It would end with its input.
                    "stdin": true,
                    "env": [
                        {"name": VARIABLE, "value": SIM},
                        {"name": "LD_LIBRARY_PATH", "value": libraries},
                    ],
                    "volumeMounts": [
                        {"name": "sim", "mountPath": SIM},
                        {"name": "programs", "mountPath": PROGRAMS, "readOnly": true},
                    ],
                }],
                "volumes": [
                    {"name": "sim", "hostPath": {"path": SIM, "type": "Directory"}},
                    {"name": "programs", "hostPath": {"path": PROGRAMS, "type": "Directory"}},
                ],
            },
        });
        self.bed.kubectl_with(&["apply", "-f", "-"], &pod.to_string()).unwrap();
        eventually("the pod uses its GPU", async || {
            let said = self.bed.kubectl(&["logs", name]).map_err(|error| error.to_string())?;
            if said == "ready\n" { Ok(()) } else { Err(format!("{name}: {said}")) }
        })
        .await;
    }

    /// The pid of a pod's workload on the node, by the node's own `/proc`. In its container it has another.
    fn pid(&self, pod: &str) -> u32 {
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
        assert_eq!(in_container, 1, "it is all there is in its container");
        on_node
    }

    /// What the node sees.
    fn seen(&self) -> Seen {
        Seen::of(&self.on_node("/bin/sh", &["-c", &questions()]))
    }

    /// What a pod sees.
    fn seen_by(&self, pod: &str) -> Seen {
        Seen::of(&self.bed.kubectl(&["exec", pod, "--", "sh", "-c", &questions()]).unwrap())
    }

    /// Waits until the node sees these processes.
    async fn sees(&self, what: &str, processes: &[(u32, u64)]) {
        eventually(what, async || {
            let seen = self.seen();
            if seen.is(processes) { Ok(()) } else { Err(format!("{seen:?}")) }
        })
        .await;
    }

    /// The seconds that anything ran on the GPU so far, and those that each process had, by pid.
    fn served(&self) -> (f64, BTreeMap<u64, f64>) {
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
    // Built next to us whenever the whole workspace is tested.
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
        ("nvidia-smi", clients.nvidia_smi(Branch::R550)),
    ];
    let Some(bed) = Bed::for_test(Profile::one_node().debian()) else { return };
    bed.block_on(async {
        let stage = Stage::set(&bed, &programs);
        stage.seen().must_be(&[]);
        // Another user's pod is no different.
        tokio::join!(stage.train("train-a", 1024, 0), stage.train("train-b", 2048, 1000));
        let (a, b) = (stage.pid("train-a"), stage.pid("train-b"));
        let context = Card::named(CARD).unwrap().memory.context >> 20;
        let (in_a, in_b) = ((a, 1024 + context), (b, 2048 + context));

        // Pids are the node's, on the node and in the pods.
        let mut both = [in_a, in_b];
        both.sort_unstable();
        stage.seen().must_be(&both);
        stage.seen_by("train-a").must_be(&both);
        stage.seen_by("train-b").must_be(&both);

        // Half a GPU for each. Again where the machine had no time for one of them, so that it asked for less.
        eventually("turns are fair", async || {
            let before = stage.served();
            tokio::time::sleep(Duration::from_secs(1)).await;
            let after = stage.served();
            let half = |pid: u32| {
                let had = after.1[&u64::from(pid)] - before.1[&u64::from(pid)];
                (0.475..0.525).contains(&(had / (after.0 - before.0)))
            };
            if half(a) && half(b) { Ok(()) } else { Err(format!("{before:?}, then {after:?}")) }
        })
        .await;

        // What is gone holds nothing: told to end with its pod, or killed by the pid that NVML says.
        bed.kubectl(&["delete", "pod", "train-a", "--grace-period=0", "--force"]).unwrap();
        stage.sees("a deleted pod's memory is free", &[in_b]).await;
        stage.seen_by("train-b").must_be(&[in_b]);
        stage.on_node("/bin/sh", &["-c", &format!("kill -KILL {b}")]);
        stage.sees("a killed process's memory is free", &[]).await;
    });
}
