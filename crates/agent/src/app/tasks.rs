//! The agent's background tasks.

use super::session::SessionEnd;
use crate::config::AgentError;
use std::time::Duration;
use tokio::task::JoinSet;

/// A set of tasks that all run until they are stopped. If one ends earlier, the agent ends, and kubelet starts it again: half an
/// agent is worse than none.
#[derive(Default)]
pub(super) struct Tasks(JoinSet<Option<String>>);

impl Tasks {
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

    /// Waits until a task ends, and returns what that means.
    pub(super) async fn ended(&mut self) -> Result<SessionEnd, AgentError> {
        match self.0.join_next().await {
            Some(Ok(Some(change))) => Ok(SessionEnd::GpusChanged(change)),
            Some(Err(error)) => Err(AgentError::Cannot(format!("a task of the agent has failed: {error}"))),
            Some(Ok(None)) | None => Err(AgentError::Cannot("a task of the agent has ended".into())),
        }
    }

    /// Waits until all tasks have ended that were told to. After the timeout the rest is left alone: a task that waits for a
    /// driver which does not answer cannot be ended, and must not keep the agent from ending.
    pub(super) async fn join(&mut self, timeout: Duration) {
        let all = async { while self.0.join_next().await.is_some() {} };
        if tokio::time::timeout(timeout, all).await.is_err() {
            tracing::warn!("a task of the agent does not end and is left alone");
            self.0.abort_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn task_that_ends_early_is_an_error_and_a_gpu_change_is_not() {
        let mut tasks = Tasks::default();
        tasks.spawn(std::future::pending());
        tasks.spawn_gpu_watch(async { Some("GPU-1 is gone".into()) });
        assert!(
            matches!(tasks.ended().await, Ok(SessionEnd::GpusChanged(change)) if change == "GPU-1 is gone")
        );
        tasks.spawn(async {});
        assert!(tasks.ended().await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn task_that_does_not_end_is_left_alone_after_the_timeout() {
        let mut tasks = Tasks::default();
        tasks.spawn(std::future::pending());
        tasks.join(Duration::from_secs(5)).await;
    }
}
