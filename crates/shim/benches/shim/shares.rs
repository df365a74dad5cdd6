//! Measures how exact shares of a GPU's time are.

use crate::setup::{BenchContainer, BenchNode, BenchTenant};
use partage_region::arbiter::Arbiter;
use partage_region::{GpuShare, RegionOwner};
use std::time::{Duration, Instant};

const A100: &str = "A100-SXM4-40GB";
const H100: &str = "H100-SXM5-80GB";
const MIXED_KERNELS_US: &str = "20,100,500,2000,5000,20000";

pub fn all() {
    println!("shares of a GPU's time, tenants that saturate          asked %   1st second   10 seconds");
    for cores in [10, 30, 50, 90] {
        row(A100, &[cores], MIXED_KERNELS_US);
    }
    row(A100, &[30, 70], MIXED_KERNELS_US);
    row(A100, &[10, 20, 70], MIXED_KERNELS_US);
    row(A100, &[30, 70], "200");
    row("T4", &[30, 70], MIXED_KERNELS_US);
    row(H100, &[30, 70], MIXED_KERNELS_US);
    println!();
    println!("the same two at once, without a limit: {:.2} % of the GPU", unlimited());
    change();
    come_back();
    println!();
}

/// Returns how much of the GPU two tenants use together without limits.
fn unlimited() -> f64 {
    let node = BenchNode::new(A100);
    let container = BenchContainer::new(&node, GpuShare { uuid: node.uuid(), ..GpuShare::default() });
    let mut tenants: Vec<BenchTenant> = (0..2)
        .map(|_| BenchTenant::start(&node, &container.libraries(), &["saturate", MIXED_KERNELS_US]))
        .collect();
    tenants.iter_mut().for_each(BenchTenant::ready);
    tenants.iter_mut().for_each(BenchTenant::go);
    gained(&node, &tenants, 5000).iter().sum()
}

/// Returns the percentage that each tenant gets in the next milliseconds.
fn gained(node: &BenchNode, tenants: &[BenchTenant], milliseconds: u64) -> Vec<f64> {
    let served = || -> Vec<u64> { tenants.iter().map(|tenant| node.served(tenant.pid())).collect() };
    let (before, began) = (served(), Instant::now());
    std::thread::sleep(Duration::from_millis(milliseconds));
    let (after, took) = (served(), began.elapsed().as_nanos() as f64);
    after.iter().zip(before).map(|(after, before)| (after - before) as f64 / took * 100.0).collect()
}

/// A share that changes while the program runs.
fn change() {
    let node = BenchNode::new(A100);
    let container = BenchContainer::new(&node, hard(&node, 80));
    let arbiter = Arbiter::new();
    arbiter.add(container.handle()).unwrap();
    let mut tenants = [BenchTenant::start(&node, &container.libraries(), &["saturate", "200"])];
    tenants[0].ready();
    tenants[0].go();
    std::thread::sleep(Duration::from_secs(2));
    let owner = RegionOwner::open(container.folder.path()).unwrap();
    for cores in [20, 60] {
        owner.set(0, &hard(&node, cores)).unwrap();
        let parts: Vec<String> = (0..5).map(|_| format!("{:.0}", gained(&node, &tenants, 100)[0])).collect();
        println!("changed to {cores} %: in the next five tenths of a second {} %", parts.join(", "));
    }
}

/// A container that lent its time requests it again.
fn come_back() {
    let node = BenchNode::new(A100);
    let borrower = BenchContainer::new(&node, GpuShare { ceiling: 100_000, ..hard(&node, 20) });
    let owner = BenchContainer::new(&node, hard(&node, 80));
    let arbiter = Arbiter::new();
    arbiter.add(borrower.handle()).unwrap();
    arbiter.add(owner.handle()).unwrap();
    let mut busy = BenchTenant::start(&node, &borrower.libraries(), &["saturate", MIXED_KERNELS_US]);
    busy.ready();
    busy.go();
    let mut back = BenchTenant::start(&node, &owner.libraries(), &["now-and-then", "500"]);
    back.ready();
    back.go();
    let mut waits: Vec<f64> = (0..20).map(|_| back.line().parse().unwrap()).collect();
    waits.sort_by(f64::total_cmp);
    println!(
        "comes back for lent time: kernel of 0.5 ms done after {:.1} ms (median of 20), {:.1} ms (longest)",
        waits[10], waits[19]
    );
}

fn hard(node: &BenchNode, cores: u32) -> GpuShare {
    GpuShare {
        uuid: node.uuid(),
        cores: cores * 1_000,
        ceiling: cores * 1_000,
        waits_for_turns: true,
        ..GpuShare::default()
    }
}

fn row(card: &str, shares: &[u32], lengths: &str) {
    let node = BenchNode::new(card);
    let containers: Vec<BenchContainer> =
        shares.iter().map(|&cores| BenchContainer::new(&node, hard(&node, cores))).collect();
    let arbiter = Arbiter::new();
    for container in &containers {
        arbiter.add(container.handle()).unwrap();
    }
    let mut tenants: Vec<BenchTenant> = containers
        .iter()
        .map(|container| BenchTenant::start(&node, &container.libraries(), &["saturate", lengths]))
        .collect();
    tenants.iter_mut().for_each(BenchTenant::ready);
    tenants.iter_mut().for_each(BenchTenant::go);
    let began = Instant::now();
    let parts = |seconds: u64| -> Vec<f64> {
        std::thread::sleep(Duration::from_secs(seconds).saturating_sub(began.elapsed()));
        let now = began.elapsed().as_nanos() as f64;
        tenants.iter().map(|tenant| node.served(tenant.pid()) as f64 / now * 100.0).collect()
    };
    let (first, all) = (parts(1), parts(10));
    for (at, cores) in shares.iter().enumerate() {
        println!("{card:<24} {lengths:<22} {cores:>9} {:>12.1} {:>12.2}", first[at], all[at]);
    }
    println!("{:<57} {:>12.1} {:>12.2}", "  together", first.iter().sum::<f64>(), all.iter().sum::<f64>());
}
