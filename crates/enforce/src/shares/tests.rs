use super::*;
use partage_core::model::Cores;
use partage_region::RegionTenant;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};

const GPU: &str = "GPU-01234567-89ab-cdef-0123-456789abcdef";
const OTHER_GPU: &str = "GPU-11234567-89ab-cdef-0123-456789abcdef";
const KEY: &str = "tenant";

fn share_of(gpu: &str, mebibytes: u64) -> Share {
    let memory_bytes = Some(Bytes(mebibytes << 20));
    Share { gpu: gpu.into(), memory_bytes, cores: Cores::percent(30), ceiling: None, whole: false }
}

fn share(mebibytes: u64) -> Vec<Share> {
    vec![share_of(GPU, mebibytes)]
}

/// A directory with the region of one tenant, which a daemon of this build prepared with 1000 MiB.
struct Fixture {
    folder: tempfile::TempDir,
    throttled: BTreeSet<GpuUuid>,
}

impl Fixture {
    fn new() -> Fixture {
        let fixture =
            Fixture { folder: tempfile::tempdir().unwrap(), throttled: BTreeSet::from([GPU.into()]) };
        fixture.prepare(&fixture.restart(), &share(1000)).unwrap();
        fixture
    }

    /// Returns the engine of a daemon that has just started.
    fn restart(&self) -> ManagedShares<String> {
        ManagedShares::new(ContextSizes::read(self.folder.path().join("contexts.json"), "550"))
    }

    fn directory(&self) -> PathBuf {
        self.folder.path().join("region")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory().join(name)
    }

    fn contents(&self) -> [Vec<u8>; 2] {
        [LIMITS_FILE, USAGE_FILE].map(|name| fs::read(self.file(name)).unwrap())
    }

