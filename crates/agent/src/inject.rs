//! What a container gets through CDI: device nodes, libraries, programs, its region and its environment.
//!
//! | in the container | what |
//! |---|---|
//! | the loader's folders, `/usr/lib/<triple>` and `/usr/lib64` | the stand-ins under every name of the two libraries, and the driver's other libraries |
//! | `/usr/local/nvidia/{lib64,bin}` | the same once more, where users of other systems look; links into the above |
//! | `/usr/local/partage/driver/` | the driver's own two libraries, which only the stand-ins look for |
//! | `/usr/local/partage/region/` | `limits`, read-only, and `usage` |
//! | `/usr/bin`, `/lib/firmware/nvidia/<version>` | the driver's programs and firmware |
//!
//! Libraries, programs and firmware are in one CDI spec that all containers share, and that changes only with the driver or the shim. Device
//! nodes, region and environment are in a small spec of the container's own.
//!
//! The loader of any glibc looks into one of its two folders after everything else, whatever the environment says, so no
//! variable, no hook and no cache of the loader is needed. `/usr/lib` itself is musl's, and gets nothing. What limits
//! depend on is mounted file by file: a runtime mounts the path with more parts later, so a volume of the pod on one of these
//! folders lies below. Paths count as they are written: through a link of its image a volume can come to lie on top, which only
//! the audit sees.

use partage_core::model::{Gpu, Node, Share};
use partage_enforce::libraries::{LibraryBuild, LibraryError, LibraryInstaller, StandInPaths};
use partage_host::cdi::{DeviceNode, Edits, Mount};
use partage_host::driver::files::{self, Files, Nodes};
use partage_host::driver::{self, Driver};
use partage_host::files::sync_folder;
use partage_host::root::Root;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// Where the loader of every glibc looks: Debian's and its children's, and everybody else's.
const LOADER: [&str; 2] = [
    if cfg!(target_arch = "aarch64") { "/usr/lib/aarch64-linux-gnu" } else { "/usr/lib/x86_64-linux-gnu" },
    "/usr/lib64",
];
/// Where programs are.
const PROGRAMS: &str = "/usr/bin";
/// Where users of other systems look for libraries and programs.
const USUAL: &str = "/usr/local/nvidia";
/// Where the driver's own two libraries are. Not under their names: a path for the loader must not lead to them.
const REAL_CUDA: &str = "/usr/local/partage/driver/cuda";
const REAL_NVML: &str = "/usr/local/partage/driver/nvml";
/// Where the region is.
const REGION: &str = "/usr/local/partage/region";
/// Where firmware is looked for, below it by version.
const FIRMWARE: &str = "/lib/firmware/nvidia";

/// Parts of our folder.
const LIBRARIES: &str = "lib64";
const LINKS: &str = "bin";

/// Where Triton, and so `torch.compile`, looks for `libcuda.so.1`. Otherwise it believes the cache of the image's loader, which
/// does not know of what is mounted.
const TRITON: &str = "TRITON_LIBCUDA_PATH";
/// What an NVIDIA runtime takes as "touch nothing".
const VISIBLE: (&str, &str) = ("NVIDIA_VISIBLE_DEVICES", "void");

/// Read-only, and what is in it can be run or loaded.
const READ: [&str; 4] = ["ro", "nosuid", "nodev", "bind"];
/// Read-only data.
const DATA: [&str; 5] = ["ro", "nosuid", "nodev", "noexec", "bind"];
/// Data that the container writes.
const WRITE: [&str; 5] = ["rw", "nosuid", "nodev", "noexec", "bind"];

/// What every container of this node gets.
#[derive(Clone, Debug)]
pub struct Materials {
    root: Root,
    files: Files,
    nodes: Nodes,
    /// The simulated node, where the driver is one.
    simulated: Option<PathBuf>,
    /// The stand-ins of this and of earlier builds.
    libraries: LibraryInstaller,
    /// The folder of those for this shim and this driver.
    own: PathBuf,
}

/// One container.
#[derive(Clone, Copy, Debug)]
pub struct Container<'a> {
    /// The node's GPUs.
    pub node: &'a Node,
    /// What was granted.
    pub shares: &'a [Share],
    /// The folder of its region.
    pub region: &'a Path,
    /// Where the driver is simulated: a folder with the device files of the granted GPUs, and no others.
    pub devices: Option<&'a Path>,
    /// Variables. They win over the pod's own.
    pub env: &'a BTreeMap<String, String>,
    /// Whether an NVIDIA runtime may start the container: it must not add GPUs of its own.
    pub nvidia_runtime: bool,
}

impl Materials {
    /// Whether the driver's libraries are still where they were found: an update of the driver puts others in their place.
    pub fn is_there(&self) -> Result<(), String> {
        for library in [&self.files.cuda, &self.files.nvml] {
            if !self.root.at(&library.file).is_file() {
                return Err(format!("{} is gone: the driver was updated or removed", library.file.display()));
            }
        }
        Ok(())
    }

