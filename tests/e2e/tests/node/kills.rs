//! The agent is killed, at every step and at any time, and what it keeps is damaged: nobody gets what is another's, and nothing is
//! left.

use crate::agreement::Held;
use crate::stage::{Stage, bed, lasting};
use partage_core::model::Bytes;
use partage_testkit::agent::SETTINGS;
use partage_testkit::bed::{Bed, Component};
use partage_testkit::eventually;
use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Steps of a container's start, in their order, of a change of its amounts, and of a pod's end.
const OF_A_START: [&str; 4] = ["after-decide", "after-region", "after-cdi", "after-record"];
const OF_A_RESIZE: [&str; 2] = ["after-resize-regions", "after-resize-record"];
const OF_AN_END: [&str; 4] =
    ["before-forget", "after-forget-cdi", "after-forget-region", "after-forget-record"];

#[test]
fn an_agent_that_dies_at_any_step_goes_on_where_it_was() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut stage = Stage::set(&bed, SETTINGS).await;
        stage.apply(&lasting("other", "partage.dev/gpu: 1, partage.dev/memory: 3Gi"));
        stage.runs("other").await;

        // Between kubelet's question and the answer: kubelet fails the pod, and says so. Whoever made it makes it again.
        stage.agent.start_again(Some("after-name")).unwrap();
        stage.is_ready().await;
        let first = lasting("a", "partage.dev/gpu: 1, partage.dev/memory: 5Gi");
        stage.apply(&first);
        stage.dies().await;
        stage.fails("a", "UnexpectedAdmissionError").await;
        stage.start_again().await;
        stage.event("AgentUnavailable", "has to be created again").await;
        stage.delete("a");

        // Each death is followed by the next, with the same pod.
        stage.agent.start_again(Some(OF_A_START[0])).unwrap();
        stage.is_ready().await;
        stage.apply(&first);
        for step in &OF_A_START[1..] {
            stage.dies().await;
            stage.agent.start_again(Some(step)).unwrap();
        }
        stage.dies().await;
        stage.start_again().await;
        stage.runs("a").await;
        let held = stage.agrees().await;
        assert_eq!(
            sizes(&held),
            BTreeMap::from([("a".to_string(), 5 << 10), ("other".to_string(), 3 << 10)])
        );

        stage.agent.start_again(Some(OF_A_RESIZE[0])).unwrap();
        stage.is_ready().await;
        stage.bed.kubectl(&["annotate", "pod", "a", "partage.dev/resize=memory=6Gi"]).unwrap();
        stage.dies().await;
        assert_eq!(stage.sees("a")[0].1, 6 << 10, "it holds already, and nobody has said so yet");
        stage.agent.start_again(Some(OF_A_RESIZE[1])).unwrap();
        stage.dies().await;
        stage.start_again().await;
        // What a container says is what it saw when it started.
        stage.crash("a");
        stage.restarted("a", 1).await;
        assert_eq!(sizes(&stage.agrees().await)["a"], 6 << 10);

        stage.agent.start_again(Some(OF_AN_END[0])).unwrap();
        stage.is_ready().await;
        stage.delete("a");
        for step in &OF_AN_END[1..] {
            stage.dies().await;
            stage.agent.start_again(Some(step)).unwrap();
        }
        stage.dies().await;
        stage.start_again().await;
        assert_eq!(sizes(&stage.agrees().await).len(), 1);
        stage.delete("other");
        stage.nothing_is_kept().await;
    });
}

/// A node on which the pods `a` and `b` hold more than half of a GPU each: a pod whose GPU were thought free would get company.
async fn with_two_pods(bed: &Bed) -> Stage<'_> {
    let stage = Stage::set(bed, SETTINGS).await;
    for name in ["a", "b"] {
        stage.apply(&lasting(name, "partage.dev/gpu: 1, partage.dev/memory: 21Gi"));
    }
    for name in ["a", "b"] {
        stage.runs(name).await;
    }
    stage
}

