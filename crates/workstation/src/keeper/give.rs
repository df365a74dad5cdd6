//! Shares are made and taken back.

use super::{Keeper, State};
use crate::decide::{self, Held};
use crate::home::Home;
use crate::report::Stage;
use crate::store::{self, Record};
use crate::users::Who;
use crate::wire::{Granted, Places, RunRequest};
use partage_core::model::{Node, PodAsk, Share};
use partage_enforce::error_chain::describe;
use partage_enforce::gpus::withhold_unhealthy;
use partage_enforce::refusal::{Refusal, RefusalReason};
use partage_host::gpus::uuid_bytes;
use partage_host::process::Identity;
use partage_host::shares;
use partage_region::arbiter::MemberId;
use partage_region::{RegionError, RegionHandle, RegionPolicy};
use std::fs;
use std::sync::Arc;

/// The longest name of a share.
const LONGEST_NAME: usize = 63;

/// A share that is there.
pub(super) struct Live {
    pub(super) record: Record,
    /// Which share of its name.
    pub(super) number: u64,
    pub(super) stopping: bool,
    region: LiveRegion,
}

/// Whether the daemon manages a share's region.
enum LiveRegion {
    /// It sets limits, gives turns and reads usage.
    Managed { handle: Arc<RegionHandle>, member: MemberId },
    /// The share runs with files that this daemon cannot read: damaged, or of an unsupported layout. They are left as they
    /// are, and the limits in them go on holding.
    Unmanaged { why: String },
}

impl Live {
    fn new(record: Record, region: LiveRegion) -> Live {
        Live { record, number: 0, stopping: false, region }
    }

    /// The daemon's handle on the region; none where it is unmanaged.
    pub(super) fn region(&self) -> Option<&Arc<RegionHandle>> {
        match &self.region {
            LiveRegion::Managed { handle, .. } => Some(handle),
            LiveRegion::Unmanaged { .. } => None,
        }
    }

