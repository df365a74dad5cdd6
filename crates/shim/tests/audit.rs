//! The bypass audit on a simulated node, with the simulated driver's own data about processes: a process that bypasses
//! the shim or forges its account is reported, and an honest one is not.
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
use partage_region::audit::{self, AuditRound, AuditTolerance, BypassAudit, GrantedGpu, ObservedProcess};
use partage_region::{GpuShare, MEMORY_UNIT, RegionOwner, RegionPolicy, UsageReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
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

const MEMORY_LIMIT: u64 = 4096 * MIB;
/// Interval between two audit rounds.
const ROUND_INTERVAL: Duration = Duration::from_millis(100);
/// Number of rounds for which something must be wrong.
const GRACE_ROUNDS: u32 = 5;
/// Rounds before the test changes something.
const ROUNDS_BEFORE_CHANGE: u32 = 3;

#[test]
fn client() {
    let Some(role) = role() else { return };
    let words: Vec<&str> = role.iter().map(String::as_str).collect();
    match *words {
        ["allocate", seed] => allocate(seed.parse().unwrap()),
        ["hold", mib] => hold(mib.parse().unwrap()),
        ["launch"] => launch(),
        ["audit", rounds, region, ref pids @ ..] => {
            let pids: Vec<u32> = pids.iter().map(|pid| pid.parse().unwrap()).collect();
            audit_of(rounds.parse().unwrap(), Path::new(region), &pids);
        }
        ref other => panic!("{other:?}"),
    }
}

fn context() -> CudaLibrary {
    let cuda = CudaLibrary::started();
    let mut context = null_mut();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    cuda
}

/// An honest program that allocates and frees at random, up to the limit.
fn allocate(seed: u64) {
    let cuda = context();
    print_line("ready");
    let (mut held, mut number) = (Vec::new(), seed | 1);
    loop {
        // Any pseudo-random sequence will do.
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (choice, bytes) = (number >> 33, (number >> 40) as usize % (700 << 20) + 1);
        let mut pointer = 0;
        // SAFETY: the pointer is to a local variable.
        if choice % 3 != 0 && unsafe { cuda.cuMemAlloc_v2(&mut pointer, bytes) } == 0 {
            held.push(pointer);
        } else if !held.is_empty() {
            ok!(cuda.cuMemFree_v2(held.swap_remove(choice as usize % held.len())));
        }
        std::thread::sleep(Duration::from_micros(number % 3000));
    }
}

/// A program that holds memory.
fn hold(mib: u64) {
    let cuda = context();
    ok!(cuda.cuMemAlloc_v2(&mut 0, (mib * MIB) as usize));
    print_line("ready");
    wait_for_resume();
}

/// A program that computes all the time.
fn launch() {
    let cuda = context();
    let (mut module, mut function) = (null_mut(), null_mut());
    ok!(cuda.cuModuleLoadData(&mut module, c"any image".as_ptr().cast()));
    ok!(cuda.cuModuleGetFunction(&mut function, module, c"busy_1000us".as_ptr()));
    print_line("ready");
    loop {
        ok!(cuda.cuLaunchKernel(function, 1 << 20, 1, 1, 256, 1, 1, 0, null_mut(), null_mut(), null_mut()));
    }
}

/// Acts as the daemon: audits the region of a container whose processes are `pids`, and reports findings.
fn audit_of(rounds: u32, region: &Path, pids: &[u32]) {
    let nvml = NvmlLibrary::open();
    ok!(nvml.nvmlInit_v2());
    let mut device = null_mut();
    ok!(nvml.nvmlDeviceGetHandleByIndex_v2(0, &mut device));
    let (owner, reader) = (RegionOwner::open(region).unwrap(), UsageReader::open(region).unwrap());
    let share = owner.share(0).unwrap();
    let granted = GrantedGpu {
        uuid: share.uuid,
        memory: share.memory,
        context: share.context,
        waits_for_turns: share.waits_for_turns,
    };
    let grace = (ROUND_INTERVAL * (GRACE_ROUNDS - 1)).as_nanos() as u64;
    let tolerance = AuditTolerance { grace, work: 200_000_000, ..AuditTolerance::default() };
    let (mut audit, start, mut seen_until) = (BypassAudit::new(tolerance), Instant::now(), 0);
    for index in 0..rounds {
        std::thread::sleep(ROUND_INTERVAL);
        let before = reader.snapshot().unwrap();
        let processes = observed_processes(&nvml, device, pids, &mut seen_until);
        let after = reader.snapshot().unwrap();
        let round = AuditRound {
            now: start.elapsed().as_nanos() as u64,
            gpus: vec![audit::ObservedGpu { uuid: share.uuid, processes }],
            containers: vec![audit::AuditedContainer {
                id: "c".into(),
                granted: vec![granted],
                before,
                after,
            }],
            unmanaged: Vec::new(),
        };
        if index == ROUNDS_BEFORE_CHANGE {
            print_line("seen");
            wait_for_resume();
        }
        for finding in audit.examine(&round) {
            print_line(&format!("agent: found {:?} {}", finding.kind, finding.pid.map_or(-1, i64::from)));
        }
    }
    print_line("agent: done");
}

fn observed_processes(
    nvml: &NvmlLibrary,
    device: nvmlDevice_t,
    pids: &[u32],
    seen_until: &mut u64,
) -> Vec<ObservedProcess> {
    let (mut count, mut infos) = (50, [nvmlProcessInfo_t::default(); 50]);
    ok!(nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, &mut count, infos.as_mut_ptr()));
    let (mut samples_count, mut samples) = (50, [nvmlProcessUtilizationSample_t::default(); 50]);
    // SAFETY: the array has room for the count that is passed.
    let code = unsafe {
        nvml.nvmlDeviceGetProcessUtilization(device, samples.as_mut_ptr(), &mut samples_count, *seen_until)
    };
    let samples = if code == 0 { &samples[..samples_count as usize] } else { &[] };
    *seen_until = samples.iter().map(|sample| sample.timeStamp).max().unwrap_or(*seen_until);
    let busy = |pid| samples.iter().find(|sample| sample.pid == pid).map_or(0, |sample| sample.smUtil);
    infos[..count as usize]
        .iter()
        .map(|info| ObservedProcess {
            pid: info.pid,
            memory: info.usedGpuMemory,
            busy: busy(info.pid),
            container: pids.contains(&info.pid).then(|| "c".into()),
        })
        .collect()
}

