//! The agent is killed at every step and at any time, and its files are damaged: no pod gets a share of another, and
//! nothing is left over.

use crate::consistency::GrantedPod;
use crate::test_node::{TestNode, bed, long_running_pod};
use partage_core::model::Bytes;
use partage_testkit::agent::SIMULATED_SETTINGS;
use partage_testkit::bed::{Component, TestBed};
use partage_testkit::eventually;
use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The steps of a container's start in order, of a resize, and of a pod's end.
const START_STEPS: [&str; 4] = ["after-decide", "after-region", "after-cdi", "after-record"];
const RESIZE_STEPS: [&str; 2] = ["after-resize-regions", "after-resize-record"];
const END_STEPS: [&str; 4] =
    ["before-forget", "after-forget-cdi", "after-forget-region", "after-forget-record"];

#[test]
fn agent_crash_at_any_step_is_recovered() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut test_node = TestNode::start(&bed, SIMULATED_SETTINGS).await;
        test_node.apply(&long_running_pod("other", "partage.dev/gpu: 1, partage.dev/memory: 3Gi"));
        test_node.wait_until_running("other").await;

        // Killed between kubelet's request and the response: kubelet fails the pod with a message, and its controller
        // creates it again.
        test_node.agent.restart(Some("after-name")).unwrap();
        test_node.wait_until_ready().await;
        let first = long_running_pod("a", "partage.dev/gpu: 1, partage.dev/memory: 5Gi");
        test_node.apply(&first);
        test_node.wait_until_agent_exits().await;
        test_node.wait_until_failed("a", "UnexpectedAdmissionError").await;
        test_node.restart_agent().await;
        test_node.wait_for_event("AgentUnavailable", "create a pod without a controller again").await;
        test_node.delete_pod("a");

        // Each kill is followed by the next, with the same pod.
        test_node.agent.restart(Some(START_STEPS[0])).unwrap();
        test_node.wait_until_ready().await;
        test_node.apply(&first);
        for step in &START_STEPS[1..] {
            test_node.wait_until_agent_exits().await;
            test_node.agent.restart(Some(step)).unwrap();
        }
        test_node.wait_until_agent_exits().await;
        test_node.restart_agent().await;
        test_node.wait_until_running("a").await;
        let held = test_node.wait_until_consistent().await;
        assert_eq!(
            memory_by_pod(&held),
            BTreeMap::from([("a".to_string(), 5 << 10), ("other".to_string(), 3 << 10)])
        );

        test_node.agent.restart(Some(RESIZE_STEPS[0])).unwrap();
        test_node.wait_until_ready().await;
        test_node.bed.kubectl(&["annotate", "pod", "a", "partage.dev/resize=memory=6Gi"]).unwrap();
        test_node.wait_until_agent_exits().await;
        assert_eq!(
            test_node.visible_gpus("a")[0].1,
            6 << 10,
            "the limit is in force before the annotation is written"
        );
        test_node.agent.restart(Some(RESIZE_STEPS[1])).unwrap();
        test_node.wait_until_agent_exits().await;
        test_node.restart_agent().await;
        // A container prints what it saw when it started.
        test_node.crash_container("a");
        test_node.wait_until_restarted("a", 1).await;
        assert_eq!(memory_by_pod(&test_node.wait_until_consistent().await)["a"], 6 << 10);

        test_node.agent.restart(Some(END_STEPS[0])).unwrap();
        test_node.wait_until_ready().await;
        test_node.delete_pod("a");
        for step in &END_STEPS[1..] {
            test_node.wait_until_agent_exits().await;
            test_node.agent.restart(Some(step)).unwrap();
        }
        test_node.wait_until_agent_exits().await;
        test_node.restart_agent().await;
        assert_eq!(memory_by_pod(&test_node.wait_until_consistent().await).len(), 1);
        test_node.delete_pod("other");
        test_node.wait_until_released().await;
    });
}

