//! How the node is at one moment: what metrics are made of.

use partage_core::dialect::Dialect;
use partage_core::model::{ContainerName, GpuUuid, NodeName, PodId, Share};
use partage_enforce::monitor::ObservedUsage;
use partage_enforce::report::GpuStatus;
use partage_region::GpuUsage;
use std::collections::BTreeMap;
use std::time::Duration;

/// How the node is.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    /// When, on the monotonic clock.
    pub(crate) at: u64,
    /// The node.
    pub(crate) node: NodeName,
    /// The driver's version.
    pub(crate) driver: String,
    /// Whether the driver is simulated.
    pub(crate) simulated: bool,
    /// Its GPUs in the driver's order.
    pub(crate) gpus: Vec<GpuStatus>,
    /// Containers that hold shares.
    pub(crate) containers: Vec<ContainerReport>,
    /// What the agent counted since it started.
    pub(crate) counts: Counts,
}

impl Report {
    /// The place of a GPU in the driver's order.
    pub(crate) fn index(&self, uuid: &GpuUuid) -> Option<usize> {
        self.gpus.iter().position(|of| of.gpu.uuid == *uuid)
    }

    /// Memory that a share has; everything of its GPU where nothing limits it.
    pub(crate) fn memory_of(&self, share: &Share) -> Option<u64> {
        let all = || self.gpus.iter().find(|of| of.gpu.uuid == share.gpu).map(|of| of.gpu.memory_bytes);
        share.memory_bytes.or_else(all).map(|bytes| bytes.0)
    }

    /// Bytes as a region tells of them, at most those of the GPU: a tenant writes there what it likes, and must not spoil sums.
    pub(crate) fn bounded(&self, share: &Share, bytes: u64) -> u64 {
        let gpu = self.gpus.iter().find(|of| of.gpu.uuid == share.gpu);
        gpu.map_or(bytes, |of| bytes.min(of.gpu.memory_bytes.0))
    }
}

/// One container with a grant.
#[derive(Clone, Debug)]
pub(crate) struct ContainerReport {
    /// Its pod.
    pub(crate) pod: PodId,
    /// The container.
    pub(crate) container: ContainerName,
    /// How it asked.
    pub(crate) dialect: Dialect,
    /// Its shares, each with what the region says; absent where that cannot be read.
    pub(crate) shares: Vec<(Share, Option<GpuUsage>)>,
    /// What the driver says of its processes; empty before the first look.
    pub(crate) seen: BTreeMap<GpuUuid, ObservedUsage>,
    /// Whether the audit found a bypass of its limits lately ([`crate::suspected::SUSPICION_HOLD`]).
    pub(crate) bypass_suspected: bool,
}

impl ContainerReport {
    /// What the driver says of the GPU of a share. It knows of GPUs and not of shares: of several of one GPU, the first has it.
    pub(crate) fn seen_at(&self, share: usize) -> Option<&ObservedUsage> {
        let gpu = &self.shares.get(share)?.0.gpu;
        let told = self.shares.iter().take(share).any(|(before, _)| before.gpu == *gpu);
        if told { None } else { self.seen.get(gpu) }
    }
}

/// What was counted since the agent started.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counts {
    /// Answers to `Allocate`, by how long they took.
    pub(crate) answers: Times,
    /// Containers that were made ready, by how long that took.
    pub(crate) starts: Times,
    /// Containers that were refused.
    pub(crate) refused: u64,
    /// Suspicions that were raised.
    pub(crate) bypasses: u64,
    /// What the ledger's audit finds wrong now.
    pub(crate) mismatches: u64,
    /// Records that could not be read and were put aside.
    pub(crate) quarantined: u64,
}

/// How long something took, every time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Times {
    /// How often it took at most each of [`Times::BOUNDS`], and not at most the one before; the last count is of those above.
    pub(crate) counts: [u64; 10],
    /// All times together, in nanoseconds.
    pub(crate) nanos: u64,
}

impl Times {
    /// Upper bounds, in milliseconds.
    pub(crate) const BOUNDS: [u64; 9] = [1, 2, 5, 10, 20, 50, 100, 500, 2000];

    /// It took so long once more.
    pub(crate) fn note(&mut self, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let bound = |bound: &u64| nanos <= bound * 1_000_000;
        let at = Times::BOUNDS.iter().position(bound).unwrap_or(Times::BOUNDS.len());
        self.counts[at] += 1;
        self.nanos = self.nanos.saturating_add(nanos);
    }
}
