//! The figures of docs/benchmarks.md: what a decision costs, and what the books weigh.
//!
//! Wall time on a shared machine is noisy. Medians are shown, and beside them the ratio to ranking every node
//! anew, measured in the same run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use partage_core::ledger::Ledger;
use partage_core::model::*;
use partage_core::place::fragmentation::Fragmentation;
use partage_core::place::{
    ClusterCapacity, HostUsage, NodeIndex, NodeRanking, PolicyEngine, RankCache, Usage,
};
use partage_core::simulate::{Inflation, SplitMix64, arrivals, trace};
use std::time::Instant;

fn main() {
    let memory = memory_of_books();
    println!("\n| what | median | mean | 99th of 100 | ranking every node anew | ratio |");
    println!("|---|---|---|---|---|---|");
    let seed = trace_decisions();
    large_cluster();
    println!("\n| what | figure |\n|---|---|");
    println!("| one seed of the trace `default`, decisions and book-keeping | {seed:.2} s |");
    println!("| books of 5,000 nodes x 8 GPUs with 100,000 grants | {memory} MiB |");
}

struct Times(Vec<u64>);

impl Times {
    fn at(&mut self, percent: usize) -> f64 {
        self.0.sort_unstable();
        self.0[(self.0.len() - 1) * percent / 100] as f64 / 1000.0
    }
}

fn timed<T>(times: &mut Times, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = work();
    times.0.push(start.elapsed().as_nanos() as u64);
    result
}

/// Ranks every node for an ask, as a scheduler without memory would.
fn brute_force(cluster: &ClusterCapacity, ranking: &impl NodeRanking, ask: &PodAsk) -> Option<NodeIndex> {
    let prepared = cluster.prepare(ask);
    let ranks = cluster.nodes().filter_map(|(node, capacity)| {
        Some((ranking.rank(capacity, cluster.classes(), &prepared)?, std::cmp::Reverse(node)))
    });
    ranks.max().map(|(_, std::cmp::Reverse(node))| node)
}

fn row(what: &str, mut times: Times, mut anew: Times) {
    let mean = times.0.iter().sum::<u64>() as f64 / times.0.len() as f64 / 1000.0;
    let (median, late, anew) = (times.at(50), times.at(99), anew.at(50));
    println!(
        "| {what} | {median:.1} µs | {mean:.1} µs | {late:.1} µs | {anew:.0} µs | {:.0} x |",
        anew / median
    );
}

