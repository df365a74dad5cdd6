//! The simulated libcuda: one module per family of CUDA driver functions.
//!
//! Objects that a program holds (contexts, streams, events, modules) are local to its process. State shared between
//! processes is in [`state`](crate::state).
#![allow(unsafe_code, non_snake_case)]

mod arrays;
mod capture;
mod context;
mod copies;
mod device;
mod driver;
mod engine;
mod entry;
mod event;
mod graph;
mod handle;
mod launch;
mod memory;
mod module;
mod pools;
mod session;
mod sharing;
mod spin_lock;
mod stream;
#[cfg(test)]
mod test_node;
mod virtual_memory;
mod visible_devices;

use crate::function_table::{SymbolAddress, library, symbols};
use partage_driver_api::cuda::*;

/// Implements the traits of all function families.
struct Library;

macro_rules! expand { ($($table:tt)*) => { library! { CudaError, CUresult, $($table)* } }; }
partage_driver_api::cuda_functions!(expand);
partage_driver_api::cuda_functions!(symbols);

impl TextureReferenceApi for Library {}
impl GraphicsApi for Library {}
impl DebuggerApi for Library {}
