//! The agent's background tasks.

use super::session::SessionEnd;
use crate::config::AgentError;
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

/// Why a task ended although the agent was not stopped.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// The task panicked; the source is tokio's report of the panic.
    #[error("a task of the agent has failed")]
    Failed(#[source] JoinError),
    /// It returned; its last log line gives the reason.
    #[error("a task of the agent exited unexpectedly: see the preceding log lines")]
    Ended,
}

/// A set of tasks that all run until they are stopped. If one ends earlier, the agent exits and kubelet restarts it: an agent
/// with only some of its tasks would be inconsistent.
#[derive(Default)]
pub(super) struct TaskSet(JoinSet<Option<String>>);

impl TaskSet {
    /// Spawns a task that ends only when it is stopped.
    pub(super) fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.0.spawn(async {
            task.await;
            None
        });
    }

    /// Spawns the task that returns how the node's GPUs have changed.
    pub(super) fn spawn_gpu_watch(&mut self, task: impl Future<Output = Option<String>> + Send + 'static) {
        self.0.spawn(task);
    }

    /// Waits until a task ends, and returns what that means for the session.
    pub(super) async fn ended(&mut self) -> Result<SessionEnd, AgentError> {
        match self.0.join_next().await {
            Some(Ok(Some(change))) => Ok(SessionEnd::GpusChanged(change)),
            Some(Err(error)) => Err(TaskError::Failed(error).into()),
            Some(Ok(None)) | None => Err(TaskError::Ended.into()),
        }
    }

    /// Waits until all tasks have ended, which were stopped before. Tasks that still run at the deadline are aborted without
    /// waiting for them: one that waits for a driver that does not respond cannot be aborted.
    pub(super) async fn join(&mut self, deadline: Instant) {
        let all = async { while self.0.join_next().await.is_some() {} };
        if tokio::time::timeout_at(deadline, all).await.is_err() {
            tracing::warn!(tasks = self.0.len(), "tasks of the agent did not end in time");
            self.0.abort_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test]
    async fn task_that_ends_early_is_an_error_and_a_gpu_change_is_not() {
        let mut tasks = TaskSet::default();
        tasks.spawn(std::future::pending());
        tasks.spawn_gpu_watch(async { Some("GPU-1 is gone".into()) });
        assert!(
            matches!(tasks.ended().await, Ok(SessionEnd::GpusChanged(change)) if change == "GPU-1 is gone")
        );
        tasks.spawn(async {});
        assert!(matches!(tasks.ended().await, Err(AgentError::Task(TaskError::Ended))));
        tasks.spawn(async { panic!("a bug") });
        assert!(matches!(tasks.ended().await, Err(AgentError::Task(TaskError::Failed(_)))));
    }

    #[tokio::test(start_paused = true)]
    async fn task_that_does_not_end_is_not_awaited_after_the_deadline() {
        let mut tasks = TaskSet::default();
        tasks.spawn(std::future::pending());
        let deadline = Instant::now() + Duration::from_secs(5);
        tasks.join(deadline).await;
        assert_eq!(Instant::now(), deadline);
    }
}
