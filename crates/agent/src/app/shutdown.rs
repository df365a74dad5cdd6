//! One deadline for everything that has to end when the agent is stopped: device plugins, tasks, servers and pending writes.
//!
//! Every wait during the shutdown ends at the same moment, so a second slow component does not delay the exit further, and
//! the pod's termination grace period (10 s in the chart) is never exhausted.

use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Time from the request to stop until the agent exits, whatever still runs.
pub(super) const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// The deadline of the shutdown, which starts when the agent is stopped. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct ShutdownDeadline {
    stop: CancellationToken,
    timeout: Duration,
    at: Arc<OnceLock<Instant>>,
}

impl ShutdownDeadline {
    /// Creates a deadline `timeout` after `stop` is cancelled.
    pub(super) fn new(stop: CancellationToken, timeout: Duration) -> ShutdownDeadline {
        ShutdownDeadline { stop, timeout, at: Arc::default() }
    }

    /// Returns the deadline: fixed by the first call after the agent is stopped, which [`ShutdownDeadline::join`] makes at once, and a
    /// full timeout from now before that.
    pub(super) fn at(&self) -> Instant {
        let from_now = Instant::now() + self.timeout;
        if self.stop.is_cancelled() { *self.at.get_or_init(|| from_now) } else { from_now }
    }

    /// Waits until the agent is stopped and the deadline has passed.
    async fn passed(&self) {
        self.stop.cancelled().await;
        tokio::time::sleep_until(self.at()).await;
    }

    /// Waits for `work`, which ends by itself when the agent is stopped, but not beyond the deadline. Returns `None` if the
    /// deadline passed first.
    ///
    /// The work is a task of its own: a call of the driver that hangs blocks the thread of the task that made it.
    pub(super) async fn join<T>(&self, work: JoinHandle<T>) -> Option<Result<T, JoinError>> {
        tokio::select! {
            biased;
            done = work => Some(done),
            () = self.passed() => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tasks::TaskSet;
    use super::*;
    use std::sync::mpsc;

    #[tokio::test(start_paused = true)]
    async fn all_waits_of_a_shutdown_share_one_deadline() {
        let stop = CancellationToken::new();
        let deadline = ShutdownDeadline::new(stop.clone(), SHUTDOWN_TIMEOUT);
        // The task that waits for all work starts the clock.
        let work = tokio::spawn(std::future::pending::<()>());
        let waiting = deadline.clone();
        let exit = tokio::spawn(async move { waiting.join(work).await.is_none() });
        tokio::time::sleep(Duration::from_secs(100)).await;
        stop.cancel();
        let stopped = Instant::now();
        let (mut session_tasks, mut app_tasks) = (TaskSet::default(), TaskSet::default());
        for tasks in [&mut session_tasks, &mut app_tasks] {
            tasks.spawn(std::future::pending());
            tasks.spawn(std::future::pending());
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        session_tasks.join(deadline.at()).await;
        app_tasks.join(deadline.at()).await;
        assert_eq!(stopped.elapsed(), SHUTDOWN_TIMEOUT);
        assert_eq!(deadline.clone().at(), stopped + SHUTDOWN_TIMEOUT, "clones share it");
        assert!(exit.await.unwrap());
        assert_eq!(stopped.elapsed(), SHUTDOWN_TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn deadline_does_not_run_before_the_agent_is_stopped() {
        let stop = CancellationToken::new();
        let deadline = ShutdownDeadline::new(stop.clone(), SHUTDOWN_TIMEOUT);
        assert_eq!(deadline.at(), Instant::now() + SHUTDOWN_TIMEOUT);
        let work = tokio::spawn(tokio::time::sleep(Duration::from_secs(1000)));
        assert!(deadline.join(work).await.is_some_and(|done| done.is_ok()));
        stop.cancel();
        let stopped = Instant::now();
        assert!(deadline.join(tokio::spawn(std::future::pending::<()>())).await.is_none());
        assert_eq!(stopped.elapsed(), SHUTDOWN_TIMEOUT);
    }

    /// As when a call of the driver hangs: the task cannot be aborted.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn thread_that_hangs_does_not_delay_the_exit() {
        let stop = CancellationToken::new();
        let deadline = ShutdownDeadline::new(stop.clone(), Duration::from_millis(50));
        let (release, hangs) = mpsc::channel::<()>();
        let work = tokio::spawn(async move { tokio::task::block_in_place(|| hangs.recv()).is_ok() });
        stop.cancel();
        assert!(deadline.join(work).await.is_none());
        drop(release);
    }
}
