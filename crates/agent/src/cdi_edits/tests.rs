use super::*;
use partage_core::model::Bytes;
use partage_host::driver::OtherLibraries;
use tempfile::TempDir;

const VERSION: &str = "550.163.01";
const FOLDER: &str = LOADER_DIRS[0];

/// The other libraries of a data center driver.
const OTHERS: [&str; 30] = [
    "libEGL_nvidia.so.0",
    "libGLESv1_CM_nvidia.so.1",
    "libGLESv2_nvidia.so.2",
    "libGLX_nvidia.so.0",
    "libcudadebugger.so.1",
    "libnvcuvid.so.1",
    "libnvidia-allocator.so.1",
    "libnvidia-cfg.so.1",
    "libnvidia-eglcore.so",
    "libnvidia-encode.so.1",
    "libnvidia-fbc.so.1",
    "libnvidia-glcore.so",
    "libnvidia-glsi.so",
    "libnvidia-glvkspirv.so",
    "libnvidia-gpucomp.so",
    "libnvidia-gtk3.so",
    "libnvidia-ngx.so.1",
    "libnvidia-nvvm.so.4",
    "libnvidia-opencl.so.1",
    "libnvidia-opticalflow.so.1",
    "libnvidia-pkcs11-openssl3.so",
    "libnvidia-pkcs11.so",
    "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-rtcore.so",
    "libnvidia-sandboxutils.so.1",
    "libnvidia-tls.so",
    "libnvidia-vksc-core.so.1",
    "libnvidia-wayland-client.so",
    "libnvoptix.so.1",
    "libvdpau_nvidia.so.1",
];

/// A host with a complete driver, below a directory.
struct FakeHost {
    folder: TempDir,
    root: HostRoot,
}

impl FakeHost {
    fn new() -> FakeHost {
        let folder = tempfile::tempdir().unwrap();
        let host = FakeHost { root: HostRoot::new(folder.path().join("host")), folder };
        for name in ["libcuda.so.1", "libnvidia-ml.so.1"].iter().chain(&OTHERS) {
            let (plain, number) = name.rsplit_once(".so").unwrap();
            let file = format!("{plain}.so.{VERSION}");
            host.file(&format!("{FOLDER}/{file}"), &library());
            if !number.is_empty() {
                symlink(&file, host.at(&format!("{FOLDER}/{name}"))).unwrap();
            }
        }
        for program in ["nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nvidia-cuda-mps-control"] {
            host.file(&format!("/usr/bin/{program}"), b"");
        }
        host.file(&format!("/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"), b"");
        host.file(&format!("/lib/firmware/nvidia/{VERSION}/gsp_tu10x.bin"), b"");
        fs::create_dir_all(host.at("/dev")).unwrap();
        for name in ["nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"] {
            // Only root can create devices; a link to one works the same.
            symlink("/dev/null", host.at("/dev").join(name)).unwrap();
        }
        host
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.at(Path::new(path))
    }

    fn file(&self, path: &str, bytes: &[u8]) {
        let seen = self.at(path);
        fs::create_dir_all(seen.parent().unwrap()).unwrap();
        fs::write(&seen, bytes).unwrap();
        fs::set_permissions(&seen, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn lib(&self) -> PathBuf {
        self.folder.path().join("lib")
    }

    fn install(&self, version: &str) -> DriverBundle {
        let driver = InstalledDriver::find_in(&self.root).unwrap().unwrap();
        DriverBundle::install(&self.root, &driver, version, &self.lib()).unwrap()
    }
}

/// The beginning of a library for this architecture.
fn library() -> Vec<u8> {
    let machine: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
    [b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0".as_slice(), &machine.to_ne_bytes()].concat()
}

fn node() -> Node {
    let gpu = |minor: u32| Gpu {
        uuid: format!("GPU-{minor}").into(),
        minor,
        model: "Tesla T4".into(),
        memory_bytes: Bytes(15 << 30),
        numa: None,
        pci: None,
        withheld: None,
    };
    Node::new("node", (0..3).map(gpu).collect())
}

fn share(gpu: &str) -> Share {
    Share { gpu: gpu.into(), memory_bytes: None, cores: None, ceiling: None, whole: false }
}

fn edits(bundle: &DriverBundle, shares: &[Share], env: &[(&str, &str)], nvidia_runtime: bool) -> CdiEdits {
    tried(bundle, shares, env, nvidia_runtime).unwrap()
}

fn tried(
    bundle: &DriverBundle,
    shares: &[Share],
    env: &[(&str, &str)],
    nvidia_runtime: bool,
) -> Result<CdiEdits, CdiEditError> {
    let env = env.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
    bundle.edits(&container(&node(), shares, &env, nvidia_runtime))
}

fn container<'a>(
    node: &'a Node,
    shares: &'a [Share],
    env: &'a BTreeMap<String, String>,
    nvidia_runtime: bool,
) -> CdiTarget<'a> {
    CdiTarget {
        node,
        shares,
        region: Path::new("/run/partage/regions/0a"),
        devices: Some(Path::new("/run/partage/devices/0a")),
        env,
        nvidia_runtime,
    }
}

/// Returns the mounts at a path of the container.
fn at<'a>(edits: &'a CdiEdits, path: &str) -> Vec<&'a CdiMount> {
    edits.mounts.iter().filter(|mount| mount.container_path == Path::new(path)).collect()
}

