//! Shares that run are changed and stopped, by those who may.

use super::give::Live;
use super::{Keeper, State};
use crate::decide;
use crate::users::{self, Who};
use crate::wire::Change;
use partage_core::model::{Bytes, Share};
use partage_enforce::error_chain::describe;
use partage_enforce::refusal::{Refusal, RefusalReason};
use partage_host::members;
use std::sync::Arc;
use std::time::Duration;

impl Keeper {
    /// Other amounts for a share that runs.
    pub(super) fn resize(self: &Arc<Self>, who: &Who, name: &str, change: &Change) -> Result<(), Refusal> {
        let mut state = self.state();
        self.find(&state, who, name)?;
        let node = self.node();
        let resized = decide::resize(&node, &state.held(), &self.settings, name, change);
        let shares = resized.inspect_err(|_| self.unclaim(&state))?;
        let Some(live) = state.shares.get_mut(name) else { return Err(unknown(&state, name)) };
        let before = std::mem::replace(&mut live.record.shares, shares);
        let undone = self.fits_what_is_used(live, &before).and_then(|()| {
            live.record
                .write(&self.home)
                .map_err(|error| Refusal::new(RefusalReason::Failed, describe(&error)))
        });
        if undone.is_err() {
            live.record.shares = before;
        }
        self.after_change(&mut state);
        if undone.is_ok()
            && let Some(live) = state.shares.get(name)
        {
            let grant = decide::words(&self.machine.node, &live.record.shares);
            tracing::info!(share = name, grant = %grant, "share resized");
        }
        undone
    }

    /// Sets the new limits, and reverts them where more is in use: in the other order a process could take memory between the
    /// check and the change.
    fn fits_what_is_used(&self, live: &Live, before: &[Share]) -> Result<(), Refusal> {
        let region = live.managed()?;
        let broken = |error: String| Refusal::new(RefusalReason::Failed, error);
        let write = |shares: &[Share]| -> Result<(), Refusal> {
            let gated = |at: usize| region.owner().share(at).is_some_and(|is| is.gated);
            let limits = shares.iter().enumerate();
            let limits = limits.map(|(at, share)| self.machine.region_share(share, gated(at)));
            let limits: Vec<_> = limits.collect::<Result<_, _>>().map_err(broken)?;
            region.apply(&limits).map_err(|error| broken(error.to_string()))?;
            Ok(())
        };
        write(&live.record.shares)?;
        let usage = region.reader().snapshot().map_err(|error| broken(error.to_string()))?;
        for (share, used) in live.record.shares.iter().zip(usage.gpus) {
            let Some(limit) = share.memory_bytes.filter(|limit| used.used > limit.0) else { continue };
            write(before)?;
            let used = Bytes(used.used);
            let mut refused = Refusal::new(
                RefusalReason::NoCapacity,
                format!("{} uses {used} right now, which is more than {limit}", live.record.name),
            );
            let mebibytes = used.0.div_ceil(1 << 20);
            refused
                .hints
                .push(format!("free memory in the program first, or use --memory {mebibytes}Mi or more"));
            return Err(refused);
        }
        Ok(())
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
            // It has not started: its process is ours to end all the same.
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

    /// A share that somebody may change.
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

fn unknown(state: &State, name: &str) -> Refusal {
    let names: Vec<&str> = state.shares.keys().map(String::as_str).collect();
    let there = match names.as_slice() {
        [] => "there is none at all".to_string(),
        names => format!("there are {}", names.join(", ")),
    };
    Refusal::new(RefusalReason::NotFound, format!("no share is called {name}: {there}"))
}