/// Returns a node on which the pods `a` and `b` hold more than half of a GPU each: if a GPU were wrongly considered
/// free, another pod would be placed on it.
async fn with_two_pods(bed: &TestBed) -> TestNode<'_> {
    let test_node = TestNode::start(bed, SIMULATED_SETTINGS).await;
    for name in ["a", "b"] {
        test_node.apply(&long_running_pod(name, "partage.dev/gpu: 1, partage.dev/memory: 21Gi"));
    }
    for name in ["a", "b"] {
        test_node.wait_until_running(name).await;
    }
    test_node
}

#[test]
fn limits_hold_while_the_agent_is_down_and_damaged_files_are_repaired() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut test_node = with_two_pods(&bed).await;
        let before = gpu_and_memory_by_pod(&test_node.wait_until_consistent().await);

        test_node.agent.process().kill();
        let trainer = |memory: &str| {
            test_node
                .exec("a", &format!("/programs/partage-sample trainer --memory {memory} --seconds 0.5 2>&1"))
        };
        trainer("20Gi").unwrap();
        assert!(trainer("22Gi").unwrap_err().contains("exit code 1"));
        // Kubelet calls the agent before it restarts a container, and retries.
        test_node.crash_container("a");
        test_node.wait_for_event("Failed", "PreStartContainer").await;
        test_node.restart_agent().await;
        test_node.wait_until_restarted("a", 1).await;
        assert_eq!(gpu_and_memory_by_pod(&test_node.wait_until_consistent().await), before);

        type DamageFn = fn(&TestNode<'_>, &GrantedPod);
        let damages: [(&str, bool, DamageFn); 5] = [
            ("the records are gone", false, |test_node, _| {
                remove_entries(test_node, "/var/lib/partage/pods")
            }),
            ("a record is damaged", true, |test_node, pod| {
                fs::write(test_node.node_path(&format!("/var/lib/partage/pods/{}.json", pod.uid)), "{")
                    .unwrap();
            }),
            ("the CDI files are damaged", true, |test_node, _| {
                for entry in fs::read_dir(test_node.node_path("/run/cdi")).unwrap() {
                    fs::write(entry.unwrap().path(), "{").unwrap();
                }
            }),
            ("the records and CDI files are gone", false, |test_node, _| {
                remove_entries(test_node, "/var/lib/partage/pods");
                remove_entries(test_node, "/run/cdi");
            }),
            ("the names are gone", false, |test_node, _| remove_entries(test_node, "/run/partage/names")),
        ];
        for (what, counted, damage) in damages {
            let held = test_node.wait_until_consistent().await;
            test_node.agent.process().kill();
            damage(&test_node, &held[0]);
            test_node.restart_agent().await;
            let after = gpu_and_memory_by_pod(&test_node.wait_until_consistent().await);
            assert_eq!(after, before, "{what}");
            assert_eq!(test_node.metric_sum("partage_quarantined_total").unwrap() > 0.0, counted, "{what}");
        }
        test_node.wait_for_event_on(("Pod", "a"), "GrantRecovered", "from the pod's annotation").await;
        // No pod is placed on their GPUs.
        test_node.apply(&long_running_pod("late", "partage.dev/gpu: 1, partage.dev/memory: 21Gi"));
        test_node.wait_until_waiting("late", "insufficient GPU capacity on node node1").await;
        test_node.delete_pod("b");
        test_node.wait_until_running("late").await;
        test_node.wait_until_consistent().await;

        // A removed region is created again when its container restarts.
        remove_entries(&test_node, "/run/partage/regions");
        test_node.restart_agent().await;
        for name in ["a", "late"] {
            test_node.crash_container(name);
        }
        test_node.wait_until_restarted("a", 2).await;
        test_node.wait_until_restarted("late", 1).await;
        test_node.wait_until_consistent().await;
        check_orphans_removed(&mut test_node).await;
    });
}

