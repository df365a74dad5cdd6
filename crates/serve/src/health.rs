//! Health endpoints for probes: `/healthz` and `/readyz`.

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use std::sync::Arc;

/// Why a daemon is not ready, as one clause for the probe's log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NotReady(String);

impl NotReady {
    /// Creates a reason such as `the device plugin is not registered with kubelet yet`.
    pub fn new(reason: impl Into<String>) -> NotReady {
        NotReady(reason.into())
    }
}

type ReadyCheck = Arc<dyn Fn() -> Result<(), NotReady> + Send + Sync>;

/// Returns routes that answer probes without authentication.
///
/// `/healthz` answers 200 for as long as the process serves requests. `/readyz` answers 200 if `ready` does, and 503
/// with the reason otherwise.
///
/// ```
/// use partage_serve::{NotReady, health_routes};
///
/// let routes: axum::Router = health_routes(|| Err(NotReady::new("the cache is not synced yet")));
/// ```
pub fn health_routes(ready: impl Fn() -> Result<(), NotReady> + Send + Sync + 'static) -> Router {
    let ready: ReadyCheck = Arc::new(ready);
    Router::new().route("/healthz", get(async || "ok\n")).route("/readyz", get(readiness)).with_state(ready)
}

async fn readiness(State(ready): State<ReadyCheck>) -> Response {
    match ready() {
        Ok(()) => "ok\n".into_response(),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response(),
    }
}
