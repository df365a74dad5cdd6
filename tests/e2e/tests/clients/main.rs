//! Programs nobody here wrote, on the simulated driver, unmodified, judged by what they print: `nvidia-smi` of both
//! drivers, nvidia-ml-py, gpustat, nvitop, nvtop, cuda-python and numba.
//!
//! What they print is compared with the node as it was made ([`partage_sim_node::node::NodeConfig`]) and with what a workload
//! of ours does on it. Every test has a node of its own, and runs there and in a container without
//! a limit. In `contained` they are in a container with a limit and a neighbour.
// One `json!` has everything that is true of a GPU.
#![recursion_limit = "512"]
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod contained;
mod container;
mod cuda;
mod nvidia_smi;
mod nvml;
mod nvtop;
mod screen;
mod shim_file;
mod stage;
