//! Connections that exceed a limit are closed, and never keep others from being served.

use crate::client::{RunningServer, is_closed, plain, request_on, start, unhurried};
use axum::Router;
use axum::body::Bytes;
use axum::routing::{get, post};
use partage_serve::{HttpServer, NotReady, ServerLimits, Transport, health_routes};
use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio_util::sync::CancellationToken;

const PROBE: &[u8] = b"GET /healthz HTTP/1.1\r\nHost: node\r\n\r\n";

fn echo() -> Router {
    Router::new().route("/echo", post(async |body: Bytes| body)).merge(health_routes(|| Ok(())))
}

/// A route `/slow` that reports when a request has arrived, and answers `finished` when the test allows it.
fn slow() -> (Router, CancellationToken, CancellationToken) {
    let (received, answer) = (CancellationToken::new(), CancellationToken::new());
    let (arrived, released) = (received.clone(), answer.clone());
    let handler = async move || {
        arrived.cancel();
        released.cancelled().await;
        "finished\n"
    };
    (Router::new().route("/slow", get(handler)), received, answer)
}

async fn probe(running: &RunningServer) -> String {
    plain(running.address, PROBE).await
}

async fn connect_from(source: [u8; 4], to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from((source, 0))).unwrap();
    socket.connect(to).await.unwrap()
}

