//! Real processes, killed: at every place where they say they may be, and at random.
//!
//! The test starts itself again as a player, which does what its part says and tells what it did on its output.
#![allow(clippy::unwrap_used, clippy::expect_used, unsafe_code)]

use partage_region::{GpuShare, RegionOwner, RegionPolicy, RegionTenant, UNIT, UsageReader, failpoint};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use tempfile::TempDir;

/// What a player is told to do, and where.
const PART: &str = "PARTAGE_REGION_TEST_PART";
const FOLDER: &str = "PARTAGE_REGION_TEST_FOLDER";

fn region(units: &[u64]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let shares: Vec<GpuShare> =
        units.iter().map(|units| GpuShare { memory: units * UNIT, ..GpuShare::default() }).collect();
    RegionOwner::create(folder.path(), &shares, RegionPolicy::default()).unwrap();
    folder
}

struct Player {
    child: Child,
    says: BufReader<ChildStdout>,
    hears: Option<ChildStdin>,
}

impl Player {
    fn command(folder: &TempDir, part: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "player", "--nocapture", "--test-threads=1"]);
        command.env(PART, part).env(FOLDER, folder.path());
        command
    }

    fn start(folder: &TempDir, part: &str) -> Self {
        let mut command = Self::command(folder, part);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let says = BufReader::new(child.stdout.take().unwrap());
        let hears = child.stdin.take();
        Self { child, says, hears }
    }

    /// The rest of the next line that begins with the word.
    fn hear(&mut self, word: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.says.read_line(&mut line).unwrap(), 0, "it ended before it said {word:?}");
            // The test harness writes the test's name before what it says.
            if let Some((_, rest)) = line.split_once(&format!("@{word}")) {
                return rest.trim().to_string();
            }
        }
    }

    fn kill(self) {
        drop(self);
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(words: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "@{words}").unwrap();
    out.flush().unwrap();
}

fn wait_to_be_told() {
    let _ = std::io::stdin().read_line(&mut String::new());
}

#[test]
fn player() {
    let Ok(part) = std::env::var(PART) else { return };
    let folder = std::env::var(FOLDER).unwrap();
    let folder = Path::new(&folder);
    let (part, number) = part.split_once(' ').unwrap_or((&part, "0"));
    let number: u32 = number.parse().unwrap();
    match part {
        "hold" => hold(folder, number),
        "life" => life(folder, number),
        "named" => named(folder),
        "restless" => restless(folder, number),
        "parent" => parent(folder),
        "ancestor" => ancestor(folder),
        _ => panic!("there is no part {part:?}"),
    }
}

fn hold(folder: &Path, units: u32) {
    let region = RegionTenant::attach(folder).unwrap();
    region.reserve(0, u64::from(units) * UNIT).unwrap();
    say(&format!("holding {} {}", region.slot(), std::process::id()));
    wait_to_be_told();
}

/// Everything a process does that others depend on; killed at the n-th place.
fn life(folder: &Path, n: u32) {
    failpoint::kill_process_at(n);
    let region = RegionTenant::attach(folder).unwrap();
    region.reserve(0, 3 * UNIT).unwrap();
    region.reserve(1, 5 * UNIT).unwrap();
    region.release(0, UNIT);
    // More than is left before the dead give theirs back, and more than there is.
    region.reserve(0, 60 * UNIT).unwrap();
    assert!(region.reserve(0, 100 * UNIT).is_err());
    region.sweep();
    drop(region);
    failpoint::disarm();
    say("survived");
}

#[test]
fn a_process_may_be_killed_at_every_place() {
    if !failpoint::ENABLED {
        return;
    }
    let mut places = 0;
    for n in 0.. {
        let folder = region(&[100, 100]);
        let living = RegionTenant::attach(folder.path()).unwrap();
        living.reserve(0, 7 * UNIT).unwrap();
        let mut dead = Player::start(&folder, "hold 50");
        dead.hear("holding");
        dead.kill();
        let mut player = Player::start(&folder, &format!("life {n}"));
        let status = player.child.wait().unwrap();
        if status.success() {
            player.hear("survived");
            assert_eq!((living.used(0), living.used(1)), (7 * UNIT, 0));
            break;
        }
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGKILL), "place {n}");
        places += 1;
        // The agent sees the truth before anybody has cleaned up.
        let seen = UsageReader::open(folder.path()).unwrap().snapshot().unwrap();
        assert_eq!((seen.forged, seen.gpus[0].used, seen.gpus[1].used), (vec![], 7 * UNIT, 0), "place {n}");
        // So does everybody who comes, and what fits is given.
        living.reserve(0, 93 * UNIT).unwrap_or_else(|refused| panic!("killed at place {n}: {refused}"));
        living.release(0, 93 * UNIT);
        living.sweep();
        assert_eq!((living.used(0), living.used(1)), (7 * UNIT, 0), "killed at place {n}");
        assert_eq!((living.processes().count(), living.held(0)), (1, 7 * UNIT), "killed at place {n}");
        assert_eq!(living.gpu_account(0).refusals() & !1, 0, "killed at place {n}");
    }
    assert!(places > 60, "only {places} places to die at");
}

