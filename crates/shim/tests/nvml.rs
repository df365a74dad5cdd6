//! What NVML shows to a container: its own memory, processes and utilisation, by every function that tells of them, and no
//! switch of a card.
#![allow(unsafe_code, unreachable_pub, missing_docs)]
// Calls of C functions, over and over: what is promised of them is said once, in `ok!`.
#![allow(clippy::unwrap_used, clippy::multiple_unsafe_ops_per_block, clippy::macro_metavars_in_unsafe)]

#[path = "support/container.rs"]
mod container;
#[path = "../../sim-driver/tests/support/driver.rs"]
mod driver;
#[path = "../../sim-driver/tests/support/node.rs"]
mod node;

use container::{Container, MIB, shares};
use driver::cuda::Cuda;
use driver::nvml::*;
use node::{Node, Player, role, say, wait_to_be_told};
use partage_driver_api::exports::DriverVersion;
use partage_region::RegionPolicy;
use std::ffi::{CString, c_void};
use std::process::Command;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// Fails with the number of the code.
macro_rules! ok {
    ($call:expr) => {{
        // SAFETY: every pointer in these calls is null or to a variable that lives through them.
        let code = unsafe { $call };
        assert_eq!(code, 0, "{}", stringify!($call));
    }};
}

/// Expects a failure.
macro_rules! fails {
    ($code:expr, $call:expr) => {{
        // SAFETY: as in `ok`.
        let code = unsafe { $call };
        assert_eq!(code, $code, "{}", stringify!($call));
    }};
}

/// What a context takes of the card.
const CONTEXT: u64 = 414 * MIB;
const LIMIT: u64 = 4096 * MIB;

/// The program in the container, of every test here.
#[test]
fn client() {
    let Some(role) = role() else { return };
    let words: Vec<&str> = role.iter().map(String::as_str).collect();
    let (name, rest) = words.split_first().unwrap();
    let number = |index: usize| -> u64 { rest[index].parse().unwrap() };
    match *name {
        "use" => use_gpu(number(0), number(1), number(2) != 0),
        "see" => see(number(0) as u32, number(1), number(2)),
        "nobody" => see_nobody(),
        "names" => names(number(0) as u32, number(1) as u32),
        "utilisation" => utilisation(number(0) as u32, number(1) as u32),
        "consistent" => consistent(),
        "stranger" => stranger(),
        "controls" => controls(),
        "family" => family(),
        "refused" => refused(),
        "uninitialised" => uninitialised(),
        other => panic!("{other}"),
    }
}

fn both_drivers() -> impl Iterator<Item = Node> {
    DriverVersion::ALL.into_iter().map(|driver| Node::new("A100-SXM4-40GB", 2, driver))
}

/// A program that holds memory of a GPU and, if it is to, keeps it busy.
fn work(container: &Container<'_>, gpu: u32, mib: u64, busy: bool) -> (Player, u32) {
    let mut player = container.start(&format!("use {gpu} {mib} {}", u32::from(busy)));
    player.hear("ready");
    let pid = player.child.id();
    (player, pid)
}

fn use_gpu(gpu: u64, mib: u64, busy: bool) {
    let cuda = Cuda::started();
    let (mut context, mut pointer) = (null_mut(), 0);
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, gpu as i32));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, (mib * MIB) as usize));
    say("ready");
    if !busy {
        wait_to_be_told();
        return;
    }
    let (mut module, mut function) = (null_mut(), null_mut());
    let name = CString::new("busy_10000us").unwrap();
    ok!(cuda.cuModuleLoadData(&mut module, c"any image".as_ptr().cast()));
    ok!(cuda.cuModuleGetFunction(&mut function, module, name.as_ptr()));
    // Until the test ends it. A queue is never empty: the driver lets so many wait and no more.
    loop {
        ok!(cuda.cuLaunchKernel(function, 1 << 20, 1, 1, 256, 1, 1, 0, null_mut(), null_mut(), null_mut()));
    }
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

