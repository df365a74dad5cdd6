//! Problems that users reported about similar libraries, one test each.
//!
//! Limits that are lost in a login shell or a child's environment, functions that are looked up in loops or only once,
//! and null pointers are tested in `routes` and `failures`.
#![allow(unsafe_code, unreachable_pub, missing_docs)]
// Many calls of C functions: their safety is explained once, in `ok!`.
#![allow(clippy::unwrap_used, clippy::multiple_unsafe_ops_per_block, clippy::macro_metavars_in_unsafe)]

#[path = "support/container.rs"]
mod container;
#[path = "../../sim-driver/tests/support/driver.rs"]
mod driver;
#[path = "../../sim-driver/tests/support/node.rs"]
mod node;

use container::{MIB, Observer, TestContainer, shares, true_usage};
use driver::cuda::*;
use driver::nvml::{NVML_SUCCESS, NvmlLibrary, nvmlDevice_t, nvmlMemory_t, nvmlMemory_v2, nvmlMemory_v2_t};
use node::{RoleProcess, TestNode, print_line, role, wait_for_resume};
use partage_driver_api::exports::DriverVersion;
use partage_region::{GpuShare, RegionPolicy, RegionTenant, SLOT_COUNT};
use std::process::Command;
use std::ptr::null_mut;

/// Fails with the call and its error code.
macro_rules! ok {
    ($call:expr) => {{
        // SAFETY: every pointer in these calls is null or to a variable that lives through them.
        let code = unsafe { $call };
        assert_eq!(code, 0, "{}", stringify!($call));
    }};
}

/// The program that every test here runs in the container.
#[test]
fn client() {
    let Some(role) = role() else { return };
    let words: Vec<&str> = role.iter().map(String::as_str).collect();
    match words[..] {
        ["shrunk"] => shrunk(),
        ["storm", seed] => storm(seed.parse().unwrap()),
        ["continue_allocating"] => continue_allocating(),
        ["profile"] => profile(),
        ["create"] => create(),
        ["async"] => freed_as_plain(),
        ["order", first, second] => order(first.parse().unwrap(), second.parse().unwrap()),
        ["hold", mib] => hold(mib.parse().unwrap()),
        ["full"] => full(),
        ref other => panic!("{other:?}"),
    }
}

const GPU_MODEL: &str = "A100-SXM4-40GB";
const CONTEXT_BYTES: u64 = 414 * MIB;
const MIB_SIZE: usize = MIB as usize;

fn node() -> TestNode {
    TestNode::new(GPU_MODEL, 1, DriverVersion::R550)
}

fn start() -> (CudaLibrary, CUcontext) {
    let cuda = CudaLibrary::started();
    let mut context = null_mut();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    (cuda, context)
}

fn started() -> NvmlLibrary {
    let nvml = NvmlLibrary::open();
    ok!(nvml.nvmlInit_v2());
    nvml
}

fn device(nvml: &NvmlLibrary, index: u32) -> nvmlDevice_t {
    let mut device = null_mut();
    ok!(nvml.nvmlDeviceGetHandleByIndex_v2(index, &mut device));
    device
}

/// Returns free and total memory, from CUDA.
fn info(cuda: &CudaLibrary) -> (u64, u64) {
    let (mut free, mut total) = (0, 0);
    ok!(cuda.cuMemGetInfo_v2(&mut free, &mut total));
    (free as u64, total as u64)
}

/// Returns total, free and used memory from both versions of NVML's function, which must agree.
fn nvml_info(nvml: &NvmlLibrary, index: u32) -> (u64, u64, u64) {
    let (device, mut plain) = (device(nvml, index), nvmlMemory_t::default());
    let mut newer = nvmlMemory_v2_t { version: nvmlMemory_v2, ..nvmlMemory_v2_t::default() };
    ok!(nvml.nvmlDeviceGetMemoryInfo(device, &mut plain));
    ok!(nvml.nvmlDeviceGetMemoryInfo_v2(device, &mut newer));
    assert_eq!((plain.total, plain.free), (newer.total, newer.free));
    assert_eq!(newer.used + newer.free + newer.reserved, newer.total);
    assert_eq!(plain.used + plain.free, plain.total);
    (plain.total, plain.free, plain.used)
}

