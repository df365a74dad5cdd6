//! A container's share of a GPU's time: every way to submit work, every mode, with an arbiter and without.
//!
//! `make bench` measures how exact shares are; the bounds of these tests are wide enough for a busy machine: a limit is
//! exceeded by no more than a few points, and guarantees are met. Where a test sleeps, it waits for the time that it
//! measures: a share can only be observed over time.
#![allow(unsafe_code, unreachable_pub, missing_docs)]
#![allow(clippy::unwrap_used, clippy::multiple_unsafe_ops_per_block, clippy::macro_metavars_in_unsafe)]

#[path = "support/container.rs"]
mod container;
#[path = "../../sim-driver/tests/support/driver.rs"]
mod driver;
#[path = "../../sim-driver/tests/support/node.rs"]
mod node;

#[path = "compute/calls.rs"]
mod calls;
#[path = "compute/program_shares.rs"]
mod program_shares;
#[path = "compute/programs.rs"]
mod programs;
#[path = "compute/tenant.rs"]
mod tenant;
// The shim of the previous release is a file for this architecture.
#[cfg(target_arch = "x86_64")]
#[path = "compute/upgrade.rs"]
mod upgrade;

use container::{TestContainer, shares};
use node::{RoleProcess, TestNode};
use partage_driver_api::exports::DriverVersion;
use partage_region::arbiter::Arbiter;
use partage_region::{GpuShare, RegionPolicy};
use partage_sim_node::node::NodeConfig;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The program that every test here runs in the container.
#[test]
fn client() {
    let Some(role) = node::role() else { return };
    match role.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        #[cfg(target_arch = "x86_64")]
        ["account"] => upgrade::account(),
        ref role => tenant::run_role(role),
    }
}

/// Returns a node for a test that runs alone: two tests that measure at once would disturb each other.
fn exclusive_node() -> ExclusiveNode {
    exclusive_node_with(1, |_| ())
}

fn exclusive_node_with(gpus: usize, change: impl FnOnce(&mut NodeConfig)) -> ExclusiveNode {
    static EXCLUSIVE: Mutex<()> = Mutex::new(());
    let guard = EXCLUSIVE.lock().unwrap_or_else(PoisonError::into_inner);
    let node = TestNode::with_config("A100-SXM4-40GB", gpus, DriverVersion::R550, change);
    ExclusiveNode { node, _guard: guard }
}

struct ExclusiveNode {
    node: TestNode,
    _guard: MutexGuard<'static, ()>,
}

impl std::ops::Deref for ExclusiveNode {
    type Target = TestNode;

    fn deref(&self) -> &TestNode {
        &self.node
    }
}

/// Creates a container with this share of the GPU's time, in percent.
fn container_with_share(node: &TestNode, cores: u32, ceiling: u32) -> TestContainer<'_> {
    TestContainer::new(node, &[share(node, cores, ceiling)], RegionPolicy::default())
}

fn share(node: &TestNode, cores: u32, ceiling: u32) -> GpuShare {
    let [share] = shares(node, u64::MAX).try_into().unwrap();
    GpuShare { cores: cores * 1_000, ceiling: ceiling * 1_000, waits_for_turns: true, ..share }
}

fn start_arbiter(containers: &[&TestContainer<'_>]) -> Arbiter {
    let arbiter = Arbiter::new();
    for container in containers {
        arbiter.add(container.handle()).unwrap();
    }
    arbiter
}

/// Starts a tenant and waits until it works.
fn start_working(container: &TestContainer<'_>, role: &str) -> RoleProcess {
    let mut process = container.start(role);
    process.wait_for_line("ready");
    process
}

/// Returns the percentage of the GPU's time that each process gets in the next milliseconds.
fn measure_shares(node: &TestNode, processes: &[&RoleProcess], milliseconds: u64) -> Vec<f64> {
    let state = node.state();
    let served = || -> Vec<u64> {
        let listed = state.processes(0);
        let slot = |pid| listed.iter().find(|process| process.pid == pid).map(|process| process.slot);
        processes
            .iter()
            .map(|process| slot(process.child.id()).map_or(0, |slot| state.service_time(0, slot).0))
            .collect()
    };
    let (began, before) = (Instant::now(), served());
    std::thread::sleep(Duration::from_millis(milliseconds));
    let (after, took) = (served(), began.elapsed().as_nanos() as f64);
    after.iter().zip(before).map(|(after, before)| (after - before) as f64 / took * 100.0).collect()
}

/// What a process must get: at least, at most, and its description.
type ShareBounds<'a> = (f64, f64, &'a str);

