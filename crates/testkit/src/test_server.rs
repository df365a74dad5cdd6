//! An HTTP server of a test that the control plane calls: plain or TLS, stopped on drop.

use crate::bed::Certificate;
use axum::Router;
use partage_serve::{
    CertificateSource, HttpServer, ServerLimits, TlsError, TlsIdentity, TlsOptions, Transport,
};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// The control plane is trusted: it keeps connections open, and posts whole lists of nodes.
const SERVER_LIMITS: ServerLimits = ServerLimits {
    max_connections: 1024,
    max_connections_per_address: 1024,
    head_timeout: Duration::from_secs(10),
    request_timeout: Duration::from_secs(300),
    idle_timeout: Some(Duration::from_secs(300)),
    max_head_bytes: 64 << 10,
    max_body_bytes: 256 << 20,
};

/// Why a test's server cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address cannot be bound.
    #[error(
        "cannot listen on {address}: {source}; check that the address belongs to this host and the port is free"
    )]
    Listen {
        /// Address that was requested.
        address: SocketAddr,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The certificate or key is not usable.
    #[error("cannot serve TLS with this certificate and key: {0}")]
    Certificate(#[from] TlsError),
}

/// A server that runs until it is stopped or dropped.
pub(crate) struct TestServer {
    pub(crate) address: SocketAddr,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl TestServer {
    pub(crate) async fn plain(address: SocketAddr, router: Router) -> Result<TestServer, ServeError> {
        TestServer::run(address, Transport::Plain, router).await
    }

    pub(crate) async fn tls(
        address: SocketAddr,
        certificate: &Certificate,
        router: Router,
    ) -> Result<TestServer, ServeError> {
        let Certificate { certificate, key } = certificate.clone();
        let identity = TlsIdentity::load(TlsOptions::new(CertificateSource::Pem { certificate, key }))?;
        TestServer::run(address, Transport::Tls(Arc::new(identity)), router).await
    }

    async fn run(
        address: SocketAddr,
        transport: Transport,
        router: Router,
    ) -> Result<TestServer, ServeError> {
        let server = HttpServer::bind(address, transport, SERVER_LIMITS)
            .await
            .map_err(|source| ServeError::Listen { address, source })?;
        let (address, stop) = (server.address(), CancellationToken::new());
        let task = tokio::spawn(server.run(router, stop.clone()));
        Ok(TestServer { address, stop, task })
    }

    /// Stops the server. Requests in progress are answered; afterwards the port is free.
    pub(crate) async fn stop(mut self) {
        self.stop.cancel();
        let _ = (&mut self.task).await;
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use axum::routing::post;
    use serde_json::{Value, json};
    use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::crypto::ring;
    use tokio_rustls::rustls::pki_types::pem::PemObject;
    use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
    use tokio_rustls::rustls::{ClientConfig, RootCertStore};

    /// Returns a self-signed certificate for `localhost`.
    pub(crate) fn certificate() -> Certificate {
        let made = rcgen::generate_simple_self_signed(["localhost".to_string()]).unwrap();
        Certificate { certificate: made.cert.pem(), key: made.signing_key.serialize_pem() }
    }

    /// Posts a JSON body over a connection and reads the JSON response.
    pub(crate) async fn post_json(
        mut stream: impl AsyncRead + AsyncWrite + Unpin,
        path: &str,
        body: &Value,
    ) -> Value {
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
             Connection: close\r\n\r\n",
            body.len()
        );
        stream.write_all((head + &body).as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        let answer = String::from_utf8(answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
    }

    /// Connects with TLS and trusts this certificate only.
    pub(crate) async fn connect(
        address: SocketAddr,
        trusted: &Certificate,
    ) -> io::Result<impl AsyncRead + AsyncWrite + Unpin> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(trusted.certificate.as_bytes()).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect(address).await?;
        let name = ServerName::try_from("localhost").unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, stream).await
    }

    fn echo() -> Router {
        Router::new().route("/", post(async |body: axum::Json<Value>| body))
    }

    fn loopback() -> SocketAddr {
        "127.0.0.1:0".parse().unwrap()
    }

    #[tokio::test]
    async fn tls_is_served_to_clients_that_trust_the_certificate() {
        let certificate = certificate();
        let server = TestServer::tls(loopback(), &certificate, echo()).await.unwrap();
        // A client that never speaks does not delay others.
        let silent = TcpStream::connect(server.address).await.unwrap();
        let stream = connect(server.address, &certificate).await.unwrap();
        assert_eq!(post_json(stream, "/", &json!({"a": 1})).await, json!({"a": 1}));
        assert!(connect(server.address, &self::certificate()).await.is_err(), "signed by another");
        drop(silent);
    }

    #[tokio::test]
    async fn stopped_server_frees_its_port() {
        let first = TestServer::plain(loopback(), echo()).await.unwrap();
        let address = first.address;
        // Kept open, as kube-scheduler keeps its connection.
        let idle = TcpStream::connect(address).await.unwrap();
        first.stop().await;
        assert!(TcpStream::connect(address).await.is_err(), "the port is closed");
        drop(idle);
        let second = TestServer::plain(address, echo()).await.unwrap();
        let stream = TcpStream::connect(second.address).await.unwrap();
        assert_eq!(post_json(stream, "/", &json!(["again"])).await, json!(["again"]));
    }

    #[tokio::test]
    async fn unusable_address_or_certificate_is_reported() {
        let server = TestServer::plain(loopback(), echo()).await.unwrap();
        let taken = TestServer::plain(server.address, echo()).await.err().unwrap().to_string();
        assert!(taken.starts_with(&format!("cannot listen on {}: ", server.address)), "{taken}");
        let bad = Certificate { certificate: "no".into(), key: "no".into() };
        let bad = TestServer::tls(loopback(), &bad, echo()).await.err().unwrap().to_string();
        let expected =
            "cannot serve TLS with this certificate and key: invalid certificate in the PEM text: ";
        assert!(bad.starts_with(expected), "{bad}");
    }
}
