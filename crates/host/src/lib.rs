//! This machine: its NVIDIA driver and GPUs, the processes that run on it, and what confines a process to its share:
//! mount namespaces, cgroups and the device filter.
//!
//! The crate depends on neither Kubernetes nor any policy.

pub mod atomic_file;
pub mod cdi;
pub mod cgroup;
pub mod confine;
pub mod container_of_pid;
pub mod context_size;
pub mod driver;
pub mod gpus;
pub mod host_root;
pub mod library_store;
pub mod process;
pub mod process_setup;
pub mod selinux;
pub mod share_processes;
pub mod simulated_driver;
