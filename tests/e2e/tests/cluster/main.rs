//! Partage in a cluster: its chart and manifests, its image, `make cluster`, and the pages that say how it is installed.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod built;
mod chart;
mod deploy;
mod installed;
mod make_cluster;
mod product;
mod requests;
