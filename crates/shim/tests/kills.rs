//! Processes killed at an instruction of the shim's, any: what they had is given back, what others have is kept, and nobody
//! waits for the dead.
//!
//! A tenant is run step by step from outside, and killed after so many steps: no place in the shim has to be made for it, and
//! none is left out.
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

use container::{Container, MIB, shares, truth};
use driver::cuda::*;
use node::{Node, Player, role, say, wait_to_be_told};
use partage_driver_api::exports::DriverVersion;
use partage_region::{RegionPolicy, RegionTenant};
use partage_sim_node::state::State;
use program::Maker;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::ptr::null_mut;

/// The program in the container, of every test here.
#[test]
fn client() {
    let Some(role) = role() else { return };
    assert_eq!(role, ["witness"]);
    witness();
}

const CARD: &str = "A100-SXM4-40GB";
const CONTEXT: u64 = 414 * MIB;
const ROOM: u64 = 64 * MIB;

/// What lives beside the tenants.
const WITNESS: u64 = CONTEXT + 30 * MIB;

/// How many tenants are killed in a scenario, while people wait for it: every step costs some microseconds.
const KILLS: u64 = 5;

/// Much of this is tables that are laid out; what others see of it is made by system calls, and it is killed before and
/// after each.
#[test]
fn while_it_attaches() {
    let bed = Bed::new();
    let mut trial = bed.trial("attach");
    let mut call = 0;
    while !trial.kill(&format!("call {call}"), |tenant| tenant.run_calls(call)).ended {
        call += 1;
    }
    assert!(call > 40, "{call}");
}

#[test]
fn while_it_allocates() {
    kill_all_over("memory", KILLS);
}

#[test]
fn while_it_allocates_in_other_ways() {
    kill_all_over("pools", KILLS);
}

#[test]
fn while_contexts_come_and_go() {
    kill_all_over("contexts", KILLS);
}

/// A gate that is closed is waited at, for as long as it takes: it is killed on the way there.
#[test]
fn while_it_launches() {
    let bed = Bed::new();
    let mut trial = bed.trial("launch");
    for kill in 0..KILLS {
        trial.kill("on the way", |tenant| tenant.run(kill * 1700 + 1, u64::MAX));
    }
}

/// The same, hundreds of times.
#[test]
#[ignore = "many minutes: make soak"]
fn at_hundreds_of_instructions() {
    for scenario in ["memory", "pools", "contexts"] {
        kill_all_over(scenario, 100);
    }
}

/// Holds something all the time, and when told, takes all the room there is, launches and goes on.
fn witness() {
    let cuda = Cuda::started();
    let ok = |code: CUresult| assert_eq!(code, CUDA_SUCCESS, "{:?}", name(code));
    let (mut context, mut held, mut all, mut module, mut kernel) = (null_mut(), 0, 0, null_mut(), null_mut());
    // SAFETY: variables of ours.
    unsafe {
        ok(cuda.cuCtxCreate_v2(&mut context, 0, 0));
        ok(cuda.cuMemAlloc_v2(&mut held, 30 << 20));
    }
    loop {
        say("on");
        if !wait_to_be_told() {
            return;
        }
        // SAFETY: likewise.
        unsafe {
            ok(cuda.cuMemAlloc_v2(&mut all, (CONTEXT * 2 + ROOM) as usize));
            ok(cuda.cuMemFree_v2(all));
            ok(cuda.cuModuleLoadData(&mut module, c"any image".as_ptr().cast()));
            ok(cuda.cuModuleGetFunction(&mut kernel, module, c"busy_20us".as_ptr()));
            ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, null_mut(), null_mut(), null_mut()));
            ok(cuda.cuCtxSynchronize());
            ok(cuda.cuModuleUnload(module));
        }
    }
}

/// A node with a container.
struct Bed {
    node: Node,
    folder: tempfile::TempDir,
}

impl Bed {
    fn new() -> Self {
        Self { node: Node::new(CARD, 1, DriverVersion::R550), folder: tempfile::tempdir().unwrap() }
    }

    fn trial(&self, scenario: &'static str) -> Trial<'_> {
        let node = &self.node;
        // Room for the witness, and for a tenant with two contexts.
        let mut all = shares(node, WITNESS + 2 * CONTEXT + ROOM);
        // By its own account: step by step, a turn of an arbiter's would be over before anybody takes it.
        (all[0].cores, all[0].ceiling, all[0].gated) = (50_000, 50_000, scenario == "launch");
        let container = Container::new(node, &all, RegionPolicy::default());
        let arguments =
            ["-Wl,--no-as-needed".into(), format!("-L{}", node.0.libraries().display()), "-lcuda".into()];
        let maker = Maker { folder: self.folder.path() };
        let program = maker.program("tenant", include_str!("kills/tenant.c"), &arguments);
        let mut witness = container.start("witness");
        witness.hear("on");
        Trial { scenario, container, program, state: node.state(), witness, kills: 0 }
    }
}

/// Tenants of one scenario, killed one after the other.
struct Trial<'a> {
    scenario: &'static str,
    container: Container<'a>,
    program: PathBuf,
    state: State,
    witness: Player,
    kills: u64,
}

