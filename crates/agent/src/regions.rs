//! The regions of this node's containers: their limits, what they use, and whose turn it is.

use crate::plugin::Nonce;
use partage_core::model::{ContainerName, GpuUuid, PodUid, Share};
use partage_enforce::context_sizes::ContextSizes as Sizes;
use partage_host::shares::region_share;
use partage_host::truth::Kept;
use partage_region::arbiter::{Arbiter, MemberId};
use partage_region::{RegionOwner, RegionPolicy};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A container with a region.
pub(crate) struct Live {
    /// Its pod.
    pub(crate) uid: PodUid,
    /// The container.
    pub(crate) container: ContainerName,
    /// Its shares, in the order of the region.
    pub(crate) shares: Vec<Share>,
    /// Our side of the region.
    pub(crate) kept: Arc<Kept>,
    member: MemberId,
}

impl Live {
    /// Whether no more memory is in use than these shares have, where they have less than before. What a container says of itself
    /// is not asked for more: it could not be refused what it was given.
    fn is_within(&self, shares: &[Share]) -> Result<(), String> {
        let memory = |share: &Share| share.memory_bytes.map_or(u64::MAX, |bytes| bytes.0);
        let grows = |(new, old): (&Share, &Share)| memory(new) >= memory(old);
        if shares.iter().zip(&self.shares).all(grows) {
            return Ok(());
        }
        let usage = self.kept.reader.snapshot().map_err(|error| error.to_string())?;
        for (share, used) in shares.iter().zip(usage.gpus) {
            if let Some(limit) = share.memory_bytes.filter(|limit| used.used > limit.0) {
                let used = partage_core::model::Bytes(used.used);
                return Err(format!(
                    "container {} uses {used} right now, which is more than {limit}: free memory in the program first",
                    self.container
                ));
            }
        }
        Ok(())
    }
}

/// All of them.
pub(crate) struct Regions {
    folder: PathBuf,
    sizes: Sizes,
    arbiter: Arbiter,
    live: Mutex<BTreeMap<Nonce, Live>>,
}

impl Regions {
    pub(crate) fn new(folder: &Path, sizes: Sizes) -> io::Result<Regions> {
        fs::create_dir_all(folder)?;
        // What is inside is for who has it mounted.
        fs::set_permissions(folder, fs::Permissions::from_mode(0o711))?;
        Ok(Regions { folder: folder.into(), sizes, arbiter: Arbiter::new(), live: Mutex::default() })
    }

    /// Where a container's region is.
    pub(crate) fn folder(&self, nonce: &Nonce) -> PathBuf {
        self.folder.join(&nonce.0)
    }

    /// The regions that are there, whosever they are.
    pub(crate) fn on_disk(&self) -> Vec<Nonce> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok().map(Nonce)).collect()
    }

    /// Whether both files of a container's region are on the node.
    pub(crate) fn is_whole(&self, nonce: &Nonce) -> bool {
        is_there(&self.folder(nonce))
    }

    pub(crate) fn live(&self) -> MutexGuard<'_, BTreeMap<Nonce, Live>> {
        // Every change to it is whole.
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a container's region from now on: the one that is there, or a new one.
    ///
    /// A container that starts again finds its own: what its processes held went with them. Two calls for one container come one
    /// after the other; those for others need not wait for its files.
    pub(crate) fn keep(
        &self,
        nonce: &Nonce,
        uid: &PodUid,
        container: &ContainerName,
        shares: &[Share],
        gated: &BTreeSet<GpuUuid>,
    ) -> Result<(), String> {
        let folder = self.folder(nonce);
        let same = |one: &Live| one.uid == *uid && one.container == *container && one.shares == shares;
        let is_kept = self.live().get(nonce).is_some_and(same);
        if is_kept && is_there(&folder) {
            return Ok(());
        }
        self.leave(nonce);
        let wanted = self.limits(shares, gated)?;
        let kept = match taken_up(&folder, &wanted) {
            Some(kept) => kept,
            None => {
                // Damaged by its tenant, or of an agent that was killed while it made it. Who has the old one mounted keeps it.
                let _ = fs::remove_dir_all(&folder);
                fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
                let owner = RegionOwner::create(&folder, &wanted, RegionPolicy::default())
                    .map_err(|error| error.to_string())?;
                Kept::of(owner, &folder).map_err(|error| error.to_string())?
            }
        };
        let kept = Arc::new(kept);
        let member = self.arbiter.add(&folder).map_err(|error| error.to_string())?;
        let (uid, container, shares) = (uid.clone(), container.clone(), shares.to_vec());
        self.live().insert(nonce.clone(), Live { uid, container, shares, kept, member });
        Ok(())
    }

    /// No more turns for a container; its files stay.
    fn leave(&self, nonce: &Nonce) {
        let left = self.live().remove(nonce);
        if let Some(left) = left {
            self.arbiter.remove(left.member);
        }
    }

    fn limits(
        &self,
        shares: &[Share],
        gated: &BTreeSet<GpuUuid>,
    ) -> Result<Vec<partage_region::GpuShare>, String> {
        let one = |share: &Share| region_share(share, self.sizes.of(&share.gpu), gated.contains(&share.gpu));
        shares.iter().map(one).collect()
    }

    /// After shares came, went or changed: turns are needed where somebody was promised time.
    pub(crate) fn settle(&self, gated: &BTreeSet<GpuUuid>) {
        let mut changed = false;
        for (nonce, live) in self.live().iter() {
            let set = self.limits(&live.shares, gated).and_then(|wanted| set(&live.kept.owner, &wanted));
            match set {
                Ok(set) => changed |= set,
                Err(error) => tracing::warn!(%nonce, "limits cannot be changed: {error}"),
            }
        }
        if changed {
            self.arbiter.limits_changed();
        }
    }

    /// Other amounts for a container that runs. They are taken back where more is in use: asked the other way round, a process
    /// could take memory between the question and the answer.
    pub(crate) fn resize(
        &self,
        nonce: &Nonce,
        shares: &[Share],
        gated: &BTreeSet<GpuUuid>,
    ) -> Result<(), String> {
        let mut live = self.live();
        let Some(one) = live.get_mut(nonce) else { return Ok(()) };
        let (old, new) = (self.limits(&one.shares, gated)?, self.limits(shares, gated)?);
        let changed = set(&one.kept.owner, &new).and_then(|_| one.is_within(shares));
        match changed {
            Ok(()) => one.shares = shares.to_vec(),
            Err(why) => {
                set(&one.kept.owner, &old)?;
                return Err(why);
            }
        }
        Ok(())
    }

    /// The amounts that a container had, whatever it uses.
    pub(crate) fn put_back(
        &self,
        nonce: &Nonce,
        shares: &[Share],
        gated: &BTreeSet<GpuUuid>,
    ) -> Result<(), String> {
        let mut live = self.live();
        let Some(one) = live.get_mut(nonce) else { return Ok(()) };
        set(&one.kept.owner, &self.limits(shares, gated)?)?;
        one.shares = shares.to_vec();
        Ok(())
    }

    /// A container has ended for good.
    pub(crate) fn remove(&self, nonce: &Nonce) {
        self.leave(nonce);
        let folder = self.folder(nonce);
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("{}: cannot be removed: {error}", folder.display());
            }
            _ => {}
        }
    }
}

