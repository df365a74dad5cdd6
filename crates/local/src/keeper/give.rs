//! A share's life: made, bound, changed, ended.

use super::{Keeper, State};
use crate::decide::{self, Held, Refused};
use crate::report::Stage;
use crate::store::{self, Bond, Record};
use crate::users::Who;
use crate::wire::{Change, Granted, Places, Refusal, RunRequest};
use partage_core::model::{GpuUuid, Node, PodAsk, Share};
use partage_host::binding::Binding;
use partage_host::cgroup::Cgroup;
use partage_host::members::{self, Mark};
use partage_host::process::{self, Identity};
use partage_region::arbiter::Member;
use partage_region::{Owner, Policy, UsageReader};
use std::collections::BTreeSet;
use std::fs;
use std::sync::Arc;
use std::time::Duration;

/// The longest name of a share.
const LONGEST_NAME: usize = 63;

/// A share that is there.
pub(super) struct Live {
    pub(super) record: Record,
    /// Which share of its name.
    pub(super) number: u64,
    pub(super) stopping: bool,
    pub(super) region: Arc<Kept>,
    member: Member,
}

/// The keeper's side of a region.
pub(super) struct Kept {
    pub(super) owner: Owner,
    pub(super) reader: UsageReader,
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
        held.collect()
    }

    fn is_taken(&self, name: &str) -> Option<&Who> {
        let waiting = self.queue.iter().find(|ticket| ticket.name == name).map(|ticket| &ticket.who);
        self.shares.get(name).map(|live| &live.record.who).or(waiting)
    }

    /// The name asked for, or one made of the command's.
    pub(super) fn name(&self, request: &RunRequest) -> Result<String, Refused> {
        let wrong = |message: String| Err(Refused::new(Refusal::Wrong, message));
        let Some(name) = &request.name else {
            let command = request.command.first().map_or("share", String::as_str);
            let base = command.rsplit('/').next().unwrap_or(command);
            let plain: String = base.chars().filter(|letter| is_plain(*letter)).take(40).collect();
            let plain = plain.trim_start_matches(['-', '.']);
            let plain = if plain.is_empty() { "share" } else { plain };
            let free =
                (1u64..).map(|number| format!("{plain}-{number}")).find(|name| self.is_taken(name).is_none());
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
        let truth = self.truth();
        for gpu in &mut node.gpus {
            let ill =
                truth.looks.iter().find(|look| look.uuid == gpu.uuid).and_then(|look| look.health.clone());
            gpu.withheld = gpu.withheld.take().or(ill);
        }
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
    ) -> Result<Granted, Refused> {
        // A process has one share. It asks again if the keeper was killed before it had its answer.
        let before: Vec<String> = state
            .shares
            .values()
            .filter(|live| live.record.main == main)
            .map(|live| live.record.name.clone())
            .collect();
        for name in before {
            self.drop_share(state, &name);
        }
        let node = self.node();
        let shares = decide::place(&node, &state.held(), &self.settings, who, ask)?;
        let record = Record {
            name: name.into(),
            who: who.clone(),
            shares,
            since: super::now(),
            main,
            command: command.to_vec(),
            bound: None,
            cgroup: None,
        };
        let made = self.make(state, record);
        let granted = made
            .inspect_err(|_| self.removed(name))
            .map_err(|why| Refused::new(Refusal::Broken, format!("the share cannot be made: {why}")))?;
        self.after_change(state);
        Ok(granted)
    }

    fn make(self: &Arc<Self>, state: &mut State, record: Record) -> Result<Granted, String> {
        let name = record.name.clone();
        let region = store::region(&self.home, &name);
        fs::create_dir_all(&region).map_err(|error| format!("{}: {error}", region.display()))?;
        let covers = self.machine.covers(&self.home, &name, &record.shares);
        let covers = covers.map_err(|error| format!("{}: {error}", self.home.share(&name).display()))?;
        let limits: Result<Vec<_>, String> =
            record.shares.iter().map(|share| self.machine.region_share(share, !share.whole)).collect();
        Owner::create(&region, &limits?, Policy::default()).map_err(|error| error.to_string())?;
        record.write(&self.home).map_err(|error| format!("{}: {error}", self.home.share(&name).display()))?;
        let words = decide::words(&self.machine.node, &record.shares);
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
            region,
            region_at: self.home.region_at(),
            stand_ins: self.home.stand_ins(),
            own_stand_ins: self.home.own_stand_ins().join(&name),
            driver: [self.machine.driver.cuda.clone(), self.machine.driver.nvml.clone()],
            driver_at: self.home.driver_files(),
            simulated: self.machine.driver.simulated.clone(),
            covers,
        };
        Ok(Granted { name, words, gpus, places })
    }

    /// A share whose region is there, kept from now on.
    pub(super) fn live(&self, record: Record) -> Result<Live, String> {
        let folder = store::region(&self.home, &record.name);
        let owner = match Owner::open(&folder) {
            Ok(owner) => owner,
            Err(_) => {
                // Somebody removed it. Processes that run keep the old one, new ones get this.
                fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
                let limits: Result<Vec<_>, String> = record
                    .shares
                    .iter()
                    .map(|share| self.machine.region_share(share, !share.whole))
                    .collect();
                Owner::create(&folder, &limits?, Policy::default()).map_err(|error| error.to_string())?
            }
        };
        let reader = UsageReader::open(&folder).map_err(|error| error.to_string())?;
        let member = self.arbiter.add(&folder).map_err(|error| error.to_string())?;
        Ok(Live { record, number: 0, stopping: false, region: Arc::new(Kept { owner, reader }), member })
    }

    /// A process says that it has bound itself.
    pub(super) fn bind(
        self: &Arc<Self>,
        name: &str,
        main: Identity,
        binding: Binding,
    ) -> Result<Vec<String>, String> {
        let mut notes = Vec::new();
        let state = self.state();
        let live =
            state.shares.get(name).filter(|live| live.record.main == main).ok_or("the share is gone")?;
        let (number, devices) = (live.number, self.machine.other_devices(&live.record.shares));
        let mark = live.record.mark(&self.home, binding);
        drop(state);
        match binding {
            Binding::LibraryPath => self.machine.install_for(&self.home, name)?,
            Binding::MountNamespace | Binding::UserNamespace => {
                if !mark.is_some_and(|mark| mark.is_on(main.pid)) {
                    return Err("it says that it sees its region, and does not".into());
                }
            }
        }
        let cgroup = match Cgroup::make(&self.home.cgroup(name), main.pid) {
            Ok(cgroup) => cgroup,
            Err(error) => {
                notes.push(format!("its processes are not held by a cgroup: {error}"));
                None
            }
        };
        let mut gate = false;
        if let Some(cgroup) = &cgroup
            && !devices.is_empty()
        {
            match cgroup.close_devices(&devices) {
                Ok(()) => gate = true,
                Err(error) => notes.push(format!("other GPUs' device files stay open: {error}")),
            }
        }
        let bond = Bond { binding, gate };
        self.note_bond(name, number, bond, cgroup.clone()).inspect_err(|_| {
            if let Some(cgroup) = &cgroup {
                // Its process is about to end, and then it is empty: the name is free again.
                let _ = cgroup.remove();
            }
        })?;
        self.call_successor();
        Ok(notes)
    }

    /// Writes down how a share is bound, and has its cgroup take the process: from here on a keeper that follows knows it.
    fn note_bond(&self, name: &str, number: u64, bond: Bond, cgroup: Option<Cgroup>) -> Result<(), String> {
        let mut state = self.state();
        let live =
            state.shares.get_mut(name).filter(|live| live.number == number).ok_or("the share is gone")?;
        live.record.bound = Some(bond);
        live.record.cgroup = cgroup;
        if let Some(cgroup) = &live.record.cgroup {
            cgroup.take(live.record.main.pid).map_err(|error| error.to_string())?;
        }
        live.record.write(&self.home).map_err(|error| format!("{}: {error}", self.home.share(name).display()))
    }

    /// Gives a share back.
    pub(super) fn release(self: &Arc<Self>, name: &str, number: u64) {
        let mut state = self.state();
        if state.shares.get(name).is_some_and(|live| live.number == number) {
            self.drop_share(&mut state, name);
            self.after_change(&mut state);
        }
    }

    /// Gives back what has ended and was not noticed yet: who runs one command after another must not find the first in the
    /// way of the second.
    pub(super) fn sweep(&self, state: &mut State) {
        let ended = state.shares.values().filter(|live| !live.record.main.lives());
        let gone = ended.filter(|live| {
            let marks = live.record.marks(&self.home);
            marks.is_empty() || members::members(&marks).is_ok_and(|members| members.is_empty())
        });
        let gone: Vec<String> = gone.map(|live| live.record.name.clone()).collect();
        for name in gone {
            self.drop_share(state, &name);
        }
    }

    fn drop_share(&self, state: &mut State, name: &str) {
        let Some(live) = state.shares.remove(name) else { return };
        self.arbiter.remove(live.member);
        self.forget(&live.record);
        self.log(&format!("{name} has ended"));
    }

    /// Removes what a share leaves.
    pub(super) fn forget(&self, record: &Record) {
        if let Some(cgroup) = &record.cgroup
            && let Err(error) = cgroup.remove()
        {
            self.log(&format!("warning: {}: its cgroup stays: {error}", record.name));
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
        let promised = |share: &Share| share.cores.is_some() && !share.whole;
        let gated: BTreeSet<GpuUuid> = state
            .shares
            .values()
            .flat_map(|live| &live.record.shares)
            .filter(|share| promised(share))
            .map(|share| share.gpu.clone())
            .collect();
        for live in state.shares.values() {
            for (at, share) in live.record.shares.iter().enumerate() {
                let (Some(is), Ok(wanted)) = (
                    live.region.owner.share(at),
                    self.machine.region_share(share, gated.contains(&share.gpu)),
                ) else {
                    continue;
                };
                if is != wanted
                    && let Err(error) = live.region.owner.set(at, &wanted)
                {
                    self.log(&format!(
                        "warning: {}: its limits cannot be changed: {error}",
                        live.record.name
                    ));
                }
            }
        }
        self.changed.notify_all();
    }

    /// Other amounts for a share that runs.
    pub(super) fn resize(self: &Arc<Self>, who: &Who, name: &str, change: &Change) -> Result<(), Refused> {
        let node = self.node();
        let mut state = self.state();
        self.find(&state, who, name)?;
        let shares = decide::resize(&node, &state.held(), &self.settings, name, change)?;
        let Some(live) = state.shares.get_mut(name) else { return Err(unknown(&state, name)) };
        let before = std::mem::replace(&mut live.record.shares, shares);
        let undone = self.fits_what_is_used(live, &before).and_then(|()| {
            live.record.write(&self.home).map_err(|error| {
                Refused::new(Refusal::Broken, format!("{}: {error}", self.home.share(name).display()))
            })
        });
        if undone.is_err() {
            live.record.shares = before;
        }
        self.after_change(&mut state);
        if undone.is_ok()
            && let Some(live) = state.shares.get(name)
        {
            self.log(&format!("{name} is now {}", decide::words(&self.machine.node, &live.record.shares)));
        }
        undone
    }

    /// Sets the new limits, and takes them back where more is in use: asked the other way round, a process could take memory
    /// between the question and the answer.
    fn fits_what_is_used(&self, live: &Live, before: &[Share]) -> Result<(), Refused> {
        let broken = |error: String| Refused::new(Refusal::Broken, error);
        let write = |shares: &[Share]| -> Result<(), Refused> {
            for (at, share) in shares.iter().enumerate() {
                let gated = live.region.owner.share(at).is_some_and(|is| is.gated);
                let share = self.machine.region_share(share, gated).map_err(broken)?;
                live.region.owner.set(at, &share).map_err(|error| broken(error.to_string()))?;
            }
            Ok(())
        };
        write(&live.record.shares)?;
        let usage = live.region.reader.snapshot().map_err(|error| broken(error.to_string()))?;
        for (share, used) in live.record.shares.iter().zip(usage.gpus) {
            let Some(limit) = share.memory_bytes.filter(|limit| used.used > limit.0) else { continue };
            write(before)?;
            let used = partage_core::model::Bytes(used.used);
            let mut refused = Refused::new(
                Refusal::Full,
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
    ) -> Result<members::Ended, Refused> {
        let mut state = self.state();
        self.find(&state, who, name)?;
        let Some(live) = state.shares.get_mut(name) else { return Err(unknown(&state, name)) };
        live.stopping = true;
        let (number, record) = (live.number, live.record.clone());
        drop(state);
        let marks = record.marks(&self.home);
        // A variable can be set by anybody: only the owner's own are meant. What a cgroup or a namespace holds is the share's.
        let by_variable = marks.iter().all(|mark| matches!(mark, Mark::Variable { .. }));
        let may = |process: &Identity| {
            !by_variable || process::owner(process.pid).is_ok_and(|uid| uid == record.who.uid)
        };
        let ended = if marks.is_empty() {
            // It has not started: its process is ours to end all the same.
            record.main.signal(rustix::process::Signal::KILL).map(|()| members::Ended { ended: 0, killed: 1 })
        } else {
            members::end(&marks, &may, grace)
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
                Err(Refused::new(Refusal::Broken, format!("{name} cannot be stopped: {error}")))
            }
        }
    }

    /// A share that somebody may change.
    fn find(&self, state: &State, who: &Who, name: &str) -> Result<(), Refused> {
        let Some(live) = state.shares.get(name) else { return Err(unknown(state, name)) };
        if live.record.who.uid != who.uid && !who.is_keeper() {
            let owner = crate::users::name(live.record.who.uid);
            let message =
                format!("{name} belongs to user {owner}: only they and the administrator may change it");
            return Err(Refused::new(Refusal::NotYours, message));
        }
        Ok(())
    }
}

fn unknown(state: &State, name: &str) -> Refused {
    let names: Vec<&str> = state.shares.keys().map(String::as_str).collect();
    let there = match names.as_slice() {
        [] => "there is none at all".to_string(),
        names => format!("there are {}", names.join(", ")),
    };
    Refused::new(Refusal::Unknown, format!("no share is called {name}: {there}"))
}
