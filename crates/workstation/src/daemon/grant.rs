//! Grants, adopts and releases shares.

use super::{Daemon, DaemonState};
use crate::admission::{self, HeldShares};
use crate::protocol::{GrantedShare, RunRequest, SharePaths};
use crate::report::ShareStage;
use crate::share_store::{self, ShareRecord};
use crate::state_dir::StateDir;
use crate::users::UserIdentity;
use partage_core::model::{GpuUuid, Node, PodAsk};
use partage_enforce::error_chain::describe;
use partage_enforce::gpus::withhold_unhealthy;
use partage_enforce::records::RecordError;
use partage_enforce::refusal::{Refusal, RefusalReason};
use partage_enforce::shares::{Adoption, MissingFiles, ShareError, ShareSpec, throttled_gpus};
use partage_host::process::ProcessIdentity;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The maximum length of a share's name.
const MAX_NAME_LENGTH: usize = 63;

/// A share that is granted and not yet released.
pub(super) struct ActiveShare {
    pub(super) record: ShareRecord,
    /// Distinguishes shares that have the same name one after the other.
    pub(super) number: u64,
    pub(super) stopping: bool,
}

impl ActiveShare {
    fn new(record: ShareRecord, number: u64) -> ActiveShare {
        ActiveShare { record, number, stopping: false }
    }

