//! The simulated libnvidia-ml: one module per family of NVML functions.
//!
//! Results come from the card's profile, from the activity of the node's processes, and from settings. Before
//! `nvmlInit` every function returns `UNINITIALIZED`. Features that a card lacks or that are not simulated return
//! `NOT_SUPPORTED`.
#![allow(unsafe_code, non_snake_case)]

mod arguments;
mod controls;
mod ecc;
mod entry;
mod events;
mod export_table;
mod field_values;
mod identity;
mod nvlinks;
mod processes;
mod samples;
mod sensors;
mod session;
mod status;
mod system;
mod topology;
mod unsupported;

#[cfg(test)]
mod tests;

use crate::function_table::library;
use partage_driver_api::nvml::*;

/// Implements the traits of all function families.
struct Library;

macro_rules! expand { ($($table:tt)*) => { library! { NvmlError, nvmlReturn_t, $($table)* } }; }
partage_driver_api::nvml_functions!(expand);
