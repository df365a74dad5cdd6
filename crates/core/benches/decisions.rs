//! Measures the time of decisions, statements and snapshots, and the memory of a ledger, for docs/benchmarks.md.
//!
//! Wall time on a shared machine is noisy. Medians are shown, and beside a decision the ratio to ranking every node
//! again, measured in the same run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use partage_core::ledger::{Ledger, LedgerTime};
use partage_core::model::*;
use partage_core::place::fragmentation::Fragmentation;
use partage_core::place::{
    ClusterCapacity, GpuAllocation, HostUsage, NodeIndex, NodeRanking, PolicyEngine, RankCache,
};
use partage_core::replay::{Inflation, SplitMix64, arrivals, trace};
use std::time::Instant;

fn main() {
    let memory = ledger_memory_mib();
    println!("\n| what | median | mean | 99th of 100 | ranking every node | ratio |");
    println!("|---|---|---|---|---|---|");
    let seed = trace_decisions();
    large_cluster();
    println!("\n| on a ledger of 5,000 nodes x 8 GPUs with 100,000 grants | median | mean | 99th of 100 |");
    println!("|---|---|---|---|");
    large_ledger();
    println!("\n| what | figure |\n|---|---|");
    println!("| one seed of the trace `default`, decisions and accounting | {seed:.2} s |");
    println!("| ledger of 5,000 nodes x 8 GPUs with 100,000 grants | {memory} MiB |");
}

struct Durations(Vec<u64>);

impl Durations {
    fn at(&mut self, percent: usize) -> f64 {
        self.0.sort_unstable();
        self.0[(self.0.len() - 1) * percent / 100] as f64 / 1000.0
    }
}

fn timed<T>(times: &mut Durations, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = work();
    times.0.push(start.elapsed().as_nanos() as u64);
    result
}

/// Ranks every node for an ask, as a scheduler without a cache would.
fn brute_force(cluster: &ClusterCapacity, ranking: &impl NodeRanking, ask: &PodAsk) -> Option<NodeIndex> {
    let prepared = cluster.prepare(ask);
    let ranks = cluster.nodes().filter_map(|(node, capacity)| {
        Some((ranking.rank(capacity, cluster.classes(), &prepared)?, std::cmp::Reverse(node)))
    });
    ranks.max().map(|(_, std::cmp::Reverse(node))| node)
}

fn row(what: &str, mut times: Durations, mut uncached: Durations) {
    let mean = times.0.iter().sum::<u64>() as f64 / times.0.len() as f64 / 1000.0;
    let (median, late, uncached) = (times.at(50), times.at(99), uncached.at(50));
    println!(
        "| {what} | {median:.1} µs | {mean:.1} µs | {late:.1} µs | {uncached:.0} µs | {:.0} x |",
        uncached / median
    );
}