/// Asks for a list twice: for its length, then for itself.
fn list<T: Copy + Default>(ask: impl Fn(*mut u32, *mut T) -> nvmlReturn_t) -> Vec<T> {
    let mut count = 0;
    let code = ask(&mut count, null_mut());
    if code == NVML_SUCCESS {
        assert_eq!(count, 0);
        return Vec::new();
    }
    assert_eq!(code, NVML_ERROR_INSUFFICIENT_SIZE);
    let mut list = vec![T::default(); count as usize + 3];
    count += 3;
    assert_eq!(ask(&mut count, list.as_mut_ptr()), NVML_SUCCESS);
    list.truncate(count as usize);
    // One place too few is too few.
    if let Some(fewer) = count.checked_sub(1) {
        let mut room = fewer;
        assert_eq!(ask(&mut room, list.as_mut_ptr()), NVML_ERROR_INSUFFICIENT_SIZE);
        assert_eq!(room, count);
    }
    list
}

/// Processes by all three forms of a list.
macro_rules! lists {
    ($nvml:ident, $device:ident, $first:ident, $second:ident, $third:ident) => {{
        // SAFETY: room as it is said.
        let first = list(|count, to| unsafe { $nvml.$first($device, count, to) });
        // SAFETY: likewise.
        let second = list(|count, to| unsafe { $nvml.$second($device, count, to) });
        // SAFETY: likewise.
        let third = list(|count, to| unsafe { $nvml.$third($device, count, to) });
        let pairs: Vec<(u32, u64)> = first.iter().map(|one| (one.pid, one.usedGpuMemory)).collect();
        for newer in [second, third] {
            let shown: Vec<_> = newer.iter().map(|one| (one.pid, one.usedGpuMemory)).collect();
            assert_eq!(shown, pairs);
            assert!(
                newer.iter().all(|one| (one.gpuInstanceId, one.computeInstanceId) == (u32::MAX, u32::MAX))
            );
        }
        pairs
    }};
}

fn compute(nvml: &Nvml, device: nvmlDevice_t) -> Vec<(u32, u64)> {
    lists!(
        nvml,
        device,
        nvmlDeviceGetComputeRunningProcesses,
        nvmlDeviceGetComputeRunningProcesses_v2,
        nvmlDeviceGetComputeRunningProcesses_v3
    )
}

fn detailed(nvml: &Nvml, device: nvmlDevice_t, mode: u32) -> Vec<(u32, u64)> {
    let details: Vec<nvmlProcessDetail_v1_t> = list(|count, to| {
        let mut asked = nvmlProcessDetailList_t {
            version: nvmlProcessDetailList_v1,
            mode,
            // SAFETY: a number of `list`.
            numProcArrayEntries: unsafe { *count },
            procArray: to,
        };
        // SAFETY: a structure of ours, with the room that it says.
        let code = unsafe { nvml.nvmlDeviceGetRunningProcessDetailList(device, &mut asked) };
        // SAFETY: a number of `list`.
        unsafe { *count = asked.numProcArrayEntries };
        code
    });
    details.iter().map(|one| (one.pid, one.usedGpuMemory)).collect()
}

/// A process as the table without documentation has it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Listed {
    pid: u32,
    padding: u32,
    used: u64,
    instances: [u32; 2],
    protected: u64,
    name: [u8; 4096],
}

/// What one process did with one engine, in the same table.
#[repr(C)]
#[derive(Clone, Copy)]
struct Engine {
    busy: u64,
    pid: u32,
    unread: [u8; 68],
}

type Place = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> nvmlReturn_t;

const TABLE: [u8; 16] =
    [0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4];

/// The table's places.
fn table(nvml: &Nvml) -> &'static [usize] {
    let mut table: *const c_void = null_mut();
    ok!(nvml.nvmlInternalGetExportTable(&mut table, TABLE.as_ptr()));
    let first = table.cast::<usize>();
    // SAFETY: a table begins with its size in bytes and lasts.
    unsafe { std::slice::from_raw_parts(first, *first / 8) }
}

fn place(table: &[usize], index: usize) -> Place {
    // SAFETY: a function of the table.
    unsafe { std::mem::transmute::<usize, Place>(table[index]) }
}