/// "nvidia-smi shows 17 TB used": free memory below zero after a limit was lowered below what is used.
#[test]
fn free_memory_is_zero_after_the_limit_is_lowered() {
    let node = node();
    let container = TestContainer::with_memory(&node, CONTEXT_BYTES + 64 * MIB);
    let mut process = container.start("shrunk");
    process.wait_for_line("holds");
    let share = container.owner.share(0).unwrap();
    container.owner.set(0, &GpuShare { memory: CONTEXT_BYTES + 10 * MIB, ..share.clone() }).unwrap();
    process.resume();
    process.wait_for_line("shrunk");
    container.owner.set(0, &GpuShare { memory: 0, ..share.clone() }).unwrap();
    process.resume();
    process.wait_for_line("nothing");
    container.owner.set(0, &share).unwrap();
    process.resume();
    process.wait_for_line("grown");
    process.end();
}

fn shrunk() {
    let ((cuda, _), nvml) = (start(), started());
    let (mut pointer, mut more) = (0, 0);
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 60 * MIB_SIZE));
    print_line("holds");
    wait_for_resume();
    let limit = CONTEXT_BYTES + 10 * MIB;
    assert_eq!(info(&cuda), (0, limit));
    assert_eq!(nvml_info(&nvml, 0), (limit, 0, limit));
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { cuda.cuMemAlloc_v2(&mut more, MIB_SIZE) }, CUDA_ERROR_OUT_OF_MEMORY);
    print_line("shrunk");
    wait_for_resume();
    assert_eq!(info(&cuda), (0, 0));
    assert_eq!(nvml_info(&nvml, 0), (0, 0, 0));
    // Held memory can be freed, and then there is room again.
    ok!(cuda.cuMemFree_v2(pointer));
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { cuda.cuMemAlloc_v2(&mut pointer, MIB_SIZE) }, CUDA_ERROR_OUT_OF_MEMORY);
    print_line("nothing");
    wait_for_resume();
    assert_eq!(info(&cuda), (64 * MIB, CONTEXT_BYTES + 64 * MIB));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 64 * MIB_SIZE));
    Observer::new().assert_exact("at the end");
    print_line("grown");
    wait_for_resume();
}

/// "Hangs after a process was killed": whatever it was doing, other processes continue.
#[test]
fn killed_process_does_not_block_others() {
    let node = node();
    let container = TestContainer::with_memory(&node, 4 * CONTEXT_BYTES + 256 * MIB);
    let mut steady = container.start("continue_allocating");
    steady.wait_for_line("on");
    let begin = |seed: u32| {
        let mut storm = container.start(&format!("storm {seed}"));
        storm.wait_for_line("storm");
        storm
    };
    let mut storms: Vec<RoleProcess> = (0..2).map(begin).collect();
    for round in 0..30 {
        // An arbitrary time.
        std::thread::sleep(std::time::Duration::from_micros(u64::from(round) * 777 % 5000));
        storms[round as usize % 2].kill();
        // At least one cycle of the other process begins and ends after it.
        steady.resume();
        steady.wait_for_line("on");
        storms[round as usize % 2] = begin(round);
    }
    storms.iter_mut().for_each(RoleProcess::kill);
    steady.resume();
    steady.wait_for_line("on");
    assert_eq!(container.used(0), true_usage(&node.state(), 0));
    steady.end();
    assert_eq!(container.used(0), 0);
}

/// Allocates and frees, large and small, and creates and destroys contexts, until it is killed.
fn storm(seed: u64) {
    let (cuda, _) = start();
    print_line("storm");
    let (mut random, mut held) = (seed * 2 + 1, Vec::new());
    loop {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (mut pointer, mut context) = (0, null_mut());
        match random >> 61 {
            0 => {
                // SAFETY: the pointer is to a local variable. The call may be refused.
                if unsafe { cuda.cuCtxCreate_v2(&mut context, 0, 0) } == CUDA_SUCCESS {
                    ok!(cuda.cuCtxDestroy_v2(context));
                }
            }
            1..=4 => {
                // SAFETY: the pointer is to a local variable. The call may be refused.
                let code = unsafe {
                    cuda.cuMemAlloc_v2(&mut pointer, (random >> 30) as usize % (20 * MIB_SIZE) + 1)
                };
                if code == CUDA_SUCCESS {
                    held.push(pointer)
                } else {
                    held.drain(..).for_each(|held| ok!(cuda.cuMemFree_v2(held)))
                }
            }
            _ => held.drain(..).for_each(|held| ok!(cuda.cuMemFree_v2(held))),
        }
    }
}

