//! The library inside a container that keeps its processes inside their grant.
//!
//! Every function that it stands before is `partage_hook_<name>` in the shared object; [`install`] makes the files out of
//! it that programs load.

pub mod config;
pub mod install;

mod placeholder;
mod room;
