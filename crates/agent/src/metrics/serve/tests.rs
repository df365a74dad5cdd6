use super::super::tests::report;
use super::*;
use partage_testkit::http_client::connect_tls_unverified;
use partage_testkit::openmetrics::Exposition;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

/// A server on a port of its own.
struct RunningServer {
    address: SocketAddr,
    stop: CancellationToken,
    task: JoinHandle<()>,
    reports: Arc<AtomicUsize>,
    ready: Arc<AtomicBool>,
}

async fn start(anonymous: bool) -> RunningServer {
    let settings = MetricsSettings { address: "127.0.0.1:0".parse().unwrap(), anonymous };
    // Time limits are tested in `partage-serve`; here a slow machine must not reach them.
    let minute = Duration::from_secs(60);
    let limits = ServerLimits { head_timeout: minute, request_timeout: minute, ..ServerLimits::default() };
    let server = MetricsServer::bind_with(&settings, guarded(), limits).await.unwrap();
    let (address, stop) = (server.address(), CancellationToken::new());
    let (reports, ready) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let (counter, is_ready) = (Arc::clone(&reports), Arc::clone(&ready));
    let counted = move || {
        counter.fetch_add(1, Ordering::SeqCst);
        report()
    };
    let ready_now = move || {
        let registered = is_ready.load(Ordering::SeqCst);
        if registered { Ok(()) } else { Err(NotReady::new("it is not registered with kubelet yet")) }
    };
    let task = tokio::spawn(server.run(counted, ready_now, stop.clone()));
    RunningServer { address, stop, task, reports, ready }
}

async fn ask(mut stream: impl AsyncRead + AsyncWrite + Unpin, path: &str, headers: &str) -> String {
    let head = format!("GET {path} HTTP/1.1\r\nHost: node\r\n{headers}\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut response = Vec::new();
    // The connection ends after one response, not always with a TLS alert.
    let _ = stream.read_to_end(&mut response).await;
    String::from_utf8(response).unwrap()
}

async fn plain(address: SocketAddr, path: &str, headers: &str) -> String {
    ask(TcpStream::connect(address).await.unwrap(), path, headers).await
}

async fn tls(address: SocketAddr, path: &str, headers: &str) -> String {
    ask(connect_tls_unverified(address).await.unwrap(), path, headers).await
}

/// Allows one token, and cannot review another.
fn guarded() -> Arc<BearerAuth> {
    token_auth(|token| async move {
        match token.as_str() {
            "early" => Err("connection refused"),
            token => Ok(token == "prometheus"),
        }
    })
}

#[tokio::test]
async fn anonymous_metrics_are_served_over_plain_http() {
    let running = start(true).await;
    for path in ["/metrics", "/metric"] {
        let response = plain(running.address, path, "").await;
        assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
        assert!(
            response.contains("content-type: text/plain; version=0.0.4; charset=utf-8\r\n"),
            "{response}"
        );
        assert!(response.contains("connection: close\r\n"), "{response}");
        assert!(response.contains("\n# TYPE partage_refused_total counter\n"), "{response}");
    }
    let accept = "Accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.1\r\n";
    let response = plain(running.address, "/metrics", accept).await;
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    assert!(
        head.contains("content-type: application/openmetrics-text; version=1.0.0; charset=utf-8"),
        "{head}"
    );
    let all = Exposition::parse(body).unwrap();
    assert_eq!(all.value("partage_refused_total", &[]), Some(4.0));
}

#[tokio::test]
async fn metrics_require_a_token_unless_anonymous() {
    let running = start(false).await;
    for (headers, status, expected) in [
        ("", "401 Unauthorized", "Authorization: Bearer"),
        ("Authorization: Basic cHJvbTpwcm9t\r\n", "401 Unauthorized", "Authorization: Bearer"),
        ("Authorization: Bearer tenant\r\n", "403 Forbidden", "this token may not read metrics"),
        ("Authorization: Bearer early\r\n", "503 Service Unavailable", "connection refused"),
        ("Authorization: Bearer prometheus\r\n", "200 OK", "partage_info"),
    ] {
        for path in ["/metrics", "/metric"] {
            let response = tls(running.address, path, headers).await;
            assert!(response.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{headers}: {response}");
            assert!(response.contains(expected), "{headers}: {response}");
            let challenge = response.contains("www-authenticate: Bearer\r\n");
            assert_eq!(challenge, status.starts_with("401"), "{response}");
            assert_eq!(response.contains("partage_info"), status.starts_with("200"), "{response}");
        }
    }
}

#[tokio::test]
async fn plain_http_on_the_https_port_gets_a_hint() {
    let running = start(false).await;
    for headers in ["", "Authorization: Bearer prometheus\r\n"] {
        let response = plain(running.address, "/metrics", headers).await;
        assert!(response.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{response}");
        for expected in ["use https:// in the URL", "Authorization: Bearer", "metrics.anonymous: true"] {
            assert!(response.contains(expected), "{response}");
        }
        assert!(!response.contains("partage_info"), "a token must not work in the clear: {response}");
    }
}

#[tokio::test]
async fn health_requires_no_token() {
    let running = start(false).await;
    assert!(tls(running.address, "/healthz", "").await.ends_with("\r\n\r\nok\n"));
    let early = tls(running.address, "/readyz", "").await;
    assert!(early.starts_with("HTTP/1.1 503 "), "{early}");
    assert!(early.ends_with("it is not registered with kubelet yet\n"), "{early}");
    running.ready.store(true, Ordering::SeqCst);
    assert!(tls(running.address, "/readyz", "").await.starts_with("HTTP/1.1 200 "));
    assert!(tls(running.address, "/", "").await.starts_with("HTTP/1.1 404 "));
    assert_eq!(running.reports.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn concurrent_scrapes_share_one_report() {
    let running = start(true).await;
    let scrapes = (0..8).map(|_| plain(running.address, "/metrics", ""));
    let responses = futures::future::join_all(scrapes).await;
    assert!(responses.iter().all(|response| response.starts_with("HTTP/1.1 200 ")), "{responses:?}");
    assert!(running.reports.load(Ordering::SeqCst) < 8, "most received a text that another scrape rendered");
}

#[tokio::test]
async fn stopped_server_frees_its_port() {
    let running = start(true).await;
    let idle = TcpStream::connect(running.address).await.unwrap();
    drop(idle);
    running.stop.cancel();
    running.task.await.unwrap();
    let again = MetricsSettings { address: running.address, anonymous: true };
    let server = MetricsServer::bind(&again, guarded()).await.unwrap();
    let taken = MetricsServer::bind(&again, guarded()).await.err().unwrap();
    assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
    drop(server);
}
