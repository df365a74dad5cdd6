//! Replays a trace against the allocator: pods arrive one by one and stay, and what counts is how much of the
//! GPUs is given away in the end.
//!
//! The protocol is that of the published comparisons: inflate the list of pods until they ask for more GPU than
//! there is, shuffle, place each pod that fits anywhere, skip the others, look nowhere ahead. Every skipped pod
//! is checked against every node, so no policy can gain by refusing.

mod classic;
mod contender;
pub mod trace;

pub use contender::Contender;

use crate::place::{ClusterCapacity, HostUsage, RankCache};
use trace::{TraceNode, TracePod};

/// A small, fast, well-mixed generator (splitmix64): the same seed gives the same run on every machine.
#[derive(Clone, Copy, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// From a seed.
    pub fn new(seed: u64) -> SplitMix64 {
        SplitMix64(seed)
    }

    /// The next 64 bits.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `n`, evenly.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.roll()) * n as u128) >> 64) as usize
    }
}

/// How much compute the arriving pods request in all, in thousandths of what the cluster has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inflation(pub u64);

impl Default for Inflation {
    fn default() -> Self {
        Inflation(1300)
    }
}

/// Pods one run may have.
const MOST_ARRIVALS: usize = 5_000_000;

/// The pods of a list cannot be brought to a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoLoad {
    /// They ask for too little GPU.
    #[error(
        "the pods ask for so little GPU that more than {MOST_ARRIVALS} of them would have to arrive: lower --inflate, or add pods that ask for GPUs"
    )]
    TooLittle,
    /// Nothing is left.
    #[error(
        "no pod is left to arrive at this load: every pod asks for more GPU than the load allows; raise --inflate"
    )]
    Nothing,
}

/// The pods of one run in the order they arrive, as indexes into the list.
pub fn arrivals(
    pods: &[TracePod],
    capacity_cores: u64,
    inflation: Inflation,
    seed: u64,
) -> Result<Vec<usize>, NoLoad> {
    let mut dice = SplitMix64::new(seed);
    let target = capacity_cores.saturating_mul(inflation.0) / 1000;
    let mut order: Vec<usize> = (0..pods.len()).collect();
    let mut asked: u64 = pods.iter().map(TracePod::total_cores).sum();
    // A list that asks for no GPU at all would never reach the target: it arrives as it is.
    while asked < target && asked > 0 {
        if order.len() >= MOST_ARRIVALS {
            return Err(NoLoad::TooLittle);
        }
        let pod = dice.below(pods.len());
        asked += pods[pod].total_cores();
        order.push(pod);
    }
    while asked > target && !order.is_empty() {
        let removed = order.swap_remove(dice.below(order.len()));
        asked -= pods[removed].total_cores();
    }
    if order.is_empty() {
        return Err(NoLoad::Nothing);
    }
    for last in (1..order.len()).rev() {
        order.swap(last, dice.below(last + 1));
    }
    Ok(order)
}

/// What one run came to.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Allocated compute, in thousandths of a percent of one GPU.
    pub allocated_cores: u64,
    /// Compute of the cluster, in thousandths of a percent of one GPU.
    pub capacity_cores: u64,
    /// Pods placed.
    pub placed: u64,
    /// Pods that fitted nowhere.
    pub skipped: u64,
    /// Nanoseconds spent deciding, by the caller's clock.
    pub nanos: u64,
    /// Requested and allocated compute at even steps of the run, in thousandths of a percent of one GPU.
    pub curve: Vec<(u64, u64)>,
}

impl Outcome {
    /// Given away, in percent of the cluster.
    pub fn allocated_percent(&self) -> f64 {
        if self.capacity_cores == 0 {
            return 0.0;
        }
        self.allocated_cores as f64 * 100.0 / self.capacity_cores as f64
    }
}

/// A pod that fitted a node was not placed: the allocator contradicts itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("pod {pod} fits node {node} but was not placed: this is a bug of the policy \"{policy}\"")]
pub struct NotPlaced {
    /// The pod.
    pub pod: String,
    /// A node it fits.
    pub node: String,
    /// The policy.
    pub policy: &'static str,
}

/// Points of the curve of one run.
const CURVE_POINTS: usize = 200;

/// Runs one seed. `clock` tells nanoseconds; `progress` hears how many pods have arrived.
pub fn run(
    nodes: &[TraceNode],
    pods: &[TracePod],
    order: &[usize],
    contender: Contender,
    seed: u64,
    clock: &dyn Fn() -> u64,
    progress: &mut dyn FnMut(usize),
) -> Result<Outcome, NotPlaced> {
    let mut cluster = ClusterCapacity::new(nodes.iter().map(TraceNode::to_node));
    let mut cache = RankCache::default();
    let mut player = contender.player(pods, &cluster, seed);
    let mut outcome = Outcome { capacity_cores: trace::total_cores(nodes), ..Outcome::default() };
    let asks: Vec<_> = pods.iter().map(TracePod::to_ask).collect();
    let (mut arrived, step) = (0, order.len().div_ceil(CURVE_POINTS).max(1));
    for (count, &pod) in order.iter().enumerate() {
        let ask = &asks[pod];
        arrived += pods[pod].total_cores();
        let start = clock();
        let decision = player.decide(&cluster, ask, &mut cache);
        match decision {
            Some(decision) => {
                let usage = decision.placement.usage_by_gpu(&ask.asks);
                cluster.add_usage(decision.node, &usage, HostUsage::new(ask.cpu, ask.memory));
                outcome.nanos += clock().saturating_sub(start);
                outcome.allocated_cores += pods[pod].total_cores();
                outcome.placed += 1;
            }
            None => {
                outcome.nanos += clock().saturating_sub(start);
                outcome.skipped += 1;
                let prepared = cluster.prepare(ask);
                if let Some((node, _)) = cluster.nodes().find(|&(node, _)| cluster.fits(node, &prepared)) {
                    return Err(NotPlaced {
                        pod: pods[pod].name.clone(),
                        node: cluster.node_capacity(node).node.name.to_string(),
                        policy: contender.name(),
                    });
                }
            }
        }
        if count % step == 0 || count + 1 == order.len() {
            outcome.curve.push((arrived, outcome.allocated_cores));
            progress(count + 1);
        }
    }
    Ok(outcome)
}
