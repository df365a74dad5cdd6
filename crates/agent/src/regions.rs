//! The regions of this node's containers: the agent's side of [`partage_enforce::shares`].
//!
//! A region is in a directory named after the container's key. The engine creates, adopts and changes it; this module knows
//! its directory and its container, and translates the engine's errors for the container.

use crate::containers::ContainerKey;
use crate::containers::lifecycle::ContainerOwner;
use partage_core::model::{Bytes, ContainerName, GpuUuid, PodUid, Share, TurnPreferences};
use partage_enforce::context_sizes::ContextSizes;
use partage_enforce::monitor::UnaccountedTime;
use partage_enforce::shares::{
    Adoption, LiveShare, ManagedShares, MissingFiles, ShareError, ShareSpec, has_files, remove_region,
};
use partage_region::{RegionError, RegionHandle, RegionOwner, RegionPolicy, is_in_use};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why a container's region cannot be prepared or changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ContainerRegionError {
    /// The container runs with a region that this agent cannot change.
    #[error("container {container} keeps its current limits: {reason}")]
    Unmanaged {
        /// The container's name in its pod.
        container: ContainerName,
        /// Why its region cannot be changed.
        reason: String,
    },
    /// More memory is in use than the new limit.
    #[error(
        "container {container} uses {used}, which is more than {limit}: free memory in the program first"
    )]
    AboveLimit {
        /// The container's name in its pod.
        container: ContainerName,
        /// The memory that it uses.
        used: Bytes,
        /// The memory that it would have.
        limit: Bytes,
    },
    /// The region of a container that may run was removed from the node.
    #[error(
        "the region {} is missing, so the limits of a running container cannot be changed: delete the pod or restart the \
         container to create the region again",
        .0.display()
    )]
    Missing(PathBuf),
    /// Processes of the container's previous run still exist.
    #[error("processes of the container's previous run still exist; kubelet retries automatically")]
    StillInUse(#[source] ShareError),
    /// The region cannot be created or opened.
    #[error(transparent)]
    Share(ShareError),
}

impl ContainerRegionError {
    fn new(container: ContainerName, error: ShareError) -> ContainerRegionError {
        match error {
            ShareError::Unmanaged { reason } => ContainerRegionError::Unmanaged { container, reason },
            ShareError::AboveLimit { used, limit } => {
                ContainerRegionError::AboveLimit { container, used, limit }
            }
            error @ ShareError::StillInUse { .. } => ContainerRegionError::StillInUse(error),
            error => ContainerRegionError::Share(error),
        }
    }
}

/// A container with a region, and its shares.
pub(crate) struct LiveContainer {
    /// The UID of the container's pod.
    pub(crate) uid: PodUid,
    /// The container's name in the pod.
    pub(crate) container: ContainerName,
    /// Its shares, in the order of the region.
    pub(crate) shares: Vec<Share>,
    region: Option<Arc<RegionHandle>>,
}

impl LiveContainer {
    /// Returns the agent's handle on the region; none where it is unmanaged.
    pub(crate) fn region(&self) -> Option<&Arc<RegionHandle>> {
        self.region.as_ref()
    }
}

impl From<LiveShare<ContainerOwner>> for LiveContainer {
    fn from(live: LiveShare<ContainerOwner>) -> LiveContainer {
        let region = live.region().cloned();
        let LiveShare { owner: ContainerOwner { pod: uid, container }, shares, .. } = live;
        LiveContainer { uid, container, shares, region }
    }
}

/// The regions of all containers of this node.
pub(crate) struct ContainerRegions {
    directory: PathBuf,
    shares: ManagedShares<ContainerKey, ContainerOwner>,
}

impl ContainerRegions {
    pub(crate) fn new(directory: &Path, contexts: ContextSizes) -> io::Result<ContainerRegions> {
        fs::create_dir_all(directory)?;
        // Containers have their own regions mounted, and need not list the others.
        fs::set_permissions(directory, fs::Permissions::from_mode(0o711))?;
        Ok(ContainerRegions { directory: directory.into(), shares: ManagedShares::new(contexts) })
    }

    /// Returns the directory of a container's region.
    pub(crate) fn folder(&self, key: &ContainerKey) -> PathBuf {
        self.directory.join(&key.0)
    }

