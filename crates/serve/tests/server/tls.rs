//! HTTPS: certificates, their reload, client certificates, and plain HTTP on an HTTPS port.

use crate::client::{KeyPair, connect, exchange, is_closed, plain, request_on, start, unhurried};
use axum::routing::get;
use axum::{Extension, Router};
use partage_serve::{
    AuthMessages, BearerAuth, CertificateSource, ClientCertificates, HttpServer, PeerAddress,
    PeerCertificate, ServerLimits, TlsIdentity, TlsOptions, Transport,
};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: server.example\r\n\r\n";

fn hello() -> Router {
    Router::new()
        .route("/", get(async |Extension(peer): Extension<PeerAddress>| format!("hello {}\n", peer.0)))
}

fn pem(pair: &KeyPair) -> CertificateSource {
    CertificateSource::Pem { certificate: pair.certificate.clone(), key: pair.key.clone() }
}

fn transport(options: TlsOptions) -> Transport {
    Transport::Tls(Arc::new(TlsIdentity::load(options).unwrap()))
}

fn write(folder: &Path, pair: &KeyPair) {
    // As kubelet does: a reader finds complete files.
    for (name, text) in [("tls.crt", &pair.certificate), ("tls.key", &pair.key)] {
        std::fs::write(folder.join("new"), text).unwrap();
        std::fs::rename(folder.join("new"), folder.join(name)).unwrap();
    }
}

fn files(folder: &Path) -> TlsOptions {
    let source =
        CertificateSource::Files { certificate: folder.join("tls.crt"), key: folder.join("tls.key") };
    TlsOptions { reload_interval: Duration::from_millis(20), ..TlsOptions::new(source) }
}

#[tokio::test]
async fn client_that_trusts_the_certificate_is_served() {
    let pair = KeyPair::generate();
    let running = start(transport(TlsOptions::new(pem(&pair))), unhurried(), hello()).await;
    // A client that never speaks does not delay others.
    let silent = TcpStream::connect(running.address).await.unwrap();
    let response = exchange(connect(running.address, &pair, None).await.unwrap(), GET).await;
    assert!(response.ends_with("hello 127.0.0.1\n"), "{response}");
    assert!(connect(running.address, &KeyPair::generate(), None).await.is_err(), "signed by another");
    drop(silent);
}

#[tokio::test]
async fn plain_http_on_an_https_port_is_answered_with_a_hint() {
    let pair = KeyPair::generate();
    let auth = BearerAuth::new(
        |_| async { Ok::<_, std::io::Error>(true) },
        AuthMessages { missing_token: "send a token", forbidden: "not allowed" },
    );
    let router = Arc::new(auth).protect(hello());
    let running = start(transport(TlsOptions::new(pem(&pair))), unhurried(), router.clone()).await;
    for request in
        ["GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer x\r\n\r\n", "POST /x HTTP/1.0\r\n\r\n"]
    {
        let response = plain(running.address, request.as_bytes()).await;
        assert!(
            response.starts_with("HTTP/1.1 400 Bad Request\r\n") || response.starts_with("HTTP/1.0 400 ")
        );
        let hint = "this port serves HTTPS: send the request again with https:// in the URL\n";
        assert!(response.ends_with(hint), "{response}");
        assert!(!response.contains("hello"), "{response}");
    }
    // The daemon may know better what to do.
    let address = "127.0.0.1:0".parse().unwrap();
    let tls = transport(TlsOptions::new(pem(&pair)));
    let server = HttpServer::bind(address, tls, unhurried()).await.unwrap().plain_http_hint("use https");
    let (address, stop) = (server.address(), CancellationToken::new());
    let task = tokio::spawn(server.run(router, stop.clone()));
    assert!(plain(address, GET).await.ends_with("\r\n\r\nuse https\n"));
    stop.cancel();
    task.await.unwrap();
}

#[tokio::test]
async fn plain_http_client_that_stays_silent_is_closed() {
    let limits = ServerLimits { head_timeout: Duration::from_millis(200), ..unhurried() };
    let running = start(transport(TlsOptions::new(pem(&KeyPair::generate()))), limits, hello()).await;
    let mut silent = TcpStream::connect(running.address).await.unwrap();
    assert!(is_closed(&mut silent).await);
    assert_eq!(
        plain(running.address, b"GET / HTTP/1.1\r\n").await,
        "",
        "an incomplete request times out, too"
    );
}

