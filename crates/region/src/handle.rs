//! The daemon's handle on one region: its limits and its usage, opened once and shared by all users in the process.

use crate::USAGE_FILE;
use crate::error::RegionError;
use crate::layout::{GpuLimits, UsageFile};
use crate::liveness_lock;
use crate::mmap::{self, MappedFile};
use crate::owner::{GpuShare, RegionOwner, RegionPolicy, effective_user};
use crate::reader::{UsageReader, UsageSnapshot};
use std::path::Path;

/// Handle on the limits and usage of one container.
///
/// It has one file open (`usage`) and two files mapped. The arbiter, the bypass audit, reports and resizes share it.
#[derive(Debug)]
pub struct RegionHandle {
    owner: RegionOwner,
    reader: UsageReader,
    /// Only passed to the kernel as addresses of doorbells. The container may truncate the file, and a read here would
    /// then kill the daemon with SIGBUS.
    doorbells: MappedFile<UsageFile>,
}

impl RegionHandle {
    /// Creates a region: see [`RegionOwner::create`].
    pub fn create(folder: &Path, shares: &[GpuShare], policy: RegionPolicy) -> Result<Self, RegionError> {
        Self::with_reader(RegionOwner::create(folder, shares, policy)?, UsageReader::open(folder)?)
    }

    /// Opens a region whose two files belong to the calling user.
    pub fn open(folder: &Path) -> Result<Self, RegionError> {
        Self::open_of_user(folder, effective_user())
    }

    /// Opens a region whose `usage` belongs to `user`, the only user that may write it.
    ///
    /// `limits`, which only the daemon writes, decides whether the layout is supported. The contents of `usage` decide
    /// nothing: see [`crate::Forgery`].
    pub fn open_of_user(folder: &Path, user: u32) -> Result<Self, RegionError> {
        let owner = RegionOwner::open(folder)?;
        let reader = UsageReader::open_managed(folder, user, owner.usage_size())?;
        Self::with_reader(owner, reader)
    }

    fn with_reader(owner: RegionOwner, reader: UsageReader) -> Result<Self, RegionError> {
        let doorbells = MappedFile::new(reader.file(), reader.path(), false)?;
        Ok(Self { owner, reader, doorbells })
    }

    /// Opens a region that may be in use, and sets its limits to `shares`. `usage` must belong to `user`.
    ///
    /// Nothing is changed unless the region is intact, of a supported layout, and for these GPUs: see
    /// [`RegionOwner::is_for`]. On an error, a running container keeps its limits.
    pub fn adopt(folder: &Path, shares: &[GpuShare], user: u32) -> Result<Self, RegionError> {
        let handle = Self::open_of_user(folder, user)?;
        if !handle.owner.is_for(shares.iter().map(|share| &share.uuid)) {
            return Err(RegionError::OtherGpus(handle.owner.path().to_path_buf()));
        }
        handle.apply(shares)?;
        handle.owner.announce_gpus();
        Ok(handle)
    }

    /// Returns the writer of the container's limits.
    #[must_use]
    pub fn owner(&self) -> &RegionOwner {
        &self.owner
    }

    /// Returns the reader of the container's usage.
    #[must_use]
    pub fn reader(&self) -> &UsageReader {
        &self.reader
    }

    /// Reads the usage of all GPUs and processes, with [`GpuUsage::spent`](crate::GpuUsage::spent) as the whole GPU time:
    /// what the container accounted for itself, and what the daemon charged.
    pub fn snapshot(&self) -> Result<UsageSnapshot, RegionError> {
        let mut snapshot = self.reader.snapshot()?;
        for (gpu, usage) in snapshot.gpus.iter_mut().enumerate() {
            usage.spent = usage.spent.saturating_add(self.charged(gpu));
        }
        Ok(snapshot)
    }

    /// Returns the nanoseconds of a GPU that the daemon charged in total; zero in layouts in which it charges nothing.
    #[must_use]
    pub fn charged(&self, gpu: usize) -> u64 {
        let limits = self.owner.limits(gpu).filter(|_| self.owner.has_markers());
        limits.map_or(0, GpuLimits::charged)
    }

