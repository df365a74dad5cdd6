//! Grants, adopts and releases shares.

use super::{Daemon, State};
use crate::decide::{self, Held};
use crate::home::Home;
use crate::report::Stage;
use crate::store::{self, Record};
use crate::users::Who;
use crate::wire::{Granted, Places, RunRequest};
use partage_core::model::{GpuUuid, Node, PodAsk};
use partage_enforce::error_chain::describe;
use partage_enforce::gpus::withhold_unhealthy;
use partage_enforce::records::RecordError;
use partage_enforce::refusal::{Refusal, RefusalReason};
use partage_enforce::shares::{Adoption, MissingFiles, ShareError, ShareSpec, gated_gpus};
use partage_host::process::Identity;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The maximum length of a share's name.
const MAX_NAME_LENGTH: usize = 63;

/// A share that was granted.
pub(super) struct Live {
    pub(super) record: Record,
    /// Distinguishes shares that have the same name one after the other.
    pub(super) number: u64,
    pub(super) stopping: bool,
}

impl Live {
    fn new(record: Record, number: u64) -> Live {
        Live { record, number, stopping: false }
    }

    pub(super) fn stage(&self) -> Stage {
        match &self.record.bound {
            _ if self.stopping => Stage::Stopping,
            None => Stage::Starting,
            Some(_) if self.record.main.lives() => Stage::Running,
            Some(_) => Stage::Lingering,
        }
    }
}

/// Why a share cannot be created or adopted.
#[derive(Debug, thiserror::Error)]
pub(super) enum CreateShareError {
    /// Its region cannot be created.
    #[error(transparent)]
    Region(#[from] ShareError),
    /// Its files cannot be written.
    #[error("{}", path.display())]
    Files {
        /// The share's directory.
        path: PathBuf,
        /// What the system reported.
        #[source]
        source: io::Error,
    },
    /// Its record cannot be written.
    #[error(transparent)]
    Record(#[from] RecordError),
}

impl State {
    /// Returns the GPUs on which launches wait for turns.
    pub(super) fn gated(&self) -> BTreeSet<GpuUuid> {
        gated_gpus(self.shares.values().flat_map(|live| &live.record.shares))
    }

    pub(super) fn held(&self) -> Vec<Held<'_>> {
        let held = self.shares.values().map(|live| Held {
            name: &live.record.name,
            who: &live.record.who,
            shares: &live.record.shares,
        });
        let elsewhere = self.held_elsewhere.iter();
        let elsewhere = elsewhere.map(|(name, held)| Held { name, who: &held.who, shares: &held.shares });
        held.chain(elsewhere).collect()
    }

    fn is_taken(&self, name: &str) -> Option<&Who> {
        let waiting = self.queue.iter().find(|ticket| ticket.name == name).map(|ticket| &ticket.who);
        self.shares.get(name).map(|live| &live.record.who).or(waiting)
    }

    /// Returns the requested name, or one derived from the command's.
    pub(super) fn name(&self, request: &RunRequest, home: &Home) -> Result<String, Refusal> {
        let wrong = |message: String| Err(Refusal::new(RefusalReason::Invalid, message));
        let Some(name) = &request.name else {
            let command = request.command.first().map_or("share", String::as_str);
            let base = command.rsplit('/').next().unwrap_or(command);
            let plain: String = base.chars().filter(|letter| is_plain(*letter)).take(40).collect();
            let plain = plain.trim_start_matches(['-', '.']);
            let plain = if plain.is_empty() { "share" } else { plain };
            let is_free = |name: &String| self.is_taken(name).is_none() && !home.share(name).exists();
            let free = (1u64..).map(|number| format!("{plain}-{number}")).find(is_free);
            return free.map_or_else(|| wrong("there is no name left".into()), Ok);
        };
        let sound =
            name.len() <= MAX_NAME_LENGTH && name.chars().all(is_plain) && !name.starts_with(['-', '.']);
        if name.is_empty() || !sound {
            return wrong(format!(
                "{name:?} cannot be a name: use letters, digits, - _ and ., at most {MAX_NAME_LENGTH}, not beginning with - or ."
            ));
        }
        match self.is_taken(name) {
            Some(who) => wrong(format!(
                "a share called {name} is there already, of user {}: choose another with --name",
                crate::users::name(who.uid)
            )),
            // Its record cannot be read, and its processes may run.
            None if home.share(name).exists() => wrong(format!(
                "{} is there and is no share that is known: choose another name with --name",
                home.share(name).display()
            )),
            None => Ok(name.clone()),
        }
    }
}

fn is_plain(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || "-_.".contains(letter)
}

impl Daemon {
    /// Returns the GPUs that can be granted now: without unhealthy ones, and without those of other daemons.
    pub(super) fn node(&self) -> Node {
        let mut node = self.machine.node.clone();
        withhold_unhealthy(&mut node, &self.observed().looks);
        self.claims.claim(&mut node, &self.warnings);
        node
    }

