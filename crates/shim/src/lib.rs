//! The library inside a container that keeps its processes inside their grant.
//!
//! It stands in the place of `libcuda.so.1` and `libnvidia-ml.so.1` ([`install`]). A function it does not name reaches the
//! driver through the chain of dependencies; one that it names passes through a hook here:
//!
//! ```text
//!  program ── cuMemAlloc_v2 ──▶ memory ── reserve ──▶ region (limits, usage)
//!                                  └───── real ─────▶ the driver's library
//! ```
//!
//! - `hook` is the form of a hook, `real` the driver's own functions, `lookup` the routes to a function that are no
//!   plain symbol (`cuGetProcAddress`, `dlsym`).
//! - `process` is what a process knows: its region, which device is which GPU.
//! - `memory`, `launch` and `nvml` hold the hooks.
//!
//! It lives in other people's processes: nothing here panics across a call, prints, ends, signals or reads the environment.

pub mod config;
pub mod install;

mod copies;
mod gate;
mod hook;
mod launch;
mod lookup;
mod memory;
mod nvml;
mod process;
mod real;
mod room;

/// Every hook, by module.
static HOOKS: &[&[hook::Hook]] = &[
    copies::HOOKS,
    gate::capture::HOOKS,
    gate::graphs::HOOKS,
    launch::HOOKS,
    memory::arrays::HOOKS,
    memory::beyond::HOOKS,
    lookup::HOOKS,
    memory::contexts::HOOKS,
    memory::graphs::HOOKS,
    memory::heaps::HOOKS,
    memory::info::HOOKS,
    memory::modules::HOOKS,
    memory::plain::HOOKS,
    memory::pools::HOOKS,
    memory::sharing::HOOKS,
    memory::virtual_memory::HOOKS,
    nvml::controls::HOOKS,
    nvml::memory::HOOKS,
    nvml::processes::HOOKS,
    nvml::sessions::HOOKS,
    nvml::table::HOOKS,
    nvml::utilisation::HOOKS,
    process::current::HOOKS,
];