impl Trial<'_> {
    /// Kills a tenant, and looks at what it left.
    fn kill(&mut self, how: &str, run: impl FnOnce(Tenant) -> Seen) -> Seen {
        let (scenario, container) = (self.scenario, &self.container);
        let seen = run(Tenant::start(container, &self.program, scenario));
        // Somebody looks, as the next process that needs something would.
        let region = RegionTenant::attach(&container.region()).unwrap();
        region.sweep();
        let (used, mine) = (region.used(0), region.held(0));
        drop(region);
        let place = format!("{scenario}, {how}, killed after {seen:?}");
        assert_eq!((used, mine), (WITNESS, 0), "{place}");
        assert_eq!(truth(&self.state, 0), WITNESS, "{place}");
        let snapshot = container.reader().snapshot().unwrap();
        assert_eq!(snapshot.forged, [], "{place}");
        assert_eq!(snapshot.gpus[0].used, WITNESS, "{place}");
        assert_eq!(snapshot.processes.len(), 1, "{place}");
        self.kills += 1;
        if self.kills.is_multiple_of(8) {
            self.witness.tell();
            self.witness.hear("on");
        }
        seen
    }
}

fn kill_all_over(scenario: &'static str, kills: u64) {
    let bed = Bed::new();
    let mut trial = bed.trial(scenario);
    let whole = trial.kill("at its end", |tenant| tenant.run(u64::MAX, u64::MAX));
    assert!(whole.ended && whole.inside > 1000, "{scenario}: {whole:?}");
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for kill in 0..kills {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Spread over all of it, each anywhere in its part. Most in the shim; some wherever.
        let part = |steps: u64| kill * (steps / kills) + (random >> 33) % (steps / kills).max(1);
        let (steps, inside) =
            if kill % 5 == 4 { (part(whole.steps), u64::MAX) } else { (u64::MAX, part(whole.inside)) };
        trial.kill("anywhere", |tenant| tenant.run(steps, inside));
    }
}

/// What was seen of a tenant.
#[derive(Debug)]
struct Seen {
    /// Instructions.
    steps: u64,
    /// Those of the shim.
    inside: u64,
    /// Whether it came to its end.
    ended: bool,
}

/// A tenant that is run step by step.
struct Tenant {
    child: Child,
    pid: libc::pid_t,
    shim: PathBuf,
}

impl Tenant {
    /// Begins it, and runs it to where it says.
    fn start(container: &Container<'_>, program: &Path, scenario: &str) -> Self {
        let mut command = Command::new(program);
        container.env(&mut command);
        command.arg(scenario);
        // SAFETY: one system call between fork and exec.
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
        // It goes with this test, whatever becomes of it.
        tenant.ptrace(
            libc::PTRACE_SETOPTIONS,
            (libc::PTRACE_O_EXITKILL | libc::PTRACE_O_TRACESYSGOOD) as usize,
        );
        tenant.ptrace(libc::PTRACE_CONT, 0);
        assert_eq!(tenant.wait(), Some(libc::SIGSTOP), "where it begins");
        tenant
    }

    fn ptrace(&self, what: libc::c_uint, data: usize) {
        // SAFETY: a stopped child of this thread; the data is a number.
        let answer = unsafe { libc::ptrace(what, self.pid, null_mut::<libc::c_void>(), data) };
        assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
    }

    /// The signal that stopped it; none if it ended.
    fn wait(&self) -> Option<i32> {
        let mut status = 0;
        // SAFETY: a number to fill in.
        assert_eq!(unsafe { libc::waitpid(self.pid, &mut status, libc::__WALL) }, self.pid);
        libc::WIFSTOPPED(status).then(|| libc::WSTOPSIG(status))
    }

    /// Where it is.
    fn at(&self) -> u64 {
        let offset =
            std::mem::offset_of!(libc::user, regs) + std::mem::offset_of!(libc::user_regs_struct, rip);
        // SAFETY: a stopped child of this thread; one of its registers.
        let at = unsafe { libc::ptrace(libc::PTRACE_PEEKUSER, self.pid, offset, null_mut::<libc::c_void>()) };
        at.cast_unsigned()
    }

    /// Where the shim's code lies in it.
    fn code(&self) -> std::ops::Range<u64> {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid)).unwrap();
        let is_code = |line: &&str| line.contains(" r-xp ") && line.ends_with(self.shim.to_str().unwrap());
        let line = maps.lines().find(is_code).unwrap();
        let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
        u64::from_str_radix(from, 16).unwrap()..u64::from_str_radix(to, 16).unwrap()
    }

    /// Goes on until it has entered or left so many system calls, and kills it there.
    fn run_calls(mut self, calls: u64) -> Seen {
        let mut seen = Seen { steps: 0, inside: 0, ended: false };
        while seen.steps < calls {
            self.ptrace(libc::PTRACE_SYSCALL, 0);
            match self.wait() {
                Some(stop) if stop == libc::SIGTRAP | 0x80 => seen.steps += 1,
                Some(libc::SIGSTOP) => {
                    seen.ended = true;
                    break;
                }
                other => panic!("it came to {other:?} after {seen:?}"),
            }
        }
        self.child.kill().unwrap();
        assert_eq!(self.wait(), None);
        seen
    }

    /// Goes on for so many steps, or so many in the shim, and kills it there.
    fn run(mut self, steps: u64, inside: u64) -> Seen {
        let code = self.code();
        let mut seen = Seen { steps: 0, inside: 0, ended: false };
        while seen.steps < steps && seen.inside < inside {
            self.ptrace(libc::PTRACE_SINGLESTEP, 0);
            match self.wait() {
                Some(libc::SIGTRAP) => {}
                Some(libc::SIGSTOP) => {
                    seen.ended = true;
                    break;
                }
                other => panic!("it came to {other:?} after {seen:?}"),
            }
            seen.steps += 1;
            seen.inside += u64::from(code.contains(&self.at()));
        }
        self.child.kill().unwrap();
        assert_eq!(self.wait(), None);
        seen
    }
}
