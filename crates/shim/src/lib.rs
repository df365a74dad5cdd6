//! The library inside a container that keeps its processes inside their grant.
//!
//! It stands in the place of `libcuda.so.1` and `libnvidia-ml.so.1` ([`install`]). A function it does not name reaches the
//! driver through the chain of dependencies; one that it names passes through a hook here:
//!
//! ```text
//!  program ── cuMemAlloc_v2 ──▶ memory ── reserve ──▶ region (limits, usage)
//!                                  └──── driver ────▶ the driver's library
//! ```
//!
//! - `hook` is the form of a hook, `driver` the driver's own functions, `lookup` the routes to a function other than a
//!   plain symbol (`cuGetProcAddress`, `dlsym`).
//! - `process` is what a process knows: its region, and which device is which GPU.
//! - `memory`, `launch` and `nvml` hold the hooks; `throttle` delays launches until the container has the turn.
//!
//! It lives in other people's processes: nothing here panics across a call, prints, ends, signals or reads the environment.

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
mod throttle;

/// Every hook, by module.
static HOOKS: &[&[hook::Hook]] = &[
    copies::HOOKS,
    throttle::capture::HOOKS,
    throttle::graphs::HOOKS,
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
    nvml::utilisation::HOOKS,
    process::current_context::HOOKS,
];
