//! Compares the declarations with those that other projects generated from NVIDIA's headers: cudarc for CUDA,
//! nvml-wrapper-sys for NVML. Declarations that cannot be compared are listed with the reason.
#![allow(unsafe_code, non_snake_case, non_camel_case_types, clippy::unwrap_used)]

#[macro_use]
mod layout;
mod cuda;
mod nvml;
mod shape;
