//! Tests of several processes on one node: what each sees of the others, and what remains after they are killed.

use super::*;
use crate::driver::nvml::{self, NvmlLibrary};
use crate::node::{RoleProcess, TestNode, print_line, wait_for_resume};
use partage_driver_api::exports::DriverVersion;
use partage_sim_node::state::UNIT;
use std::process::Command;

const MIB: usize = 1 << 20;

fn node() -> TestNode {
    TestNode::new("A100-SXM4-40GB", 2, DriverVersion::R550)
}

/// Returns the pid and memory in bytes of the processes that NVML lists on the first GPU.
fn listed(node: &TestNode) -> Vec<(u32, u64)> {
    let mut observer = node.start("process list");
    let words = observer.wait_for_line("listed");
    observer.end();
    words
        .split_whitespace()
        .map(|pair| {
            pair.split_once('=').map(|(pid, bytes)| (pid.parse().unwrap(), bytes.parse().unwrap())).unwrap()
        })
        .collect()
}

#[test]
fn process_is_listed_from_context_until_exit() {
    let node = node();
    let mut holder = node.start("process hold 300");
    let held: u64 = holder.wait_for_line("holding").parse().unwrap();
    assert_eq!(listed(&node), [(holder.child.id(), held)]);
    // A context and the allocation, in blocks of 2 MiB.
    assert_eq!(held, 414 * MIB as u64 + 300 * MIB as u64);
    holder.kill();
    assert_eq!(listed(&node), []);
    assert_eq!(node.state().used_memory(0), 0);
}

#[test]
fn killed_processes_release_everything() {
    let node = node();
    let (mut survivors, mut held): (Vec<RoleProcess>, Vec<(u32, u64)>) = Default::default();
    for _ in 0..2 {
        // One after the other, because each reports how much the card's usage grew.
        let mut survivor = node.start("process hold 128");
        held.push((survivor.child.id(), survivor.wait_for_line("holding").parse().unwrap()));
        survivors.push(survivor);
    }
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut churn: Vec<RoleProcess> =
        (0..3).map(|seed| node.start(&format!("process churn {seed}"))).collect();
    for player in &mut churn {
        player.wait_for_line("churn");
    }
    for round in 0..40 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        std::thread::sleep(std::time::Duration::from_micros(random >> 52));
        let victim = (random >> 33) as usize % churn.len();
        churn[victim].kill();
        churn[victim] = node.start(&format!("process churn {}", round + 3));
        churn[victim].wait_for_line("churn");
    }
    for player in &mut churn {
        player.kill();
    }
    let mut left = listed(&node);
    left.sort_unstable();
    let mut expected = held.clone();
    expected.sort_unstable();
    assert_eq!(left, expected);
    let units: u64 = held.iter().map(|(_, bytes)| bytes / UNIT).sum();
    assert_eq!([0, 1].map(|gpu| node.state().used_memory(gpu)), [units, 0]);
    // The survivors are unaffected: their data is intact, and the GPU works.
    for survivor in &mut survivors {
        survivor.resume();
        survivor.wait_for_line("well");
    }
}

/// A forked child that outlives its parent keeps neither the parent's memory nor its work.
#[test]
fn forked_child_does_not_keep_parent_resources() {
    let node = node();
    let mut parent = node.start("process parent");
    parent.wait_for_line("forked");
    assert_eq!(listed(&node).len(), 1);
    parent.kill();
    assert_eq!(listed(&node), []);
    assert_eq!(node.state().used_memory(0), 0);
    // The child uses no GPU; the pipe to the parent keeps it alive until here.
    drop(parent);
}

/// A process that only queries libcuda sees the memory freed.
#[test]
fn memory_of_dead_process_is_freed() {
    let node = node();
    let mut other = node.start("process hold 1000");
    other.wait_for_line("holding");
    let mut observer = node.start("process watch");
    let full: usize = observer.wait_for_line("used").parse().unwrap();
    assert!(full > 1000 * MIB);
    other.kill();
    observer.resume();
    let mut used = full;
    while used > 500 * MIB {
        used = observer.wait_for_line("used").parse().unwrap();
    }
}