/// Checks that each process gets its share. On a busy machine a process may get no CPU for a while; others then have
/// its time, and it catches up. So half of the guarantee in one of several windows is enough, and the limit must hold
/// over all of them together.
#[track_caller]
fn assert_shares(node: &TestNode, processes: &[&RoleProcess], milliseconds: u64, bounds: &[ShareBounds<'_>]) {
    let mut seen: Vec<Vec<f64>> = Vec::new();
    for _ in 0..10 {
        seen.push(measure_shares(node, processes, milliseconds));
        let enough = |(at, (least, ..)): (usize, &ShareBounds<'_>)| {
            seen.last().is_some_and(|got| got[at] >= least / 2.0)
        };
        let limited = |(at, (_, most, _)): (usize, &ShareBounds<'_>)| {
            seen.iter().map(|got| got[at]).sum::<f64>() <= most * seen.len() as f64
        };
        if bounds.iter().enumerate().all(enough) && bounds.iter().enumerate().all(limited) {
            return;
        }
    }
    panic!("{bounds:?}: {seen:.1?}");
}

#[test]
fn every_submission_function_keeps_to_the_share() {
    let node = exclusive_node();
    let container = container_with_share(&node, 20, 20);
    let _arbiter = start_arbiter(&[&container]);
    for way in tenant::SUBMISSION_FUNCTIONS {
        let process = start_working(&container, &format!("work {way} 500"));
        assert_shares(&node, &[&process], 700, &[(10.0, 26.0, way)]);
    }
}

/// Writes a heartbeat without giving turns. It is dated a minute ahead: otherwise the arbiter would be considered gone
/// if this thread is delayed.
fn beat(container: &TestContainer<'_>) {
    container.owner.beat(0, partage_region::clock::monotonic_ns() + 60_000_000_000);
}

#[test]
fn copies_wait_for_turns_only_if_the_policy_says_so() {
    let node = exclusive_node();
    for throttle_copies in [false, true] {
        let policy = RegionPolicy { throttle_copies, ..RegionPolicy::default() };
        let container = TestContainer::new(&node, &[share(&node, 20, 20)], policy);
        let mut process = container.start("copy");
        process.wait_for_line("ready");
        beat(&container);
        process.resume();
        let waits =
            || container.reader().snapshot().unwrap().processes.iter().any(|process| process.waiting[0] > 0);
        if throttle_copies {
            let began = Instant::now();
            while !waits() {
                beat(&container);
                assert!(began.elapsed() < Duration::from_secs(30), "it did not wait for a turn");
                std::thread::sleep(Duration::from_millis(5));
            }
            let _arbiter = start_arbiter(&[&container]);
            process.wait_for_line("copied");
        } else {
            process.wait_for_line("copied");
            assert!(!waits());
        }
    }
}

#[test]
fn share_holds_without_an_arbiter() {
    let node = exclusive_node();
    let container = container_with_share(&node, 20, 20);
    let process = start_working(&container, "work kernel 2000");
    assert_shares(&node, &[&process], 1000, &[(10.0, 26.0, "never an arbiter")]);
    let arbiter = start_arbiter(&[&container]);
    assert_shares(&node, &[&process], 1000, &[(10.0, 26.0, "an arbiter came")]);
    arbiter.stop();
    // It notices within a quarter of a second; until then it waits.
    std::thread::sleep(Duration::from_millis(400));
    assert_shares(&node, &[&process], 1000, &[(10.0, 26.0, "the arbiter went")]);
}

#[test]
fn two_processes_of_a_container_share_one_share() {
    let node = exclusive_node();
    let container = container_with_share(&node, 30, 30);
    let _arbiter = start_arbiter(&[&container]);
    let processes =
        [start_working(&container, "work kernel 200"), start_working(&container, "work kernel 3000")];
    let mut seen: Vec<f64> = Vec::new();
    let enough = |seen: &[f64]| seen.last().is_some_and(|got| *got >= 9.0);
    let limited = |seen: &[f64]| seen.iter().sum::<f64>() <= 37.0 * seen.len() as f64;
    while !(enough(&seen) && limited(&seen)) {
        assert!(seen.len() < 10, "both together: {seen:.1?}");
        seen.push(measure_shares(&node, &processes.iter().collect::<Vec<_>>(), 1000).iter().sum());
    }
}

#[test]
fn two_containers_get_their_guarantees() {
    let node = exclusive_node();
    let containers = [container_with_share(&node, 30, 30), container_with_share(&node, 70, 70)];
    let _arbiter = start_arbiter(&[&containers[0], &containers[1]]);
    let processes =
        containers.each_ref().map(|container| start_working(container, "work kernel 200,2000,8000"));
    std::thread::sleep(Duration::from_millis(300));
    let bounds = [(20.0, 36.0, "30 %"), (50.0, 76.0, "70 %")];
    assert_shares(&node, &processes.iter().collect::<Vec<_>>(), 2000, &bounds);
}

#[test]
fn idle_time_is_lent_and_returned() {
    let node = exclusive_node();
    let (lent, owner) = (container_with_share(&node, 20, 100), container_with_share(&node, 80, 80));
    let _arbiter = start_arbiter(&[&lent, &owner]);
    let borrower = start_working(&lent, "work kernel 500");
    assert_shares(&node, &[&borrower], 700, &[(60.0, 101.0, "alone")]);
    let back = start_working(&owner, "work kernel 500");
    std::thread::sleep(Duration::from_millis(200));
    // If nothing were returned, it would be half.
    let bounds = [(10.0, 48.0, "the one that borrowed"), (55.0, 86.0, "the owner")];
    assert_shares(&node, &[&borrower, &back], 1000, &bounds);
}

#[test]
fn ceiling_is_reached_and_not_exceeded() {
    let node = exclusive_node();
    let container = container_with_share(&node, 20, 50);
    let _arbiter = start_arbiter(&[&container]);
    let process = start_working(&container, "work kernel 500");
    assert_shares(&node, &[&process], 1000, &[(35.0, 56.0, "20 % guaranteed, 50 % at most")]);
}

#[test]
fn higher_priority_gets_the_idle_time() {
    let node = exclusive_node();
    let (low, high) = (container_with_share(&node, 10, 100), container_with_share(&node, 10, 100));
    high.owner.set(0, &GpuShare { priority: 5, ..share(&node, 10, 100) }).unwrap();
    let _arbiter = start_arbiter(&[&low, &high]);
    let processes = [start_working(&low, "work kernel 500"), start_working(&high, "work kernel 500")];
    std::thread::sleep(Duration::from_millis(200));
    // Without priority it would be half each.
    assert_shares(&node, &[&processes[0], &processes[1]], 1000, &[(4.0, 40.0, "low"), (60.0, 96.0, "high")]);
}

#[test]
fn share_changes_while_the_program_runs() {
    let node = exclusive_node();
    let container = container_with_share(&node, 80, 80);
    let _arbiter = start_arbiter(&[&container]);
    let process = start_working(&container, "work kernel 500");
    assert_shares(&node, &[&process], 500, &[(50.0, 86.0, "80 %")]);
    container.owner.set(0, &share(&node, 20, 20)).unwrap();
    std::thread::sleep(Duration::from_millis(150));
    assert_shares(&node, &[&process], 800, &[(10.0, 27.0, "20 %")]);
    container.owner.set(0, &GpuShare { waits_for_turns: false, ..share(&node, 0, 100) }).unwrap();
    std::thread::sleep(Duration::from_millis(150));
    assert_shares(&node, &[&process], 500, &[(60.0, 101.0, "no limit")]);
}

#[test]
fn long_kernel_is_charged_afterwards() {
    let node = exclusive_node();
    let container = container_with_share(&node, 20, 20);
    let _arbiter = start_arbiter(&[&container]);
    let process = start_working(&container, "work kernel 150000");
    // The time of five kernels: one more may have begun.
    assert_shares(&node, &[&process], 3000, &[(8.0, 28.0, "kernels of 150 ms")]);
}

#[test]
fn changing_work_is_charged() {
    let node = exclusive_node();
    let container = container_with_share(&node, 20, 20);
    let _arbiter = start_arbiter(&[&container]);
    // One graph, mostly of 20 us and sometimes of 2 ms: its cost cannot be known in advance.
    let process = start_working(&container, "work changing-graph 20,2000");
    std::thread::sleep(Duration::from_millis(1500));
    assert_shares(&node, &[&process], 3000, &[(10.0, 27.0, "a graph that changes")]);
}

#[test]
fn exited_process_has_been_charged_for_its_kernels() {
    let node = exclusive_node();
    let container = container_with_share(&node, 20, 20);
    let _arbiter = start_arbiter(&[&container]);
    container.run_role("once 400000");
    let spent = container.charged(0);
    assert!(spent >= 395_000_000, "{spent} ns for a kernel of 400 ms");
}

#[test]
fn failed_launches_cost_nothing() {
    let node = exclusive_node();
    let container = container_with_share(&node, 20, 20);
    let _arbiter = start_arbiter(&[&container]);
    container.run_role("fail 200");
    let spent = container.charged(0);
    assert!(spent < 30_000_000, "{spent} ns for launches that the driver refused");
}

#[test]
fn second_context_is_measured() {
    let node = exclusive_node();
    let container = container_with_share(&node, 90, 90);
    let _arbiter = start_arbiter(&[&container]);
    container.run_role("contexts");
    let spent = container.charged(0);
    assert!(spent < 400_000_000, "{spent} ns for 4,000 kernels of 20 us");
}

#[test]
fn captured_work_is_charged_when_launched() {
    let node = exclusive_node();
    let container = container_with_share(&node, 20, 20);
    let _arbiter = start_arbiter(&[&container]);
    container.run_role("capture");
}

#[test]
fn capture_is_not_disturbed_by_unusual_ends_and_forks() {
    let node = exclusive_node();
    let container = container_with_share(&node, 90, 90);
    let _arbiter = start_arbiter(&[&container]);
    container.run_role("open-captures");
}

/// Returns the number of a process's threads, without the one of the simulated driver that writes words as a GPU does.
fn threads_of(process: &RoleProcess) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", process.child.id())).unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.trim() != "sim-card").count()
}

#[test]
fn waiting_takes_no_cpu_time_and_no_thread() {
    let node = exclusive_node();
    let container = container_with_share(&node, 5, 5);
    let _arbiter = start_arbiter(&[&container]);
    let process = start_working(&container, "work kernel 20000");
    let of = |file: &str| std::fs::read_to_string(format!("/proc/{}/{file}", process.child.id())).unwrap();
    let ticks = || {
        let stat = of("stat");
        let fields: Vec<u64> = stat
            .rsplit_once(')')
            .unwrap()
            .1
            .split_whitespace()
            .map(|word| word.parse().unwrap_or(0))
            .collect();
        fields[11] + fields[12]
    };
    let before = ticks();
    std::thread::sleep(Duration::from_millis(2000));
    // 200 ticks of 10 ms have passed.
    assert!(ticks() - before < 40, "{} of 200 ticks at work", ticks() - before);
    let bare = {
        let mut bare = RoleProcess::spawn(node.command("work kernel 20000"));
        bare.wait_for_line("ready");
        threads_of(&bare)
    };
    assert_eq!(threads_of(&process), bare);
}
