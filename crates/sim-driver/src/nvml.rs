//! libnvidia-ml: NVML's functions, a module to a family or a few.
//!
//! A card answers from its profile, from what the node's processes do, and from what was set on it. Before `nvmlInit`
//! everything is `UNINITIALIZED`; what a card cannot do, and what nobody asks a simulated one for, is `NOT_SUPPORTED`.
#![allow(unsafe_code, non_snake_case)]

mod absent;
mod call;
mod controls;
mod ecc;
mod entry;
mod events;
mod fields;
mod identity;
mod internal;
mod links;
mod processes;
mod reading;
mod samples;
mod session;
mod status;
mod system;
mod topology;

#[cfg(test)]
mod tests;

use crate::table::library;
use partage_driver_api::nvml::*;

/// What the families are implemented for.
struct Library;

macro_rules! expand { ($($table:tt)*) => { library! { NvmlError, nvmlReturn_t, $($table)* } }; }
partage_driver_api::nvml_functions!(expand);
