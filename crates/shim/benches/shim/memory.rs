//! Eight processes of one container that allocate and free at random: never a byte over the limit, and what the killed held
//! is soon there again.

use crate::rig::{Container, Node, Tenant};
use partage_region::{GpuShare, UsageReader};
use std::time::{Duration, Instant};

const LIMIT: u64 = 8 << 30;
const SECONDS: u64 = 30;

pub fn all() {
    let node = Node::new("A100-SXM4-40GB");
    let context = node.dir.config().profile(0).unwrap().memory.context;
    let share = GpuShare { uuid: node.uuid(), memory: LIMIT, context, ..GpuShare::default() };
    let container = Container::new(&node, share);
    let mut tenants: Vec<Tenant> =
        (0..8).map(|_| Tenant::start(&node, &container.libraries(), &["restless"])).collect();
    tenants.iter_mut().for_each(Tenant::ready);
    tenants.iter_mut().for_each(Tenant::go);
    let truth = || node.state.used_memory(0) * partage_region::UNIT;
    let (began, mut most, mut looks) = (Instant::now(), 0, 0);
    while began.elapsed() < Duration::from_secs(SECONDS) {
        most = most.max(truth());
        looks += 1;
    }
    let reader = UsageReader::open(container.folder.path()).unwrap();
    let refusals = reader.snapshot().unwrap().gpus[0].refusals;
    println!("memory: 8 processes at random, {SECONDS} s, limit {} MiB", LIMIT >> 20);
    println!("  most used {} MiB in {looks} looks, refused {refusals} times", most >> 20);
    tenants.drain(..4).for_each(drop);
    let killed = Instant::now();
    // The others go on, and see to what the dead left; when they stop too, the account is what the living hold.
    while node.state.processes(0).len() > 4 || reader.snapshot().unwrap().processes.len() > 4 {
        node.state.sweep();
    }
    println!(
        "  after kill -9 of four: all of theirs is back after {:.1} ms",
        killed.elapsed().as_secs_f64() * 1e3
    );
    println!();
    assert!(most <= LIMIT, "{most} bytes were used");
}
