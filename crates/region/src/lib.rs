//! The region: two files that a container's processes and the node's agent share.
//!
//! `limits` says what the container may have; its owner writes it and nobody inside can. `usage` says what its processes
//! hold; they write it, and whoever reads it expects anything there.

pub mod arbiter;
