//! The arbiter in the daemon's process: regions are added and removed, and one thread per GPU gives turns.

use super::Anomalies;
use super::gpu_thread::GpuThread;
use crate::error::RegionError;
use crate::handle::RegionHandle;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Identifies a region that was added to an [`Arbiter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemberId(u64);

/// Gives turns on all GPUs of a node to all regions that were added. A restart loses nothing: a new arbiter continues
/// from the time that each container has spent.
#[derive(Debug, Default)]
pub struct Arbiter {
    state: Mutex<ArbiterState>,
}

#[derive(Debug, Default)]
struct ArbiterState {
    last: u64,
    threads: Vec<GpuThread>,
    members: Vec<ArbiterMember>,
}

#[derive(Debug)]
struct ArbiterMember {
    id: u64,
    region: Arc<RegionHandle>,
    /// Number of its GPUs, in the order of its limits, that have joined their GPU's thread.
    joined: usize,
}

impl ArbiterMember {
    fn has(&self, uuid: &[u8; 16]) -> bool {
        let joined = (0..self.joined).filter_map(|gpu| self.region.owner().limits(gpu));
        joined.into_iter().any(|limits| limits.uuid() == *uuid)
    }
}

impl Arbiter {
    /// Returns an arbiter without regions. It starts a thread when a region's GPU first needs one.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, ArbiterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives turns to a region from now on, on every GPU that it has.
    pub fn add(&self, region: Arc<RegionHandle>) -> Result<MemberId, RegionError> {
        let mut state = self.state();
        state.last += 1;
        let id = state.last;
        state.members.push(ArbiterMember { id, region, joined: 0 });
        let joined = state.join(id);
        drop(state);
        joined.inspect_err(|_| self.remove(MemberId(id)))?;
        Ok(MemberId(id))
    }

    /// Gives turns on the GPUs that were attached to the region since it was added.
    pub fn refresh(&self, member: MemberId) -> Result<(), RegionError> {
        self.state().join(member.0)
    }

    /// Applies changed limits at once: the threads begin to wait for containers whose launches are throttled from now
    /// on.
    pub fn limits_changed(&self) {
        for thread in &self.state().threads {
            thread.wake();
        }
    }

    /// Stops giving turns to a region and closes its open turns. Its processes then limit their own rate.
    pub fn remove(&self, member: MemberId) {
        let mut state = self.state();
        state.members.retain(|known| known.id != member.0);
        for thread in &state.threads {
            thread.leave(member.0);
        }
        let ArbiterState { threads, members, .. } = &mut *state;
        threads.retain(|thread| members.iter().any(|known| known.has(&thread.uuid)));
    }

    /// Returns how often this region's container reported values that cannot be true, on any GPU, as of the last
    /// heartbeat.
    #[must_use]
    pub fn anomalies(&self, member: MemberId) -> Anomalies {
        let state = self.state();
        let all = state.threads.iter().map(|thread| thread.anomalies(member.0));
        all.fold(Anomalies::default(), |sum, one| Anomalies {
            backwards: sum.backwards.saturating_add(one.backwards),
            leaps: sum.leaps.saturating_add(one.leaps),
        })
    }

    /// Returns the number of decisions of all GPUs so far.
    #[must_use]
    pub fn decisions(&self) -> u64 {
        self.state().threads.iter().map(GpuThread::decisions).sum()
    }

    /// Stops all threads, as dropping the arbiter does. Open turns stay open until their containers notice that the
    /// heartbeat has stopped.
    pub fn stop(self) {}
}

impl ArbiterState {
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
