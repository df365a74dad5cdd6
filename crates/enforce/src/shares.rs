//! Shares: prepares, adopts, resizes, extends and releases the regions of tenants, and sets which of them wait for
//! turns.
//!
//! A tenant is a container or a workstation share; a front end identifies it by a key of its own. The engine decides
//! neither what a tenant gets nor where its region is: both are arguments. One arbiter gives turns to all managed
//! regions.
//!
//! ```text
//!              ┌── prepare ──▶ managed ── resize, extend, apply_turns ──▶ managed ── release ──▶ (files stay)
//!  no entry ───┤                  ▲
//!              └── adopt ─────────┴──▶ unmanaged: the files are not changed, and the limits in them stay in force
//! ```

mod limits;
#[cfg(test)]
mod tests;

pub use limits::{InvalidGpu, region_limits, throttled_gpus};

use crate::context_sizes::ContextSizes;
use crate::error_chain::describe;
use crate::monitor::{AuditedShare, UnaccountedTime};
use partage_core::model::{Bytes, GpuUuid, Share, TurnPreferences};
use partage_host::gpus::uuid_bytes;
use partage_region::arbiter::{Arbiter, MemberId};
use partage_region::protocol::LAYOUT_VERSION;
use partage_region::{
    GpuShare, LIMITS_FILE, RegionError, RegionHandle, RegionOwner, RegionPolicy, USAGE_FILE, inspect,
    is_in_use,
};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Why a share cannot be prepared, adopted or changed.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    /// The region cannot be created, opened or changed.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A share names a GPU by something that is not a UUID.
    #[error(transparent)]
    InvalidGpu(#[from] InvalidGpu),
    /// The region's directory cannot be created or emptied.
    #[error("cannot {action} {}", path.display())]
    Directory {
        /// The action that was attempted.
        action: &'static str,
        /// The path of the directory.
        path: PathBuf,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// The region cannot be used, and cannot be replaced before the processes that use it have ended.
    #[error("processes of the previous run still use the region: it is replaced when they have exited")]
    StillInUse {
        /// Why the region cannot be used.
        #[source]
        source: RegionError,
    },
    /// The tenant runs with a region that this build cannot change.
    #[error("the region keeps its current limits: {reason}")]
    Unmanaged {
        /// Why the region cannot be changed.
        reason: String,
    },
    /// The tenant uses more memory than the new limit.
    #[error("{used} in use, more than the new limit of {limit}: free memory in the program first")]
    AboveLimit {
        /// The memory in use on the first GPU where it is too much.
        used: Bytes,
        /// The new limit of that GPU.
        limit: Bytes,
    },
    /// No share has this key.
    #[error("the share has no region: it is created when the share starts")]
    NotFound,
}

/// The limits of a tenant, and the location of its region.
#[derive(Clone, Copy, Debug)]
pub struct ShareSpec<'a> {
    /// The directory of the region's two files.
    pub directory: &'a Path,
    /// The user that must own `usage`, and the only one that may write it. A region whose file belongs to another user
    /// is not adopted.
    pub usage_owner: u32,
    /// The tenant's shares of GPUs, in the order of the region.
    pub shares: &'a [Share],
    /// The GPUs on which launches wait for turns: see [`throttled_gpus`].
    pub throttled: &'a BTreeSet<GpuUuid>,
    /// How the tenant takes its turns on them.
    pub turns: TurnPreferences,
    /// The policy of a region that is created. A region that exists keeps its own. Whether copies are throttled is the
    /// same for all regions: see [`ManagedShares::set_throttle_copies`].
    pub policy: RegionPolicy,
}

/// What to do if the files of a region that should be adopted do not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingFiles {
    /// They are created when the tenant next starts. Running processes have the old files mapped, and cannot see new
    /// ones.
    Leave,
    /// They are created now, for processes that the tenant starts later. Running processes keep the old files.
    Create,
}

/// The result of adopting a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Adoption {
    /// The region is managed from now on.
    Managed,
    /// The files did not exist. New ones were created, and are managed from now on.
    Created,
    /// The region was not changed: it is damaged, of an unsupported layout, of another user, or for other GPUs. The
    /// share can neither be resized nor audited until its tenant starts again.
    Unmanaged {
        /// Why the region cannot be managed.
        reason: String,
    },
    /// The files do not exist, and none were created.
    Missing,
}

