//! Real processes that are killed: at every fault injection point, and at random times.
//!
//! The test starts itself again as a child process, which acts by its role and reports on its standard output.
#![allow(clippy::unwrap_used, clippy::expect_used, unsafe_code)]

use partage_region::protocol::MARKER_PAGE_COUNT;
use partage_region::{
    GpuShare, MEMORY_UNIT, RegionOwner, RegionPolicy, RegionTenant, UsageReader, failpoint,
};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use tempfile::TempDir;

/// Environment variables that tell a child process its role and its directory.
const ROLE_VARIABLE: &str = "PARTAGE_REGION_TEST_PART";
const FOLDER_VARIABLE: &str = "PARTAGE_REGION_TEST_FOLDER";

fn region(units: &[u64]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let shares: Vec<GpuShare> =
        units.iter().map(|units| GpuShare { memory: units * MEMORY_UNIT, ..GpuShare::default() }).collect();
    RegionOwner::create(folder.path(), &shares, RegionPolicy::default()).unwrap();
    folder
}

struct ChildProcess {
    child: Child,
    stdout: BufReader<ChildStdout>,
    stdin: Option<ChildStdin>,
}

impl ChildProcess {
    fn command(folder: &TempDir, role: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child_process", "--nocapture", "--test-threads=1"]);
        command.env(ROLE_VARIABLE, role).env(FOLDER_VARIABLE, folder.path());
        command
    }

    fn start(folder: &TempDir, role: &str) -> Self {
        let mut command = Self::command(folder, role);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let stdin = child.stdin.take();
        Self { child, stdout, stdin }
    }

    /// Returns the rest of the next line that contains the word.
    fn read_line_with(&mut self, word: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(
                self.stdout.read_line(&mut line).unwrap(),
                0,
                "the process ended before it reported {word:?}"
            );
            // The test harness writes the test's name before the output.
            if let Some((_, rest)) = line.split_once(&format!("@{word}")) {
                return rest.trim().to_string();
            }
        }
    }

    fn kill(self) {
        drop(self);
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn report(words: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "@{words}").unwrap();
    out.flush().unwrap();
}

fn wait_for_stdin() {
    let _ = std::io::stdin().read_line(&mut String::new());
}

#[test]
fn child_process() {
    let Ok(role) = std::env::var(ROLE_VARIABLE) else { return };
    let folder = std::env::var(FOLDER_VARIABLE).unwrap();
    let folder = Path::new(&folder);
    let (role, number) = role.split_once(' ').unwrap_or((&role, "0"));
    let number: u32 = number.parse().unwrap();
    match role {
        "hold" => hold(folder, number),
        "life" => full_life_cycle(folder, number),
        "named" => named(folder),
        "allocate_randomly" => allocate_randomly(folder, number),
        "parent" => parent(folder),
        "ancestor" => ancestor(folder),
        _ => panic!("unknown role {role:?}"),
    }
}

fn hold(folder: &Path, units: u32) {
    let region = RegionTenant::attach(folder).unwrap();
    region.reserve(0, u64::from(units) * MEMORY_UNIT).unwrap();
    // More processes may hold memory than there are pages.
    let _ = region.take_marker_page(0);
    report(&format!("holding {} {}", region.slot(), std::process::id()));
    wait_for_stdin();
}

/// Does everything that other processes depend on; killed at the n-th fault injection point.
fn full_life_cycle(folder: &Path, n: u32) {
    failpoint::kill_process_at(n);
    let region = RegionTenant::attach(folder).unwrap();
    region.reserve(0, 3 * MEMORY_UNIT).unwrap();
    region.reserve(1, 5 * MEMORY_UNIT).unwrap();
    region.release(0, MEMORY_UNIT);
    // More than is free before dead processes are reclaimed, then more than the limit.
    region.reserve(0, 60 * MEMORY_UNIT).unwrap();
    assert!(region.reserve(0, 100 * MEMORY_UNIT).is_err());
    region.reclaim_dead_processes();
    let page = region.take_marker_page(0).unwrap();
    region.take_marker_page(1).unwrap();
    region.return_marker_page(page);
    region.take_marker_page(1).unwrap();
    drop(region);
    failpoint::disarm();
    report("survived");
}