    /// Releases the locks on GPUs of which no share is granted.
    pub(super) fn unclaim(&self, state: &State) {
        self.claims.release_unused(|uuid| {
            state.shares.values().any(|live| live.record.shares.iter().any(|share| share.gpu == *uuid))
        });
    }

    /// Grants a share, if it fits.
    pub(super) fn give(
        self: &Arc<Self>,
        state: &mut State,
        name: &str,
        who: &Who,
        main: Identity,
        ask: &PodAsk,
        command: &[String],
    ) -> Result<Granted, Refusal> {
        // A process has one share. It asks again if the daemon was killed before it had its answer.
        let before = state.shares.values().find(|live| live.record.main == main);
        if let Some(live) = before {
            let name = live.record.name.clone();
            if live.record.bound.is_some() {
                return Err(Refusal::new(
                    RefusalReason::Invalid,
                    format!("this process is in share {name} already"),
                ));
            }
            self.take_back(state, &[name]);
        }
        let node = self.node();
        let placed = decide::place(&node, &state.held(), &self.settings, who, ask);
        let shares = placed.inspect_err(|_| self.unclaim(state))?;
        let broken =
            |why: String| Refusal::new(RefusalReason::Failed, format!("the share cannot be made: {why}"));
        let mut record =
            Record::new(name, who, shares, main, command).map_err(|error| broken(error.to_string()))?;
        record.oversubscribe = ask.oversubscribe;
        let made = self.make(state, record).inspect_err(|_| {
            self.regions.release(&name.to_string());
            self.removed(name);
        });
        let granted = made.map_err(|error| broken(describe(&error)))?;
        self.after_change(state);
        Ok(granted)
    }

    fn make(self: &Arc<Self>, state: &mut State, record: Record) -> Result<Granted, CreateShareError> {
        let name = record.name.clone();
        let failed = |source| self.files_error(&name, source);
        let region = store::make_region(&self.home, &name).map_err(failed)?;
        let gated =
            gated_gpus(state.shares.values().flat_map(|live| &live.record.shares).chain(&record.shares));
        self.regions.prepare(&name, (), &spec(&region, &record, &gated))?;
        store::open_to(&self.home, &name, record.who.uid).map_err(failed)?;
        let covers = self.machine.covers(&self.home, &name, &record.shares).map_err(failed)?;
        record.write(&self.home)?;
        let (words, id) = (decide::words(&self.machine.node, &record.shares), record.id.clone());
        let gpus = record.shares.iter().map(|share| share.gpu.to_string()).collect();
        let user = crate::users::name(record.who.uid);
        tracing::info!(share = %name, grant = %words, user = %user, "share granted");
        state.given += 1;
        state.shares.insert(name.clone(), Live::new(record, state.given));
        let places = Places {
            region,
            region_at: self.home.region_at(),
            stand_ins: self.machine.stand_ins().to_path_buf(),
            own_stand_ins: self.home.own_stand_ins().join(&name),
            driver: [self.machine.driver.cuda.clone(), self.machine.driver.nvml.clone()],
            driver_at: self.home.driver_files(),
            simulated: self.machine.driver.simulated.clone(),
            covers,
        };
        Ok(Granted { name, id, words, gpus, places })
    }