/// Durations every decision of one run of the bundled trace. Every fiftieth is made without the cache as well, and both must
/// agree.
fn trace_decisions() -> f64 {
    let read = |name: &str| {
        let file = format!("{}/../../traces/openb/openb_{name}.csv", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(file).expect("the bundled trace is readable")
    };
    let nodes = trace::read_nodes(&read("node_list_gpu_node")).unwrap();
    let pods = trace::read_pods(&read("pod_list_default")).unwrap();
    let capacity = trace::total_cores(&nodes);
    let asks: Vec<PodAsk> = pods.iter().map(|pod| pod.to_ask()).collect();
    let mut cluster = ClusterCapacity::new(nodes.iter().map(|node| node.to_node()));
    let mut ranking = Fragmentation::new();
    let mut cache = RankCache::default();
    let (mut times, mut uncached) = (Durations(Vec::new()), Durations(Vec::new()));
    let mut total = 0.0;
    for (count, pod) in arrivals(&pods, capacity, Inflation::default(), 1).unwrap().into_iter().enumerate() {
        let ask = &asks[pod];
        if count % 50 == 0 {
            let slow = timed(&mut uncached, || brute_force(&cluster, &ranking, ask));
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
    row("1,213 nodes, the trace as it comes", times, uncached);
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

/// Returns a pod of one of forty kinds: shares of many sizes, whole GPUs, several GPUs.
fn random_ask(random: &mut SplitMix64) -> PodAsk {
    let kind = random.below(40) as u64;
    let (count, whole) = match kind {
        0..32 => (1, false),
        32..36 => (1, true),
        _ => (1 << (kind - 35), true),
    };
    let share = ShareAsk {
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
        want: WantedGpus { count: count.min(8), share },
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

/// The usage of a placed pod, to be released later.
type PlacedPod = (NodeIndex, Vec<(usize, GpuAllocation)>, HostUsage);

/// Durations decisions on 5,000 nodes of 8 GPUs with half of all compute guaranteed, while pods come and go. Every four
/// hundredth is made without the cache as well, and both must agree.
fn large_cluster() {
    let mut cluster = ClusterCapacity::new(large_nodes());
    let mut ranking = Fragmentation::new();
    let mut cache = RankCache::default();
    let mut random = SplitMix64::new(1);
    let mut living: Vec<PlacedPod> = Vec::new();
    let (mut times, mut uncached) = (Durations(Vec::new()), Durations(Vec::new()));
    let (mut guaranteed, half) = (0, 5000 * 8 * u64::from(Cores::WHOLE.as_millipercent()) / 2);
    let mut rounds = 0;
    while rounds < 4000 {
        let full = guaranteed >= half;
        if full {
            let (node, usage, host) = living.swap_remove(random.below(living.len()));
            guaranteed -= usage.iter().map(|(_, usage)| usage.cores).sum::<u64>();
            cluster.remove_usage(node, &usage, host);
            rounds += 1;
        }
        let ask = random_ask(&mut random);
        let mut untimed = Durations(Vec::new());
        let decision = timed(if full { &mut times } else { &mut untimed }, || {
            ranking.arrived(&ask, &cluster);
            cache.best(&cluster, &ask, &ranking)
        });
        if full && rounds % 400 == 0 {
            let slow = timed(&mut uncached, || brute_force(&cluster, &ranking, &ask));
            assert_eq!(slow, decision.as_ref().map(|decision| decision.node));
        }
        let decision = decision.expect("half of the cluster is free");
        let (usage, host) = (decision.placement.usage_by_gpu(&ask.asks), HostUsage::new(ask.cpu, ask.memory));
        guaranteed += usage.iter().map(|(_, usage)| usage.cores).sum::<u64>();
        cluster.add_usage(decision.node, &usage, host);
        living.push((decision.node, usage, host));
    }
    row("5,000 nodes x 8 GPUs, half full, 40 kinds of pods coming and going", times, uncached);
}

/// Returns a grant of 20 GiB and 20 % on one GPU: the `pod`th of 100,000, of which no GPU has more than three.
fn some_grant(pod: usize) -> PodGrant {
    let (node, gpu) = (pod % 5000, pod / 5000 % 8);
    let share = Share {
        gpu: format!("GPU-{node:04}-{gpu}").into(),
        memory_bytes: Some(Bytes(20 << 30)),
        cores: Cores::percent(20),
        ceiling: None,
        whole: false,
    };
    PodGrant {
        node: format!("node-{node:04}").into(),
        grants: vec![Grant { container: "main".into(), init: false, shares: vec![share] }],
    }
}

fn ledger_of_100_000_grants() -> Ledger {
    let mut ledger = Ledger::new(large_nodes());
    for pod in 0..100_000 {
        ledger.confirm(id(pod), some_grant(pod), HostUsage::default());
    }
    // Deciding for forty kinds of pods fills the rank cache.
    let policies = PolicyEngine::new(PlacementPolicy::Fragmentation);
    let mut random = SplitMix64::new(1);
    for _ in 0..400 {
        ledger.best(&policies, &random_ask(&mut random));
    }
    assert_eq!(ledger.all_held().count(), 100_000);
    ledger
}

/// Returns the resident memory that a ledger of 5,000 nodes of 8 GPUs with 100,000 grants adds to this process.
fn ledger_memory_mib() -> u64 {
    let before = resident_mib();
    let ledger = ledger_of_100_000_grants();
    let after = resident_mib();
    drop(ledger);
    after - before
}

/// Operations timed together, because one of them is too short for the clock.
const BATCH_SIZE: usize = 64;

/// Durations `operation` in batches and prints a row of nanoseconds for one of them.
fn operation_row(what: &str, mut operation: impl FnMut(usize)) {
    let mut times = Durations(Vec::new());
    for batch in 0..500 {
        timed(&mut times, || (0..BATCH_SIZE).for_each(|at| operation(batch * BATCH_SIZE + at)));
    }
    let each = |nanos: f64| nanos * 1000.0 / BATCH_SIZE as f64;
    let mean = times.0.iter().sum::<u64>() as f64 / times.0.len() as f64 / 1000.0;
    let (median, late) = (times.at(50), times.at(99));
    println!("| {what} | {:.0} ns | {:.0} ns | {:.0} ns |", each(median), each(mean), each(late));
}

fn large_ledger() {
    let mut ledger = ledger_of_100_000_grants();
    let host = HostUsage::default();
    operation_row("take a snapshot and drop it", |_| drop(std::hint::black_box(ledger.snapshot())));
    // Pods beyond the first 100,000 request another share of a GPU that has two or three.
    operation_row("confirm and release a fact", |at| {
        ledger.confirm(id(100_000 + at), some_grant(at), host);
        ledger.release(&id(100_000 + at).uid);
    });
    operation_row("confirm and release a fact, each after a snapshot that is kept meanwhile", |at| {
        let _snapshot = ledger.snapshot();
        ledger.confirm(id(100_000 + at), some_grant(at), host);
        ledger.release(&id(100_000 + at).uid);
    });
    operation_row("statement: confirm a grant, rolled back", |at| {
        ledger.statement().confirm(id(100_000 + at), some_grant(at), host);
    });
    operation_row("statement: release and confirm ten pods, rolled back", |at| {
        let mut statement = ledger.statement();
        for pod in at..at + 10 {
            statement.release(&id(pod).uid);
            statement.confirm(id(100_000 + pod), some_grant(pod), host);
        }
    });
    operation_row("try_confirm and release a grant that fits", |at| {
        let confirmed = ledger.try_confirm(id(100_000 + at), some_grant(at), host);
        assert_eq!(confirmed, Ok(None));
        ledger.release(&id(100_000 + at).uid);
    });
    operation_row("try_confirm a grant that is refused", |at| {
        let mut grant = some_grant(at);
        grant.grants[0].shares[0].memory_bytes = Some(Bytes(60 << 30));
        assert!(ledger.try_confirm(id(100_000 + at), grant, host).is_err());
    });
    let policies = PolicyEngine::new(PlacementPolicy::Fragmentation);
    let mut random = SplitMix64::new(1);
    let asks: Vec<PodAsk> = (0..40).map(|_| random_ask(&mut random)).collect();
    operation_row("statement: place a pod of forty kinds, rolled back", |at| {
        let placed = ledger.statement().place(id(200_000), &asks[at % 40], &policies, LedgerTime(1));
        std::hint::black_box(placed.is_ok());
    });
    let mut times = Durations(Vec::new());
    for _ in 0..5 {
        timed(&mut times, || assert_eq!(ledger.audit(), []));
    }
    println!("| audit of the whole ledger, for comparison | {:.0} ms | | |", times.at(50) / 1000.0);
}

fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc/self/status is readable");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("the status has VmRSS");
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}
