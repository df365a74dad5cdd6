//! The shared library inside a container that keeps its processes within their grant.
//!
//! It replaces `libcuda.so.1` and `libnvidia-ml.so.1` ([`install`]). A function that it does not export is resolved in
//! the driver's library, which it depends on; a function that it exports runs a hook here:
//!
//! ```text
//!  program ── cuMemAlloc_v2 ──▶ memory ── reserve ──▶ region (limits, usage)
//!                                  └──── driver ────▶ the driver's library
//! ```
//!
//! - `hook` defines hooks, `driver` calls the driver's own functions, `lookup` covers the routes to a function other
//!   than a plain symbol (`cuGetProcAddress`).
//! - `process` holds the state of a process: its region, and which device is which GPU.
//! - `memory`, `launch` and `nvml` hold the hooks; `throttle` delays launches until the container has the turn.
//!
//! It runs in other people's processes: no code here unwinds into the caller, prints, exits, raises signals or reads
//! the environment.

pub mod embedded_config;
pub mod install;

mod copies;
mod driver;
mod dynstr_padding;
mod hook;
mod launch;
mod lookup;
mod memory;
mod nvml;
mod process;
mod stream_event;
mod throttle;

/// Every hook, by module.
static HOOKS: &[&[hook::HookEntry]] = &[
    copies::HOOKS,
    throttle::capture::HOOKS,
    throttle::boundaries::HOOKS,
    launch::HOOKS,
    memory::arrays::HOOKS,
    memory::oversubscribe::HOOKS,
    lookup::HOOKS,
    memory::contexts::HOOKS,
    memory::graphs::HOOKS,
    memory::device_heaps::HOOKS,
    memory::info::HOOKS,
    memory::modules::HOOKS,
    memory::linear::HOOKS,
    memory::pools::HOOKS,
    memory::ipc::HOOKS,
    memory::virtual_memory::HOOKS,
    nvml::controls::HOOKS,
    nvml::memory::HOOKS,
    nvml::processes::HOOKS,
    nvml::sessions::HOOKS,
    nvml::export_table::HOOKS,
    nvml::utilization::HOOKS,
    process::current_context::HOOKS,
];
