//! What a pod wants, whatever dialect it was written in.

use super::{Bytes, ContainerName, Cores, MilliCpu};
use serde::Deserialize;
use std::fmt;
use std::str::FromStr;

/// Maximum number of GPUs per container: the region that holds a container to its limits has this many entries.
///
/// Asks for more are refused where they are read, so that no container is granted what cannot be enforced. A node may
/// have more GPUs ([`MAX_GPUS_PER_NODE`](super::MAX_GPUS_PER_NODE)).
pub const MAX_GPUS_PER_CONTAINER: u32 = 16;

/// What one container wants.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ask {
    /// The container.
    pub container: ContainerName,
    /// When it runs.
    pub role: ContainerRole,
    /// What it wants.
    pub want: WantedGpus,
}

/// When a container runs, which decides what it may share room with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ContainerRole {
    /// An init container: runs to its end before the next one starts.
    Init,
    /// A restartable init container: runs from its turn on.
    Sidecar,
    /// An ordinary container.
    App,
}

/// `count` equal parts, each on a GPU of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WantedGpus {
    /// How many GPUs.
    pub count: u32,
    /// What is wanted of each.
    pub part: ShareAsk,
}

/// A part of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ShareAsk {
    /// Memory.
    pub memory: MemoryAsk,
    /// Compute.
    pub cores: CoresAsk,
    /// Nobody else on this GPU.
    pub whole: bool,
    /// How far the compute may stretch while the GPU is otherwise idle.
    pub ceiling: Option<Cores>,
}

/// Memory wanted of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryAsk {
    /// No limit, none counted; never beside memory-limited shares.
    Unlimited,
    /// All the GPU has.
    All,
    /// So much.
    Exactly(Bytes),
    /// So many percent of what the GPU has.
    Percent(u32),
    /// A limit on a whole GPU: held to at most so much, or to what the GPU has if that is less.
    AtMost(Bytes),
}

/// Compute wanted of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CoresAsk {
    /// Nothing counted, no cap.
    Uncounted,
    /// So much.
    Exactly(Cores),
    /// So many of the slots the node splits a GPU in. More than one GPU has are taken from several.
    Slots(u32),
}

/// What a whole pod wants. Equal asks are interchangeable to the allocator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct PodAsk {
    /// The containers that ask for GPUs, in the order of the spec: init containers first.
    pub asks: Vec<Ask>,
    /// What holds for all of them.
    pub constraints: Constraints,
    /// CPU, counted where the node's is known.
    pub cpu: MilliCpu,
    /// Memory of the host, counted where the node's is known.
    pub memory: Bytes,
    /// Whether its containers may allocate more GPU memory than their limits, on the host. It does not change what they
    /// take of a GPU, so the allocator does not read it; a node may refuse it.
    pub oversubscribe: bool,
}

/// Whether shares of a machine may allocate more GPU memory than their limits, on the host. A setting of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Oversubscription {
    /// They may if they ask for it.
    Allowed,
    /// An ask for it is refused.
    Refused,
}

/// Conditions on the GPUs of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Constraints {
    /// Which models.
    pub models: Selector,
    /// Which GPUs by UUID.
    pub uuids: Selector,
    /// Whether its containers sit on one GPU.
    pub together: Together,
    /// The policy, where the pod overrides the cluster's.
    pub policy: Option<Policy>,
}

/// An allow list and a deny list. An empty allow list allows everything; deny wins.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Selector {
    /// Only these.
    pub only: Vec<String>,
    /// Never these.
    pub never: Vec<String>,
}

impl Selector {
    /// True where nothing is excluded.
    pub fn is_open(&self) -> bool {
        self.only.is_empty() && self.never.is_empty()
    }

    /// Whether a GPU model passes: any listed word occurring in it, in upper or lower case, names it. A word
    /// that starts with `=` names only the model that is called exactly so.
    pub fn admits_model(&self, model: &str) -> bool {
        let lower = model.to_ascii_lowercase();
        self.admits(|word| match word.strip_prefix('=') {
            Some(exact) => exact.eq_ignore_ascii_case(model),
            None => lower.contains(&word.to_ascii_lowercase()),
        })
    }

    /// Whether a GPU passes by its exact UUID.
    pub fn admits_uuid(&self, uuid: &str) -> bool {
        self.admits(|word| word == uuid)
    }

    fn admits(&self, named_by: impl Fn(&str) -> bool) -> bool {
        let listed = |list: &[String]| list.iter().any(|word| named_by(word));
        (self.only.is_empty() || listed(&self.only)) && !listed(&self.never)
    }
}

/// Whether the containers of a pod sit on one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Together {
    /// Anywhere.
    #[default]
    Anywhere,
    /// On one GPU whenever they fit there.
    Preferred,
    /// On one GPU or not at all.
    Required,
}

/// How the allocator chooses among placements that fit. It has no default here: [`crate::place::defaults`] says which
/// component uses which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Policy {
    /// Leave as little capacity as possible that no likely ask can use.
    Fragmentation,
    /// Fill the fullest GPU first.
    Binpack,
    /// Fill the emptiest GPU first.
    Spread,
    /// Prefer GPUs with the best links, then the fullest.
    Topology,
}

impl Policy {
    /// Every policy, the default of a cluster first.
    pub const ALL: [Policy; 4] = [Policy::Fragmentation, Policy::Binpack, Policy::Spread, Policy::Topology];

    /// Its name on command lines and in annotations.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Fragmentation => "fragmentation",
            Policy::Binpack => "binpack",
            Policy::Spread => "spread",
            Policy::Topology => "topology",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A policy name that is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is no policy: use fragmentation, binpack, spread or topology")]
pub struct UnknownPolicy(String);

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        Policy::ALL.into_iter().find(|p| p.name() == text).ok_or_else(|| UnknownPolicy(text.into()))
    }
}
