//! The server: metrics for those who may read them, and health for everybody.

use super::access::{Access, Door};
use super::classic::classic;
use super::connections::{Bounded, Bounds, Connections};
use crate::report::Report;
use crate::settings::Metrics;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::Mutex;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const CLASSIC: &str = "text/plain; version=0.0.4; charset=utf-8";

/// How long a text is good for: the driver is not asked more often either, and many who ask at once get the same one.
const FRESH: Duration = Duration::from_millis(500);

/// An address that is listened on.
pub(crate) struct Server {
    connections: Connections,
    address: SocketAddr,
    door: Door,
}

impl Server {
    /// Takes the address. Where everybody may read it is plain HTTP; otherwise HTTPS, with a certificate made here: who sends a
    /// token is safe from those who listen, and must be told not to look who signed it.
    pub(crate) async fn bind(settings: &Metrics, access: Access) -> io::Result<Server> {
        Server::bind_with(settings, access, Bounds::default()).await
    }

    async fn bind_with(settings: &Metrics, access: Access, bounds: Bounds) -> io::Result<Server> {
        let (tls, access) = if settings.anonymous {
            (None, Access::Anonymous)
        } else {
            (Some(acceptor().map_err(io::Error::other)?), access)
        };
        let listener = listen(settings.address).await?;
        let address = listener.local_addr()?;
        let connections = Connections::new(listener, tls, bounds);
        Ok(Server { connections, address, door: Door::new(access) })
    }

    /// The address.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers until it is told to stop; what is being answered then is answered. `ready` says why the agent is not ready to serve
    /// kubelet, if it is not.
    pub(crate) async fn run(
        self,
        report: impl Fn() -> Report + Send + Sync + 'static,
        ready: impl Fn() -> Result<(), String> + Send + Sync + 'static,
        stop: CancellationToken,
    ) {
        let room = Arc::new(Room {
            door: self.door,
            report: Arc::new(report),
            ready: Box::new(ready),
            last: Mutex::default(),
        });
        let router = Router::new()
            .route("/metrics", get(metrics))
            // As gpu-manager calls it.
            .route("/metric", get(metrics))
            .route("/healthz", get(async || "ok\n"))
            .route("/readyz", get(readiness))
            .fallback(async || (StatusCode::NOT_FOUND, "there are /metrics, /healthz and /readyz\n"))
            .with_state(room);
        let (mut connections, answering) = (self.connections, TaskTracker::new());
        while let Some(connection) = stop.run_until_cancelled(connections.next()).await {
            answering.spawn(answer(connection, router.clone(), stop.clone()));
        }
        drop(connections);
        answering.close();
        answering.wait().await;
    }
}

/// Answers one question: what holds a place does so for a short while. HTTP/1 only: a connection of HTTP/2 has as many questions
/// at once as its other side likes.
async fn answer(connection: Bounded, router: Router, stop: CancellationToken) {
    let service = TowerToHyperService::new(router.layer(Extension(Peer(connection.peer()))));
    let io = TokioIo::new(connection);
    let mut answering = pin!(http1::Builder::new().keep_alive(false).serve_connection(io, service));
    // How it ends is the other side's affair.
    let told = stop.run_until_cancelled(answering.as_mut()).await;
    if told.is_none() {
        answering.as_mut().graceful_shutdown();
        let _ = answering.await;
    }
}

/// All addresses of both families are those of IPv4 where the kernel has no other.
async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(address).await {
        Err(_) if address.ip() == Ipv6Addr::UNSPECIFIED => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await
        }
        bound => bound,
    }
}

/// Who asks.
#[derive(Clone, Copy)]
struct Peer(IpAddr);

struct Room {
    door: Door,
    report: Arc<dyn Fn() -> Report + Send + Sync>,
    ready: Box<dyn Fn() -> Result<(), String> + Send + Sync>,
    last: Mutex<Option<(Instant, Bytes)>>,
}

impl Room {
    /// The text; made once for all who ask within a moment, so that they cost no more than one.
    async fn text(&self) -> Result<Bytes, StatusCode> {
        let mut last = self.last.lock().await;
        if let Some((made, text)) = last.as_ref()
            && made.elapsed() < FRESH
        {
            return Ok(text.clone());
        }
        let report = Arc::clone(&self.report);
        // It reads files.
        let made = tokio::task::spawn_blocking(move || super::text(report())).await;
        let text = Bytes::from(made.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?);
        *last = Some((Instant::now(), text.clone()));
        Ok(text)
    }
}

async fn metrics(
    State(room): State<Arc<Room>>,
    Extension(Peer(peer)): Extension<Peer>,
    headers: HeaderMap,
) -> Response {
    if let Err(denied) = room.door.admit(&headers, peer).await {
        return denied.into_response();
    }
    let text = match room.text().await {
        Ok(text) => text,
        Err(code) => return (code, "the figures cannot be told: see the agent's log\n").into_response(),
    };
    let accepts = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    if accepts.into_iter().any(|accepts| accepts.contains("application/openmetrics-text")) {
        ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response()
    } else {
        let text = classic(&String::from_utf8_lossy(&text));
        ([(header::CONTENT_TYPE, CLASSIC)], text).into_response()
    }
}

async fn readiness(State(room): State<Arc<Room>>) -> Response {
    match (room.ready)() {
        Ok(()) => "ok\n".into_response(),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}

/// A certificate that lives as long as this process.
fn acceptor() -> Result<TlsAcceptor, String> {
    let made = rcgen::generate_simple_self_signed(["partage-node".to_string()])
        .map_err(|error| error.to_string())?;
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der())?;
    // The provider by name: no default of the whole process is asked for or set.
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| {
            builder.with_no_client_auth().with_single_cert(vec![made.cert.der().clone()], key)
        })
        .map_err(|error| error.to_string())?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

#[cfg(test)]
mod tests;
