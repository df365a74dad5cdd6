//! Groups of pods for the benchmark and soak test, and the checks after they ran.

use crate::consistency::GrantedPod;
use crate::test_node::{GPU_QUERY, TestNode};
use partage_core::dialect::grants::native;
use partage_testkit::eventually;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The argument of `sleep` in these pods, by which their processes are found on the machine.
const SLEEP_SECONDS: &str = "86007";
/// Pods that exist at the same time while the agent is killed. The last of them keep running.
pub(crate) const WAVE_SIZE: usize = 20;
/// How long the pods may take in total. Longer means that something hangs.
const CHURN_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// Milliseconds between two kills, and whether that time starts only when kubelet has registered the agent again: on a
/// busy machine the agent would otherwise never be ready.
const KILL_SCHEDULE: [(u64, bool); 6] =
    [(1500, true), (300, false), (200, true), (1000, false), (3000, true), (700, true)];

/// What each pod of a group requests.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum PodSizes {
    /// The pods request no GPU.
    None,
    /// All pods request shares of one size.
    Share,
    /// A different amount of memory for every pod, which the pod reads from inside and prints.
    Each,
}

/// Pods on the node with the agent.
pub(crate) struct PodGroups<'a> {
    pub(crate) test_node: &'a TestNode<'a>,
}

/// The result of a run of pods.
#[derive(Default)]
pub(crate) struct ChurnOutcome {
    /// Pods that kubelet rejected because no plugin was registered at that moment.
    pub(crate) turned_away: usize,
    /// Descriptions of wrong results.
    pub(crate) wrong: Vec<String>,
}

