//! The declarations agree with those that others made from NVIDIA's headers: cudarc for CUDA,
//! nvml-wrapper-sys for NVML. What cannot be compared is named, with the reason.
#![allow(unsafe_code, non_snake_case, non_camel_case_types, clippy::unwrap_used)]

#[macro_use]
mod layout;
mod cuda;
mod nvml;
mod shape;