    /// The same for a change of its limits.
    pub(super) fn managed(&self) -> Result<&Arc<RegionHandle>, Refusal> {
        match &self.region {
            LiveRegion::Managed { handle, .. } => Ok(handle),
            LiveRegion::Unmanaged { why } => Err(Refusal::new(
                RefusalReason::Failed,
                format!("{} keeps the limits that it has: {why}", self.record.name),
            )),
        }
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

impl State {
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

    /// The name asked for, or one made of the command's.
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
        let sound = name.len() <= LONGEST_NAME && name.chars().all(is_plain) && !name.starts_with(['-', '.']);
        if name.is_empty() || !sound {
            return wrong(format!(
                "{name:?} cannot be a name: use letters, digits, - _ and ., at most {LONGEST_NAME}, not beginning with - or ."
            ));
        }
        match self.is_taken(name) {
            Some(who) => wrong(format!(
                "a share called {name} is there already, of user {}: choose another with --name",
                crate::users::name(who.uid)
            )),
            // Its record cannot be read; it may run.
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

impl Keeper {
    /// The machine as it can be given away now: without what is ill.
    pub(super) fn node(&self) -> Node {
        let mut node = self.machine.node.clone();
        withhold_unhealthy(&mut node, &self.truth().looks);
        self.claim(&mut node);
        node
    }

    /// Gives a share, if there is room.
    pub(super) fn give(
        self: &Arc<Self>,
        state: &mut State,
        name: &str,
        who: &Who,
        main: Identity,
        ask: &PodAsk,
        command: &[String],
    ) -> Result<Granted, Refusal> {
        // A process has one share. It asks again if the keeper was killed before it had its answer.
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
        let record =
            Record::new(name, who, shares, main, command).map_err(|error| broken(error.to_string()))?;
        let made = self.make(state, record);
        let granted = made.inspect_err(|_| self.removed(name)).map_err(broken)?;
        self.after_change(state);
        Ok(granted)
    }

    fn make(self: &Arc<Self>, state: &mut State, record: Record) -> Result<Granted, String> {
        let name = record.name.clone();
        let cannot = |error: std::io::Error| format!("{}: {error}", self.home.share(&name).display());
        let region = self.make_region(&record)?;
        let covers = self.machine.covers(&self.home, &name, &record.shares).map_err(cannot)?;
        record.write(&self.home).map_err(|error| describe(&error))?;
        let (words, id) = (decide::words(&self.machine.node, &record.shares), record.id.clone());
        let gpus = record.shares.iter().map(|share| share.gpu.to_string()).collect();
        let user = crate::users::name(record.who.uid);
        tracing::info!(share = %name, grant = %words, user = %user, "share granted");
        let live = self.managed(record, region)?;
        let live = Live {
            number: {
                state.given += 1;
                state.given
            },
            ..live
        };
        state.shares.insert(name.clone(), live);
        let places = Places {
            region: store::region(&self.home, &name),
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

    /// Creates the region of a share, for its owner's processes and no other user's.
    fn make_region(&self, record: &Record) -> Result<RegionHandle, String> {
        let cannot = |error: std::io::Error| format!("{}: {error}", self.home.share(&record.name).display());
        let region = store::make_region(&self.home, &record.name).map_err(cannot)?;
        let limits: Result<Vec<_>, String> =
            record.shares.iter().map(|share| self.machine.region_share(share, !share.whole)).collect();
        let handle = RegionHandle::create(&region, &limits?, RegionPolicy::default())
            .map_err(|error| error.to_string())?;
        store::open_to(&self.home, &record.name, record.who.uid).map_err(cannot)?;
        Ok(handle)
    }

    /// Gives turns to a share from now on.
    fn managed(&self, record: Record, handle: RegionHandle) -> Result<Live, String> {
        let handle = Arc::new(handle);
        let member = self.arbiter.add(Arc::clone(&handle)).map_err(|error| error.to_string())?;
        Ok(Live::new(record, LiveRegion::Managed { handle, member }))
    }

    /// Adopts the region of a share that runs, after a restart of the daemon.
    ///
    /// A region that cannot be adopted is left as it is and reported: processes of the share have it mapped, and the limits
    /// in it go on holding. What the share has stays counted; it cannot be resized and is not audited.
    pub(super) fn adopted(&self, record: Record) -> Result<Live, String> {
        let folder = store::region(&self.home, &record.name);
        let opened = RegionHandle::open_of_user(&folder, store::usage_owner(record.who.uid));
        let error = match opened.and_then(|handle| for_shares(handle, &record.shares)) {
            Ok(handle) => return self.managed(record, handle),
            // The files were removed. Processes that have them mapped go on with them, and new ones get these.
            Err(RegionError::Missing(_)) => match self.make_region(&record) {
                Ok(handle) => return self.managed(record, handle),
                Err(why) => why,
            },
            Err(error) => error.to_string(),
        };
        self.warn(&format!(
            "the region of share {} is not managed, and the share runs on with the limits that it has: {error}",
            record.name
        ));
        Ok(Live::new(record, LiveRegion::Unmanaged { why: error }))
    }

    /// Gives a share back.
    pub(super) fn release(self: &Arc<Self>, name: &str, number: u64) {
        let mut state = self.state();
        if state.shares.get(name).is_some_and(|live| live.number == number) {
            self.take_back(&mut state, &[name.to_string()]);
        }
    }

    /// Gives back what has ended and was not noticed yet: who runs one command after another must not find the first in the
    /// way of the second.
    pub(super) fn sweep(self: &Arc<Self>, state: &mut State) {
        let ended = state.shares.values().filter(|live| !live.record.main.lives());
        let gone = ended.filter(|live| live.record.has_members(&self.home).is_ok_and(|any| !any));
        let gone: Vec<String> = gone.map(|live| live.record.name.clone()).collect();
        if !gone.is_empty() {
            self.take_back(state, &gone);
        }
    }

    /// Takes shares out of the books, and gives what they had to those who wait: one never without the other.
    fn take_back(self: &Arc<Self>, state: &mut State, names: &[String]) {
        for name in names {
            let Some(live) = state.shares.remove(name) else { continue };
            if let LiveRegion::Managed { member, .. } = live.region {
                self.arbiter.remove(member);
            }
            self.forget(&live.record);
            tracing::info!(share = %name, "share ended");
        }
        self.after_change(state);
    }

    /// Removes what a share leaves.
    pub(super) fn forget(self: &Arc<Self>, record: &Record) {
        // Before the record: who follows a keeper that is killed here must know of it. The kernel may take a moment to see that
        // it is empty.
        if let Some(cgroup) = &record.cgroup
            && fs::remove_dir(cgroup.folder()).is_err()
        {
            self.remove_soon(cgroup.clone());
        }
        self.removed(&record.name);
    }

    pub(super) fn removed(&self, name: &str) {
        if let Err(error) = store::remove(&self.home, name) {
            tracing::warn!(share = name, %error, "cannot remove the share's files");
        }
    }

    /// After shares came, went or changed: turns are needed where somebody was promised time, and who waits may fit.
    pub(super) fn after_change(self: &Arc<Self>, state: &mut State) {
        self.settle(state);
        self.unclaim(state);
        let gated = shares::gated(state.shares.values().flat_map(|live| &live.record.shares));
        let mut changed = false;
        for live in state.shares.values() {
            let Some(region) = live.region() else { continue };
            let shares = live.record.shares.iter();
            let wanted: Result<Vec<_>, String> =
                shares.map(|share| self.machine.region_share(share, gated.contains(&share.gpu))).collect();
            let applied = wanted.and_then(|wanted| region.apply(&wanted).map_err(|error| error.to_string()));
            match applied {
                Ok(differs) => changed |= differs,
                Err(error) => {
                    tracing::warn!(share = %live.record.name, %error, "cannot change the share's limits");
                }
            }
        }
        if changed {
            self.arbiter.limits_changed();
        }
        self.changed.notify_all();
    }
}

/// The handle, if its region is for the GPUs of these shares.
fn for_shares(handle: RegionHandle, shares: &[Share]) -> Result<RegionHandle, RegionError> {
    let uuids: Vec<[u8; 16]> = shares.iter().filter_map(|share| uuid_bytes(&share.gpu)).collect();
    if handle.owner().is_for(uuids.iter()) {
        return Ok(handle);
    }
    Err(RegionError::OtherGpus(handle.owner().path().to_path_buf()))
}