    /// Finds the driver's files, and installs the stand-ins below `lib` (the same path on the host) unless that was done
    /// before for the same shim and driver. What containers have of earlier builds stays: see [`Materials::stale`].
    pub fn gather(
        root: &Root,
        driver: &Driver,
        version: &str,
        lib: &Path,
    ) -> Result<Materials, LibraryError> {
        let files = Files::find(root, driver, version);
        let mut materials = Materials {
            root: root.clone(),
            nodes: Nodes::new(root),
            simulated: driver.simulated.clone(),
            libraries: LibraryInstaller::open(lib)?,
            own: PathBuf::new(),
            files,
        };
        let contents = contents(&materials.files);
        let build =
            LibraryBuild { driver_version: &materials.files.version, contents: &contents, stamp: None };
        materials.own = materials.libraries.install(&build, |folder| materials.write(folder))?;
        Ok(materials)
    }

    /// Writes the directory of a build: the stand-ins, and links to the driver's other libraries and programs.
    fn write(&self, folder: &Path) -> Result<(), LibraryError> {
        let made = |part: &str| {
            let part = folder.join(part);
            let done = fs::create_dir_all(&part)
                // Containers' users are not root.
                .and_then(|()| fs::set_permissions(&part, fs::Permissions::from_mode(0o755)));
            done.map(|()| part.clone()).map_err(LibraryError::io("create", &part))
        };
        let (libraries, links) = (made(LIBRARIES)?, made(LINKS)?);
        let paths = StandInPaths {
            region: Path::new(REGION),
            real_cuda: Path::new(REAL_CUDA),
            real_nvml: Path::new(REAL_NVML),
            version: Some(&self.files.version),
        };
        self.libraries.write_stand_ins(&libraries, &paths)?;
        let link = |file: PathBuf, to: PathBuf| symlink(to, &file).map_err(LibraryError::io("create", &file));
        for library in &self.files.libraries {
            // One name is mounted; all lead to it.
            let Some(mounted) = library.sonames().next() else { continue };
            for name in &library.names {
                link(libraries.join(name), Path::new(LOADER[0]).join(mounted))?;
            }
        }
        for program in &self.files.programs {
            link(links.join(program.name), Path::new(PROGRAMS).join(program.name))?;
        }
        for folder in [&libraries, &links] {
            sync_folder(folder).map_err(LibraryError::io("persist", folder))?;
        }
        Ok(())
    }

    /// Folders of earlier shims and drivers that no container uses: none of these paths of the host is in them, and no
    /// container has one of their files mounted. CDI files name the paths, and may be used again until they are removed.
    pub fn stale(&self, used: &BTreeSet<PathBuf>) -> io::Result<Vec<PathBuf>> {
        let is_named = |folder: &Path| used.iter().any(|path| path.starts_with(self.root.host(folder)));
        // The directory has other things in it, too.
        self.libraries.unused(&self.own, |folder| !folder.join(LIBRARIES).is_dir() || is_named(folder))
    }

    /// Returns everything that a container gets: shared and own edits in one. Fails if a device node of a granted GPU is missing: no
    /// container starts with less than was granted.
    pub fn edits(&self, container: &Container<'_>) -> Result<Edits, String> {
        let Edits { env, device_nodes, mounts } = self.container_edits(container)?;
        let mounts = [self.shared_edits().mounts, mounts].concat();
        Ok(Edits { env, device_nodes, mounts })
    }

    /// Returns what all containers of the node get: the stand-ins and the driver's files and programs. It changes only with the driver or
    /// the shim.
    pub fn shared_edits(&self) -> Edits {
        let mounts = [self.libraries(), self.programs(), self.simulated_node()].concat();
        Edits { mounts, ..Edits::default() }
    }

    /// Returns what only this container gets: its device nodes, its region and its environment. Fails as [`Materials::edits`] does.
    pub fn container_edits(&self, container: &Container<'_>) -> Result<Edits, String> {
        let mounts = [self.region(container), self.simulated_devices(container)].concat();
        Ok(Edits { env: env(container), device_nodes: self.device_nodes(container)?, mounts })
    }

    /// Returns the host path of the directory of the stand-ins that [`Materials::shared_edits`] mounts.
    pub fn libraries_dir(&self) -> PathBuf {
        self.root.host(&self.own)
    }