fn continue_allocating() {
    let (cuda, _) = start();
    loop {
        for size in [1, MIB_SIZE, 3 * MIB_SIZE] {
            let mut pointer = 0;
            // SAFETY: the pointer is to a local variable. Other processes may hold all memory.
            if unsafe { cuda.cuMemAlloc_v2(&mut pointer, size) } == CUDA_SUCCESS {
                ok!(cuda.cuMemFree_v2(pointer));
            }
            assert!(info(&cuda).0 <= info(&cuda).1);
        }
        print_line("on");
        if !wait_for_resume() {
            return;
        }
    }
}

/// vLLM measures free memory, runs a model, frees everything and asserts that free memory is what it was.
#[test]
fn free_memory_is_restored_after_a_profile_run() {
    let node = node();
    let container = TestContainer::with_memory(&node, 3 * CONTEXT_BYTES + 2048 * MIB);
    let mut holder = container.start("hold 100");
    holder.wait_for_line("holds");
    container.run_role("profile");
    // Processes of the same container affect each other's free memory; those of other containers do not.
    let elsewhere = TestContainer::with_memory(&node, 3 * CONTEXT_BYTES + 2048 * MIB);
    let mut other = elsewhere.start("hold 700");
    other.wait_for_line("holds");
    container.run_role("profile");
    other.kill();
    container.run_role("profile");
    holder.end();
}

fn profile() {
    let ((cuda, context), nvml) = (start(), started());
    let initial = info(&cuda);
    assert_eq!(initial.0, 2048 * MIB - 100 * MIB + CONTEXT_BYTES, "apart from both contexts");
    for _ in 0..3 {
        let (mut held, mut pointer) = (Vec::new(), 0);
        for size in [1, 512, 2 * MIB_SIZE, 20 * MIB_SIZE, 700 * MIB_SIZE, 5_000_000] {
            ok!(cuda.cuMemAlloc_v2(&mut pointer, size));
            held.push(pointer);
        }
        let during = info(&cuda);
        assert!(during.0 < initial.0 && during.1 == initial.1);
        assert_eq!(nvml_info(&nvml, 0).1, during.0, "both libraries report the same");
        let mut stream = null_mut();
        ok!(cuda.cuStreamCreate(&mut stream, 0));
        ok!(cuda.cuMemAllocAsync(&mut pointer, 64 * MIB_SIZE, stream));
        ok!(cuda.cuMemFreeAsync(pointer, stream));
        ok!(cuda.cuStreamSynchronize(stream));
        let mut pool = null_mut();
        ok!(cuda.cuDeviceGetDefaultMemPool(&mut pool, 0));
        ok!(cuda.cuMemPoolTrimTo(pool, 0));
        ok!(cuda.cuStreamDestroy_v2(stream));
        held.into_iter().for_each(|pointer| ok!(cuda.cuMemFree_v2(pointer)));
        assert_eq!(info(&cuda), initial, "initial free == current free");
        assert_eq!(nvml_info(&nvml, 0).1, initial.0);
    }
    ok!(cuda.cuCtxDestroy_v2(context));
}

/// llama.cpp passed a location whose device it had not set: "Illegal device id".
#[test]
fn location_without_a_device_gets_the_drivers_answer() {
    let node = TestNode::new(GPU_MODEL, 2, DriverVersion::R550);
    let answers =
        |output: String| output.lines().filter(|line| line.starts_with("= ")).collect::<Vec<_>>().join("\n");
    let alone = answers(node.run_role("create"));
    let container = TestContainer::with_memory(&node, 4 << 30);
    assert_eq!(answers(container.run_role("create")), alone);
    assert!(alone.lines().count() > 50 && alone.contains(": 0") && alone.contains(": 1"), "{alone}");
    assert_eq!((container.used(0), container.used(1)), (0, 0));
}

fn create() {
    let (cuda, _) = start();
    let mut output = String::new();
    for kind in [0, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_LOCATION_TYPE_HOST, 3, 77, -1i32 as u32] {
        for id in [0, 1, 2, 17, -1, i32::MAX, i32::MIN, 0x5555_5555] {
            let properties = CUmemAllocationProp {
                type_: CU_MEM_ALLOCATION_TYPE_PINNED,
                location: CUmemLocation { type_: kind as _, id },
                ..CUmemAllocationProp::default()
            };
            let (mut handle, mut granularity) = (0, 0);
            // SAFETY: the pointers are to local variables.
            let code = unsafe { cuda.cuMemCreate(&mut handle, 2 * MIB_SIZE, &properties, 0) };
            if code == CUDA_SUCCESS {
                ok!(cuda.cuMemRelease(handle));
            }
            // SAFETY: the pointers are to local variables.
            let asked = unsafe { cuda.cuMemGetAllocationGranularity(&mut granularity, &properties, 0) };
            output += &format!("\n= {kind} {id}: {code}\n= {kind} {id} granularity: {asked}");
        }
    }
    print_line(&output);
}

