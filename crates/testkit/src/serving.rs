//! A test's own HTTP server that the control plane calls: plain or TLS, ended when dropped.

use crate::bed::Certificate;
use axum::Router;
use axum::serve::{Listener, ListenerExt};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

/// A client that does not finish its handshake is let go.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Why a test's server does not serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}; is the address of this host, and its port free?")]
    Listen {
        /// The address asked for.
        address: SocketAddr,
        /// What the kernel says.
        source: io::Error,
    },
    /// The certificate or key is not usable.
    #[error("cannot serve TLS with this certificate and key: {0}; write both as PEM, of one pair")]
    Certificate(String),
}

/// A server that runs until it is stopped or dropped.
pub(crate) struct Serving {
    pub(crate) address: SocketAddr,
    end: CancellationToken,
    task: JoinHandle<()>,
}

impl Serving {
    pub(crate) async fn plain(address: SocketAddr, router: Router) -> Result<Serving, ServeError> {
        let listener = listen(address).await?;
        let address = listener.local_addr().map_err(|source| ServeError::Listen { address, source })?;
        Ok(Serving::run(address, listener.tap_io(|stream| no_delay(stream)), router))
    }

    pub(crate) async fn tls(
        address: SocketAddr,
        certificate: &Certificate,
        router: Router,
    ) -> Result<Serving, ServeError> {
        let acceptor = acceptor(certificate).map_err(ServeError::Certificate)?;
        let listener = listen(address).await?;
        let address = listener.local_addr().map_err(|source| ServeError::Listen { address, source })?;
        Ok(Serving::run(address, TlsListener::new(listener, acceptor, address), router))
    }

    fn run<L: Listener>(address: SocketAddr, listener: L, router: Router) -> Serving
    where
        L::Addr: std::fmt::Debug,
    {
        let end = CancellationToken::new();
        let ended = end.clone().cancelled_owned();
        let task = tokio::spawn(async move {
            // It only ends by the token.
            let _ = axum::serve(listener, router).with_graceful_shutdown(ended).await;
        });
        Serving { address, end, task }
    }

    /// Ends it. What is being answered is answered; after that the port is free.
    pub(crate) async fn stop(mut self) {
        self.end.cancel();
        let _ = (&mut self.task).await;
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.end.cancel();
    }
}

async fn listen(address: SocketAddr) -> Result<TcpListener, ServeError> {
    TcpListener::bind(address).await.map_err(|source| ServeError::Listen { address, source })
}

/// Without this, an answer in two packets waits for the other side's delayed acknowledgement: 40 ms for every call.
fn no_delay(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
}

fn acceptor(certificate: &Certificate) -> Result<TlsAcceptor, String> {
    let chain = CertificateDer::pem_slice_iter(certificate.certificate.as_bytes())
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| format!("in the chain, {e}"))?;
    let key =
        PrivateKeyDer::from_pem_slice(certificate.key.as_bytes()).map_err(|e| format!("in the key, {e}"))?;
    // The provider by name: no default of the whole process is asked for or set.
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
        .map_err(|e| e.to_string())?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Handshakes happen beside each other: a slow client does not hold up the others.
struct TlsListener {
    ready: mpsc::Receiver<(TlsStream<TcpStream>, SocketAddr)>,
    address: SocketAddr,
    accepting: JoinHandle<()>,
}

impl TlsListener {
    fn new(mut listener: TcpListener, acceptor: TlsAcceptor, address: SocketAddr) -> TlsListener {
        let (done, ready) = mpsc::channel(16);
        let accepting = tokio::spawn(async move {
            loop {
                let (stream, peer) = Listener::accept(&mut listener).await;
                no_delay(&stream);
                let (done, handshake) = (done.clone(), acceptor.accept(stream));
                tokio::spawn(async move {
                    if let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE, handshake).await {
                        // Where nobody takes it any more, the server has ended.
                        let _ = done.send((stream, peer)).await;
                    }
                });
            }
        });
        TlsListener { ready, address, accepting }
    }
}

impl Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.ready.recv().await {
            Some(accepted) => accepted,
            // The accepting task never ends by itself.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        Ok(self.address)
    }
}

impl Drop for TlsListener {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use axum::routing::post;
    use serde_json::{Value, json};
    use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::pki_types::ServerName;
    use tokio_rustls::rustls::{ClientConfig, RootCertStore};

    /// A certificate for `localhost` that signs itself.
    pub(crate) fn certificate() -> Certificate {
        let made = rcgen::generate_simple_self_signed(["localhost".to_string()]).unwrap();
        Certificate { certificate: made.cert.pem(), key: made.signing_key.serialize_pem() }
    }

    /// Posts a JSON body over this connection and reads the JSON answer.
    pub(crate) async fn ask(
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

    /// Connects with TLS, trusting this certificate only.
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
    async fn serves_tls_to_those_who_trust_it() {
        let certificate = certificate();
        let serving = Serving::tls(loopback(), &certificate, echo()).await.unwrap();
        // Somebody who never speaks holds up nobody.
        let silent = TcpStream::connect(serving.address).await.unwrap();
        let stream = connect(serving.address, &certificate).await.unwrap();
        assert_eq!(ask(stream, "/", &json!({"a": 1})).await, json!({"a": 1}));
        assert!(connect(serving.address, &self::certificate()).await.is_err(), "signed by somebody else");
        drop(silent);
    }

    #[tokio::test]
    async fn a_stopped_server_frees_its_port() {
        let first = Serving::plain(loopback(), echo()).await.unwrap();
        let address = first.address;
        // Kept open, as kube-scheduler keeps its connection.
        let idle = TcpStream::connect(address).await.unwrap();
        first.stop().await;
        assert!(TcpStream::connect(address).await.is_err(), "nobody listens");
        drop(idle);
        let second = Serving::plain(address, echo()).await.unwrap();
        let stream = TcpStream::connect(second.address).await.unwrap();
        assert_eq!(ask(stream, "/", &json!(["again"])).await, json!(["again"]));
    }

    #[tokio::test]
    async fn what_cannot_be_served_is_said_in_words() {
        let serving = Serving::plain(loopback(), echo()).await.unwrap();
        let taken = Serving::plain(serving.address, echo()).await.err().unwrap().to_string();
        assert!(taken.starts_with(&format!("cannot listen on {}: ", serving.address)), "{taken}");
        let bad = Certificate { certificate: "no".into(), key: "no".into() };
        let bad = Serving::tls(loopback(), &bad, echo()).await.err().unwrap().to_string();
        assert!(bad.starts_with("cannot serve TLS with this certificate and key: in the key, "), "{bad}");
    }
}
