//! What NVML shows to a container: its own memory, processes and utilization, by every function that reports them, and
//! no control of a GPU.
#![allow(unsafe_code, unreachable_pub, missing_docs)]
// Many calls of C functions: their safety is explained once, in `ok!`.
#![allow(clippy::unwrap_used, clippy::multiple_unsafe_ops_per_block, clippy::macro_metavars_in_unsafe)]

#[path = "support/container.rs"]
mod container;
#[path = "../../sim-driver/tests/support/driver.rs"]
mod driver;
#[path = "../../sim-driver/tests/support/node.rs"]
mod node;

use container::{MIB, TestContainer, shares};
use driver::cuda::CudaLibrary;
use driver::nvml::*;
use node::{RoleProcess, TestNode, print_line, role, wait_for_resume};
use partage_driver_api::exports::DriverVersion;
use partage_region::RegionPolicy;
use std::ffi::{CString, c_void};
use std::process::Command;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// Fails with the call and its error code.
macro_rules! ok {
    ($call:expr) => {{
        // SAFETY: every pointer in these calls is null or to a variable that lives through them.
        let code = unsafe { $call };
        assert_eq!(code, 0, "{}", stringify!($call));
    }};
}

/// Expects a call to fail with this error.
macro_rules! fails {
    ($code:expr, $call:expr) => {{
        // SAFETY: every pointer in these calls is null or to a variable that lives through them.
        let code = unsafe { $call };
        assert_eq!(code, $code, "{}", stringify!($call));
    }};
}

/// Bytes that a context takes of the simulated GPU.
const CONTEXT_BYTES: u64 = 414 * MIB;
const MEMORY_LIMIT: u64 = 4096 * MIB;
/// Interval in which a process looks for dead ones at most once.
const RECLAIM_INTERVAL: Duration = Duration::from_millis(10);

/// The program that every test here runs in the container.
#[test]
fn client() {
    let Some(role) = role() else { return };
    let words: Vec<&str> = role.iter().map(String::as_str).collect();
    let (name, rest) = words.split_first().unwrap();
    let number = |index: usize| -> u64 { rest[index].parse().unwrap() };
    match *name {
        "use" => use_gpu(number(0), number(1), number(2) != 0),
        "see" => see(number(0) as u32, number(1), number(2)),
        "see_none" => see_no_process(),
        "see_exit" => see_exit(number(0) as u32, number(1)),
        "names" => names(number(0) as u32, number(1) as u32),
        "utilization" => utilization(number(0) as u32, number(1) as u32),
        "consistent" => consistent(),
        "ungranted" => ungranted(),
        "controls" => controls(),
        "family" => family(),
        "refused" => refused(),
        "uninitialized" => uninitialized(),
        other => panic!("{other}"),
    }
}

fn both_drivers() -> impl Iterator<Item = TestNode> {
    DriverVersion::ALL.into_iter().map(|driver| TestNode::new("A100-SXM4-40GB", 2, driver))
}

/// Starts a program that holds memory of a GPU and, if `busy`, keeps it busy.
fn work(container: &TestContainer<'_>, gpu: u32, mib: u64, busy: bool) -> (RoleProcess, u32) {
    let mut process = container.start(&format!("use {gpu} {mib} {}", u32::from(busy)));
    process.wait_for_line("ready");
    let pid = process.child.id();
    (process, pid)
}

fn use_gpu(gpu: u64, mib: u64, busy: bool) {
    let cuda = CudaLibrary::started();
    let (mut context, mut pointer) = (null_mut(), 0);
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, gpu as i32));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, (mib * MIB) as usize));
    print_line("ready");
    if !busy {
        wait_for_resume();
        return;
    }
    let (mut module, mut function) = (null_mut(), null_mut());
    let name = CString::new("busy_10000us").unwrap();
    ok!(cuda.cuModuleLoadData(&mut module, c"any image".as_ptr().cast()));
    ok!(cuda.cuModuleGetFunction(&mut function, module, name.as_ptr()));
    // Until the test ends it. The queue is never empty: the driver blocks when it is full.
    loop {
        ok!(cuda.cuLaunchKernel(function, 1 << 20, 1, 1, 256, 1, 1, 0, null_mut(), null_mut(), null_mut()));
    }
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

