//! What users complained of in other libraries of this kind, one test each.
//!
//! Limits that are lost in a login shell or a child's environment, functions looked up in loops or found once only, and
//! null pointers are tried in `routes` and `failures`.
#![allow(unsafe_code, unreachable_pub, missing_docs)]
// Calls of C functions, over and over: what is promised of them is said once, in `ok!`.
#![allow(clippy::unwrap_used, clippy::multiple_unsafe_ops_per_block, clippy::macro_metavars_in_unsafe)]

#[path = "support/container.rs"]
mod container;
#[path = "../../sim-driver/tests/support/driver.rs"]
mod driver;
#[path = "../../sim-driver/tests/support/node.rs"]
mod node;

use container::{Container, MIB, Observer, shares, truth};
use driver::cuda::*;
use driver::nvml::{NVML_SUCCESS, Nvml, nvmlDevice_t, nvmlMemory_t, nvmlMemory_v2, nvmlMemory_v2_t};
use node::{Node, Player, role, say, wait_to_be_told};
use partage_driver_api::exports::DriverVersion;
use partage_region::{GpuShare, RegionPolicy, RegionTenant, SLOT_COUNT};
use std::process::Command;
use std::ptr::null_mut;

/// Fails with the number of the code.
macro_rules! ok {
    ($call:expr) => {{
        // SAFETY: every pointer in these calls is null or to a variable that lives through them.
        let code = unsafe { $call };
        assert_eq!(code, 0, "{}", stringify!($call));
    }};
}

/// The program in the container, of every test here.
#[test]
fn client() {
    let Some(role) = role() else { return };
    let words: Vec<&str> = role.iter().map(String::as_str).collect();
    match words[..] {
        ["shrunk"] => shrunk(),
        ["storm", seed] => storm(seed.parse().unwrap()),
        ["goes_on"] => goes_on(),
        ["profile"] => profile(),
        ["create"] => create(),
        ["async"] => freed_as_plain(),
        ["order", first, second] => order(first.parse().unwrap(), second.parse().unwrap()),
        ["hold", mib] => hold(mib.parse().unwrap()),
        ["full"] => full(),
        ref other => panic!("{other:?}"),
    }
}

const CARD: &str = "A100-SXM4-40GB";
const CONTEXT: u64 = 414 * MIB;
const SIZE: usize = MIB as usize;

fn node() -> Node {
    Node::new(CARD, 1, DriverVersion::R550)
}

fn start() -> (Cuda, CUcontext) {
    let cuda = Cuda::started();
    let mut context = null_mut();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    (cuda, context)
}

fn started() -> Nvml {
    let nvml = Nvml::open();
    ok!(nvml.nvmlInit_v2());
    nvml
}

fn device(nvml: &Nvml, index: u32) -> nvmlDevice_t {
    let mut device = null_mut();
    ok!(nvml.nvmlDeviceGetHandleByIndex_v2(index, &mut device));
    device
}

/// Free and total, as CUDA tells them.
fn info(cuda: &Cuda) -> (u64, u64) {
    let (mut free, mut total) = (0, 0);
    ok!(cuda.cuMemGetInfo_v2(&mut free, &mut total));
    (free as u64, total as u64)
}

/// Total, free and used of both forms of NVML's answer, which must agree.
fn nvml_info(nvml: &Nvml, index: u32) -> (u64, u64, u64) {
    let (device, mut plain) = (device(nvml, index), nvmlMemory_t::default());
    let mut newer = nvmlMemory_v2_t { version: nvmlMemory_v2, ..nvmlMemory_v2_t::default() };
    ok!(nvml.nvmlDeviceGetMemoryInfo(device, &mut plain));
    ok!(nvml.nvmlDeviceGetMemoryInfo_v2(device, &mut newer));
    assert_eq!((plain.total, plain.free), (newer.total, newer.free));
    assert_eq!(newer.used + newer.free + newer.reserved, newer.total);
    assert_eq!(plain.used + plain.free, plain.total);
    (plain.total, plain.free, plain.used)
}

