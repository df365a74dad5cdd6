//! A hardened HTTP and HTTPS server: everything that Partage's daemons need to open a port safely.
//!
//! ```text
//!  listener  binds, accepts, serves a router, drains on shutdown
//!  limits    connections in total and per address, time and size of each request
//!  tls       certificates that are generated or read from files, reloaded while connections stay open
//!  auth      bearer tokens with a bounded number of reviews; loopback-only access
//!  health    /healthz and /readyz
//! ```
//!
//! The server speaks HTTP/1.1 only: one HTTP/2 connection carries as many requests at once as its client likes, which no
//! limit on connections bounds.
//!
//! ```no_run
//! use axum::Router;
//! use axum::routing::get;
//! use partage_serve::{HttpServer, ServerLimits, Transport, health_routes};
//! use tokio_util::sync::CancellationToken;
//!
//! # async fn serve() -> std::io::Result<()> {
//! let address = "127.0.0.1:8080".parse().map_err(std::io::Error::other)?;
//! let server = HttpServer::bind(address, Transport::Plain, ServerLimits::default()).await?;
//! let router = Router::new().route("/", get(async || "hello\n")).merge(health_routes(|| Ok(())));
//! server.run(router, CancellationToken::new()).await;
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod auth;
mod connection;
mod health;
mod limits;
mod listener;
mod tls;

pub use auth::{AuthError, AuthMessages, BearerAuth, restrict_to_loopback_host};
pub use health::{NotReady, health_routes};
pub use limits::ServerLimits;
pub use listener::{HttpServer, PeerAddress, Transport};
pub use tls::{CertificateSource, ClientCertificates, PeerCertificate, TlsError, TlsIdentity, TlsOptions};
