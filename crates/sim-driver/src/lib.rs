//! A simulated NVIDIA driver that programs take for the real one: the functions of `libcuda.so.1` and
//! `libnvidia-ml.so.1`, in one shared object. It has no Rust API.

mod cuda;
mod nvml;
mod table;

use partage_sim_node::{node, profile, state};
