//! How exactly shares of a GPU's time are kept.

use crate::rig::{Container, Node, Tenant};
use partage_region::arbiter::Arbiter;
use partage_region::{GpuShare, RegionOwner};
use std::time::{Duration, Instant};

const A100: &str = "A100-SXM4-40GB";
const H100: &str = "H100-SXM5-80GB";
const MIXED: &str = "20,100,500,2000,5000,20000";

pub fn all() {
    println!("shares of a GPU's time, tenants that saturate          asked %   1st second   10 seconds");
    for cores in [10, 30, 50, 90] {
        row(A100, &[cores], MIXED);
    }
    row(A100, &[30, 70], MIXED);
    row(A100, &[10, 20, 70], MIXED);
    row(A100, &[30, 70], "200");
    row("T4", &[30, 70], MIXED);
    row(H100, &[30, 70], MIXED);
    println!();
    println!("the same two at once, without a limit: {:.2} % of the GPU", unlimited());
    change();
    come_back();
    println!();
}

/// How much of the GPU two tenants use together where nobody limits them.
fn unlimited() -> f64 {
    let node = Node::new(A100);
    let container = Container::new(&node, GpuShare { uuid: node.uuid(), ..GpuShare::default() });
    let mut tenants: Vec<Tenant> =
        (0..2).map(|_| Tenant::start(&node, &container.libraries(), &["saturate", MIXED])).collect();
    tenants.iter_mut().for_each(Tenant::ready);
    tenants.iter_mut().for_each(Tenant::go);
    gained(&node, &tenants, 5000).iter().sum()
}

/// Percent that each tenant gets in the next so many milliseconds.
fn gained(node: &Node, tenants: &[Tenant], milliseconds: u64) -> Vec<f64> {
    let served = || -> Vec<u64> { tenants.iter().map(|tenant| node.served(tenant.pid())).collect() };
    let (before, began) = (served(), Instant::now());
    std::thread::sleep(Duration::from_millis(milliseconds));
    let (after, took) = (served(), began.elapsed().as_nanos() as f64);
    after.iter().zip(before).map(|(after, before)| (after - before) as f64 / took * 100.0).collect()
}

/// A share that changes while the program runs.
fn change() {
    let node = Node::new(A100);
    let container = Container::new(&node, hard(&node, 80));
    let arbiter = Arbiter::new();
    arbiter.add(container.handle()).unwrap();
    let mut tenants = [Tenant::start(&node, &container.libraries(), &["saturate", "200"])];
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

/// One that lent its time wants it back.
fn come_back() {
    let node = Node::new(A100);
    let borrower = Container::new(&node, GpuShare { ceiling: 100_000, ..hard(&node, 20) });
    let owner = Container::new(&node, hard(&node, 80));
    let arbiter = Arbiter::new();
    arbiter.add(borrower.handle()).unwrap();
    arbiter.add(owner.handle()).unwrap();
    let mut busy = Tenant::start(&node, &borrower.libraries(), &["saturate", MIXED]);
    busy.ready();
    busy.go();
    let mut back = Tenant::start(&node, &owner.libraries(), &["now-and-then", "500"]);
    back.ready();
    back.go();
    let mut waits: Vec<f64> = (0..20).map(|_| back.line().parse().unwrap()).collect();
    waits.sort_by(f64::total_cmp);
    println!(
        "comes back for lent time: kernel of 0.5 ms done after {:.1} ms (median of 20), {:.1} ms (longest)",
        waits[10], waits[19]
    );
}

fn hard(node: &Node, cores: u32) -> GpuShare {
    GpuShare {
        uuid: node.uuid(),
        cores: cores * 1_000,
        ceiling: cores * 1_000,
        gated: true,
        ..GpuShare::default()
    }
}

fn row(card: &str, shares: &[u32], lengths: &str) {
    let node = Node::new(card);
    let containers: Vec<Container> =
        shares.iter().map(|&cores| Container::new(&node, hard(&node, cores))).collect();
    let arbiter = Arbiter::new();
    for container in &containers {
        arbiter.add(container.handle()).unwrap();
    }
    let mut tenants: Vec<Tenant> = containers
        .iter()
        .map(|container| Tenant::start(&node, &container.libraries(), &["saturate", lengths]))
        .collect();
    tenants.iter_mut().for_each(Tenant::ready);
    tenants.iter_mut().for_each(Tenant::go);
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
