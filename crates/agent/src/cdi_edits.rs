//! The CDI edits of containers: device nodes, libraries, programs, the region and the environment.
//!
//! | in the container | content |
//! |---|---|
//! | the loader's directories, `/usr/lib/<triple>` and `/usr/lib64` | the stand-ins under every name of the two libraries, and the driver's other libraries |
//! | `/usr/local/nvidia/{lib64,bin}` | the same files for users of other systems, as links into the above |
//! | `/usr/local/partage/driver/` | the driver's own two libraries, which only the stand-ins load |
//! | `/usr/local/partage/region/` | `limits`, read-only, and `usage` |
//! | `/usr/bin`, `/lib/firmware/nvidia/<version>` | the driver's programs and firmware |
//!
//! Libraries, programs and firmware are in one CDI spec that all containers share, and that changes only with the driver or the
//! shim. Device nodes, region and environment are in a small spec of the container's own.
//!
//! The loader of any glibc searches one of its two directories after everything else, regardless of the environment, so no
//! variable, no hook and no loader cache is needed. `/usr/lib` itself belongs to musl, and gets nothing. Files that enforcement
//! depends on are mounted one by one: a runtime mounts the path with more components later, so a volume of the pod on one of
//! these directories is below them. Paths are compared as they are written: through a symbolic link of its image a pod can
//! mount a volume over them, which only the bypass audit detects.

use partage_core::model::{Gpu, GpuUuid, Node, Share};
use partage_enforce::libraries::{LibraryBuild, LibraryError, LibraryInstaller, StandInPaths};
use partage_host::atomic_file::sync_directory;
use partage_host::cdi::{CdiDeviceNode, CdiEdits, CdiMount};
use partage_host::driver::container_files::{self, DeviceNodes, DriverFiles};
use partage_host::driver::{self, InstalledDriver};
use partage_host::host_root::HostRoot;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// The library directories of glibc's loader: on Debian and its derivatives, and on other distributions.
const LOADER_DIRS: [&str; 2] = [
    if cfg!(target_arch = "aarch64") { "/usr/lib/aarch64-linux-gnu" } else { "/usr/lib/x86_64-linux-gnu" },
    "/usr/lib64",
];
/// The directory of the driver's programs.
const PROGRAMS_DIR: &str = "/usr/bin";
/// The directory of libraries and programs on other systems.
const NVIDIA_DIR: &str = "/usr/local/nvidia";
/// The paths of the driver's own two libraries. Not under their sonames: a search path of the loader must not find them.
const REAL_CUDA: &str = "/usr/local/partage/driver/cuda";
const REAL_NVML: &str = "/usr/local/partage/driver/nvml";
/// The directory of the region.
const REGION_DIR: &str = "/usr/local/partage/region";
/// The directory of the driver's firmware, with one directory for each version.
const FIRMWARE_DIR: &str = "/lib/firmware/nvidia";

/// The directory of the libraries in a build's directory.
const LIBRARIES: &str = "lib64";
/// The directory of the links to programs in a build's directory.
const LINKS: &str = "bin";

/// The variable by which Triton, and so `torch.compile`, finds `libcuda.so.1`. Without it, Triton uses the loader cache of the
/// image, which does not have the mounted files.
const TRITON_VARIABLE: &str = "TRITON_LIBCUDA_PATH";
/// The variable and value that make NVIDIA's runtime add no GPUs.
const NO_NVIDIA_DEVICES: (&str, &str) = ("NVIDIA_VISIBLE_DEVICES", "void");

/// Mount options of read-only files that can be executed or loaded.
const READ_EXEC: [&str; 4] = ["ro", "nosuid", "nodev", "bind"];
/// Mount options of read-only data.
const READ_DATA: [&str; 5] = ["ro", "nosuid", "nodev", "noexec", "bind"];
/// Mount options of data that the container writes.
const WRITE_DATA: [&str; 5] = ["rw", "nosuid", "nodev", "noexec", "bind"];

/// A library of the driver that no longer exists.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} is missing: the driver was updated or removed", path.display())]
pub struct MissingDriverFile {
    path: PathBuf,
}