    /// Returns all regions on disk, also those without a known owner.
    pub(crate) fn on_disk(&self) -> Vec<ContainerKey> {
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok().map(ContainerKey)).collect()
    }

    /// Returns whether the region of an unknown container must be kept: a process still uses it, or another version of the agent
    /// wrote it.
    pub(crate) fn must_be_kept(&self, key: &ContainerKey) -> bool {
        let folder = self.folder(key);
        // Only the agent writes `limits`: a container cannot have its region kept by what it writes.
        let is_foreign = matches!(RegionOwner::open(&folder), Err(RegionError::UnsupportedVersion { .. }));
        is_foreign || is_in_use(&folder)
    }

    /// Returns whether both files of a container's region exist.
    pub(crate) fn is_whole(&self, key: &ContainerKey) -> bool {
        has_files(&self.folder(key))
    }

    /// Returns all containers with a region, as they are now.
    pub(crate) fn live(&self) -> BTreeMap<ContainerKey, LiveContainer> {
        self.shares.all().into_iter().map(|(key, live)| (key, live.into())).collect()
    }

    /// Returns the number of containers with a region.
    pub(crate) fn count(&self) -> usize {
        self.shares.count()
    }

    /// Prepares the region of a container that is about to start: see [`ManagedShares::prepare`].
    ///
    /// Kubelet calls this before it creates the container, and after the last run of the same container has ended, so no
    /// process has the region mapped.
    pub(crate) fn prepare(
        &self,
        key: &ContainerKey,
        owner: &ContainerOwner,
        shares: &[Share],
        throttled: &BTreeSet<GpuUuid>,
        turns: TurnPreferences,
        policy: RegionPolicy,
    ) -> Result<(), ContainerRegionError> {
        let directory = self.folder(key);
        let prepared =
            self.shares.prepare(key, owner.clone(), &spec(&directory, shares, throttled, turns, policy));
        prepared.map_err(|error| ContainerRegionError::new(owner.container.clone(), error))
    }

    /// Adopts the region of a container that may be running, after a restart of the agent: see [`ManagedShares::adopt`].
    ///
    /// Missing files are left to the container's next start: the last agent was killed before it created them, or they were
    /// removed, and a container that runs could not see new ones.
    pub(crate) fn adopt(
        &self,
        key: &ContainerKey,
        owner: &ContainerOwner,
        shares: &[Share],
        throttled: &BTreeSet<GpuUuid>,
        turns: TurnPreferences,
    ) -> Result<Adoption, ContainerRegionError> {
        let directory = self.folder(key);
        // A region that exists keeps its policy.
        let spec = spec(&directory, shares, throttled, turns, RegionPolicy::default());
        let adoption = self.shares.adopt(key, owner.clone(), &spec, MissingFiles::Leave);
        adoption.map_err(|error| ContainerRegionError::new(owner.container.clone(), error))
    }

    /// Sets which launches wait for turns: those on GPUs with guaranteed compute.
    pub(crate) fn apply_turns(&self, throttled: &BTreeSet<GpuUuid>) {
        self.shares.apply_turns(throttled);
    }

    /// Sets whether copies wait for turns: see [`ManagedShares::set_throttle_copies`].
    pub(crate) fn set_throttle_copies(&self, throttle_copies: bool) {
        self.shares.set_throttle_copies(throttle_copies);
    }

    /// Charges containers for GPU time that they have not accounted for: see [`ManagedShares::charge_unaccounted`].
    pub(crate) fn charge_unaccounted(&self, found: &[UnaccountedTime<ContainerKey>]) {
        self.shares.charge_unaccounted(found);
    }

    /// Changes the amounts of a prepared container, which may run: see [`ManagedShares::resize`].
    pub(crate) fn resize(
        &self,
        key: &ContainerKey,
        shares: &[Share],
        throttled: &BTreeSet<GpuUuid>,
    ) -> Result<(), ContainerRegionError> {
        self.shares.resize(key, shares, throttled).map_err(|error| self.with_container(key, error))
    }

    /// Sets the limits back to what they were, whatever the container uses: see [`ManagedShares::restore`].
    pub(crate) fn restore(
        &self,
        key: &ContainerKey,
        shares: &[Share],
        throttled: &BTreeSet<GpuUuid>,
    ) -> Result<(), ContainerRegionError> {
        match self.shares.restore(key, shares, throttled) {
            // Without a region nothing was changed.
            Ok(()) | Err(ShareError::NotFound) => Ok(()),
            Err(error) => Err(self.with_container(key, error)),
        }
    }

    /// Adds the container's name to the error of a change.
    fn with_container(&self, key: &ContainerKey, error: ShareError) -> ContainerRegionError {
        match (self.shares.get(key), error) {
            (_, ShareError::NotFound) => ContainerRegionError::Missing(self.folder(key)),
            (Some(live), error) => ContainerRegionError::new(live.owner.container, error),
            (None, error) => ContainerRegionError::Share(error),
        }
    }

    /// Removes the region of a container that has ended for good.
    pub(crate) fn remove(&self, key: &ContainerKey) -> Result<(), ShareError> {
        self.shares.release(key);
        remove_region(&self.folder(key))
    }
}