#[test]
fn containers_keep_their_limits_while_the_agent_is_away_and_what_was_damaged_is_made_whole() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut stage = with_two_pods(&bed).await;
        let before = sizes_and_gpus(&stage.agrees().await);

        stage.agent.process().kill();
        let trainer = |memory: &str| {
            stage.exec("a", &format!("/programs/partage-sample trainer --memory {memory} --seconds 0.5 2>&1"))
        };
        trainer("20Gi").unwrap();
        assert!(trainer("22Gi").unwrap_err().contains("exit code 1"));
        // Kubelet asks the agent before it starts a container again, and goes on asking.
        stage.crash("a");
        stage.event("Failed", "PreStartContainer").await;
        stage.start_again().await;
        stage.restarted("a", 1).await;
        assert_eq!(sizes_and_gpus(&stage.agrees().await), before);

        type Damage = fn(&Stage<'_>, &Held);
        let damages: [(&str, bool, Damage); 5] = [
            ("the records are gone", false, |stage, _| remove(stage, "/var/lib/partage/pods")),
            ("a record is damaged", true, |stage, pod| {
                fs::write(stage.node_path(&format!("/var/lib/partage/pods/{}.json", pod.uid)), "{").unwrap();
            }),
            ("the CDI files are damaged", true, |stage, _| {
                for entry in fs::read_dir(stage.node_path("/run/cdi")).unwrap() {
                    fs::write(entry.unwrap().path(), "{").unwrap();
                }
            }),
            ("the records and CDI files are gone", false, |stage, _| {
                remove(stage, "/var/lib/partage/pods");
                remove(stage, "/run/cdi");
            }),
            ("the names are gone", false, |stage, _| remove(stage, "/run/partage/names")),
        ];
        for (what, counted, damage) in damages {
            let held = stage.agrees().await;
            stage.agent.process().kill();
            damage(&stage, &held[0]);
            stage.start_again().await;
            let after = sizes_and_gpus(&stage.agrees().await);
            assert_eq!(after, before, "{what}");
            assert_eq!(stage.metric("partage_quarantined_total").unwrap() > 0.0, counted, "{what}");
        }
        // Nobody is put beside them.
        stage.apply(&lasting("late", "partage.dev/gpu: 1, partage.dev/memory: 21Gi"));
        stage.waits("late", "no room on node node1 now").await;
        stage.delete("b");
        stage.runs("late").await;
        stage.agrees().await;

        // A region that was removed is there again when its container starts again.
        remove(&stage, "/run/partage/regions");
        stage.start_again().await;
        for name in ["a", "late"] {
            stage.crash(name);
        }
        stage.restarted("a", 2).await;
        stage.restarted("late", 1).await;
        stage.agrees().await;
        nobodys_is_removed(&mut stage).await;
    });
}

#[test]
fn records_of_a_newer_agent_are_left_alone_and_what_they_hold_is_not_granted() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut stage = with_two_pods(&bed).await;
        let held = stage.agrees().await;
        let before = sizes_and_gpus(&held);
        stage.agent.process().kill();
        let pods = stage.node_path("/var/lib/partage/pods");
        let record = pods.join(format!("{}.json", held[0].uid));
        let written = fs::read_to_string(&record).unwrap();
        let newer = written.replacen("{\"version\":1,", "{\"version\":2,", 1);
        assert_ne!(newer, written);
        fs::write(&record, &newer).unwrap();
        let mut specs = BTreeMap::new();
        for entry in fs::read_dir(stage.node_path("/run/cdi")).unwrap() {
            let path = entry.unwrap().path();
            let text = fs::read_to_string(&path).unwrap();
            if text.contains(&held[0].uid) {
                let newer = text.replacen("{\\\"version\\\":1,", "{\\\"version\\\":2,", 1);
                assert_ne!(newer, text);
                fs::write(&path, &newer).unwrap();
                specs.insert(path, newer);
            }
        }
        assert_eq!(specs.len(), 1);
        std::os::unix::fs::symlink("/nowhere", pods.join("link.json")).unwrap();

        stage.start_again().await;
        stage.apply(&lasting("late", "partage.dev/gpu: 1, partage.dev/memory: 21Gi"));
        stage.waits("late", "no room on node node1 now").await;
        stage.delete("late");
        assert_eq!(sizes_and_gpus(&stage.agrees().await), before);
        assert_eq!(stage.metric("partage_quarantined_total").unwrap(), 1.0, "the link");
        assert_eq!(fs::read_to_string(&record).unwrap(), newer);
        for (path, text) in &specs {
            assert_eq!(fs::read_to_string(path).unwrap(), *text);
        }

        // The newer agent comes back, and finds everything where it left it.
        stage.agent.process().kill();
        fs::write(&record, &written).unwrap();
        for (path, text) in &specs {
            fs::write(path, text.replacen("{\\\"version\\\":2,", "{\\\"version\\\":1,", 1)).unwrap();
        }
        stage.start_again().await;
        assert_eq!(sizes_and_gpus(&stage.agrees().await), before);
        for name in ["a", "b"] {
            stage.delete(name);
        }
        stage.nothing_is_kept().await;
    });
}

