//! The data model: GPU, node, ask, share and grant, and their units.
//!
//! Amounts are integers: memory in bytes, compute in thousandths of a percent of one GPU. All arithmetic that could
//! overflow is checked.

mod amounts;
mod ask;
mod gpu;
mod grant;
mod names;

pub use amounts::{Bytes, Cores, CoresError, MilliCpu, TotalCores, TotalCoresError};
pub use ask::{
    Ask, Colocation, Constraints, ContainerRole, CoresAsk, MAX_GPUS_PER_CONTAINER, MAX_PRIORITY, MemoryAsk,
    Oversubscription, PlacementPolicy, PodAsk, Selector, ShareAsk, TurnPreferences, UnknownPolicy,
    WantedGpus,
};
pub use gpu::{
    DEFAULT_SLOTS, Gpu, GpuLink, LinkMatrix, LinkMatrixError, MAX_GPUS_PER_NODE, MAX_SLOTS, Node, Overcommit,
    OvercommitError, UnknownLink,
};
pub use grant::{Grant, PodGrant, PodId, Share};
pub use names::{ContainerName, GpuUuid, Namespace, NodeName, PodName, PodUid};