/// A list of the table: pids, bytes and names.
fn listed(nvml: &Nvml, index: usize, device: nvmlDevice_t) -> Vec<(u32, u64, String)> {
    let empty = Listed { pid: 0, padding: 0, used: 0, instances: [0; 2], protected: 0, name: [0; 4096] };
    let (mut count, mut list) = (500u32, vec![empty; 500]);
    let count_at = &raw mut count;
    ok!(place(table(nvml), index)(device as usize, count_at as usize, list.as_mut_ptr() as usize, 0, 0, 0));
    list.truncate(count as usize);
    let name = |listed: &Listed| {
        let text: Vec<u8> = listed.name.iter().copied().take_while(|&byte| byte != 0).collect();
        String::from_utf8(text).unwrap()
    };
    list.iter().map(|one| (one.pid, one.used, name(one))).collect()
}

/// Who did what with the multiprocessors, by the table: pids with their largest share.
fn moments(nvml: &Nvml, device: nvmlDevice_t) -> Vec<(u32, u64)> {
    let table = table(nvml);
    let engines = if table.len() == 245 { 4 } else { 6 };
    let moment = 8 + engines * size_of::<Engine>();
    let (mut kind, mut count, mut bytes) = (0u32, 4000u32, vec![0u8; 4000 * moment]);
    let (kind_at, count_at) = (&raw mut kind, &raw mut count);
    let to = bytes.as_mut_ptr();
    ok!(place(table, 145)(device as usize, 0, kind_at as usize, count_at as usize, to as usize, 0));
    let mut pids: Vec<(u32, u64)> = Vec::new();
    for index in 0..count as usize {
        let first = bytes[index * moment + 8..].as_ptr().cast::<Engine>();
        // SAFETY: inside the bytes.
        let engine = unsafe { first.read_unaligned() };
        match pids.iter_mut().find(|(pid, _)| *pid == engine.pid) {
            Some((_, busy)) => *busy = engine.busy.max(*busy),
            None => pids.push((engine.pid, engine.busy)),
        }
    }
    pids.retain(|&(pid, busy)| pid != 0 || busy != 0);
    pids
}

fn memory(nvml: &Nvml, device: nvmlDevice_t) -> nvmlMemory_v2_t {
    let mut plain = nvmlMemory_t::default();
    let mut memory = nvmlMemory_v2_t { version: nvmlMemory_v2, ..Default::default() };
    ok!(nvml.nvmlDeviceGetMemoryInfo(device, &mut plain));
    ok!(nvml.nvmlDeviceGetMemoryInfo_v2(device, &mut memory));
    assert_eq!((plain.total, plain.free), (memory.total, memory.free));
    assert_eq!(plain.used, memory.used + memory.reserved);
    assert_eq!(memory.total, memory.used + memory.free + memory.reserved);
    memory
}

/// One process of this container is on GPU 0, and nothing else is to be seen.
fn see(pid: u32, bytes: u64, total: u64) {
    let nvml = started();
    let device = device(&nvml, 0);
    let memory = memory(&nvml, device);
    assert_eq!((memory.total, memory.used, memory.reserved), (total, bytes, 0));
    assert_eq!(compute(&nvml, device), [(pid, bytes)]);
    assert_eq!(detailed(&nvml, device, 0), [(pid, bytes)]);
    let [(listed_pid, used, name)] = &listed(&nvml, 213, device)[..] else { panic!("not one process") };
    assert_eq!((*listed_pid, *used), (pid, bytes));
    assert!(name.contains("nvml-"), "{name}");
    nobody_else(&nvml, device);
    // Wrong versions are the driver's to refuse.
    let mut wrong = nvmlMemory_v2_t { version: 1, ..Default::default() };
    fails!(NVML_ERROR_ARGUMENT_VERSION_MISMATCH, nvml.nvmlDeviceGetMemoryInfo_v2(device, &mut wrong));
    fails!(NVML_ERROR_INVALID_ARGUMENT, nvml.nvmlDeviceGetMemoryInfo(device, null_mut()));
    fails!(
        NVML_ERROR_INVALID_ARGUMENT,
        nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, null_mut(), null_mut())
    );
    fails!(NVML_ERROR_INVALID_ARGUMENT, nvml.nvmlDeviceGetMemoryInfo(null_mut(), &mut Default::default()));
}