#[tokio::test]
async fn changed_files_are_reloaded_without_closing_connections() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (KeyPair::generate(), KeyPair::generate());
    write(folder.path(), &old);
    let limits = ServerLimits { idle_timeout: Some(Duration::from_secs(3600)), ..unhurried() };
    let running = start(transport(files(folder.path())), limits, hello()).await;
    let mut kept = connect(running.address, &old, None).await.unwrap();
    assert!(request_on(&mut kept, GET).await.ends_with("hello 127.0.0.1\n"));

    write(folder.path(), &new);
    let reloaded = async {
        while connect(running.address, &new, None).await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), reloaded).await.expect("the new certificate is in use");
    assert!(connect(running.address, &old, None).await.is_err());
    assert!(request_on(&mut kept, GET).await.ends_with("hello 127.0.0.1\n"), "it keeps its certificate");
}

#[test]
fn unusable_files_leave_the_last_certificate_in_place() {
    let folder = tempfile::tempdir().unwrap();
    let (old, other) = (KeyPair::generate(), KeyPair::generate());
    write(folder.path(), &old);
    let identity = TlsIdentity::load(files(folder.path())).unwrap();
    assert!(!identity.reload().unwrap(), "nothing has changed");
    std::fs::write(folder.path().join("tls.key"), &other.key).unwrap();
    let error = identity.reload().unwrap_err().to_string();
    assert!(error.starts_with("cannot use the certificate and key in "), "{error}");
    std::fs::write(folder.path().join("tls.key"), "not a key").unwrap();
    let error = identity.reload().unwrap_err().to_string();
    assert!(error.starts_with("invalid private key in ") && error.contains("tls.key"), "{error}");
    std::fs::remove_file(folder.path().join("tls.key")).unwrap();
    let error = identity.reload().unwrap_err().to_string();
    assert!(error.starts_with("cannot read ") && error.contains("tls.key"), "{error}");
    write(folder.path(), &other);
    assert!(identity.reload().unwrap());
    std::fs::write(folder.path().join("tls.crt"), "").unwrap();
    let error = TlsIdentity::load(files(folder.path())).unwrap_err().to_string();
    assert!(error.starts_with("invalid certificate in ") && error.contains("PEM"), "{error}");
}

#[tokio::test]
async fn client_certificates_are_required_or_optional() {
    let folder = tempfile::tempdir().unwrap();
    let (server, client, unknown) = (KeyPair::generate(), KeyPair::generate(), KeyPair::generate());
    let authorities = folder.path().join("clients.crt");
    std::fs::write(&authorities, &client.certificate).unwrap();
    let router = Router::new().route(
        "/",
        get(async |certificate: Option<Extension<PeerCertificate>>| match certificate {
            Some(_) => "known\n",
            None => "anonymous\n",
        }),
    );
    for (required, without) in [(false, "anonymous\n"), (true, "")] {
        let path = authorities.clone();
        let clients =
            if required { ClientCertificates::Required(path) } else { ClientCertificates::Optional(path) };
        let options = TlsOptions { client_certificates: clients, ..TlsOptions::new(pem(&server)) };
        let running = start(transport(options), unhurried(), router.clone()).await;
        for (own, body) in [(Some(&client), "known\n"), (None, without), (Some(&unknown), "")] {
            // With TLS 1.3 a refused client learns of it when it reads.
            let response = match connect(running.address, &server, own).await {
                Ok(stream) => exchange(stream, GET).await,
                Err(_) => String::new(),
            };
            assert_eq!(response.rsplit("\r\n\r\n").next().unwrap(), body, "required: {required}");
        }
    }
    std::fs::write(&authorities, "nothing").unwrap();
    let clients = ClientCertificates::Required(authorities);
    let options = TlsOptions { client_certificates: clients, ..TlsOptions::new(pem(&server)) };
    let error = TlsIdentity::load(options).unwrap_err().to_string();
    assert!(error.starts_with("invalid client certificate authorities in "), "{error}");
}

#[tokio::test]
async fn protected_routes_require_a_token() {
    let pair = KeyPair::generate();
    let auth = BearerAuth::new(
        |token| async move { Ok::<_, std::io::Error>(token == "reader") },
        AuthMessages { missing_token: "send a token", forbidden: "not allowed" },
    );
    let router = Arc::new(auth).protect(hello());
    let running = start(transport(TlsOptions::new(pem(&pair))), unhurried(), router).await;
    for (authorization, status, body) in [
        ("", "401 Unauthorized", "send a token\n"),
        ("Authorization: Bearer other\r\n", "403 Forbidden", "not allowed\n"),
        ("Authorization: Bearer reader\r\n", "200 OK", "hello 127.0.0.1\n"),
    ] {
        let request = format!("GET / HTTP/1.1\r\nHost: a\r\n{authorization}\r\n");
        let stream = connect(running.address, &pair, None).await.unwrap();
        let response = exchange(stream, request.as_bytes()).await;
        assert!(response.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{response}");
        assert!(response.ends_with(body), "{response}");
        assert_eq!(
            response.contains("www-authenticate: Bearer\r\n"),
            status.starts_with("401"),
            "{response}"
        );
    }
}