#[test]
fn records_of_a_newer_agent_are_kept_and_their_shares_stay_reserved() {
    let Some(bed) = bed() else { return };
    bed.block_on(async {
        let mut test_node = with_two_pods(&bed).await;
        let held = test_node.wait_until_consistent().await;
        let before = gpu_and_memory_by_pod(&held);
        test_node.agent.process().kill();
        let pods = test_node.node_path("/var/lib/partage/pods");
        let record = pods.join(format!("{}.json", held[0].uid));
        let written = fs::read_to_string(&record).unwrap();
        let newer = written.replacen("{\"version\":1,", "{\"version\":2,", 1);
        assert_ne!(newer, written);
        fs::write(&record, &newer).unwrap();
        let mut specs = BTreeMap::new();
        for entry in fs::read_dir(test_node.node_path("/run/cdi")).unwrap() {
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

        test_node.restart_agent().await;
        test_node.apply(&long_running_pod("late", "partage.dev/gpu: 1, partage.dev/memory: 21Gi"));
        test_node.wait_until_waiting("late", "insufficient GPU capacity on node node1").await;
        test_node.delete_pod("late");
        assert_eq!(gpu_and_memory_by_pod(&test_node.wait_until_consistent().await), before);
        assert_eq!(test_node.metric_sum("partage_quarantined_total").unwrap(), 1.0, "the link");
        assert_eq!(fs::read_to_string(&record).unwrap(), newer);
        for (path, text) in &specs {
            assert_eq!(fs::read_to_string(path).unwrap(), *text);
        }

        // The newer agent comes back, and finds all its files unchanged.
        test_node.agent.process().kill();
        fs::write(&record, &written).unwrap();
        for (path, text) in &specs {
            fs::write(path, text.replacen("{\\\"version\\\":2,", "{\\\"version\\\":1,", 1)).unwrap();
        }
        test_node.restart_agent().await;
        assert_eq!(gpu_and_memory_by_pod(&test_node.wait_until_consistent().await), before);
        for name in ["a", "b"] {
            test_node.delete_pod(name);
        }
        test_node.wait_until_released().await;
    });
}

/// Checks the removal of files that an agent may leave when it is killed with its node: all files of deleted pods, and
/// files without a known owner. Names of deleted pods are removed, too. Another vendor's files stay.
async fn check_orphans_removed(test_node: &mut TestNode<'_>) {
    let (gone, unowned) = ("0123456789abcdef0123456789abcdef", "fedcba9876543210fedcba9876543210");
    let cdi = |key: &str| format!("/run/cdi/partage.dev-grant-{key}.json");
    let name = |key: &str| format!("/run/partage/names/{key}.json");
    let region = |key: &str| format!("/run/partage/regions/{key}");
    let held = test_node.wait_until_consistent().await;
    test_node.agent.process().kill();
    // A name may be only in kubelet's checkpoint by now.
    let names = fs::read_dir(test_node.node_path("/run/partage/names")).unwrap().flatten();
    let mut keys = names.map(|entry| entry.path().file_stem().unwrap().to_str().unwrap().to_string());
    let known = keys.find(|key| test_node.node_path(&region(key)).exists()).unwrap();
    let copy = |from: &str, to: &str| {
        let mut text = fs::read_to_string(test_node.node_path(from)).unwrap().replace(&known, gone);
        for pod in &held {
            text = text.replace(&pod.uid, "00000000-0000-0000-0000-000000000000");
        }
        fs::write(test_node.node_path(to), text).unwrap();
    };
    copy(&cdi(&known), &cdi(gone));
    copy(&name(&known), &name(gone));
    let device = format!("{{\"name\":\"{unowned}\",\"containerEdits\":{{\"env\":[\"A=B\"]}}}}");
    let spec =
        |kind: &str| format!("{{\"cdiVersion\":\"0.6.0\",\"kind\":\"{kind}\",\"devices\":[{device}]}}");
    fs::write(test_node.node_path(&cdi(unowned)), spec("partage.dev/grant")).unwrap();
    for key in [gone, unowned] {
        fs::create_dir(test_node.node_path(&region(key))).unwrap();
    }
    let foreign = test_node.node_path("/run/cdi/vendor.com-gpu.json");
    fs::write(&foreign, spec("vendor.com/gpu")).unwrap();
    age_names(test_node);
    test_node.restart_agent().await;
    eventually("files without an owner are removed", async || {
        let paths = [gone, unowned].into_iter().flat_map(|key| [cdi(key), name(key), region(key)]);
        let there: Vec<String> = paths.filter(|path| test_node.node_path(path).exists()).collect();
        if there.is_empty() { Ok(()) } else { Err(format!("{there:?}\n{}", test_node.agent.log())) }
    })
    .await;
    assert!(foreign.exists());
    fs::remove_file(&foreign).unwrap();
    assert_eq!(memory_by_pod(&test_node.wait_until_consistent().await), memory_by_pod(&held));

    delete_all_pods(test_node).await;
    eventually("no names are left", async || match test_node.agent_files() {
        [0, 0, 0, 0] => Ok(()),
        kept => Err(format!("{kept:?}\n{}", test_node.agent.log())),
    })
    .await;
}

async fn delete_all_pods(test_node: &TestNode<'_>) {
    test_node.bed.kubectl(&["delete", "pods", "--all", "--grace-period=1", "--wait"]).unwrap();
    test_node.wait_until_released().await;
}

/// Makes all names look as if they were allocated long ago.
fn age_names(test_node: &TestNode<'_>) {
    for entry in fs::read_dir(test_node.node_path("/run/partage/names")).unwrap().flatten() {
        let mut name: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(entry.path()).unwrap()).unwrap();
        assert!(name["at"].is_u64(), "{name}");
        name["at"] = 1.into();
        fs::write(entry.path(), name.to_string()).unwrap();
    }
}

