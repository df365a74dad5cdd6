//! One question over HTTP, as `curl` asks it; over TLS as `curl --insecure` does: nobody looks who signed the certificate.

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

/// A question to come.
#[derive(Clone, Debug)]
pub struct Fetch {
    address: SocketAddr,
    tls: bool,
    headers: String,
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Its status: 200, 401.
    pub status: u16,
    /// Everything after the headers.
    pub body: String,
}

impl Fetch {
    /// In the clear.
    pub fn plain(address: SocketAddr) -> Fetch {
        Fetch { address, tls: false, headers: String::new() }
    }

    /// Over TLS, whoever signed the certificate.
    pub fn tls(address: SocketAddr) -> Fetch {
        Fetch { tls: true, ..Fetch::plain(address) }
    }

    /// With one more header.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Fetch {
        self.headers += &format!("{name}: {value}\r\n");
        self
    }

    /// Asks for a path.
    pub async fn get(&self, path: &str) -> io::Result<Answer> {
        match self.tls {
            true => self.ask(secured(self.address).await?, path).await,
            false => self.ask(TcpStream::connect(self.address).await?, path).await,
        }
    }

    async fn ask(&self, mut stream: impl AsyncRead + AsyncWrite + Unpin, path: &str) -> io::Result<Answer> {
        let Fetch { address, headers, .. } = self;
        let question =
            format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n{headers}Connection: close\r\n\r\n");
        stream.write_all(question.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        let wrong = || io::Error::other(format!("no answer of HTTP: {answer}"));
        let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(wrong)?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(wrong)?;
        Ok(Answer { status, body: body.to_string() })
    }
}

/// A connection with TLS to whoever answers.
pub async fn secured(address: SocketAddr) -> io::Result<TlsStream<TcpStream>> {
    let provider = Arc::new(ring::default_provider());
    let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anybody(provider)))
        .with_no_client_auth();
    let stream = TcpStream::connect(address).await?;
    TlsConnector::from(Arc::new(config)).connect(ServerName::from(address.ip()), stream).await
}

/// Takes every certificate; that its owner has the key is still shown.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
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
    use super::Fetch;
    use crate::serving::{Serving, tests::certificate};
    use axum::Router;
    use axum::http::HeaderMap;
    use axum::routing::get;

    #[tokio::test]
    async fn asks_in_the_clear_and_over_tls() {
        let router = Router::new()
            .route("/x", get(async |headers: HeaderMap| headers["x-word"].to_str().unwrap().to_string()));
        let anywhere = "127.0.0.1:0".parse().unwrap();
        let plain = Serving::plain(anywhere, router.clone()).await.unwrap();
        let tls = Serving::tls(anywhere, &certificate(), router).await.unwrap();
        for fetch in [Fetch::plain(plain.address), Fetch::tls(tls.address)] {
            let answer = fetch.clone().header("X-Word", "good").get("/x").await.unwrap();
            assert_eq!((answer.status, answer.body.as_str()), (200, "good"));
            assert_eq!(fetch.get("/y").await.unwrap().status, 404);
        }
        assert!(Fetch::tls(plain.address).get("/x").await.is_err(), "not where nobody speaks TLS");
    }
}