/// Dies at the point that its environment names.
fn named(folder: &Path) {
    failpoint::arm_from_environment();
    let region = RegionTenant::attach(folder).unwrap();
    region.reserve(0, 3 * UNIT).unwrap();
    say("survived");
}

#[test]
fn process_dies_at_the_point_that_its_environment_names() {
    if !failpoint::ENABLED {
        return;
    }
    let folder = region(&[100]);
    for (name, dies) in [("account.changed", true), ("no-such-point", false)] {
        let mut command = Player::command(&folder, "named");
        let status = command.env(failpoint::VARIABLE, name).output().unwrap().status;
        let signal = std::os::unix::process::ExitStatusExt::signal(&status);
        assert_eq!(signal, dies.then_some(libc::SIGKILL), "{name}");
        // What it had taken when it died is known, and given back.
        let seen = UsageReader::open(folder.path()).unwrap().snapshot().unwrap();
        assert_eq!((seen.forged, seen.gpus[0].used), (vec![], 0));
        if dies {
            assert_eq!(seen.gpus[0].dead, 3 * UNIT);
        }
        assert_eq!(RegionTenant::attach(folder.path()).unwrap().used(0), 0);
    }
}

/// Takes and gives at random, and never sees more used than there is.
fn restless(folder: &Path, seed: u32) {
    let region = RegionTenant::attach(folder).unwrap();
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let told = std::sync::Arc::clone(&stop);
    std::thread::spawn(move || {
        wait_to_be_told();
        told.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    let mut random = u64::from(seed) ^ 0x9e37_79b9_7f4a_7c15;
    let mut held = [0u64; 2];
    let mut given = 0u64;
    say("restless");
    // On a machine that does other things it may be told to stop before it has begun.
    while !stop.load(std::sync::atomic::Ordering::Relaxed) || given <= 100 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let gpu = (random >> 40 & 1) as usize;
        let units = random >> 50 & 31;
        if random >> 45 & 1 == 0 {
            if region.reserve(gpu, units * UNIT).is_ok() {
                held[gpu] += units;
                given += 1;
            }
        } else {
            let units = units.min(held[gpu]);
            region.release(gpu, units * UNIT);
            held[gpu] -= units;
        }
        let (used, limit) = (region.used(gpu), region.memory_limit(gpu).unwrap());
        assert!(used <= limit, "{used} of {limit}");
        assert_eq!(region.held(gpu), held[gpu] * UNIT);
    }
    say(&format!("holds {} {} {given}", held[0], held[1]));
    wait_to_be_told();
}

#[test]
fn half_of_eight_are_killed_and_everything_is_back() {
    let folder = region(&[100, 64]);
    let observer = RegionTenant::attach(folder.path()).unwrap();
    let mut players: Vec<Player> =
        (0..8).map(|seed| Player::start(&folder, &format!("restless {seed}"))).collect();
    for player in &mut players {
        player.hear("restless");
    }
    for _ in 0..400 {
        for (gpu, limit) in [(0, 100), (1, 64)] {
            assert!(observer.used(gpu) <= limit * UNIT);
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    for player in players.drain(..4) {
        player.kill();
    }
    let mut held = [0u64; 2];
    for player in &mut players {
        player.hears.as_mut().unwrap().write_all(b"stop\n").unwrap();
        let words = player.hear("holds");
        let numbers: Vec<u64> = words.split(' ').map(|word| word.parse().unwrap()).collect();
        held[0] += numbers[0];
        held[1] += numbers[1];
        assert!(numbers[2] > 100, "only {} requests were given", numbers[2]);
    }
    observer.sweep();
    assert_eq!([observer.used(0), observer.used(1)], held.map(|units| units * UNIT));
    for (gpu, limit) in [(0, 100), (1, 64)] {
        let left = (limit - held[gpu]) * UNIT;
        assert!(observer.reserve(gpu, left + 1).is_err());
        observer.reserve(gpu, left).unwrap();
    }
    let seen = UsageReader::open(folder.path()).unwrap().snapshot().unwrap();
    assert_eq!((seen.forged, seen.gpus[0].used, seen.processes.len()), (vec![], 100 * UNIT, 5));
}

#[test]
fn three_hundred_processes_have_a_slot_each() {
    let folder = region(&[1000]);
    let mut players: Vec<Player> = (0..300).map(|_| Player::start(&folder, "hold 2")).collect();
    let slots: BTreeSet<String> = players
        .iter_mut()
        .map(|player| player.hear("holding").split(' ').next().unwrap().to_string())
        .collect();
    assert_eq!(slots.len(), 300);
    let observer = RegionTenant::attach(folder.path()).unwrap();
    assert_eq!((observer.used(0), observer.processes().count()), (600 * UNIT, 301));
    let pids: BTreeSet<u32> = players.iter().map(|player| player.child.id()).collect();
    let seen = UsageReader::open(folder.path()).unwrap().snapshot().unwrap();
    let seen_pids: BTreeSet<u32> = seen.processes.iter().filter_map(|process| process.pid_here).collect();
    assert_eq!(seen_pids, pids);
    assert!(observer.processes().filter(|process| process.pid_here != Some(std::process::id())).all(
        |process| {
            process.pid_here == Some(process.pid) && process.held[0] == 2 * UNIT && process.started > 0
        }
    ));
    for player in players {
        player.kill();
    }
    assert_eq!((observer.sweep(), observer.used(0), observer.processes().count()), (300, 0, 1));
}

/// Forks: the child finds that the region is not its own, attaches itself, and stays when its parent is killed.
fn parent(folder: &Path) {
    let region = RegionTenant::attach(folder).unwrap();
    region.reserve(0, 10 * UNIT).unwrap();
    // SAFETY: the child has this thread only, and uses nothing that another could have held.
    let child = unsafe { libc::fork() };
    if child != 0 {
        say(&format!("parent {}", region.slot()));
        wait_to_be_told();
        return;
    }
    let refused = !region.is_own() && region.reserve(0, UNIT).is_err();
    region.release(0, 10 * UNIT);
    let swept = region.sweep();
    drop(region);
    let own = RegionTenant::attach(folder).unwrap();
    own.reserve(0, UNIT).unwrap();
    say(&format!("child {refused} {swept} {} {} {}", own.slot(), own.used(0) / UNIT, own.held(0) / UNIT));
    wait_to_be_told();
    // SAFETY: ends the child here, before the test harness it has inherited goes on.
    unsafe { libc::_exit(0) };
}

#[test]
fn a_forked_child_keeps_nobody_alive_and_can_come_itself() {
    let folder = region(&[100]);
    let observer = RegionTenant::attach(folder.path()).unwrap();
    let mut player = Player::start(&folder, "parent");
    // Both write to the same pipe.
    let first = player.hear("");
    let second = player.hear("");
    let (parents, childs) = if first.starts_with("parent") { (first, second) } else { (second, first) };
    assert_eq!((parents.as_str(), childs.as_str()), ("parent 1", "child true 0 2 11 1"));
    assert_eq!(observer.processes().count(), 3);
    let hears = player.hears.take();
    player.kill();
    observer.sweep();
    // The child lives, and what was the parent's is free.
    let living: Vec<u64> = observer.processes().map(|process| process.held[0]).collect();
    assert_eq!((living.as_slice(), observer.used(0)), ([0, UNIT].as_slice(), UNIT));
    drop(hears);
}

/// Forks a child that attaches itself, lets go of what it has inherited only then, and ends before a child of its own.
fn ancestor(folder: &Path) {
    let inherited = RegionTenant::attach(folder).unwrap();
    inherited.reserve(0, 10 * UNIT).unwrap();
    // SAFETY: the child has this thread only, and uses nothing that another could have held.
    let child = unsafe { libc::fork() };
    if child != 0 {
        // SAFETY: waits for the child; nothing is to be filled in.
        unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
        say("over");
        wait_to_be_told();
        return;
    }
    // Its descriptor gets the number that the inherited one had.
    let own = RegionTenant::attach(folder).unwrap();
    own.reserve(0, 7 * UNIT).unwrap();
    drop(inherited);
    // SAFETY: as above.
    if unsafe { libc::fork() } == 0 {
        say("here");
        wait_to_be_told();
    }
    // SAFETY: ends both here, before the test harness they have inherited goes on; as a killed process, without cleaning.
    unsafe { libc::_exit(0) };
}

#[test]
fn what_was_inherited_takes_nothing_along_when_it_is_let_go() {
    let folder = region(&[100]);
    let observer = RegionTenant::attach(folder.path()).unwrap();
    let mut player = Player::start(&folder, "ancestor");
    // "here" and "over", in any order.
    player.hear("");
    player.hear("");
    // The grandchild lives and must not keep its dead parent's slot alive.
    observer.sweep();
    assert_eq!((observer.used(0), observer.processes().count()), (10 * UNIT, 2));
}