    fn with_spec<T>(&self, shares: &[Share], run: impl FnOnce(&ShareSpec<'_>) -> T) -> T {
        run(&ShareSpec {
            directory: &self.directory(),
            usage_owner: rustix::process::geteuid().as_raw(),
            shares,
            throttled: &self.throttled,
            turns: TurnPreferences { low_latency: true, priority: 2 },
            policy: RegionPolicy::default(),
        })
    }

    fn prepare(&self, shares: &ManagedShares<String>, amounts: &[Share]) -> Result<(), ShareError> {
        self.with_spec(amounts, |spec| shares.prepare(&KEY.into(), (), spec))
    }

    fn adopt(&self, shares: &ManagedShares<String>, amounts: &[Share], missing: MissingFiles) -> Adoption {
        self.with_spec(amounts, |spec| shares.adopt(&KEY.into(), (), spec, missing).unwrap())
    }

    /// Writes a layout version that this build does not know into both files.
    fn make_layout_unknown(&self) {
        for name in [LIMITS_FILE, USAGE_FILE] {
            let file = fs::File::options().write(true).open(self.file(name)).unwrap();
            file.write_all_at(&4_u32.to_le_bytes(), 8).unwrap();
        }
    }
}

/// Returns the memory limit of a GPU in MiB, as processes of the tenant read it.
fn limit(shares: &ManagedShares<String>, gpu: usize) -> u64 {
    shares.region(&KEY.into()).unwrap().owner().share(gpu).unwrap().memory >> 20
}

#[test]
fn refused_resize_restores_the_old_limits() {
    let fixture = Fixture::new();
    let (shares, key) = (fixture.restart(), KEY.to_string());
    fixture.prepare(&shares, &share(1000)).unwrap();
    let tenant = RegionTenant::attach(&fixture.directory()).unwrap();
    tenant.reserve(0, 800 << 20).unwrap();
    let error = shares.resize(&key, &share(500), &fixture.throttled).unwrap_err();
    let expected = (Bytes(800 << 20), Bytes(500 << 20));
    assert!(
        matches!(error, ShareError::AboveLimit { used, limit } if (used, limit) == expected),
        "{error:?}"
    );
    assert_eq!((limit(&shares, 0), shares.get(&key).unwrap().shares), (1000, share(1000)));
    shares.resize(&key, &share(900), &fixture.throttled).unwrap();
    assert_eq!((limit(&shares, 0), shares.get(&key).unwrap().shares), (900, share(900)));
}

#[test]
fn resize_to_more_does_not_depend_on_the_tenants_own_report() {
    let fixture = Fixture::new();
    let (shares, key) = (fixture.restart(), KEY.to_string());
    fixture.prepare(&shares, &share(2000)).unwrap();
    fs::File::options().write(true).open(fixture.file(USAGE_FILE)).unwrap().set_len(16).unwrap();
    shares.resize(&key, &share(500), &fixture.throttled).unwrap_err();
    assert_eq!(limit(&shares, 0), 2000);
    shares.resize(&key, &share(3000), &fixture.throttled).unwrap();
    assert_eq!(limit(&shares, 0), 3000);
    shares.restore(&key, &share(1000), &fixture.throttled).unwrap();
    assert_eq!((limit(&shares, 0), shares.get(&key).unwrap().shares), (1000, share(1000)));
}

#[test]
fn running_tenant_with_an_unknown_layout_is_left_untouched() {
    let fixture = Fixture::new();
    let tenant = RegionTenant::attach(&fixture.directory()).unwrap();
    fixture.make_layout_unknown();
    let before = fixture.contents();
    let (shares, key) = (fixture.restart(), KEY.to_string());
    for missing in [MissingFiles::Leave, MissingFiles::Create] {
        let Adoption::Unmanaged { reason } = fixture.adopt(&shares, &share(2000), missing) else { panic!() };
        assert!(reason.contains("limits has layout 4") && reason.contains("layouts 1 to 3"), "{reason}");
    }
    assert!(fixture.contents() == before, "no byte is changed");
    assert!(shares.region(&key).is_none() && shares.get(&key).is_some());
    shares.apply_turns(&BTreeSet::new());
    let resized = shares.resize(&key, &share(500), &fixture.throttled);
    assert!(matches!(resized, Err(ShareError::Unmanaged { .. })), "{resized:?}");
    let extended = shares.extend(&key, &share_of(OTHER_GPU, 500), &fixture.throttled);
    assert!(matches!(extended, Err(ShareError::Unmanaged { .. })), "{extended:?}");
    shares.restore(&key, &share(500), &fixture.throttled).unwrap();
    assert!(tenant.reserve(0, 1001 << 20).is_err() && tenant.reserve(0, 1000 << 20).is_ok());
    // Its processes still run, so the region is not replaced even for a start.
    let prepared = fixture.prepare(&shares, &share(1000));
    assert!(matches!(prepared, Err(ShareError::StillInUse { .. })), "{prepared:?}");
    assert!(fixture.contents()[0] == before[0]);
    assert!(shares.get(&key).is_some(), "a tenant that still runs stays known");
    drop(tenant);
    fixture.prepare(&shares, &share(1000)).unwrap();
    assert_eq!(limit(&shares, 0), 1000);
}

#[test]
fn usage_that_its_tenant_damaged_stays_managed_and_is_replaced_at_the_next_start() {
    let fixture = Fixture::new();
    fs::File::options().write(true).open(fixture.file(USAGE_FILE)).unwrap().set_len(100).unwrap();
    let usage = || fs::read(fixture.file(USAGE_FILE)).unwrap();
    let shares = fixture.restart();
    assert_eq!(fixture.adopt(&shares, &share(1000), MissingFiles::Leave), Adoption::Managed);
    assert_eq!(usage().len(), 100, "a running tenant keeps its file");
    fs::create_dir(fixture.file("dev")).unwrap();
    fixture.prepare(&shares, &share(1000)).unwrap();
    assert!(usage().len() > 100 && !fixture.file("dev").exists());

    // The same without a restart of the daemon: the handle was opened before.
    fs::File::options().write(true).open(fixture.file(USAGE_FILE)).unwrap().set_len(100).unwrap();
    fixture.prepare(&shares, &share(1000)).unwrap();
    assert!(usage().len() > 100 && RegionTenant::attach(&fixture.directory()).is_ok());
}

#[test]
fn damaged_limits_are_left_to_a_running_tenant_and_replaced_for_one_that_starts() {
    let fixture = Fixture::new();
    let elsewhere = fixture.folder.path().join("elsewhere");
    fs::rename(fixture.file(LIMITS_FILE), &elsewhere).unwrap();
    symlink(&elsewhere, fixture.file(LIMITS_FILE)).unwrap();
    let before = fs::read(&elsewhere).unwrap();
    let shares = fixture.restart();
    let adoption = fixture.adopt(&shares, &share(500), MissingFiles::Create);
    assert!(matches!(adoption, Adoption::Unmanaged { .. }), "{adoption:?}");
    fixture.prepare(&shares, &share(500)).unwrap();
    assert_eq!(limit(&shares, 0), 500);
    assert!(fs::read(&elsewhere).unwrap() == before, "the file behind the link is not touched");
}

#[test]
fn link_in_place_of_the_directory_is_replaced_and_not_followed() {
    let fixture = Fixture::new();
    let elsewhere = fixture.folder.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join("file"), "of another program").unwrap();
    fs::remove_dir_all(fixture.directory()).unwrap();
    symlink(&elsewhere, fixture.directory()).unwrap();
    let shares = fixture.restart();
    fixture.prepare(&shares, &share(500)).unwrap();
    assert!(fs::symlink_metadata(fixture.directory()).unwrap().is_dir());
    assert_eq!(fs::read_to_string(elsewhere.join("file")).unwrap(), "of another program");
    assert!(!elsewhere.join(LIMITS_FILE).exists());
}

