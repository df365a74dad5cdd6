//! Keepers, those who stand by, and commands are killed at random. Limits hold, and nothing is left.

use crate::support::{GIB, Home, Running, eventually, lives, sample, signal};
use serde_json::Value;
use std::collections::BTreeMap;

/// Numbers that come again with the same seed.
struct Dice(u64);

impl Dice {
    /// One of so many.
    fn throw(&mut self, of: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap() % of
    }
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

/// What each share may have, and what runs in it.
const SHARES: [(&str, u64, &[&str]); 4] = [
    ("killed-trainer", 6, &["trainer", "--memory", "2Gi"]),
    ("killed-greedy", 2, &["greedy"]),
    ("killed-notebook", 4, &["notebook", "--memory", "1Gi"]),
    ("killed-glutton", 3, &["greedy"]),
];

struct Machine {
    home: Home,
    running: BTreeMap<&'static str, Running>,
}

impl Machine {
    /// Starts what does not run. A keeper that is killed while a command starts makes it fail, in words.
    fn fill(&mut self) {
        for (name, memory, work) in SHARES {
            if self.running.contains_key(name) {
                continue;
            }
            let memory = format!("{memory}Gi");
            let arguments = [
                &["run", "--wait", "--name", name, "--memory", &memory, "--cores", "20", "--", sample()],
                work,
            ]
            .concat();
            self.running.insert(name, Running::start(self.home.partage(&arguments)));
        }
    }

    /// Takes out what has ended.
    fn reap(&mut self) {
        self.running.retain(|_, running| running.goes_on());
    }

    /// Every share has processes, every process has a share, and nobody holds more than its own.
    fn check(&mut self, what: &str) {
        eventually(&format!("shares and processes agree after {what}"), || {
            self.reap();
            let report = self.home.json(&["top", "-o", "json", "--interval", "50ms"]);
            let shares = report["shares"].as_array().unwrap();
            self.within_limits(&report, what);
            let with_processes = |share: &Value| share["members"].as_u64().unwrap() > 0;
            let starting = shares.iter().any(|share| share["stage"] == "starting");
            let mut kept: Vec<u64> = shares.iter().map(|share| share["pid"].as_u64().unwrap()).collect();
            let mut live: Vec<u64> = self.running.values().map(|running| running.pid().into()).collect();
            let mut members: Vec<u64> = self.home.members().into_iter().map(u64::from).collect();
            for pids in [&mut kept, &mut live, &mut members] {
                pids.sort_unstable();
            }
            let agree = kept == live && live == members;
            (!starting && shares.iter().all(with_processes) && agree).then_some(())
        });
    }

    /// All run, those who want too much are refused, and all get their turns.
    fn all_work(&mut self) {
        let mut before: Option<Vec<u64>> = None;
        eventually("all run and work", || {
            self.reap();
            self.fill();
            let shares = self.home.shares();
            let runs = |share: &&Value| share["stage"] == "running";
            let refused = |share: &Value| {
                let greedy = share["command"].as_array().unwrap().last().unwrap() == "greedy";
                !greedy || share["parts"][0]["refusals"].as_u64().unwrap() > 0
            };
            if shares.iter().filter(runs).count() < SHARES.len() || !shares.iter().all(refused) {
                return None;
            }
            let spent =
                shares.iter().map(|share| share["parts"][0]["spentNanos"].as_u64().unwrap()).collect();
            let before = before.get_or_insert_with(|| Vec::clone(&spent));
            before.iter().zip(&spent).all(|(before, now)| now > before).then_some(())
        });
    }