/// Every decision of one run of the bundled trace; every fiftieth also the slow way, and both must agree.
fn trace_decisions() -> f64 {
    let read = |name: &str| {
        let file = format!("{}/../../traces/openb/openb_{name}.csv", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(file).expect("the bundled trace")
    };
    let nodes = trace::read_nodes(&read("node_list_gpu_node")).unwrap();
    let pods = trace::read_pods(&read("pod_list_default")).unwrap();
    let capacity = trace::total_cores(&nodes);
    let asks: Vec<PodAsk> = pods.iter().map(|pod| pod.to_ask()).collect();
    let mut cluster = ClusterCapacity::new(nodes.iter().map(|node| node.to_node()));
    let mut ranking = Fragmentation::new();
    let mut cache = RankCache::default();
    let (mut times, mut anew) = (Times(Vec::new()), Times(Vec::new()));
    let mut total = 0.0;
    for (count, pod) in arrivals(&pods, capacity, Inflation::default(), 1).unwrap().into_iter().enumerate() {
        let ask = &asks[pod];
        if count % 50 == 0 {
            let slow = timed(&mut anew, || brute_force(&cluster, &ranking, ask));
            let fast = cache.best(&cluster, ask, &ranking);
            assert_eq!(slow, fast.map(|decision| decision.node));
        }
        let start = Instant::now();
        let decision = timed(&mut times, || {
            ranking.arrived(ask, &cluster);
            cache.best(&cluster, ask, &ranking)
        });
        if let Some(decision) = decision {
            let usage = decision.placement.usage_by_gpu(&ask.asks);
            cluster.add_usage(decision.node, &usage, HostUsage::new(ask.cpu, ask.memory));
        }
        total += start.elapsed().as_secs_f64();
    }
    row("1,213 nodes, the trace as it comes", times, anew);
    total
}

fn large_nodes() -> impl Iterator<Item = Node> {
    (0..5000).map(|at| {
        let gpus = (0..8).map(|minor| Gpu {
            uuid: format!("GPU-{at:04}-{minor}").into(),
            minor,
            model: ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"][at % 2].into(),
            memory_bytes: Bytes(80 << 30),
            numa: Some(minor / 4),
            pci: None,
            withheld: None,
        });
        let mut node = Node::new(format!("node-{at:04}"), gpus.collect());
        node.cpu_milli = Some(MilliCpu(128_000));
        node.memory_bytes = Some(Bytes(1 << 40));
        node
    })
}

/// A pod of one of forty kinds: shares of many sizes, whole GPUs, several GPUs.
fn some_ask(dice: &mut SplitMix64) -> PodAsk {
    let kind = dice.below(40) as u64;
    let (count, whole) = match kind {
        0..32 => (1, false),
        32..36 => (1, true),
        _ => (1 << (kind - 35), true),
    };
    let part = ShareAsk {
        memory: if whole { MemoryAsk::All } else { MemoryAsk::Exactly(Bytes((2 + kind) << 30)) },
        cores: if whole {
            CoresAsk::Exactly(Cores::WHOLE)
        } else {
            CoresAsk::Exactly(Cores::percent(5 + kind as u32).unwrap())
        },
        whole,
        ceiling: None,
    };
    let ask = Ask {
        container: "main".into(),
        role: ContainerRole::App,
        want: WantedGpus { count: count.min(8), part },
    };
    PodAsk {
        asks: vec![ask],
        cpu: MilliCpu(2000 + 500 * kind),
        memory: Bytes((4 + kind) << 30),
        ..PodAsk::default()
    }
}

fn id(pod: usize) -> PodId {
    PodId {
        uid: format!("5f0c2f3e-0000-4000-8000-{pod:012}").into(),
        namespace: "team-research".into(),
        name: format!("training-job-{pod}-worker-0").into(),
    }
}

/// What a pod took, to be given back.
type Taken = (NodeIndex, Vec<(usize, Usage)>, HostUsage);

/// 5,000 nodes of 8 GPUs, half of all cores promised, with pods coming and going; every four hundredth decision
/// also the slow way, and both must agree.
fn large_cluster() {
    let mut cluster = ClusterCapacity::new(large_nodes());
    let mut ranking = Fragmentation::new();
    let mut cache = RankCache::default();
    let mut dice = SplitMix64::new(1);
    let mut living: Vec<Taken> = Vec::new();
    let (mut times, mut anew) = (Times(Vec::new()), Times(Vec::new()));
    let (mut promised, half) = (0, 5000 * 8 * u64::from(Cores::WHOLE.as_millipercent()) / 2);
    let mut rounds = 0;
    while rounds < 4000 {
        let full = promised >= half;
        if full {
            let (node, usage, host) = living.swap_remove(dice.below(living.len()));
            promised -= usage.iter().map(|(_, usage)| usage.cores).sum::<u64>();
            cluster.remove_usage(node, &usage, host);
            rounds += 1;
        }
        let ask = some_ask(&mut dice);
        let mut untimed = Times(Vec::new());
        let decision = timed(if full { &mut times } else { &mut untimed }, || {
            ranking.arrived(&ask, &cluster);
            cache.best(&cluster, &ask, &ranking)
        });
        if full && rounds % 400 == 0 {
            let slow = timed(&mut anew, || brute_force(&cluster, &ranking, &ask));
            assert_eq!(slow, decision.as_ref().map(|decision| decision.node));
        }
        let decision = decision.expect("half of the cluster is free");
        let (usage, host) = (decision.placement.usage_by_gpu(&ask.asks), HostUsage::new(ask.cpu, ask.memory));
        promised += usage.iter().map(|(_, usage)| usage.cores).sum::<u64>();
        cluster.add_usage(decision.node, &usage, host);
        living.push((decision.node, usage, host));
    }
    row("5,000 nodes x 8 GPUs, half full, 40 kinds of pods coming and going", times, anew);
}

/// Resident memory that 5,000 x 8 GPUs with 100,000 grants add to this process.
fn memory_of_books() -> u64 {
    let before = resident_mib();
    let mut ledger = Ledger::new(large_nodes());
    for pod in 0..100_000 {
        let (node, gpu) = (pod % 5000, pod / 5000 % 8);
        let share = Share {
            gpu: format!("GPU-{node:04}-{gpu}").into(),
            memory_bytes: Some(Bytes(20 << 30)),
            cores: Cores::percent(20),
            ceiling: None,
            whole: false,
        };
        let grant = PodGrant {
            node: format!("node-{node:04}").into(),
            grants: vec![Grant { container: "main".into(), init: false, shares: vec![share] }],
        };
        ledger.confirm(id(pod), grant, HostUsage::default());
    }
    // Deciding for forty kinds of pods fills the caches, too.
    let placer = PolicyEngine::new(Policy::Fragmentation);
    let mut dice = SplitMix64::new(1);
    for _ in 0..400 {
        ledger.best(&placer, &some_ask(&mut dice));
    }
    assert_eq!(ledger.all_held().count(), 100_000);
    resident_mib() - before
}

fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("a resident size");
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}