fn node() -> TestNode {
    TestNode::new("A100-SXM4-40GB", 1, DriverVersion::R550)
}

fn started(mut process: RoleProcess) -> RoleProcess {
    process.wait_for_line("ready");
    process
}

/// Returns what the audit reports: kinds and pids, without repetitions.
fn findings(container: &TestContainer<'_>, rounds: u32, processes: &[&RoleProcess]) -> Vec<(String, i64)> {
    findings_after(container, rounds, processes, || {})
}

/// Returns what the audit reports if `change` runs after a few rounds.
fn findings_after(
    container: &TestContainer<'_>,
    rounds: u32,
    processes: &[&RoleProcess],
    change: impl FnOnce(),
) -> Vec<(String, i64)> {
    let pids: Vec<String> = processes.iter().map(|process| process.child.id().to_string()).collect();
    let region = container.region();
    // The daemon runs outside of the container: it uses the driver itself.
    let role = format!("audit {rounds} {} {}", region.display(), pids.join(" "));
    let mut agent = container.node.start(&role);
    agent.wait_for_line("seen");
    change();
    agent.resume();
    let mut found = Vec::new();
    loop {
        // Either a finding or the end.
        let line = agent.wait_for_line("agent:");
        let words: Vec<&str> = line.split(' ').collect();
        let ["found", kind, pid] = words[..] else { break };
        found.push((kind.to_string(), pid.parse().unwrap()));
    }
    agent.end();
    found.sort();
    found.dedup();
    found
}

#[test]
fn honest_processes_are_not_reported() {
    let node = node();
    let container = TestContainer::with_memory(&node, MEMORY_LIMIT);
    let processes: Vec<RoleProcess> =
        (0..3).map(|seed| started(container.start(&format!("allocate {}", seed * 7919 + 3)))).collect();
    assert_eq!(findings(&container, 60, &processes.iter().collect::<Vec<_>>()), []);
}

#[test]
fn memory_bypass_is_reported() {
    let node = node();
    let container = TestContainer::with_memory(&node, MEMORY_LIMIT);
    let honest = started(container.start("hold 500"));
    // The same node, with the driver's own library instead of the shim's.
    let bypass = started(node.start("hold 500"));
    let pid = i64::from(bypass.child.id());
    assert_eq!(findings(&container, 15, &[&honest, &bypass]), [("UnaccountedMemory".into(), pid)]);
    // A process of the machine itself belongs to no container.
    assert_eq!(findings(&container, 15, &[&honest]), []);
}

#[test]
fn compute_bypass_is_reported() {
    let node = node();
    let throttled = GpuShare {
        waits_for_turns: true,
        cores: 50_000,
        ceiling: 50_000,
        ..shares(&node, MEMORY_LIMIT)[0].clone()
    };
    let container = TestContainer::new(&node, &[throttled], RegionPolicy::default());
    let mut honest = started(container.start("launch"));
    assert_eq!(findings(&container, 40, &[&honest]), []);
    honest.kill();
    let bypass = started(node.start("launch"));
    let pid = i64::from(bypass.child.id());
    let all = findings(&container, 40, &[&bypass]);
    assert_eq!(all, [("UnaccountedMemory".into(), pid), ("UnaccountedWork".into(), -1)]);
}

#[test]
fn forged_account_is_reported() {
    let node = node();
    let container = TestContainer::with_memory(&node, MEMORY_LIMIT);
    let process = started(container.start("hold 500"));
    assert_eq!(findings(&container, 10, &[&process]), []);
    let usage = std::fs::File::options().write(true).open(container.region().join("usage")).unwrap();
    // The account word of GPU 0: nothing is used.
    usage.write_all_at(&[0; 8], 256).unwrap();
    assert_eq!(findings(&container, 15, &[&process]), [("ForgedUsage".into(), -1)]);
}

#[test]
fn consistently_forged_account_is_reported() {
    let node = node();
    let container = TestContainer::with_memory(&node, MEMORY_LIMIT);
    let process = started(container.start("hold 500"));
    let pid = i64::from(process.child.id());
    let forge = || {
        let usage =
            std::fs::File::options().read(true).write(true).open(container.region().join("usage")).unwrap();
        // The account word of GPU 0 and the lane of the first slot agree: 300 MiB less.
        for at in [256, 4352 + 256] {
            let mut word = [0; 8];
            usage.read_exact_at(&mut word, at).unwrap();
            let less = u64::from_le_bytes(word) - 300 * MIB / MEMORY_UNIT;
            usage.write_all_at(&less.to_le_bytes(), at).unwrap();
        }
        assert_eq!(container.reader().snapshot().unwrap().forged, []);
    };
    assert_eq!(findings_after(&container, 20, &[&process], forge), [("ForgedUsage".into(), pid)]);
}