#[test]
fn container_gets_the_stand_ins_and_the_driver_behind_them() {
    let host = FakeHost::new();
    let bundle = host.install(VERSION);
    let edits = edits(&bundle, &[share("GPU-1")], &[], false);
    let read = ["ro", "nosuid", "nodev", "bind"];
    let ours = bundle.own.join("lib64");
    for folder in [FOLDER, "/usr/lib64"] {
        for (plain, soname) in [("libcuda.so", "libcuda.so.1"), ("libnvidia-ml.so", "libnvidia-ml.so.1")] {
            for name in [plain, soname, &format!("{plain}.{VERSION}")] {
                let [mount] = at(&edits, &format!("{folder}/{name}"))[..] else { panic!("{folder} {name}") };
                assert_eq!(
                    (&mount.host_path, &mount.options[..]),
                    (&ours.join(soname), &read.map(String::from)[..])
                );
            }
        }
        let [video] = at(&edits, &format!("{folder}/libnvcuvid.so.1"))[..] else { panic!("{edits:?}") };
        assert_eq!(video.host_path, Path::new(&format!("{FOLDER}/libnvcuvid.so.{VERSION}")));
        assert_eq!(at(&edits, &format!("{folder}/libnvidia-glcore.so.{VERSION}")).len(), 1);
    }
    for (name, file) in [("cuda", "libcuda.so"), ("nvml", "libnvidia-ml.so")] {
        let [real] = at(&edits, &format!("/usr/local/partage/driver/{name}"))[..] else {
            panic!("{edits:?}")
        };
        assert_eq!(real.host_path, Path::new(&format!("{FOLDER}/{file}.{VERSION}")));
    }
    let [limits] = at(&edits, "/usr/local/partage/region/limits")[..] else { panic!("{edits:?}") };
    assert_eq!(limits.host_path, Path::new("/run/partage/regions/0a/limits"));
    assert_eq!(limits.options[0], "ro");
    let [usage] = at(&edits, "/usr/local/partage/region/usage")[..] else { panic!("{edits:?}") };
    assert_eq!(usage.options, ["rw", "nosuid", "nodev", "noexec", "bind"]);
    let firmware = format!("/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin");
    assert_eq!(at(&edits, &firmware).len(), 1);
    assert_eq!(at(&edits, "/usr/bin/nvidia-smi")[0].host_path, Path::new("/usr/bin/nvidia-smi"));
}

#[test]
fn mounts_have_different_container_paths() {
    let edits = edits(&FakeHost::new().install(VERSION), &[share("GPU-1")], &[], false);
    let places: BTreeSet<&Path> = edits.mounts.iter().map(|mount| mount.container_path.as_path()).collect();
    assert_eq!(places.len(), edits.mounts.len());
    // 60 libraries, 12 stand-ins, 2 libraries of the driver, 2 directories, 4 programs, 2 firmware, 2 of the region.
    assert_eq!(edits.mounts.len(), 84, "{places:#?}");
    // Not in musl's own directory, nor where a volume of the pod could cover them.
    assert!(places.iter().all(|place| place.parent() != Some(Path::new("/usr/lib"))));
    let written = edits.mounts.iter().filter(|mount| !mount.options.contains(&"ro".to_string()));
    assert_eq!(written.count(), 1);
    for mount in &edits.mounts {
        assert!(["nosuid", "nodev", "bind"].iter().all(|option| mount.options.contains(&option.to_string())));
    }
}

