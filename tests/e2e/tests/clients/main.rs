//! Unmodified third-party programs on the simulated driver: `nvidia-smi` of both drivers, nvidia-ml-py, gpustat,
//! nvitop, nvtop, cuda-python and numba.
//! Their output is compared with the node's configuration ([`partage_sim_node::node::NodeConfig`]) and with the
//! workload that the test runs on it. Every test has a node of its own, and runs there and in a container without a
//! limit. In `in_container` they run in a container with a limit, next to another container.
// One `json!` contains every fact about a GPU.
#![recursion_limit = "512"]
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod client_node;
mod container_limits;
mod cuda_python;
mod nvidia_smi;
mod nvml_python;
mod nvtop;
mod shim_container;
mod shim_file;
mod terminal;