/// Why the edits of a container cannot be computed. No container starts with less than was granted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CdiEditError {
    /// The device node of a granted GPU is missing.
    #[error(
        "/dev/nvidia{minor} of GPU {uuid} is missing on the node: run `nvidia-modprobe -c {minor}` there; kubelet retries automatically"
    )]
    GpuNode {
        /// The minor number of the GPU.
        minor: u32,
        /// The UUID of the GPU, as NVML reports it.
        uuid: GpuUuid,
    },
    /// A device node that all containers need is missing.
    #[error(transparent)]
    ControlNode(#[from] container_files::MissingDeviceNode),
}

/// The driver's files and the stand-in libraries, which every container of this node gets.
#[derive(Clone, Debug)]
pub struct DriverBundle {
    root: HostRoot,
    files: DriverFiles,
    nodes: DeviceNodes,
    /// The simulated node's directory, if the driver is simulated.
    simulated: Option<PathBuf>,
    /// The stand-ins of this and of earlier builds.
    libraries: LibraryInstaller,
    /// The directory of the stand-ins for this shim and this driver.
    own: PathBuf,
}

/// The container that edits are computed for.
#[derive(Clone, Copy, Debug)]
pub struct CdiTarget<'a> {
    /// The GPUs of the node, among them those of `shares`.
    pub node: &'a Node,
    /// The shares that the container was granted; it sees no other GPUs.
    pub shares: &'a [Share],
    /// The directory of its region.
    pub region: &'a Path,
    /// The directory with the device files of the granted GPUs, and no others, if the driver is simulated.
    pub devices: Option<&'a Path>,
    /// Environment variables, which take precedence over the pod's own.
    pub env: &'a BTreeMap<String, String>,
    /// Whether NVIDIA's runtime may start the container: it must not add GPUs of its own.
    pub nvidia_runtime: bool,
}

impl DriverBundle {
    /// Checks that the driver's libraries are still where they were found: an update of the driver replaces them.
    pub fn check_driver_files(&self) -> Result<(), MissingDriverFile> {
        for library in [&self.files.cuda, &self.files.nvml] {
            if !self.root.at(&library.file).is_file() {
                return Err(MissingDriverFile { path: library.file.clone() });
            }
        }
        Ok(())
    }

    /// Finds the driver's files, and installs the stand-ins below `lib` (the same path on the host) unless that was done
    /// before for the same shim and driver. Earlier builds that containers use stay: see [`DriverBundle::stale`].
    pub fn install(
        root: &HostRoot,
        driver: &InstalledDriver,
        version: &str,
        lib: &Path,
    ) -> Result<DriverBundle, LibraryError> {
        let files = DriverFiles::find(root, driver, version);
        let mut bundle = DriverBundle {
            root: root.clone(),
            nodes: DeviceNodes::new(root),
            simulated: driver.simulated.clone(),
            libraries: LibraryInstaller::open(lib)?,
            own: PathBuf::new(),
            files,
        };
        let contents = contents(&bundle.files);
        let build = LibraryBuild { driver_version: &bundle.files.version, contents: &contents, stamp: None };
        bundle.own = bundle.libraries.install(&build, |folder| bundle.write(folder))?;
        Ok(bundle)
    }

    /// Writes the directory of a build: the stand-ins, and links to the driver's other libraries and programs.
    fn write(&self, folder: &Path) -> Result<(), LibraryError> {
        let made = |part: &str| {
            let part = folder.join(part);
            let done = fs::create_dir_all(&part)
                // Users of containers are not root.
                .and_then(|()| fs::set_permissions(&part, fs::Permissions::from_mode(0o755)));
            done.map(|()| part.clone()).map_err(LibraryError::io("create", &part))
        };
        let (libraries, links) = (made(LIBRARIES)?, made(LINKS)?);
        let paths = StandInPaths {
            region: Path::new(REGION_DIR),
            real_cuda: Path::new(REAL_CUDA),
            real_nvml: Path::new(REAL_NVML),
            version: Some(&self.files.version),
        };
        self.libraries.write_stand_ins(&libraries, &paths)?;
        let link = |file: PathBuf, to: PathBuf| symlink(to, &file).map_err(LibraryError::io("create", &file));
        for library in &self.files.libraries {
            // One name is mounted, and the others are links to it.
            let Some(mounted) = library.sonames().next() else { continue };
            for name in &library.names {
                link(libraries.join(name), Path::new(LOADER_DIRS[0]).join(mounted))?;
            }
        }
        for program in &self.files.programs {
            link(links.join(program.name), Path::new(PROGRAMS_DIR).join(program.name))?;
        }
        for folder in [&libraries, &links] {
            sync_directory(folder).map_err(LibraryError::io("persist", folder))?;
        }
        Ok(())
    }

