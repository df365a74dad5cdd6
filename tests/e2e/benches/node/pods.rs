//! Crowds of pods, and what is looked for when they came and went.

use crate::agreement::Held;
use crate::stage::{SEES, Stage};
use partage_core::dialect::grants::native;
use partage_testkit::eventually;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How the processes of these pods are told from all others of the machine.
const SECONDS: &str = "86007";
/// Pods that are there at once while the agent is killed. The last of them stay.
pub(crate) const WAVE: usize = 20;
/// How long pods may take to come and go before something hangs.
const DEADLINE: Duration = Duration::from_secs(30 * 60);
/// Milliseconds between two kills, and whether they begin when kubelet knows the agent again: on a busy machine it would never
/// be of use otherwise.
const LIVES: [(u64, bool); 6] =
    [(1500, true), (300, false), (200, true), (1000, false), (3000, true), (700, true)];

/// What each pod of a crowd asks for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sizes {
    /// Nothing.
    None,
    /// All the same.
    Share,
    /// Each something else, which it reads from inside and says.
    Each,
}

/// Pods on the node with the agent.
pub(crate) struct Pods<'a> {
    pub(crate) stage: &'a Stage<'a>,
}

/// How pods fared that came and went.
#[derive(Default)]
pub(crate) struct Outcome {
    /// Kubelet had no plugin at that moment.
    pub(crate) turned_away: usize,
    /// In words.
    pub(crate) wrong: Vec<String>,
}