    /// Adds GPU time that the driver reports, and that was not charged because the container is not gated.
    pub fn add_observed_time(&self, gpu: usize, nanoseconds: u64) {
        if let Some(turns) = self.owner.turns(gpu).filter(|_| self.owner.has_markers()) {
            turns.charge(nanoseconds);
        }
    }

    /// Sets the limits of the region's GPUs in order, and attaches GPUs that it does not have yet. Returns whether
    /// anything changed. GPUs beyond the last of these shares stay as they are.
    pub fn apply(&self, shares: &[GpuShare]) -> Result<bool, RegionError> {
        let mut changed = false;
        for (gpu, share) in shares.iter().enumerate() {
            changed |= if gpu < self.owner.gpus() {
                self.owner.set(gpu, share)?
            } else {
                self.owner.extend(share)?;
                true
            };
        }
        Ok(changed)
    }

    /// Returns the address of a GPU's doorbell, for the kernel to wait on. It must not be read.
    pub(crate) fn doorbell_address(&self, gpu: usize) -> *const u32 {
        self.doorbells.accounts.get(gpu).map_or(std::ptr::null(), |account| account.time.doorbell.as_ptr())
    }
}

/// Verifies both files of the region in a directory. Returns the version of its layout.
pub fn inspect(folder: &Path) -> Result<u32, RegionError> {
    let layout = RegionOwner::open(folder)?.layout();
    UsageReader::open(folder)?;
    Ok(layout)
}

/// Returns whether a process still uses the region in a directory, whatever its layout: every process that has it
/// mapped holds a kernel lock on `usage`. Without a regular file `usage` it is not in use.
#[must_use]
pub fn is_in_use(folder: &Path) -> bool {
    mmap::open(&folder.join(USAGE_FILE), false).is_ok_and(|file| liveness_lock::is_any_held(&file))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::owner::TurnGate;

    fn region(folder: &Path, waits_for_turns: bool) -> RegionHandle {
        let share = GpuShare { uuid: [1; 16], waits_for_turns, ..GpuShare::default() };
        RegionHandle::create(folder, &[share], RegionPolicy::default()).unwrap()
    }

    #[test]
    fn snapshot_contains_what_the_daemon_charged() {
        let folder = tempfile::tempdir().unwrap();
        let region = region(folder.path(), true);
        region.owner().turns(0).unwrap().charge(500);
        region.add_observed_time(0, 30);
        region.add_observed_time(7, 30);
        let snapshot = region.snapshot().unwrap();
        assert_eq!((snapshot.gpus[0].spent, snapshot.gpus[1].spent), (530, 0));
        assert_eq!(
            region.reader().snapshot().unwrap().gpus[0].spent,
            0,
            "it is not the container's own account"
        );
        assert_eq!(RegionHandle::open(folder.path()).unwrap().charged(0), 530, "it survives the daemon");
    }

    #[test]
    fn every_change_of_the_gate_is_counted() {
        let folder = tempfile::tempdir().unwrap();
        let region = region(folder.path(), true);
        let gate = || region.owner().gate(0).unwrap();
        assert_eq!(gate(), TurnGate { is_gated: true, changes: 0 }, "until the turn scheduler decides");
        let turns = region.owner().turns(0).unwrap();
        turns.set_gated(true);
        assert_eq!(gate().changes, 0);
        turns.set_gated(false);
        assert_eq!(gate(), TurnGate { is_gated: false, changes: 1 });
        turns.set_gated(true);
        assert_eq!(gate(), TurnGate { is_gated: true, changes: 2 }, "between two readings, too");
        let share = region.owner().share(0).unwrap();
        region.owner().set(0, &GpuShare { waits_for_turns: false, ..share }).unwrap();
        assert_eq!(gate(), TurnGate { is_gated: false, changes: 3 });
        assert_eq!(region.owner().gate(1), None);
    }
}
