//! This machine: its NVIDIA driver and GPUs, the processes that run on it, and what binds a process to a share: mount
//! namespaces, cgroups, the device gate.
//!
//! Knows neither Kubernetes nor who may have what.

pub mod binding;
pub mod cdi;
pub mod cgroup;
pub mod context;
pub mod driver;
pub mod files;
pub mod gpus;
pub mod library_store;
pub mod members;
pub mod process;
pub mod process_setup;
pub mod root;
pub mod selinux;
pub mod simulated_driver;
