//! The commands of `partage-xtask`: what they build is complete and reproducible, and each failure is one
//! clear message.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod binaries;
mod clients;
mod images;
mod test_dir;
mod test_run;
