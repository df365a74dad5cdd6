//! A minimal HTTP client like `curl`. With TLS it accepts any certificate, as `curl --insecure` does.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{ClientConfig, DigitallySignedStruct, Error, SignatureScheme};

/// A client for one server address.
#[derive(Clone, Debug)]
pub struct HttpClient {
    address: SocketAddr,
    tls: bool,
    headers: String,
}

/// Response to an HTTP request.
#[derive(Clone, Debug)]
pub struct HttpResponse {
    /// The status code, such as 200 or 401.
    pub status: u16,
    /// Everything after the headers.
    pub body: String,
}

impl HttpClient {
    /// Returns a client for plain HTTP.
    pub fn plain(address: SocketAddr) -> HttpClient {
        HttpClient { address, tls: false, headers: String::new() }
    }

    /// Returns a client for TLS that accepts any certificate.
    pub fn tls(address: SocketAddr) -> HttpClient {
        HttpClient { tls: true, ..HttpClient::plain(address) }
    }

    /// Adds a header to all requests.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> HttpClient {
        self.headers += &format!("{name}: {value}\r\n");
        self
    }

    /// Sends a GET request for a path.
    pub async fn get(&self, path: &str) -> io::Result<HttpResponse> {
        if self.tls {
            self.send_get(connect_tls_unverified(self.address).await?, path).await
        } else {
            self.send_get(TcpStream::connect(self.address).await?, path).await
        }
    }

    async fn send_get(
        &self,
        mut stream: impl AsyncRead + AsyncWrite + Unpin,
        path: &str,
    ) -> io::Result<HttpResponse> {
        let HttpClient { address, headers, .. } = self;
        let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n{headers}Connection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut response = String::new();
        stream.read_to_string(&mut response).await?;
        let wrong = || io::Error::other(format!("malformed HTTP response: {response}"));
        let (head, body) = response.split_once("\r\n\r\n").ok_or_else(wrong)?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(wrong)?;
        Ok(HttpResponse { status, body: body.to_string() })
    }
}

/// Opens a TLS connection without verifying who signed the server's certificate.
pub async fn connect_tls_unverified(address: SocketAddr) -> io::Result<TlsStream<TcpStream>> {
    let provider = Arc::new(ring::default_provider());
    let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AcceptAnyCertificate(provider)))
        .with_no_client_auth();
    let stream = TcpStream::connect(address).await?;
    TlsConnector::from(Arc::new(config)).connect(ServerName::from(address.ip()), stream).await
}

/// Accepts every certificate. The handshake still proves that the server has its key.
#[derive(Debug)]
struct AcceptAnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AcceptAnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::HttpClient;
    use crate::test_server::{TestServer, tests::certificate};
    use axum::Router;
    use axum::http::HeaderMap;
    use axum::routing::get;

    #[tokio::test]
    async fn get_works_over_plain_http_and_tls() {
        let router = Router::new()
            .route("/x", get(async |headers: HeaderMap| headers["x-word"].to_str().unwrap().to_string()));
        let anywhere = "127.0.0.1:0".parse().unwrap();
        let plain = TestServer::plain(anywhere, router.clone()).await.unwrap();
        let tls = TestServer::tls(anywhere, &certificate(), router).await.unwrap();
        for http_client in [HttpClient::plain(plain.address), HttpClient::tls(tls.address)] {
            let response = http_client.clone().header("X-Word", "good").get("/x").await.unwrap();
            assert_eq!((response.status, response.body.as_str()), (200, "good"));
            assert_eq!(http_client.get("/y").await.unwrap().status, 404);
        }
        assert!(HttpClient::tls(plain.address).get("/x").await.is_err(), "the server does not use TLS");
    }
}
