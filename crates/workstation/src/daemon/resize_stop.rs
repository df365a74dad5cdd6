//! Resizes and stops shares, for users who may.

use super::{Daemon, State};
use crate::decide;
use crate::users::{self, Who};
use crate::wire::Change;
use partage_core::model::Share;
use partage_enforce::error_chain::describe;
use partage_enforce::refusal::{Refusal, RefusalReason};
use partage_enforce::shares::ShareError;
use partage_host::members;
use std::sync::Arc;
use std::time::Duration;

impl Daemon {
    /// Changes the amounts of a share that runs.
    pub(super) fn resize(self: &Arc<Self>, who: &Who, name: &str, change: &Change) -> Result<(), Refusal> {
        let mut state = self.state();
        self.find(&state, who, name)?;
        let node = self.node();
        let resized = decide::resize(&node, &state.held(), &self.settings, name, change);
        let shares = resized.inspect_err(|_| self.unclaim(&state))?;
        let Some(live) = state.shares.get_mut(name) else { return Err(unknown(&state, name)) };
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
            let grant = decide::words(&self.machine.node, &live.record.shares);
            tracing::info!(share = name, grant = %grant, "share resized");
        }
        resized
    }

    /// Sets the limits of a share to those of its record, and writes the record. Where either fails, the limits are `before`.
    fn resize_region(&self, state: &State, name: &str, before: &[Share]) -> Result<(), Refusal> {
        let Some(live) = state.shares.get(name) else { return Err(unknown(state, name)) };
        let (key, gated) = (name.to_string(), state.gated());
        let resized = self.regions.resize(&key, &live.record.shares, &gated);
        resized.map_err(|error| refused(name, &error))?;
        live.record.write(&self.home).map_err(|error| {
            if let Err(error) = self.regions.restore(&key, before, &gated) {
                tracing::warn!(share = name, error = %describe(&error), "cannot restore the share's limits");
            }
            Refusal::new(RefusalReason::Failed, describe(&error))
        })
    }

    /// Ends all processes of a share.
    pub(super) fn stop(
        self: &Arc<Self>,
        who: &Who,
        name: &str,
        grace: Duration,
    ) -> Result<members::Ended, Refusal> {
        let mut state = self.state();
        self.find(&state, who, name)?;
        let Some(live) = state.shares.get_mut(name) else { return Err(unknown(&state, name)) };
        live.stopping = true;
        let (number, record) = (live.number, live.record.clone());
        drop(state);
        let marks = record.marks(&self.home);
        let ended = if marks.is_empty() {
            // It has not started yet, and has no other process.
            record.main.signal(rustix::process::Signal::KILL).map(|()| members::Ended { ended: 0, killed: 1 })
        } else {
            members::end(&marks, &|process| record.is_of(process), grace)
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
                Err(Refusal::new(RefusalReason::Failed, format!("{name} cannot be stopped: {error}")))
            }
        }
    }

    /// Checks that a share exists and that a user may change it.
    fn find(&self, state: &State, who: &Who, name: &str) -> Result<(), Refusal> {
        let Some(live) = state.shares.get(name) else { return Err(unknown(state, name)) };
        if live.record.who.uid != who.uid && !who.is_keeper() {
            let owner = users::name(live.record.who.uid);
            let message =
                format!("{name} belongs to user {owner}: only they and the administrator may change it");
            return Err(Refusal::new(RefusalReason::NotOwner, message));
        }
        Ok(())
    }
}

/// Converts the reason why limits were not changed into a refusal.
fn refused(name: &str, error: &ShareError) -> Refusal {
    match error {
        ShareError::AboveLimit { used, limit } => {
            let message = format!("{name} uses {used} right now, which is more than {limit}");
            let mut refusal = Refusal::new(RefusalReason::NoCapacity, message);
            let mebibytes = used.0.div_ceil(1 << 20);
            let hint = format!("free memory in the program first, or use --memory {mebibytes}Mi or more");
            refusal.hints.push(hint);
            refusal
        }
        ShareError::Unmanaged { reason } => {
            Refusal::new(RefusalReason::Failed, format!("{name} keeps the limits that it has: {reason}"))
        }
        error => Refusal::new(RefusalReason::Failed, describe(error)),
    }
}

fn unknown(state: &State, name: &str) -> Refusal {
    let names: Vec<&str> = state.shares.keys().map(String::as_str).collect();
    let there = match names.as_slice() {
        [] => "there is none at all".to_string(),
        names => format!("there are {}", names.join(", ")),
    };
    Refusal::new(RefusalReason::NotFound, format!("no share is called {name}: {there}"))
}