/// Queries a list twice: for its length, then for its entries.
fn list<T: Copy + Default>(query: impl Fn(*mut u32, *mut T) -> nvmlReturn_t) -> Vec<T> {
    let mut count = 0;
    let code = query(&mut count, null_mut());
    if code == NVML_SUCCESS {
        assert_eq!(count, 0);
        return Vec::new();
    }
    assert_eq!(code, NVML_ERROR_INSUFFICIENT_SIZE);
    let mut list = vec![T::default(); count as usize + 3];
    count += 3;
    assert_eq!(query(&mut count, list.as_mut_ptr()), NVML_SUCCESS);
    list.truncate(count as usize);
    // Room for one entry too few is not enough.
    if let Some(fewer) = count.checked_sub(1) {
        let mut room = fewer;
        assert_eq!(query(&mut room, list.as_mut_ptr()), NVML_ERROR_INSUFFICIENT_SIZE);
        assert_eq!(room, count);
    }
    list
}

/// Queries processes by all three versions of a list.
macro_rules! lists {
    ($nvml:ident, $device:ident, $first:ident, $second:ident, $third:ident) => {{
        // SAFETY: `list` passes a `to` that is null or holds `*count` entries.
        let first = list(|count, to| unsafe { $nvml.$first($device, count, to) });
        // SAFETY: `list` passes a `to` that is null or holds `*count` entries.
        let second = list(|count, to| unsafe { $nvml.$second($device, count, to) });
        // SAFETY: `list` passes a `to` that is null or holds `*count` entries.
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

fn compute(nvml: &NvmlLibrary, device: nvmlDevice_t) -> Vec<(u32, u64)> {
    lists!(
        nvml,
        device,
        nvmlDeviceGetComputeRunningProcesses,
        nvmlDeviceGetComputeRunningProcesses_v2,
        nvmlDeviceGetComputeRunningProcesses_v3
    )
}

fn detailed(nvml: &NvmlLibrary, device: nvmlDevice_t, mode: u32) -> Vec<(u32, u64)> {
    let details: Vec<nvmlProcessDetail_v1_t> = list(|count, to| {
        let mut asked = nvmlProcessDetailList_t {
            version: nvmlProcessDetailList_v1,
            mode,
            // SAFETY: `count` is a pointer to a variable of `list`.
            numProcArrayEntries: unsafe { *count },
            procArray: to,
        };
        // SAFETY: the pointer is to a local structure, whose array has the stated room.
        let code = unsafe { nvml.nvmlDeviceGetRunningProcessDetailList(device, &mut asked) };
        // SAFETY: `count` is a pointer to a variable of `list`.
        unsafe { *count = asked.numProcArrayEntries };
        code
    });
    details.iter().map(|one| (one.pid, one.usedGpuMemory)).collect()
}

/// A process as the undocumented table reports it.
#[repr(C)]
#[derive(Clone, Copy)]
struct ListedProcess {
    pid: u32,
    padding: u32,
    used: u64,
    instances: [u32; 2],
    protected: u64,
    name: [u8; 4096],
}

/// Activity of one process on one engine, in the same table.
#[repr(C)]
#[derive(Clone, Copy)]
struct EngineSample {
    busy: u64,
    pid: u32,
    unread: [u8; 68],
}

type TableFunction = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> nvmlReturn_t;

const TABLE_ID: [u8; 16] =
    [0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4];

/// Returns the entries of the table.
fn table(nvml: &NvmlLibrary) -> &'static [usize] {
    let mut table: *const c_void = null_mut();
    ok!(nvml.nvmlInternalGetExportTable(&mut table, TABLE_ID.as_ptr()));
    let first = table.cast::<usize>();
    // SAFETY: a table begins with its size in bytes, and lasts as long as the library is loaded.
    unsafe { std::slice::from_raw_parts(first, *first / 8) }
}

fn table_function(table: &[usize], index: usize) -> TableFunction {
    // SAFETY: the entry is a function of the table, which takes up to six arguments.
    unsafe { std::mem::transmute::<usize, TableFunction>(table[index]) }
}

/// Returns a list of the table: pids, bytes and names.
fn listed(nvml: &NvmlLibrary, index: usize, device: nvmlDevice_t) -> Vec<(u32, u64, String)> {
    let empty =
        ListedProcess { pid: 0, padding: 0, used: 0, instances: [0; 2], protected: 0, name: [0; 4096] };
    let (mut count, mut list) = (500u32, vec![empty; 500]);
    let count_at = &raw mut count;
    ok!(table_function(table(nvml), index)(
        device as usize,
        count_at as usize,
        list.as_mut_ptr() as usize,
        0,
        0,
        0
    ));
    list.truncate(count as usize);
    let name = |listed: &ListedProcess| {
        let text: Vec<u8> = listed.name.iter().copied().take_while(|&byte| byte != 0).collect();
        String::from_utf8(text).unwrap()
    };
    list.iter().map(|one| (one.pid, one.used, name(one))).collect()
}

/// Returns the use of the multiprocessors by process, from the table: pids with their largest value.
fn engine_samples(nvml: &NvmlLibrary, device: nvmlDevice_t) -> Vec<(u32, u64)> {
    let table = table(nvml);
    let engines = if table.len() == 245 { 4 } else { 6 };
    let sample_bytes = 8 + engines * size_of::<EngineSample>();
    let (mut kind, mut count, mut bytes) = (0u32, 4000u32, vec![0u8; 4000 * sample_bytes]);
    let (kind_at, count_at) = (&raw mut kind, &raw mut count);
    let to = bytes.as_mut_ptr();
    ok!(table_function(table, 145)(device as usize, 0, kind_at as usize, count_at as usize, to as usize, 0));
    let mut pids: Vec<(u32, u64)> = Vec::new();
    for index in 0..count as usize {
        let first = bytes[index * sample_bytes + 8..].as_ptr().cast::<EngineSample>();
        // SAFETY: the sample is inside `bytes`.
        let engine = unsafe { first.read_unaligned() };
        match pids.iter_mut().find(|(pid, _)| *pid == engine.pid) {
            Some((_, busy)) => *busy = engine.busy.max(*busy),
            None => pids.push((engine.pid, engine.busy)),
        }
    }
    pids.retain(|&(pid, busy)| pid != 0 || busy != 0);
    pids
}

fn memory(nvml: &NvmlLibrary, device: nvmlDevice_t) -> nvmlMemory_v2_t {
    let mut plain = nvmlMemory_t::default();
    let mut memory = nvmlMemory_v2_t { version: nvmlMemory_v2, ..Default::default() };
    ok!(nvml.nvmlDeviceGetMemoryInfo(device, &mut plain));
    ok!(nvml.nvmlDeviceGetMemoryInfo_v2(device, &mut memory));
    assert_eq!((plain.total, plain.free), (memory.total, memory.free));
    assert_eq!(plain.used, memory.used + memory.reserved);
    assert_eq!(memory.total, memory.used + memory.free + memory.reserved);
    memory
}

/// Checks that one process of this container is on GPU 0, and that nothing else is visible.
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
    assert_other_lists_empty(&nvml, device);
    // Wrong versions are rejected by the driver.
    let mut wrong = nvmlMemory_v2_t { version: 1, ..Default::default() };
    fails!(NVML_ERROR_ARGUMENT_VERSION_MISMATCH, nvml.nvmlDeviceGetMemoryInfo_v2(device, &mut wrong));
    fails!(NVML_ERROR_INVALID_ARGUMENT, nvml.nvmlDeviceGetMemoryInfo(device, null_mut()));
    fails!(
        NVML_ERROR_INVALID_ARGUMENT,
        nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, null_mut(), null_mut())
    );
    fails!(NVML_ERROR_INVALID_ARGUMENT, nvml.nvmlDeviceGetMemoryInfo(null_mut(), &mut Default::default()));
}

