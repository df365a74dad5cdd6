//! The warnings that a daemon includes in its report for as long as it runs.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Warnings in the order in which they were first given.
#[derive(Default)]
pub(super) struct Warnings(Mutex<Vec<String>>);

impl Warnings {
    fn list(&self) -> MutexGuard<'_, Vec<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs a warning and adds it to the report. A repeated warning is ignored.
    pub(super) fn add(&self, warning: &str) {
        let mut list = self.list();
        if !list.iter().any(|known| known == warning) {
            list.push(warning.into());
            drop(list);
            tracing::warn!(cause = warning, "daemon runs with reduced functionality");
        }
    }

    /// Returns all warnings in order.
    pub(super) fn all(&self) -> Vec<String> {
        self.list().clone()
    }
}
