//! The API server, as a node of Partage needs it: who runs here, what the node says of itself, who may ask.
//!
//! Nothing here decides anything. A daemon must live through every absence of the API server: what is read comes from a
//! cache that is filled by a watch, and what is written is written again until it is there or no longer true.
#![forbid(unsafe_code)]

mod access;
mod connection;
mod error;
mod events;
mod node;
mod pauses;
mod pods;

pub use connection::Cluster;
pub use error::ClusterError;
pub use events::{About, Severity};
pub use node::{NodeView, Publication};
pub use pauses::Pauses;
pub use pods::{Annotated, Phase, PodView, Pods};
