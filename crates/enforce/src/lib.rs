//! The node engine: holds tenants inside their shares on this machine.
//!
//! The node agent and the workstation daemon are its two front ends. What both of them do is here; what only Kubernetes or only
//! a workstation needs stays in the front end. `host` below it knows this machine and no policy.

pub mod context_sizes;
pub mod error_chain;
pub mod gpus;
pub mod instance_lock;
pub mod metrics;
pub mod placing;
pub mod records;
pub mod refusal;
pub mod report;
