//! Eight processes of one container that allocate and free at random: never a byte over the limit, and memory of killed
//! processes is soon available again.

use crate::setup::{BenchContainer, BenchNode, BenchTenant};
use partage_region::{GpuShare, UsageReader};
use std::time::{Duration, Instant};

const LIMIT: u64 = 8 << 30;
const SECONDS: u64 = 30;

pub fn all() {
    let node = BenchNode::new("A100-SXM4-40GB");
    let context = node.dir.config().profile(0).unwrap().memory.context;
    let share = GpuShare { uuid: node.uuid(), memory: LIMIT, context, ..GpuShare::default() };
    let container = BenchContainer::new(&node, share);
    let mut tenants: Vec<BenchTenant> =
        (0..8).map(|_| BenchTenant::start(&node, &container.libraries(), &["restless"])).collect();
    tenants.iter_mut().for_each(BenchTenant::ready);
    tenants.iter_mut().for_each(BenchTenant::go);
    let truth = || node.state.used_memory(0) * partage_region::MEMORY_UNIT;
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
    // The other processes continue, and reclaim what the dead ones left; when they stop too, the account is what live
    // processes hold.
    while node.state.processes(0).len() > 4 || reader.snapshot().unwrap().processes.len() > 4 {
        node.state.reclaim_dead();
    }
    println!(
        "  after kill -9 of four: all of theirs is back after {:.1} ms",
        killed.elapsed().as_secs_f64() * 1e3
    );
    println!();
    assert!(most <= LIMIT, "{most} bytes were used");
}
