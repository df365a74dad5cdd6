//! Processes that are killed at any instruction of the shim: what they held is released, what others hold is kept, and
//! no process waits for a dead one.
//!
//! A tenant is single-stepped from outside, and killed after a number of steps: the shim needs no fault injection
//! points, and no instruction is left out.
#![allow(unsafe_code, unreachable_pub, missing_docs)]
#![allow(clippy::unwrap_used, clippy::multiple_unsafe_ops_per_block)]
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

#[path = "support/container.rs"]
mod container;
#[path = "../../sim-driver/tests/support/driver.rs"]
mod driver;
#[path = "../../sim-driver/tests/support/node.rs"]
mod node;
#[path = "support/program.rs"]
mod program;

use container::{MIB, TestContainer, shares, true_usage};
use driver::cuda::*;
use node::{RoleProcess, TestNode, print_line, role, wait_for_resume};
use partage_driver_api::exports::DriverVersion;
use partage_region::{RegionPolicy, RegionTenant};
use partage_sim_node::state::SimNodeState;
use program::ProgramBuilder;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::ptr::null_mut;

/// The program that every test here runs in the container.
#[test]
fn client() {
    let Some(role) = role() else { return };
    assert_eq!(role, ["witness"]);
    witness();
}

const GPU_MODEL: &str = "A100-SXM4-40GB";
const CONTEXT_BYTES: u64 = 414 * MIB;
const FREE_BYTES: u64 = 64 * MIB;

/// Bytes that the witness holds beside the tenants.
const WITNESS_BYTES: u64 = CONTEXT_BYTES + 30 * MIB;

/// Number of tenants that are killed per scenario in a normal run: every step costs some microseconds.
const KILLS_PER_SCENARIO: u64 = 5;

/// Much of attaching sets up tables; what other processes see of it is done by system calls, so it is killed before and
/// after each.
#[test]
fn killed_while_attaching_is_reclaimed() {
    let test_node = KillTestNode::new();
    let mut trial = test_node.trial("attach");
    let mut call = 0;
    while !trial.kill(&format!("call {call}"), |tenant| tenant.run_calls(call)).ended {
        call += 1;
    }
    assert!(call > 40, "{call}");
}

#[test]
fn killed_while_allocating_is_reclaimed() {
    kill_all_over("memory", KILLS_PER_SCENARIO);
}

#[test]
fn killed_while_using_pools_is_reclaimed() {
    kill_all_over("pools", KILLS_PER_SCENARIO);
}

#[test]
fn killed_while_using_contexts_is_reclaimed() {
    kill_all_over("contexts", KILLS_PER_SCENARIO);
}

/// A thread waits for a turn for as long as it takes: it is killed on the way there.
#[test]
fn killed_while_launching_is_reclaimed() {
    let test_node = KillTestNode::new();
    let mut trial = test_node.trial("launch");
    for kill in 0..KILLS_PER_SCENARIO {
        trial.kill("on the way", |tenant| tenant.run(kill * 1700 + 1, u64::MAX));
    }
}

/// Kills the scenarios of memory, pools and contexts at hundreds of instructions.
#[test]
#[ignore = "many minutes: make soak"]
fn killed_at_hundreds_of_instructions_is_reclaimed() {
    for scenario in ["memory", "pools", "contexts"] {
        kill_all_over(scenario, 100);
    }
}

/// Holds some memory all the time; when resumed, it allocates all free memory, launches and continues.
fn witness() {
    let cuda = CudaLibrary::started();
    let ok = |code: CUresult| assert_eq!(code, CUDA_SUCCESS, "{:?}", name(code));
    let (mut context, mut held, mut all, mut module, mut kernel) = (null_mut(), 0, 0, null_mut(), null_mut());
    // SAFETY: the pointers are to local variables.
    unsafe {
        ok(cuda.cuCtxCreate_v2(&mut context, 0, 0));
        ok(cuda.cuMemAlloc_v2(&mut held, 30 << 20));
    }
    loop {
        print_line("on");
        if !wait_for_resume() {
            return;
        }
        // SAFETY: the pointers are to local variables.
        unsafe {
            ok(cuda.cuMemAlloc_v2(&mut all, (CONTEXT_BYTES * 2 + FREE_BYTES) as usize));
            ok(cuda.cuMemFree_v2(all));
            ok(cuda.cuModuleLoadData(&mut module, c"any image".as_ptr().cast()));
            ok(cuda.cuModuleGetFunction(&mut kernel, module, c"busy_20us".as_ptr()));
            ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, null_mut(), null_mut(), null_mut()));
            ok(cuda.cuCtxSynchronize());
            ok(cuda.cuModuleUnload(module));
        }
    }
}

