//! The regions of this node's containers: their limits, what they use, and their turns.

use crate::plugin::Nonce;
use partage_core::model::{Bytes, ContainerName, GpuUuid, PodUid, Share};
use partage_enforce::context_sizes::ContextSizes as Sizes;
use partage_host::shares::region_share;
use partage_region::arbiter::{Arbiter, MemberId};
use partage_region::{GpuShare, RegionError, RegionHandle, RegionPolicy, is_in_use};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Why a container's region cannot be prepared or changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ContainerRegionError {
    /// The region itself.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A share does not name a GPU.
    #[error("{0}")]
    Share(String),
    /// The directory of the region cannot be created.
    #[error("cannot create {}: {error}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The system's answer.
        error: io::Error,
    },
    /// The region cannot be used and cannot be replaced either.
    #[error(
        "{error}; processes of the container's last run still use it: it is replaced when they have ended, kubelet retries"
    )]
    StillInUse {
        /// Why it cannot be used.
        error: RegionError,
    },
    /// The container runs with a region that this agent cannot change.
    #[error("container {container} keeps the limits that it has: {why}")]
    Unmanaged {
        /// The container.
        container: ContainerName,
        /// Why its region cannot be changed.
        why: String,
    },
    /// More memory is in use than the container is to have.
    #[error(
        "container {container} uses {used} right now, which is more than {limit}: free memory in the program first"
    )]
    AboveLimit {
        /// The container.
        container: ContainerName,
        /// What it uses.
        used: Bytes,
        /// What it is to have.
        limit: Bytes,
    },
}

impl From<ContainerRegionError> for String {
    fn from(error: ContainerRegionError) -> Self {
        error.to_string()
    }
}

/// A container with a region.
pub(crate) struct Live {
    /// Its pod.
    pub(crate) uid: PodUid,
    /// The container.
    pub(crate) container: ContainerName,
    /// Its shares, in the order of the region.
    pub(crate) shares: Vec<Share>,
    region: LiveRegion,
}

/// Whether the agent manages a container's region.
enum LiveRegion {
    /// It sets limits, gives turns and reads usage.
    Managed { handle: Arc<RegionHandle>, member: MemberId },
    /// The container runs with files that this agent cannot read: damaged, or of an unsupported layout. They are left as
    /// they are, and the limits in them go on holding.
    Unmanaged { why: String },
}

impl Live {
    /// The daemon's handle on the region; none where it is unmanaged.
    pub(crate) fn region(&self) -> Option<&Arc<RegionHandle>> {
        match &self.region {
            LiveRegion::Managed { handle, .. } => Some(handle),
            LiveRegion::Unmanaged { .. } => None,
        }
    }

    fn managed(&self) -> Result<&Arc<RegionHandle>, ContainerRegionError> {
        match &self.region {
            LiveRegion::Managed { handle, .. } => Ok(handle),
            LiveRegion::Unmanaged { why } => {
                Err(ContainerRegionError::Unmanaged { container: self.container.clone(), why: why.clone() })
            }
        }
    }

    /// Verifies that no more memory is in use than these shares have, where they have less than before. A container that
    /// gets more is not examined: its own report must not keep it from what it was granted.
    fn is_within(&self, region: &RegionHandle, shares: &[Share]) -> Result<(), ContainerRegionError> {
        let memory = |share: &Share| share.memory_bytes.map_or(u64::MAX, |bytes| bytes.0);
        let grows = |(new, old): (&Share, &Share)| memory(new) >= memory(old);
        if shares.iter().zip(&self.shares).all(grows) {
            return Ok(());
        }
        let usage = region.reader().snapshot()?;
        for (share, used) in shares.iter().zip(usage.gpus) {
            if let Some(limit) = share.memory_bytes.filter(|limit| used.used > limit.0) {
                let (container, used) = (self.container.clone(), Bytes(used.used));
                return Err(ContainerRegionError::AboveLimit { container, used, limit });
            }
        }
        Ok(())
    }
}