/// Lists of graphics and MPS are empty.
fn nobody_else(nvml: &Nvml, device: nvmlDevice_t) {
    let graphics = lists!(
        nvml,
        device,
        nvmlDeviceGetGraphicsRunningProcesses,
        nvmlDeviceGetGraphicsRunningProcesses_v2,
        nvmlDeviceGetGraphicsRunningProcesses_v3
    );
    let mps = lists!(
        nvml,
        device,
        nvmlDeviceGetMPSComputeRunningProcesses,
        nvmlDeviceGetMPSComputeRunningProcesses_v2,
        nvmlDeviceGetMPSComputeRunningProcesses_v3
    );
    assert_eq!((graphics, mps), (vec![], vec![]));
    for mode in [1, 2] {
        assert_eq!(detailed(nvml, device, mode), []);
    }
    for index in [214, 215] {
        assert_eq!(listed(nvml, index, device), []);
    }
}

/// This container has no process on GPU 0; it is not one by asking.
fn see_nobody() {
    let nvml = started();
    let device = device(&nvml, 0);
    let memory = memory(&nvml, device);
    assert_eq!((memory.total, memory.used, memory.free), (LIMIT, 0, LIMIT));
    assert_eq!(compute(&nvml, device), []);
    assert_eq!(listed(&nvml, 213, device), []);
    nobody_else(&nvml, device);
}

#[test]
fn containers_see_their_own_processes_and_memory() {
    for node in both_drivers() {
        let (one, other) = (Container::with_memory(&node, LIMIT), Container::with_memory(&node, 2 * LIMIT));
        one.play("nobody");
        let (_first, pid) = work(&one, 0, 1000, false);
        one.play(&format!("see {pid} {} {LIMIT}", CONTEXT + 1000 * MIB));
        let (mut second, neighbour) = work(&other, 0, 3000, false);
        one.play(&format!("see {pid} {} {LIMIT}", CONTEXT + 1000 * MIB));
        other.play(&format!("see {neighbour} {} {}", CONTEXT + 3000 * MIB, 2 * LIMIT));
        // The dead hold nothing.
        second.kill();
        assert_eq!(other.used(0), 0);
        let third = Container::with_memory(&node, LIMIT);
        third.play("nobody");
    }
}

/// How NVML says a process is called, in a buffer of this length.
fn name_of(nvml: &Nvml, pid: u32, length: usize) -> Result<String, nvmlReturn_t> {
    let mut name = vec![1; length];
    // SAFETY: a buffer of this length.
    let code = unsafe { nvml.nvmlSystemGetProcessName(pid, name.as_mut_ptr(), length as u32) };
    if code != NVML_SUCCESS {
        assert!(name.iter().all(|&letter| letter == 1), "nothing is written where nothing is told");
        return Err(code);
    }
    let text: Vec<u8> = name.iter().map(|&letter| letter as u8).take_while(|&letter| letter != 0).collect();
    assert!(text.len() < length, "it ends inside its buffer");
    Ok(String::from_utf8(text).unwrap())
}

/// `own` is of this container, `other` is not.
fn names(own: u32, other: u32) {
    let nvml = started();
    let program = std::env::current_exe().unwrap().to_str().unwrap().to_owned();
    for pid in [own, std::process::id()] {
        assert_eq!(name_of(&nvml, pid, 4096).as_ref(), Ok(&program));
        assert_eq!(name_of(&nvml, pid, program.len() + 1).as_ref(), Ok(&program));
        assert_eq!(name_of(&nvml, pid, 5).as_deref(), Ok(&program[..4]));
        assert_eq!(name_of(&nvml, pid, 1).as_deref(), Ok(""));
        assert_eq!(name_of(&nvml, pid, 0), Err(NVML_ERROR_INVALID_ARGUMENT));
        fails!(NVML_ERROR_INVALID_ARGUMENT, nvml.nvmlSystemGetProcessName(pid, null_mut(), 64));
    }
    // Who else there is, on the GPU or not.
    for pid in [other, 1, std::os::unix::process::parent_id(), 0, u32::MAX] {
        assert_eq!(name_of(&nvml, pid, 64), Err(NVML_ERROR_NOT_FOUND), "{pid}");
    }
    for index in [0, 1] {
        let mut window = nvmlBAR1Memory_t::default();
        ok!(nvml.nvmlDeviceGetBAR1MemoryInfo(device(&nvml, index), &mut window));
        assert!(window.bar1Total > 0);
        assert_eq!((window.bar1Free, window.bar1Used), (window.bar1Total, 0));
    }
    fails!(NVML_ERROR_INVALID_ARGUMENT, nvml.nvmlDeviceGetBAR1MemoryInfo(device(&nvml, 0), null_mut()));
}

