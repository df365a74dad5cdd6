//! The agent's HTTP server: metrics for clients with a token, health for all clients.

use super::text_format::to_text_format;
use crate::report::NodeReport;
use crate::settings::MetricsSettings;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use partage_serve::{
    AuthMessages, BearerAuth, CertificateSource, HttpServer, NotReady, ServerLimits, TlsIdentity, TlsOptions,
    Transport, health_routes,
};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The DNS name in the self-signed certificate.
const CERTIFICATE_NAME: &str = "partage-node";

/// How long a rendered text is reused: the driver is not sampled more often either, and concurrent scrapes share one text.
const TEXT_TTL: Duration = Duration::from_millis(500);

const PLAIN_HTTP_HINT: &str = "this port serves HTTPS with a self-signed certificate: use https:// in the URL (curl -k) and \
     send a token as `Authorization: Bearer <token>`, or set `metrics.anonymous: true` in the agent's settings for plain \
     HTTP without a token";

const AUTH_MESSAGES: AuthMessages = AuthMessages {
    missing_token: "metrics require a token of this cluster: send it as `Authorization: Bearer <token>`, or set \
         `metrics.anonymous: true` in the agent's settings to let all clients read them",
    forbidden: "this token may not read metrics: it has expired, belongs to another cluster, or its user lacks `get` on the \
         URL /metrics, which the cluster role partage-metrics-reader grants",
};

/// Authorizes clients by a function that reviews their tokens.
pub(crate) fn token_auth<F, E>(review: impl Fn(String) -> F + Send + Sync + 'static) -> Arc<BearerAuth>
where
    F: Future<Output = Result<bool, E>> + Send + 'static,
    E: fmt::Display,
{
    Arc::new(BearerAuth::new(review, AUTH_MESSAGES))
}

/// The bound metrics server.
pub(crate) struct MetricsServer {
    server: HttpServer,
    /// Absent if anonymous clients may read.
    auth: Option<Arc<BearerAuth>>,
}

impl MetricsServer {
    /// Binds the address: plain HTTP if anonymous clients may read. Otherwise HTTPS with a certificate that is generated now,
    /// which keeps tokens from being read on the way and must be accepted by clients as it is.
    pub(crate) async fn bind(settings: &MetricsSettings, auth: Arc<BearerAuth>) -> io::Result<MetricsServer> {
        MetricsServer::bind_with(settings, auth, ServerLimits::default()).await
    }

    async fn bind_with(
        settings: &MetricsSettings,
        auth: Arc<BearerAuth>,
        limits: ServerLimits,
    ) -> io::Result<MetricsServer> {
        let (transport, auth) = if settings.anonymous {
            (Transport::Plain, None)
        } else {
            let options = TlsOptions::new(CertificateSource::SelfSigned(CERTIFICATE_NAME.into()));
            let identity = TlsIdentity::load(options).map_err(io::Error::other)?;
            (Transport::Tls(Arc::new(identity)), Some(auth))
        };
        let server = HttpServer::bind(settings.address, transport, limits).await?;
        Ok(MetricsServer { server: server.plain_http_hint(PLAIN_HTTP_HINT), auth })
    }

    /// Returns the bound address, with the port that the kernel chose for port 0.
    pub(crate) fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Serves until `stop` and finishes the requests in progress. `ready` reports why the agent cannot serve kubelet, if
    /// it cannot.
    pub(crate) async fn run(
        self,
        report: impl Fn() -> NodeReport + Send + Sync + 'static,
        ready: impl Fn() -> Result<(), NotReady> + Send + Sync + 'static,
        stop: CancellationToken,
    ) {
        let source = Arc::new(MetricsSource { report: Arc::new(report), last: Mutex::default() });
        let routes = Router::new()
            .route("/metrics", get(metrics))
            // gpu-manager's name for it.
            .route("/metric", get(metrics))
            .with_state(source);
        let routes = match self.auth {
            Some(auth) => auth.protect(routes),
            None => routes,
        };
        let not_found = async || (StatusCode::NOT_FOUND, "not found: try /metrics, /healthz or /readyz\n");
        self.server.run(routes.merge(health_routes(ready)).fallback(not_found), stop).await;
    }
}

struct MetricsSource {
    report: Arc<dyn Fn() -> NodeReport + Send + Sync>,
    last: Mutex<Option<(Instant, Bytes)>>,
}

impl MetricsSource {
    /// Renders the text once for all requests within [`TEXT_TTL`].
    async fn text(&self) -> Result<Bytes, StatusCode> {
        let mut last = self.last.lock().await;
        if let Some((rendered, text)) = last.as_ref()
            && rendered.elapsed() < TEXT_TTL
        {
            return Ok(text.clone());
        }
        let report = Arc::clone(&self.report);
        // Making a report reads files.
        let rendered = tokio::task::spawn_blocking(move || super::render(report())).await;
        let text = Bytes::from(rendered.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?);
        *last = Some((Instant::now(), text.clone()));
        Ok(text)
    }
}

async fn metrics(State(source): State<Arc<MetricsSource>>, headers: HeaderMap) -> Response {
    let text = match source.text().await {
        Ok(text) => text,
        Err(code) => return (code, "metrics cannot be collected: see the agent's log\n").into_response(),
    };
    let mut accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    if accepted.any(|accepted| accepted.contains("application/openmetrics-text")) {
        ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response()
    } else {
        let text = to_text_format(&String::from_utf8_lossy(&text));
        ([(header::CONTENT_TYPE, TEXT_FORMAT)], text).into_response()
    }
}

#[cfg(test)]
mod tests;
