//! The server under real connections: its limits, its TLS, its shutdown.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod client;
mod limits;
mod tls;