#[test]
fn others_are_neither_named_nor_seen_in_the_window() {
    for node in both_drivers() {
        let (one, other) = (Container::with_memory(&node, LIMIT), Container::with_memory(&node, LIMIT));
        let (_first, own) = work(&one, 0, 100, false);
        let (_second, neighbour) = work(&other, 0, 100, false);
        one.play(&format!("names {own} {neighbour}"));
        other.play(&format!("names {neighbour} {own}"));
    }
}

/// In a pid namespace of its own: what it starts is listed by the pid that it has there.
fn family() {
    assert_eq!(std::process::id(), 1);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["client", "--exact", "--nocapture", "--test-threads=1"]).env(node::ROLE, "use 0 700 0");
    let mut child = Player::of(command);
    child.hear("ready");
    let (nvml, pid, bytes) = (started(), child.child.id(), CONTEXT + 700 * MIB);
    let device = device(&nvml, 0);
    assert!(pid < 100, "{pid}");
    assert_eq!(compute(&nvml, device), [(pid, bytes)]);
    let [(listed_pid, used, name)] = &listed(&nvml, 213, device)[..] else { panic!("not one process") };
    assert_eq!((*listed_pid, *used), (pid, bytes));
    assert!(name.contains("nvml-"), "{name}");
    for own in [1, pid] {
        assert!(name_of(&nvml, own, 4096).is_ok_and(|name| name.contains("nvml-")));
    }
}

#[test]
fn pids_are_those_that_the_caller_knows() {
    let unshared = || {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
        command
    };
    if !unshared().arg("true").output().is_ok_and(|run| run.status.success()) {
        eprintln!("skipped: no namespaces can be made here");
        return;
    }
    for node in both_drivers() {
        let (one, other) = (Container::with_memory(&node, LIMIT), Container::with_memory(&node, LIMIT));
        let (_neighbour, _) = work(&other, 0, 500, false);
        let plain = one.command("family");
        let mut command = unshared();
        command.arg(plain.get_program()).args(plain.get_args());
        one.env(&mut command);
        let run = command.env(node::ROLE, "family").output().unwrap();
        assert!(run.status.success(), "{run:?}");
    }
}