/// What an agent may leave that is killed with its node goes: all that is of a pod that is gone, and files of which nobody knows
/// whose they are. Names of pods that are gone go, too. Another vendor's files stay.
async fn nobodys_is_removed(stage: &mut Stage<'_>) {
    let (gone, nobodys) = ("0123456789abcdef0123456789abcdef", "fedcba9876543210fedcba9876543210");
    let cdi = |key: &str| format!("/run/cdi/partage.dev-grant-{key}.json");
    let name = |key: &str| format!("/run/partage/names/{key}.json");
    let region = |key: &str| format!("/run/partage/regions/{key}");
    let held = stage.agrees().await;
    stage.agent.process().kill();
    // A name may be in kubelet's record only, by now.
    let names = fs::read_dir(stage.node_path("/run/partage/names")).unwrap().flatten();
    let mut keys = names.map(|entry| entry.path().file_stem().unwrap().to_str().unwrap().to_string());
    let known = keys.find(|key| stage.node_path(&region(key)).exists()).unwrap();
    let copy = |from: &str, to: &str| {
        let mut text = fs::read_to_string(stage.node_path(from)).unwrap().replace(&known, gone);
        for pod in &held {
            text = text.replace(&pod.uid, "00000000-0000-0000-0000-000000000000");
        }
        fs::write(stage.node_path(to), text).unwrap();
    };
    copy(&cdi(&known), &cdi(gone));
    copy(&name(&known), &name(gone));
    let device = format!("{{\"name\":\"{nobodys}\",\"containerEdits\":{{\"env\":[\"A=B\"]}}}}");
    let spec =
        |kind: &str| format!("{{\"cdiVersion\":\"0.6.0\",\"kind\":\"{kind}\",\"devices\":[{device}]}}");
    fs::write(stage.node_path(&cdi(nobodys)), spec("partage.dev/grant")).unwrap();
    for key in [gone, nobodys] {
        fs::create_dir(stage.node_path(&region(key))).unwrap();
    }
    let foreign = stage.node_path("/run/cdi/vendor.com-gpu.json");
    fs::write(&foreign, spec("vendor.com/gpu")).unwrap();
    names_are_old(stage);
    stage.start_again().await;
    eventually("what is nobody's is gone", async || {
        let paths = [gone, nobodys].into_iter().flat_map(|key| [cdi(key), name(key), region(key)]);
        let there: Vec<String> = paths.filter(|path| stage.node_path(path).exists()).collect();
        if there.is_empty() { Ok(()) } else { Err(format!("{there:?}\n{}", stage.agent.log())) }
    })
    .await;
    assert!(foreign.exists());
    fs::remove_file(&foreign).unwrap();
    assert_eq!(sizes(&stage.agrees().await), sizes(&held));

    bed_is_empty(stage).await;
    eventually("not even names are left", async || match stage.kept() {
        [0, 0, 0, 0] => Ok(()),
        kept => Err(format!("{kept:?}\n{}", stage.agent.log())),
    })
    .await;
}

async fn bed_is_empty(stage: &Stage<'_>) {
    stage.bed.kubectl(&["delete", "pods", "--all", "--grace-period=1", "--wait"]).unwrap();
    stage.nothing_is_kept().await;
}

/// All names were answered long ago.
fn names_are_old(stage: &Stage<'_>) {
    for entry in fs::read_dir(stage.node_path("/run/partage/names")).unwrap().flatten() {
        let mut name: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(entry.path()).unwrap()).unwrap();
        assert!(name["at"].is_u64(), "{name}");
        name["at"] = 1.into();
        fs::write(entry.path(), name.to_string()).unwrap();
    }
}

#[test]
fn killed_again_and_again_while_pods_come_and_go() {
    pods_come_and_go(2 * WAVE);
}

#[test]
#[ignore = "a soak of minutes: the figure of 200 pods"]
fn killed_again_and_again_while_200_pods_come_and_go() {
    pods_come_and_go(200);
}

/// How many pods there are at a time.
const WAVE: usize = 16;

fn pods_come_and_go(pods: usize) {
    let Some(bed) = bed() else { return };
    // Room for a wave that ends while the next one comes.
    let settings = format!("{SETTINGS}sharesPerGpu: {WAVE}\n");
    let mut stage = bed.block_on(Stage::set(&bed, &settings));
    let over = &AtomicBool::new(false);
    let agent = stage.agent.process();
    let kills = std::thread::scope(|scope| {
        let ready = || stage.ask("readyz").is_ok();
        let killer = scope.spawn(move || kill_again_and_again(agent, ready, over));
        let waves = std::panic::AssertUnwindSafe(|| bed.block_on(waves(&stage, pods)));
        let done = std::panic::catch_unwind(waves);
        over.store(true, Ordering::Relaxed);
        let kills = killer.join().unwrap();
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        kills
    });
    println!("killed {kills} times while {pods} pods came and went");
    assert!(kills > pods / 16, "killed {kills} times only");
    bed.block_on(async {
        stage.start_again().await;
        stage.agrees().await;
        bed_is_empty(&stage).await;
    });
}

