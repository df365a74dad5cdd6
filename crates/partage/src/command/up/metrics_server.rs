//! Serves metrics over plain HTTP to programs on this machine.

use anyhow::{Context, anyhow};
use axum::Router;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;
use partage_serve::{HttpServer, ServerLimits, Transport, health_routes, restrict_to_loopback_host};
use partage_workstation::daemon::Daemon;
use partage_workstation::metrics;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// The content type of OpenMetrics.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Limits of the server. All clients share the loopback address; Prometheus keeps its connection open between scrapes.
const LIMITS: ServerLimits = ServerLimits {
    max_connections: 64,
    max_connections_per_address: 64,
    head_timeout: Duration::from_secs(10),
    request_timeout: Duration::from_secs(30),
    idle_timeout: Some(Duration::from_secs(300)),
    max_head_bytes: 16 << 10,
    max_body_bytes: 16 << 10,
};

/// Time that requests in progress have to finish when the daemon stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// A bound port. It is bound before the daemon starts, so that a port in use is reported at once.
pub(super) struct MetricsListener {
    listener: TcpListener,
    address: SocketAddr,
}

impl MetricsListener {
    /// Binds the address. For port 0, the kernel chooses the port.
    pub(super) fn bind(address: SocketAddr) -> anyhow::Result<MetricsListener> {
        let bind = || {
            let listener = TcpListener::bind(address)?;
            let address = listener.local_addr()?;
            std::io::Result::Ok(MetricsListener { listener, address })
        };
        bind().map_err(|error| {
            anyhow!("cannot serve metrics at {address}: {error}; use another address with --metrics, or --metrics off")
        })
    }

    /// Returns the bound address.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Starts a thread that serves metrics.
    pub(super) fn serve(self, daemon: &Arc<Daemon>) -> anyhow::Result<MetricsServer> {
        self.spawn(daemon).context("cannot serve metrics")
    }

    fn spawn(self, daemon: &Arc<Daemon>) -> std::io::Result<MetricsServer> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        let server = {
            let _context = runtime.enter();
            HttpServer::from_std(self.listener, Transport::Plain, LIMITS)?
        };
        let routes = Router::new()
            .route("/metrics", get(scrape))
            .with_state(Arc::clone(daemon))
            .merge(health_routes(|| Ok(())));
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let (end_sender, ended) = mpsc::channel();
        let serve = move || {
            // Dropped when the thread ends, even if it panics.
            let _end_sender: mpsc::Sender<()> = end_sender;
            runtime.block_on(server.run(restrict_to_loopback_host(routes), stopped));
        };
        std::thread::Builder::new().name("metrics".into()).spawn(serve)?;
        Ok(MetricsServer { stop, ended })
    }
}

/// A running metrics server.
pub(super) struct MetricsServer {
    stop: CancellationToken,
    /// Disconnected when the thread has ended.
    ended: mpsc::Receiver<()>,
}

impl MetricsServer {
    /// Closes the port and waits for requests in progress, at most [`STOP_TIMEOUT`].
    pub(super) fn stop(self) {
        self.stop.cancel();
        if self.ended.recv_timeout(STOP_TIMEOUT) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("metrics request did not finish in time");
        }
    }
}

async fn scrape(State(daemon): State<Arc<Daemon>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], metrics::text(&daemon.report()))
}
