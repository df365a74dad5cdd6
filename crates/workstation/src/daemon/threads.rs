//! The threads of the daemon: started, stopped and joined in one place.

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A set of threads that share one stop signal.
pub(super) struct Threads {
    /// Readable from the moment that the threads are stopped, and never read.
    stop: OwnedFd,
    running: Mutex<RunningThreads>,
    ended: Condvar,
}

#[derive(Default)]
struct RunningThreads {
    last: u64,
    /// The names of running threads, by their number.
    names: BTreeMap<u64, String>,
}

/// Why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WakeReason {
    /// The descriptor can be read, or has an error that reading it reports.
    Readable,
    /// The time is over.
    TimedOut,
    /// The threads are stopped.
    Stopped,
}

impl Threads {
    pub(super) fn new() -> io::Result<Arc<Threads>> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Threads { stop, running: Mutex::default(), ended: Condvar::new() }))
    }

    fn running(&self) -> MutexGuard<'_, RunningThreads> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a thread. It must end soon after [`Threads::stop`].
    pub(super) fn spawn(
        self: &Arc<Self>,
        name: &str,
        work: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        let number = {
            let mut running = self.running();
            running.last += 1;
            let number = running.last;
            running.names.insert(number, name.into());
            number
        };
        // Removed however the thread ends, even if it panics or cannot be started.
        let counted = CountedThread { threads: Arc::clone(self), number };
        let run = move || {
            let _counted = counted;
            work();
        };
        std::thread::Builder::new().name(name.into()).spawn(run).map(drop)
    }

    /// Signals all threads to stop.
    pub(super) fn stop(&self) {
        // Fails only if the counter is full, and then the descriptor is readable.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
    }

    /// Returns the descriptor that is readable once the threads are stopped, for a thread that polls other descriptors,
    /// too.
    pub(super) fn stop_signal(&self) -> BorrowedFd<'_> {
        self.stop.as_fd()
    }

    /// Sleeps until the time is over or the threads are stopped. Returns whether they are.
    pub(super) fn sleep(&self, time: Duration) -> bool {
        self.wait(None, Some(Instant::now() + time)) == WakeReason::Stopped
    }

    /// Waits until a descriptor is readable, the deadline has passed or the threads are stopped. A readable descriptor
    /// takes precedence, so that data sent before the stop are read.
    pub(super) fn wait(&self, fd: Option<BorrowedFd<'_>>, deadline: Option<Instant>) -> WakeReason {
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let timeout = left.map(|left| Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            });
            let mut fds = vec![PollFd::new(&self.stop, PollFlags::IN)];
            fds.extend(fd.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
            match poll(&mut fds, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                // Out of memory: an immediate retry would fail, too.
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
            if fds.get(1).is_some_and(|fd| !fd.revents().is_empty()) {
                return WakeReason::Readable;
            }
            if !fds[0].revents().is_empty() {
                return WakeReason::Stopped;
            }
            if left.is_some_and(|left| left.is_zero()) {
                return WakeReason::TimedOut;
            }
        }
    }

    /// Waits until all threads have ended. Returns the names of those that still run after the timeout: a thread that
    /// waits for an unresponsive driver cannot be ended.
    pub(super) fn join(&self, timeout: Duration) -> Vec<String> {
        let running = self.running();
        let waited = self.ended.wait_timeout_while(running, timeout, |running| !running.names.is_empty());
        let (running, _) = waited.unwrap_or_else(PoisonError::into_inner);
        running.names.values().cloned().collect()
    }
}

/// A thread that counts as running until this is dropped.
struct CountedThread {
    threads: Arc<Threads>,
    number: u64,
}

impl Drop for CountedThread {
    fn drop(&mut self) {
        self.threads.running().names.remove(&self.number);
        self.threads.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc;

    /// Longer than any test takes.
    const FOREVER: Duration = Duration::from_secs(600);

    #[test]
    fn stop_ends_every_wait_and_join_returns() {
        let threads = Threads::new().unwrap();
        let (_sender, receiver) = UnixStream::pair().unwrap();
        let (ended, wakes) = mpsc::channel();
        let waiting = Arc::clone(&threads);
        let send = ended.clone();
        threads
            .spawn("reads", move || send.send(waiting.wait(Some(receiver.as_fd()), None)).unwrap())
            .unwrap();
        let waiting = Arc::clone(&threads);
        threads
            .spawn("sleeps", move || {
                assert!(waiting.sleep(FOREVER));
                ended.send(WakeReason::Stopped).unwrap();
            })
            .unwrap();
        threads.stop();
        assert!(threads.join(FOREVER).is_empty());
        assert_eq!(wakes.iter().collect::<Vec<_>>(), [WakeReason::Stopped, WakeReason::Stopped]);
    }

    #[test]
    fn bytes_that_were_sent_before_the_stop_are_read() {
        let threads = Threads::new().unwrap();
        let (mut sender, receiver) = UnixStream::pair().unwrap();
        assert_eq!(threads.wait(Some(receiver.as_fd()), Some(Instant::now())), WakeReason::TimedOut);
        threads.stop();
        assert_eq!(threads.wait(Some(receiver.as_fd()), None), WakeReason::Stopped);
        sender.write_all(b"x").unwrap();
        assert_eq!(threads.wait(Some(receiver.as_fd()), None), WakeReason::Readable);
    }

    #[test]
    fn thread_that_does_not_end_is_named() {
        let threads = Threads::new().unwrap();
        let (release, held) = mpsc::channel::<()>();
        threads
            .spawn("driver", move || {
                // Fails when the other end is dropped.
                let _ = held.recv();
            })
            .unwrap();
        threads.spawn("quick", || {}).unwrap();
        threads.stop();
        let mut left = threads.join(Duration::from_millis(1));
        left.retain(|name| name != "quick");
        assert_eq!(left, ["driver"]);
        drop(release);
        assert!(threads.join(FOREVER).is_empty());
    }
}
