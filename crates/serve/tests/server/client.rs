//! A server under test, and the smallest client that shows what it does.

use axum::Router;
use partage_serve::{HttpServer, ServerLimits, Transport};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tokio_util::sync::CancellationToken;

/// The DNS name in every certificate of these tests.
pub(crate) const SERVER_NAME: &str = "server.example";

/// A server on a port of its own.
pub(crate) struct RunningServer {
    pub(crate) address: SocketAddr,
    pub(crate) stop: CancellationToken,
    pub(crate) task: JoinHandle<()>,
}

/// Limits that no slow machine reaches.
pub(crate) fn unhurried() -> ServerLimits {
    let hour = Duration::from_secs(3600);
    ServerLimits { head_timeout: hour, request_timeout: hour, ..ServerLimits::default() }
}

pub(crate) async fn start(transport: Transport, limits: ServerLimits, router: Router) -> RunningServer {
    let address = "127.0.0.1:0".parse().unwrap();
    let server = HttpServer::bind(address, transport, limits).await.unwrap();
    let (address, stop) = (server.address(), CancellationToken::new());
    let task = tokio::spawn(server.run(router, stop.clone()));
    RunningServer { address, stop, task }
}

/// A self-signed certificate with its key, as PEM.
pub(crate) struct KeyPair {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl KeyPair {
    pub(crate) fn generate() -> KeyPair {
        let generated = rcgen::generate_simple_self_signed([SERVER_NAME.to_string()]).unwrap();
        KeyPair { certificate: generated.cert.pem(), key: generated.signing_key.serialize_pem() }
    }
}

/// Connects and verifies that the server has the trusted certificate; presents `own` to it.
pub(crate) async fn connect(
    address: SocketAddr,
    trusted: &KeyPair,
    own: Option<&KeyPair>,
) -> io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(trusted.certificate.as_bytes()).unwrap()).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let config = match own {
        None => builder.with_no_client_auth(),
        Some(own) => {
            let certificate = CertificateDer::from_pem_slice(own.certificate.as_bytes()).unwrap();
            let key = PrivateKeyDer::from_pem_slice(own.key.as_bytes()).unwrap();
            builder.with_client_auth_cert(vec![certificate], key).unwrap()
        }
    };
    let stream = TcpStream::connect(address).await?;
    TlsConnector::from(Arc::new(config)).connect(ServerName::try_from(SERVER_NAME).unwrap(), stream).await
}

/// Sends bytes and reads until the server closes the connection.
pub(crate) async fn exchange(mut stream: impl AsyncRead + AsyncWrite + Unpin, request: &[u8]) -> String {
    // The server may close before it has read everything.
    let _ = stream.write_all(request).await;
    let mut response = Vec::new();
    // Not every TLS client closes with an alert.
    let _ = stream.read_to_end(&mut response).await;
    String::from_utf8_lossy(&response).into_owned()
}

pub(crate) async fn plain(address: SocketAddr, request: &[u8]) -> String {
    exchange(TcpStream::connect(address).await.unwrap(), request).await
}

/// Sends a request on a connection that stays open, and reads its response of a known length.
pub(crate) async fn request_on(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), request: &[u8]) -> String {
    stream.write_all(request).await.unwrap();
    let mut response = Vec::new();
    let head = loop {
        if let Some(end) = response.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            break end + 4;
        }
        assert_ne!(stream.read_buf(&mut response).await.unwrap(), 0, "the connection stays open");
    };
    let text = String::from_utf8(response.clone()).unwrap();
    let length = text.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length: usize = length.expect("a content length").parse().unwrap();
    response.resize(head + length, 0);
    let read = text.len();
    stream.read_exact(&mut response[read..]).await.unwrap();
    String::from_utf8(response).unwrap()
}

/// Waits until the server has closed a connection.
pub(crate) async fn is_closed(stream: &mut (impl AsyncRead + Unpin)) -> bool {
    matches!(stream.read(&mut [0; 1]).await, Ok(0) | Err(_))
}