#[test]
fn missing_files_are_left_or_created_as_the_front_end_chooses() {
    let fixture = Fixture::new();
    let (shares, key) = (fixture.restart(), KEY.to_string());
    fs::remove_file(fixture.file(LIMITS_FILE)).unwrap();
    assert_eq!(fixture.adopt(&shares, &share(1000), MissingFiles::Leave), Adoption::Missing);
    assert!(shares.get(&key).is_none() && !fixture.file(LIMITS_FILE).exists());
    let resized = shares.resize(&key, &share(500), &fixture.throttled);
    assert!(matches!(resized, Err(ShareError::NotFound)), "{resized:?}");
    fs::remove_dir_all(fixture.directory()).unwrap();
    assert_eq!(fixture.adopt(&shares, &share(700), MissingFiles::Create), Adoption::Created);
    assert_eq!(limit(&shares, 0), 700);
    assert_eq!(fixture.adopt(&shares, &share(700), MissingFiles::Create), Adoption::Managed);
}

#[test]
fn region_of_another_user_is_not_adopted() {
    let fixture = Fixture::new();
    let (shares, directory) = (fixture.restart(), fixture.directory());
    let (amounts, other) = (share(1000), rustix::process::geteuid().as_raw() + 1);
    let spec = ShareSpec {
        directory: &directory,
        usage_owner: other,
        shares: &amounts,
        throttled: &fixture.throttled,
        turns: TurnPreferences::default(),
        policy: RegionPolicy::default(),
    };
    // Any user can put files into this directory.
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o777)).unwrap();
    let adoption = shares.adopt(&KEY.into(), (), &spec, MissingFiles::Leave).unwrap();
    assert!(
        matches!(&adoption, Adoption::Unmanaged { reason } if reason.contains("belongs to user")),
        "{adoption:?}"
    );
}

#[test]
fn attached_gpu_is_limited_and_survives_a_restart() {
    let fixture = Fixture::new();
    let key = KEY.to_string();
    let tenant = RegionTenant::attach(&fixture.directory()).unwrap();
    {
        let shares = fixture.restart();
        fixture.adopt(&shares, &share(1000), MissingFiles::Leave);
        assert_eq!(shares.extend(&key, &share_of(OTHER_GPU, 300), &fixture.throttled).unwrap(), 1);
        assert_eq!(shares.get(&key).unwrap().shares, [share_of(GPU, 1000), share_of(OTHER_GPU, 300)]);
        let again = shares.extend(&key, &share_of(OTHER_GPU, 400), &fixture.throttled);
        assert!(matches!(again, Err(ShareError::Region(RegionError::DuplicateGpu(1)))), "{again:?}");
        assert_eq!(shares.get(&key).unwrap().shares.len(), 2);
    }
    assert!(tenant.reserve(1, 301 << 20).is_err() && tenant.reserve(1, 300 << 20).is_ok());
    let shares = fixture.restart();
    let adoption = fixture.adopt(&shares, &share(700), MissingFiles::Leave);
    assert_eq!(adoption, Adoption::Managed);
    let region = shares.region(&key).unwrap();
    assert_eq!((region.owner().gpus(), region.owner().base_gpus()), (2, 1));
    assert_eq!((limit(&shares, 0), limit(&shares, 1)), (700, 300));
}