/// The container's own edits are small, whatever the driver has.
#[test]
fn shared_and_own_edits_make_the_complete_edits() {
    let host = FakeHost::new();
    let bundle = host.install(VERSION);
    let (node, shares, env) =
        (node(), [share("GPU-1")], BTreeMap::from([("A".to_string(), "b".to_string())]));
    let container = container(&node, &shares, &env, false);
    let (shared, own) = (bundle.shared_edits(), bundle.container_edits(&container).unwrap());
    assert_eq!((&shared.env[..], &shared.device_nodes[..]), (&[][..], &[][..]));
    let places: Vec<&Path> = own.mounts.iter().map(|mount| mount.container_path.as_path()).collect();
    assert_eq!(
        places,
        ["/usr/local/partage/region/limits", "/usr/local/partage/region/usage"].map(Path::new)
    );
    let complete = bundle.edits(&container).unwrap();
    assert_eq!((&complete.env, &complete.device_nodes), (&own.env, &own.device_nodes));
    assert_eq!(complete.mounts, [shared.mounts, own.mounts].concat());
}

#[test]
fn nvidia_directory_has_every_name_of_every_library() {
    let host = FakeHost::new();
    let bundle = host.install(VERSION);
    let edits = edits(&bundle, &[share("GPU-1")], &[], false);
    let [libraries] = at(&edits, "/usr/local/nvidia/lib64")[..] else { panic!("{edits:?}") };
    let [programs] = at(&edits, "/usr/local/nvidia/bin")[..] else { panic!("{edits:?}") };
    let to = |mount: &CdiMount, name: &str| fs::read_link(mount.host_path.join(name)).unwrap();
    // The target of a link is mounted in the container.
    for name in ["libnvcuvid.so.1", &format!("libnvcuvid.so.{VERSION}")] {
        assert_eq!(to(libraries, name), Path::new(FOLDER).join("libnvcuvid.so.1"), "{name}");
    }
    for (mount, folder) in [(libraries, LOADER_DIRS[0]), (programs, PROGRAMS_DIR)] {
        for entry in fs::read_dir(&mount.host_path).unwrap() {
            let file = entry.unwrap().path();
            match fs::read_link(&file) {
                Ok(link) if link.is_absolute() => {
                    assert!(
                        link.starts_with(folder) && at(&edits, link.to_str().unwrap()).len() == 1,
                        "{link:?}"
                    );
                }
                // A stand-in, or a link next to it.
                _ => assert!(file.is_file(), "{file:?}"),
            }
        }
    }
    assert_eq!(to(libraries, "libcuda.so"), Path::new("libcuda.so.1"));
    assert_eq!(fs::metadata(&libraries.host_path).unwrap().permissions().mode() & 0o777, 0o755);
}

#[test]
fn device_nodes_are_exactly_those_of_the_grant() {
    let host = FakeHost::new();
    let bundle = host.install(VERSION);
    let nodes = |shares: &[Share]| {
        let edits = edits(&bundle, shares, &[], false);
        edits.device_nodes.into_iter().map(|node| (node.path, node.host_path)).collect::<Vec<_>>()
    };
    let both = [share("GPU-2"), share("GPU-0"), share("GPU-2")];
    let dev = |name: &str| (Path::new("/dev").join(name), None);
    assert_eq!(nodes(&both), ["nvidia0", "nvidia2", "nvidiactl", "nvidia-uvm"].map(dev));
    assert_eq!(nodes(&[share("GPU-1")]), ["nvidia1", "nvidiactl", "nvidia-uvm"].map(dev));
    // A container that was granted two GPUs does not start with one.
    fs::remove_file(host.at("/dev/nvidia2")).unwrap();
    let refused = tried(&bundle, &both, &[], false).unwrap_err().to_string();
    assert_eq!(
        refused,
        "/dev/nvidia2 of GPU GPU-2 is missing on the node: run `nvidia-modprobe -c 2` there; kubelet retries automatically"
    );
}

