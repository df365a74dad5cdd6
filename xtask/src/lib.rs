//! Builds what Partage's tests and releases need: the programs, images and clients of the test bed, the portable shim,
//! Partage's own image, and the plain manifests.
//!
//! The command `partage-xtask` builds; the test bed uses this library to find what is built. The product does not
//! depend on this crate.

pub mod binaries;
pub mod clients;
pub mod image;
pub mod manifests;
pub mod portable_shim;
pub mod test_run;
pub mod text_check;

mod debian;
mod digest;
mod disk_space;
mod host_info;
mod prerequisites;
mod process;
mod progress;
mod python;
mod work_dir;
