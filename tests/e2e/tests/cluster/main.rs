//! Partage in a cluster: its chart and manifests, its image, `make cluster`, and the documented installation.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod admission_policies;
mod api_requests;
mod chart;
mod install_docs;
mod make_cluster;
mod product_image;
mod test_image;
