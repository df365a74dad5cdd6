//! Resizes and stops shares, after checking the permission of the user.

use super::{Daemon, DaemonState};
use crate::admission;
use crate::protocol::ResizeChange;
use crate::users::{self, UserIdentity};
use partage_core::model::Share;
use partage_enforce::error_chain::describe;
use partage_enforce::refusal::{Refusal, RefusalReason};
use partage_enforce::shares::ShareError;
use partage_host::share_processes;
use std::sync::Arc;
use std::time::Duration;

impl Daemon {
    /// Changes the amounts of a share that runs.
    pub(super) fn resize(
        self: &Arc<Self>,
        who: &UserIdentity,
        name: &str,
        change: &ResizeChange,
    ) -> Result<(), Refusal> {
        let mut state = self.state();
        self.find(&state, who, name)?;
        let node = self.node();
        let resized = admission::resize(&node, &state.held(), &self.settings, name, change);
        let shares = resized.inspect_err(|_| self.release_unused_gpus(&state))?;
        let Some(live) = state.shares.get_mut(name) else { return Err(unknown_share(&state, name)) };
        let before = std::mem::replace(&mut live.record.shares, shares);
        let resized = self.resize_region(&state, name, &before);
        if resized.is_err()
            && let Some(live) = state.shares.get_mut(name)
        {
            live.record.shares = before;
        }
        self.after_change(&mut state);
        if resized.is_ok()
            && let Some(live) = state.shares.get(name)
        {
            let grant = admission::describe_shares(&self.machine.node, &live.record.shares);
            tracing::info!(share = name, grant = %grant, "share resized");
        }
        resized
    }

    /// Sets the limits of a share to those of its record, and writes the record. If either fails, the limits stay
    /// `before`.
    fn resize_region(&self, state: &DaemonState, name: &str, before: &[Share]) -> Result<(), Refusal> {
        let Some(live) = state.shares.get(name) else { return Err(unknown_share(state, name)) };
        let (key, throttled) = (name.to_string(), state.throttled());
        let resized = self.regions.resize(&key, &live.record.shares, &throttled);
        resized.map_err(|error| refused(name, &error))?;
        live.record.write(&self.state_dir).map_err(|error| {
            if let Err(error) = self.regions.restore(&key, before, &throttled) {
                tracing::warn!(share = name, error = %describe(&error), "cannot restore the share's limits");
            }
            Refusal::new(RefusalReason::Failed, describe(&error))
        })
    }

    /// Ends all processes of a share.
    pub(super) fn stop(
        self: &Arc<Self>,
        who: &UserIdentity,
        name: &str,
        grace: Duration,
    ) -> Result<share_processes::EndedProcesses, Refusal> {
        let mut state = self.state();
        self.find(&state, who, name)?;
        let Some(live) = state.shares.get_mut(name) else { return Err(unknown_share(&state, name)) };
        live.stopping = true;
        let (number, record) = (live.number, live.record.clone());
        drop(state);
        let memberships = record.memberships(&self.state_dir);
        let ended = if memberships.is_empty() {
            // The share has not started yet, and has no other process.
            record
                .main
                .signal(rustix::process::Signal::KILL)
                .map(|()| share_processes::EndedProcesses { ended: 0, killed: 1 })
        } else {
            share_processes::end_members(&memberships, &|process| record.is_of(process), grace)
        };
        match ended {
            Ok(ended) => {
                self.release(name, number);
                Ok(ended)
            }
            Err(error) => {
                if let Some(live) = self.state().shares.get_mut(name).filter(|live| live.number == number) {
                    live.stopping = false;
                }
                Err(Refusal::new(RefusalReason::Failed, format!("cannot stop {name}: {error}")))
            }
        }
    }

    /// Checks that a share exists and that a user may change it.
    fn find(&self, state: &DaemonState, who: &UserIdentity, name: &str) -> Result<(), Refusal> {
        let Some(live) = state.shares.get(name) else { return Err(unknown_share(state, name)) };
        if live.record.who.uid != who.uid && !who.is_daemon_user() {
            let owner = users::user_name(live.record.who.uid);
            let message =
                format!("{name} belongs to user {owner}: only this user and the administrator may change it");
            return Err(Refusal::new(RefusalReason::NotOwner, message));
        }
        Ok(())
    }
}

/// Converts the error of a resize into a refusal.
fn refused(name: &str, error: &ShareError) -> Refusal {
    match error {
        ShareError::AboveLimit { used, limit } => {
            let message = format!("{name} uses {used} now, which is more than {limit}");
            let mut refusal = Refusal::new(RefusalReason::NoCapacity, message);
            let mebibytes = used.0.div_ceil(1 << 20);
            let hint = format!("free memory in the program first, or use --memory {mebibytes}Mi or more");
            refusal.hints.push(hint);
            refusal
        }
        ShareError::Unmanaged { reason } => {
            Refusal::new(RefusalReason::Failed, format!("{name} keeps its current limits: {reason}"))
        }
        error => Refusal::new(RefusalReason::Failed, describe(error)),
    }
}

fn unknown_share(state: &DaemonState, name: &str) -> Refusal {
    let names: Vec<&str> = state.shares.keys().map(String::as_str).collect();
    let there = match names.as_slice() {
        [] => "no shares exist".to_string(),
        names => format!("existing shares: {}", names.join(", ")),
    };
    Refusal::new(RefusalReason::NotFound, format!("share {name} not found: {there}"))
}
