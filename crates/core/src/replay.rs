//! Replays a trace of pods against the allocator. Pods arrive one by one and never leave; the result is the
//! fraction of all GPU compute that is allocated in the end.
//!
//! The protocol is that of the published comparisons: inflate the list of pods until they request more GPU than the
//! cluster has, shuffle, place each pod that fits anywhere, skip the others, without lookahead. Every skipped pod is
//! checked against every node, so no policy can gain by refusing a pod that fits.

mod baselines;
mod policy;
pub mod trace;

pub use policy::ReplayPolicy;

use crate::place::{ClusterCapacity, HostUsage, RankCache};
use trace::{TraceNode, TracePod};

/// The SplitMix64 pseudorandom generator: the same seed gives the same run on every machine.
#[derive(Clone, Copy, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// Creates a generator from a seed.
    pub fn new(seed: u64) -> SplitMix64 {
        SplitMix64(seed)
    }

    /// Returns the next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a uniformly distributed number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next_u64()) * n as u128) >> 64) as usize
    }
}

/// Total compute that the arriving pods request, in thousandths of the cluster's capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inflation(pub u64);

impl Default for Inflation {
    fn default() -> Self {
        Inflation(1300)
    }
}

/// Maximum number of pods in one run.
const MAX_ARRIVALS: usize = 5_000_000;

/// Why a list of pods cannot be brought to the requested load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The pods request so little GPU that `MAX_ARRIVALS` of them do not reach the load.
    #[error(
        "the pods request so little GPU that more than {MAX_ARRIVALS} of them would have to arrive: lower --inflate, or add pods that request GPUs"
    )]
    TooLittleDemand,
    /// Every pod alone requests more than the load allows.
    #[error(
        "no pod can arrive at this load: every pod requests more GPU than the load allows; raise --inflate"
    )]
    NoArrivals,
}

/// Returns the pods of one run in order of arrival, as indexes into `pods`.
pub fn arrivals(
    pods: &[TracePod],
    capacity_cores: u64,
    inflation: Inflation,
    seed: u64,
) -> Result<Vec<usize>, LoadError> {
    let mut random = SplitMix64::new(seed);
    let target = capacity_cores.saturating_mul(inflation.0) / 1000;
    let mut order: Vec<usize> = (0..pods.len()).collect();
    let mut requested: u64 = pods.iter().map(TracePod::total_cores).sum();
    // A list that requests no GPU at all would never reach the target: it arrives unchanged.
    while requested < target && requested > 0 {
        if order.len() >= MAX_ARRIVALS {
            return Err(LoadError::TooLittleDemand);
        }
        let pod = random.below(pods.len());
        requested += pods[pod].total_cores();
        order.push(pod);
    }
    while requested > target && !order.is_empty() {
        let removed = order.swap_remove(random.below(order.len()));
        requested -= pods[removed].total_cores();
    }
    if order.is_empty() {
        return Err(LoadError::NoArrivals);
    }
    for last in (1..order.len()).rev() {
        order.swap(last, random.below(last + 1));
    }
    Ok(order)
}

/// The result of one run.
#[derive(Clone, Debug, Default)]
pub struct ReplayOutcome {
    /// Allocated compute, in thousandths of a percent of one GPU.
    pub allocated_cores: u64,
    /// Compute of the cluster, in thousandths of a percent of one GPU.
    pub capacity_cores: u64,
    /// Number of pods placed.
    pub placed: u64,
    /// Number of pods that fit no node.
    pub skipped: u64,
    /// Nanoseconds spent deciding, by the caller's clock.
    pub nanos: u64,
    /// Requested and allocated compute at even steps of the run, in thousandths of a percent of one GPU.
    pub curve: Vec<(u64, u64)>,
}

impl ReplayOutcome {
    /// Returns the allocated compute in percent of the cluster's capacity.
    pub fn allocated_percent(&self) -> f64 {
        if self.capacity_cores == 0 {
            return 0.0;
        }
        self.allocated_cores as f64 * 100.0 / self.capacity_cores as f64
    }
}

/// A pod that fits a node was not placed, which is a bug in the policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("pod {pod} fits node {node} but was not placed: this is a bug in the policy \"{policy}\"")]
pub struct MissedPlacement {
    /// The name of the pod.
    pub pod: String,
    /// The name of a node that the pod fits.
    pub node: String,
    /// The name of the policy.
    pub policy: &'static str,
}

/// Number of points in the curve of one run.
const CURVE_POINTS: usize = 200;

/// Runs one seed. `clock` returns nanoseconds; `progress` is called with the number of pods that have arrived.
pub fn run(
    nodes: &[TraceNode],
    pods: &[TracePod],
    order: &[usize],
    policy: ReplayPolicy,
    seed: u64,
    clock: &dyn Fn() -> u64,
    progress: &mut dyn FnMut(usize),
) -> Result<ReplayOutcome, MissedPlacement> {
    let mut cluster = ClusterCapacity::new(nodes.iter().map(TraceNode::to_node));
    let mut cache = RankCache::default();
    let mut policy_state = policy.start(pods, &cluster, seed);
    let mut outcome = ReplayOutcome { capacity_cores: trace::total_cores(nodes), ..ReplayOutcome::default() };
    let asks: Vec<_> = pods.iter().map(TracePod::to_ask).collect();
    let step = order.len().div_ceil(CURVE_POINTS).max(1);
    let mut arrived = 0;
    for (count, &pod) in order.iter().enumerate() {
        let ask = &asks[pod];
        arrived += pods[pod].total_cores();
        let start = clock();
        let decision = policy_state.decide(&cluster, ask, &mut cache);
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
                    return Err(MissedPlacement {
                        pod: pods[pod].name.clone(),
                        node: cluster.node_capacity(node).node.name.to_string(),
                        policy: policy.name(),
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
