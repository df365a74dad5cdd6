//! The ask of a pod, independent of its dialect.

use super::{Bytes, ContainerName, Cores, MilliCpu};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Maximum number of GPUs per container: the region that holds a container to its limits has this many entries.
///
/// Asks for more are refused where they are read, so that no container is granted what cannot be enforced. A node may
/// have more GPUs ([`MAX_GPUS_PER_NODE`](super::MAX_GPUS_PER_NODE)).
pub const MAX_GPUS_PER_CONTAINER: u32 = 16;

/// The GPUs that one container requests.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ask {
    /// The name of the container.
    pub container: ContainerName,
    /// When the container runs.
    pub role: ContainerRole,
    /// The GPUs that it requests.
    pub want: WantedGpus,
}

/// When a container runs. This determines which containers hold their shares at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ContainerRole {
    /// An init container: runs to completion before the next container starts.
    Init,
    /// A restartable init container: keeps running while the following containers run.
    Sidecar,
    /// An app container, which runs after all init containers.
    App,
}

/// A number of equal shares, each on a different GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WantedGpus {
    /// Number of different GPUs.
    pub count: u32,
    /// The share of each GPU.
    pub share: ShareAsk,
}

/// The requested share of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ShareAsk {
    /// Memory requested of the GPU.
    pub memory: MemoryAsk,
    /// Compute requested of the GPU.
    pub cores: CoresAsk,
    /// Whether the GPU must be exclusive.
    pub whole: bool,
    /// Upper limit of compute while the GPU is otherwise idle; `None` for no limit.
    pub ceiling: Option<Cores>,
}

/// Memory requested of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryAsk {
    /// No limit and no accounting; never on a GPU with memory-limited shares.
    Unlimited,
    /// All memory of the GPU.
    All,
    /// An exact amount of memory.
    Exactly(Bytes),
    /// A percentage of the GPU's memory.
    Percent(u32),
    /// A limit on a whole GPU: this amount, or the GPU's memory if that is less.
    AtMost(Bytes),
}

/// Compute requested of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CoresAsk {
    /// No guarantee and no limit.
    Uncounted,
    /// An exact amount of compute.
    Exactly(Cores),
    /// A number of slots of a GPU. If it exceeds the slots of one GPU, they come from several GPUs.
    Slots(u32),
}

/// The ask of a whole pod. Equal asks are interchangeable to the allocator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct PodAsk {
    /// The containers that request GPUs, in the order of the spec: init containers first.
    pub asks: Vec<Ask>,
    /// Constraints for all of them.
    pub constraints: Constraints,
    /// Requested CPU; ignored on nodes whose CPU is unknown.
    pub cpu: MilliCpu,
    /// Requested host memory; ignored on nodes whose memory is unknown.
    pub memory: Bytes,
    /// Whether the containers may allocate more GPU memory than their limits, in host memory. It does not change their use of
    /// a GPU, so the allocator ignores it. A node may refuse it.
    pub oversubscribe: bool,
    /// How the containers take turns on shared GPUs. It does not change how much they get, so the allocator ignores it.
    pub turns: TurnPreferences,
}

/// Highest [`TurnPreferences::priority`].
pub const MAX_PRIORITY: u32 = 10;

/// How a container takes its turns on GPUs that it shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TurnPreferences {
    /// Whether its launches start soon even beside long kernels of others, at some cost in throughput for all.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub low_latency: bool,
    /// Priority, 0 to [`MAX_PRIORITY`]: of containers that want the same turn, the higher goes first within its
    /// guarantee, and gets idle time first.
    #[serde(skip_serializing_if = "is_zero")]
    pub priority: u32,
}

impl TurnPreferences {
    /// Returns whether nothing is preferred.
    pub fn is_default(&self) -> bool {
        *self == TurnPreferences::default()
    }
}

// The signature is what serde requires.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Whether shares on a machine may allocate more GPU memory than their limits, in host memory. A setting of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Oversubscription {
    /// Allowed for shares that request it.
    Allowed,
    /// Requests for it are refused.
    Refused,
}

/// Constraints on the GPUs of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Constraints {
    /// Allowed and denied GPU models.
    pub models: Selector,
    /// Allowed and denied GPUs by UUID.
    pub uuids: Selector,
    /// Whether the containers share one GPU.
    pub colocation: Colocation,
    /// The placement policy, if the pod overrides the default.
    pub policy: Option<PlacementPolicy>,
}

/// An allow list and a deny list. An empty allow list allows everything. The deny list takes precedence.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Selector {
    /// The allow list; empty allows everything.
    pub only: Vec<String>,
    /// The deny list, which takes precedence.
    pub never: Vec<String>,
}

impl Selector {
    /// Returns whether nothing is excluded.
    pub fn is_open(&self) -> bool {
        self.only.is_empty() && self.never.is_empty()
    }

    /// Returns whether a GPU model is allowed. A listed word matches if it occurs in the model name, ignoring case. A word
    /// that starts with `=` matches only the exact name.
    pub fn admits_model(&self, model: &str) -> bool {
        let lower = model.to_ascii_lowercase();
        self.admits(|word| match word.strip_prefix('=') {
            Some(exact) => exact.eq_ignore_ascii_case(model),
            None => lower.contains(&word.to_ascii_lowercase()),
        })
    }

    /// Returns whether a GPU is allowed by its exact UUID.
    pub fn admits_uuid(&self, uuid: &str) -> bool {
        self.admits(|word| word == uuid)
    }

    fn admits(&self, named_by: impl Fn(&str) -> bool) -> bool {
        let listed = |list: &[String]| list.iter().any(|word| named_by(word));
        (self.only.is_empty() || listed(&self.only)) && !listed(&self.never)
    }
}

/// Whether the containers of a pod share one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Colocation {
    /// On any GPUs of the node.
    #[default]
    Anywhere,
    /// On one GPU if they fit, else on any GPUs.
    Preferred,
    /// On one GPU; otherwise the pod does not fit.
    Required,
}

/// How the allocator chooses among placements that fit. [`crate::place::defaults`] has the default of each component.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PlacementPolicy {
    /// Minimizes capacity that no likely ask can use.
    Fragmentation,
    /// Fills the fullest GPU first.
    Binpack,
    /// Fills the emptiest GPU first.
    Spread,
    /// Prefers GPUs with the best links, then the fullest.
    Topology,
}

impl PlacementPolicy {
    /// All policies, the default of a cluster first.
    pub const ALL: [PlacementPolicy; 4] = [
        PlacementPolicy::Fragmentation,
        PlacementPolicy::Binpack,
        PlacementPolicy::Spread,
        PlacementPolicy::Topology,
    ];

    /// Returns the name on command lines and in annotations.
    pub fn name(self) -> &'static str {
        match self {
            PlacementPolicy::Fragmentation => "fragmentation",
            PlacementPolicy::Binpack => "binpack",
            PlacementPolicy::Spread => "spread",
            PlacementPolicy::Topology => "topology",
        }
    }
}

impl fmt::Display for PlacementPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that belongs to no policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown policy \"{0}\": use fragmentation, binpack, spread or topology")]
pub struct UnknownPolicy(String);

impl FromStr for PlacementPolicy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        PlacementPolicy::ALL.into_iter().find(|p| p.name() == text).ok_or_else(|| UnknownPolicy(text.into()))
    }
}
