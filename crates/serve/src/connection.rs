//! One connection: its deadlines, and serving requests on it.

use crate::limits::{ServerLimits, SilentConnections, SilentSlot};
use axum::body::{Body, Bytes};
use axum::http::{Request, Response, StatusCode, header};
use axum::response::IntoResponse;
use http_body_util::Limited;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// hyper panics below this.
const MIN_BUFFER_BYTES: usize = 8 << 10;

/// Where a connection is between two requests.
enum ConnectionPhase {
    /// No byte of the next request has arrived.
    Idle { since: Instant, slot: SilentSlot },
    /// The handshake, or the head of a request, is incomplete.
    Head { since: Instant, slot: SilentSlot },
    /// A request is being answered.
    Request { since: Instant },
}

/// The deadlines of one connection, shared by its accepting task, its stream and its requests.
pub(crate) struct ConnectionClock {
    limits: ServerLimits,
    silent: SilentConnections,
    phase: Mutex<ConnectionPhase>,
    changed: Notify,
}

impl ConnectionClock {
    /// Starts the clock of a connection that was just accepted.
    pub(crate) fn start(limits: ServerLimits, silent: &SilentConnections) -> Arc<ConnectionClock> {
        let phase = ConnectionPhase::Head { since: Instant::now(), slot: silent.enter() };
        Arc::new(ConnectionClock {
            limits,
            silent: silent.clone(),
            phase: Mutex::new(phase),
            changed: Notify::new(),
        })
    }

    /// Waits until the connection has exceeded a limit or was displaced. Its owner closes it then.
    pub(crate) async fn expired(&self) {
        loop {
            let mut changed = pin!(self.changed.notified());
            // Changes between reading the phase and waiting must wake this task.
            changed.as_mut().enable();
            let (deadline, displaced) = self.deadline();
            let displaced = async {
                match &displaced {
                    Some(token) => token.cancelled().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = changed => {}
                () = displaced => return,
                () = tokio::time::sleep_until(deadline) => return,
            }
        }
    }

    fn deadline(&self) -> (Instant, Option<CancellationToken>) {
        let limits = &self.limits;
        match &*self.phase() {
            ConnectionPhase::Idle { since, slot } => {
                (*since + limits.idle_timeout.unwrap_or_default(), Some(slot.displaced().clone()))
            }
            ConnectionPhase::Head { since, slot } => {
                (*since + limits.head_timeout, Some(slot.displaced().clone()))
            }
            ConnectionPhase::Request { since } => (*since + limits.request_timeout, None),
        }
    }

    /// Notes that bytes arrived: the first ones of a request begin its head.
    fn received(&self) {
        let mut phase = self.phase();
        if let ConnectionPhase::Idle { .. } = &*phase {
            *phase = ConnectionPhase::Head { since: Instant::now(), slot: self.silent.enter() };
            self.changed.notify_one();
        }
    }

    /// Notes that the head of a request is complete.
    fn request_started(self: &Arc<Self>) -> RequestGuard {
        let mut phase = self.phase();
        let since = match &*phase {
            ConnectionPhase::Head { since, .. } | ConnectionPhase::Request { since } => *since,
            // The whole head was sent together with the previous request.
            ConnectionPhase::Idle { .. } => Instant::now(),
        };
        *phase = ConnectionPhase::Request { since };
        self.changed.notify_one();
        RequestGuard(Arc::clone(self))
    }

    fn request_finished(&self) {
        // Without keep-alive the connection is about to close, and its request's deadline still holds.
        if self.limits.idle_timeout.is_some() {
            *self.phase() = ConnectionPhase::Idle { since: Instant::now(), slot: self.silent.enter() };
            self.changed.notify_one();
        }
    }

    fn phase(&self) -> MutexGuard<'_, ConnectionPhase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request in progress; it ends when its response body is dropped.
struct RequestGuard(Arc<ConnectionClock>);

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.request_finished();
    }
}

/// Serves requests on a connection until it closes, exceeds a limit, or has drained after `stop`.
///
/// `prepare` adds what is known about the connection to each request.
pub(crate) async fn serve<IO, S>(
    stream: IO,
    clock: Arc<ConnectionClock>,
    handler: S,
    prepare: impl Fn(&mut Request<Body>),
    stop: CancellationToken,
) where
    IO: AsyncRead + AsyncWrite + Unpin,
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    let limits = clock.limits;
    let service = service_fn(|request: Request<Incoming>| {
        let guard = clock.request_started();
        let too_large =
            announced_length(&request).is_some_and(|length| length > limits.max_body_bytes as u64);
        let mut request = request.map(|body| Body::new(Limited::new(body, limits.max_body_bytes)));
        prepare(&mut request);
        let response = (!too_large).then(|| handler.call(request));
        async move {
            let response = match response {
                Some(response) => response.await?,
                None => payload_too_large(limits.max_body_bytes),
            };
            Ok::<_, Infallible>(response.map(|body| Body::new(GuardedBody { body, _guard: guard })))
        }
    });
    let mut builder = http1::Builder::new();
    builder
        .keep_alive(limits.idle_timeout.is_some())
        .max_buf_size(limits.max_head_bytes.max(MIN_BUFFER_BYTES));
    let io = TokioIo::new(ObservedStream { stream, clock: Arc::clone(&clock) });
    let mut connection = pin!(builder.serve_connection(io, service));
    let mut expired = pin!(clock.expired());
    // A connection's errors concern its client, who sees them.
    tokio::select! {
        _ = connection.as_mut() => return,
        () = expired.as_mut() => return,
        () = stop.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    tokio::select! {
        _ = connection => {}
        () = expired => {}
    }
}

fn announced_length(request: &Request<Incoming>) -> Option<u64> {
    request.headers().get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn payload_too_large(max_bytes: usize) -> Response<Body> {
    let message = format!("the request body exceeds the limit of {max_bytes} bytes: send less\n");
    (StatusCode::PAYLOAD_TOO_LARGE, [(header::CONNECTION, "close")], message).into_response()
}

/// A response body that ends its request when it is dropped.
struct GuardedBody {
    body: Body,
    _guard: RequestGuard,
}

impl hyper::body::Body for GuardedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A stream that notes when bytes arrive.
struct ObservedStream<IO> {
    stream: IO,
    clock: Arc<ConnectionClock>,
}

impl<IO: AsyncRead + Unpin> AsyncRead for ObservedStream<IO> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        if buffer.filled().len() > before {
            self.clock.received();
        }
        Poll::Ready(Ok(()))
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for ObservedStream<IO> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }
}