    /// Returns the directories of earlier shims and drivers that no container uses: none of the host paths in `used` is in them,
    /// and no container has one of their files mounted. `used` has the paths of all CDI specs, which may be applied again until
    /// they are removed.
    pub fn stale(&self, used: &BTreeSet<PathBuf>) -> io::Result<Vec<PathBuf>> {
        let is_named = |folder: &Path| used.iter().any(|path| path.starts_with(self.root.host(folder)));
        // The directory has other entries, too.
        self.libraries.unused(&self.own, |folder| !folder.join(LIBRARIES).is_dir() || is_named(folder))
    }

    /// Returns everything that a container gets: shared and own edits in one. Fails if a device node of a granted GPU is missing: no
    /// container starts with less than was granted.
    pub fn edits(&self, container: &CdiTarget<'_>) -> Result<CdiEdits, CdiEditError> {
        let CdiEdits { env, device_nodes, mounts } = self.container_edits(container)?;
        let mounts = [self.shared_edits().mounts, mounts].concat();
        Ok(CdiEdits { env, device_nodes, mounts })
    }

    /// Returns what all containers of the node get: the stand-ins and the driver's files and programs. It changes only with the driver or
    /// the shim.
    pub fn shared_edits(&self) -> CdiEdits {
        let mounts = [self.libraries(), self.programs(), self.simulated_node()].concat();
        CdiEdits { mounts, ..CdiEdits::default() }
    }

    /// Returns what only this container gets: its device nodes, its region and its environment. Fails as [`DriverBundle::edits`] does.
    pub fn container_edits(&self, container: &CdiTarget<'_>) -> Result<CdiEdits, CdiEditError> {
        let mounts = [self.region(container), self.simulated_devices(container)].concat();
        Ok(CdiEdits { env: env(container), device_nodes: self.device_nodes(container)?, mounts })
    }

    /// Returns the host path of the directory of the stand-ins that [`DriverBundle::shared_edits`] mounts.
    pub fn libraries_dir(&self) -> PathBuf {
        self.root.host(&self.own)
    }

    /// Returns the device nodes of the granted GPUs, and those that all containers need.
    fn device_nodes(&self, container: &CdiTarget<'_>) -> Result<Vec<CdiDeviceNode>, CdiEditError> {
        if self.simulated.is_some() {
            return Ok(Vec::new());
        }
        let granted = |gpu: &&Gpu| container.shares.iter().any(|share| share.gpu == gpu.uuid);
        let gpu = |gpu: &Gpu| {
            let Gpu { minor, uuid, .. } = gpu;
            self.nodes.gpu(*minor).ok_or_else(|| CdiEditError::GpuNode { minor: *minor, uuid: uuid.clone() })
        };
        let mut nodes: Vec<container_files::HostDeviceNode> =
            container.node.gpus.iter().filter(granted).map(gpu).collect::<Result<_, _>>()?;
        nodes.extend(self.nodes.control()?);
        let node = |node: container_files::HostDeviceNode| CdiDeviceNode {
            host_path: (node.host != node.path).then_some(node.host),
            path: node.path,
        };
        Ok(nodes.into_iter().map(node).collect())
    }

