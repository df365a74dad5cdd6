//! The arbiter in its owner's process: regions come and go, each GPU's turns are dealt by a thread of its own.

use super::Anomalies;
use super::gpu_thread::{GpuThread, Hall};
use crate::error::RegionError;
use crate::owner::RegionOwner;
use crate::reader::UsageReader;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A region that a [`Arbiter`] deals turns to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemberId(u64);

/// Deals turns on all GPUs of a node to all regions it was given. It keeps nothing that a restart would lose: a new one
/// goes on from what each container has spent.
#[derive(Debug, Default)]
pub struct Arbiter {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    last: u64,
    tables: Vec<GpuThread>,
    halls: Vec<Known>,
}

#[derive(Debug)]
struct Known {
    member: u64,
    folder: PathBuf,
    hall: Arc<Hall>,
    /// GPUs of it that have a seat, in the order of its limits.
    seated: usize,
}

impl Known {
    fn has(&self, uuid: &[u8; 16]) -> bool {
        (0..self.seated).filter_map(|gpu| self.hall.owner.limits(gpu)).any(|limits| limits.uuid() == *uuid)
    }
}

impl Arbiter {
    /// A runner without regions; it has no thread until a GPU needs one.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Deals turns to the region in this folder from now on, on every GPU it has.
    pub fn add(&self, folder: &Path) -> Result<MemberId, RegionError> {
        let hall = Arc::new(Hall { owner: RegionOwner::open(folder)?, reader: UsageReader::open(folder)? });
        let mut state = self.state();
        state.last += 1;
        let member = state.last;
        state.halls.push(Known { member, folder: folder.to_path_buf(), hall, seated: 0 });
        let seated = state.seat(member);
        drop(state);
        seated.inspect_err(|_| self.remove(MemberId(member)))?;
        Ok(MemberId(member))
    }

    /// Sees whether the region got more GPUs since it was added.
    pub fn refresh(&self, member: MemberId) -> Result<(), RegionError> {
        self.state().seat(member.0)
    }

    /// Limits have changed: who has a gate now that had none is heard from here on, and not when somebody next looks.
    pub fn limits_changed(&self) {
        for table in &self.state().tables {
            table.call();
        }
    }

    /// Deals no more turns to it. Its gates are closed; its processes go on by their own account, or end.
    pub fn remove(&self, member: MemberId) {
        let mut state = self.state();
        state.halls.retain(|known| known.member != member.0);
        for table in &state.tables {
            table.leave(member.0);
        }
        let State { tables, halls, .. } = &mut *state;
        tables.retain(|table| halls.iter().any(|known| known.has(&table.uuid)));
    }

    /// What this region said that cannot be, on any GPU, as of the last beat.
    #[must_use]
    pub fn notes(&self, member: MemberId) -> Anomalies {
        self.state().tables.iter().map(|table| table.notes(member.0)).fold(
            Anomalies::default(),
            |sum, notes| Anomalies {
                backwards: sum.backwards.saturating_add(notes.backwards),
                leaps: sum.leaps.saturating_add(notes.leaps),
            },
        )
    }

    /// How many decisions were made so far.
    #[must_use]
    pub fn decisions(&self) -> u64 {
        self.state().tables.iter().map(GpuThread::decisions).sum()
    }

    /// Ends all threads, as dropping it does. Turns that are open stay open until their containers see that nobody beats.
    pub fn stop(self) {}
}

impl State {
    fn seat(&mut self, member: u64) -> Result<(), RegionError> {
        let Some(known) = self.halls.iter_mut().find(|known| known.member == member) else { return Ok(()) };
        let hall = Arc::clone(&known.hall);
        while let Some(limits) = hall.owner.limits(known.seated) {
            let uuid = limits.uuid();
            let at = match self.tables.iter().position(|table| table.uuid == uuid) {
                Some(at) => at,
                None => {
                    let table = GpuThread::start(uuid)
                        .map_err(|error| RegionError::unreadable("deal turns for", &known.folder, error))?;
                    self.tables.push(table);
                    self.tables.len() - 1
                }
            };
            if let Some(table) = self.tables.get(at) {
                table.join(member, &hall, &known.folder, known.seated)?;
            }
            known.seated += 1;
        }
        Ok(())
    }
}
