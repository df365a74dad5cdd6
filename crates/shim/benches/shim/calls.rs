//! What the shim adds to a call. The bare driver and the shim alternate, a round each, so that other load on the
//! machine affects both; instructions are counted exactly and do not depend on that.

use crate::setup::{BenchContainer, BenchNode, BenchTenant};
use partage_region::GpuShare;
use partage_region::arbiter::Arbiter;

const MEASUREMENT_ROUNDS: usize = 31;

/// Description, call, share, and the nanoseconds that the shim may add.
type CallCase = (&'static str, &'static str, GpuShare, u32);

fn memory() -> GpuShare {
    GpuShare { memory: 8 << 30, ..GpuShare::default() }
}

pub fn all() {
    let mut cases = vec![
        ("alloc + free 1 MiB", "alloc-free", memory(), 150),
        ("cuMemGetInfo", "mem-get-info", memory(), 30),
    ];
    cases.extend(launch_cases());
    measure(&cases);
}

/// Measures launches only.
pub fn launches() {
    measure(&launch_cases());
}

fn launch_cases() -> [CallCase; 3] {
    let whole = GpuShare { cores: 100_000, waits_for_turns: true, ..memory() };
    let hard = GpuShare { cores: 99_000, ceiling: 99_000, ..whole.clone() };
    [
        ("launch, memory limit", "launch", memory(), 15),
        ("launch, share, alone", "launch", whole, 40),
        ("launch, hard core limit", "launch", hard, 40),
    ]
}

fn measure(cases: &[CallCase]) {
    println!("added to a call            bare ns   added ns   instructions   at most ns");
    for (what, call, share, most) in cases {
        let node = BenchNode::new("A100-SXM4-40GB");
        let container = BenchContainer::new(&node, GpuShare { uuid: node.uuid(), ..share.clone() });
        let arbiter = Arbiter::new();
        arbiter.add(container.handle()).unwrap();
        let [bare, held] = [node.dir.libraries(), container.libraries()];
        let (bare_ns, held_ns) = medians(&node, &bare, &held, call);
        let instructions = |libraries| count(&node, libraries, call, 20) - count(&node, libraries, call, 0);
        let added = (instructions(&held) - instructions(&bare)) / 20;
        println!("{what:<24} {bare_ns:>9.1} {:>10.1} {added:>14} {most:>12}", held_ns - bare_ns);
    }
    println!();
}

fn medians(node: &BenchNode, bare: &std::path::Path, held: &std::path::Path, call: &str) -> (f64, f64) {
    let mut both = [bare, held].map(|libraries| BenchTenant::start(node, libraries, &["cost", call]));
    both.iter_mut().for_each(BenchTenant::ready);
    let mut rounds = [const { Vec::new() }; 2];
    for _ in 0..MEASUREMENT_ROUNDS {
        for (tenant, rounds) in both.iter_mut().zip(&mut rounds) {
            tenant.go();
            rounds.push(tenant.line().parse::<f64>().unwrap());
        }
    }
    let [bare, held] = rounds.map(|mut rounds| {
        rounds.sort_by(f64::total_cmp);
        rounds[MEASUREMENT_ROUNDS / 2]
    });
    (bare, held)
}

/// Counts the instructions of a process from when it is ready to its end, with this many calls in between.
fn count(node: &BenchNode, libraries: &std::path::Path, call: &str, calls: u32) -> i64 {
    let mut tenant = BenchTenant::start(node, libraries, &["step", call, &calls.to_string()]);
    tenant.ready();
    let pid = tenant.child.id() as libc::pid_t;
    let mut status = 0;
    let mut stepped = 0;
    // SAFETY: the target is a child of this process that requested to be traced and stopped itself.
    unsafe {
        assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
        while libc::WIFSTOPPED(status) {
            stepped += 1;
            let nothing = std::ptr::null_mut::<libc::c_void>();
            assert_eq!(libc::ptrace(libc::PTRACE_SINGLESTEP, pid, nothing, nothing), 0);
            assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
        }
    }
    stepped
}