/// Checks that the lists of graphics and MPS processes are empty.
fn assert_other_lists_empty(nvml: &NvmlLibrary, device: nvmlDevice_t) {
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

/// Checks that this container has no process on GPU 0; the querying process is not listed.
fn see_no_process() {
    let nvml = started();
    let device = device(&nvml, 0);
    let memory = memory(&nvml, device);
    assert_eq!((memory.total, memory.used, memory.free), (MEMORY_LIMIT, 0, MEMORY_LIMIT));
    assert_eq!(compute(&nvml, device), []);
    assert_eq!(listed(&nvml, 213, device), []);
    assert_other_lists_empty(&nvml, device);
}

/// Sees a process of this container, and after it was killed no process.
fn see_exit(pid: u32, bytes: u64) {
    see(pid, bytes, MEMORY_LIMIT);
    print_line("seen");
    wait_for_resume();
    see_no_process();
}

#[test]
fn containers_see_their_own_processes_and_memory() {
    for node in both_drivers() {
        let (one, other) = (
            TestContainer::with_memory(&node, MEMORY_LIMIT),
            TestContainer::with_memory(&node, 2 * MEMORY_LIMIT),
        );
        one.run_role("see_none");
        let (mut first, pid) = work(&one, 0, 1000, false);
        one.run_role(&format!("see {pid} {} {MEMORY_LIMIT}", CONTEXT_BYTES + 1000 * MIB));
        let (mut second, neighbor) = work(&other, 0, 3000, false);
        one.run_role(&format!("see {pid} {} {MEMORY_LIMIT}", CONTEXT_BYTES + 1000 * MIB));
        other.run_role(&format!("see {neighbor} {} {}", CONTEXT_BYTES + 3000 * MIB, 2 * MEMORY_LIMIT));
        // Dead processes hold nothing.
        second.kill();
        assert_eq!(other.used(0), 0);
        let third = TestContainer::with_memory(&node, MEMORY_LIMIT);
        third.run_role("see_none");
        // Nor do they for processes of the same container: for one that has seen them, and for one that starts later.
        let mut observer = one.start(&format!("see_exit {pid} {}", CONTEXT_BYTES + 1000 * MIB));
        observer.wait_for_line("seen");
        first.kill();
        std::thread::sleep(2 * RECLAIM_INTERVAL);
        observer.resume();
        observer.end();
        one.run_role("see_none");
    }
}

/// Returns the name of a process, with a buffer of this length.
fn name_of(nvml: &NvmlLibrary, pid: u32, length: usize) -> Result<String, nvmlReturn_t> {
    let mut name = vec![1; length];
    // SAFETY: the buffer has the length that is passed.
    let code = unsafe { nvml.nvmlSystemGetProcessName(pid, name.as_mut_ptr(), length as u32) };
    if code != NVML_SUCCESS {
        assert!(name.iter().all(|&letter| letter == 1), "nothing is written on an error");
        return Err(code);
    }
    let text: Vec<u8> = name.iter().map(|&letter| letter as u8).take_while(|&letter| letter != 0).collect();
    assert!(text.len() < length, "the name is terminated inside its buffer");
    Ok(String::from_utf8(text).unwrap())
}

/// Checks names: `own` is a process of this container, `other` is not.
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
    // Processes of others, whether they use the GPU or not.
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
fn other_containers_are_not_visible_by_name_or_bar1() {
    for node in both_drivers() {
        let (one, other) = (
            TestContainer::with_memory(&node, MEMORY_LIMIT),
            TestContainer::with_memory(&node, MEMORY_LIMIT),
        );
        let (_first, own) = work(&one, 0, 100, false);
        let (_second, neighbor) = work(&other, 0, 100, false);
        one.run_role(&format!("names {own} {neighbor}"));
        other.run_role(&format!("names {neighbor} {own}"));
    }
}

/// In a pid namespace of its own: a process that it starts is listed by its pid there.
fn family() {
    assert_eq!(std::process::id(), 1);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["client", "--exact", "--nocapture", "--test-threads=1"])
        .env(node::ROLE_VARIABLE, "use 0 700 0");
    let mut child = RoleProcess::spawn(command);
    child.wait_for_line("ready");
    let (nvml, pid, bytes) = (started(), child.child.id(), CONTEXT_BYTES + 700 * MIB);
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
fn listed_pids_are_those_of_the_callers_namespace() {
    let unshared = || {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
        command
    };
    if !unshared().arg("true").output().is_ok_and(|run| run.status.success()) {
        eprintln!("skipped: namespaces are not available");
        return;
    }
    for node in both_drivers() {
        let (one, other) = (
            TestContainer::with_memory(&node, MEMORY_LIMIT),
            TestContainer::with_memory(&node, MEMORY_LIMIT),
        );
        let (_neighbor, _) = work(&other, 0, 500, false);
        let plain = one.command("family");
        let mut command = unshared();
        command.arg(plain.get_program()).args(plain.get_args());
        one.env(&mut command);
        let run = command.env(node::ROLE_VARIABLE, "family").output().unwrap();
        assert!(run.status.success(), "{run:?}");
    }
}

/// Waits until the container's own utilization of GPU 0 is `percent`, and checks every function that reports it; `pid`
/// is the process that causes it.
fn utilization(pid: u32, percent: u32) {
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
    // By process, in both versions.
    let mut count = 0;
    fails!(
        NVML_ERROR_INSUFFICIENT_SIZE,
        nvml.nvmlDeviceGetProcessUtilization(device, null_mut(), &mut count, since)
    );
    let mut samples = vec![nvmlProcessUtilizationSample_t::default(); count as usize];
    // SAFETY: the array has room for the count that is passed.
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
    // SAFETY: the array has room for the count that is passed.
    match unsafe { nvml.nvmlDeviceGetProcessesUtilizationInfo(device, &mut asked) } {
        // Driver 535 does not have it.
        NVML_ERROR_FUNCTION_NOT_FOUND => {}
        NVML_ERROR_NOT_FOUND => assert_eq!(percent, 0),
        code => {
            assert_eq!((code, asked.processSamplesCount), (NVML_SUCCESS, 1));
            assert_eq!((infos[0].pid, infos[0].smUtil), (pid, percent));
        }
    }
    // Samples of the GPU.
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
        // SAFETY: the value type states which field is valid.
        assert_eq!(unsafe { sample.sampleValue.uiVal }, percent);
    }
    // The data that `pmon` queries.
    let all = engine_samples(&nvml, device);
    if percent == 0 {
        assert_eq!(all, []);
    } else {
        assert!(all.iter().all(|&(of, busy)| of == pid && busy > 0) && !all.is_empty(), "{all:?}");
    }
    for index in [NVML_GPU_UTILIZATION_DOMAIN_GPU, NVML_GPU_UTILIZATION_DOMAIN_BUS] {
        let mut info = nvmlGpuDynamicPstatesInfo_t::default();
        // SAFETY: the pointer is to a local structure. GPUs may not support the call.
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
fn containers_see_their_own_utilization() {
    for node in both_drivers() {
        let (one, other) = (
            TestContainer::with_memory(&node, MEMORY_LIMIT),
            TestContainer::with_memory(&node, MEMORY_LIMIT),
        );
        let (_idle, pid) = work(&one, 0, 1000, false);
        let (mut busy, works) = work(&other, 0, 1000, true);
        other.run_role(&format!("utilization {works} 100"));
        one.run_role(&format!("utilization {pid} 0"));
        busy.kill();
    }
}

/// A process that computes and queries: both libraries report the same.
fn consistent() {
    let (cuda, nvml) = (CudaLibrary::started(), started());
    let device = device(&nvml, 0);
    let (mut context, mut pointer, mut free, mut total) = (null_mut(), 0, 0, 0);
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    let mut before = None;
    for mib in [1, 64, 1000, 3] {
        ok!(cuda.cuMemAlloc_v2(&mut pointer, (mib * MIB) as usize));
        ok!(cuda.cuMemGetInfo_v2(&mut free, &mut total));
        let shown = memory(&nvml, device);
        assert_eq!((shown.total, shown.free), (total as u64, free as u64));
        assert_eq!((shown.total, shown.reserved), (MEMORY_LIMIT, 0));
        // One process, although it has loaded two libraries.
        assert_eq!(compute(&nvml, device), [(std::process::id(), shown.used)]);
        ok!(cuda.cuMemFree_v2(pointer));
        let after = memory(&nvml, device);
        assert_eq!(*before.get_or_insert(after.free), after.free, "everything is released");
    }
    ok!(cuda.cuCtxDestroy_v2(context));
    let after = memory(&nvml, device);
    assert_eq!((after.used, after.free), (0, MEMORY_LIMIT));
    assert_eq!(compute(&nvml, device), [], "a process that holds nothing is not listed");
}

#[test]
fn nvml_and_cuda_report_the_same_memory() {
    for node in both_drivers() {
        let (one, other) = (
            TestContainer::with_memory(&node, MEMORY_LIMIT),
            TestContainer::with_memory(&node, MEMORY_LIMIT),
        );
        let (_neighbor, _) = work(&other, 0, 3000, false);
        one.run_role("consistent");
    }
}

/// GPU 1 does not belong to this container.
fn ungranted() {
    let nvml = started();
    let (own, foreign) = (device(&nvml, 0), device(&nvml, 1));
    let (mut name, mut uuid, mut count) = ([0; 96], [0; 96], 0);
    ok!(nvml.nvmlDeviceGetName(foreign, name.as_mut_ptr(), 96));
    ok!(nvml.nvmlDeviceGetUUID(foreign, uuid.as_mut_ptr(), 96));
    ok!(nvml.nvmlDeviceGetCount_v2(&mut count));
    assert_eq!(count, 2);
    assert_eq!(memory(&nvml, own).total, MEMORY_LIMIT);
    denied(&nvml, foreign);
}

/// Checks that nothing is reported about the use of a GPU.
fn denied(nvml: &NvmlLibrary, device: nvmlDevice_t) {
    let mut count = 0;
    fails!(NVML_ERROR_NO_PERMISSION, nvml.nvmlDeviceGetMemoryInfo(device, &mut Default::default()));
    let mut memory = nvmlMemory_v2_t { version: nvmlMemory_v2, ..Default::default() };
    fails!(NVML_ERROR_NO_PERMISSION, nvml.nvmlDeviceGetMemoryInfo_v2(device, &mut memory));
    let denied = |answer: nvmlReturn_t| assert_eq!(answer, NVML_ERROR_NO_PERMISSION);
    // SAFETY: the outputs are local variables; the arrays are null, with a count of zero.
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
            denied(table_function(table(nvml), index)(device as usize, count_at, 0, count_at, 0, 0));
        }
    }
}