/// Waves of pods with sizes of their own, each deleted while the next one comes.
async fn waves(stage: &Stage<'_>, pods: usize) {
    let all: Vec<(String, usize)> = (0..pods).map(|at| (format!("p{at}"), 512 + 8 * at)).collect();
    let manifest = |(name, mib): &(String, usize)| {
        let cores = 1 + mib / 8 % 3;
        lasting(name, &format!("partage.dev/gpu: 1, partage.dev/memory: {mib}Mi, partage.dev/cores: {cores}"))
    };
    for wave in all.chunks(WAVE) {
        stage.apply(&wave.iter().map(manifest).collect::<String>());
        for pod in wave {
            let runs = async || stage.runs_or_again(&pod.0, &manifest(pod));
            eventually(&format!("{} runs", pod.0), runs).await;
        }
        for (name, mib) in wave {
            let uid = stage.object("pod", name).unwrap()["metadata"]["uid"].as_str().unwrap().to_string();
            eventually(&format!("{name} says what it sees"), async || {
                // One that was killed before it was done may have written another: its successor decides anew, and writes later.
                let grant = stage.grant(name).await;
                let memory = grant.grants[0].shares[0].memory_bytes;
                assert_eq!(memory, Some(Bytes((*mib as u64) << 20)), "{name}");
                let held = Held { name: name.clone(), uid: uid.clone(), grant, witness: true };
                match stage.said(&held) {
                    Some(said) if said == held.sees() => Ok(()),
                    said => Err(format!("{said:?}, and not {}", held.sees())),
                }
            })
            .await;
        }
        let names: Vec<&str> = wave.iter().map(|(name, _)| name.as_str()).collect();
        let words = [&["delete", "pods", "--grace-period=1", "--wait=false"], names.as_slice()].concat();
        stage.bed.kubectl(&words).unwrap();
    }
}

fn kill_again_and_again(agent: &Component, ready: impl Fn() -> bool, over: &AtomicBool) -> usize {
    let mut kills = 0;
    let pause = |millis| std::thread::sleep(Duration::from_millis(millis));
    while !over.load(Ordering::Relaxed) {
        // Every fourth is killed before it is up. The others live for a moment or longer: kubelet asks again after ten seconds or so.
        while kills % 4 != 3 && !over.load(Ordering::Relaxed) && !ready() {
            pause(50);
        }
        pause([200, 4000, 1000, 8000, 0, 2000, 500][kills % 7]);
        agent.restart().unwrap();
        kills += 1;
    }
    kills
}

impl Stage<'_> {
    /// Waits until the agent is dead.
    pub(crate) async fn dies(&self) {
        eventually("the agent dies", async || match self.agent.process().process() {
            None => Ok(()),
            Some(_) => Err(self.agent.log()),
        })
        .await;
    }

    /// Waits until a pod has failed for this reason.
    pub(crate) async fn fails(&self, name: &str, reason: &str) {
        eventually(&format!("{name} fails: {reason}"), async || {
            let pod = self.object("pod", name)?;
            match pod["status"]["reason"] == reason {
                true => Ok(()),
                false => Err(pod["status"].to_string()),
            }
        })
        .await;
    }

    /// Waits until the container of a pod was started again so many times, and runs.
    pub(crate) async fn restarted(&self, name: &str, times: u64) {
        eventually(&format!("{name} was started again {times} times"), async || {
            let pod = self.object("pod", name)?;
            let status = &pod["status"]["containerStatuses"][0];
            match status["restartCount"].as_u64() >= Some(times) && status["state"].get("running").is_some() {
                true => Ok(()),
                false => Err(format!("{}\n{}", pod["status"], self.agent.log())),
            }
        })
        .await;
    }

    /// Whether a pod runs. One that kubelet failed because the agent was away is made again, as a controller would.
    fn runs_or_again(&self, name: &str, manifest: &str) -> Result<(), String> {
        let pod = self.object("pod", name).inspect_err(|_| self.apply(manifest))?;
        if pod["status"]["phase"] == "Failed" {
            self.bed.kubectl(&["delete", "pod", name, "--wait"]).map_err(|error| error.to_string())?;
            self.apply(manifest);
        }
        match pod["status"]["containerStatuses"][0]["ready"] == true {
            true => Ok(()),
            false => Err(format!("{}\n{}", pod["status"], self.agent.log())),
        }
    }
}

fn remove(stage: &Stage<'_>, folder: &str) {
    for entry in fs::read_dir(stage.node_path(folder)).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
    }
}

/// Memory of each pod, in MiB.
fn sizes(held: &[Held]) -> BTreeMap<String, u64> {
    sizes_and_gpus(held).into_iter().map(|(name, (_, mib))| (name, mib)).collect()
}

fn sizes_and_gpus(held: &[Held]) -> BTreeMap<String, (String, u64)> {
    let of = |pod: &Held| {
        let share = &pod.grant.grants[0].shares[0];
        (pod.name.clone(), (share.gpu.to_string(), share.memory_bytes.unwrap().0 >> 20))
    };
    held.iter().map(of).collect()
}