#[test]
fn process_killed_at_any_failpoint_is_reclaimed() {
    if !failpoint::ENABLED {
        return;
    }
    let mut failpoints = 0;
    for n in 0.. {
        let folder = region(&[100, 100]);
        let living = RegionTenant::attach(folder.path()).unwrap();
        living.reserve(0, 7 * MEMORY_UNIT).unwrap();
        let mut dead = ChildProcess::start(&folder, "hold 50");
        dead.read_line_with("holding");
        dead.kill();
        let mut child_process = ChildProcess::start(&folder, &format!("life {n}"));
        let status = child_process.child.wait().unwrap();
        if status.success() {
            child_process.read_line_with("survived");
            assert_eq!((living.used(0), living.used(1)), (7 * MEMORY_UNIT, 0));
            break;
        }
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&status),
            Some(libc::SIGKILL),
            "failpoint {n}"
        );
        failpoints += 1;
        // The daemon sees the true usage before any process has cleaned up.
        let seen = UsageReader::open(folder.path()).unwrap().snapshot().unwrap();
        assert_eq!(
            (seen.forged, seen.gpus[0].used, seen.gpus[1].used),
            (vec![], 7 * MEMORY_UNIT, 0),
            "failpoint {n}"
        );
        // So does every process, and requests that fit are granted.
        living
            .reserve(0, 93 * MEMORY_UNIT)
            .unwrap_or_else(|refused| panic!("killed at failpoint {n}: {refused}"));
        living.release(0, 93 * MEMORY_UNIT);
        living.reclaim_dead_processes();
        assert_eq!((living.used(0), living.used(1)), (7 * MEMORY_UNIT, 0), "killed at failpoint {n}");
        assert_eq!(
            (living.processes().count(), living.held(0)),
            (1, 7 * MEMORY_UNIT),
            "killed at failpoint {n}"
        );
        assert_eq!(living.gpu_account(0).refusals() & !1, 0, "killed at failpoint {n}");
        let pages = std::iter::from_fn(|| living.take_marker_page(0)).count();
        assert_eq!(pages, MARKER_PAGE_COUNT, "killed at failpoint {n}");
    }
    assert!(failpoints > 60, "only {failpoints} failpoints");
}

/// Dies at the point that its environment names.
fn named(folder: &Path) {
    failpoint::arm_from_environment();
    let region = RegionTenant::attach(folder).unwrap();
    region.reserve(0, 3 * MEMORY_UNIT).unwrap();
    report("survived");
}

#[test]
fn process_dies_at_the_point_that_its_environment_names() {
    if !failpoint::ENABLED {
        return;
    }
    let folder = region(&[100]);
    for (name, dies) in [("account.changed", true), ("no-such-point", false)] {
        let mut command = ChildProcess::command(&folder, "named");
        let status = command.env(failpoint::VARIABLE, name).output().unwrap().status;
        let signal = std::os::unix::process::ExitStatusExt::signal(&status);
        assert_eq!(signal, dies.then_some(libc::SIGKILL), "{name}");
        // What it had reserved when it died is known, and is reclaimed.
        let seen = UsageReader::open(folder.path()).unwrap().snapshot().unwrap();
        assert_eq!((seen.forged, seen.gpus[0].used), (vec![], 0));
        if dies {
            assert_eq!(seen.gpus[0].dead, 3 * MEMORY_UNIT);
        }
        assert_eq!(RegionTenant::attach(folder.path()).unwrap().used(0), 0);
    }
}

