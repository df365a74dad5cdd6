//! The arbiter in the daemon's process: regions come and go, and a thread per GPU gives turns.

use super::Anomalies;
use super::gpu_thread::GpuThread;
use crate::error::RegionError;
use crate::handle::RegionHandle;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A region that an [`Arbiter`] gives turns to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemberId(u64);

/// Gives turns on all GPUs of a node to all regions that were added. It keeps nothing that a restart would lose: a new
/// one goes on from what each container has spent.
#[derive(Debug, Default)]
pub struct Arbiter {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    last: u64,
    threads: Vec<GpuThread>,
    members: Vec<Member>,
}

#[derive(Debug)]
struct Member {
    id: u64,
    region: Arc<RegionHandle>,
    /// How many of its GPUs, in the order of its limits, have joined their GPU's thread.
    joined: usize,
}

impl Member {
    fn has(&self, uuid: &[u8; 16]) -> bool {
        let joined = (0..self.joined).filter_map(|gpu| self.region.owner().limits(gpu));
        joined.into_iter().any(|limits| limits.uuid() == *uuid)
    }
}

impl Arbiter {
    /// Returns an arbiter without regions. It has no thread until a GPU needs one.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives turns to a region from now on, on every GPU that it has.
    pub fn add(&self, region: Arc<RegionHandle>) -> Result<MemberId, RegionError> {
        let mut state = self.state();
        state.last += 1;
        let id = state.last;
        state.members.push(Member { id, region, joined: 0 });
        let joined = state.join(id);
        drop(state);
        joined.inspect_err(|_| self.remove(MemberId(id)))?;
        Ok(MemberId(id))
    }

    /// Gives turns on the GPUs that were attached to the region since it was added.
    pub fn refresh(&self, member: MemberId) -> Result<(), RegionError> {
        self.state().join(member.0)
    }

    /// Has limits that changed take effect at once: a container whose launches wait for turns from now on is waited for.
    pub fn limits_changed(&self) {
        for thread in &self.state().threads {
            thread.wake();
        }
    }

    /// Gives no more turns to a region. Its turns are closed; its processes limit their rate themselves, or end.
    pub fn remove(&self, member: MemberId) {
        let mut state = self.state();
        state.members.retain(|known| known.id != member.0);
        for thread in &state.threads {
            thread.leave(member.0);
        }
        let State { threads, members, .. } = &mut *state;
        threads.retain(|thread| members.iter().any(|known| known.has(&thread.uuid)));
    }

    /// Returns what this region's container reported that cannot be true, on any GPU, as of the last heartbeat.
    #[must_use]
    pub fn anomalies(&self, member: MemberId) -> Anomalies {
        let state = self.state();
        let all = state.threads.iter().map(|thread| thread.anomalies(member.0));
        all.fold(Anomalies::default(), |sum, one| Anomalies {
            backwards: sum.backwards.saturating_add(one.backwards),
            leaps: sum.leaps.saturating_add(one.leaps),
        })
    }

    /// Counts the decisions of all GPUs so far.
    #[must_use]
    pub fn decisions(&self) -> u64 {
        self.state().threads.iter().map(GpuThread::decisions).sum()
    }

    /// Ends all threads, as dropping it does. Turns that are open stay open until their containers notice that no
    /// heartbeat comes.
    pub fn stop(self) {}
}

impl State {
    fn join(&mut self, member: u64) -> Result<(), RegionError> {
        let Some(known) = self.members.iter_mut().find(|known| known.id == member) else { return Ok(()) };
        let region = Arc::clone(&known.region);
        while let Some(limits) = region.owner().limits(known.joined) {
            let uuid = limits.uuid();
            let at = match self.threads.iter().position(|thread| thread.uuid == uuid) {
                Some(at) => at,
                None => {
                    let thread = GpuThread::start(uuid).map_err(|error| {
                        RegionError::io("start the turn scheduler for", region.owner().path(), error)
                    })?;
                    self.threads.push(thread);
                    self.threads.len() - 1
                }
            };
            if let Some(thread) = self.threads.get(at) {
                thread.join(member, &region, known.joined);
            }
            known.joined += 1;
        }
        Ok(())
    }
}