#[test]
fn turns_are_set_for_all_regions_and_end_with_the_share() {
    let fixture = Fixture::new();
    let (shares, key) = (fixture.restart(), KEY.to_string());
    fixture.prepare(&shares, &share(1000)).unwrap();
    let region = shares.region(&key).unwrap();
    let throttled = || region.owner().share(0).unwrap().waits_for_turns;
    assert!(throttled());
    shares.apply_turns(&BTreeSet::new());
    assert!(!throttled());
    shares.apply_turns(&fixture.throttled);
    assert!(throttled());
    assert!(shares.release(&key) && !shares.release(&key));
    shares.apply_turns(&BTreeSet::new());
    assert!(throttled(), "a released region is not changed");
    assert!(has_files(&fixture.directory()), "the front end removes the files");
    remove_region(&fixture.directory()).unwrap();
    remove_region(&fixture.directory()).unwrap();
    assert!(!fixture.directory().exists());
}

#[test]
fn turn_preferences_are_in_the_limits_and_survive_changes() {
    let fixture = Fixture::new();
    let (shares, key) = (fixture.restart(), KEY.to_string());
    assert_eq!(fixture.adopt(&shares, &share(1000), MissingFiles::Leave), Adoption::Managed);
    let region = shares.region(&key).unwrap();
    let preferred = |gpu: usize| {
        let share = region.owner().share(gpu).unwrap();
        (share.low_latency, share.priority)
    };
    assert_eq!(preferred(0), (true, 2));
    shares.apply_turns(&BTreeSet::new());
    shares.resize(&key, &share(500), &fixture.throttled).unwrap();
    shares.extend(&key, &share_of(OTHER_GPU, 300), &fixture.throttled).unwrap();
    assert_eq!((preferred(0), preferred(1)), ((true, 2), (true, 2)));
}

#[test]
fn copies_are_throttled_in_all_regions_while_the_setting_is_on() {
    let fixture = Fixture::new();
    let (shares, key) = (fixture.restart(), KEY.to_string());
    fixture.prepare(&shares, &share(1000)).unwrap();
    let policy = |shares: &ManagedShares<String>| shares.region(&key).unwrap().owner().policy();
    assert!(!policy(&shares).throttle_copies);
    let region = shares.region(&key).unwrap();
    region.owner().set_policy(RegionPolicy { oversubscribe: true, ..RegionPolicy::default() });
    shares.set_throttle_copies(true);
    assert_eq!(policy(&shares), RegionPolicy { oversubscribe: true, throttle_copies: true });
    // A daemon that starts later has its own setting.
    for throttle_copies in [true, false] {
        let shares = fixture.restart();
        shares.set_throttle_copies(throttle_copies);
        assert_eq!(fixture.adopt(&shares, &share(1000), MissingFiles::Leave), Adoption::Managed);
        assert_eq!(policy(&shares), RegionPolicy { oversubscribe: true, throttle_copies });
    }
}

#[test]
fn same_key_of_another_owner_is_prepared_again() {
    let fixture = Fixture::new();
    let shares: ManagedShares<String, u32> =
        ManagedShares::new(ContextSizes::read(fixture.folder.path().join("contexts.json"), "550"));
    let key = KEY.to_string();
    for owner in [1, 2] {
        fixture.with_spec(&share(1000), |spec| shares.prepare(&key, owner, spec)).unwrap();
        assert_eq!(shares.get(&key).unwrap().owner, owner);
    }
    let first = shares.region(&key).unwrap();
    fixture.with_spec(&share(1000), |spec| shares.prepare(&key, 2, spec)).unwrap();
    assert!(
        Arc::ptr_eq(&first, &shares.region(&key).unwrap()),
        "nothing is opened again for the same tenant"
    );
}
