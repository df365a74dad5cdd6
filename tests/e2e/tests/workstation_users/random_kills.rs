//! Daemons, standbys and commands are killed at random. Limits hold, and nothing is left over.

use crate::support::{BackgroundProcess, GIB, TestStateDir, eventually, is_alive, sample, signal};
use serde_json::Value;
use std::collections::BTreeMap;

/// Random numbers that a seed repeats.
struct XorShiftRng(u64);

impl XorShiftRng {
    /// Returns a number below `of`.
    fn below(&mut self, of: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap() % of
    }
}

fn env_number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

/// The memory limit of each share in GiB, and its command.
const SHARE_SPECS: [(&str, u64, &[&str]); 4] = [
    ("killed-trainer", 6, &["trainer", "--memory", "2Gi"]),
    ("killed-greedy", 2, &["greedy"]),
    ("killed-notebook", 4, &["notebook", "--memory", "1Gi"]),
    ("killed-glutton", 3, &["greedy"]),
];

struct KillScenario {
    state_dir: TestStateDir,
    running: BTreeMap<&'static str, BackgroundProcess>,
}

impl KillScenario {
    /// Starts shares that do not run. A daemon that is killed while a command starts makes it fail with a message.
    fn start_missing(&mut self) {
        for (name, memory, work) in SHARE_SPECS {
            if self.running.contains_key(name) {
                continue;
            }
            let memory = format!("{memory}Gi");
            let arguments = [
                &["run", "--wait", "--name", name, "--memory", &memory, "--cores", "20", "--", sample()],
                work,
            ]
            .concat();
            self.running.insert(name, BackgroundProcess::start(self.state_dir.partage(&arguments)));
        }
    }

    /// Removes commands that have ended.
    fn reap(&mut self) {
        self.running.retain(|_, running| running.is_running());
    }

    /// Checks that every share has processes, every process has a share, and no share uses more than its limit.
    fn wait_until_consistent(&mut self, what: &str) {
        eventually(&format!("shares and processes are consistent after {what}"), || {
            self.reap();
            let report = self.state_dir.run_json(&["top", "-o", "json", "--interval", "50ms"]);
            let shares = report["shares"].as_array().unwrap();
            self.assert_within_limits(&report, what);
            let with_processes = |share: &Value| share["members"].as_u64().unwrap() > 0;
            let starting = shares.iter().any(|share| share["stage"] == "starting");
            let mut kept: Vec<u64> = shares.iter().map(|share| share["pid"].as_u64().unwrap()).collect();
            let mut live: Vec<u64> = self.running.values().map(|running| running.pid().into()).collect();
            let mut members: Vec<u64> = self.state_dir.share_processes().into_iter().map(u64::from).collect();
            for pids in [&mut kept, &mut live, &mut members] {
                pids.sort_unstable();
            }
            let agree = kept == live && live == members;
            (!starting && shares.iter().all(with_processes) && agree).then_some(())
        });
    }

    /// Waits until all run, greedy ones are refused memory, and all get GPU time.
    fn wait_until_all_work(&mut self) {
        let mut before: Option<Vec<u64>> = None;
        eventually("all shares run and compute", || {
            self.reap();
            self.start_missing();
            let shares = self.state_dir.shares();
            let runs = |share: &&Value| share["stage"] == "running";
            let refused = |share: &Value| {
                let greedy = share["command"].as_array().unwrap().last().unwrap() == "greedy";
                !greedy || share["gpuShares"][0]["refusals"].as_u64().unwrap() > 0
            };
            if shares.iter().filter(runs).count() < SHARE_SPECS.len() || !shares.iter().all(refused) {
                return None;
            }
            let spent =
                shares.iter().map(|share| share["gpuShares"][0]["spentNanos"].as_u64().unwrap()).collect();
            let before = before.get_or_insert_with(|| Vec::clone(&spent));
            before.iter().zip(&spent).all(|(before, now)| now > before).then_some(())
        });
    }

    fn assert_within_limits(&self, report: &Value, what: &str) {
        // According to the driver, all programs together use no more memory than their limits allow.
        let used = report["gpus"].as_array().unwrap().iter();
        let used: u64 = used.filter_map(|gpu| gpu["usedMemoryBytes"].as_u64()).sum();
        assert!(used <= SHARE_SPECS.iter().map(|share| share.1 * GIB).sum(), "after {what}: {report}");
        for share in report["shares"].as_array().unwrap() {
            let name = share["name"].as_str().unwrap();
            let (_, memory, _) = SHARE_SPECS.iter().find(|one| one.0 == name).unwrap();
            let gpu_share = &share["gpuShares"][0];
            assert_eq!(gpu_share["memoryBytes"], memory * GIB, "after {what}: {share}");
            assert_eq!(share["bypassSuspected"], serde_json::json!([]), "after {what}: {share}");
            for figure in ["usedBytes", "peakBytes"] {
                assert!(gpu_share[figure].as_u64().unwrap() <= memory * GIB, "after {what}: {share}");
            }
        }
    }
}

