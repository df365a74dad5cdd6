//! What a container may have of a GPU's time: every way to submit work, every mode, with an arbiter and without.
//!
//! How exactly is measured by `make bench`; these tests are wide enough for a machine that does other things: a limit is
//! exceeded by no more than a few points, and what was promised comes. Where a test sleeps, it lets pass the time that it is
//! about: what a share is can only be seen over some of it.
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
#[path = "compute/tenant.rs"]
mod tenant;
// The shim of the release before is a file for this processor.
#[cfg(target_arch = "x86_64")]
#[path = "compute/upgrade.rs"]
mod upgrade;

use container::{Container, shares};
use node::{Node, Player};
use partage_driver_api::exports::DriverVersion;
use partage_region::arbiter::Arbiter;
use partage_region::{GpuShare, RegionPolicy};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The program in the container, of every test here.
#[test]
fn client() {
    let Some(role) = node::role() else { return };
    match role.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        #[cfg(target_arch = "x86_64")]
        ["account"] => upgrade::account(),
        ref role => tenant::play(role),
    }
}

/// A node for a test that is alone on the machine: two that measure at once measure each other.
fn a_node() -> Alone {
    static ONE: Mutex<()> = Mutex::new(());
    let guard = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    Alone { node: Node::new("A100-SXM4-40GB", 1, DriverVersion::R550), _guard: guard }
}

struct Alone {
    node: Node,
    _guard: MutexGuard<'static, ()>,
}

impl std::ops::Deref for Alone {
    type Target = Node;

    fn deref(&self) -> &Node {
        &self.node
    }
}

/// A container with this share of the GPU's time, in percent.
fn holding(node: &Node, cores: u32, ceiling: u32) -> Container<'_> {
    Container::new(node, &[share(node, cores, ceiling)], RegionPolicy::default())
}

fn share(node: &Node, cores: u32, ceiling: u32) -> GpuShare {
    let [share] = shares(node, u64::MAX).try_into().unwrap();
    GpuShare { cores: cores * 1_000, ceiling: ceiling * 1_000, gated: true, ..share }
}

fn dealt(containers: &[&Container<'_>]) -> Arbiter {
    let runner = Arbiter::new();
    for container in containers {
        runner.add(container.handle()).unwrap();
    }
    runner
}

/// A tenant that is at work.
fn working(container: &Container<'_>, role: &str) -> Player {
    let mut player = container.start(role);
    player.hear("ready");
    player
}

/// Percent of the GPU's time that each got in the next so many milliseconds.
fn got(node: &Node, players: &[&Player], milliseconds: u64) -> Vec<f64> {
    let state = node.state();
    let served = || -> Vec<u64> {
        let processes = state.processes(0);
        let slot = |pid| processes.iter().find(|process| process.pid == pid).map(|process| process.slot);
        players
            .iter()
            .map(|player| slot(player.child.id()).map_or(0, |slot| state.service(0, slot).0))
            .collect()
    };
    let (began, before) = (Instant::now(), served());
    std::thread::sleep(Duration::from_millis(milliseconds));
    let (after, took) = (served(), began.elapsed().as_nanos() as f64);
    after.iter().zip(before).map(|(after, before)| (after - before) as f64 / took * 100.0).collect()
}

/// What each of these is to get: at least, at most, and whose it is.
type Bounds<'a> = (f64, f64, &'a str);