/// Pool memory that is freed with the synchronous call.
#[test]
fn stream_ordered_memory_can_be_freed_synchronously() {
    let node = node();
    TestContainer::with_memory(&node, CONTEXT_BYTES + 64 * MIB).run_role("async");
}

fn freed_as_plain() {
    let (cuda, _) = start();
    let (observer, mut pool) = (Observer::new(), null_mut());
    ok!(cuda.cuDeviceGetDefaultMemPool(&mut pool, 0));
    for _ in 0..20 {
        let mut pointer = 0;
        ok!(cuda.cuMemAllocAsync(&mut pointer, 40 * MIB_SIZE, null_mut()));
        assert!(observer.used(0) >= CONTEXT_BYTES + 40 * MIB);
        ok!(cuda.cuMemFree_v2(pointer));
        // SAFETY: the pointer is freed already, which the driver reports.
        assert_ne!(unsafe { cuda.cuMemFree_v2(pointer) }, CUDA_SUCCESS);
        ok!(cuda.cuCtxSynchronize());
        ok!(cuda.cuMemPoolTrimTo(pool, 0));
        observer.assert_exact("trimmed");
        assert_eq!(observer.used(0), CONTEXT_BYTES);
    }
    // The other way round.
    let mut pointer = 0;
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 40 * MIB_SIZE));
    ok!(cuda.cuMemFreeAsync(pointer, null_mut()));
    ok!(cuda.cuCtxSynchronize());
    observer.assert_exact("freed in a stream");
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 64 * MIB_SIZE));
}

/// Limits of one GPU were applied to another when a program reordered its devices.
#[test]
fn limit_follows_the_gpu_when_devices_are_reordered() {
    let node = TestNode::new(GPU_MODEL, 2, DriverVersion::R550);
    let mut all = shares(&node, 0);
    (all[0].memory, all[1].memory) = (CONTEXT_BYTES + 20 * MIB, CONTEXT_BYTES + 50 * MIB);
    let uuids: Vec<_> = node.0.config().gpus.iter().map(|gpu| gpu.uuid.to_string()).collect();
    // The order of the region differs from that of the driver, too.
    for region in [all.clone(), all.iter().rev().cloned().collect()] {
        let container = TestContainer::new(&node, &region, RegionPolicy::default());
        for (visible, order) in [
            (None, "0 1"),
            (Some("0,1".to_string()), "0 1"),
            (Some("1,0".to_string()), "1 0"),
            (Some(format!("{},{}", uuids[1], uuids[0])), "1 0"),
            (Some("1".to_string()), "1 9"),
            (Some("0".to_string()), "0 9"),
        ] {
            let mut command = container.command(&format!("order {order}"));
            if let Some(visible) = &visible {
                command.env("CUDA_VISIBLE_DEVICES", visible);
            }
            let run = command.output().unwrap();
            assert!(run.status.success(), "{visible:?}: {}", String::from_utf8_lossy(&run.stdout));
        }
    }
}

fn order(first: u32, second: u32) {
    let (cuda, nvml) = (CudaLibrary::started(), started());
    let limits = [20, 50];
    for (device, gpu) in (0..).zip([first, second]).filter(|(_, gpu)| *gpu < 2) {
        let limit = limits[gpu as usize];
        let (mut context, mut pointer, mut total) = (null_mut(), 0, 0);
        ok!(cuda.cuDeviceTotalMem_v2(&mut total, device));
        assert_eq!(total as u64, CONTEXT_BYTES + limit * MIB);
        ok!(cuda.cuCtxCreate_v2(&mut context, 0, device));
        assert_eq!(info(&cuda), (limit * MIB, CONTEXT_BYTES + limit * MIB));
        // SAFETY: the pointer is to a local variable.
        let code = unsafe { cuda.cuMemAlloc_v2(&mut pointer, (limit * MIB) as usize + 1) };
        assert_eq!(code, CUDA_ERROR_OUT_OF_MEMORY);
        ok!(cuda.cuMemAlloc_v2(&mut pointer, (limit * MIB) as usize));
        // NVML's indexes are those of the machine, whatever CUDA's are.
        assert_eq!(nvml_info(&nvml, gpu), (CONTEXT_BYTES + limit * MIB, 0, CONTEXT_BYTES + limit * MIB));
        assert_eq!(nvml_info(&nvml, 1 - gpu).1 == 0, device == 1);
    }
}

