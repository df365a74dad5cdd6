//! The Kubernetes API server, as Partage's daemons use it. Nothing here is tied to one node, and nothing decides.
//!
//! ```text
//!  client        connection, timeouts, time of the last contact      node_writer   status, labels, annotations of a node
//!  watch, cache  watch any resource, keep a small view of it         bindings      bind a pod, with its grant, to a node
//!  pods, nodes   the views that Partage keeps                        lease         leader election between replicas
//!  events        events about any object, deduplicated               token_review  the user of a token and its permissions
//! ```
//!
//! A daemon must survive every absence of the API server: what it reads comes from a cache that a watch fills, and what
//! it writes is retried until it is written or no longer wanted.
#![forbid(unsafe_code)]

mod backoff;
mod bindings;
mod cache;
mod client;
mod error;
mod events;
mod lease;
mod node_writer;
mod nodes;
mod pods;
mod token_review;
mod watch;

pub use backoff::RetryBackoff;
pub use bindings::{BindConflict, BindOutcome, BindingState, PodBinding};
pub use cache::{ObjectKey, WatchCache};
pub use client::{ApiClient, ClientOptions};
pub use error::ClusterError;
pub use events::{Recorder, Severity, node_reference, pod_reference};
pub use lease::{ElectionTiming, LeaderElection, LeaderRole, LeaderTerm, LeaseName, TimingError};
pub use node_writer::{NodePatch, NodeWriter};
pub use nodes::{NodeCache, NodeProjection, NodeView};
pub use pods::{AnnotateOutcome, PodCache, PodPhase, PodProjection, PodView};
pub use watch::{Projection, WatchSelector, watch};

pub use k8s_openapi::api::authentication::v1::UserInfo;
pub use k8s_openapi::api::core::v1::ObjectReference;
