//! The arbiter in the daemon's process: regions are added and removed, and one thread gives turns.

use super::scheduler_thread::SchedulerThread;
use crate::error::RegionError;
use crate::handle::RegionHandle;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Identifies a region that was added to an [`Arbiter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemberId(u64);

/// Gives turns on all GPUs of a node to all regions that were added.
///
/// Regions of layouts without markers get no turns and no heartbeat: their containers limit their own rate. A restart
/// loses credit and debt of less than a second.
#[derive(Debug, Default)]
pub struct Arbiter {
    state: Mutex<ArbiterState>,
}

#[derive(Debug, Default)]
struct ArbiterState {
    last: u64,
    thread: Option<SchedulerThread>,
    members: Vec<ArbiterMember>,
}

#[derive(Debug)]
struct ArbiterMember {
    id: u64,
    region: Arc<RegionHandle>,
    /// Number of its GPUs, in the order of its limits, that have joined the thread.
    joined: usize,
}

impl Arbiter {
    /// Returns an arbiter without regions. It starts its thread when the first region is added.
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

    /// Applies changed limits at once.
    pub fn limits_changed(&self) {
        if let Some(thread) = &self.state().thread {
            thread.wake();
        }
    }

    /// Charges a region for time that it used on a GPU without accounting for it, as the driver found: its next turns are
    /// later or shorter. Has no effect on a region without turns on that GPU.
    pub fn charge(&self, member: MemberId, gpu: [u8; 16], nanoseconds: u64) {
        if let Some(thread) = &self.state().thread {
            thread.charge(member.0, gpu, nanoseconds);
        }
    }

    /// Stops giving turns to a region and closes its open turns. Its processes then limit their own rate.
    pub fn remove(&self, member: MemberId) {
        let mut state = self.state();
        state.members.retain(|known| known.id != member.0);
        if let Some(thread) = &state.thread {
            thread.leave(member.0);
        }
        if state.members.is_empty() {
            state.thread = None;
        }
    }

    /// Returns the number of decisions so far.
    #[must_use]
    pub fn decisions(&self) -> u64 {
        self.state().thread.as_ref().map_or(0, SchedulerThread::decisions)
    }

    /// Stops the thread, as dropping the arbiter does. Open turns stay open until their containers notice that the
    /// heartbeat has stopped.
    pub fn stop(self) {}
}

impl ArbiterState {
    fn join(&mut self, member: u64) -> Result<(), RegionError> {
        let Some(known) = self.members.iter_mut().find(|known| known.id == member) else { return Ok(()) };
        if !known.region.owner().has_markers() {
            return Ok(());
        }
        let thread = match &self.thread {
            Some(thread) => thread,
            None => {
                let started = SchedulerThread::start().map_err(|error| {
                    RegionError::io("start the turn scheduler for", known.region.owner().path(), error)
                })?;
                self.thread.insert(started)
            }
        };
        while known.joined < known.region.owner().gpus() {
            thread.join(member, &known.region, known.joined);
            known.joined += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::owner::{GpuShare, RegionPolicy};
    use std::time::{Duration, Instant};

    #[test]
    fn charge_is_booked_on_the_gpu_that_it_names() {
        let folder = tempfile::tempdir().unwrap();
        let share =
            |uuid| GpuShare { uuid: [uuid; 16], cores: 1_000, waits_for_turns: true, ..GpuShare::default() };
        let region = RegionHandle::create(folder.path(), &[share(1), share(2)], RegionPolicy::default());
        let (region, arbiter) = (Arc::new(region.unwrap()), Arbiter::new());
        let member = arbiter.add(Arc::clone(&region)).unwrap();
        arbiter.charge(member, [2; 16], 700);
        arbiter.charge(member, [3; 16], 50);
        arbiter.charge(MemberId(77), [2; 16], 50);
        let begin = Instant::now();
        while region.charged(1) == 0 && begin.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!((region.charged(0), region.charged(1)), (0, 700));
    }
}
