//! Builds what Partage's tests and releases need: the programs, images and clients of the test bed, the shim for every
//! image, Partage's own image, and the plain manifests.
//!
//! The command `partage-xtask` builds; the test bed asks here whether a thing is built and where it is. Nothing of this
//! reaches the product.

pub mod binaries;
pub mod clients;
pub mod image;
pub mod manifests;
pub mod portable;
pub mod test_run;

mod debian;
mod digest;
mod machine;
mod missing;
mod process;
mod progress;
mod python;
mod space;
mod work;