    fn within_limits(&self, report: &Value, what: &str) {
        // As the driver says: no program is on a GPU with more than all of them may have.
        let used = report["gpus"].as_array().unwrap().iter();
        let used: u64 = used.filter_map(|gpu| gpu["usedMemoryBytes"].as_u64()).sum();
        assert!(used <= SHARES.iter().map(|share| share.1 * GIB).sum(), "after {what}: {report}");
        for share in report["shares"].as_array().unwrap() {
            let name = share["name"].as_str().unwrap();
            let (_, memory, _) = SHARES.iter().find(|one| one.0 == name).unwrap();
            let part = &share["parts"][0];
            assert_eq!(part["memoryBytes"], memory * GIB, "after {what}: {share}");
            assert_eq!(share["bypassSuspected"], serde_json::json!([]), "after {what}: {share}");
            for figure in ["usedBytes", "peakBytes"] {
                assert!(part[figure].as_u64().unwrap() <= memory * GIB, "after {what}: {share}");
            }
        }
    }
}

#[test]
fn whoever_is_killed_limits_hold_and_nothing_is_left() {
    let rounds = variable("PARTAGE_KILL_ROUNDS").unwrap_or(12);
    let seed = variable("PARTAGE_KILL_SEED").unwrap_or_else(|| {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        u64::try_from(since.as_nanos() & u128::from(u64::MAX)).unwrap() | 1
    });
    println!("PARTAGE_KILL_SEED={seed} repeats this");
    let mut dice = Dice(seed);
    let home = Home::new();
    let mut up = Some(home.up("driver: simulated\n", &["--metrics", "off"]));
    let mut machine = Machine { home, running: BTreeMap::new() };
    machine.all_work();
    for round in 0..rounds {
        machine.fill();
        // Some are killed while they start.
        let settled = dice.throw(3) > 0;
        if settled {
            eventually("all run", || {
                machine.reap();
                machine.fill();
                let runs = |share: &&Value| share["stage"] == "running";
                (machine.home.shares().iter().filter(runs).count() == SHARES.len()).then_some(())
            });
        } else {
            std::thread::sleep(std::time::Duration::from_millis(u64::try_from(dice.throw(60)).unwrap()));
        }
        let keeper = machine.home.keeper();
        let standby = machine.home.standby();
        let command = machine.running.values().nth(dice.throw(SHARES.len())).map(Running::pid);
        let victims = [
            ("the keeper", [keeper, None]),
            ("who stands by", [standby, None]),
            ("a command", [command, None]),
            ("the keeper and a command", [keeper, command]),
            ("the keeper and who stands by", [keeper, standby]),
        ];
        let (who, pids) = victims[dice.throw(victims.len())];
        let when = if settled { "all run" } else { "some start" };
        let what = format!("seed {seed}, round {round}: {who}, {pids:?}, {when}");
        for pid in pids.into_iter().flatten() {
            signal(pid, libc::SIGKILL);
        }
        for pid in pids.into_iter().flatten() {
            eventually("it is dead", || (!lives(pid)).then_some(()));
        }
        // Its first thread is dead before all of it is.
        if let Some(mut dead) = up.take_if(|up| pids.contains(&Some(up.pid()))) {
            dead.ended();
        }
        machine.check(&what);
        if up.is_none() && dice.throw(3) == 0 {
            up = Some(machine.home.up("driver: simulated\n", &["--metrics", "off"]));
            machine.check(&format!("{what}, up again"));
        }
    }
    machine.all_work();
    machine.check(&format!("seed {seed}: everything"));
    let Machine { home, mut running } = machine;
    let stopped = home.json(&["stop", "--all", "--grace", "5s", "-o", "json"]);
    assert_eq!(stopped["failed"], serde_json::json!([]), "seed {seed}");
    for (name, running) in &mut running {
        let _ = running.ended();
        assert!(home.find(name).is_none());
    }
    if let Some(up) = &mut up {
        up.signal(libc::SIGTERM);
        let status = up.ended();
        assert!(status.success(), "seed {seed}: {status}: {:?}", up.rest());
    }
    home.nothing_left();
    // A keeper in the background stays for a while, and no longer.
    eventually("no keeper is left", || home.processes().is_empty().then_some(()));
}

#[test]
fn share_of_a_newer_version_is_left_alone_and_keeps_what_it_has() {
    const SIMULATED: &str = "driver: simulated\n";
    let home = Home::new();
    let mut share = home.share("newer", &["--memory", "30Gi"], &["sleep", "1000"]);
    // The daemon that made it goes away, with those that stand by.
    eventually("no daemon runs", || {
        let members = home.members();
        let daemons: Vec<u32> = home.processes().into_iter().filter(|pid| !members.contains(pid)).collect();
        daemons.iter().for_each(|pid| signal(*pid, libc::SIGKILL));
        daemons.is_empty().then_some(())
    });
    let record = home.path().join("shares/newer/share.json");
    let written = std::fs::read_to_string(&record).unwrap();
    let newer = written.replacen("{\"format\":1,", "{\"format\":2,", 1);
    assert_ne!(newer, written);
    std::fs::write(&record, &newer).unwrap();

    let mut up = home.up(SIMULATED, &["--metrics", "off"]);
    up.says("share newer was made by another version of partage, and what it has stays held");
    // 39.39 GiB of each GPU can be shared.
    let (code, words) = home.refused(&["run", "--gpus", "2", "--memory", "20Gi", "--", "true"]);
    assert!(code == 125 && words.contains("9.39 GiB"), "{words}");
    assert_eq!(home.shares(), Vec::<Value>::new());
    assert!(share.goes_on());
    assert_eq!(std::fs::read_to_string(&record).unwrap(), newer);
    up.signal(libc::SIGTERM);
    assert!(up.ended().success());

    // The newer version comes back.
    std::fs::write(&record, &written).unwrap();
    let mut up = home.up(SIMULATED, &["--metrics", "off"]);
    up.says("share adopted share=newer");
    assert!(share.goes_on() && home.find("newer").is_some());
    home.fine(&["stop", "newer"]);
    home.nothing_left();
}
