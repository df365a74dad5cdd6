//! Limits the number of connections, so that no user can block the others.

use partage_enforce::refusal::{Refusal, RefusalReason};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Connections at a time, those that wait for a share included.
const MAX_CONNECTIONS: usize = 512;
/// Connections of one user at a time.
const MAX_CONNECTIONS_PER_USER: usize = 128;

/// The open connections, by user.
#[derive(Default)]
pub(super) struct Connections(Mutex<BTreeMap<u32, usize>>);

impl Connections {
    fn by_user(&self) -> MutexGuard<'_, BTreeMap<u32, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a connection of a user, or refuses it if there are too many. Root and the daemon's own user
    /// (`is_privileged`) may have as many as all others together: they must be able to stop shares in that case.
    pub(super) fn open(&self, uid: u32, is_privileged: bool) -> Result<(), Refusal> {
        let mut by_user = self.by_user();
        let all: usize = by_user.values().sum();
        let own = by_user.get(&uid).copied().unwrap_or(0);
        let message = match (all >= MAX_CONNECTIONS, own >= MAX_CONNECTIONS_PER_USER) {
            _ if is_privileged && own < MAX_CONNECTIONS => None,
            (_, true) => Some(format!(
                "you already have {own} connections to the daemon, including commands that wait: end some first"
            )),
            (true, _) => Some(format!("the daemon already has {all} connections: try again soon")),
            _ => None,
        };
        match message {
            Some(message) => Err(Refusal::new(RefusalReason::NoCapacity, message)),
            None => {
                *by_user.entry(uid).or_default() += 1;
                Ok(())
            }
        }
    }

    /// Counts the end of a connection.
    pub(super) fn close(&self, uid: u32) {
        let mut by_user = self.by_user();
        if let Some(own) = by_user.get_mut(&uid) {
            *own = own.saturating_sub(1);
            if *own == 0 {
                by_user.remove(&uid);
            }
        }
    }

    /// Returns whether no connection is open.
    pub(super) fn is_empty(&self) -> bool {
        self.by_user().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_cannot_take_all_connections() {
        let connections = Connections::default();
        for _ in 0..MAX_CONNECTIONS_PER_USER {
            connections.open(1000, false).unwrap();
        }
        let refused = connections.open(1000, false).unwrap_err();
        assert!(refused.message.starts_with("you already have 128 connections"), "{}", refused.message);
        connections.open(1001, false).unwrap();
        connections.close(1000);
        connections.open(1000, false).unwrap();
    }

    #[test]
    fn administrator_is_served_when_all_connections_are_taken() {
        let connections = Connections::default();
        for count in 0..MAX_CONNECTIONS {
            let uid = 1000 + u32::try_from(count / MAX_CONNECTIONS_PER_USER).unwrap();
            connections.open(uid, false).unwrap();
        }
        let refused = connections.open(2000, false).unwrap_err();
        assert!(refused.message.starts_with("the daemon already has 512 connections"), "{}", refused.message);
        for _ in 0..MAX_CONNECTIONS {
            connections.open(0, true).unwrap();
        }
        connections.open(0, true).unwrap_err();
        for _ in 0..MAX_CONNECTIONS {
            connections.close(0);
        }
        assert!(!connections.is_empty());
    }
}