/// A node with a directory for the test's program.
struct KillTestNode {
    node: TestNode,
    folder: tempfile::TempDir,
}

impl KillTestNode {
    fn new() -> Self {
        Self { node: TestNode::new(GPU_MODEL, 1, DriverVersion::R550), folder: tempfile::tempdir().unwrap() }
    }

    fn trial(&self, scenario: &'static str) -> KillTrial<'_> {
        let node = &self.node;
        // Enough for the witness, and for a tenant with two contexts.
        let mut all = shares(node, WITNESS_BYTES + 2 * CONTEXT_BYTES + FREE_BYTES);
        // With local rate limiting: single-stepped, a turn of an arbiter would be over before the tenant takes it.
        (all[0].cores, all[0].ceiling, all[0].waits_for_turns) = (50_000, 50_000, scenario == "launch");
        let container = TestContainer::new(node, &all, RegionPolicy::default());
        let arguments =
            ["-Wl,--no-as-needed".into(), format!("-L{}", node.0.libraries().display()), "-lcuda".into()];
        let builder = ProgramBuilder { folder: self.folder.path() };
        let program = builder.build_program("tenant", include_str!("killed_processes/tenant.c"), &arguments);
        let mut witness = container.start("witness");
        witness.wait_for_line("on");
        KillTrial { scenario, container, program, state: node.state(), witness, kills: 0 }
    }
}

/// Tenants of one scenario, killed one after the other.
struct KillTrial<'a> {
    scenario: &'static str,
    container: TestContainer<'a>,
    program: PathBuf,
    state: SimNodeState,
    witness: RoleProcess,
    kills: u64,
}

impl KillTrial<'_> {
    /// Kills a tenant, and checks what it left.
    fn kill(&mut self, how: &str, run: impl FnOnce(TracedTenant) -> StepCount) -> StepCount {
        let (scenario, container) = (self.scenario, &self.container);
        let seen = run(TracedTenant::start(container, &self.program, scenario));
        // Reclaims as the next process that needs memory would.
        let region = RegionTenant::attach(&container.region()).unwrap();
        region.reclaim_dead_processes();
        let (used, mine) = (region.used(0), region.held(0));
        drop(region);
        let place = format!("{scenario}, {how}, killed after {seen:?}");
        assert_eq!((used, mine), (WITNESS_BYTES, 0), "{place}");
        assert_eq!(true_usage(&self.state, 0), WITNESS_BYTES, "{place}");
        let snapshot = container.reader().snapshot().unwrap();
        assert_eq!(snapshot.forged, [], "{place}");
        assert_eq!(snapshot.gpus[0].used, WITNESS_BYTES, "{place}");
        assert_eq!(snapshot.processes.len(), 1, "{place}");
        self.kills += 1;
        if self.kills.is_multiple_of(8) {
            self.witness.resume();
            self.witness.wait_for_line("on");
        }
        seen
    }
}

fn kill_all_over(scenario: &'static str, kills: u64) {
    let test_node = KillTestNode::new();
    let mut trial = test_node.trial(scenario);
    let whole = trial.kill("at its end", |tenant| tenant.run(u64::MAX, u64::MAX));
    assert!(whole.ended && whole.inside > 1000, "{scenario}: {whole:?}");
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for kill in 0..kills {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Spread over the whole run, each anywhere in its part. Most in the shim, some anywhere.
        let part = |steps: u64| kill * (steps / kills) + (random >> 33) % (steps / kills).max(1);
        let (steps, inside) =
            if kill % 5 == 4 { (part(whole.steps), u64::MAX) } else { (u64::MAX, part(whole.inside)) };
        trial.kill("anywhere", |tenant| tenant.run(steps, inside));
    }
}

/// The counts of one tenant.
#[derive(Debug)]
struct StepCount {
    /// Instructions, or system call stops.
    steps: u64,
    /// Instructions inside the shim.
    inside: u64,
    /// Whether it reached its end.
    ended: bool,
}

/// A tenant that is single-stepped.
struct TracedTenant {
    child: Child,
    pid: libc::pid_t,
    shim: PathBuf,
}

