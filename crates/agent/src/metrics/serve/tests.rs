use super::super::tests::report;
use super::*;
use partage_testkit::fetch::secured;
use partage_testkit::openmetrics::Exposition;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

/// A server on a port of its own.
struct Running {
    address: SocketAddr,
    stop: CancellationToken,
    task: JoinHandle<()>,
    reports: Arc<AtomicUsize>,
    ready: Arc<AtomicBool>,
}

async fn start(anonymous: bool, access: Access) -> Running {
    // What it is about is not that a machine is slow.
    let minute = Duration::from_secs(60);
    start_with(anonymous, access, Bounds { head: minute, all: minute, ..Bounds::default() }).await
}

async fn start_with(anonymous: bool, access: Access, bounds: Bounds) -> Running {
    let settings = Metrics { address: "127.0.0.1:0".parse().unwrap(), anonymous };
    let server = Server::bind_with(&settings, access, bounds).await.unwrap();
    let (address, stop) = (server.address(), CancellationToken::new());
    let (reports, ready) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let (made, is_ready) = (Arc::clone(&reports), Arc::clone(&ready));
    let told = move || {
        made.fetch_add(1, Ordering::SeqCst);
        report()
    };
    let ready_now = move || match is_ready.load(Ordering::SeqCst) {
        true => Ok(()),
        false => Err("kubelet was not told yet".into()),
    };
    let task = tokio::spawn(server.run(told, ready_now, stop.clone()));
    Running { address, stop, task, reports, ready }
}

async fn ask(mut stream: impl AsyncRead + AsyncWrite + Unpin, path: &str, headers: &str) -> String {
    let head = format!("GET {path} HTTP/1.1\r\nHost: node\r\n{headers}\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // It ends after one answer; a client without TLS's farewell is not wrong either.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8(answer).unwrap()
}

async fn plain(address: SocketAddr, path: &str, headers: &str) -> String {
    ask(TcpStream::connect(address).await.unwrap(), path, headers).await
}

async fn tls(address: SocketAddr, path: &str, headers: &str) -> String {
    ask(secured(address).await.unwrap(), path, headers).await
}

/// Allows one token, and is away for another.
fn guarded() -> Access {
    Access::Asks(Arc::new(|token| {
        Box::pin(async move {
            match token.as_str() {
                "early" => Err("connection refused".into()),
                token => Ok(token == "prometheus"),
            }
        })
    }))
}

#[tokio::test]
async fn everybody_reads_where_the_settings_say_so() {
    // Whoever is to be asked is not: the settings decide.
    let running = start(true, guarded()).await;
    for path in ["/metrics", "/metric"] {
        let answer = plain(running.address, path, "").await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.contains("content-type: text/plain; version=0.0.4; charset=utf-8\r\n"), "{answer}");
        assert!(answer.contains("connection: close\r\n"), "{answer}");
        assert!(answer.contains("\n# TYPE partage_refused_total counter\n"), "{answer}");
    }
    let accept = "Accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.1\r\n";
    let answer = plain(running.address, "/metrics", accept).await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(
        head.contains("content-type: application/openmetrics-text; version=1.0.0; charset=utf-8"),
        "{head}"
    );
    let all = Exposition::parse(body).unwrap();
    assert_eq!(all.value("partage_refused_total", &[]), Some(4.0));
}

#[tokio::test]
async fn a_token_is_asked_for_otherwise() {
    let running = start(false, guarded()).await;
    for (headers, status, words) in [
        ("", "401 Unauthorized", "Authorization: Bearer"),
        ("Authorization: Basic cHJvbTpwcm9t\r\n", "401 Unauthorized", "Authorization: Bearer"),
        ("Authorization: Bearer tenant\r\n", "403 Forbidden", "this token may not read metrics"),
        ("Authorization: Bearer early\r\n", "503 Service Unavailable", "connection refused"),
        ("Authorization: Bearer prometheus\r\n", "200 OK", "partage_info"),
    ] {
        for path in ["/metrics", "/metric"] {
            let answer = tls(running.address, path, headers).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{headers}: {answer}");
            assert!(answer.contains(words), "{headers}: {answer}");
            let challenge = answer.contains("www-authenticate: Bearer\r\n");
            assert_eq!(challenge, status.starts_with("401"), "{answer}");
            assert_eq!(answer.contains("partage_info"), status.starts_with("200"), "{answer}");
        }
    }
    let plain = plain(running.address, "/metrics", "Authorization: Bearer prometheus\r\n").await;
    assert!(!plain.contains("partage_info"), "a token must not travel in the open: {plain}");
}