/// Reserves and releases at random, and never sees more in use than the limit.
fn allocate_randomly(folder: &Path, seed: u32) {
    let region = RegionTenant::attach(folder).unwrap();
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let told = std::sync::Arc::clone(&stop);
    std::thread::spawn(move || {
        wait_for_stdin();
        told.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    let mut random = u64::from(seed) ^ 0x9e37_79b9_7f4a_7c15;
    let mut held = [0u64; 2];
    let mut given = 0u64;
    report("allocate_randomly");
    // On a busy machine it may be stopped before it has begun.
    while !stop.load(std::sync::atomic::Ordering::Relaxed) || given <= 100 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let gpu = (random >> 40 & 1) as usize;
        let units = random >> 50 & 31;
        if random >> 45 & 1 == 0 {
            if region.reserve(gpu, units * MEMORY_UNIT).is_ok() {
                held[gpu] += units;
                given += 1;
            }
        } else {
            let units = units.min(held[gpu]);
            region.release(gpu, units * MEMORY_UNIT);
            held[gpu] -= units;
        }
        let (used, limit) = (region.used(gpu), region.memory_limit(gpu).unwrap());
        assert!(used <= limit, "{used} of {limit}");
        assert_eq!(region.held(gpu), held[gpu] * MEMORY_UNIT);
    }
    report(&format!("holds {} {} {given}", held[0], held[1]));
    wait_for_stdin();
}

#[test]
fn killed_half_of_eight_processes_is_reclaimed() {
    let folder = region(&[100, 64]);
    let observer = RegionTenant::attach(folder.path()).unwrap();
    let mut children: Vec<ChildProcess> =
        (0..8).map(|seed| ChildProcess::start(&folder, &format!("allocate_randomly {seed}"))).collect();
    for child_process in &mut children {
        child_process.read_line_with("allocate_randomly");
    }
    for _ in 0..400 {
        for (gpu, limit) in [(0, 100), (1, 64)] {
            assert!(observer.used(gpu) <= limit * MEMORY_UNIT);
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    for child_process in children.drain(..4) {
        child_process.kill();
    }
    let mut held = [0u64; 2];
    for child_process in &mut children {
        child_process.stdin.as_mut().unwrap().write_all(b"stop\n").unwrap();
        let words = child_process.read_line_with("holds");
        let numbers: Vec<u64> = words.split(' ').map(|word| word.parse().unwrap()).collect();
        held[0] += numbers[0];
        held[1] += numbers[1];
        assert!(numbers[2] > 100, "only {} requests were granted", numbers[2]);
    }
    observer.reclaim_dead_processes();
    assert_eq!([observer.used(0), observer.used(1)], held.map(|units| units * MEMORY_UNIT));
    for (gpu, limit) in [(0, 100), (1, 64)] {
        let left = (limit - held[gpu]) * MEMORY_UNIT;
        assert!(observer.reserve(gpu, left + 1).is_err());
        observer.reserve(gpu, left).unwrap();
    }
    let seen = UsageReader::open(folder.path()).unwrap().snapshot().unwrap();
    assert_eq!((seen.forged, seen.gpus[0].used, seen.processes.len()), (vec![], 100 * MEMORY_UNIT, 5));
}

#[test]
fn three_hundred_processes_get_a_slot_each() {
    let folder = region(&[1000]);
    let mut children: Vec<ChildProcess> = (0..300).map(|_| ChildProcess::start(&folder, "hold 2")).collect();
    let slots: BTreeSet<String> = children
        .iter_mut()
        .map(|child_process| child_process.read_line_with("holding").split(' ').next().unwrap().to_string())
        .collect();
    assert_eq!(slots.len(), 300);
    let observer = RegionTenant::attach(folder.path()).unwrap();
    assert_eq!((observer.used(0), observer.processes().count()), (600 * MEMORY_UNIT, 301));
    let pids: BTreeSet<u32> = children.iter().map(|child_process| child_process.child.id()).collect();
    let seen = UsageReader::open(folder.path()).unwrap().snapshot().unwrap();
    let seen_pids: BTreeSet<u32> = seen.processes.iter().filter_map(|process| process.pid_here).collect();
    assert_eq!(seen_pids, pids);
    assert!(observer.processes().filter(|process| process.pid_here != Some(std::process::id())).all(
        |process| {
            process.pid_here == Some(process.pid) && process.held[0] == 2 * MEMORY_UNIT && process.started > 0
        }
    ));
    for child_process in children {
        child_process.kill();
    }
    assert_eq!(
        (observer.reclaim_dead_processes(), observer.used(0), observer.processes().count()),
        (300, 0, 1)
    );
}

/// Forks: the child finds that the region is not its own, attaches itself, and stays when its parent is killed.
fn parent(folder: &Path) {
    let region = RegionTenant::attach(folder).unwrap();
    region.reserve(0, 10 * MEMORY_UNIT).unwrap();
    // SAFETY: the child has only this thread, and uses nothing that another thread could have held.
    let child = unsafe { libc::fork() };
    if child != 0 {
        report(&format!("parent {}", region.slot()));
        wait_for_stdin();
        return;
    }
    let refused = !region.is_own() && region.reserve(0, MEMORY_UNIT).is_err();
    region.release(0, 10 * MEMORY_UNIT);
    let reclaimed = region.reclaim_dead_processes();
    drop(region);
    let own = RegionTenant::attach(folder).unwrap();
    own.reserve(0, MEMORY_UNIT).unwrap();
    report(&format!(
        "child {refused} {reclaimed} {} {} {}",
        own.slot(),
        own.used(0) / MEMORY_UNIT,
        own.held(0) / MEMORY_UNIT
    ));
    wait_for_stdin();
    // SAFETY: ends the child here, before the inherited test harness continues.
    unsafe { libc::_exit(0) };
}

#[test]
fn forked_child_releases_the_parents_slot_and_can_attach() {
    let folder = region(&[100]);
    let observer = RegionTenant::attach(folder.path()).unwrap();
    let mut child_process = ChildProcess::start(&folder, "parent");
    // Both write to the same pipe.
    let first = child_process.read_line_with("");
    let second = child_process.read_line_with("");
    let (parents, children) = if first.starts_with("parent") { (first, second) } else { (second, first) };
    assert_eq!((parents.as_str(), children.as_str()), ("parent 1", "child true 0 2 11 1"));
    assert_eq!(observer.processes().count(), 3);
    let stdin = child_process.stdin.take();
    child_process.kill();
    observer.reclaim_dead_processes();
    // The child is alive, and what the parent held is free.
    let living: Vec<u64> = observer.processes().map(|process| process.held[0]).collect();
    assert_eq!((living.as_slice(), observer.used(0)), ([0, MEMORY_UNIT].as_slice(), MEMORY_UNIT));
    drop(stdin);
}

/// Forks a child that attaches itself, only then drops what it inherited, and exits before a child of its own.
fn ancestor(folder: &Path) {
    let inherited = RegionTenant::attach(folder).unwrap();
    inherited.reserve(0, 10 * MEMORY_UNIT).unwrap();
    // SAFETY: the child has only this thread, and uses nothing that another thread could have held.
    let child = unsafe { libc::fork() };
    if child != 0 {
        // SAFETY: waits for the child; a null status pointer is allowed.
        unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
        report("over");
        wait_for_stdin();
        return;
    }
    // Its descriptor gets the number that the inherited one had.
    let own = RegionTenant::attach(folder).unwrap();
    own.reserve(0, 7 * MEMORY_UNIT).unwrap();
    drop(inherited);
    // SAFETY: the process has only this thread, and the child uses nothing that another thread could have held.
    if unsafe { libc::fork() } == 0 {
        report("here");
        wait_for_stdin();
    }
    // SAFETY: ends both processes here, before the inherited test harness continues, and without cleanup, as a kill
    // does.
    unsafe { libc::_exit(0) };
}

#[test]
fn dropping_an_inherited_region_leaves_own_locks_alone() {
    let folder = region(&[100]);
    let observer = RegionTenant::attach(folder.path()).unwrap();
    let mut child_process = ChildProcess::start(&folder, "ancestor");
    // "here" and "over", in any order.
    child_process.read_line_with("");
    child_process.read_line_with("");
    // The grandchild is alive and must not keep its dead parent's slot alive.
    observer.reclaim_dead_processes();
    assert_eq!((observer.used(0), observer.processes().count()), (10 * MEMORY_UNIT, 2));
}