/// Whether both files of a region are where a container would have them mounted from.
fn is_there(folder: &Path) -> bool {
    [partage_region::LIMITS, partage_region::USAGE].iter().all(|file| folder.join(file).is_file())
}

/// The region that is there, with these limits; none where it cannot be used.
fn taken_up(folder: &Path, wanted: &[partage_region::GpuShare]) -> Option<Kept> {
    let owner = RegionOwner::open(folder).ok().filter(|owner| fits(owner, wanted) && is_there(folder))?;
    set(&owner, wanted).ok()?;
    Kept::of(owner, folder).ok()
}

/// Whether a region is of these GPUs, in this order.
fn fits(owner: &RegionOwner, wanted: &[partage_region::GpuShare]) -> bool {
    let uuids = (0..owner.gpus()).map(|at| owner.share(at).map(|share| share.uuid));
    uuids.eq(wanted.iter().map(|share| Some(share.uuid)))
}

/// Whether something was not so before.
fn set(owner: &RegionOwner, wanted: &[partage_region::GpuShare]) -> Result<bool, String> {
    let mut changed = false;
    for (at, share) in wanted.iter().enumerate() {
        if owner.share(at).as_ref() != Some(share) {
            owner.set(at, share).map_err(|error| error.to_string())?;
            changed = true;
        }
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use partage_core::model::{Bytes, Cores};

    const GPU: &str = "GPU-01234567-89ab-cdef-0123-456789abcdef";

    fn share(mib: u64) -> Vec<Share> {
        let memory_bytes = Some(Bytes(mib << 20));
        vec![Share { gpu: GPU.into(), memory_bytes, cores: Cores::percent(30), ceiling: None, whole: false }]
    }

    /// The limit that the container's processes go by.
    fn limit(regions: &Regions, nonce: &Nonce) -> u64 {
        regions.live()[nonce].kept.owner.share(0).unwrap().memory >> 20
    }

    #[test]
    fn a_change_that_is_refused_leaves_the_old_limits_whatever_the_container_did_to_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let sizes = Sizes::read(folder.path().join("contexts.json"), "550");
        let regions = Regions::new(&folder.path().join("regions"), sizes).unwrap();
        let (nonce, all) = (Nonce("a".into()), BTreeSet::from([GPU.into()]));
        regions.keep(&nonce, &"u".into(), &"main".into(), &share(1000), &all).unwrap();
        regions.resize(&nonce, &share(2000), &all).unwrap();
        assert_eq!(limit(&regions, &nonce), 2000);

        let usage = fs::File::options().write(true).open(regions.folder(&nonce).join(partage_region::USAGE));
        usage.unwrap().set_len(16).unwrap();
        regions.resize(&nonce, &share(500), &all).unwrap_err();
        assert_eq!((limit(&regions, &nonce), regions.live()[&nonce].shares == share(2000)), (2000, true));
        // Who gets more is not asked, so cannot say anything that would matter.
        regions.resize(&nonce, &share(3000), &all).unwrap();
        regions.put_back(&nonce, &share(1000), &all).unwrap();
        assert_eq!((limit(&regions, &nonce), regions.live()[&nonce].shares == share(1000)), (1000, true));
    }
}
