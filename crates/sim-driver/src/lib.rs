//! A simulated NVIDIA driver: the functions of `libcuda.so.1` and `libnvidia-ml.so.1` in one shared object, for
//! unmodified programs. It has no Rust API.

mod cuda;
mod function_table;
mod nvml;

use partage_sim_node::{node, profile, state};
