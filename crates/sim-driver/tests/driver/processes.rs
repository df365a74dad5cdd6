//! Several processes on a node: what each sees of the others, and what is left when they are killed.

use super::*;
use crate::driver::nvml::{self, Nvml};
use crate::node::{Node, Player, say, wait_to_be_told};
use partage_driver_api::exports::DriverVersion;
use partage_sim_node::state::UNIT;
use std::process::Command;

const MIB: usize = 1 << 20;

fn node() -> Node {
    Node::new("A100-SXM4-40GB", 2, DriverVersion::R550)
}

/// Pids and bytes of the first GPU's processes, as NVML lists them.
fn listed(node: &Node) -> Vec<(u32, u64)> {
    let mut observer = node.start("process list");
    let words = observer.hear("listed");
    observer.end();
    words
        .split_whitespace()
        .map(|pair| {
            pair.split_once('=').map(|(pid, bytes)| (pid.parse().unwrap(), bytes.parse().unwrap())).unwrap()
        })
        .collect()
}

#[test]
fn processes_are_listed_from_context_to_death() {
    let node = node();
    let mut holder = node.start("process hold 300");
    let held: u64 = holder.hear("holding").parse().unwrap();
    assert_eq!(listed(&node), [(holder.child.id(), held)]);
    // A context, and what was asked for in blocks of two MiB.
    assert_eq!(held, 414 * MIB as u64 + 300 * MIB as u64);
    holder.kill();
    assert_eq!(listed(&node), []);
    assert_eq!(node.state().used_memory(0), 0);
}

#[test]
fn killed_processes_leave_nothing() {
    let node = node();
    let (mut survivors, mut held): (Vec<Player>, Vec<(u32, u64)>) = Default::default();
    for _ in 0..2 {
        // One after the other: each says by how much the card got fuller.
        let mut survivor = node.start("process hold 128");
        held.push((survivor.child.id(), survivor.hear("holding").parse().unwrap()));
        survivors.push(survivor);
    }
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut restless: Vec<Player> =
        (0..3).map(|seed| node.start(&format!("process restless {seed}"))).collect();
    for player in &mut restless {
        player.hear("restless");
    }
    for round in 0..40 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        std::thread::sleep(std::time::Duration::from_micros(random >> 52));
        let victim = (random >> 33) as usize % restless.len();
        restless[victim].kill();
        restless[victim] = node.start(&format!("process restless {}", round + 3));
        restless[victim].hear("restless");
    }
    for player in &mut restless {
        player.kill();
    }
    let mut left = listed(&node);
    left.sort_unstable();
    let mut expected = held.clone();
    expected.sort_unstable();
    assert_eq!(left, expected);
    let units: u64 = held.iter().map(|(_, bytes)| bytes / UNIT).sum();
    assert_eq!([0, 1].map(|gpu| node.state().used_memory(gpu)), [units, 0]);
    // The living did not notice: what they wrote is there, and the GPU works.
    for survivor in &mut survivors {
        survivor.tell();
        survivor.hear("well");
    }
}

/// A child that was forked and goes on living keeps neither the memory nor the work of its dead parent.
#[test]
fn a_forked_child_keeps_nobody_alive() {
    let node = node();
    let mut parent = node.start("process parent");
    parent.hear("forked");
    assert_eq!(listed(&node).len(), 1);
    parent.kill();
    assert_eq!(listed(&node), []);
    assert_eq!(node.state().used_memory(0), 0);
    // The child has nothing of the GPU's, and the parent's input keeps it alive until here.
    drop(parent);
}

/// What is free is seen by who only asks libcuda.
#[test]
fn the_memory_of_the_dead_is_free() {
    let node = node();
    let mut other = node.start("process hold 1000");
    other.hear("holding");
    let mut observer = node.start("process watch");
    let full: usize = observer.hear("used").parse().unwrap();
    assert!(full > 1000 * MIB);
    other.kill();
    observer.tell();
    let mut used = full;
    while used > 500 * MIB {
        used = observer.hear("used").parse().unwrap();
    }
}

/// Work of a killed process is not done, whoever looks first and however late.
#[test]
fn the_dead_do_not_keep_a_gpu_busy() {
    let node = node();
    let mut busy = node.start("stream saturate");
    busy.hear("saturating");
    let state = node.state();
    busy.kill();
    std::thread::sleep(std::time::Duration::from_nanos(3 * state.window()));
    assert_eq!(state.utilisation(0).0, 0);
}

#[test]
fn two_nodes_do_not_see_each_other() {
    let (one, two) = (node(), node());
    let mut holder = one.start("process hold 64");
    holder.hear("holding");
    assert_eq!(listed(&one).len(), 1);
    assert_eq!(listed(&two), []);
}

/// A process in a pid namespace of its own, as in a container, has its host's pid on the list.
#[test]
fn pids_are_the_hosts() {
    let node = node();
    let inner = node.command("process hold 16");
    let mut outer = Command::new("unshare");
    outer
        .args(["--pid", "--fork", "--kill-child", "--mount-proc"])
        .arg(inner.get_program())
        .args(inner.get_args());
    for (key, value) in inner.get_envs() {
        match value {
            Some(value) => outer.env(key, value),
            None => outer.env_remove(key),
        };
    }
    let mut holder = Player::of(outer);
    holder.hear("holding");
    let seen: Vec<u32> = listed(&node).into_iter().map(|(pid, _)| pid).collect();
    let children =
        std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", holder.child.id())).unwrap();
    let host_pid: u32 = children.trim().parse().unwrap();
    assert_eq!(seen, [host_pid]);
}