fn hold(mib: usize) {
    let (cuda, _) = start();
    let mut pointer = 0;
    ok!(cuda.cuMemAlloc_v2(&mut pointer, mib * MIB_SIZE));
    print_line("holds");
    wait_for_resume();
    // Other processes with the same pid may have died.
    Observer::new();
    ok!(cuda.cuMemFree_v2(pointer));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, mib * MIB_SIZE));
    print_line("still");
    wait_for_resume();
}

/// A process whose pid was used before, or is used in another namespace, is a different process.
#[test]
fn reused_pid_is_a_different_process() {
    if !Command::new("unshare").args(["-p", "-f", "true"]).output().is_ok_and(|run| run.status.success()) {
        eprintln!("skipped: pid namespaces are not available");
        return;
    }
    let node = node();
    let container = TestContainer::with_memory(&node, 3 * CONTEXT_BYTES + 300 * MIB);
    // Each of them has pid 1, in a namespace of its own.
    let begin = |mib: u32| {
        let inner = container.command(&format!("hold {mib}"));
        let mut command = Command::new("unshare");
        command.args(["-p", "-f", "--kill-child"]).arg(inner.get_program()).args(inner.get_args());
        command.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let mut process = RoleProcess::spawn(command);
        process.wait_for_line("holds");
        process
    };
    let mut steady = begin(50);
    for _ in 0..5 {
        let mut other = begin(100);
        let numbers: Vec<_> =
            container.reader().snapshot().unwrap().processes.iter().map(|one| one.pid).collect();
        assert_eq!(numbers, [1, 1]);
        assert_eq!(container.used(0), 2 * CONTEXT_BYTES + 150 * MIB);
        other.kill();
        // The live process keeps what it has.
        eventually(|| container.used(0) == CONTEXT_BYTES + 50 * MIB);
    }
    steady.resume();
    steady.wait_for_line("still");
    assert_eq!(container.used(0), CONTEXT_BYTES + 50 * MIB);
    steady.end();
}

/// Waits for something that the kernel does asynchronously.
#[track_caller]
fn eventually(condition: impl Fn() -> bool) {
    let began = std::time::Instant::now();
    while !condition() {
        assert!(began.elapsed().as_secs() < 60, "timed out");
        std::thread::yield_now();
    }
}

/// If all slots are taken, one more process is refused rather than left without limits; when a process ends, it is let
/// in.
#[test]
fn full_slot_table_refuses_and_recovers() {
    let node = node();
    let container = TestContainer::with_memory(&node, CONTEXT_BYTES + 64 * MIB);
    let limit = libc::rlimit { rlim_cur: 4096, rlim_max: 4096 };
    // SAFETY: the pointer is to a local structure; the limit is that of this test's process.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
    let mut all: Vec<RegionTenant> =
        (0..SLOT_COUNT).map(|_| RegionTenant::attach(&container.region()).unwrap()).collect();
    assert!(RegionTenant::attach(&container.region()).is_err());
    let mut late = container.start("full");
    late.wait_for_line("refused");
    all.remove(500);
    late.resume();
    late.wait_for_line("held");
    drop(all);
    late.end();
    assert_eq!(container.used(0), 0);
}

fn full() {
    let cuda = CudaLibrary::started();
    let (mut context, mut pointer) = (null_mut(), 0);
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { cuda.cuCtxCreate_v2(&mut context, 0, 0) }, CUDA_ERROR_NOT_PERMITTED);
    let nvml = started();
    let mut memory = nvmlMemory_t::default();
    // SAFETY: the pointer is to a local variable.
    assert_ne!(unsafe { nvml.nvmlDeviceGetMemoryInfo(device(&nvml, 0), &mut memory) }, NVML_SUCCESS);
    print_line("refused");
    wait_for_resume();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { cuda.cuMemAlloc_v2(&mut pointer, 65 * MIB_SIZE) }, CUDA_ERROR_OUT_OF_MEMORY);
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 64 * MIB_SIZE));
    print_line("held");
    wait_for_resume();
}
