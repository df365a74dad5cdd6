//! The bypass audit on a simulated node, with the driver's own word about its processes: who goes past the shim is found,
//! who forges its account is found, and who is honest is not.
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
use partage_region::audit::{self, AuditRound, BypassAudit, GrantedGpu, ObservedProcess, Tolerance};
use partage_region::{GpuShare, RegionOwner, RegionPolicy, UNIT, UsageReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
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

const LIMIT: u64 = 4096 * MIB;
/// Between two looks, and for how many something must be wrong.
const LOOK: Duration = Duration::from_millis(100);
const GRACE: u32 = 5;
/// Looks before something may change.
const BEFORE: u32 = 3;

#[test]
fn client() {
    let Some(role) = role() else { return };
    let words: Vec<&str> = role.iter().map(String::as_str).collect();
    match *words {
        ["allocate", seed] => allocate(seed.parse().unwrap()),
        ["hold", mib] => hold(mib.parse().unwrap()),
        ["launch"] => launch(),
        ["audit", looks, region, ref pids @ ..] => {
            let pids: Vec<u32> = pids.iter().map(|pid| pid.parse().unwrap()).collect();
            audit_of(looks.parse().unwrap(), Path::new(region), &pids);
        }
        ref other => panic!("{other:?}"),
    }
}

fn context() -> Cuda {
    let cuda = Cuda::started();
    let mut context = null_mut();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    cuda
}

/// An honest program that allocates and frees as it comes, to the limit.
fn allocate(seed: u64) {
    let cuda = context();
    say("ready");
    let (mut held, mut number) = (Vec::new(), seed | 1);
    loop {
        // Any sequence will do.
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (choice, bytes) = (number >> 33, (number >> 40) as usize % (700 << 20) + 1);
        let mut pointer = 0;
        // SAFETY: a variable to fill in.
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
    say("ready");
    wait_to_be_told();
}

/// A program that computes all the time.
fn launch() {
    let cuda = context();
    let (mut module, mut function) = (null_mut(), null_mut());
    ok!(cuda.cuModuleLoadData(&mut module, c"any image".as_ptr().cast()));
    ok!(cuda.cuModuleGetFunction(&mut function, module, c"busy_1000us".as_ptr()));
    say("ready");
    loop {
        ok!(cuda.cuLaunchKernel(function, 1 << 20, 1, 1, 256, 1, 1, 0, null_mut(), null_mut(), null_mut()));
    }
}

/// The agent's part: looks at the region of a container whose processes are `pids`, and says what it found.
fn audit_of(looks: u32, region: &Path, pids: &[u32]) {
    let nvml = Nvml::open();
    ok!(nvml.nvmlInit_v2());
    let mut device = null_mut();
    ok!(nvml.nvmlDeviceGetHandleByIndex_v2(0, &mut device));
    let (owner, reader) = (RegionOwner::open(region).unwrap(), UsageReader::open(region).unwrap());
    let share = owner.share(0).unwrap();
    let granted =
        GrantedGpu { uuid: share.uuid, memory: share.memory, context: share.context, gated: share.gated };
    let grace = (LOOK * (GRACE - 1)).as_nanos() as u64;
    let tolerance = Tolerance { grace, work: 200_000_000, ..Tolerance::default() };
    let (mut audit, start, mut seen_until) = (BypassAudit::new(tolerance), Instant::now(), 0);
    for look in 0..looks {
        std::thread::sleep(LOOK);
        let before = reader.snapshot().unwrap();
        let processes = driver_says(&nvml, device, pids, &mut seen_until);
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
        if look == BEFORE {
            say("seen");
            wait_to_be_told();
        }
        for finding in audit.look(&round) {
            say(&format!("agent: found {:?} {}", finding.kind, finding.pid.map_or(-1, i64::from)));
        }
    }
    say("agent: done");
}

fn driver_says(
    nvml: &Nvml,
    device: nvmlDevice_t,
    pids: &[u32],
    seen_until: &mut u64,
) -> Vec<ObservedProcess> {
    let (mut count, mut infos) = (50, [nvmlProcessInfo_t::default(); 50]);
    ok!(nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, &mut count, infos.as_mut_ptr()));
    let (mut samples_count, mut samples) = (50, [nvmlProcessUtilizationSample_t::default(); 50]);
    // SAFETY: room as it is said.
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

fn node() -> Node {
    Node::new("A100-SXM4-40GB", 1, DriverVersion::R550)
}

fn started(mut player: Player) -> Player {
    player.hear("ready");
    player
}

/// What the agent finds: kinds and pids, without repetitions.
fn found(container: &Container<'_>, looks: u32, players: &[&Player]) -> Vec<(String, i64)> {
    found_after(container, looks, players, || {})
}

/// The same, when something is done once it has looked a few times.
fn found_after(
    container: &Container<'_>,
    looks: u32,
    players: &[&Player],
    change: impl FnOnce(),
) -> Vec<(String, i64)> {
    let pids: Vec<String> = players.iter().map(|player| player.child.id().to_string()).collect();
    let region = container.region();
    // The agent is outside: it has the driver itself.
    let role = format!("audit {looks} {} {}", region.display(), pids.join(" "));
    let mut agent = container.node.start(&role);
    agent.hear("seen");
    change();
    agent.tell();
    let mut found = Vec::new();
    loop {
        // Either a finding or the end.
        let line = agent.hear("agent:");
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
fn the_honest_are_not_found() {
    let node = node();
    let container = Container::with_memory(&node, LIMIT);
    let players: Vec<Player> =
        (0..3).map(|seed| started(container.start(&format!("allocate {}", seed * 7919 + 3)))).collect();
    assert_eq!(found(&container, 60, &players.iter().collect::<Vec<_>>()), []);
}

#[test]
fn who_goes_past_the_shim_is_found() {
    let node = node();
    let container = Container::with_memory(&node, LIMIT);
    let honest = started(container.start("hold 500"));
    // The same node, and the driver's own library instead of the shim's.
    let bypass = started(node.start("hold 500"));
    let pid = i64::from(bypass.child.id());
    assert_eq!(found(&container, 15, &[&honest, &bypass]), [("UnaccountedMemory".into(), pid)]);
    // A program of the machine itself is nobody's.
    assert_eq!(found(&container, 15, &[&honest]), []);
}

#[test]
fn who_works_past_the_shim_is_found() {
    let node = node();
    let gated = GpuShare { gated: true, cores: 50_000, ceiling: 50_000, ..shares(&node, LIMIT)[0].clone() };
    let container = Container::new(&node, &[gated], RegionPolicy::default());
    let mut honest = started(container.start("launch"));
    assert_eq!(found(&container, 40, &[&honest]), []);
    honest.kill();
    let bypass = started(node.start("launch"));
    let pid = i64::from(bypass.child.id());
    let all = found(&container, 40, &[&bypass]);
    assert_eq!(all, [("UnaccountedMemory".into(), pid), ("UnaccountedWork".into(), -1)]);
}

#[test]
fn who_forges_its_account_is_found() {
    let node = node();
    let container = Container::with_memory(&node, LIMIT);
    let player = started(container.start("hold 500"));
    assert_eq!(found(&container, 10, &[&player]), []);
    let usage = std::fs::File::options().write(true).open(container.region().join("usage")).unwrap();
    // The book of GPU 0: nothing is used.
    usage.write_all_at(&[0; 8], 256).unwrap();
    assert_eq!(found(&container, 15, &[&player]), [("ForgedUsage".into(), -1)]);
}

#[test]
fn who_forges_its_account_with_care_is_found() {
    let node = node();
    let container = Container::with_memory(&node, LIMIT);
    let player = started(container.start("hold 500"));
    let pid = i64::from(player.child.id());
    let forge = || {
        let usage =
            std::fs::File::options().read(true).write(true).open(container.region().join("usage")).unwrap();
        // The book of GPU 0 and the lane of the first slot agree: 300 MiB less.
        for at in [256, 4352 + 256] {
            let mut word = [0; 8];
            usage.read_exact_at(&mut word, at).unwrap();
            let less = u64::from_le_bytes(word) - 300 * MIB / UNIT;
            usage.write_all_at(&less.to_le_bytes(), at).unwrap();
        }
        assert_eq!(container.reader().snapshot().unwrap().forged, []);
    };
    assert_eq!(found_after(&container, 20, &[&player], forge), [("ForgedUsage".into(), pid)]);
}
