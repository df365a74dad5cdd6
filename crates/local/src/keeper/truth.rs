//! What the driver says, beside what the shares say of themselves.

use super::Keeper;
use super::give::Kept;
use crate::home::Home;
use crate::store::Record;
use partage_host::gpus::{Look, uuid_bytes};
use partage_host::members::{Census, Mark};
use partage_region::Snapshot;
use partage_region::audit::{self, Audit, Container, Finding, Granted, Kind, Round, Seen};
use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

/// How often the driver is asked.
const BEAT: Duration = Duration::from_secs(1);

/// What was last seen.
#[derive(Default)]
pub(super) struct Truth {
    pub(super) looks: Vec<Look>,
    /// Processes on each GPU that belong to no share.
    pub(super) strangers: Vec<Vec<u32>>,
    /// What looks like a way around limits, by share.
    pub(super) suspicions: BTreeMap<String, Vec<String>>,
    audit: Audit,
    /// What shares said at the last look.
    before: BTreeMap<String, Snapshot>,
}

impl Keeper {
    pub(super) fn truth(&self) -> MutexGuard<'_, Truth> {
        self.truth.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn look_again_and_again(self: &Arc<Self>) {
        loop {
            std::thread::sleep(BEAT);
            let state = self.state();
            let needed = self.options.foreground || !state.shares.is_empty() || !state.queue.is_empty();
            let (ending, kept) = (state.ending, !state.shares.is_empty());
            drop(state);
            if ending {
                return;
            }
            if kept {
                // Shares that were taken up have nobody yet, and the one who waited may have been killed.
                self.call_successor();
            }
            if needed && self.look() {
                // A GPU fell ill or got well.
                let mut state = self.state();
                self.after_change(&mut state);
            }
        }
    }

    /// Asks the driver and compares; whether a GPU's health changed.
    pub(super) fn look(self: &Arc<Self>) -> bool {
        let shares: Vec<(Record, Arc<Kept>)> = {
            let state = self.state();
            state.shares.values().map(|live| (live.record.clone(), Arc::clone(&live.region))).collect()
        };
        let said = |kept: &Kept| kept.reader.snapshot().ok();
        let earlier: BTreeMap<String, Snapshot> =
            shares.iter().filter_map(|(record, kept)| Some((record.name.clone(), said(kept)?))).collect();
        let looks = self.machine.gpus.look();
        let later: BTreeMap<String, Snapshot> =
            shares.iter().filter_map(|(record, kept)| Some((record.name.clone(), said(kept)?))).collect();
        let owners = Owners::of(&shares, &self.home);
        let owner = |pid: u32| owners.find(pid).map(str::to_string);
        let mut strangers = Vec::new();
        let mut gpus = Vec::new();
        for look in &looks {
            let seen: Vec<Seen> = look
                .processes
                .iter()
                .map(|process| Seen {
                    pid: process.pid,
                    memory: process.memory.map_or(0, |memory| memory.0),
                    busy: process.busy.unwrap_or(0),
                    container: owner(process.pid),
                })
                .collect();
            // One that ended meanwhile is nobody's, and no stranger.
            let alone = seen.iter().filter(|seen| seen.container.is_none() && is_there(seen.pid));
            strangers.push(alone.map(|seen| seen.pid).collect());
            if let Some(uuid) = uuid_bytes(&look.uuid) {
                gpus.push(audit::Gpu { uuid, processes: seen });
            }
        }
        let mut truth = self.truth();
        let containers = shares.iter().filter_map(|(record, kept)| {
            let after = later.get(&record.name)?.clone();
            let before = earlier.get(&record.name).or_else(|| truth.before.get(&record.name))?.clone();
            Some(Container { id: record.name.clone(), granted: granted(record, kept), before, after })
        });
        let round = Round { now: partage_region::clock::exact(), gpus, containers: containers.collect() };
        let findings = truth.audit.look(&round);
        let suspicions = self.words(findings);
        for (name, words) in &suspicions {
            for word in
                words.iter().filter(|word| !truth.suspicions.get(name).is_some_and(|was| was.contains(word)))
            {
                self.log(&format!("warning: {name}: {word}"));
            }
        }
        let mut ill = false;
        for look in &looks {
            let was =
                truth.looks.iter().find(|was| was.uuid == look.uuid).and_then(|was| was.health.as_ref());
            if was != look.health.as_ref() {
                ill = true;
                let at = self.machine.node.gpu_index(&look.uuid).unwrap_or_default();
                let how = look.health.as_deref().unwrap_or("is well again");
                self.log(&format!("GPU {at}: {how}"));
            }
        }
        truth.before = later;
        truth.suspicions = suspicions;
        truth.strangers = strangers;
        truth.looks = looks;
        ill
    }

    fn words(&self, findings: Vec<Finding>) -> BTreeMap<String, Vec<String>> {
        let mut words: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for finding in findings {
            let gpus = &self.machine.node.gpus;
            let at =
                gpus.iter().position(|gpu| uuid_bytes(&gpu.uuid) == Some(finding.gpu)).unwrap_or_default();
            let who = finding.pid.map_or_else(|| "its processes".into(), |pid| format!("process {pid}"));
            let bytes = partage_core::model::Bytes(finding.amount);
            let word = match finding.kind {
                Kind::ForgedUsage => format!("{who} wrote over its account of GPU {at}"),
                Kind::UnaccountedMemory => format!("{who} holds {bytes} on GPU {at} that it did not ask for"),
                Kind::OverLimit => format!("{who} hold {bytes} more on GPU {at} than the limit"),
                Kind::UnaccountedWork => format!("{who} works on GPU {at} outside its turns"),
                Kind::Stranger => format!("{who} uses GPU {at}, which is not the share's"),
            };
            words.entry(finding.container).or_default().push(word);
        }
        words
    }
}

fn granted(record: &Record, kept: &Kept) -> Vec<Granted> {
    let shares = (0..record.shares.len()).filter_map(|gpu| kept.owner.share(gpu));
    shares
        .map(|share| Granted {
            uuid: share.uuid,
            memory: share.memory,
            context: share.context,
            gated: share.gated,
        })
        .collect()
}

/// What the processes of a share are found by. A cgroup has them all, and says so at once.
pub(super) fn marks(record: &Record, home: &Home) -> Vec<Mark> {
    match &record.cgroup {
        Some(cgroup) => vec![Mark::Cgroup(cgroup.clone())],
        None => record.marks(home),
    }
}

/// Whose a process is.
struct Owners<'a> {
    names: Vec<&'a str>,
    /// The first process of each share, which has no marks in the beginning.
    main: BTreeMap<u32, &'a str>,
    census: Census,
}

impl Owners<'_> {
    fn of<'a>(shares: &'a [(Record, Arc<Kept>)], home: &Home) -> Owners<'a> {
        let names: Vec<&str> = shares.iter().map(|(record, _)| record.name.as_str()).collect();
        let main = shares.iter().zip(&names).map(|((record, _), name)| (record.main.pid, *name)).collect();
        let marks: Vec<Vec<Mark>> = shares.iter().map(|(record, _)| marks(record, home)).collect();
        // Who cannot be found out belongs to nobody for now; the next look asks again.
        Owners { names, main, census: Census::of(&marks).unwrap_or_default() }
    }

    fn find(&self, pid: u32) -> Option<&str> {
        let counted = || self.census.owner(pid).and_then(|at| self.names.get(at));
        self.main.get(&pid).or_else(counted).copied()
    }
}

fn is_there(pid: u32) -> bool {
    std::path::Path::new("/proc").join(pid.to_string()).exists()
}
