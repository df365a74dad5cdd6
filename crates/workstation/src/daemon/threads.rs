//! The daemon's threads: started in one place, told to stop together, and waited for at the end.

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A set of threads that share one stop signal.
pub(super) struct Threads {
    /// Readable from the moment that the threads are told to stop, and never read.
    stop: OwnedFd,
    running: Mutex<Running>,
    ended: Condvar,
}

#[derive(Default)]
struct Running {
    last: u64,
    /// The names of threads that have not ended, by their number.
    names: BTreeMap<u64, String>,
}

/// Why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wake {
    /// The descriptor can be read, or has an error that reading it reports.
    Readable,
    /// The time is over.
    TimedOut,
    /// The threads are told to stop.
    Stopped,
}

impl Threads {
    pub(super) fn new() -> io::Result<Arc<Threads>> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Threads { stop, running: Mutex::default(), ended: Condvar::new() }))
    }

    fn running(&self) -> MutexGuard<'_, Running> {
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
        // Counted out however the thread ends, also if it panics or cannot be started.
        let counted = CountedThread { threads: Arc::clone(self), number };
        let run = move || {
            let _counted = counted;
            work();
        };
        std::thread::Builder::new().name(name.into()).spawn(run).map(drop)
    }

    /// Tells all threads to stop.
    pub(super) fn stop(&self) {
        // Fails only if the counter is full, and then the descriptor is readable.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
    }

    /// The descriptor that is readable from the moment that the threads are told to stop, for a thread that polls others, too.
    pub(super) fn stop_signal(&self) -> BorrowedFd<'_> {
        self.stop.as_fd()
    }

    /// Sleeps, but not for longer than until the threads are told to stop. Returns whether they are.
    pub(super) fn sleep(&self, time: Duration) -> bool {
        self.wait(None, Some(Instant::now() + time)) == Wake::Stopped
    }

    /// Waits until a descriptor is readable, the deadline has passed or the threads are told to stop. A descriptor that is readable
    /// comes first: what was sent before the stop is read.
    pub(super) fn wait(&self, fd: Option<BorrowedFd<'_>>, deadline: Option<Instant>) -> Wake {
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
                // Out of memory: nothing can be waited for, and trying again at once would not help.
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
            if fds.get(1).is_some_and(|fd| !fd.revents().is_empty()) {
                return Wake::Readable;
            }
            if !fds[0].revents().is_empty() {
                return Wake::Stopped;
            }
            if left.is_some_and(|left| left.is_zero()) {
                return Wake::TimedOut;
            }
        }
    }

    /// Waits until all threads have ended. Returns the names of those that have not when the time is over: a thread that waits
    /// for a driver which does not answer cannot be ended.
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
                ended.send(Wake::Stopped).unwrap();
            })
            .unwrap();
        threads.stop();
        assert!(threads.join(FOREVER).is_empty());
        assert_eq!(wakes.iter().collect::<Vec<_>>(), [Wake::Stopped, Wake::Stopped]);
    }

    #[test]
    fn bytes_that_were_sent_before_the_stop_are_read() {
        let threads = Threads::new().unwrap();
        let (mut sender, receiver) = UnixStream::pair().unwrap();
        assert_eq!(threads.wait(Some(receiver.as_fd()), Some(Instant::now())), Wake::TimedOut);
        threads.stop();
        assert_eq!(threads.wait(Some(receiver.as_fd()), None), Wake::Stopped);
        sender.write_all(b"x").unwrap();
        assert_eq!(threads.wait(Some(receiver.as_fd()), None), Wake::Readable);
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