#[tokio::test]
async fn health_is_for_everybody() {
    let running = start(false, guarded()).await;
    assert!(tls(running.address, "/healthz", "").await.ends_with("\r\n\r\nok\n"));
    let early = tls(running.address, "/readyz", "").await;
    assert!(early.starts_with("HTTP/1.1 503 ") && early.ends_with("kubelet was not told yet\n"), "{early}");
    running.ready.store(true, Ordering::SeqCst);
    assert!(tls(running.address, "/readyz", "").await.starts_with("HTTP/1.1 200 "));
    assert!(tls(running.address, "/", "").await.starts_with("HTTP/1.1 404 "));
    assert_eq!(running.reports.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn those_who_say_nothing_hold_up_nobody() {
    // Nobody loses a place by time: a probe is answered beside them or not at all.
    let hours = Duration::from_secs(36_000);
    let bounds = Bounds { places: 64, head: hours, all: hours };
    let running = start_with(true, Access::Anonymous, bounds).await;
    let mut kept = Vec::new();
    for pod in 2..8 {
        // From one address as many as it may have, and more.
        for number in 0..12 {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind(SocketAddr::from(([127, 0, 0, pod], 0))).unwrap();
            let mut stream = socket.connect(running.address).await.unwrap();
            // It begins to ask, and never ends.
            let _ = stream.write_all(b"GET").await;
            if number < 8 {
                kept.push(stream);
            } else {
                // Those above the number are let go at once.
                assert!(matches!(stream.read(&mut [0; 1]).await, Ok(0) | Err(_)));
            }
        }
    }
    let answer = plain(running.address, "/healthz", "").await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let is_open = |stream: &TcpStream| match stream.try_read(&mut [0; 1]) {
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        Ok(_) => false,
    };
    assert!(kept.iter().all(is_open));
    // Many more pods, which take all the places there are: who was silent for longest makes room for a probe.
    for number in 0..100_u16 {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        let [_, low] = (number / 8).to_be_bytes();
        socket.bind(SocketAddr::from(([127, 0, 1, low + 1], 0))).unwrap();
        kept.push(socket.connect(running.address).await.unwrap());
    }
    let answer = plain(running.address, "/healthz", "").await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let [first, .., last] = kept.as_mut_slice() else { panic!("there are many") };
    assert!(matches!(first.read(&mut [0; 1]).await, Ok(0) | Err(_)), "it was silent for longest");
    assert!(is_open(last));
}

#[tokio::test]
async fn who_has_asked_may_wait_longer_than_who_does_not() {
    let (heard, answered) = (CancellationToken::new(), CancellationToken::new());
    let api_server = (heard.clone(), answered.clone());
    let access = Access::Asks(Arc::new(move |_| {
        let (heard, answered) = api_server.clone();
        Box::pin(async move {
            heard.cancel();
            answered.cancelled().await;
            Ok(true)
        })
    }));
    let bounds = Bounds { all: Duration::from_secs(36_000), ..Bounds::default() };
    let running = start_with(false, access, bounds).await;
    let asked = tokio::spawn(tls(running.address, "/metrics", "Authorization: Bearer prometheus\r\n"));
    heard.cancelled().await;
    let mut half = secured(running.address).await.unwrap();
    half.write_all(b"GET /metrics HTTP/1.1\r\n").await.unwrap();
    let mut silent = TcpStream::connect(running.address).await.unwrap();
    for let_go in [half.read(&mut [0; 1]).await, silent.read(&mut [0; 1]).await] {
        assert!(matches!(let_go, Ok(0) | Err(_)));
    }
    // Who asked before them still gets an answer; which one is told elsewhere.
    answered.cancel();
    let answer = asked.await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 "), "{answer}");
}

#[tokio::test]
async fn a_long_question_is_not_read() {
    let running = start(true, Access::Anonymous).await;
    let mut stream = TcpStream::connect(running.address).await.unwrap();
    let head = format!("GET /metrics HTTP/1.1\r\nHost: node\r\nX: {}\r\n", "x".repeat(20 << 10));
    // It may close before everything is sent.
    let _ = stream.write_all(head.as_bytes()).await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert!(!answer.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&answer));
    assert!(plain(running.address, "/metrics", "").await.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn nobody_asks_many_questions_at_once() {
    // What a client of HTTP/2 begins with, and its settings; then a question of HTTP/1 behind one that is to be the last.
    let http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".as_slice();
    let two = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\nGET /healthz HTTP/1.1\r\nHost: a\r\n\r\n".as_slice();
    let running = start(true, Access::Anonymous).await;
    for (asked, answers) in [(http2, 0), (two, 1)] {
        let mut stream = TcpStream::connect(running.address).await.unwrap();
        stream.write_all(asked).await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        let text = String::from_utf8_lossy(&answer);
        assert_eq!(text.matches("HTTP/1.1 200 ").count(), answers, "{text}");
        assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 "), "{answer:?}");
    }
}

#[tokio::test]
async fn many_who_ask_at_once_cost_as_much_as_one() {
    let running = start(true, Access::Anonymous).await;
    let asked = (0..8).map(|_| plain(running.address, "/metrics", ""));
    let answers = futures::future::join_all(asked).await;
    assert!(answers.iter().all(|answer| answer.starts_with("HTTP/1.1 200 ")), "{answers:?}");
    assert!(running.reports.load(Ordering::SeqCst) < 8, "most got what another one had made");
}

#[tokio::test]
async fn it_stops_when_told_and_frees_its_port() {
    let running = start(true, Access::Anonymous).await;
    let idle = TcpStream::connect(running.address).await.unwrap();
    drop(idle);
    running.stop.cancel();
    running.task.await.unwrap();
    let again = Metrics { address: running.address, anonymous: true };
    let server = Server::bind(&again, Access::Anonymous).await.unwrap();
    let taken = Server::bind(&again, Access::Anonymous).await.err().unwrap();
    assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
    drop(server);
}
