//! Connections that cannot hurt: few at a time, each for a short while and for one small question.
//!
//! Kubelet's probes come to the same port as everybody else. So one address has few places, and where all are taken, who comes
//! has the place of who has been silent for longest: a probe asks at once, and those who keep others out do not.

use axum::serve::Listener;
use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio::time::{Instant, Sleep};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// Connections at a time, from one address.
const FROM_ONE: usize = 8;
/// How much may be asked: a request has no body.
const LARGEST: usize = 16 << 10;

/// How many connections there may be, and how long each may take, from its first packet on.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    /// Connections at a time.
    pub(super) places: usize,
    /// To be asked: the handshake, and the whole head of a request.
    pub(super) head: Duration,
    /// To its last packet.
    pub(super) all: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Bounds { places: 512, head: Duration::from_secs(2), all: Duration::from_secs(10) }
    }
}

/// Accepts, and lets handshakes happen beside each other.
pub(super) struct Connections {
    ready: mpsc::Receiver<Bounded>,
    accepting: JoinHandle<()>,
}

impl Connections {
    /// With TLS, or without.
    pub(super) fn new(listener: TcpListener, tls: Option<TlsAcceptor>, bounds: Bounds) -> Connections {
        let (done, ready) = mpsc::channel(1);
        let accepting = tokio::spawn(accept(listener, tls, bounds, done));
        Connections { ready, accepting }
    }

    /// The next one that is ready to be asked on.
    pub(super) async fn next(&mut self) -> Bounded {
        match self.ready.recv().await {
            Some(accepted) => accepted,
            // The accepting task never ends by itself.
            None => std::future::pending().await,
        }
    }
}