impl PodGroups<'_> {
    /// Creates a group of pods at once, and returns when all are ready.
    pub(crate) async fn create_and_wait(&self, crowd: &str, count: usize, sizes: PodSizes) {
        let pod_groups: String =
            (0..count).map(|at| pod(crowd, at, sizes, "Always", &sleep_command())).collect();
        self.test_node.bed.kubectl_with(&["create", "-f", "-"], &pod_groups).unwrap();
        let wait =
            ["wait", "--for=condition=Ready", "pod", "--timeout=600s", "-l", &format!("crowd={crowd}")];
        if let Err(error) = self.test_node.bed.kubectl(&wait) {
            panic!("{error}\nthe agent's log:\n{}", self.test_node.agent.log());
        }
    }

    /// Deletes a group at once, and returns when nothing of it is left.
    pub(crate) async fn delete_and_wait(&self, crowd: &str) {
        let selector = format!("crowd={crowd}");
        self.test_node
            .bed
            .kubectl(&["delete", "pod", "-l", &selector, "--grace-period=1", "--wait"])
            .unwrap();
        self.test_node.wait_until_released().await;
    }

    /// Returns the process ids of the pods' own processes on the machine.
    pub(crate) fn processes(&self) -> BTreeSet<u32> {
        let wanted = format!("sleep\0{SLEEP_SECONDS}\0");
        let all = fs::read_dir("/proc").unwrap().flatten();
        let numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        numbers
            .filter(|number| {
                fs::read(format!("/proc/{number}/cmdline")).is_ok_and(|line| line == wanted.as_bytes())
            })
            .collect()
    }

    /// Kills them, as a crash would.
    pub(crate) fn end_processes(&self, processes: &BTreeSet<u32>) {
        for process in processes {
            let process = Pid::from_raw(i32::try_from(*process).unwrap()).unwrap();
            kill_process(process, Signal::KILL).unwrap();
        }
    }

    /// Returns the pods of a [`PodSizes::Each`] group whose view differs from their request, or from the grant in their
    /// annotation.
    pub(crate) async fn find_wrong_grants(&self, crowd: &str, count: usize) -> Vec<String> {
        let mut wrong = Vec::new();
        for at in 0..count {
            let name = format!("{crowd}-{at}");
            let pod = self.test_node.get_object("pod", &name).unwrap();
            let uid = pod["metadata"]["uid"].as_str().unwrap().to_string();
            let held =
                GrantedPod { grant: self.test_node.wait_for_grant(&name).await, name, uid, witness: true };
            let output = eventually(&format!("{} has printed its view", held.name), async || {
                self.test_node.reported_gpus(&held).ok_or("not yet")
            })
            .await;
            if output != held.expected_view() || !output.ends_with(&expected_suffix(at)) {
                wrong.push(format!("{} sees {output:?}, was granted {:?}", held.name, held.expected_view()));
            }
        }
        wrong
    }

    /// Creates pods in waves that print their view and end, while the agent is killed; the last wave keeps running. A
    /// pod that kubelet rejects because no agent is registered is created again, as its controller would do. Returns
    /// also how often the agent was killed.
    pub(crate) fn run_under_kills(&self, crowd: &str, count: usize) -> (usize, ChurnOutcome) {
        let over = AtomicBool::new(false);
        let process = self.test_node.agent.process();
        std::thread::scope(|scope| {
            let kills = scope.spawn(|| {
                let mut lives = KILL_SCHEDULE.iter().cycle();
                let mut killed = 0;
                let mut from = 0;
                while !over.load(Ordering::SeqCst) {
                    let (millis, known) = *lives.next().unwrap();
                    while known && !over.load(Ordering::SeqCst) && !self.is_registered(from) {
                        std::thread::sleep(Duration::from_millis(50));
                    }
                    std::thread::sleep(Duration::from_millis(millis));
                    from = self.test_node.agent.log().len();
                    process.restart().unwrap();
                    killed += 1;
                }
                killed
            });
            let come_and_go = std::panic::AssertUnwindSafe(|| self.run_churn(crowd, count));
            let outcome = std::panic::catch_unwind(come_and_go);
            over.store(true, Ordering::SeqCst);
            let killed = kills.join().unwrap();
            (killed, outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    /// Returns whether kubelet accepted the agent's registration since the log had the length `from`.
    fn is_registered(&self, from: usize) -> bool {
        self.test_node.agent.log().get(from..).is_some_and(|log| log.contains("registered with kubelet"))
    }

    fn run_churn(&self, crowd: &str, count: usize) -> ChurnOutcome {
        let begun = Instant::now();
        let mut outcome = ChurnOutcome::default();
        let mut to_come: Vec<usize> = (0..count).rev().collect();
        let mut there: BTreeMap<String, usize> = BTreeMap::new();
        while !(to_come.is_empty() && there.is_empty()) {
            assert!(begun.elapsed() < CHURN_TIMEOUT, "{there:?} hang\n{}", self.test_node.agent.log());
            let room = WAVE_SIZE.saturating_sub(there.len()).min(to_come.len());
            let coming = to_come.split_off(to_come.len() - room);
            let is_last = |at: usize| at + WAVE_SIZE >= count;
            let then = |at: usize| if is_last(at) { self::sleep_command() } else { "sleep 1".to_string() };
            let pod_groups: String =
                coming.iter().map(|at| pod(crowd, *at, PodSizes::Each, "Never", &then(*at))).collect();
            if !pod_groups.is_empty() {
                self.test_node.bed.kubectl_with(&["create", "-f", "-"], &pod_groups).unwrap();
            }
            there.extend(coming.into_iter().map(|at| (format!("{crowd}-{at}"), at)));
            std::thread::sleep(Duration::from_millis(500));
            let mut over = Vec::new();
            for pod in self.list(crowd) {
                let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_string();
                let Some(at) = there.get(&name).copied() else { continue };
                match pod["status"]["phase"].as_str() {
                    Some("Running") if is_last(at) => match self.reported_view(&name, &pod) {
                        // It keeps running, and is checked again at the end.
                        Some(seen) => {
                            outcome.wrong.extend(describe_mismatch(&name, at, &pod, &seen));
                            there.remove(&name);
                            continue;
                        }
                        None => continue,
                    },
                    Some("Succeeded") => {
                        let seen = self.reported_view(&name, &pod).unwrap_or_default();
                        outcome.wrong.extend(describe_mismatch(&name, at, &pod, &seen));
                    }
                    Some("Failed") if pod["status"]["reason"] == "UnexpectedAdmissionError" => {
                        outcome.turned_away += 1;
                        to_come.push(at);
                    }
                    Some("Failed") => outcome.wrong.push(format!("{name} failed: {}", pod["status"])),
                    _ => continue,
                }
                there.remove(&name);
                over.push(name);
            }
            if !over.is_empty() {
                let mut delete = vec!["delete", "pod", "--grace-period=1", "--wait"];
                delete.extend(over.iter().map(String::as_str));
                self.test_node.bed.kubectl(&delete).unwrap();
            }
        }
        outcome
    }

    /// Returns what a pod printed of its GPU, if it has.
    fn reported_view(&self, name: &str, pod: &Value) -> Option<String> {
        let uid = pod["metadata"]["uid"].as_str().unwrap_or_default().to_string();
        let grant = partage_core::model::PodGrant { node: "node1".into(), grants: Vec::new() };
        self.test_node.reported_gpus(&GrantedPod { name: name.into(), uid, grant, witness: true })
    }

    fn list(&self, crowd: &str) -> Vec<Value> {
        let arguments = ["get", "pod", "-l", &format!("crowd={crowd}"), "-o", "json"];
        let text = self.test_node.bed.kubectl(&arguments).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()["items"].as_array().cloned().unwrap_or_default()
    }
}

/// Describes the difference between what a pod saw and what it requested or was granted.
fn describe_mismatch(name: &str, at: usize, pod: &Value, seen: &str) -> Option<String> {
    let right = seen.ends_with(&expected_suffix(at));
    let written = pod["metadata"]["annotations"][native::ANNOTATION].as_str();
    let gpu = written
        .and_then(|text| native::decode(text).ok())
        .map(|grant| grant.grants[0].shares[0].gpu.to_string());
    // A pod may end before its annotation is written.
    let same = gpu.as_ref().is_none_or(|gpu| seen.starts_with(gpu.as_str()));
    (!right || !same)
        .then(|| format!("{name} saw {seen:?}; it requested {} MiB, granted of {gpu:?}", mebibytes(at)))
}

/// Returns the memory that the pod with this number requests.
fn mebibytes(at: usize) -> usize {
    1024 + 8 * at
}

/// Returns how the pod's view must end.
fn expected_suffix(at: usize) -> String {
    format!(", {} MiB", mebibytes(at))
}

/// Returns the command of a pod that keeps running.
fn sleep_command() -> String {
    format!("exec sleep {SLEEP_SECONDS}")
}

fn pod(crowd: &str, at: usize, sizes: PodSizes, restarts: &str, then: &str) -> String {
    let memory = match sizes {
        PodSizes::None => None,
        PodSizes::Share => Some(1024),
        PodSizes::Each => Some(mebibytes(at)),
    };
    let limits = memory.map_or_else(String::new, |memory| {
        format!("partage.dev/gpu: 1, partage.dev/memory: {memory}Mi, partage.dev/cores: 5")
    });
    let looks = if sizes == PodSizes::Each { format!("{GPU_QUERY} || exit 1; ") } else { String::new() };
    crate::test_node::pod(&format!("{crowd}-{at}"), &limits, &format!("{looks}{then}"))
        .replace("metadata: {", &format!("metadata: {{labels: {{crowd: {crowd}}}, "))
        .replace("restartPolicy: Never", &format!("restartPolicy: {restarts}"))
}