/// A share with a region.
#[derive(Clone, Debug)]
pub struct LiveShare<O> {
    /// The front end's identification of the tenant.
    pub owner: O,
    /// The tenant's shares of GPUs, in the order of the region.
    pub shares: Vec<Share>,
    turns: TurnPreferences,
    region: RegionState,
}

/// Whether the daemon manages a region.
#[derive(Clone, Debug)]
enum RegionState {
    /// The daemon sets limits, gives turns and reads usage.
    Managed { handle: Arc<RegionHandle>, member: MemberId },
    /// The tenant runs with files that this daemon cannot use, and does not change.
    Unmanaged { reason: String },
}

impl<O> LiveShare<O> {
    /// Returns the handle on the region; `None` if it is unmanaged.
    pub fn region(&self) -> Option<&Arc<RegionHandle>> {
        match &self.region {
            RegionState::Managed { handle, .. } => Some(handle),
            RegionState::Unmanaged { .. } => None,
        }
    }

    fn managed(&self) -> Result<(&Arc<RegionHandle>, MemberId), ShareError> {
        match &self.region {
            RegionState::Managed { handle, member } => Ok((handle, *member)),
            RegionState::Unmanaged { reason } => Err(ShareError::Unmanaged { reason: reason.clone() }),
        }
    }
}

/// All shares of this machine that have a region, by the front end's key `K`. `O` identifies a tenant; the engine only
/// compares it: a region that another tenant had under the same key is prepared again.
#[derive(Debug)]
pub struct ManagedShares<K, O = ()> {
    contexts: ContextSizes,
    arbiter: Arbiter,
    live: Mutex<BTreeMap<K, LiveShare<O>>>,
    /// Whether copies and fills wait for turns as launches do.
    throttle_copies: AtomicBool,
}

impl<K: Ord + Clone + fmt::Display, O: Clone + PartialEq> ManagedShares<K, O> {
    /// Returns the engine without shares. `contexts` contains the size of a CUDA context on each GPU, which counts
    /// against the limit.
    #[must_use]
    pub fn new(contexts: ContextSizes) -> Self {
        ManagedShares {
            contexts,
            arbiter: Arbiter::new(),
            live: Mutex::default(),
            throttle_copies: AtomicBool::new(false),
        }
    }

    fn live(&self) -> MutexGuard<'_, BTreeMap<K, LiveShare<O>>> {
        // Each change under this lock is a single insertion, removal or assignment.
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns all shares as they are now.
    pub fn all(&self) -> BTreeMap<K, LiveShare<O>> {
        self.live().clone()
    }

    /// Returns the number of shares.
    pub fn count(&self) -> usize {
        self.live().len()
    }

    /// Returns the share with this key.
    pub fn get(&self, key: &K) -> Option<LiveShare<O>> {
        self.live().get(key).cloned()
    }

    /// Returns the handle on a share's region; `None` if the share does not exist or its region is unmanaged.
    pub fn region(&self, key: &K) -> Option<Arc<RegionHandle>> {
        self.live().get(key)?.region().cloned()
    }

    /// Returns all shares as the monitor audits them.
    pub fn audited(&self) -> Vec<AuditedShare<K>> {
        let audited = |(key, live): (&K, &LiveShare<O>)| AuditedShare {
            key: key.clone(),
            region: live.region().cloned(),
        };
        self.live().iter().map(audited).collect()
    }

    /// Prepares the region of a tenant that is about to start: the one that exists, with these limits, or a new one.
    ///
    /// No process of the tenant runs yet, so a region that cannot be used, or has an older layout, is replaced here, and
    /// only here; kernel locks on its files are still checked. Calls for one key must be serialized; calls for different
    /// keys may run concurrently.
    pub fn prepare(&self, key: &K, owner: O, spec: &ShareSpec<'_>) -> Result<(), ShareError> {
        let found = inspect(spec.directory);
        if matches!(found, Ok(LAYOUT_VERSION)) && self.is_managed(key, &owner, spec.shares) {
            return Ok(());
        }
        let wanted = self.limits(spec.shares, spec.throttled, spec.turns)?;
        let handle = match found {
            Ok(layout) if layout != LAYOUT_VERSION && !is_in_use(spec.directory) => {
                tracing::info!(share = %key, layout, "region of an older layout replaced before a start");
                empty_directory(spec.directory)?;
                create(spec, &wanted)?
            }
            Ok(_) => match RegionHandle::adopt(spec.directory, &wanted, spec.usage_owner) {
                Ok(handle) => handle,
                Err(error) => replace(key, spec, &wanted, error)?,
            },
            Err(error) => replace(key, spec, &wanted, error)?,
        };
        self.manage(key, owner, spec, handle)
    }

