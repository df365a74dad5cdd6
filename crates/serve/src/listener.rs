//! The listening socket: accepts connections within the limits and serves a router on them.

use crate::connection::{ConnectionClock, serve};
use crate::limits::{AddressCounter, AddressSlot, ServerLimits, SilentConnections};
use crate::tls::{PeerCertificate, TlsIdentity};
use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use axum::response::IntoResponse;
use axum::serve::Listener;
use hyper::service::service_fn;
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The sentence for a plain HTTP request on an HTTPS port, unless [`HttpServer::plain_http_hint`] replaces it.
const PLAIN_HTTP_HINT: &str = "this port serves HTTPS: send the request again with https:// in the URL";

/// How requests are transported.
#[derive(Clone, Debug)]
pub enum Transport {
    /// HTTP without encryption. Anything secret must not be sent over it: use it on loopback, or for public content.
    Plain,
    /// HTTPS with this certificate. A plain HTTP request is answered 400 with a hint.
    Tls(Arc<TlsIdentity>),
}

/// The address of the client that sent a request, as an [`axum::Extension`] of every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddress(pub IpAddr);

/// A bound server. Connections wait in the kernel's backlog until [`HttpServer::run`].
#[derive(Debug)]
pub struct HttpServer {
    listener: TcpListener,
    address: SocketAddr,
    transport: Transport,
    limits: ServerLimits,
    plain_http_hint: Arc<str>,
}

impl HttpServer {
    /// Binds an address. `[::]` falls back to `0.0.0.0` if the kernel has no IPv6.
    pub async fn bind(
        address: SocketAddr,
        transport: Transport,
        limits: ServerLimits,
    ) -> io::Result<HttpServer> {
        let listener = match TcpListener::bind(address).await {
            Err(_) if address.ip() == Ipv6Addr::UNSPECIFIED => {
                TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await?
            }
            bound => bound?,
        };
        HttpServer::new(listener, transport, limits)
    }

    /// Uses a socket that was bound before the runtime started.
    ///
    /// Must be called inside a tokio runtime.
    pub fn from_std(
        listener: std::net::TcpListener,
        transport: Transport,
        limits: ServerLimits,
    ) -> io::Result<HttpServer> {
        listener.set_nonblocking(true)?;
        HttpServer::new(TcpListener::from_std(listener)?, transport, limits)
    }

    fn new(listener: TcpListener, transport: Transport, limits: ServerLimits) -> io::Result<HttpServer> {
        let address = listener.local_addr()?;
        Ok(HttpServer { listener, address, transport, limits, plain_http_hint: PLAIN_HTTP_HINT.into() })
    }

    /// Replaces the sentence that answers a plain HTTP request on an HTTPS port.
    #[must_use]
    pub fn plain_http_hint(mut self, hint: &str) -> HttpServer {
        self.plain_http_hint = hint.into();
        self
    }

    /// Returns the bound address, with the port that the kernel chose for port 0.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves a router until `stop`, then closes the port and waits until requests in progress are answered or have
    /// reached their time limit.
    pub async fn run(self, router: Router, stop: CancellationToken) {
        let HttpServer { mut listener, transport, limits, plain_http_hint, .. } = self;
        let permits = Arc::new(Semaphore::new(limits.max_connections));
        let addresses = AddressCounter::default();
        let silent = SilentConnections::default();
        let connections = TaskTracker::new();
        let reloading = stop.child_token();
        if let Transport::Tls(identity) = &transport {
            connections.spawn(Arc::clone(identity).reload_on_change(reloading));
        }
        while let Some((stream, peer)) = stop.run_until_cancelled(Listener::accept(&mut listener)).await {
            let Some(address) =
                addresses.reserve(peer.ip().to_canonical(), limits.max_connections_per_address)
            else {
                continue;
            };
            if permits.available_permits() == 0 {
                silent.displace_oldest();
            }
            // While every connection has a request in progress, new ones wait in the kernel's backlog.
            let Some(Ok(permit)) = stop.run_until_cancelled(Arc::clone(&permits).acquire_owned()).await
            else {
                break;
            };
            let connection = AcceptedConnection {
                stream,
                address,
                transport: transport.clone(),
                clock: ConnectionClock::start(limits, &silent),
                plain_http_hint: Arc::clone(&plain_http_hint),
                _permit: permit,
            };
            connections.spawn(connection.serve(router.clone(), stop.clone()));
        }
        drop(listener);
        connections.close();
        connections.wait().await;
    }
}

/// A connection that was accepted; its slots are released when it ends.
struct AcceptedConnection {
    stream: TcpStream,
    address: AddressSlot,
    transport: Transport,
    clock: Arc<ConnectionClock>,
    plain_http_hint: Arc<str>,
    _permit: OwnedSemaphorePermit,
}

/// The protocol that the first byte of a connection to an HTTPS port indicates.
enum FirstByte {
    Tls,
    PlainHttp,
}

impl AcceptedConnection {
    async fn serve(self, router: Router, stop: CancellationToken) {
        // Without this, a response in two packets waits for the client's delayed acknowledgement.
        let _ = self.stream.set_nodelay(true);
        let router = TowerToHyperService::new(router);
        let peer = PeerAddress(self.address.address());
        let identity = match &self.transport {
            Transport::Plain => {
                let prepare = move |request: &mut Request<Body>| {
                    request.extensions_mut().insert(peer);
                };
                return serve(self.stream, self.clock, router, prepare, stop).await;
            }
            Transport::Tls(identity) => Arc::clone(identity),
        };
        let first = tokio::select! {
            first = first_byte(&self.stream) => first,
            () = self.clock.expired() => return,
            () = stop.cancelled() => return,
        };
        match first {
            Ok(FirstByte::Tls) => {}
            Ok(FirstByte::PlainHttp) => {
                let hint = self.plain_http_hint;
                let answer = service_fn(move |_| {
                    let answer =
                        (StatusCode::BAD_REQUEST, [(header::CONNECTION, "close")], format!("{hint}\n"));
                    async { Ok::<_, Infallible>(answer.into_response()) }
                });
                return serve(self.stream, self.clock, answer, |_| {}, stop).await;
            }
            Err(_) => return,
        }
        let stream = tokio::select! {
            accepted = identity.acceptor().accept(self.stream) => match accepted {
                Ok(stream) => stream,
                // The client sees the alert.
                Err(_) => return,
            },
            () = self.clock.expired() => return,
            () = stop.cancelled() => return,
        };
        let certificates = stream.get_ref().1.peer_certificates();
        let certificate =
            certificates.and_then(<[_]>::first).map(|der| PeerCertificate(der.clone().into_owned()));
        let prepare = move |request: &mut Request<Body>| {
            request.extensions_mut().insert(peer);
            if let Some(certificate) = &certificate {
                request.extensions_mut().insert(certificate.clone());
            }
        };
        serve(stream, self.clock, router, prepare, stop).await;
    }
}

/// Looks at the first byte without consuming it: an HTTP method starts with a letter, a TLS record with 0x16.
async fn first_byte(stream: &TcpStream) -> io::Result<FirstByte> {
    let mut byte = [0];
    match stream.peek(&mut byte).await? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ if byte[0].is_ascii_alphabetic() => Ok(FirstByte::PlainHttp),
        _ => Ok(FirstByte::Tls),
    }
}