/// Returns the spec of a container's region, whose files belong to the agent.
fn spec<'a>(
    directory: &'a Path,
    shares: &'a [Share],
    throttled: &'a BTreeSet<GpuUuid>,
    turns: TurnPreferences,
    policy: RegionPolicy,
) -> ShareSpec<'a> {
    let usage_owner = rustix::process::geteuid().as_raw();
    ShareSpec { directory, usage_owner, shares, throttled, turns, policy }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partage_core::model::Cores;
    use partage_enforce::error_chain::describe;
    use partage_region::RegionTenant;

    const TURNS: TurnPreferences = TurnPreferences { low_latency: true, priority: 3 };

    const GPU: &str = "GPU-01234567-89ab-cdef-0123-456789abcdef";

    fn share(mib: u64) -> Vec<Share> {
        let memory_bytes = Some(Bytes(mib << 20));
        vec![Share { gpu: GPU.into(), memory_bytes, cores: Cores::percent(30), ceiling: None, whole: false }]
    }

    fn owner() -> ContainerOwner {
        ContainerOwner { pod: "u".into(), container: "main".into() }
    }

    /// A node with one container, which an earlier agent prepared with 1000 MiB.
    struct Fixture {
        folder: tempfile::TempDir,
        key: ContainerKey,
        throttled: BTreeSet<GpuUuid>,
    }

    impl Fixture {
        fn new() -> Fixture {
            let fixture = Fixture {
                folder: tempfile::tempdir().unwrap(),
                key: ContainerKey("a".into()),
                throttled: BTreeSet::from([GPU.into()]),
            };
            fixture.prepare(&fixture.restart(), 1000).unwrap();
            fixture
        }

        /// The regions of an agent that has just started.
        fn restart(&self) -> ContainerRegions {
            let contexts = ContextSizes::read(self.folder.path().join("contexts.json"), "550");
            ContainerRegions::new(&self.folder.path().join("regions"), contexts).unwrap()
        }

        fn prepare(&self, regions: &ContainerRegions, mib: u64) -> Result<(), ContainerRegionError> {
            regions.prepare(&self.key, &owner(), &share(mib), &self.throttled, TURNS, RegionPolicy::default())
        }

        fn adopt(&self, regions: &ContainerRegions, mib: u64) -> Adoption {
            regions.adopt(&self.key, &owner(), &share(mib), &self.throttled, TURNS).unwrap()
        }
    }

    /// The limit that the container's processes go by, in MiB.
    fn limit(regions: &ContainerRegions, key: &ContainerKey) -> u64 {
        regions.live()[key].region().unwrap().owner().share(0).unwrap().memory >> 20
    }

    #[test]
    fn refused_resize_names_the_container() {
        let fixture = Fixture::new();
        let regions = fixture.restart();
        fixture.adopt(&regions, 1000);
        let tenant = RegionTenant::attach(&regions.folder(&fixture.key)).unwrap();
        tenant.reserve(0, 800 << 20).unwrap();
        let error = regions.resize(&fixture.key, &share(500), &fixture.throttled).unwrap_err().to_string();
        assert_eq!(
            error,
            "container main uses 800 MiB, which is more than 500 MiB: free memory in the program first"
        );
        assert_eq!(limit(&regions, &fixture.key), 1000);
        assert!(regions.live()[&fixture.key].shares == share(1000));
        regions.restore(&fixture.key, &share(500), &fixture.throttled).unwrap();
        assert_eq!(limit(&regions, &fixture.key), 500);
    }

    #[test]
    fn running_container_with_an_unknown_layout_keeps_its_limits() {
        use std::os::unix::fs::FileExt;
        let fixture = Fixture::new();
        let folder = fixture.folder.path().join("regions/a");
        let tenant = RegionTenant::attach(&folder).unwrap();
        for name in [partage_region::LIMITS_FILE, partage_region::USAGE_FILE] {
            let file = fs::File::options().write(true).open(folder.join(name)).unwrap();
            file.write_all_at(&4_u32.to_le_bytes(), 8).unwrap();
        }
        let regions = fixture.restart();
        let adoption = fixture.adopt(&regions, 2000);
        assert!(
            matches!(&adoption, Adoption::Unmanaged { reason } if reason.contains("layout 4")),
            "{adoption:?}"
        );
        assert!(regions.live()[&fixture.key].region().is_none());
        let error = regions.resize(&fixture.key, &share(500), &fixture.throttled).unwrap_err().to_string();
        assert!(error.contains("container main keeps its current limits"), "{error}");
        assert!(error.contains("limits has layout 4") && error.contains("layouts 1 to 3"), "{error}");
        regions.restore(&fixture.key, &share(500), &fixture.throttled).unwrap();
        let error = describe(&fixture.prepare(&regions, 1000).unwrap_err());
        assert!(error.contains("kubelet retries automatically"), "{error}");
        assert!(error.contains("still use the region"), "{error}");
        assert!(error.contains("limits has layout 4"), "{error}");
        drop(tenant);
        fixture.prepare(&regions, 1000).unwrap();
        assert_eq!(limit(&regions, &fixture.key), 1000);
    }

    #[test]
    fn region_in_use_or_of_another_version_is_kept() {
        use std::os::unix::fs::FileExt;
        let fixture = Fixture::new();
        let regions = fixture.restart();
        assert!(!regions.must_be_kept(&fixture.key));
        let tenant = RegionTenant::attach(&regions.folder(&fixture.key)).unwrap();
        assert!(regions.must_be_kept(&fixture.key), "a process uses it");
        drop(tenant);
        let set_version = |name: &str| {
            let path = regions.folder(&fixture.key).join(name);
            fs::File::options()
                .write(true)
                .open(path)
                .unwrap()
                .write_all_at(&4_u32.to_le_bytes(), 8)
                .unwrap();
        };
        set_version(partage_region::USAGE_FILE);
        assert!(!regions.must_be_kept(&fixture.key), "its container can write that");
        set_version(partage_region::LIMITS_FILE);
        assert!(regions.must_be_kept(&fixture.key));
    }

    #[test]
    fn oversubscription_is_in_the_region_and_survives_a_restart_of_the_agent() {
        let fixture = Fixture::new();
        fs::remove_file(fixture.folder.path().join("regions/a").join(partage_region::LIMITS_FILE)).unwrap();
        let policy = RegionPolicy { oversubscribe: true, ..RegionPolicy::default() };
        let of = |regions: &ContainerRegions| regions.live()[&fixture.key].region().unwrap().owner().policy();
        let regions = fixture.restart();
        regions.prepare(&fixture.key, &owner(), &share(1000), &fixture.throttled, TURNS, policy).unwrap();
        assert_eq!(of(&regions), policy);
        drop(regions);
        let regions = fixture.restart();
        fixture.adopt(&regions, 1000);
        assert_eq!(of(&regions), policy);
        // The container starts again, with the region that is there.
        regions.prepare(&fixture.key, &owner(), &share(1000), &fixture.throttled, TURNS, policy).unwrap();
        assert_eq!(of(&regions), policy);
    }

    #[test]
    fn region_without_files_is_created_with_the_next_start() {
        let fixture = Fixture::new();
        let limits = fixture.folder.path().join("regions/a").join(partage_region::LIMITS_FILE);
        fs::remove_file(&limits).unwrap();
        let regions = fixture.restart();
        fixture.adopt(&regions, 1000);
        assert!(regions.live().is_empty() && !limits.exists() && !regions.is_whole(&fixture.key));
        let refused = regions.resize(&fixture.key, &share(500), &fixture.throttled);
        assert!(
            matches!(refused, Err(ContainerRegionError::Missing(_))),
            "a running container has the old limits"
        );
        fixture.prepare(&regions, 500).unwrap();
        assert_eq!(limit(&regions, &fixture.key), 500);
        assert_eq!(regions.on_disk(), std::slice::from_ref(&fixture.key));
        regions.remove(&fixture.key).unwrap();
        assert!(regions.live().is_empty() && regions.on_disk().is_empty());
    }

    #[test]
    fn region_that_cannot_be_removed_is_an_error() {
        let fixture = Fixture::new();
        let regions = fixture.restart();
        fixture.adopt(&regions, 1000);
        let directory = fixture.folder.path().join("regions");
        fs::remove_dir_all(&directory).unwrap();
        fs::write(&directory, "").unwrap();
        let error = describe(&regions.remove(&fixture.key).unwrap_err());
        assert!(error.contains("cannot remove") && error.contains("regions/a"), "{error}");
        assert!(regions.live().is_empty(), "the container has ended");
    }
}