/// The regions of all containers.
pub(crate) struct Regions {
    folder: PathBuf,
    sizes: Sizes,
    arbiter: Arbiter,
    live: Mutex<BTreeMap<Nonce, Live>>,
}

impl Regions {
    pub(crate) fn new(folder: &Path, sizes: Sizes) -> io::Result<Regions> {
        fs::create_dir_all(folder)?;
        // Containers have their own regions mounted; nobody needs to list the others.
        fs::set_permissions(folder, fs::Permissions::from_mode(0o711))?;
        Ok(Regions { folder: folder.into(), sizes, arbiter: Arbiter::new(), live: Mutex::default() })
    }

    /// The directory of a container's region.
    pub(crate) fn folder(&self, nonce: &Nonce) -> PathBuf {
        self.folder.join(&nonce.0)
    }

    /// All regions on disk, also those without a known owner.
    pub(crate) fn on_disk(&self) -> Vec<Nonce> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok().map(Nonce)).collect()
    }

    /// Whether both files of a container's region are on the node.
    pub(crate) fn is_whole(&self, nonce: &Nonce) -> bool {
        has_files(&self.folder(nonce))
    }

    pub(crate) fn live(&self) -> MutexGuard<'_, BTreeMap<Nonce, Live>> {
        // Every change to it is whole.
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prepares the region of a container that is about to start: the one that is there, or a new one.
    ///
    /// A container that starts again finds its own region: what its processes held went with them. Kubelet calls this
    /// before it creates the container, and after the last run of the same container has ended, so no process has the
    /// region mapped. That is why, and here alone, a region that cannot be used is replaced; the kernel's locks on it are
    /// checked all the same. Calls for one container are serialized; those for others need not wait for its files.
    pub(crate) fn prepare(
        &self,
        nonce: &Nonce,
        uid: &PodUid,
        container: &ContainerName,
        shares: &[Share],
        gated: &BTreeSet<GpuUuid>,
    ) -> Result<(), ContainerRegionError> {
        let folder = self.folder(nonce);
        if self.is_managed(nonce, uid, container, shares) && has_files(&folder) {
            return Ok(());
        }
        self.leave(nonce);
        let wanted = self.limits(shares, gated)?;
        let handle = match RegionHandle::adopt(&folder, &wanted, effective_user()) {
            Ok(handle) => handle,
            Err(error) => replace(&folder, &wanted, error)?,
        };
        self.manage(nonce, uid, container, shares, handle)
    }

    /// Adopts the region of a container that may be running, after a restart of the agent.
    ///
    /// A region that cannot be adopted is left as it is and reported once: the container may have it mapped, and the limits
    /// in it go on holding. Such a container cannot be resized and is not audited until it starts again.
    pub(crate) fn adopt(
        &self,
        nonce: &Nonce,
        uid: &PodUid,
        container: &ContainerName,
        shares: &[Share],
        gated: &BTreeSet<GpuUuid>,
    ) -> Result<(), ContainerRegionError> {
        let folder = self.folder(nonce);
        if self.is_managed(nonce, uid, container, shares) {
            return Ok(());
        }
        let wanted = self.limits(shares, gated)?;
        match RegionHandle::adopt(&folder, &wanted, effective_user()) {
            Ok(handle) => {
                self.leave(nonce);
                self.manage(nonce, uid, container, shares, handle)
            }
            // The last agent was killed before it created the files, or they were removed: a container that runs has them
            // still, and new ones would only say otherwise. They are created with its next start.
            Err(RegionError::Missing(_)) => Ok(()),
            Err(error) => {
                self.leave(nonce);
                tracing::warn!(
                    %nonce,
                    %uid,
                    %container,
                    path = %folder.display(),
                    "region is not managed, the container runs on with the limits that it has: {error}"
                );
                let region = LiveRegion::Unmanaged { why: error.to_string() };
                self.insert(nonce, uid, container, shares, region);
                Ok(())
            }
        }
    }

    fn is_managed(&self, nonce: &Nonce, uid: &PodUid, container: &ContainerName, shares: &[Share]) -> bool {
        self.live().get(nonce).is_some_and(|live| {
            let same = live.uid == *uid && live.container == *container && live.shares == shares;
            same && live.region().is_some()
        })
    }

    /// Gives turns to a region from now on.
    fn manage(
        &self,
        nonce: &Nonce,
        uid: &PodUid,
        container: &ContainerName,
        shares: &[Share],
        handle: RegionHandle,
    ) -> Result<(), ContainerRegionError> {
        let handle = Arc::new(handle);
        let member = self.arbiter.add(Arc::clone(&handle))?;
        self.insert(nonce, uid, container, shares, LiveRegion::Managed { handle, member });
        Ok(())
    }

    fn insert(
        &self,
        nonce: &Nonce,
        uid: &PodUid,
        container: &ContainerName,
        shares: &[Share],
        region: LiveRegion,
    ) {
        let (uid, container, shares) = (uid.clone(), container.clone(), shares.to_vec());
        self.live().insert(nonce.clone(), Live { uid, container, shares, region });
    }

    /// Gives no more turns to a container; its files stay.
    fn leave(&self, nonce: &Nonce) {
        let left = self.live().remove(nonce);
        if let Some(LiveRegion::Managed { member, .. }) = left.map(|left| left.region) {
            self.arbiter.remove(member);
        }
    }

    fn limits(
        &self,
        shares: &[Share],
        gated: &BTreeSet<GpuUuid>,
    ) -> Result<Vec<GpuShare>, ContainerRegionError> {
        let one = |share: &Share| region_share(share, self.sizes.of(&share.gpu), gated.contains(&share.gpu));
        shares.iter().map(one).collect::<Result<_, _>>().map_err(ContainerRegionError::Share)
    }

    /// Sets which launches wait for turns, after shares came, went or changed: those on GPUs with guaranteed compute.
    pub(crate) fn settle(&self, gated: &BTreeSet<GpuUuid>) {
        let mut changed = false;
        for (nonce, live) in self.live().iter() {
            let Some(region) = live.region() else { continue };
            let applied = self.limits(&live.shares, gated).and_then(|wanted| Ok(region.apply(&wanted)?));
            match applied {
                Ok(differs) => changed |= differs,
                Err(error) => tracing::warn!(%nonce, uid = %live.uid, "limits cannot be changed: {error}"),
            }
        }
        if changed {
            self.arbiter.limits_changed();
        }
    }

    /// Changes the amounts of a container that runs. The new limits are set first and reverted where more is in use: in
    /// the other order a process could take memory between the check and the change.
    pub(crate) fn resize(
        &self,
        nonce: &Nonce,
        shares: &[Share],
        gated: &BTreeSet<GpuUuid>,
    ) -> Result<(), ContainerRegionError> {
        let mut live = self.live();
        let Some(one) = live.get_mut(nonce) else { return Ok(()) };
        let (old, new) = (self.limits(&one.shares, gated)?, self.limits(shares, gated)?);
        let region = one.managed()?;
        let applied = region.apply(&new).map_err(ContainerRegionError::from);
        if let Err(why) = applied.and_then(|_| one.is_within(region, shares)) {
            region.apply(&old)?;
            return Err(why);
        }
        one.shares = shares.to_vec();
        Ok(())
    }

    /// Sets the amounts that a container had, whatever it uses.
    pub(crate) fn put_back(
        &self,
        nonce: &Nonce,
        shares: &[Share],
        gated: &BTreeSet<GpuUuid>,
    ) -> Result<(), ContainerRegionError> {
        let mut live = self.live();
        // The amounts of an unmanaged region were never changed.
        let Some(one) = live.get_mut(nonce) else { return Ok(()) };
        if let Some(region) = one.region() {
            region.apply(&self.limits(shares, gated)?)?;
        }
        one.shares = shares.to_vec();
        Ok(())
    }

    /// Removes the region of a container that has ended for good.
    pub(crate) fn remove(&self, nonce: &Nonce) {
        self.leave(nonce);
        let folder = self.folder(nonce);
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("cannot remove {}: {error}", folder.display());
            }
            _ => {}
        }
    }
}

