//! What the shim adds to a call. The bare driver and the shim take turns, a round each, so that what else the machine does
//! meets both; instructions are counted one by one, and do not depend on that.

use crate::rig::{Container, Node, Tenant};
use partage_region::GpuShare;
use partage_region::arbiter::Arbiter;

const ROUNDS: usize = 31;

pub fn all() {
    println!("added to a call            bare ns   added ns   instructions   at most ns");
    let memory = GpuShare { memory: 8 << 30, ..GpuShare::default() };
    let whole = GpuShare { memory: 8 << 30, cores: 100_000, gated: true, ..GpuShare::default() };
    for (what, call, share, most) in [
        ("alloc + free 1 MiB", "alloc-free", &memory, 150),
        ("launch, memory limit", "launch", &memory, 15),
        ("launch, core limit", "launch", &whole, 40),
        ("cuMemGetInfo", "mem-get-info", &memory, 30),
    ] {
        let node = Node::new("A100-SXM4-40GB");
        let container = Container::new(&node, GpuShare { uuid: node.uuid(), ..share.clone() });
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

fn medians(node: &Node, bare: &std::path::Path, held: &std::path::Path, call: &str) -> (f64, f64) {
    let mut both = [bare, held].map(|libraries| Tenant::start(node, libraries, &["cost", call]));
    both.iter_mut().for_each(Tenant::ready);
    let mut rounds = [const { Vec::new() }; 2];
    for _ in 0..ROUNDS {
        for (tenant, rounds) in both.iter_mut().zip(&mut rounds) {
            tenant.go();
            rounds.push(tenant.line().parse::<f64>().unwrap());
        }
    }
    let [bare, held] = rounds.map(|mut rounds| {
        rounds.sort_by(f64::total_cmp);
        rounds[ROUNDS / 2]
    });
    (bare, held)
}

/// Instructions of a process from when it is ready to its end, with so many calls in between.
fn count(node: &Node, libraries: &std::path::Path, call: &str, calls: u32) -> i64 {
    let mut tenant = Tenant::start(node, libraries, &["step", call, &calls.to_string()]);
    tenant.ready();
    let pid = tenant.child.id() as libc::pid_t;
    let mut status = 0;
    let mut stepped = 0;
    // SAFETY: a child of ours that asked to be traced and stopped itself.
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