/// Until the container's own utilisation of GPU 0 is `percent`, by everything that tells it; `pid` is whose it is.
fn utilisation(pid: u32, percent: u32) {
    let nvml = started();
    let device = device(&nvml, 0);
    let late = Instant::now() + Duration::from_secs(30);
    loop {
        let mut rates = nvmlUtilization_t::default();
        ok!(nvml.nvmlDeviceGetUtilizationRates(device, &mut rates));
        if rates.gpu == percent {
            break;
        }
        assert!(Instant::now() < late, "{} %", rates.gpu);
        std::thread::sleep(Duration::from_millis(50));
    }
    let wall = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let since = (wall - Duration::from_millis(400)).as_micros() as u64;
    // By process, in both forms.
    let mut count = 0;
    fails!(
        NVML_ERROR_INSUFFICIENT_SIZE,
        nvml.nvmlDeviceGetProcessUtilization(device, null_mut(), &mut count, since)
    );
    let mut samples = vec![nvmlProcessUtilizationSample_t::default(); count as usize];
    // SAFETY: room as it is said.
    let code =
        unsafe { nvml.nvmlDeviceGetProcessUtilization(device, samples.as_mut_ptr(), &mut count, since) };
    let shown: Vec<_> = samples.iter().take(count as usize).map(|one| (one.pid, one.smUtil)).collect();
    if percent == 0 {
        assert_eq!(code, NVML_ERROR_NOT_FOUND, "{shown:?}");
    } else {
        assert_eq!((code, shown), (NVML_SUCCESS, vec![(pid, percent)]));
    }
    let mut infos = [nvmlProcessUtilizationInfo_v1_t::default(); 20];
    let mut asked = nvmlProcessesUtilizationInfo_t {
        version: nvmlProcessesUtilizationInfo_v1,
        processSamplesCount: 20,
        lastSeenTimeStamp: since,
        procUtilArray: infos.as_mut_ptr(),
    };
    // SAFETY: room as it is said.
    match unsafe { nvml.nvmlDeviceGetProcessesUtilizationInfo(device, &mut asked) } {
        // 535 does not have it.
        NVML_ERROR_FUNCTION_NOT_FOUND => {}
        NVML_ERROR_NOT_FOUND => assert_eq!(percent, 0),
        code => {
            assert_eq!((code, asked.processSamplesCount), (NVML_SUCCESS, 1));
            assert_eq!((infos[0].pid, infos[0].smUtil), (pid, percent));
        }
    }
    // The card's samples.
    let (mut kind, mut samples, mut count) = (0, [nvmlSample_t::default(); 100], 100);
    ok!(nvml.nvmlDeviceGetSamples(
        device,
        NVML_GPU_UTILIZATION_SAMPLES,
        since,
        &mut kind,
        &mut count,
        samples.as_mut_ptr()
    ));
    assert_eq!(kind, NVML_VALUE_TYPE_UNSIGNED_INT);
    for sample in samples.iter().take(count as usize) {
        // SAFETY: the kind says so.
        assert_eq!(unsafe { sample.sampleValue.uiVal }, percent);
    }
    // What `pmon` asks.
    let all = moments(&nvml, device);
    if percent == 0 {
        assert_eq!(all, []);
    } else {
        assert!(all.iter().all(|&(of, busy)| of == pid && busy > 0) && !all.is_empty(), "{all:?}");
    }
    for index in [NVML_GPU_UTILIZATION_DOMAIN_GPU, NVML_GPU_UTILIZATION_DOMAIN_BUS] {
        let mut info = nvmlGpuDynamicPstatesInfo_t::default();
        // SAFETY: a structure of ours. Cards may not have it.
        if unsafe { nvml.nvmlDeviceGetDynamicPstatesInfo(device, &mut info) } == NVML_SUCCESS {
            let domain = info.utilization[index as usize];
            let of_gpu = index == NVML_GPU_UTILIZATION_DOMAIN_GPU;
            assert_eq!(domain.percentage, if of_gpu { percent } else { 0 });
            assert!(of_gpu || domain.bIsPresent == 0);
        }
    }
    fails!(NVML_ERROR_NOT_SUPPORTED, nvml.nvmlGpmSampleGet(device, null_mut()));
}

#[test]
fn containers_see_their_own_utilisation() {
    for node in both_drivers() {
        let (one, other) = (Container::with_memory(&node, LIMIT), Container::with_memory(&node, LIMIT));
        let (_idle, pid) = work(&one, 0, 1000, false);
        let (mut busy, works) = work(&other, 0, 1000, true);
        other.play(&format!("utilisation {works} 100"));
        one.play(&format!("utilisation {pid} 0"));
        busy.kill();
    }
}

/// A process that computes and looks: both libraries tell the same.
fn consistent() {
    let (cuda, nvml) = (Cuda::started(), started());
    let device = device(&nvml, 0);
    let (mut context, mut pointer, mut free, mut total) = (null_mut(), 0, 0, 0);
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    let mut before = None;
    for mib in [1, 64, 1000, 3] {
        ok!(cuda.cuMemAlloc_v2(&mut pointer, (mib * MIB) as usize));
        ok!(cuda.cuMemGetInfo_v2(&mut free, &mut total));
        let shown = memory(&nvml, device);
        assert_eq!((shown.total, shown.free), (total as u64, free as u64));
        assert_eq!((shown.total, shown.reserved), (LIMIT, 0));
        // One process, though it has loaded two libraries.
        assert_eq!(compute(&nvml, device), [(std::process::id(), shown.used)]);
        ok!(cuda.cuMemFree_v2(pointer));
        let after = memory(&nvml, device);
        assert_eq!(*before.get_or_insert(after.free), after.free, "all is given back");
    }
    ok!(cuda.cuCtxDestroy_v2(context));
    let after = memory(&nvml, device);
    assert_eq!((after.used, after.free), (0, LIMIT));
    assert_eq!(compute(&nvml, device), [], "who holds nothing is not on the list");
}