/// The user that regions belong to: the agent's own.
fn effective_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Whether both files of a region are where a container would have them mounted from.
fn has_files(folder: &Path) -> bool {
    [partage_region::LIMITS, partage_region::USAGE].iter().all(|file| folder.join(file).is_file())
}

/// Replaces a region that cannot be used by a new one. Only for a container that is about to start: see
/// [`Regions::prepare`].
fn replace(
    folder: &Path,
    wanted: &[GpuShare],
    error: RegionError,
) -> Result<RegionHandle, ContainerRegionError> {
    if is_in_use(folder) {
        return Err(ContainerRegionError::StillInUse { error });
    }
    if !matches!(error, RegionError::Missing(_)) {
        tracing::warn!(path = %folder.display(), "replaced the region of a container that starts: {error}");
    }
    let failed = |error| ContainerRegionError::Directory { path: folder.into(), error };
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    fs::create_dir_all(folder).map_err(failed)?;
    Ok(RegionHandle::create(folder, wanted, RegionPolicy::default())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use partage_core::model::Cores;

    const GPU: &str = "GPU-01234567-89ab-cdef-0123-456789abcdef";

    fn share(mib: u64) -> Vec<Share> {
        let memory_bytes = Some(Bytes(mib << 20));
        vec![Share { gpu: GPU.into(), memory_bytes, cores: Cores::percent(30), ceiling: None, whole: false }]
    }

    /// The limit that the container's processes go by.
    fn limit(regions: &Regions, nonce: &Nonce) -> u64 {
        regions.live()[nonce].region().unwrap().owner().share(0).unwrap().memory >> 20
    }

    #[test]
    fn a_change_that_is_refused_leaves_the_old_limits_whatever_the_container_did_to_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let sizes = Sizes::read(folder.path().join("contexts.json"), "550");
        let regions = Regions::new(&folder.path().join("regions"), sizes).unwrap();
        let (nonce, all) = (Nonce("a".into()), BTreeSet::from([GPU.into()]));
        regions.prepare(&nonce, &"u".into(), &"main".into(), &share(1000), &all).unwrap();
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

    /// Regions of a node, and one container that a release of this or another layout prepared.
    struct Bench {
        folder: tempfile::TempDir,
        nonce: Nonce,
        gated: BTreeSet<GpuUuid>,
    }

    impl Bench {
        fn new() -> Bench {
            let bench = Bench {
                folder: tempfile::tempdir().unwrap(),
                nonce: Nonce("a".into()),
                gated: BTreeSet::from([GPU.into()]),
            };
            bench.prepare(&bench.restarted(), 1000).unwrap();
            bench
        }

        /// An agent that has just started.
        fn restarted(&self) -> Regions {
            let sizes = Sizes::read(self.folder.path().join("contexts.json"), "550");
            Regions::new(&self.folder.path().join("regions"), sizes).unwrap()
        }

        fn prepare(&self, regions: &Regions, mib: u64) -> Result<(), ContainerRegionError> {
            regions.prepare(&self.nonce, &"u".into(), &"main".into(), &share(mib), &self.gated)
        }

        fn adopt(&self, regions: &Regions, mib: u64) {
            regions.adopt(&self.nonce, &"u".into(), &"main".into(), &share(mib), &self.gated).unwrap();
        }

        fn file(&self, name: &str) -> PathBuf {
            self.folder.path().join("regions/a").join(name)
        }

        fn contents(&self) -> [Vec<u8>; 2] {
            [partage_region::LIMITS, partage_region::USAGE].map(|name| fs::read(self.file(name)).unwrap())
        }

        /// Writes another layout version into a file.
        fn set_version(&self, name: &str, version: u32) {
            use std::os::unix::fs::FileExt;
            let file = fs::File::options().write(true).open(self.file(name)).unwrap();
            file.write_all_at(&version.to_le_bytes(), 8).unwrap();
        }
    }

    #[test]
    fn running_container_with_an_unknown_layout_is_left_untouched() {
        let bench = Bench::new();
        let tenant = partage_region::RegionTenant::attach(&bench.folder.path().join("regions/a")).unwrap();
        for name in [partage_region::LIMITS, partage_region::USAGE] {
            bench.set_version(name, 3);
        }
        let before = bench.contents();
        let regions = bench.restarted();
        bench.adopt(&regions, 2000);
        assert!(bench.contents() == before, "not a byte is changed");
        assert!(regions.live()[&bench.nonce].region().is_none());
        regions.settle(&BTreeSet::new());
        let error = regions.resize(&bench.nonce, &share(500), &bench.gated).unwrap_err().to_string();
        assert!(error.contains("container main keeps the limits that it has"), "{error}");
        assert!(error.contains("limits has layout 3") && error.contains("layouts 1 to 2"), "{error}");
        regions.put_back(&bench.nonce, &share(500), &bench.gated).unwrap();
        // What it holds itself to is what it had.
        assert!(tenant.reserve(0, 1001 << 20).is_err() && tenant.reserve(0, 1000 << 20).is_ok());
        // Its last run is not over: it is not replaced under it, whoever asks.
        let error = bench.prepare(&regions, 1000).unwrap_err().to_string();
        assert!(error.contains("still use it"), "{error}");
        assert!(bench.contents()[0] == before[0]);
        drop(tenant);
        bench.prepare(&regions, 1000).unwrap();
        assert_eq!(limit(&regions, &bench.nonce), 1000);
    }

    #[test]
    fn damaged_region_is_left_to_a_running_container_and_replaced_for_one_that_starts() {
        let bench = Bench::new();
        fs::File::options().write(true).open(bench.file("usage")).unwrap().set_len(100).unwrap();
        let before = bench.contents();
        let regions = bench.restarted();
        bench.adopt(&regions, 1000);
        assert!(regions.live()[&bench.nonce].region().is_none() && bench.contents() == before);
        bench.prepare(&regions, 1000).unwrap();
        assert!(regions.live()[&bench.nonce].region().is_some() && bench.contents() != before);

        // The arbiter of the first agent writes its heartbeat into `limits` as long as it runs.
        drop(regions);
        // A link is not followed, and what it leads to is not touched.
        let elsewhere = bench.folder.path().join("elsewhere");
        fs::rename(bench.file("limits"), &elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, bench.file("limits")).unwrap();
        let before = fs::read(&elsewhere).unwrap();
        let regions = bench.restarted();
        bench.adopt(&regions, 500);
        assert!(regions.live()[&bench.nonce].region().is_none());
        bench.prepare(&regions, 500).unwrap();
        assert_eq!(limit(&regions, &bench.nonce), 500);
        assert!(fs::read(&elsewhere).unwrap() == before);
    }

    #[test]
    fn region_without_files_is_created_with_the_next_start() {
        let bench = Bench::new();
        fs::remove_file(bench.file("limits")).unwrap();
        let regions = bench.restarted();
        bench.adopt(&regions, 1000);
        assert!(regions.live().is_empty());
        regions.resize(&bench.nonce, &share(500), &bench.gated).unwrap();
        bench.prepare(&regions, 500).unwrap();
        assert_eq!(limit(&regions, &bench.nonce), 500);
    }

    #[test]
    fn region_that_grew_is_adopted_and_keeps_its_attachment() {
        let bench = Bench::new();
        let attached = GpuShare { uuid: [9; 16], ..GpuShare::default() };
        {
            let regions = bench.restarted();
            bench.adopt(&regions, 1000);
            let live = regions.live();
            live[&bench.nonce].region().unwrap().owner().extend(&attached).unwrap();
        }
        let regions = bench.restarted();
        bench.adopt(&regions, 700);
        let live = regions.live();
        let region = live[&bench.nonce].region().unwrap();
        assert_eq!((region.owner().gpus(), region.owner().base_gpus()), (2, 1));
        assert_eq!(region.owner().share(1), Some(attached));
        assert_eq!(region.owner().share(0).unwrap().memory, 700 << 20);
    }
}