#[test]
fn repeated_agent_kills_during_pod_churn_leave_no_inconsistency() {
    run_pod_churn(2 * WAVE_SIZE);
}

#[test]
#[ignore = "a soak of minutes: the figure of 200 pods"]
fn repeated_agent_kills_during_200_pod_churn_leave_no_inconsistency() {
    run_pod_churn(200);
}

/// How many pods exist at a time.
const WAVE_SIZE: usize = 16;

fn run_pod_churn(pods: usize) {
    let Some(bed) = bed() else { return };
    // Room for a wave that ends while the next one is created.
    let settings = format!("{SIMULATED_SETTINGS}sharesPerGpu: {WAVE_SIZE}\n");
    let mut test_node = bed.block_on(TestNode::start(&bed, &settings));
    let over = &AtomicBool::new(false);
    let agent = test_node.agent.process();
    let kills = std::thread::scope(|scope| {
        let ready = || test_node.get_from_agent("readyz").is_ok();
        let killer = scope.spawn(move || kill_repeatedly(agent, ready, over));
        let waves = std::panic::AssertUnwindSafe(|| bed.block_on(run_waves(&test_node, pods)));
        let done = std::panic::catch_unwind(waves);
        over.store(true, Ordering::Relaxed);
        let kills = killer.join().unwrap();
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        kills
    });
    println!("killed {kills} times while {pods} pods were created and deleted");
    assert!(kills > pods / 16, "killed only {kills} times");
    bed.block_on(async {
        test_node.restart_agent().await;
        test_node.wait_until_consistent().await;
        delete_all_pods(&test_node).await;
    });
}

/// Creates waves of pods with different sizes, each deleted while the next one is created.
async fn run_waves(test_node: &TestNode<'_>, pods: usize) {
    let all: Vec<(String, usize)> = (0..pods).map(|at| (format!("p{at}"), 512 + 8 * at)).collect();
    let manifest = |(name, mib): &(String, usize)| {
        let cores = 1 + mib / 8 % 3;
        long_running_pod(
            name,
            &format!("partage.dev/gpu: 1, partage.dev/memory: {mib}Mi, partage.dev/cores: {cores}"),
        )
    };
    for wave in all.chunks(WAVE_SIZE) {
        test_node.apply(&wave.iter().map(manifest).collect::<String>());
        for pod in wave {
            let runs = async || test_node.check_running_or_recreate(&pod.0, &manifest(pod));
            eventually(&format!("{} is running", pod.0), runs).await;
        }
        for (name, mib) in wave {
            let uid =
                test_node.get_object("pod", name).unwrap()["metadata"]["uid"].as_str().unwrap().to_string();
            eventually(&format!("{name} prints what it sees"), async || {
                // An agent that was killed before it was done may have written another grant: its successor decides
                // again, and writes later.
                let grant = test_node.wait_for_grant(name).await;
                let memory = grant.grants[0].shares[0].memory_bytes;
                assert_eq!(memory, Some(Bytes((*mib as u64) << 20)), "{name}");
                let held = GrantedPod { name: name.clone(), uid: uid.clone(), grant, witness: true };
                match test_node.reported_gpus(&held) {
                    Some(output) if output == held.expected_view() => Ok(()),
                    output => Err(format!("{output:?}, expected {}", held.expected_view())),
                }
            })
            .await;
        }
        let names: Vec<&str> = wave.iter().map(|(name, _)| name.as_str()).collect();
        let arguments = [&["delete", "pods", "--grace-period=1", "--wait=false"], names.as_slice()].concat();
        test_node.bed.kubectl(&arguments).unwrap();
    }
}