/// Each gets what it should. On a machine that does other things a process may get no processor for a while; others then have its
/// time, and it catches up. So half of what was promised, in one of several windows, will do; and no more than the limit is had in all of
/// them together.
#[track_caller]
fn kept(node: &Node, players: &[&Player], milliseconds: u64, bounds: &[Bounds<'_>]) {
    let mut seen: Vec<Vec<f64>> = Vec::new();
    for _ in 0..10 {
        seen.push(got(node, players, milliseconds));
        let enough =
            |(at, (least, ..)): (usize, &Bounds<'_>)| seen.last().is_some_and(|got| got[at] >= least / 2.0);
        let limited = |(at, (_, most, _)): (usize, &Bounds<'_>)| {
            seen.iter().map(|got| got[at]).sum::<f64>() <= most * seen.len() as f64
        };
        if bounds.iter().enumerate().all(enough) && bounds.iter().enumerate().all(limited) {
            return;
        }
    }
    panic!("{bounds:?}: {seen:.1?}");
}

#[test]
fn every_way_to_submit_work_keeps_to_the_share() {
    let node = a_node();
    let container = holding(&node, 20, 20);
    let _arbiter = dealt(&[&container]);
    for way in tenant::WAYS {
        let player = working(&container, &format!("work {way} 500"));
        kept(&node, &[&player], 700, &[(10.0, 26.0, way)]);
    }
}

/// The arbiter lives, but deals no turns. It says so for a minute: were this thread kept from saying it again, it would be
/// taken for gone.
fn beat(container: &Container<'_>) {
    container.owner.beat(0, partage_region::clock::exact() + 60_000_000_000);
}

#[test]
fn copies_keep_to_turns_only_where_the_owner_says_so() {
    let node = a_node();
    for gate_copies in [false, true] {
        let policy = RegionPolicy { gate_copies, ..RegionPolicy::default() };
        let container = Container::new(&node, &[share(&node, 20, 20)], policy);
        let mut player = container.start("copy");
        player.hear("ready");
        beat(&container);
        player.tell();
        let waits =
            || container.reader().snapshot().unwrap().processes.iter().any(|process| process.waiting[0] > 0);
        if gate_copies {
            let began = Instant::now();
            while !waits() {
                beat(&container);
                assert!(began.elapsed() < Duration::from_secs(30), "it does not wait for a turn");
                std::thread::sleep(Duration::from_millis(5));
            }
            let _arbiter = dealt(&[&container]);
            player.hear("copied");
        } else {
            player.hear("copied");
            assert!(!waits());
        }
    }
}

#[test]
fn without_an_arbiter_the_share_holds_by_local_accounting() {
    let node = a_node();
    let container = holding(&node, 20, 20);
    let player = working(&container, "work kernel 2000");
    kept(&node, &[&player], 1000, &[(10.0, 26.0, "never an arbiter")]);
    let arbiter = dealt(&[&container]);
    kept(&node, &[&player], 1000, &[(10.0, 26.0, "an arbiter came")]);
    arbiter.stop();
    // It notices within a quarter of a second; until then it waits.
    std::thread::sleep(Duration::from_millis(400));
    kept(&node, &[&player], 1000, &[(10.0, 26.0, "the arbiter went")]);
}

#[test]
fn two_processes_of_a_container_have_one_share() {
    let node = a_node();
    let container = holding(&node, 30, 30);
    let _arbiter = dealt(&[&container]);
    let players = [working(&container, "work kernel 200"), working(&container, "work kernel 3000")];
    let mut seen: Vec<f64> = Vec::new();
    let enough = |seen: &[f64]| seen.last().is_some_and(|got| *got >= 9.0);
    let limited = |seen: &[f64]| seen.iter().sum::<f64>() <= 37.0 * seen.len() as f64;
    while !(enough(&seen) && limited(&seen)) {
        assert!(seen.len() < 10, "both together: {seen:.1?}");
        seen.push(got(&node, &players.iter().collect::<Vec<_>>(), 1000).iter().sum());
    }
}

#[test]
fn two_containers_get_what_they_were_promised() {
    let node = a_node();
    let containers = [holding(&node, 30, 30), holding(&node, 70, 70)];
    let _arbiter = dealt(&[&containers[0], &containers[1]]);
    let players = containers.each_ref().map(|container| working(container, "work kernel 200,2000,8000"));
    std::thread::sleep(Duration::from_millis(300));
    let bounds = [(20.0, 36.0, "30 %"), (50.0, 76.0, "70 %")];
    kept(&node, &players.iter().collect::<Vec<_>>(), 2000, &bounds);
}

#[test]
fn idle_time_is_lent_and_returned() {
    let node = a_node();
    let (lent, owner) = (holding(&node, 20, 100), holding(&node, 80, 80));
    let _arbiter = dealt(&[&lent, &owner]);
    let borrower = working(&lent, "work kernel 500");
    kept(&node, &[&borrower], 700, &[(60.0, 101.0, "alone")]);
    let back = working(&owner, "work kernel 500");
    std::thread::sleep(Duration::from_millis(200));
    // Were nothing returned, it would be half.
    let bounds = [(10.0, 48.0, "the one that borrowed"), (55.0, 86.0, "the owner")];
    kept(&node, &[&borrower, &back], 1000, &bounds);
}

#[test]
fn a_ceiling_is_reached_and_not_exceeded() {
    let node = a_node();
    let container = holding(&node, 20, 50);
    let _arbiter = dealt(&[&container]);
    let player = working(&container, "work kernel 500");
    kept(&node, &[&player], 1000, &[(35.0, 56.0, "20 % promised, 50 % at most")]);
}

#[test]
fn who_has_priority_gets_the_idle_time() {
    let node = a_node();
    let (low, high) = (holding(&node, 10, 100), holding(&node, 10, 100));
    high.owner.set(0, &GpuShare { priority: 5, ..share(&node, 10, 100) }).unwrap();
    let _arbiter = dealt(&[&low, &high]);
    let players = [working(&low, "work kernel 500"), working(&high, "work kernel 500")];
    std::thread::sleep(Duration::from_millis(200));
    // Without priority it would be half each.
    kept(&node, &[&players[0], &players[1]], 1000, &[(4.0, 40.0, "low"), (60.0, 96.0, "high")]);
}

#[test]
fn a_share_changes_while_the_program_runs() {
    let node = a_node();
    let container = holding(&node, 80, 80);
    let _arbiter = dealt(&[&container]);
    let player = working(&container, "work kernel 500");
    kept(&node, &[&player], 500, &[(50.0, 86.0, "80 %")]);
    container.owner.set(0, &share(&node, 20, 20)).unwrap();
    std::thread::sleep(Duration::from_millis(150));
    kept(&node, &[&player], 800, &[(10.0, 27.0, "20 %")]);
    container.owner.set(0, &GpuShare { gated: false, ..share(&node, 0, 100) }).unwrap();
    std::thread::sleep(Duration::from_millis(150));
    kept(&node, &[&player], 500, &[(60.0, 101.0, "no limit")]);
}

#[test]
fn a_long_kernel_is_paid_for_afterwards() {
    let node = a_node();
    let container = holding(&node, 20, 20);
    let _arbiter = dealt(&[&container]);
    let player = working(&container, "work kernel 150000");
    // Five kernels' time: one more may have begun.
    kept(&node, &[&player], 3000, &[(8.0, 28.0, "kernels of 150 ms")]);
}

#[test]
fn work_that_changes_from_launch_to_launch_is_paid_for() {
    let node = a_node();
    let container = holding(&node, 20, 20);
    let _arbiter = dealt(&[&container]);
    // One graph, mostly of 20 us and sometimes of 2 ms: nobody can know beforehand.
    let player = working(&container, "work changing-graph 20,2000");
    std::thread::sleep(Duration::from_millis(1500));
    kept(&node, &[&player], 3000, &[(10.0, 27.0, "a graph that changes")]);
}

#[test]
fn a_process_that_ends_has_paid_for_its_kernels() {
    let node = a_node();
    let container = holding(&node, 20, 20);
    let _arbiter = dealt(&[&container]);
    container.play("once 400000");
    let spent = container.reader().snapshot().unwrap().gpus[0].spent;
    assert!(spent >= 395_000_000, "{spent} ns for a kernel of 400 ms");
}

#[test]
fn launches_that_fail_cost_nothing() {
    let node = a_node();
    let container = holding(&node, 20, 20);
    let _arbiter = dealt(&[&container]);
    container.play("fail 200");
    let spent = container.reader().snapshot().unwrap().gpus[0].spent;
    assert!(spent < 30_000_000, "{spent} ns for launches that the driver refused");
}

#[test]
fn a_second_context_is_measured_too() {
    let node = a_node();
    let container = holding(&node, 90, 90);
    let _arbiter = dealt(&[&container]);
    container.play("contexts");
    let spent = container.reader().snapshot().unwrap().gpus[0].spent;
    assert!(spent < 400_000_000, "{spent} ns for 4,000 kernels of 20 us");
}

#[test]
fn what_is_captured_counts_when_it_is_launched() {
    let node = a_node();
    let container = holding(&node, 20, 20);
    let _arbiter = dealt(&[&container]);
    container.play("capture");
}

#[test]
fn waiting_takes_no_processor_time_and_no_thread() {
    let node = a_node();
    let container = holding(&node, 5, 5);
    let _arbiter = dealt(&[&container]);
    let player = working(&container, "work kernel 20000");
    let of = |file: &str| std::fs::read_to_string(format!("/proc/{}/{file}", player.child.id())).unwrap();
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
    // Two hundred hundredths of a second have passed.
    assert!(ticks() - before < 40, "{} of 200 ticks at work", ticks() - before);
    let bare = {
        let mut bare = Player::of(node.command("work kernel 20000"));
        bare.hear("ready");
        std::fs::read_dir(format!("/proc/{}/task", bare.child.id())).unwrap().count()
    };
    let held = std::fs::read_dir(format!("/proc/{}/task", player.child.id())).unwrap().count();
    assert_eq!(held, bare);
}