    fn files_error(&self, name: &str, source: io::Error) -> CreateShareError {
        CreateShareError::Files { path: self.home.share(name), source }
    }

    /// Adopts a share that runs, after a restart of the daemon. `gated` are the GPUs on which launches wait for turns.
    ///
    /// A region that cannot be managed is left as it is and reported. What the share has stays counted; it cannot be resized
    /// and is not audited.
    pub(super) fn adopted(
        &self,
        record: Record,
        gated: &BTreeSet<GpuUuid>,
    ) -> Result<Live, CreateShareError> {
        let (name, uid) = (&record.name, record.who.uid);
        let directory = store::region(&self.home, name);
        // Processes that have removed files mapped go on with them, and those that start later get new ones.
        match self.regions.adopt(name, (), &spec(&directory, &record, gated), MissingFiles::Create)? {
            Adoption::Managed | Adoption::Missing => {}
            Adoption::Created => {
                store::open_to(&self.home, name, uid).map_err(|error| self.files_error(name, error))?;
            }
            Adoption::Unmanaged { reason } => self.warnings.add(&format!(
                "the region of share {name} is not managed, and the share runs on with the limits that it has: {reason}"
            )),
        }
        Ok(Live::new(record, 0))
    }

    /// Releases a share.
    pub(super) fn release(self: &Arc<Self>, name: &str, number: u64) {
        let mut state = self.state();
        if state.shares.get(name).is_some_and(|live| live.number == number) {
            self.take_back(&mut state, &[name.to_string()]);
        }
    }

    /// Releases shares whose processes have ended and that the watch has not noticed yet: a user who runs one command after
    /// another must not find the first in the way of the second.
    pub(super) fn release_ended(self: &Arc<Self>, state: &mut State) {
        let ended = state.shares.values().filter(|live| !live.record.main.lives());
        let gone = ended.filter(|live| live.record.has_members(&self.home).is_ok_and(|any| !any));
        let gone: Vec<String> = gone.map(|live| live.record.name.clone()).collect();
        if !gone.is_empty() {
            self.take_back(state, &gone);
        }
    }

    /// Releases shares, and grants their capacity to requests that wait.
    fn take_back(self: &Arc<Self>, state: &mut State, names: &[String]) {
        for name in names {
            let Some(live) = state.shares.remove(name) else { continue };
            self.regions.release(name);
            self.forget(&live.record);
            tracing::info!(share = %name, "share ended");
        }
        self.after_change(state);
    }

    /// Removes the cgroup and the files of a share.
    pub(super) fn forget(self: &Arc<Self>, record: &Record) {
        // Before the record: if the daemon is killed here, the next one still knows the cgroup. The kernel may take a moment to
        // see that it is empty.
        if let Some(cgroup) = &record.cgroup
            && fs::remove_dir(cgroup.folder()).is_err()
        {
            self.remove_soon(cgroup.clone());
        }
        self.removed(&record.name);
    }

    /// Removes the files of a share.
    pub(super) fn removed(&self, name: &str) {
        if let Err(error) = store::remove(&self.home, name) {
            tracing::warn!(share = name, %error, "cannot remove the share's files");
        }
    }

    /// Applies what follows from shares that were added, removed or changed: requests that wait may fit now, and turns are
    /// needed on GPUs with guaranteed compute.
    pub(super) fn after_change(self: &Arc<Self>, state: &mut State) {
        self.grant_waiting(state);
        self.unclaim(state);
        self.regions.apply_turns(&state.gated());
        self.changed.notify_all();
    }
}

/// The region of a share, whose `usage` belongs to the share's owner.
fn spec<'a>(directory: &'a Path, record: &'a Record, gated: &'a BTreeSet<GpuUuid>) -> ShareSpec<'a> {
    ShareSpec {
        directory,
        usage_owner: store::usage_owner(record.who.uid),
        shares: &record.shares,
        gated,
        policy: record.region_policy(),
    }
}