#[test]
fn random_kills_keep_limits_and_leave_nothing() {
    let rounds = env_number("PARTAGE_KILL_ROUNDS").unwrap_or(12);
    let seed = env_number("PARTAGE_KILL_SEED").unwrap_or_else(|| {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        u64::try_from(since.as_nanos() & u128::from(u64::MAX)).unwrap() | 1
    });
    println!("set PARTAGE_KILL_SEED={seed} to repeat this run");
    let mut rng = XorShiftRng(seed);
    let state_dir = TestStateDir::new();
    let mut up = Some(state_dir.start_up("driver: simulated\n", &["--metrics", "off"]));
    let mut scenario = KillScenario { state_dir, running: BTreeMap::new() };
    scenario.wait_until_all_work();
    for round in 0..rounds {
        scenario.start_missing();
        // Some are killed while they start.
        let settled = rng.below(3) > 0;
        if settled {
            eventually("all shares are running", || {
                scenario.reap();
                scenario.start_missing();
                let runs = |share: &&Value| share["stage"] == "running";
                (scenario.state_dir.shares().iter().filter(runs).count() == SHARE_SPECS.len()).then_some(())
            });
        } else {
            std::thread::sleep(std::time::Duration::from_millis(u64::try_from(rng.below(60)).unwrap()));
        }
        let daemon = scenario.state_dir.daemon_pid();
        let standby = scenario.state_dir.standby_pid();
        let command = scenario.running.values().nth(rng.below(SHARE_SPECS.len())).map(BackgroundProcess::pid);
        let victims = [
            ("the daemon", [daemon, None]),
            ("the standby", [standby, None]),
            ("a command", [command, None]),
            ("the daemon and a command", [daemon, command]),
            ("the daemon and the standby", [daemon, standby]),
        ];
        let (who, pids) = victims[rng.below(victims.len())];
        let when = if settled { "all shares were running" } else { "some shares were starting" };
        let what = format!("seed {seed}, round {round}: {who}, {pids:?}, {when}");
        for pid in pids.into_iter().flatten() {
            signal(pid, libc::SIGKILL);
        }
        for pid in pids.into_iter().flatten() {
            eventually("the process has ended", || (!is_alive(pid)).then_some(()));
        }
        // The main thread ends before the whole process does.
        if let Some(mut dead) = up.take_if(|up| pids.contains(&Some(up.pid()))) {
            dead.wait_for_exit();
        }
        scenario.wait_until_consistent(&what);
        if up.is_none() && rng.below(3) == 0 {
            up = Some(scenario.state_dir.start_up("driver: simulated\n", &["--metrics", "off"]));
            scenario.wait_until_consistent(&format!("{what}, up again"));
        }
    }
    scenario.wait_until_all_work();
    scenario.wait_until_consistent(&format!("seed {seed}: everything"));
    let KillScenario { state_dir, mut running } = scenario;
    let stopped = state_dir.run_json(&["stop", "--all", "--grace", "5s", "-o", "json"]);
    assert_eq!(stopped["failed"], serde_json::json!([]), "seed {seed}");
    for (name, running) in &mut running {
        let _ = running.wait_for_exit();
        assert!(state_dir.find_share(name).is_none());
    }
    if let Some(up) = &mut up {
        up.signal(libc::SIGTERM);
        let status = up.wait_for_exit();
        assert!(status.success(), "seed {seed}: {status}: {:?}", up.remaining_lines());
    }
    state_dir.wait_until_clean();
    // A background daemon stays for a while, and then ends.
    eventually("no daemon is left", || state_dir.processes().is_empty().then_some(()));
}

#[test]
fn share_with_a_newer_or_damaged_record_is_ignored_and_stays_reserved() {
    const SIMULATED_SETTINGS: &str = "driver: simulated\n";
    let state_dir = TestStateDir::new();
    let mut share = state_dir.start_share("newer", &["--memory", "30Gi"], &["sleep", "1000"]);
    // The daemon that made it ends, and so do its standbys.
    eventually("no daemon runs", || {
        let members = state_dir.share_processes();
        let daemons: Vec<u32> =
            state_dir.processes().into_iter().filter(|pid| !members.contains(pid)).collect();
        daemons.iter().for_each(|pid| signal(*pid, libc::SIGKILL));
        daemons.is_empty().then_some(())
    });
    let record = state_dir.path().join("shares/newer/share.json");
    let written = std::fs::read_to_string(&record).unwrap();
    let newer = written.replacen("{\"format\":1,", "{\"format\":2,", 1);
    assert_ne!(newer, written);
    let damaged = &written[..written.len() / 2];
    for (text, warning) in [
        (newer.as_str(), "share newer was created by another version of partage, and its GPUs stay held"),
        (damaged, "cannot read the record of share newer, and its GPUs stay held"),
    ] {
        std::fs::write(&record, text).unwrap();
        let mut up = state_dir.start_up(SIMULATED_SETTINGS, &["--metrics", "off"]);
        up.wait_for_line(warning);
        // 39.39 GiB of each GPU can be shared.
        let (code, message) = state_dir.run_err(&["run", "--gpus", "2", "--memory", "20Gi", "--", "true"]);
        assert!(code == 125 && message.contains("9.39 GiB"), "{message}");
        assert_eq!(state_dir.shares(), Vec::<Value>::new());
        assert!(share.is_running());
        assert_eq!(std::fs::read_to_string(&record).unwrap(), text);
        up.signal(libc::SIGTERM);
        assert!(up.wait_for_exit().success());
    }

    // The newer version comes back, or the record is restored.
    std::fs::write(&record, &written).unwrap();
    let mut up = state_dir.start_up(SIMULATED_SETTINGS, &["--metrics", "off"]);
    up.wait_for_line("share adopted share=newer");
    assert!(share.is_running() && state_dir.find_share("newer").is_some());
    state_dir.run_ok(&["stop", "newer"]);
    state_dir.wait_until_clean();
}
