//! Metrics over HTTP, for programs of this machine.

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use partage_workstation::keeper::Keeper;
use partage_workstation::metrics;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;

/// What Prometheus expects of OpenMetrics.
const CONTENT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A port that is taken before anything else is done: who cannot have it should hear so at once.
pub(super) struct Listener {
    listener: TcpListener,
    address: SocketAddr,
}

impl Listener {
    pub(super) fn bind(address: SocketAddr) -> Result<Listener, String> {
        let cannot = |error: std::io::Error| {
            format!(
                "metrics cannot be served at {address}: {error}; use another address with --metrics, or --metrics off"
            )
        };
        let listener = TcpListener::bind(address).map_err(cannot)?;
        listener.set_nonblocking(true).map_err(cannot)?;
        let address = listener.local_addr().map_err(cannot)?;
        Ok(Listener { listener, address })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers from now on, in a thread of its own, for as long as the process lives.
    pub(super) fn serve(self, keeper: &Arc<Keeper>) -> Result<(), String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
        let runtime = runtime.map_err(|error| format!("metrics cannot be served: {error}"))?;
        let keeper = Arc::clone(keeper);
        let serve = move || {
            runtime.block_on(async {
                let Ok(listener) = tokio::net::TcpListener::from_std(self.listener) else { return };
                let routes = Router::new()
                    .route("/metrics", get(answer))
                    .route("/healthz", get(|| async { "ok\n" }))
                    .layer(middleware::from_fn(only_from_here))
                    .with_state(keeper);
                // It ends with the process.
                let _ = axum::serve(listener, routes).await;
            });
        };
        let thread = std::thread::Builder::new().name("metrics".into());
        thread.spawn(serve).map(|_| ()).map_err(|error| format!("metrics cannot be served: {error}"))
    }
}

async fn answer(State(keeper): State<Arc<Keeper>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, CONTENT)], metrics::text(&keeper.report()))
}

/// A page of the internet can make a browser of this machine ask, under a name that it has pointed here: only who asks for
/// this machine by its own address is answered.
async fn only_from_here(request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let name = host.rsplit_once(':').map_or(host, |(name, port)| {
        if port.bytes().all(|byte| byte.is_ascii_digit()) { name } else { host }
    });
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    if name == "localhost" || address.is_ok_and(|address| address.is_loopback()) {
        return next.run(request).await;
    }
    (StatusCode::FORBIDDEN, "ask for 127.0.0.1 or localhost\n").into_response()
}