    /// The nodes of the granted GPUs, and those that everybody needs.
    fn device_nodes(&self, container: &Container<'_>) -> Result<Vec<DeviceNode>, String> {
        if self.simulated.is_some() {
            return Ok(Vec::new());
        }
        let granted = |gpu: &&Gpu| container.shares.iter().any(|share| share.gpu == gpu.uuid);
        let gpu = |gpu: &Gpu| {
            let Gpu { minor, uuid, .. } = gpu;
            self.nodes.gpu(*minor).ok_or_else(|| {
                format!(
                    "/dev/nvidia{minor} of GPU {uuid} is not on the node: run `nvidia-modprobe -c {minor}` there; kubelet tries again by itself"
                )
            })
        };
        let mut nodes: Vec<files::DeviceNode> =
            container.node.gpus.iter().filter(granted).map(gpu).collect::<Result<_, _>>()?;
        nodes.extend(self.nodes.control().map_err(|error| error.to_string())?);
        let node = |node: files::DeviceNode| DeviceNode {
            host_path: (node.host != node.path).then_some(node.host),
            path: node.path,
        };
        Ok(nodes.into_iter().map(node).collect())
    }

    fn libraries(&self) -> Vec<Mount> {
        let mut mounts = Vec::new();
        let ours = self.own.join(LIBRARIES);
        let main = [(&self.files.cuda, driver::CUDA, REAL_CUDA), (&self.files.nvml, driver::NVML, REAL_NVML)];
        for (library, soname, real) in main {
            for (folder, name) in
                LOADER.iter().flat_map(|folder| library.names.iter().map(move |name| (folder, name)))
            {
                mounts.push(self.mount(&ours.join(soname), Path::new(folder).join(name), &READ));
            }
            mounts.push(self.mount(&library.file, real.into(), &READ));
        }
        for library in &self.files.libraries {
            for (folder, name) in
                LOADER.iter().flat_map(|folder| library.sonames().map(move |name| (folder, name)))
            {
                mounts.push(self.mount(&library.file, Path::new(folder).join(name), &READ));
            }
        }
        mounts.push(self.mount(&ours, Path::new(USUAL).join(LIBRARIES), &READ));
        mounts
    }

    fn programs(&self) -> Vec<Mount> {
        let program = |program: &files::Program| {
            self.mount(&program.file, Path::new(PROGRAMS).join(program.name), &READ)
        };
        let mut mounts: Vec<Mount> = self.files.programs.iter().map(program).collect();
        if !mounts.is_empty() {
            mounts.push(self.mount(&self.own.join(LINKS), Path::new(USUAL).join(LINKS), &READ));
        }
        let folder = Path::new(FIRMWARE).join(&self.files.version);
        let named = self.files.firmware.iter().filter_map(|file| Some((file, file.file_name()?)));
        mounts.extend(named.map(|(file, name)| self.mount(file, folder.join(name), &DATA)));
        mounts
    }

    fn region(&self, container: &Container<'_>) -> Vec<Mount> {
        let file = |name: &str, options: &[&str]| {
            self.mount(&container.region.join(name), Path::new(REGION).join(name), options)
        };
        vec![file(partage_region::LIMITS, &DATA), file(partage_region::USAGE, &WRITE)]
    }

    /// Mounts the simulated node at its own path, without the right to execute: its libraries cannot be loaded from there.
    fn simulated_node(&self) -> Vec<Mount> {
        let node = self.simulated.iter();
        node.map(|node| self.mount(node, self.root.host(node), &WRITE)).collect()
    }

    /// Mounts the device files of the granted GPUs over those of the whole simulated node.
    fn simulated_devices(&self, container: &Container<'_>) -> Vec<Mount> {
        let devices = self.simulated.as_ref().zip(container.devices);
        let mount =
            |(node, devices): (&PathBuf, &Path)| self.mount(devices, self.root.host(node).join("dev"), &DATA);
        devices.map(mount).into_iter().collect()
    }

    /// A mount of something that we see.
    fn mount(&self, seen: &Path, at: PathBuf, options: &[&str]) -> Mount {
        let options = options.iter().map(|option| (*option).to_string()).collect();
        Mount { host_path: self.root.host(seen), container_path: at, options }
    }
}

/// The container's variables. `void` stands for the UUIDs only where somebody would act on them: programs read the variable, too.
fn env(container: &Container<'_>) -> Vec<String> {
    let mut env = container.env.clone();
    env.entry(TRITON.into()).or_insert_with(|| LOADER[0].into());
    if container.nvidia_runtime {
        env.insert(VISIBLE.0.into(), VISIBLE.1.into());
    }
    env.iter().map(|(name, value)| format!("{name}={value}")).collect()
}

/// Describes what is in the directory of a build, besides the shim and for a version of the driver.
fn contents(files: &Files) -> String {
    let libraries = files.libraries.iter().map(|library| &library.names).collect::<Vec<_>>();
    let programs = files.programs.iter().map(|program| program.name).collect::<Vec<_>>();
    format!("{LOADER:?} {REAL_CUDA} {REAL_NVML} {REGION} {libraries:?} {programs:?}")
}

#[cfg(test)]
mod tests;
