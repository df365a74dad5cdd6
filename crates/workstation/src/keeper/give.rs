//! Shares are made and taken back.

use super::{Keeper, State};
use crate::decide::{self, Held};
use crate::home::Home;
use crate::report::Stage;
use crate::store::{self, Record};
use crate::users::Who;
use crate::wire::{Granted, Places, RunRequest};
use partage_core::model::{Node, PodAsk};
use partage_enforce::error_chain::describe;
use partage_enforce::gpus::withhold_unhealthy;
use partage_enforce::refusal::{Refusal, RefusalReason};
use partage_host::process::Identity;
use partage_host::shares;
use partage_host::truth::Kept;
use partage_region::arbiter::MemberId;
use partage_region::{RegionOwner, RegionPolicy};
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
    pub(super) region: Arc<Kept>,
    member: MemberId,
}

impl Live {
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
        self.make_region(&record)?;
        let covers = self.machine.covers(&self.home, &name, &record.shares).map_err(cannot)?;
        record.write(&self.home).map_err(|error| describe(&error))?;
        let (words, id) = (decide::words(&self.machine.node, &record.shares), record.id.clone());
        let gpus = record.shares.iter().map(|share| share.gpu.to_string()).collect();
        self.log(&format!("{name}: {words} for user {}", crate::users::name(record.who.uid)));
        let live = self.live(record)?;
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
            stand_ins: self.home.stand_ins(),
            own_stand_ins: self.home.own_stand_ins().join(&name),
            driver: [self.machine.driver.cuda.clone(), self.machine.driver.nvml.clone()],
            driver_at: self.home.driver_files(),
            simulated: self.machine.driver.simulated.clone(),
            covers,
        };
        Ok(Granted { name, id, words, gpus, places })
    }

    /// The region of a share, for its owner's processes and nobody else's.
    fn make_region(&self, record: &Record) -> Result<RegionOwner, String> {
        let cannot = |error: std::io::Error| format!("{}: {error}", self.home.share(&record.name).display());
        let region = store::make_region(&self.home, &record.name).map_err(cannot)?;
        let limits: Result<Vec<_>, String> =
            record.shares.iter().map(|share| self.machine.region_share(share, !share.whole)).collect();
        let owner = RegionOwner::create(&region, &limits?, RegionPolicy::default())
            .map_err(|error| error.to_string())?;
        store::open_to(&self.home, &record.name, record.who.uid).map_err(cannot)?;
        Ok(owner)
    }

    /// A share whose region is there, kept from now on.
    pub(super) fn live(&self, record: Record) -> Result<Live, String> {
        let folder = store::region(&self.home, &record.name);
        let owner = match RegionOwner::open(&folder) {
            Ok(owner) => owner,
            // Somebody removed it. Processes that run keep the old one, new ones get this.
            Err(_) => self.make_region(&record)?,
        };
        let kept = Kept::of(owner, &folder).map_err(|error| error.to_string())?;
        let member = self.arbiter.add(&folder).map_err(|error| error.to_string())?;
        Ok(Live { record, number: 0, stopping: false, region: Arc::new(kept), member })
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
            self.arbiter.remove(live.member);
            self.forget(&live.record);
            self.log(&format!("{name} has ended"));
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
            self.log(&format!("warning: {name}: its files stay: {error}"));
        }
    }

    /// After shares came, went or changed: turns are needed where somebody was promised time, and who waits may fit.
    pub(super) fn after_change(self: &Arc<Self>, state: &mut State) {
        self.settle(state);
        self.unclaim(state);
        let gated = shares::gated(state.shares.values().flat_map(|live| &live.record.shares));
        let mut changed = false;
        for live in state.shares.values() {
            for (at, share) in live.record.shares.iter().enumerate() {
                let (Some(is), Ok(wanted)) = (
                    live.region.owner.share(at),
                    self.machine.region_share(share, gated.contains(&share.gpu)),
                ) else {
                    continue;
                };
                if is == wanted {
                    continue;
                }
                changed = true;
                if let Err(error) = live.region.owner.set(at, &wanted) {
                    self.log(&format!(
                        "warning: {}: its limits cannot be changed: {error}",
                        live.record.name
                    ));
                }
            }
        }
        if changed {
            self.arbiter.limits_changed();
        }
        self.changed.notify_all();
    }
}