/// "nvidia-smi shows 17 TB used": free memory below zero, where a limit was lowered under what is used.
#[test]
fn nothing_is_ever_less_than_nothing() {
    let node = node();
    let container = Container::with_memory(&node, CONTEXT + 64 * MIB);
    let mut player = container.start("shrunk");
    player.hear("holds");
    let share = container.owner.share(0).unwrap();
    container.owner.set(0, &GpuShare { memory: CONTEXT + 10 * MIB, ..share.clone() }).unwrap();
    player.tell();
    player.hear("shrunk");
    container.owner.set(0, &GpuShare { memory: 0, ..share.clone() }).unwrap();
    player.tell();
    player.hear("nothing");
    container.owner.set(0, &share).unwrap();
    player.tell();
    player.hear("grown");
    player.end();
}

fn shrunk() {
    let ((cuda, _), nvml) = (start(), started());
    let (mut pointer, mut more) = (0, 0);
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 60 * SIZE));
    say("holds");
    wait_to_be_told();
    let limit = CONTEXT + 10 * MIB;
    assert_eq!(info(&cuda), (0, limit));
    assert_eq!(nvml_info(&nvml, 0), (limit, 0, limit));
    // SAFETY: variables of ours.
    assert_eq!(unsafe { cuda.cuMemAlloc_v2(&mut more, SIZE) }, CUDA_ERROR_OUT_OF_MEMORY);
    say("shrunk");
    wait_to_be_told();
    assert_eq!(info(&cuda), (0, 0));
    assert_eq!(nvml_info(&nvml, 0), (0, 0, 0));
    // What one has can be given back, and then there is room again.
    ok!(cuda.cuMemFree_v2(pointer));
    // SAFETY: variables of ours.
    assert_eq!(unsafe { cuda.cuMemAlloc_v2(&mut pointer, SIZE) }, CUDA_ERROR_OUT_OF_MEMORY);
    say("nothing");
    wait_to_be_told();
    assert_eq!(info(&cuda), (64 * MIB, CONTEXT + 64 * MIB));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 64 * SIZE));
    Observer::new().exact("at the end");
    say("grown");
    wait_to_be_told();
}

/// "Hangs after a process was killed": whatever it was doing, the others go on.
#[test]
fn a_kill_stops_nobody_else() {
    let node = node();
    let container = Container::with_memory(&node, 4 * CONTEXT + 256 * MIB);
    let mut steady = container.start("goes_on");
    steady.hear("on");
    let begin = |seed: u32| {
        let mut storm = container.start(&format!("storm {seed}"));
        storm.hear("storm");
        storm
    };
    let mut storms: Vec<Player> = (0..2).map(begin).collect();
    for round in 0..30 {
        // Some instant of the storm.
        std::thread::sleep(std::time::Duration::from_micros(u64::from(round) * 777 % 5000));
        storms[round as usize % 2].kill();
        // No less than a cycle of the other begins and ends after it.
        steady.tell();
        steady.hear("on");
        storms[round as usize % 2] = begin(round);
    }
    storms.iter_mut().for_each(Player::kill);
    steady.tell();
    steady.hear("on");
    assert_eq!(container.used(0), truth(&node.state(), 0));
    steady.end();
    assert_eq!(container.used(0), 0);
}