    /// Adopts the region of a tenant that may be running, after a restart of the daemon.
    ///
    /// A region that cannot be managed is not changed: the tenant may have it mapped, and the limits in it stay in
    /// force.
    pub fn adopt(
        &self,
        key: &K,
        owner: O,
        spec: &ShareSpec<'_>,
        missing: MissingFiles,
    ) -> Result<Adoption, ShareError> {
        if self.is_managed(key, &owner, spec.shares) {
            return Ok(Adoption::Managed);
        }
        let wanted = self.limits(spec.shares, spec.throttled, spec.turns)?;
        let (adopted, managed) = match RegionHandle::adopt(spec.directory, &wanted, spec.usage_owner) {
            Err(RegionError::Missing(_)) if missing == MissingFiles::Leave => return Ok(Adoption::Missing),
            Err(RegionError::Missing(_)) => (create(spec, &wanted), Adoption::Created),
            adopted => (adopted.map_err(ShareError::from), Adoption::Managed),
        };
        let managed =
            adopted.and_then(|handle| self.manage(key, owner.clone(), spec, handle).map(|()| managed));
        match managed {
            Ok(adoption) => Ok(adoption),
            Err(error) => {
                let reason = describe(&error);
                let region = RegionState::Unmanaged { reason: reason.clone() };
                let (shares, turns) = (spec.shares.to_vec(), spec.turns);
                self.replace_entry(key, LiveShare { owner, shares, turns, region });
                Ok(Adoption::Unmanaged { reason })
            }
        }
    }

    fn is_managed(&self, key: &K, owner: &O, shares: &[Share]) -> bool {
        self.live().get(key).is_some_and(|live| {
            live.region().is_some() && live.owner == *owner && live.shares.as_slice() == shares
        })
    }

    /// Adds a region to the arbiter, and replaces the entry of the share.
    fn manage(
        &self,
        key: &K,
        owner: O,
        spec: &ShareSpec<'_>,
        handle: RegionHandle,
    ) -> Result<(), ShareError> {
        // The earlier handle must not write turns into the same region.
        self.release(key);
        let handle = Arc::new(handle);
        let member = self.arbiter.add(Arc::clone(&handle))?;
        let region = RegionState::Managed { handle: Arc::clone(&handle), member };
        let (shares, turns) = (spec.shares.to_vec(), spec.turns);
        self.replace_entry(key, LiveShare { owner, shares, turns, region });
        // The setting may change at the same time: either side finds the other's change.
        self.apply_policy(&handle);
        Ok(())
    }

    fn replace_entry(&self, key: &K, share: LiveShare<O>) {
        let earlier = self.live().insert(key.clone(), share);
        self.leave_arbiter(earlier);
    }

    fn leave_arbiter(&self, share: Option<LiveShare<O>>) {
        if let Some(RegionState::Managed { member, .. }) = share.map(|share| share.region) {
            self.arbiter.remove(member);
        }
    }

    fn limits(
        &self,
        shares: &[Share],
        throttled: &BTreeSet<GpuUuid>,
        turns: TurnPreferences,
    ) -> Result<Vec<GpuShare>, InvalidGpu> {
        shares.iter().map(|share| self.limits_of(share, throttled, turns)).collect()
    }

    fn limits_of(
        &self,
        share: &Share,
        throttled: &BTreeSet<GpuUuid>,
        turns: TurnPreferences,
    ) -> Result<GpuShare, InvalidGpu> {
        region_limits(share, self.contexts.of(&share.gpu), throttled.contains(&share.gpu), turns)
    }