fn is_open(stream: &TcpStream) -> bool {
    matches!(stream.try_read(&mut [0; 1]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

#[tokio::test]
async fn silent_connections_are_displaced_and_never_block_a_probe() {
    // No connection ends by time: a probe is answered beside the others or not at all.
    let limits = ServerLimits { max_connections: 64, ..unhurried() };
    let running = start(Transport::Plain, limits, echo()).await;
    let mut kept = Vec::new();
    for client in 2..8 {
        for number in 0..12 {
            let mut stream = connect_from([127, 0, 0, client], running.address).await;
            // An incomplete request.
            let _ = stream.write_all(b"GET").await;
            if number < limits.max_connections_per_address {
                kept.push(stream);
            } else {
                assert!(is_closed(&mut stream).await, "one address has 8 connections");
            }
        }
    }
    let response = probe(&running).await;
    assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
    assert!(kept.iter().all(is_open));
    // Many more clients, which take all 64 connections: the one that has been silent for longest makes way.
    for number in 0..100_u16 {
        let [_, client] = (number / 8).to_be_bytes();
        kept.push(connect_from([127, 0, 1, client + 1], running.address).await);
    }
    let response = probe(&running).await;
    assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
    let [first, .., last] = kept.as_mut_slice() else { panic!("there are many") };
    assert!(is_closed(first).await, "it was silent for longest");
    assert!(is_open(last));
}

#[tokio::test]
async fn incomplete_request_times_out_while_a_complete_one_may_take_longer() {
    let (slow, received, answer) = slow();
    let limits = ServerLimits { request_timeout: Duration::from_secs(3600), ..ServerLimits::default() };
    let running = start(Transport::Plain, limits, slow).await;
    let slow =
        tokio::spawn(
            async move { plain(running.address, b"GET /slow HTTP/1.1\r\nHost: node\r\n\r\n").await },
        );
    received.cancelled().await;
    let mut half = TcpStream::connect(running.address).await.unwrap();
    half.write_all(b"GET /slow HTTP/1.1\r\n").await.unwrap();
    let mut silent = TcpStream::connect(running.address).await.unwrap();
    assert!(is_closed(&mut half).await && is_closed(&mut silent).await);
    answer.cancel();
    let response = slow.await.unwrap();
    assert!(response.ends_with("finished\n"), "{response}");
}

#[tokio::test]
async fn request_that_takes_too_long_is_closed() {
    let router = Router::new().route("/never", get(async || std::future::pending::<()>().await));
    let limits = ServerLimits { request_timeout: Duration::from_millis(200), ..unhurried() };
    let running = start(Transport::Plain, limits, router).await;
    let response = plain(running.address, b"GET /never HTTP/1.1\r\nHost: node\r\n\r\n").await;
    assert_eq!(response, "");
}

#[tokio::test]
async fn oversized_head_is_refused() {
    let running = start(Transport::Plain, unhurried(), echo()).await;
    let head = format!("GET /healthz HTTP/1.1\r\nHost: node\r\nX: {}\r\n\r\n", "x".repeat(20 << 10));
    let response = plain(running.address, head.as_bytes()).await;
    assert!(!response.starts_with("HTTP/1.1 200 "), "{response}");
    assert!(probe(&running).await.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn oversized_body_is_refused_whether_or_not_it_is_announced() {
    let limits = ServerLimits { max_body_bytes: 100, ..unhurried() };
    let running = start(Transport::Plain, limits, echo()).await;
    let fits = format!("POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{}", "x".repeat(100));
    let response = plain(running.address, fits.as_bytes()).await;
    assert!(response.starts_with("HTTP/1.1 200 ") && response.ends_with(&"x".repeat(100)), "{response}");
    let announced =
        format!("POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 101\r\n\r\n{}", "x".repeat(101));
    let response = plain(running.address, announced.as_bytes()).await;
    assert!(response.starts_with("HTTP/1.1 413 ") && response.contains("limit of 100 bytes"), "{response}");
    let chunk = format!("65\r\n{}\r\n0\r\n\r\n", "x".repeat(101));
    let chunked = format!("POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n{chunk}");
    let response = plain(running.address, chunked.as_bytes()).await;
    assert!(response.starts_with("HTTP/1.1 413 "), "{response}");
}

#[tokio::test]
async fn connection_carries_one_request_without_keep_alive_and_no_http2() {
    let http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".as_slice();
    let pipelined = [PROBE, PROBE].concat();
    let running = start(Transport::Plain, unhurried(), echo()).await;
    for (request, responses) in [(http2, 0), (&pipelined, 1)] {
        let response = plain(running.address, request).await;
        assert_eq!(response.matches("HTTP/1.1 200 ").count(), responses, "{response}");
        assert!(response.is_empty() || response.starts_with("HTTP/1.1 "), "{response}");
    }
}

#[tokio::test]
async fn kept_connection_carries_many_requests_and_idles_for_a_limited_time() {
    let hour = Duration::from_secs(3600);
    let limits = ServerLimits { idle_timeout: Some(hour), max_connections: 2, ..unhurried() };
    let running = start(Transport::Plain, limits, echo()).await;
    let mut kept = TcpStream::connect(running.address).await.unwrap();
    for _ in 0..3 {
        assert!(request_on(&mut kept, PROBE).await.ends_with("ok\n"));
    }
    let last = b"GET /healthz HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n".as_slice();
    let pipelined = plain(running.address, &[PROBE, PROBE, last].concat()).await;
    assert_eq!(pipelined.matches("HTTP/1.1 200 ").count(), 3, "{pipelined}");

    // An idle connection makes way for newer ones.
    let mut newer = TcpStream::connect(running.address).await.unwrap();
    assert!(request_on(&mut newer, PROBE).await.ends_with("ok\n"));
    let mut newest = TcpStream::connect(running.address).await.unwrap();
    assert!(request_on(&mut newest, PROBE).await.ends_with("ok\n"));
    assert!(is_closed(&mut kept).await);

    let limits = ServerLimits { idle_timeout: Some(Duration::from_millis(200)), ..unhurried() };
    let running = start(Transport::Plain, limits, echo()).await;
    let mut idle = TcpStream::connect(running.address).await.unwrap();
    assert!(request_on(&mut idle, PROBE).await.ends_with("ok\n"));
    assert!(is_closed(&mut idle).await);
}

#[tokio::test]
async fn shutdown_finishes_requests_in_progress_and_frees_the_port() {
    let (slow_route, received, answer) = slow();
    let limits = ServerLimits { idle_timeout: Some(Duration::from_secs(3600)), ..unhurried() };
    let running = start(Transport::Plain, limits, slow_route.merge(echo())).await;
    let mut idle = TcpStream::connect(running.address).await.unwrap();
    assert!(request_on(&mut idle, PROBE).await.ends_with("ok\n"));
    let mut silent = TcpStream::connect(running.address).await.unwrap();
    let mut slow = TcpStream::connect(running.address).await.unwrap();
    slow.write_all(b"GET /slow HTTP/1.1\r\nHost: node\r\n\r\n").await.unwrap();
    received.cancelled().await;
    running.stop.cancel();
    assert!(is_closed(&mut idle).await && is_closed(&mut silent).await);
    answer.cancel();
    let mut response = String::new();
    slow.read_to_string(&mut response).await.unwrap();
    assert!(response.ends_with("finished\n"), "{response}");
    running.task.await.unwrap();
    let again = HttpServer::bind(running.address, Transport::Plain, limits).await.unwrap();
    let taken = HttpServer::bind(running.address, Transport::Plain, limits).await.unwrap_err();
    assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
    drop(again);
}

#[tokio::test]
async fn readiness_reports_the_reason() {
    let router = health_routes(|| Err(NotReady::new("the cache is not synced yet")));
    let running = start(Transport::Plain, unhurried(), router).await;
    assert!(probe(&running).await.ends_with("\r\n\r\nok\n"));
    let response = plain(running.address, b"GET /readyz HTTP/1.1\r\nHost: node\r\n\r\n").await;
    assert!(response.starts_with("HTTP/1.1 503 "), "{response}");
    assert!(response.ends_with("the cache is not synced yet\n"), "{response}");
}