#[test]
fn nvml_and_cuda_tell_one_story() {
    for node in both_drivers() {
        let (one, other) = (Container::with_memory(&node, LIMIT), Container::with_memory(&node, LIMIT));
        let (_neighbour, _) = work(&other, 0, 3000, false);
        one.play("consistent");
    }
}

/// GPU 1 is not this container's.
fn stranger() {
    let nvml = started();
    let (own, foreign) = (device(&nvml, 0), device(&nvml, 1));
    let (mut name, mut uuid, mut count) = ([0; 96], [0; 96], 0);
    ok!(nvml.nvmlDeviceGetName(foreign, name.as_mut_ptr(), 96));
    ok!(nvml.nvmlDeviceGetUUID(foreign, uuid.as_mut_ptr(), 96));
    ok!(nvml.nvmlDeviceGetCount_v2(&mut count));
    assert_eq!(count, 2);
    assert_eq!(memory(&nvml, own).total, LIMIT);
    denied(&nvml, foreign);
}

/// Nothing is told of who uses a GPU, and how.
fn denied(nvml: &Nvml, device: nvmlDevice_t) {
    let mut count = 0;
    fails!(NVML_ERROR_NO_PERMISSION, nvml.nvmlDeviceGetMemoryInfo(device, &mut Default::default()));
    let mut memory = nvmlMemory_v2_t { version: nvmlMemory_v2, ..Default::default() };
    fails!(NVML_ERROR_NO_PERMISSION, nvml.nvmlDeviceGetMemoryInfo_v2(device, &mut memory));
    let denied = |answer: nvmlReturn_t| assert_eq!(answer, NVML_ERROR_NO_PERMISSION);
    // SAFETY: no room.
    unsafe {
        denied(nvml.nvmlDeviceGetBAR1MemoryInfo(device, &mut Default::default()));
        denied(nvml.nvmlDeviceGetComputeRunningProcesses(device, &mut count, null_mut()));
        denied(nvml.nvmlDeviceGetComputeRunningProcesses_v2(device, &mut count, null_mut()));
        denied(nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, &mut count, null_mut()));
        denied(nvml.nvmlDeviceGetGraphicsRunningProcesses_v3(device, &mut count, null_mut()));
        denied(nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3(device, &mut count, null_mut()));
        denied(nvml.nvmlDeviceGetProcessUtilization(device, null_mut(), &mut count, 0));
        denied(nvml.nvmlDeviceGetUtilizationRates(device, &mut Default::default()));
        denied(nvml.nvmlDeviceGetEncoderUtilization(device, &mut count, &mut 0));
        denied(nvml.nvmlDeviceGetAccountingPids(device, &mut count, null_mut()));
        denied(nvml.nvmlDeviceGetEncoderSessions(device, &mut count, null_mut()));
        let samples = nvml.nvmlDeviceGetSamples(device, 1, 0, &mut 0, &mut count, null_mut());
        denied(samples);
        for index in [145, 213, 214, 215] {
            let count_at = &raw mut count as usize;
            denied(place(table(nvml), index)(device as usize, count_at, 0, count_at, 0, 0));
        }
    }
}

#[test]
fn a_gpu_that_was_not_granted_tells_nothing() {
    for node in both_drivers() {
        let all = Container::with_memory(&node, LIMIT);
        let (_neighbour, _) = work(&all, 1, 500, false);
        let one = Container::new(&node, &shares(&node, LIMIT)[..1], RegionPolicy::default());
        one.play("stranger");
    }
}

