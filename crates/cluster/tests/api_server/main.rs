//! Requests to a real API server: it goes away and comes back, pods of one name follow each other, permissions are missing.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod bindings;
mod caches;
mod control_plane;
mod events;
mod lease;
mod nodes;
mod pods;
mod tokens;
