//! The node engine: enforces the shares of tenants on this machine.
//!
//! The node agent and the workstation daemon are its two front ends. This crate contains what both of them do; what
//! only Kubernetes or only a workstation needs is in the front end. The crate `host` below it accesses this machine and has no
//! policy.
//!
//! | module | holds |
//! |---|---|
//! | [`gpus`] | discovery of the driver and its GPUs, the inventory, fatal errors, which GPUs are withheld |
//! | [`context_sizes`] | how much memory a CUDA context takes, and when that is measured |
//! | [`libraries`] | the libraries that stand in for the driver's, installed once per shim and driver |
//! | [`shares`] | the regions of tenants: prepare, adopt, resize, extend, release; which of them wait for turns |
//! | [`monitor`] | the poll of the driver: health, usage by share, the audit for bypasses |
//! | [`placement_refusal`] | why an ask does not fit, and whether it ever will |
//! | [`refusal`] | a request that is not granted, for exit codes, events and admission messages |
//! | [`records`] | versioned records, which a daemon reads after a restart |
//! | [`report`], [`metrics`] | the state of each GPU, and the metric families that both daemons serve |
//! | [`instance_lock`] | one daemon at a time |
//! | [`error_chain`] | an error with its sources, as text |

pub mod context_sizes;
pub mod error_chain;
pub mod gpus;
pub mod instance_lock;
pub mod libraries;
pub mod metrics;
pub mod monitor;
pub mod placement_refusal;
pub mod records;
pub mod refusal;
pub mod report;
pub mod shares;