fn kill_repeatedly(agent: &Component, ready: impl Fn() -> bool, over: &AtomicBool) -> usize {
    let mut kills = 0;
    let pause = |millis| std::thread::sleep(Duration::from_millis(millis));
    while !over.load(Ordering::Relaxed) {
        // Every fourth agent is killed before it is ready. The others run for a short time or longer: kubelet retries
        // after about ten seconds.
        while kills % 4 != 3 && !over.load(Ordering::Relaxed) && !ready() {
            pause(50);
        }
        pause([200, 4000, 1000, 8000, 0, 2000, 500][kills % 7]);
        agent.restart().unwrap();
        kills += 1;
    }
    kills
}

impl TestNode<'_> {
    /// Waits until the agent has been killed.
    pub(crate) async fn wait_until_agent_exits(&self) {
        eventually("the agent is killed", async || match self.agent.process().pid() {
            None => Ok(()),
            Some(_) => Err(self.agent.log()),
        })
        .await;
    }

    /// Waits until a pod has failed for this reason.
    pub(crate) async fn wait_until_failed(&self, name: &str, reason: &str) {
        eventually(&format!("{name} fails: {reason}"), async || {
            let pod = self.get_object("pod", name)?;
            if pod["status"]["reason"] == reason { Ok(()) } else { Err(pod["status"].to_string()) }
        })
        .await;
    }

    /// Waits until the container of a pod was restarted this number of times, and runs.
    pub(crate) async fn wait_until_restarted(&self, name: &str, times: u64) {
        eventually(&format!("{name} was restarted {times} times"), async || {
            let pod = self.get_object("pod", name)?;
            let status = &pod["status"]["containerStatuses"][0];
            if status["restartCount"].as_u64() >= Some(times) && status["state"].get("running").is_some() {
                Ok(())
            } else {
                Err(format!("{}\n{}", pod["status"], self.agent.log()))
            }
        })
        .await;
    }

    /// Checks that a pod runs. A pod that kubelet failed because the agent was away is created again, as a controller
    /// would do.
    fn check_running_or_recreate(&self, name: &str, manifest: &str) -> Result<(), String> {
        let pod = self.get_object("pod", name).inspect_err(|_| self.apply(manifest))?;
        if pod["status"]["phase"] == "Failed" {
            self.bed.kubectl(&["delete", "pod", name, "--wait"]).map_err(|error| error.to_string())?;
            self.apply(manifest);
        }
        if pod["status"]["containerStatuses"][0]["ready"] == true {
            Ok(())
        } else {
            Err(format!("{}\n{}", pod["status"], self.agent.log()))
        }
    }
}

fn remove_entries(test_node: &TestNode<'_>, folder: &str) {
    for entry in fs::read_dir(test_node.node_path(folder)).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
    }
}

/// Returns the memory of each pod, in MiB.
fn memory_by_pod(held: &[GrantedPod]) -> BTreeMap<String, u64> {
    gpu_and_memory_by_pod(held).into_iter().map(|(name, (_, mib))| (name, mib)).collect()
}

fn gpu_and_memory_by_pod(held: &[GrantedPod]) -> BTreeMap<String, (String, u64)> {
    let of = |pod: &GrantedPod| {
        let share = &pod.grant.grants[0].shares[0];
        (pod.name.clone(), (share.gpu.to_string(), share.memory_bytes.unwrap().0 >> 20))
    };
    held.iter().map(of).collect()
}
