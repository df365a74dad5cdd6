//! Catches signals while the terminal's modes are changed.

use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGWINCH};
use signal_hook::low_level::{self, pipe};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Handlers of terminating signals and of `SIGWINCH`, removed when dropped.
pub(super) struct SignalWatcher {
    wake_receiver: UnixStream,
    quit: Arc<AtomicBool>,
    resized: Arc<AtomicBool>,
    ids: Vec<SigId>,
}

/// The most important signal that arrived since the last call of [`SignalWatcher::take_pending`].
pub(super) enum PendingSignal {
    None,
    Resized,
    Quit,
}

impl SignalWatcher {
    /// Installs the handlers. Returns `None` if the system refuses.
    pub(super) fn install() -> Option<SignalWatcher> {
        let (wake_receiver, wake_sender) = UnixStream::pair().ok()?;
        wake_receiver.set_nonblocking(true).ok()?;
        let flag = || Arc::new(AtomicBool::new(false));
        let mut signals = SignalWatcher { wake_receiver, quit: flag(), resized: flag(), ids: Vec::new() };
        for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGWINCH] {
            let flag = if signal == SIGWINCH { &signals.resized } else { &signals.quit };
            // The flag is registered first: handlers run in this order, and a woken thread must find the flag set.
            signals.ids.push(signal_hook::flag::register(signal, Arc::clone(flag)).ok()?);
            signals.ids.push(pipe::register(signal, wake_sender.try_clone().ok()?).ok()?);
        }
        Some(signals)
    }

    /// Returns the file to poll: it is readable when a signal has arrived.
    pub(super) fn wake_file(&self) -> &UnixStream {
        &self.wake_receiver
    }

    /// Empties the wake-up file and returns what has arrived.
    pub(super) fn take_pending(&mut self) -> PendingSignal {
        let mut bytes = [0; 64];
        while self.wake_receiver.read(&mut bytes).is_ok_and(|read| read == bytes.len()) {}
        if self.quit.load(Ordering::SeqCst) {
            PendingSignal::Quit
        } else if self.resized.swap(false, Ordering::SeqCst) {
            PendingSignal::Resized
        } else {
            PendingSignal::None
        }
    }
}

impl Drop for SignalWatcher {
    fn drop(&mut self) {
        for id in self.ids.drain(..) {
            low_level::unregister(id);
        }
    }
}