/// Takes and gives back, large and small, and makes and ends contexts, until it is killed.
fn storm(seed: u64) {
    let (cuda, _) = start();
    say("storm");
    let (mut random, mut held) = (seed * 2 + 1, Vec::new());
    loop {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (mut pointer, mut context) = (0, null_mut());
        match random >> 61 {
            0 => {
                // SAFETY: variables of ours. It may be refused.
                if unsafe { cuda.cuCtxCreate_v2(&mut context, 0, 0) } == CUDA_SUCCESS {
                    ok!(cuda.cuCtxDestroy_v2(context));
                }
            }
            1..=4 => {
                // SAFETY: likewise.
                let code =
                    unsafe { cuda.cuMemAlloc_v2(&mut pointer, (random >> 30) as usize % (20 * SIZE) + 1) };
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

fn goes_on() {
    let (cuda, _) = start();
    loop {
        for size in [1, SIZE, 3 * SIZE] {
            let mut pointer = 0;
            // SAFETY: variables of ours. Others may have it all.
            if unsafe { cuda.cuMemAlloc_v2(&mut pointer, size) } == CUDA_SUCCESS {
                ok!(cuda.cuMemFree_v2(pointer));
            }
            assert!(info(&cuda).0 <= info(&cuda).1);
        }
        say("on");
        if !wait_to_be_told() {
            return;
        }
    }
}

/// vLLM measures free memory, runs a model, gives everything back and asserts that free memory is what it was.
#[test]
fn what_was_free_is_free_again() {
    let node = node();
    let container = Container::with_memory(&node, 3 * CONTEXT + 2048 * MIB);
    let mut holder = container.start("hold 100");
    holder.hear("holds");
    container.play("profile");
    // Others of the container come and go, which is what it is to share: but nobody else's does.
    let elsewhere = Container::with_memory(&node, 3 * CONTEXT + 2048 * MIB);
    let mut stranger = elsewhere.start("hold 700");
    stranger.hear("holds");
    container.play("profile");
    stranger.kill();
    container.play("profile");
    holder.end();
}

fn profile() {
    let ((cuda, context), nvml) = (start(), started());
    let initial = info(&cuda);
    assert_eq!(initial.0, 2048 * MIB - 100 * MIB + CONTEXT, "besides its own and the other's context");
    for _ in 0..3 {
        let (mut held, mut pointer) = (Vec::new(), 0);
        for size in [1, 512, 2 * SIZE, 20 * SIZE, 700 * SIZE, 5_000_000] {
            ok!(cuda.cuMemAlloc_v2(&mut pointer, size));
            held.push(pointer);
        }
        let during = info(&cuda);
        assert!(during.0 < initial.0 && during.1 == initial.1);
        assert_eq!(nvml_info(&nvml, 0).1, during.0, "one story");
        let mut stream = null_mut();
        ok!(cuda.cuStreamCreate(&mut stream, 0));
        ok!(cuda.cuMemAllocAsync(&mut pointer, 64 * SIZE, stream));
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
fn a_location_without_a_device_is_the_drivers_to_judge() {
    let node = Node::new(CARD, 2, DriverVersion::R550);
    let answers =
        |said: String| said.lines().filter(|line| line.starts_with("= ")).collect::<Vec<_>>().join("\n");
    let alone = answers(node.play("create"));
    let container = Container::with_memory(&node, 4 << 30);
    assert_eq!(answers(container.play("create")), alone);
    assert!(alone.lines().count() > 50 && alone.contains(": 0") && alone.contains(": 1"), "{alone}");
    assert_eq!((container.used(0), container.used(1)), (0, 0));
}

fn create() {
    let (cuda, _) = start();
    let mut said = String::new();
    for kind in [0, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_LOCATION_TYPE_HOST, 3, 77, -1i32 as u32] {
        for id in [0, 1, 2, 17, -1, i32::MAX, i32::MIN, 0x5555_5555] {
            let properties = CUmemAllocationProp {
                type_: CU_MEM_ALLOCATION_TYPE_PINNED,
                location: CUmemLocation { type_: kind as _, id },
                ..CUmemAllocationProp::default()
            };
            let (mut handle, mut granularity) = (0, 0);
            // SAFETY: variables of ours.
            let code = unsafe { cuda.cuMemCreate(&mut handle, 2 * SIZE, &properties, 0) };
            if code == CUDA_SUCCESS {
                ok!(cuda.cuMemRelease(handle));
            }
            // SAFETY: likewise.
            let asked = unsafe { cuda.cuMemGetAllocationGranularity(&mut granularity, &properties, 0) };
            said += &format!("\n= {kind} {id}: {code}\n= {kind} {id} granularity: {asked}");
        }
    }
    say(&said);
}

/// Memory of a pool that is freed with the plain call.
#[test]
fn what_was_allocated_in_a_stream_may_be_freed_without_one() {
    let node = node();
    Container::with_memory(&node, CONTEXT + 64 * MIB).play("async");
}

fn freed_as_plain() {
    let (cuda, _) = start();
    let (observer, mut pool) = (Observer::new(), null_mut());
    ok!(cuda.cuDeviceGetDefaultMemPool(&mut pool, 0));
    for _ in 0..20 {
        let mut pointer = 0;
        ok!(cuda.cuMemAllocAsync(&mut pointer, 40 * SIZE, null_mut()));
        assert!(observer.used(0) >= CONTEXT + 40 * MIB);
        ok!(cuda.cuMemFree_v2(pointer));
        // SAFETY: it is freed already, which the driver says.
        assert_ne!(unsafe { cuda.cuMemFree_v2(pointer) }, CUDA_SUCCESS);
        ok!(cuda.cuCtxSynchronize());
        ok!(cuda.cuMemPoolTrimTo(pool, 0));
        observer.exact("trimmed");
        assert_eq!(observer.used(0), CONTEXT);
    }
    // And the other way round.
    let mut pointer = 0;
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 40 * SIZE));
    ok!(cuda.cuMemFreeAsync(pointer, null_mut()));
    ok!(cuda.cuCtxSynchronize());
    observer.exact("freed in a stream");
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 64 * SIZE));
}

/// Limits of one GPU were taken for another's where a program reordered its devices.
#[test]
fn a_limit_belongs_to_a_gpu_not_to_a_number() {
    let node = Node::new(CARD, 2, DriverVersion::R550);
    let mut all = shares(&node, 0);
    (all[0].memory, all[1].memory) = (CONTEXT + 20 * MIB, CONTEXT + 50 * MIB);
    let uuids: Vec<_> = node.0.config().gpus.iter().map(|gpu| gpu.uuid.to_string()).collect();
    // The region's order is not the card's, either.
    for region in [all.clone(), all.iter().rev().cloned().collect()] {
        let container = Container::new(&node, &region, RegionPolicy::default());
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
    let (cuda, nvml) = (Cuda::started(), started());
    let limits = [20, 50];
    for (device, gpu) in (0..).zip([first, second]).filter(|(_, gpu)| *gpu < 2) {
        let limit = limits[gpu as usize];
        let (mut context, mut pointer, mut total) = (null_mut(), 0, 0);
        ok!(cuda.cuDeviceTotalMem_v2(&mut total, device));
        assert_eq!(total as u64, CONTEXT + limit * MIB);
        ok!(cuda.cuCtxCreate_v2(&mut context, 0, device));
        assert_eq!(info(&cuda), (limit * MIB, CONTEXT + limit * MIB));
        // SAFETY: variables of ours.
        let code = unsafe { cuda.cuMemAlloc_v2(&mut pointer, (limit * MIB) as usize + 1) };
        assert_eq!(code, CUDA_ERROR_OUT_OF_MEMORY);
        ok!(cuda.cuMemAlloc_v2(&mut pointer, (limit * MIB) as usize));
        // NVML's numbers are the machine's, whatever CUDA's are.
        assert_eq!(nvml_info(&nvml, gpu), (CONTEXT + limit * MIB, 0, CONTEXT + limit * MIB));
        assert_eq!(nvml_info(&nvml, 1 - gpu).1 == 0, device == 1);
    }
}

fn hold(mib: usize) {
    let (cuda, _) = start();
    let mut pointer = 0;
    ok!(cuda.cuMemAlloc_v2(&mut pointer, mib * SIZE));
    say("holds");
    wait_to_be_told();
    // Others of its number may have died.
    Observer::new();
    ok!(cuda.cuMemFree_v2(pointer));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, mib * SIZE));
    say("still");
    wait_to_be_told();
}

/// A process whose number another one had before, or has in another namespace, is another process.
#[test]
fn a_number_that_is_used_again_is_another_process() {
    if !Command::new("unshare").args(["-p", "-f", "true"]).output().is_ok_and(|run| run.status.success()) {
        eprintln!("skipped: no namespace of processes to be had");
        return;
    }
    let node = node();
    let container = Container::with_memory(&node, 3 * CONTEXT + 300 * MIB);
    // All of them are number one, each in its own namespace.
    let begin = |mib: u32| {
        let inner = container.command(&format!("hold {mib}"));
        let mut command = Command::new("unshare");
        command.args(["-p", "-f", "--kill-child"]).arg(inner.get_program()).args(inner.get_args());
        command.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let mut player = Player::of(command);
        player.hear("holds");
        player
    };
    let mut steady = begin(50);
    for _ in 0..5 {
        let mut other = begin(100);
        let numbers: Vec<_> =
            container.reader().snapshot().unwrap().processes.iter().map(|one| one.pid).collect();
        assert_eq!(numbers, [1, 1]);
        assert_eq!(container.used(0), 2 * CONTEXT + 150 * MIB);
        other.kill();
        // The one that lives keeps what it has.
        eventually(|| container.used(0) == CONTEXT + 50 * MIB);
    }
    steady.tell();
    steady.hear("still");
    assert_eq!(container.used(0), CONTEXT + 50 * MIB);
    steady.end();
}

/// Something that the kernel does in its own time.
#[track_caller]
fn eventually(is_so: impl Fn() -> bool) {
    let began = std::time::Instant::now();
    while !is_so() {
        assert!(began.elapsed().as_secs() < 60, "it never came");
        std::thread::yield_now();
    }
}

/// Where all slots are taken, one more process is refused, not let go free; when one ends, it is let in.
#[test]
fn a_full_table_refuses_and_recovers() {
    let node = node();
    let container = Container::with_memory(&node, CONTEXT + 64 * MIB);
    let limit = libc::rlimit { rlim_cur: 4096, rlim_max: 4096 };
    // SAFETY: a struct of ours; more files for this test's process.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
    let mut all: Vec<RegionTenant> =
        (0..SLOT_COUNT).map(|_| RegionTenant::attach(&container.region()).unwrap()).collect();
    assert!(RegionTenant::attach(&container.region()).is_err());
    let mut late = container.start("full");
    late.hear("refused");
    all.remove(500);
    late.tell();
    late.hear("held");
    drop(all);
    late.end();
    assert_eq!(container.used(0), 0);
}

fn full() {
    let cuda = Cuda::started();
    let (mut context, mut pointer) = (null_mut(), 0);
    // SAFETY: variables of ours.
    assert_eq!(unsafe { cuda.cuCtxCreate_v2(&mut context, 0, 0) }, CUDA_ERROR_NOT_PERMITTED);
    let nvml = started();
    let mut memory = nvmlMemory_t::default();
    // SAFETY: likewise.
    assert_ne!(unsafe { nvml.nvmlDeviceGetMemoryInfo(device(&nvml, 0), &mut memory) }, NVML_SUCCESS);
    say("refused");
    wait_to_be_told();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    // SAFETY: likewise.
    assert_eq!(unsafe { cuda.cuMemAlloc_v2(&mut pointer, 65 * SIZE) }, CUDA_ERROR_OUT_OF_MEMORY);
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 64 * SIZE));
    say("held");
    wait_to_be_told();
}