    fn libraries(&self) -> Vec<CdiMount> {
        let mut mounts = Vec::new();
        let ours = self.own.join(LIBRARIES);
        let main = [
            (&self.files.cuda, driver::CUDA_LIBRARY, REAL_CUDA),
            (&self.files.nvml, driver::NVML_LIBRARY, REAL_NVML),
        ];
        for (library, soname, real) in main {
            for (folder, name) in
                LOADER_DIRS.iter().flat_map(|folder| library.names.iter().map(move |name| (folder, name)))
            {
                mounts.push(self.mount(&ours.join(soname), Path::new(folder).join(name), &READ_EXEC));
            }
            mounts.push(self.mount(&library.file, real.into(), &READ_EXEC));
        }
        for library in &self.files.libraries {
            for (folder, name) in
                LOADER_DIRS.iter().flat_map(|folder| library.sonames().map(move |name| (folder, name)))
            {
                mounts.push(self.mount(&library.file, Path::new(folder).join(name), &READ_EXEC));
            }
        }
        mounts.push(self.mount(&ours, Path::new(NVIDIA_DIR).join(LIBRARIES), &READ_EXEC));
        mounts
    }

    fn programs(&self) -> Vec<CdiMount> {
        let program = |program: &container_files::DriverProgram| {
            self.mount(&program.file, Path::new(PROGRAMS_DIR).join(program.name), &READ_EXEC)
        };
        let mut mounts: Vec<CdiMount> = self.files.programs.iter().map(program).collect();
        if !mounts.is_empty() {
            mounts.push(self.mount(&self.own.join(LINKS), Path::new(NVIDIA_DIR).join(LINKS), &READ_EXEC));
        }
        let folder = Path::new(FIRMWARE_DIR).join(&self.files.version);
        let named = self.files.firmware.iter().filter_map(|file| Some((file, file.file_name()?)));
        mounts.extend(named.map(|(file, name)| self.mount(file, folder.join(name), &READ_DATA)));
        mounts
    }

    fn region(&self, container: &CdiTarget<'_>) -> Vec<CdiMount> {
        let file = |name: &str, options: &[&str]| {
            self.mount(&container.region.join(name), Path::new(REGION_DIR).join(name), options)
        };
        vec![file(partage_region::LIMITS_FILE, &READ_DATA), file(partage_region::USAGE_FILE, &WRITE_DATA)]
    }

    /// Mounts the simulated node at its own path, without the right to execute: its libraries cannot be loaded from there.
    fn simulated_node(&self) -> Vec<CdiMount> {
        let node = self.simulated.iter();
        node.map(|node| self.mount(node, self.root.host(node), &WRITE_DATA)).collect()
    }

    /// Mounts the device files of the granted GPUs over those of the whole simulated node.
    fn simulated_devices(&self, container: &CdiTarget<'_>) -> Vec<CdiMount> {
        let devices = self.simulated.as_ref().zip(container.devices);
        let mount = |(node, devices): (&PathBuf, &Path)| {
            self.mount(devices, self.root.host(node).join("dev"), &READ_DATA)
        };
        devices.map(mount).into_iter().collect()
    }

    /// Returns a mount of a file that the agent sees at `source`.
    fn mount(&self, source: &Path, at: PathBuf, options: &[&str]) -> CdiMount {
        let options = options.iter().map(|option| (*option).to_string()).collect();
        CdiMount { host_path: self.root.host(source), container_path: at, options }
    }
}

/// Returns the container's environment. `NVIDIA_VISIBLE_DEVICES` is `void` instead of the UUIDs only if NVIDIA's runtime would act
/// on it: programs read the variable, too.
fn env(container: &CdiTarget<'_>) -> Vec<String> {
    let mut env = container.env.clone();
    env.entry(TRITON_VARIABLE.into()).or_insert_with(|| LOADER_DIRS[0].into());
    if container.nvidia_runtime {
        env.insert(NO_NVIDIA_DEVICES.0.into(), NO_NVIDIA_DEVICES.1.into());
    }
    env.iter().map(|(name, value)| format!("{name}={value}")).collect()
}

/// Describes what is in the directory of a build, besides the shim and for a version of the driver.
fn contents(files: &DriverFiles) -> String {
    let libraries = files.libraries.iter().map(|library| &library.names).collect::<Vec<_>>();
    let programs = files.programs.iter().map(|program| program.name).collect::<Vec<_>>();
    format!("{LOADER_DIRS:?} {REAL_CUDA} {REAL_NVML} {REGION_DIR} {libraries:?} {programs:?}")
}

#[cfg(test)]
mod tests;