#[test]
fn nvidia_visible_devices_is_void_only_for_an_nvidia_runtime() {
    let host = FakeHost::new();
    let bundle = host.install(VERSION);
    let env = [("A", "b=c"), ("NVIDIA_VISIBLE_DEVICES", "GPU-1")];
    let env = |runtime| edits(&bundle, &[share("GPU-1")], &env, runtime).env;
    let triton = format!("TRITON_LIBCUDA_PATH={FOLDER}");
    assert_eq!(env(false), ["A=b=c", "NVIDIA_VISIBLE_DEVICES=GPU-1", &triton]);
    assert_eq!(env(true), ["A=b=c", "NVIDIA_VISIBLE_DEVICES=void", &triton]);
    let chosen = [("TRITON_LIBCUDA_PATH", "/somewhere")];
    let env = edits(&bundle, &[], &chosen, true).env;
    assert_eq!(env, ["NVIDIA_VISIBLE_DEVICES=void", "TRITON_LIBCUDA_PATH=/somewhere"]);
}

#[test]
fn simulated_node_has_only_the_granted_gpus() {
    let host = FakeHost::new();
    let node = host.at("/var/lib/partage/simulated");
    let driver = InstalledDriver {
        cuda: node.join("lib/libcuda.so.1"),
        nvml: node.join("lib/libnvidia-ml.so.1"),
        simulated: Some(node.clone()),
        others: OtherLibraries::default(),
    };
    let bundle = DriverBundle::install(&host.root, &driver, VERSION, &host.lib()).unwrap();
    let edits = edits(&bundle, &[share("GPU-1")], &[], false);
    let simulated = "/var/lib/partage/simulated";
    let [whole] = at(&edits, simulated)[..] else { panic!("{edits:?}") };
    assert_eq!((whole.host_path.as_path(), whole.options[0].as_str()), (Path::new(simulated), "rw"));
    // The driver's own libraries must not be loaded from there.
    assert!(whole.options.contains(&"noexec".to_string()));
    let [devices] = at(&edits, "/var/lib/partage/simulated/dev")[..] else { panic!("{edits:?}") };
    assert_eq!(devices.host_path, Path::new("/run/partage/devices/0a"));
    assert_eq!(edits.device_nodes, []);
    // 12 stand-ins, 2 libraries of the driver, 2 directories, nvidia-smi, 2 of the region, 2 of the node.
    assert_eq!(edits.mounts.len(), 21);
}

#[test]
fn stand_ins_stay_until_no_container_uses_them() {
    let host = FakeHost::new();
    // What a killed agent left, and a directory of another component.
    fs::create_dir_all(host.lib().join(".550-0.unfinished/lib64")).unwrap();
    fs::create_dir_all(host.lib().join("other")).unwrap();
    let first = host.install(VERSION);
    let edited = |bundle: &DriverBundle| fs::metadata(bundle.own.join("lib64")).unwrap().modified().unwrap();
    let before = edited(&first);
    let again = host.install(VERSION);
    assert_eq!((&again.own, edited(&again)), (&first.own, before));
    assert!(!host.lib().join(".550-0.unfinished").exists());
    let used = edits(&first, &[], &[], false).mounts.into_iter().map(|mount| mount.host_path).collect();
    let updated = host.install("570.1");
    assert_ne!(updated.own, first.own);
    assert!(updated.stale(&used).unwrap().is_empty());
    // The CDI spec of a container with the shared device names the directory only.
    assert!(updated.stale(&[first.libraries_dir()].into()).unwrap().is_empty());
    assert_eq!(updated.stale(&BTreeSet::new()).unwrap(), std::slice::from_ref(&first.own));
    // Another program makes another build: its directory has links to the programs.
    host.file("/usr/bin/nvidia-cuda-mps-server", b"");
    let more = host.install("570.1");
    assert_eq!(more.stale(&BTreeSet::new()).unwrap().len(), 2);
}
