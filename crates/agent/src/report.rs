//! The state of the node at one moment, from which metrics are rendered.

use crate::state::NodeState;
use partage_core::dialect::Dialect;
use partage_core::model::{ContainerName, GpuUuid, NodeName, PodId, Share};
use partage_enforce::monitor::ObservedUsage;
use partage_enforce::report::GpuStatus;
use partage_region::GpuUsage;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The state of the node.
#[derive(Clone, Debug)]
pub(crate) struct NodeReport {
    /// When it was collected, on the monotonic clock.
    pub(crate) at: u64,
    /// The name of the node in the cluster.
    pub(crate) node: NodeName,
    /// The version of the driver; empty while the GPUs are not known.
    pub(crate) driver: String,
    /// Whether the driver is simulated.
    pub(crate) simulated: bool,
    /// The GPUs in the driver's order.
    pub(crate) gpus: Vec<GpuStatus>,
    /// Containers that hold shares.
    pub(crate) containers: Vec<ContainerReport>,
    /// Counters since the start of the agent.
    pub(crate) counts: AgentCounters,
}

impl NodeReport {
    /// Creates the report of a node whose GPUs are not known yet.
    pub(crate) fn empty(node: &NodeName) -> NodeReport {
        NodeReport {
            at: partage_region::clock::monotonic_ns(),
            node: node.clone(),
            driver: String::new(),
            simulated: false,
            gpus: Vec::new(),
            containers: Vec::new(),
            counts: AgentCounters::default(),
        }
    }

    /// Collects the report of a node whose GPUs are known.
    pub(crate) fn collect(state: &NodeState) -> NodeReport {
        let observed = state.monitor_report().clone();
        let live: Vec<_> = {
            let live = state.adapters.regions.live();
            live.iter()
                .map(|(key, live)| {
                    (
                        key.clone(),
                        live.uid.clone(),
                        live.container.clone(),
                        live.shares.clone(),
                        live.region().cloned(),
                    )
                })
                .collect()
        };
        // Regions are read before the containers are locked, so that no container start waits for that.
        let live: Vec<_> = live
            .into_iter()
            .map(|(key, uid, container, shares, region)| {
                let usage = region.and_then(|region| region.snapshot().ok());
                (key, uid, container, shares, usage)
            })
            .collect();
        let mismatches = state.check_consistency() as u64;
        let suspected = state.suspected();
        let node_containers = state.containers();
        let grants = node_containers.grants();
        // An init container's share is used before the other containers start, and not in addition to theirs.
        let granted = || grants.shares().filter(|(_, grant, _)| !grant.init).map(|(_, _, share)| share);
        let gpus = GpuStatus::of_node(grants.node(), &observed, granted);
        let containers = live.into_iter().filter_map(|(key, uid, container, shares, usage)| {
            let record = grants.record(&uid)?;
            let used = |at: usize| usage.as_ref().and_then(|usage| usage.gpus.get(at)).cloned();
            Some(ContainerReport {
                pod: record.pod.clone(),
                dialect: record.dialect(&container),
                container,
                shares: shares.into_iter().enumerate().map(|(at, share)| (share, used(at))).collect(),
                observed: observed.usage.get(&key).cloned().unwrap_or_default(),
                bypass_suspected: suspected.contains(&key, Instant::now()),
            })
        });
        let mut counts = state.counts().clone();
        counts.mismatches = mismatches;
        NodeReport {
            at: partage_region::clock::monotonic_ns(),
            node: grants.node().name.clone(),
            driver: state.adapters.gpus.driver_version().into(),
            simulated: state.machine.simulated.is_some(),
            gpus,
            containers: containers.collect(),
            counts,
        }
    }

    /// Returns the position of a GPU in the driver's order.
    pub(crate) fn index(&self, uuid: &GpuUuid) -> Option<usize> {
        self.gpus.iter().position(|of| of.gpu.uuid == *uuid)
    }

    /// Returns the memory limit of a share; all memory of its GPU if it has none.
    pub(crate) fn memory_of(&self, share: &Share) -> Option<u64> {
        let all = || self.gpus.iter().find(|of| of.gpu.uuid == share.gpu).map(|of| of.gpu.memory_bytes);
        share.memory_bytes.or_else(all).map(|bytes| bytes.0)
    }

    /// Limits an amount from a region to the memory of the GPU: a tenant can write any number there, and must not falsify sums.
    pub(crate) fn bounded(&self, share: &Share, bytes: u64) -> u64 {
        let gpu = self.gpus.iter().find(|of| of.gpu.uuid == share.gpu);
        gpu.map_or(bytes, |of| bytes.min(of.gpu.memory_bytes.0))
    }
}

/// A container with a grant, and its usage.
#[derive(Clone, Debug)]
pub(crate) struct ContainerReport {
    /// The UID, namespace and name of the container's pod.
    pub(crate) pod: PodId,
    /// The container's name in the pod.
    pub(crate) container: ContainerName,
    /// The dialect that it asked in.
    pub(crate) dialect: Dialect,
    /// Its shares, each with the usage in its region; absent if the region cannot be read.
    pub(crate) shares: Vec<(Share, Option<GpuUsage>)>,
    /// What the driver reports of its processes, by GPU; empty before the first poll.
    pub(crate) observed: BTreeMap<GpuUuid, ObservedUsage>,
    /// Whether the audit found a bypass of its limits lately ([`crate::monitor::suspected_bypasses::SUSPICION_HOLD`]).
    pub(crate) bypass_suspected: bool,
}

impl ContainerReport {
    /// Returns what the driver reports for the GPU of a share. The driver reports GPUs and not shares: of several shares of one
    /// GPU, the first one gets it.
    pub(crate) fn observed_at(&self, share: usize) -> Option<&ObservedUsage> {
        let gpu = &self.shares.get(share)?.0.gpu;
        let is_reported = self.shares.iter().take(share).any(|(before, _)| before.gpu == *gpu);
        if is_reported { None } else { self.observed.get(gpu) }
    }
}

/// Counters since the start of the agent.
#[derive(Clone, Debug, Default)]
pub(crate) struct AgentCounters {
    /// Durations of successful `Allocate` calls.
    pub(crate) allocations: DurationHistogram,
    /// Durations of successful `PreStartContainer` calls.
    pub(crate) starts: DurationHistogram,
    /// Number of container starts that were refused.
    pub(crate) refused: u64,
    /// Number of bypasses that were reported.
    pub(crate) bypasses: u64,
    /// Number of state mismatches that exist now.
    pub(crate) mismatches: u64,
    /// Number of records that could not be read and were quarantined.
    pub(crate) quarantined: u64,
}

/// A histogram of durations.
#[derive(Clone, Debug, Default)]
pub(crate) struct DurationHistogram {
    /// Number of durations up to each of [`DurationHistogram::BOUNDS`] and above the one before; the last number is of those above
    /// all bounds.
    pub(crate) counts: [u64; 10],
    /// The sum of all durations in nanoseconds.
    pub(crate) nanos: u64,
}

impl DurationHistogram {
    /// Upper bounds of the buckets in milliseconds.
    pub(crate) const BOUNDS: [u64; 9] = [1, 2, 5, 10, 20, 50, 100, 500, 2000];

    /// Adds a duration to its bucket and to the sum, which saturates.
    pub(crate) fn add(&mut self, duration: Duration) {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let bound = |bound: &u64| nanos <= bound * 1_000_000;
        let at = DurationHistogram::BOUNDS.iter().position(bound).unwrap_or(DurationHistogram::BOUNDS.len());
        self.counts[at] += 1;
        self.nanos = self.nanos.saturating_add(nanos);
    }
}
