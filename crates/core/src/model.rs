//! The nouns of Partage: gpu, node, ask, share and grant, with the units they are counted in.
//!
//! Amounts are integers. Memory is bytes, compute is thousandths of a percent of one GPU, and nothing here
//! wraps around: arithmetic that could leave its range is checked where it happens.

mod amounts;
mod ask;
mod gpu;
mod grant;
mod names;

pub use amounts::{Bytes, Cores, CoresError, MilliCpu};
pub use ask::{
    Ask, Constraints, ContainerRole, CoresAsk, MAX_GPUS_PER_CONTAINER, MemoryAsk, Oversubscription, PodAsk,
    Policy, Selector, ShareAsk, Together, UnknownPolicy, WantedGpus,
};
pub use gpu::{DEFAULT_SLOTS, Gpu, Link, Links, MAX_GPUS_PER_NODE, MAX_SLOTS, Node, Overcommit, UnknownLink};
pub use grant::{Grant, PodGrant, PodId, Share};
pub use names::{ContainerName, GpuUuid, Namespace, NodeName, PodName, PodUid};