#[test]
fn ungranted_gpu_reports_nothing() {
    for node in both_drivers() {
        let all = TestContainer::with_memory(&node, MEMORY_LIMIT);
        let (_neighbor, _) = work(&all, 1, 500, false);
        let one = TestContainer::new(&node, &shares(&node, MEMORY_LIMIT)[..1], RegionPolicy::default());
        one.run_role("ungranted");
    }
}

/// Every function of NVML.
macro_rules! names {
    ($($(#[$doc:meta])* trait $family:ident { $(fn $name:ident $args:tt $(twin $twin:ident)?;)* })*) => {
        const NAMES: &[&str] = &[$($(stringify!($name)),*),*];
    };
}
partage_driver_api::nvml_functions!(names);

/// Returns whether a function, by its name, changes something that other containers would notice.
fn is_control(name: &str) -> bool {
    const NOT: [&str; 5] = [
        // Affects only the calling thread.
        "nvmlDeviceSetCpuAffinity",
        "nvmlDeviceClearCpuAffinity",
        // Affects only objects of the caller.
        "nvmlEventSetCreate",
        "nvmlEventSetFree",
        "nvmlEventSetWait",
    ];
    const VERBS: [&str; 9] =
        ["Set", "Reset", "Clear", "Freeze", "Create", "Destroy", "Remove", "Modify", "Discover"];
    // "GpuSet", "Settings", "Resetless" and the like are queries.
    let asks = name.contains("Get") || name.contains("EventSet") || name.contains("Query");
    !asks && !NOT.contains(&name) && VERBS.iter().any(|verb| name.contains(verb))
}

fn controls() {
    let nvml = started();
    let mut looked = 0;
    for name in NAMES.iter().filter(|name| is_control(name)) {
        looked += 1;
        let address = nvml.0.symbol(name).unwrap_or_else(|| panic!("{name} is not exported by the stand-in"));
        // SAFETY: the function of NVML is refused before it reads its arguments.
        let function = unsafe { std::mem::transmute::<*mut c_void, TableFunction>(address) };
        assert_eq!(
            // SAFETY: the function of NVML is refused before it reads its arguments.
            unsafe { function(device(&nvml, 0) as usize, 0, 0, 0, 0, 0) },
            NVML_ERROR_NO_PERMISSION,
            "{name}"
        );
    }
    assert!(looked > 40, "{looked}");
    // Affects only the thread, so the driver decides: this machine may not have the CPUs near the node's GPUs.
    // SAFETY: the handle is the library's, and no other pointers are passed.
    assert_ne!(unsafe { nvml.nvmlDeviceSetCpuAffinity(device(&nvml, 0)) }, NVML_ERROR_NO_PERMISSION);
    let mut mode = 9;
    ok!(nvml.nvmlDeviceGetComputeMode(device(&nvml, 0), &mut mode));
    assert_eq!(mode, 0);
}

#[test]
fn controls_of_a_gpu_are_refused() {
    let node = TestNode::new("A100-SXM4-40GB", 1, DriverVersion::R550);
    TestContainer::with_memory(&node, MEMORY_LIMIT).run_role("controls");
}

/// The region does not exist.
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
fn missing_region_reports_nothing() {
    for node in both_drivers() {
        let whole = TestContainer::with_memory(&node, MEMORY_LIMIT);
        let (_neighbor, _) = work(&whole, 0, 500, false);
        let broken = TestContainer::with_memory(&node, MEMORY_LIMIT);
        std::fs::remove_file(broken.region().join("limits")).unwrap();
        broken.run_role("refused");
    }
}

/// Errors of the driver are returned unchanged.
fn uninitialized() {
    let nvml = NvmlLibrary::open();
    fails!(
        NVML_ERROR_UNINITIALIZED,
        nvml.nvmlDeviceGetMemoryInfo(std::ptr::without_provenance_mut(8), &mut Default::default())
    );
    assert_eq!(name_of(&nvml, std::process::id(), 64), Err(NVML_ERROR_UNINITIALIZED));
    ok!(nvml.nvmlInit_v2());
    let device = device(&nvml, 0);
    print_line("ready");
    wait_for_resume();
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
fn driver_errors_are_returned_unchanged() {
    for node in both_drivers() {
        let container = TestContainer::with_memory(&node, MEMORY_LIMIT);
        let mut process = container.start("uninitialized");
        process.wait_for_line("ready");
        node.state().inject(0, partage_sim_node::state::GpuFault::Lost);
        process.resume();
        process.end();
    }
}
