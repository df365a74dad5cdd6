//! Measures starting: from nothing to the first answer that depends on the limit.

use crate::setup::{BenchContainer, BenchNode, BenchTenant};
use partage_region::GpuShare;
use std::path::Path;

pub fn all() {
    println!("start: open, cuInit, cuDeviceTotalMem    bare ms   with the shim ms   added at most ms");
    let node = BenchNode::new("A100-SXM4-40GB");
    let share = GpuShare { uuid: node.uuid(), memory: 8 << 30, ..GpuShare::default() };
    let container = BenchContainer::new(&node, share);
    let [bare, held] = [node.dir.libraries(), container.libraries()];
    let mut alone = [const { Vec::new() }; 2];
    for _ in 0..31 {
        for (libraries, times) in [&bare, &held].into_iter().zip(&mut alone) {
            times.extend(together(&node, libraries, 1));
        }
    }
    let [bare_ms, held_ms] = alone.map(|times| at(times, 0.5));
    println!("{:<40} {bare_ms:>7.3} {held_ms:>18.3} {:>18}", "one process, median", 0.5);
    let [bare_ms, held_ms] = [&bare, &held].map(|libraries| at(together(&node, libraries, 200), 0.99));
    println!("{:<40} {bare_ms:>7.3} {held_ms:>18.3} {:>18}", "200 at once, 99 % of them, processor", 5);
    println!();
}

/// Returns the milliseconds of CPU time that each of `count` processes took, all started at once.
fn together(node: &BenchNode, libraries: &Path, count: usize) -> Vec<f64> {
    let mut tenants: Vec<BenchTenant> =
        (0..count).map(|_| BenchTenant::start(node, libraries, &["start"])).collect();
    tenants.iter_mut().for_each(BenchTenant::ready);
    tenants.iter_mut().for_each(BenchTenant::go);
    tenants.iter_mut().map(|tenant| tenant.line().parse().unwrap()).collect()
}

fn at(mut times: Vec<f64>, part: f64) -> f64 {
    times.sort_by(f64::total_cmp);
    times[((times.len() - 1) as f64 * part).ceil() as usize]
}