    /// Sets whether copies and fills wait for turns as launches do, in all regions from now on. Running programs notice
    /// it with their next copy.
    pub fn set_throttle_copies(&self, throttle_copies: bool) {
        self.throttle_copies.store(throttle_copies, Ordering::SeqCst);
        for live in self.live().values() {
            live.region().iter().for_each(|region| self.apply_policy(region));
        }
    }

    /// Sets the part of a region's policy that is the same for all shares.
    fn apply_policy(&self, region: &RegionHandle) {
        let throttle_copies = self.throttle_copies.load(Ordering::SeqCst);
        let policy = region.owner().policy();
        if policy.throttle_copies != throttle_copies {
            region.owner().set_policy(RegionPolicy { throttle_copies, ..policy });
        }
    }

    /// Sets which launches wait for turns, after shares were added, removed or changed. A share whose limits cannot be
    /// changed is logged and keeps its limits.
    pub fn apply_turns(&self, throttled: &BTreeSet<GpuUuid>) {
        let mut changed = false;
        for (key, live) in self.live().iter() {
            let Some(region) = live.region() else { continue };
            let limits = self.limits(&live.shares, throttled, live.turns).map_err(ShareError::from);
            match limits.and_then(|limits| Ok(region.apply(&limits)?)) {
                Ok(differs) => changed |= differs,
                Err(error) => tracing::warn!(share = %key, %error, "cannot change the limits of a share"),
            }
        }
        if changed {
            self.arbiter.limits_changed();
        }
    }

    /// Charges tenants for time that they used and did not account for, as the monitor found.
    pub fn charge_unaccounted(&self, found: &[UnaccountedTime<K>]) {
        let live = self.live();
        for UnaccountedTime { key, gpu, nanoseconds } in found {
            let Some(Ok((_, member))) = live.get(key).map(LiveShare::managed) else { continue };
            let Some(uuid) = uuid_bytes(gpu) else { continue };
            tracing::debug!(share = %key, %gpu, nanoseconds, "unaccounted GPU time charged");
            self.arbiter.charge(member, uuid, *nanoseconds);
        }
    }

    /// Changes the amounts of a tenant that runs. The new limits are set first and reverted where more memory is in
    /// use: in the other order a process could allocate between the check and the change.
    ///
    /// A tenant whose memory limit does not decrease on any GPU is not checked: its own usage report must not prevent a
    /// resize.
    pub fn resize(&self, key: &K, shares: &[Share], throttled: &BTreeSet<GpuUuid>) -> Result<(), ShareError> {
        let mut live = self.live();
        let live = live.get_mut(key).ok_or(ShareError::NotFound)?;
        let old = self.limits(&live.shares, throttled, live.turns)?;
        let new = self.limits(shares, throttled, live.turns)?;
        let (region, _) = live.managed()?;
        let applied = region.apply(&new).map_err(ShareError::from);
        if let Err(error) = applied.and_then(|_| check_usage(region, &live.shares, shares)) {
            region.apply(&old)?;
            return Err(error);
        }
        live.shares = shares.to_vec();
        self.arbiter.limits_changed();
        Ok(())
    }

    /// Sets the amounts that a tenant had before, without checking its usage. An unmanaged region was never changed.
    pub fn restore(
        &self,
        key: &K,
        shares: &[Share],
        throttled: &BTreeSet<GpuUuid>,
    ) -> Result<(), ShareError> {
        let mut live = self.live();
        let live = live.get_mut(key).ok_or(ShareError::NotFound)?;
        if let Some(region) = live.region() {
            region.apply(&self.limits(shares, throttled, live.turns)?)?;
        }
        live.shares = shares.to_vec();
        self.arbiter.limits_changed();
        Ok(())
    }

    /// Attaches a share of one more GPU to a tenant that runs, once. Returns the index of the GPU in the region. Processes
    /// find the GPU when they next look up a device that they do not know.
    pub fn extend(&self, key: &K, share: &Share, throttled: &BTreeSet<GpuUuid>) -> Result<usize, ShareError> {
        let mut live = self.live();
        let live = live.get_mut(key).ok_or(ShareError::NotFound)?;
        let limits = self.limits_of(share, throttled, live.turns)?;
        let (region, member) = live.managed()?;
        // After an attempt that failed below, the region and the list have the GPU already.
        let gpu = match live.shares.iter().position(|attached| attached == share) {
            Some(gpu) => gpu,
            None => {
                let gpu = region.owner().extend(&limits)?;
                live.shares.push(share.clone());
                gpu
            }
        };
        self.arbiter.refresh(member)?;
        Ok(gpu)
    }