    pub(super) fn stage(&self) -> ShareStage {
        match &self.record.confinement {
            _ if self.stopping => ShareStage::Stopping,
            None => ShareStage::Starting,
            Some(_) if self.record.main.is_running() => ShareStage::Running,
            Some(_) => ShareStage::Lingering,
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
        /// The directory of the share.
        path: PathBuf,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// Its record cannot be written.
    #[error(transparent)]
    Record(#[from] RecordError),
}

impl DaemonState {
    /// Returns the GPUs on which launches wait for turns.
    pub(super) fn throttled(&self) -> BTreeSet<GpuUuid> {
        throttled_gpus(self.shares.values().flat_map(|live| &live.record.shares))
    }

    pub(super) fn held(&self) -> Vec<HeldShares<'_>> {
        let held = self.shares.values().map(|live| HeldShares {
            name: &live.record.name,
            who: &live.record.who,
            shares: &live.record.shares,
        });
        let elsewhere = self.held_elsewhere.iter();
        let elsewhere =
            elsewhere.map(|(name, held)| HeldShares { name, who: &held.who, shares: &held.shares });
        held.chain(elsewhere).collect()
    }

    fn is_taken(&self, name: &str) -> Option<&UserIdentity> {
        let waiting = self.queue.iter().find(|ticket| ticket.name == name).map(|ticket| &ticket.who);
        self.shares.get(name).map(|live| &live.record.who).or(waiting)
    }

    /// Returns the requested name, or one derived from the command's.
    pub(super) fn name(&self, request: &RunRequest, state_dir: &StateDir) -> Result<String, Refusal> {
        let wrong = |message: String| Err(Refusal::new(RefusalReason::Invalid, message));
        let Some(name) = &request.name else {
            let command = request.command.first().map_or("share", String::as_str);
            let base = command.rsplit('/').next().unwrap_or(command);
            let plain: String = base.chars().filter(|letter| is_plain(*letter)).take(40).collect();
            let plain = plain.trim_start_matches(['-', '.']);
            let plain = if plain.is_empty() { "share" } else { plain };
            let is_free = |name: &String| self.is_taken(name).is_none() && !state_dir.share(name).exists();
            let free = (1u64..).map(|number| format!("{plain}-{number}")).find(is_free);
            return free.map_or_else(|| wrong("all names are in use".into()), Ok);
        };
        let sound =
            name.len() <= MAX_NAME_LENGTH && name.chars().all(is_plain) && !name.starts_with(['-', '.']);
        if name.is_empty() || !sound {
            return wrong(format!(
                "invalid name {name:?}: use at most {MAX_NAME_LENGTH} letters, digits, - _ and ., not starting with - or ."
            ));
        }
        match self.is_taken(name) {
            Some(who) => wrong(format!(
                "share {name} already exists, of user {}: choose another name with --name",
                crate::users::user_name(who.uid)
            )),
            // Its record cannot be read, and its processes may be running.
            None if state_dir.share(name).exists() => wrong(format!(
                "{} exists and is not a known share: choose another name with --name",
                state_dir.share(name).display()
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
        withhold_unhealthy(&mut node, &self.observed().samples);
        self.claims.claim(&mut node, &self.warnings);
        node
    }

    /// Releases the locks on GPUs of which no share is granted.
    pub(super) fn release_unused_gpus(&self, state: &DaemonState) {
        let held = state.held();
        self.claims.release_unused(|uuid| {
            held.iter().any(|held| held.shares.iter().any(|share| share.gpu == *uuid))
        });
    }

    /// Grants a share, if it fits.
    pub(super) fn grant_share(
        self: &Arc<Self>,
        state: &mut DaemonState,
        name: &str,
        who: &UserIdentity,
        main: ProcessIdentity,
        ask: &PodAsk,
        command: &[String],
    ) -> Result<GrantedShare, Refusal> {
        // A process has one share. It repeats its request if the daemon was killed before it responded.
        let before = state.shares.values().find(|live| live.record.main == main);
        if let Some(live) = before {
            let name = live.record.name.clone();
            if live.record.confinement.is_some() {
                return Err(Refusal::new(
                    RefusalReason::Invalid,
                    format!("this process is in share {name} already"),
                ));
            }
            self.release_shares(state, &[name]);
        }
        let node = self.node();
        let placed = admission::place(&node, &state.held(), &self.settings, who, ask);
        let shares = placed.inspect_err(|_| self.release_unused_gpus(state))?;
        let broken =
            |why: String| Refusal::new(RefusalReason::Failed, format!("cannot create the share: {why}"));
        let mut record =
            ShareRecord::new(name, who, shares, main, command).map_err(|error| broken(error.to_string()))?;
        record.oversubscribe = ask.oversubscribe;
        record.turns = ask.turns;
        let made = self.create_share(state, record).inspect_err(|_| {
            self.regions.release(&name.to_string());
            self.remove_share_files(name);
        });
        let granted = made.map_err(|error| broken(describe(&error)))?;
        self.after_change(state);
        Ok(granted)
    }

    fn create_share(
        self: &Arc<Self>,
        state: &mut DaemonState,
        record: ShareRecord,
    ) -> Result<GrantedShare, CreateShareError> {
        let name = record.name.clone();
        let failed = |source| self.files_error(&name, source);
        let region = share_store::create_region_dir(&self.state_dir, &name).map_err(failed)?;
        let throttled =
            throttled_gpus(state.shares.values().flat_map(|live| &live.record.shares).chain(&record.shares));
        self.regions.prepare(&name, (), &spec(&region, &record, &throttled))?;
        share_store::grant_access(&self.state_dir, &name, record.who.uid).map_err(failed)?;
        let covers = self.machine.covers(&self.state_dir, &name, &record.shares).map_err(failed)?;
        record.write(&self.state_dir)?;
        let (description, id) =
            (admission::describe_shares(&self.machine.node, &record.shares), record.id.clone());
        let gpus = record.shares.iter().map(|share| share.gpu.to_string()).collect();
        let user = crate::users::user_name(record.who.uid);
        tracing::info!(share = %name, grant = %description, user = %user, "share granted");
        state.given += 1;
        state.shares.insert(name.clone(), ActiveShare::new(record, state.given));
        let places = SharePaths {
            region,
            region_at: self.state_dir.region_at(),
            stand_ins: self.machine.stand_ins().to_path_buf(),
            own_stand_ins: self.state_dir.own_stand_ins().join(&name),
            driver: [self.machine.driver.cuda.clone(), self.machine.driver.nvml.clone()],
            driver_at: self.state_dir.driver_files(),
            simulated: self.machine.driver.simulated.clone(),
            covers,
        };
        Ok(GrantedShare { name, id, description, gpus, places })
    }

    fn files_error(&self, name: &str, source: io::Error) -> CreateShareError {
        CreateShareError::Files { path: self.state_dir.share(name), source }
    }

    /// Adopts a share that runs, after a restart of the daemon. `throttled` are the GPUs on which launches wait for turns.
    ///
    /// A region that cannot be managed is not changed, and reported. The share stays accounted for in any case; it can then be
    /// neither resized nor audited.
    pub(super) fn adopt_region(&self, record: ShareRecord, throttled: &BTreeSet<GpuUuid>) -> ActiveShare {
        let name = &record.name;
        let directory = share_store::region_dir(&self.state_dir, name);
        // Processes that have removed files mapped keep them, and those that start later get new ones.
        let adopted =
            self.regions.adopt(name, (), &spec(&directory, &record, throttled), MissingFiles::Create);
        let problem = match adopted {
            Ok(Adoption::Managed | Adoption::Missing) => None,
            Ok(Adoption::Created) => share_store::grant_access(&self.state_dir, name, record.who.uid)
                .err()
                .map(|error| describe(&self.files_error(name, error))),
            Ok(Adoption::Unmanaged { reason }) => Some(reason),
            Err(error) => Some(describe(&error)),
        };
        if let Some(reason) = problem {
            self.warnings.add(&format!(
                "cannot manage the region of share {name}, so the share keeps its current limits: {reason}"
            ));
        }
        ActiveShare::new(record, 0)
    }

    /// Releases a share, unless another one has its name now.
    pub(super) fn release(self: &Arc<Self>, name: &str, number: u64) {
        let mut state = self.state();
        if state.shares.get(name).is_some_and(|live| live.number == number) {
            self.release_shares(&mut state, &[name.to_string()]);
        }
    }

    /// Releases shares whose processes have exited and that the watch has not noticed yet: if a user runs one command
    /// after another, the first must not block the second.
    pub(super) fn release_ended(self: &Arc<Self>, state: &mut DaemonState) {
        let ended = state.shares.values().filter(|live| !live.record.main.is_running());
        let gone = ended.filter(|live| live.record.has_members(&self.state_dir).is_ok_and(|any| !any));
        let gone: Vec<String> = gone.map(|live| live.record.name.clone()).collect();
        if !gone.is_empty() {
            self.release_shares(state, &gone);
        }
    }

    /// Releases shares, and grants their capacity to requests that wait.
    fn release_shares(self: &Arc<Self>, state: &mut DaemonState, names: &[String]) {
        for name in names {
            let Some(live) = state.shares.remove(name) else { continue };
            self.regions.release(name);
            self.remove_share(&live.record);
            tracing::info!(share = %name, "share released");
        }
        self.after_change(state);
    }

    /// Removes the cgroup and the files of a share.
    pub(super) fn remove_share(self: &Arc<Self>, record: &ShareRecord) {
        // The cgroup is removed before the record: if the daemon is killed here, the next one still knows the cgroup.
        // The kernel may take a moment to notice that it is empty.
        if let Some(cgroup) = &record.cgroup
            && fs::remove_dir(cgroup.path()).is_err()
        {
            self.remove_soon(cgroup.clone());
        }
        self.remove_share_files(&record.name);
    }

    /// Removes the files of a share.
    pub(super) fn remove_share_files(&self, name: &str) {
        if let Err(error) = share_store::remove(&self.state_dir, name) {
            tracing::warn!(share = name, %error, "cannot remove the share's files");
        }
    }

    /// Applies the consequences of added, removed or changed shares: waiting requests may fit now, and turns are needed
    /// on GPUs with guaranteed compute.
    pub(super) fn after_change(self: &Arc<Self>, state: &mut DaemonState) {
        self.grant_waiting(state);
        self.release_unused_gpus(state);
        self.regions.apply_turns(&state.throttled());
        self.changed.notify_all();
    }
}

/// The region of a share, whose `usage` belongs to the share's owner.
fn spec<'a>(directory: &'a Path, record: &'a ShareRecord, throttled: &'a BTreeSet<GpuUuid>) -> ShareSpec<'a> {
    ShareSpec {
        directory,
        usage_owner: share_store::usage_owner(record.who.uid),
        shares: &record.shares,
        throttled,
        turns: record.turns,
        policy: record.region_policy(),
    }
}