pub fn client(arguments: &[&str]) {
    match arguments {
        ["list"] => list(),
        ["hold", mib] => hold(mib.parse().unwrap()),
        ["parent"] => parent(),
        ["watch"] => watch(),
        ["restless", seed] => restless(seed.parse().unwrap()),
        other => panic!("{other:?}"),
    }
}

fn list() {
    let library = Nvml::open();
    let mut device = null_mut();
    let mut count = 64;
    let mut found = [nvml::nvmlProcessInfo_t::default(); 64];
    // SAFETY: variables of ours, and as much room as said.
    unsafe {
        assert_eq!(library.nvmlInit_v2(), 0);
        assert_eq!(library.nvmlDeviceGetHandleByIndex_v2(0, &mut device), 0);
        assert_eq!(
            library.nvmlDeviceGetComputeRunningProcesses_v3(device, &mut count, found.as_mut_ptr()),
            0
        );
    }
    let all: Vec<String> = found[..count as usize]
        .iter()
        .map(|process| format!("{}={}", process.pid, process.usedGpuMemory))
        .collect();
    say(&format!("listed {}", all.join(" ")));
}

fn held_by_this_process(cuda: &Cuda) -> usize {
    let (mut free, mut total) = (0, 0);
    ok!(cuda.cuMemGetInfo_v2(&mut free, &mut total));
    total - free
}

fn hold(mib: usize) {
    let cuda = Cuda::started();
    let before = {
        let mut context = null_mut();
        let (mut free, mut total) = (0, 0);
        ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
        ok!(cuda.cuMemGetInfo_v2(&mut free, &mut total));
        total - free - 414 * MIB
    };
    let (mut pointer, bytes) = (0, vec![0xa5u8; MIB]);
    ok!(cuda.cuMemAlloc_v2(&mut pointer, mib * MIB));
    ok!(cuda.cuMemcpyHtoD_v2(pointer, bytes.as_ptr().cast(), MIB));
    say(&format!("holding {}", held_by_this_process(&cuda) - before));
    if wait_to_be_told() {
        let mut back = vec![0u8; MIB];
        ok!(cuda.cuMemcpyDtoH_v2(back.as_mut_ptr().cast(), pointer, MIB));
        assert_eq!(back, bytes);
        launch(&cuda, function(&cuda, "busy_100us"), null_mut());
        ok!(cuda.cuCtxSynchronize());
        say("well");
        wait_to_be_told();
    }
}

/// Says what is used of the card, until it is next to nothing.
fn watch() {
    let (cuda, _) = start();
    let mut used = held_by_this_process(&cuda);
    say(&format!("used {used}"));
    wait_to_be_told();
    while used > 500 * MIB {
        used = held_by_this_process(&cuda);
        say(&format!("used {used}"));
    }
}

fn parent() {
    let (cuda, _) = start();
    launch(&cuda, function(&cuda, "busy_50000us"), null_mut());
    let (mut ends, mut byte) = ([0; 2], [0u8]);
    // SAFETY: room for both ends.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    // SAFETY: the child only says that it is there and waits for its input to end.
    if unsafe { libc::fork() } == 0 {
        // SAFETY: a byte of ours.
        unsafe { libc::write(ends[1], byte.as_ptr().cast(), 1) };
        // SAFETY: a byte of ours.
        while unsafe { libc::read(0, byte.as_mut_ptr().cast(), 1) } > 0 {}
        // SAFETY: ends the child without anything of the parent's.
        unsafe { libc::_exit(0) };
    }
    // It has come so far that it has nothing of its parent's.
    // SAFETY: a byte of ours.
    assert_eq!(unsafe { libc::read(ends[0], byte.as_mut_ptr().cast(), 1) }, 1);
    say("forked");
    wait_to_be_told();
}

/// Everything at once on both GPUs, until killed.
fn restless(seed: u64) {
    let cuda = Cuda::started();
    say("restless");
    std::thread::scope(|scope| {
        for device in 0..2 {
            let cuda = &cuda;
            scope.spawn(move || restless_on(cuda, device, seed + 100 * device as u64));
        }
    });
}

fn restless_on(cuda: &Cuda, device: i32, seed: u64) {
    let mut context = null_mut();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, device));
    let busy = function(cuda, "busy_50us");
    let own = stream(cuda, 1);
    let (mut random, mut held) = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, Vec::new());
    loop {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        match random % 8 {
            6 => {
                let mut pointer = 0;
                ok!(cuda.cuMemAllocAsync(&mut pointer, (random >> 40) as usize % MIB + 1, own));
                ok!(cuda.cuMemFreeAsync(pointer, own));
            }
            7 => {
                let mark = event(cuda);
                ok!(cuda.cuEventRecord(mark, own));
                ok!(cuda.cuEventDestroy_v2(mark));
            }
            0 | 1 => {
                let mut pointer = 0;
                ok!(cuda.cuMemAlloc_v2(&mut pointer, (random >> 40) as usize % (64 * MIB) + 1));
                held.push(pointer);
            }
            2 if !held.is_empty() => ok!(cuda.cuMemFree_v2(held.swap_remove(random as usize % held.len()))),
            3 => launch(cuda, busy, own),
            4 if held.len() > 40 => held.drain(..).for_each(|pointer| ok!(cuda.cuMemFree_v2(pointer))),
            5 => ok!(cuda.cuStreamSynchronize(own)),
            _ => {}
        }
    }
}