    /// Removes a share from the arbiter and from this engine. Its files stay: see [`remove_region`]. Returns whether it
    /// existed.
    pub fn release(&self, key: &K) -> bool {
        let released = self.live().remove(key);
        let was_live = released.is_some();
        self.leave_arbiter(released);
        was_live
    }
}

/// Checks that the memory in use is within the new limits, if any of them is lower than before.
fn check_usage(region: &RegionHandle, old: &[Share], new: &[Share]) -> Result<(), ShareError> {
    let memory = |share: &Share| share.memory_bytes.map_or(u64::MAX, |bytes| bytes.0);
    if new.iter().zip(old).all(|(new, old)| memory(new) >= memory(old)) {
        return Ok(());
    }
    let usage = region.reader().snapshot()?;
    for (share, gpu) in new.iter().zip(usage.gpus) {
        if let Some(limit) = share.memory_bytes.filter(|limit| gpu.used > limit.0) {
            return Err(ShareError::AboveLimit { used: Bytes(gpu.used), limit });
        }
    }
    Ok(())
}

/// Reads the shares of a region from its limits, for a tenant whose record was lost.
pub fn shares_of_region(directory: &Path) -> Result<Vec<Share>, RegionError> {
    let owner = RegionOwner::open(directory)?;
    Ok((0..owner.gpus()).filter_map(|gpu| owner.share(gpu)).map(|limits| limits::share_of(&limits)).collect())
}

/// Returns whether both files of a region exist.
#[must_use]
pub fn has_files(directory: &Path) -> bool {
    [LIMITS_FILE, USAGE_FILE].iter().all(|file| directory.join(file).is_file())
}

/// Replaces an unusable region by a new one, for a tenant that is about to start: see [`ManagedShares::prepare`].
fn replace(
    key: &dyn fmt::Display,
    spec: &ShareSpec<'_>,
    wanted: &[GpuShare],
    error: RegionError,
) -> Result<RegionHandle, ShareError> {
    if is_in_use(spec.directory) {
        return Err(ShareError::StillInUse { source: error });
    }
    if !matches!(error, RegionError::Missing(_)) {
        tracing::warn!(share = %key, path = %spec.directory.display(), reason = %error, "unusable region replaced before a start");
    }
    empty_directory(spec.directory)?;
    create(spec, wanted)
}

/// Creates a region, and its directory if that does not exist. A valid `usage` is kept.
fn create(spec: &ShareSpec<'_>, wanted: &[GpuShare]) -> Result<RegionHandle, ShareError> {
    fs::create_dir_all(spec.directory).map_err(failed("create", spec.directory))?;
    Ok(RegionHandle::create(spec.directory, wanted, spec.policy)?)
}

fn failed(action: &'static str, path: &Path) -> impl Fn(io::Error) -> ShareError {
    let path = path.to_path_buf();
    move |source| ShareError::Directory { action, path: path.clone(), source }
}

/// Removes everything in a directory. A link in its place is removed and not followed.
fn empty_directory(path: &Path) -> Result<(), ShareError> {
    let is_directory = fs::symlink_metadata(path).is_ok_and(|found| found.is_dir());
    if !is_directory {
        return remove(path).map_err(failed("replace", path));
    }
    for entry in fs::read_dir(path).map_err(failed("read", path))? {
        let entry = entry.map_err(failed("read", path))?;
        remove(&entry.path()).map_err(failed("empty", path))?;
    }
    Ok(())
}

/// Removes the directory of a region that no tenant uses any more.
pub fn remove_region(directory: &Path) -> Result<(), ShareError> {
    remove(directory).map_err(failed("remove", directory))
}

/// Removes a file, or a directory with its contents, if it exists. Links are not followed.
fn remove(path: &Path) -> io::Result<()> {
    let is_directory = fs::symlink_metadata(path).is_ok_and(|found| found.is_dir());
    let removed = if is_directory { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