/// The work of a killed process is not done, whichever process looks first and however late.
#[test]
fn dead_process_does_not_keep_gpu_busy() {
    let node = node();
    let mut busy = node.start("stream saturate");
    busy.wait_for_line("saturating");
    let state = node.state();
    busy.kill();
    std::thread::sleep(std::time::Duration::from_nanos(3 * state.window()));
    assert_eq!(state.utilization(0).0, 0);
}

#[test]
fn nodes_are_isolated() {
    let (one, two) = (node(), node());
    let mut holder = one.start("process hold 64");
    holder.wait_for_line("holding");
    assert_eq!(listed(&one).len(), 1);
    assert_eq!(listed(&two), []);
}

/// A process in its own pid namespace, as in a container, is listed with its host pid.
#[test]
fn listed_pids_are_host_pids() {
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
    let mut holder = RoleProcess::spawn(outer);
    holder.wait_for_line("holding");
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
        ["churn", seed] => churn(seed.parse().unwrap()),
        other => panic!("{other:?}"),
    }
}

fn list() {
    let library = NvmlLibrary::open();
    let mut device = null_mut();
    let mut count = 64;
    let mut found = [nvml::nvmlProcessInfo_t::default(); 64];
    // SAFETY: the outputs are local variables, and the array is as long as stated.
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
    print_line(&format!("listed {}", all.join(" ")));
}

fn held_by_this_process(cuda: &CudaLibrary) -> usize {
    let (mut free, mut total) = (0, 0);
    ok!(cuda.cuMemGetInfo_v2(&mut free, &mut total));
    total - free
}

fn hold(mib: usize) {
    let cuda = CudaLibrary::started();
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
    print_line(&format!("holding {}", held_by_this_process(&cuda) - before));
    if wait_for_resume() {
        let mut back = vec![0u8; MIB];
        ok!(cuda.cuMemcpyDtoH_v2(back.as_mut_ptr().cast(), pointer, MIB));
        assert_eq!(back, bytes);
        launch(&cuda, function(&cuda, "busy_100us"), null_mut());
        ok!(cuda.cuCtxSynchronize());
        print_line("well");
        wait_for_resume();
    }
}

/// Prints the card's used memory until it is nearly zero.
fn watch() {
    let (cuda, _) = start();
    let mut used = held_by_this_process(&cuda);
    print_line(&format!("used {used}"));
    wait_for_resume();
    while used > 500 * MIB {
        used = held_by_this_process(&cuda);
        print_line(&format!("used {used}"));
    }
}

fn parent() {
    let (cuda, _) = start();
    launch(&cuda, function(&cuda, "busy_50000us"), null_mut());
    let (mut ends, mut byte) = ([0; 2], [0u8]);
    // SAFETY: the array has room for both descriptors.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    // SAFETY: the child only writes a byte and waits for its input to end.
    if unsafe { libc::fork() } == 0 {
        // SAFETY: one byte of a local array.
        unsafe { libc::write(ends[1], byte.as_ptr().cast(), 1) };
        // SAFETY: one byte of a local array.
        while unsafe { libc::read(0, byte.as_mut_ptr().cast(), 1) } > 0 {}
        // SAFETY: exits the child without running exit handlers of the parent.
        unsafe { libc::_exit(0) };
    }
    // The child runs and holds nothing of its parent.
    // SAFETY: one byte of a local array.
    assert_eq!(unsafe { libc::read(ends[0], byte.as_mut_ptr().cast(), 1) }, 1);
    print_line("forked");
    wait_for_resume();
}

/// Allocates, copies, launches and frees on both GPUs until it is killed.
fn churn(seed: u64) {
    let cuda = CudaLibrary::started();
    print_line("churn");
    std::thread::scope(|scope| {
        for device in 0..2 {
            let cuda = &cuda;
            scope.spawn(move || churn_on(cuda, device, seed + 100 * device as u64));
        }
    });
}

fn churn_on(cuda: &CudaLibrary, device: i32, seed: u64) {
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
