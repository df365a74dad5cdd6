//! Signals while a terminal is not as it was found.

use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGWINCH};
use signal_hook::low_level::{self, pipe};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Signals are caught from here on, until dropped.
pub(super) struct Signals {
    wakes: UnixStream,
    end: Arc<AtomicBool>,
    resized: Arc<AtomicBool>,
    ids: Vec<SigId>,
}

/// What signals said.
pub(super) enum Seen {
    Nothing,
    Resized,
    End,
}

impl Signals {
    /// `None` where the system does not let us.
    pub(super) fn catch() -> Option<Signals> {
        let (wakes, waker) = UnixStream::pair().ok()?;
        wakes.set_nonblocking(true).ok()?;
        let flag = || Arc::new(AtomicBool::new(false));
        let mut signals = Signals { wakes, end: flag(), resized: flag(), ids: Vec::new() };
        for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGWINCH] {
            let says = if signal == SIGWINCH { &signals.resized } else { &signals.end };
            // The flag first: who is woken must find it.
            signals.ids.push(signal_hook::flag::register(signal, Arc::clone(says)).ok()?);
            signals.ids.push(pipe::register(signal, waker.try_clone().ok()?).ok()?);
        }
        Some(signals)
    }

    /// Readable when there is something to see.
    pub(super) fn file(&self) -> &UnixStream {
        &self.wakes
    }

    /// What was said since this was last asked.
    pub(super) fn seen(&mut self) -> Seen {
        let mut bytes = [0; 64];
        while self.wakes.read(&mut bytes).is_ok_and(|read| read == bytes.len()) {}
        if self.end.load(Ordering::SeqCst) {
            Seen::End
        } else if self.resized.swap(false, Ordering::SeqCst) {
            Seen::Resized
        } else {
            Seen::Nothing
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.ids.drain(..) {
            low_level::unregister(id);
        }
    }
}