impl TracedTenant {
    /// Starts it, and runs it up to its first stop.
    fn start(container: &TestContainer<'_>, program: &Path, scenario: &str) -> Self {
        let mut command = Command::new(program);
        container.env(&mut command);
        command.arg(scenario);
        // SAFETY: only one system call is made between fork and exec.
        unsafe {
            command.pre_exec(|| {
                let nothing = null_mut::<libc::c_void>();
                match libc::ptrace(libc::PTRACE_TRACEME, 0, nothing, nothing) {
                    -1 => Err(std::io::Error::last_os_error()),
                    _ => Ok(()),
                }
            });
        }
        let child = command.spawn().unwrap();
        let pid = child.id().cast_signed();
        let tenant = Self { child, pid, shim: container.libraries().join("libcuda.so.1") };
        assert_eq!(tenant.wait(), Some(libc::SIGTRAP), "the first stop is that of exec");
        // It is killed when this test ends, however it ends.
        tenant.ptrace(
            libc::PTRACE_SETOPTIONS,
            (libc::PTRACE_O_EXITKILL | libc::PTRACE_O_TRACESYSGOOD) as usize,
        );
        tenant.ptrace(libc::PTRACE_CONT, 0);
        assert_eq!(tenant.wait(), Some(libc::SIGSTOP), "where it begins");
        tenant
    }

    fn ptrace(&self, what: libc::c_uint, data: usize) {
        // SAFETY: the target is a stopped child of this thread, and the data is a number.
        let answer = unsafe { libc::ptrace(what, self.pid, null_mut::<libc::c_void>(), data) };
        assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
    }

    /// Returns the signal that stopped it; `None` if it ended.
    fn wait(&self) -> Option<i32> {
        let mut status = 0;
        // SAFETY: the pointer is to a local variable.
        assert_eq!(unsafe { libc::waitpid(self.pid, &mut status, libc::__WALL) }, self.pid);
        libc::WIFSTOPPED(status).then(|| libc::WSTOPSIG(status))
    }

    /// Returns its instruction pointer.
    fn at(&self) -> u64 {
        let offset =
            std::mem::offset_of!(libc::user, regs) + std::mem::offset_of!(libc::user_regs_struct, rip);
        // SAFETY: the target is a stopped child of this thread, and the offset is that of one of its registers.
        let at = unsafe { libc::ptrace(libc::PTRACE_PEEKUSER, self.pid, offset, null_mut::<libc::c_void>()) };
        at.cast_unsigned()
    }

    /// Returns the address range of the shim's code in it.
    fn code(&self) -> std::ops::Range<u64> {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid)).unwrap();
        let is_code = |line: &&str| line.contains(" r-xp ") && line.ends_with(self.shim.to_str().unwrap());
        let line = maps.lines().find(is_code).unwrap();
        let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
        u64::from_str_radix(from, 16).unwrap()..u64::from_str_radix(to, 16).unwrap()
    }

    /// Continues until it has entered or left this many system calls, and kills it there.
    fn run_calls(mut self, calls: u64) -> StepCount {
        let mut seen = StepCount { steps: 0, inside: 0, ended: false };
        while seen.steps < calls {
            self.ptrace(libc::PTRACE_SYSCALL, 0);
            match self.wait() {
                Some(stop) if stop == libc::SIGTRAP | 0x80 => seen.steps += 1,
                Some(libc::SIGSTOP) => {
                    seen.ended = true;
                    break;
                }
                other => panic!("unexpected stop {other:?} after {seen:?}"),
            }
        }
        self.child.kill().unwrap();
        assert_eq!(self.wait(), None);
        seen
    }

    /// Continues for this many steps, or this many in the shim, and kills it there.
    fn run(mut self, steps: u64, inside: u64) -> StepCount {
        let code = self.code();
        let mut seen = StepCount { steps: 0, inside: 0, ended: false };
        while seen.steps < steps && seen.inside < inside {
            self.ptrace(libc::PTRACE_SINGLESTEP, 0);
            match self.wait() {
                Some(libc::SIGTRAP) => {}
                Some(libc::SIGSTOP) => {
                    seen.ended = true;
                    break;
                }
                other => panic!("unexpected stop {other:?} after {seen:?}"),
            }
            seen.steps += 1;
            seen.inside += u64::from(code.contains(&self.at()));
        }
        self.child.kill().unwrap();
        assert_eq!(self.wait(), None);
        seen
    }
}
