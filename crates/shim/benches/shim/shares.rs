//! How exactly shares of a GPU's time are kept.

use crate::rig::{Container, Node, Tenant};
use partage_region::GpuShare;
use partage_region::arbiter::Runner;
use std::time::{Duration, Instant};

const MIXED: &str = "20,100,500,2000,5000,20000";

pub fn all() {
    println!("shares of a GPU's time, tenants that saturate   asked %   1st second   10 seconds");
    for cores in [10, 30, 50, 90] {
        row("A100-SXM4-40GB", &[cores], MIXED);
    }
    row("A100-SXM4-40GB", &[30, 70], MIXED);
    row("A100-SXM4-40GB", &[10, 20, 70], MIXED);
}

fn row(card: &str, shares: &[u32], lengths: &str) {
    let node = Node::new(card);
    let containers: Vec<Container> = shares
        .iter()
        .map(|&cores| {
            let share = GpuShare {
                uuid: node.uuid(),
                cores: cores * 100,
                ceiling: cores * 100,
                gated: true,
                ..GpuShare::default()
            };
            Container::new(&node, share)
        })
        .collect();
    let arbiter = Runner::new();
    for container in &containers {
        arbiter.add(container.folder.path()).unwrap();
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