impl Pods<'_> {
    /// A crowd comes at once. Returns when all are ready.
    pub(crate) async fn come(&self, crowd: &str, count: usize, sizes: Sizes) {
        let pods: String = (0..count).map(|at| pod(crowd, at, sizes, "Always", &stays())).collect();
        self.stage.bed.kubectl_with(&["create", "-f", "-"], &pods).unwrap();
        let wait =
            ["wait", "--for=condition=Ready", "pod", "--timeout=600s", "-l", &format!("crowd={crowd}")];
        if let Err(error) = self.stage.bed.kubectl(&wait) {
            panic!("{error}\nthe agent said:\n{}", self.stage.agent.log());
        }
    }

    /// It goes at once. Returns when nothing of it is left.
    pub(crate) async fn go(&self, crowd: &str) {
        let selector = format!("crowd={crowd}");
        self.stage.bed.kubectl(&["delete", "pod", "-l", &selector, "--grace-period=1", "--wait"]).unwrap();
        self.stage.nothing_is_kept().await;
    }

    /// The pods' own processes, by their numbers on the machine.
    pub(crate) fn processes(&self) -> BTreeSet<u32> {
        let wanted = format!("sleep\0{SECONDS}\0");
        let all = fs::read_dir("/proc").unwrap().flatten();
        let numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        numbers
            .filter(|number| {
                fs::read(format!("/proc/{number}/cmdline")).is_ok_and(|line| line == wanted.as_bytes())
            })
            .collect()
    }

    /// Ends them, as a crash would.
    pub(crate) fn end_processes(&self, processes: &BTreeSet<u32>) {
        for process in processes {
            let process = Pid::from_raw(i32::try_from(*process).unwrap()).unwrap();
            kill_process(process, Signal::KILL).unwrap();
        }
    }

    /// Pods of a crowd of [`Sizes::Each`] that do not see what they asked for, or something else than is written on them.
    pub(crate) async fn wrong(&self, crowd: &str, count: usize) -> Vec<String> {
        let mut wrong = Vec::new();
        for at in 0..count {
            let name = format!("{crowd}-{at}");
            let pod = self.stage.object("pod", &name).unwrap();
            let uid = pod["metadata"]["uid"].as_str().unwrap().to_string();
            let held = Held { grant: self.stage.grant(&name).await, name, uid, witness: true };
            let said = eventually(&format!("{} has looked", held.name), async || {
                self.stage.said(&held).ok_or("not yet")
            })
            .await;
            if said != held.sees() || !said.ends_with(&asked(at)) {
                wrong.push(format!("{} sees {said:?}, was granted {:?}", held.name, held.sees()));
            }
        }
        wrong
    }

    /// Pods come, look and end, a wave at a time, while the agent is killed; the last ones stay. Those that kubelet turns away
    /// because there is no agent at that moment come again, as their controller would have it. Returns how often the agent was
    /// killed, too.
    pub(crate) fn through_kills(&self, crowd: &str, count: usize) -> (usize, Outcome) {
        let over = AtomicBool::new(false);
        let process = self.stage.agent.process();
        std::thread::scope(|scope| {
            let kills = scope.spawn(|| {
                let mut lives = LIVES.iter().cycle();
                let mut killed = 0;
                let mut from = 0;
                while !over.load(Ordering::SeqCst) {
                    let (millis, known) = *lives.next().unwrap();
                    while known && !over.load(Ordering::SeqCst) && !self.is_known(from) {
                        std::thread::sleep(Duration::from_millis(50));
                    }
                    std::thread::sleep(Duration::from_millis(millis));
                    from = self.stage.agent.log().len();
                    process.restart().unwrap();
                    killed += 1;
                }
                killed
            });
            let come_and_go = std::panic::AssertUnwindSafe(|| self.come_and_go(crowd, count));
            let outcome = std::panic::catch_unwind(come_and_go);
            over.store(true, Ordering::SeqCst);
            let killed = kills.join().unwrap();
            (killed, outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    /// Whether kubelet took the agent's registration since its log was so long.
    fn is_known(&self, from: usize) -> bool {
        self.stage.agent.log().get(from..).is_some_and(|log| log.contains("registered with kubelet"))
    }

    fn come_and_go(&self, crowd: &str, count: usize) -> Outcome {
        let begun = Instant::now();
        let mut outcome = Outcome::default();
        let mut to_come: Vec<usize> = (0..count).rev().collect();
        let mut there: BTreeMap<String, usize> = BTreeMap::new();
        while !(to_come.is_empty() && there.is_empty()) {
            assert!(begun.elapsed() < DEADLINE, "{there:?} hang\n{}", self.stage.agent.log());
            let room = WAVE.saturating_sub(there.len()).min(to_come.len());
            let coming = to_come.split_off(to_come.len() - room);
            let stays = |at: usize| at + WAVE >= count;
            let then = |at: usize| if stays(at) { self::stays() } else { "sleep 1".to_string() };
            let pods: String =
                coming.iter().map(|at| pod(crowd, *at, Sizes::Each, "Never", &then(*at))).collect();
            if !pods.is_empty() {
                self.stage.bed.kubectl_with(&["create", "-f", "-"], &pods).unwrap();
            }
            there.extend(coming.into_iter().map(|at| (format!("{crowd}-{at}"), at)));
            std::thread::sleep(Duration::from_millis(500));
            let mut over = Vec::new();
            for pod in self.list(crowd) {
                let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_string();
                let Some(at) = there.get(&name).copied() else { continue };
                match pod["status"]["phase"].as_str() {
                    Some("Running") if stays(at) => match self.look(&name, &pod) {
                        // It goes on, and everybody is asked about it at the end.
                        Some(seen) => {
                            outcome.wrong.extend(misread(&name, at, &pod, &seen));
                            there.remove(&name);
                            continue;
                        }
                        None => continue,
                    },
                    Some("Succeeded") => {
                        let seen = self.look(&name, &pod).unwrap_or_default();
                        outcome.wrong.extend(misread(&name, at, &pod, &seen));
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
                self.stage.bed.kubectl(&delete).unwrap();
            }
        }
        outcome
    }

    /// What a pod saw, if it has looked.
    fn look(&self, name: &str, pod: &Value) -> Option<String> {
        let uid = pod["metadata"]["uid"].as_str().unwrap_or_default().to_string();
        let grant = partage_core::model::PodGrant { node: "node1".into(), grants: Vec::new() };
        self.stage.said(&Held { name: name.into(), uid, grant, witness: true })
    }

    fn list(&self, crowd: &str) -> Vec<Value> {
        let words = ["get", "pod", "-l", &format!("crowd={crowd}"), "-o", "json"];
        let text = self.stage.bed.kubectl(&words).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()["items"].as_array().cloned().unwrap_or_default()
    }
}

/// What a pod saw that is not what it asked for, or not what is written on it.
fn misread(name: &str, at: usize, pod: &Value, seen: &str) -> Option<String> {
    let right = seen.ends_with(&asked(at));
    let written = pod["metadata"]["annotations"][native::ANNOTATION].as_str();
    let gpu = written
        .and_then(|text| native::decode(text).ok())
        .map(|grant| grant.grants[0].shares[0].gpu.to_string());
    // It may be over before it was written on.
    let same = gpu.as_ref().is_none_or(|gpu| seen.starts_with(gpu.as_str()));
    (!right || !same).then(|| format!("{name} saw {seen:?}; it asked for {} MiB, of {gpu:?}", mebibytes(at)))
}

/// The memory that the pod with this number asks for.
fn mebibytes(at: usize) -> usize {
    1024 + 8 * at
}

/// How what it sees ends, then.
fn asked(at: usize) -> String {
    format!(", {} MiB", mebibytes(at))
}

/// What a pod runs that stays.
fn stays() -> String {
    format!("exec sleep {SECONDS}")
}

fn pod(crowd: &str, at: usize, sizes: Sizes, restarts: &str, then: &str) -> String {
    let memory = match sizes {
        Sizes::None => None,
        Sizes::Share => Some(1024),
        Sizes::Each => Some(mebibytes(at)),
    };
    let limits = memory.map_or_else(String::new, |memory| {
        format!("partage.dev/gpu: 1, partage.dev/memory: {memory}Mi, partage.dev/cores: 5")
    });
    let looks = if sizes == Sizes::Each { format!("{SEES} || exit 1; ") } else { String::new() };
    crate::stage::pod(&format!("{crowd}-{at}"), &limits, &format!("{looks}{then}"))
        .replace("metadata: {", &format!("metadata: {{labels: {{crowd: {crowd}}}, "))
        .replace("restartPolicy: Never", &format!("restartPolicy: {restarts}"))
}
