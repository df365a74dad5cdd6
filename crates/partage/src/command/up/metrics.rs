//! Metrics over plain HTTP, for programs on this machine.

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

/// All clients share one address here. Prometheus keeps its connection open between scrapes.
const LIMITS: ServerLimits = ServerLimits {
    max_connections: 64,
    max_connections_per_address: 64,
    head_timeout: Duration::from_secs(10),
    request_timeout: Duration::from_secs(30),
    idle_timeout: Some(Duration::from_secs(300)),
    max_head_bytes: 16 << 10,
    max_body_bytes: 16 << 10,
};

/// How long requests may take to end when the daemon stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// A bound port. It is bound before anything else is done, so that a port in use is reported at once.
pub(super) struct Listener {
    listener: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Binds the address.
    pub(super) fn bind(address: SocketAddr) -> Result<Listener, String> {
        let cannot = |error: std::io::Error| {
            format!(
                "metrics cannot be served at {address}: {error}; use another address with --metrics, or --metrics off"
            )
        };
        let listener = TcpListener::bind(address).map_err(cannot)?;
        let address = listener.local_addr().map_err(cannot)?;
        Ok(Listener { listener, address })
    }

    /// The bound address.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves in a thread of its own.
    pub(super) fn serve(self, daemon: &Arc<Daemon>) -> Result<Served, String> {
        let cannot = |error: std::io::Error| format!("metrics cannot be served: {error}");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(cannot)?;
        let server = {
            let _context = runtime.enter();
            HttpServer::from_std(self.listener, Transport::Plain, LIMITS).map_err(cannot)?
        };
        let routes = Router::new()
            .route("/metrics", get(text))
            .with_state(Arc::clone(daemon))
            .merge(health_routes(|| Ok(())));
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let (ends, ended) = mpsc::channel();
        let serve = move || {
            // Dropped when the thread ends, whatever ends it.
            let _ends: mpsc::Sender<()> = ends;
            runtime.block_on(server.run(restrict_to_loopback_host(routes), stopped));
        };
        std::thread::Builder::new().name("metrics".into()).spawn(serve).map_err(cannot)?;
        Ok(Served { stop, ended })
    }
}

/// Metrics that are served.
pub(super) struct Served {
    stop: CancellationToken,
    /// Disconnected when the thread has ended.
    ended: mpsc::Receiver<()>,
}

impl Served {
    /// Closes the port and waits until requests in progress are answered, within bounds.
    pub(super) fn stop(self) {
        self.stop.cancel();
        if self.ended.recv_timeout(STOP_TIMEOUT) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("a request for metrics did not end in time");
        }
    }
}

async fn text(State(daemon): State<Arc<Daemon>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], metrics::text(&daemon.report()))
}