/// Every function of NVML.
macro_rules! names {
    ($($(#[$doc:meta])* trait $family:ident { $(fn $name:ident $args:tt $(twin $twin:ident)?;)* })*) => {
        const NAMES: &[&str] = &[$($(stringify!($name)),*),*];
    };
}
partage_driver_api::nvml_functions!(names);

/// Whether a function's name says that it changes something that others would notice.
fn changes(name: &str) -> bool {
    const NOT: [&str; 5] = [
        // The calling thread alone.
        "nvmlDeviceSetCpuAffinity",
        "nvmlDeviceClearCpuAffinity",
        // Things of the caller's own.
        "nvmlEventSetCreate",
        "nvmlEventSetFree",
        "nvmlEventSetWait",
    ];
    const VERBS: [&str; 9] =
        ["Set", "Reset", "Clear", "Freeze", "Create", "Destroy", "Remove", "Modify", "Discover"];
    // "GpuSet", "Settings", "Resetless" and the like ask.
    let asks = name.contains("Get") || name.contains("EventSet") || name.contains("Query");
    !asks && !NOT.contains(&name) && VERBS.iter().any(|verb| name.contains(verb))
}

fn controls() {
    let nvml = started();
    let mut looked = 0;
    for name in NAMES.iter().filter(|name| changes(name)) {
        looked += 1;
        let address = nvml.0.symbol(name).unwrap_or_else(|| panic!("{name} is not stood in for"));
        // SAFETY: a function of NVML; it is refused before it looks at its arguments.
        let function = unsafe { std::mem::transmute::<*mut c_void, Place>(address) };
        assert_eq!(
            // SAFETY: likewise.
            unsafe { function(device(&nvml, 0) as usize, 0, 0, 0, 0, 0) },
            NVML_ERROR_NO_PERMISSION,
            "{name}"
        );
    }
    assert!(looked > 40, "{looked}");
    // The thread's own affair, which the driver decides: this machine may not have the CPUs that the node's GPUs are near.
    // SAFETY: no pointers of ours.
    assert_ne!(unsafe { nvml.nvmlDeviceSetCpuAffinity(device(&nvml, 0)) }, NVML_ERROR_NO_PERMISSION);
    let mut mode = 9;
    ok!(nvml.nvmlDeviceGetComputeMode(device(&nvml, 0), &mut mode));
    assert_eq!(mode, 0);
}

#[test]
fn no_container_turns_a_switch_of_a_card() {
    let node = Node::new("A100-SXM4-40GB", 1, DriverVersion::R550);
    Container::with_memory(&node, LIMIT).play("controls");
}

/// The region is gone.
fn refused() {
    let nvml = started();
    let mut count = 0;
    ok!(nvml.nvmlDeviceGetCount_v2(&mut count));
    assert_eq!(count, 2);
    ok!(nvml.nvmlDeviceGetName(device(&nvml, 0), [0; 96].as_mut_ptr(), 96));
    denied(&nvml, device(&nvml, 0));
    assert_eq!(name_of(&nvml, std::process::id(), 64), Err(NVML_ERROR_NO_PERMISSION));
}

#[test]
fn without_a_region_nothing_is_told() {
    for node in both_drivers() {
        let whole = Container::with_memory(&node, LIMIT);
        let (_neighbour, _) = work(&whole, 0, 500, false);
        let broken = Container::with_memory(&node, LIMIT);
        std::fs::remove_file(broken.region().join("limits")).unwrap();
        broken.play("refused");
    }
}

/// The driver's own failures stay what they are.
fn uninitialised() {
    let nvml = Nvml::open();
    fails!(
        NVML_ERROR_UNINITIALIZED,
        nvml.nvmlDeviceGetMemoryInfo(std::ptr::without_provenance_mut(8), &mut Default::default())
    );
    assert_eq!(name_of(&nvml, std::process::id(), 64), Err(NVML_ERROR_UNINITIALIZED));
    ok!(nvml.nvmlInit_v2());
    let device = device(&nvml, 0);
    say("ready");
    wait_to_be_told();
    let mut count = 0;
    fails!(NVML_ERROR_GPU_IS_LOST, nvml.nvmlDeviceGetMemoryInfo(device, &mut Default::default()));
    fails!(
        NVML_ERROR_GPU_IS_LOST,
        nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, &mut count, null_mut())
    );
    fails!(NVML_ERROR_GPU_IS_LOST, nvml.nvmlDeviceGetBAR1MemoryInfo(device, &mut Default::default()));
    fails!(NVML_ERROR_GPU_IS_LOST, nvml.nvmlDeviceGetUtilizationRates(device, &mut Default::default()));
}

#[test]
fn failures_of_the_driver_stay_its_own() {
    for node in both_drivers() {
        let container = Container::with_memory(&node, LIMIT);
        let mut player = container.start("uninitialised");
        player.hear("ready");
        node.state().inject(0, partage_sim_node::state::Fault::Lost);
        player.tell();
        player.end();
    }
}