async fn accept(
    mut listener: TcpListener,
    tls: Option<TlsAcceptor>,
    bounds: Bounds,
    done: mpsc::Sender<Bounded>,
) {
    let (places, peers, silent) =
        (Arc::new(Semaphore::new(bounds.places)), Peers::default(), Silent::default());
    loop {
        let (stream, peer) = Listener::accept(&mut listener).await;
        let Some(guest) = peers.admit(peer.ip().to_canonical()) else { continue };
        if places.available_permits() == 0 {
            silent.displace();
        }
        // Where all have asked and wait for their answers, the next ones wait in the kernel.
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        // Without this, an answer in two packets waits for the other side's delayed acknowledgement.
        let _ = stream.set_nodelay(true);
        let (done, tls, since, waiting) = (done.clone(), tls.clone(), Instant::now(), silent.enter());
        tokio::spawn(async move {
            let mut until = Box::pin(tokio::time::sleep_until(since + bounds.head));
            let mut displaced = Box::pin(waiting.displaced.clone().cancelled_owned());
            let stream = match tls {
                None => Stream::Plain(stream),
                Some(tls) => tokio::select! {
                    shaken = tls.accept(stream) => match shaken {
                        Ok(stream) => Stream::Tls(Box::new(stream)),
                        Err(_) => return,
                    },
                    () = &mut until => return,
                    () = &mut displaced => return,
                },
            };
            let bounded = Bounded {
                stream,
                until,
                end: since + bounds.all,
                head: Head::default(),
                left: LARGEST,
                silent: Some((waiting, displaced)),
                guest,
                _place: place,
            };
            // Where nobody takes it any more, the server has ended.
            let _ = done.send(bounded).await;
        });
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// How many connections each address has.
#[derive(Clone, Default)]
struct Peers(Arc<Mutex<BTreeMap<IpAddr, usize>>>);

impl Peers {
    fn admit(&self, address: IpAddr) -> Option<Guest> {
        let mut counts = self.counts();
        let count = counts.entry(address).or_default();
        if *count >= FROM_ONE {
            return None;
        }
        *count += 1;
        Some(Guest { peers: self.clone(), address })
    }

    fn counts(&self) -> MutexGuard<'_, BTreeMap<IpAddr, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One connection of an address.
struct Guest {
    peers: Peers,
    address: IpAddr,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let mut counts = self.peers.counts();
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

/// Connections that have not asked yet, in the order in which they came.
#[derive(Clone, Default)]
struct Silent(Arc<Mutex<(u64, BTreeMap<u64, CancellationToken>)>>);

impl Silent {
    fn enter(&self) -> Waiting {
        let mut all = self.all();
        all.0 += 1;
        let (number, displaced) = (all.0, CancellationToken::new());
        all.1.insert(number, displaced.clone());
        Waiting { silent: self.clone(), number, displaced }
    }

    /// Ends the one that has been silent for longest, if there is one.
    fn displace(&self) {
        if let Some((_, longest)) = self.all().1.pop_first() {
            longest.cancel();
        }
    }

    fn all(&self) -> MutexGuard<'_, (u64, BTreeMap<u64, CancellationToken>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One connection that has not asked yet; dropped when it has.
struct Waiting {
    silent: Silent,
    number: u64,
    displaced: CancellationToken,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.silent.all().1.remove(&self.number);
    }
}

enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// A connection with an end.
pub(super) struct Bounded {
    stream: Stream,
    until: Pin<Box<Sleep>>,
    /// What `until` is once the head is there.
    end: Instant,
    head: Head,
    /// Bytes that may still be read.
    left: usize,
    /// Until it has asked, another can have its place.
    silent: Option<(Waiting, Pin<Box<WaitForCancellationFutureOwned>>)>,
    guest: Guest,
    _place: OwnedSemaphorePermit,
}

impl Bounded {
    /// Who is at its other end.
    pub(super) fn peer(&self) -> IpAddr {
        self.guest.address
    }

    fn in_time(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let displaced =
            self.silent.as_mut().is_some_and(|(_, ended)| ended.as_mut().poll(context).is_ready());
        match displaced || self.until.as_mut().poll(context).is_ready() {
            true => Err(io::ErrorKind::TimedOut.into()),
            false => Ok(()),
        }
    }
}

/// Where in a request's head its reader is.
#[derive(Default)]
enum Head {
    /// Before its first letter: empty lines there are passed over.
    #[default]
    Before,
    /// In a line.
    Line,
    /// After the end of a line.
    Next,
    /// It is there as a whole.
    Whole,
}

impl Head {
    /// Goes on by what was read. Whether that was the end of it.
    fn ends(&mut self, bytes: &[u8]) -> bool {
        for byte in bytes {
            *self = match (&self, byte) {
                (Head::Whole, _) => return false,
                (Head::Next, b'\n') => {
                    *self = Head::Whole;
                    return true;
                }
                (Head::Line, b'\n') => Head::Next,
                (Head::Before, b'\r' | b'\n') => Head::Before,
                (Head::Next, b'\r') => Head::Next,
                _ => Head::Line,
            };
        }
        false
    }
}

/// Calls a method of whichever stream it is.
macro_rules! of_stream {
    ($self:ident.$method:ident($($argument:expr),*)) => {
        match &mut $self.stream {
            Stream::Plain(stream) => Pin::new(stream).$method($($argument),*),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).$method($($argument),*),
        }
    };
}

impl AsyncRead for Bounded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.in_time(context)?;
        let before = buffer.filled().len();
        let read = of_stream!(self.poll_read(context, buffer));
        let more = buffer.filled().get(before..).unwrap_or_default();
        match self.left.checked_sub(more.len()) {
            Some(left) => self.left = left,
            None => return Poll::Ready(Err(io::ErrorKind::FileTooLarge.into())),
        }
        if self.head.ends(more) {
            let end = self.end;
            self.silent = None;
            self.until.as_mut().reset(end);
            // Once more, so that somebody is woken then.
            self.in_time(context)?;
        }
        read
    }
}

impl AsyncWrite for Bounded {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.in_time(context)?;
        of_stream!(self.poll_write(context, bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.in_time(context)?;
        of_stream!(self.poll_flush(context))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.in_time(context)?;
        of_stream!(self.poll_shutdown(context))
    }

    fn is_write_vectored(&self) -> bool {
        match &self.stream {
            Stream::Plain(stream) => stream.is_write_vectored(),
            Stream::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.in_time(context)?;
        of_stream!(self.poll_write_vectored(context, slices))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_ends_with_an_empty_line() {
        for whole in ["GET / HTTP/1.1\r\nHost: a\r\n\r\n", "\r\n\n\r\nGET / HTTP/1.1\n\n", "GET /\r\n\n"] {
            for at in 0..whole.len() {
                let (mut head, (first, second)) = (Head::default(), whole.split_at(at));
                assert!(!head.ends(first.as_bytes()), "{first:?}");
                assert!(head.ends(second.as_bytes()), "{first:?} {second:?}");
                assert!(!head.ends(b"\r\n\r\n"), "once only");
            }
        }
        assert!(!Head::default().ends(b"\r\n\r\n\n\nGET / HTTP/1.1\r\n\r"));
    }
}
