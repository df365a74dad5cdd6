//! The images of the bed: their contents, and what determines them.

use super::packages::{FetchedPackage, PackageSet};
use super::{ContainerImage, ImageLayer, system_files};
use crate::binaries::BuildPaths;
use crate::debian::{DebianSuites, DebianTools};
use crate::prerequisites::MissingPrerequisite;
use crate::process::{ProcessEnd, last_lines, run};
use crate::{digest, host_info};
use std::fs::{self, File};
use std::io::{self, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;

/// Increase this with every change of this module, or of what it calls, that changes an image.
const CACHE_FORMAT: &str = "1";

/// The search path of the images.
const SEARCH_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

const PAUSE_SOURCE: &str = include_str!("pause.c");
/// Without a build id, which would depend on the compiler.
const PAUSE_FLAGS: &[&str] = &["-static", "-Os", "-s", "-Wl,--build-id=none"];

/// A small Debian with shells, `su`, `ldconfig` and `ps`; glibc and no CUDA.
const DEBIAN_PACKAGES: PackageSet = PackageSet {
    wanted: &[
        "base-files",
        "bash",
        "coreutils",
        "dash",
        "findutils",
        "grep",
        "libc-bin",
        "libc6",
        "libgcc-s1",
        "libstdc++6",
        "login",
        "procps",
        "sed",
        "usr-is-merged",
        "util-linux",
    ],
    without: &["debconf", "dpkg", "init-system-helpers", "perl-base", "usr-is-merged"],
    elsewhere: None,
};

/// The C library of a newer release in `/usr/lib64`, where Fedora and its derivatives have it: the library with which a
/// 32-bit Debian runs 64-bit programs. And musl.
const OTHER_PACKAGES: PackageSet = PackageSet {
    wanted: if cfg!(target_arch = "x86_64") {
        &["libc6-amd64:i386", "lib64gcc-s1:i386", "musl"]
    } else {
        &["libc6", "libgcc-s1", "musl"]
    },
    without: &[],
    elsewhere: Some(DebianSuites {
        suites: &[("trixie", "main")],
        foreign: if cfg!(target_arch = "x86_64") { &["i386"] } else { &[] },
    }),
};

/// A program for musl. It has no start files, which would be glibc's.
const MUSL_SOURCE: &str = include_str!("musl.c");
const MUSL_FLAGS: &[&str] = &[
    "-O1",
    "-s",
    "-nostdlib",
    "-fno-stack-protector",
    "-Wl,--build-id=none",
    "-Wl,--no-as-needed",
    "-l:libc.so",
];
const MUSL_LOADER: &str =
    if cfg!(target_arch = "x86_64") { "/lib/ld-musl-x86_64.so.1" } else { "/lib/ld-musl-aarch64.so.1" };

/// An image of the test bed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BedImage {
    /// Holds the namespaces of a pod.
    Pause,
    /// One static program with many names; no libraries.
    Busybox,
    /// glibc, shells and the usual tools.
    Debian,
    /// Busybox with other C libraries: a newer glibc in `/usr/lib64`, and musl with a program for it,
    /// `musl-program`.
    Other,
}

/// The inputs and tools for building an image.
pub(super) struct ImageBuilder<'a> {
    pub(super) root: &'a Path,
    pub(super) busybox: &'a Path,
    pub(super) debian: &'a DebianTools<'a>,
    pub(super) stop: &'a AtomicBool,
}

impl BedImage {
    /// All images, the quick ones first.
    pub const ALL: [Self; 4] = [Self::Pause, Self::Busybox, Self::Debian, Self::Other];

    /// Returns the name that pods use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pause => "localhost/pause:bed",
            Self::Busybox => "localhost/busybox:bed",
            Self::Debian => "localhost/debian:bed",
            Self::Other => "localhost/other:bed",
        }
    }

    /// Returns the archive if it is built. Builds nothing.
    pub fn ready(self) -> Result<PathBuf, MissingPrerequisite> {
        self.ready_in(&BuildPaths::from_environment())
    }

    /// Returns the file name of the archive.
    pub(super) fn file(self) -> &'static str {
        match self {
            Self::Pause => "pause.oci.tar",
            Self::Busybox => "busybox.oci.tar",
            Self::Debian => "debian.oci.tar",
            Self::Other => "other.oci.tar",
        }
    }

    /// Returns the packages of the image, if it is made from packages.
    pub(super) fn packages(self) -> Option<&'static PackageSet> {
        match self {
            Self::Pause | Self::Busybox => None,
            Self::Debian => Some(&DEBIAN_PACKAGES),
            Self::Other => Some(&OTHER_PACKAGES),
        }
    }

    /// Returns a key over everything that determines its contents; `None` while its packages are not resolved.
    pub(super) fn key(
        self,
        root: &Path,
        busybox: impl FnOnce() -> Result<PathBuf, MissingPrerequisite>,
    ) -> Result<Option<String>, MissingPrerequisite> {
        let mut parts =
            vec![self.name().to_string(), CACHE_FORMAT.to_string(), host_info::architecture().to_string()];
        if let Some(packages) = self.packages() {
            let Some(packages) = packages.recorded(root) else { return Ok(None) };
            parts.extend(packages.into_iter().flat_map(|one| [one.name, one.version, one.sha256]));
        }
        match self {
            Self::Pause => {
                // The release identifies the compiler and its library.
                parts.extend([PAUSE_SOURCE.to_string(), PAUSE_FLAGS.join(" "), host_info::release()]);
            }
            Self::Busybox | Self::Other => {
                let busybox = busybox()?;
                let reading = MissingPrerequisite::io(format!("reading {}", busybox.display()));
                parts.push(digest::of_file(&busybox).map_err(reading)?.0);
                parts.extend(system_files::cache_key_parts(system_files::USER_FILES));
                if self == Self::Other {
                    parts.extend([MUSL_SOURCE.to_string(), MUSL_FLAGS.join(" "), host_info::release()]);
                }
            }
            Self::Debian => {
                parts.extend(system_files::cache_key_parts(system_files::USER_FILES));
                parts.extend(system_files::cache_key_parts(system_files::LOGIN_FILES));
            }
        }
        Ok(Some(digest::key(parts)))
    }

    /// Builds the image's layers and configuration.
    pub(super) fn make(self, builder: &ImageBuilder<'_>) -> Result<ContainerImage, MissingPrerequisite> {
        let image = ContainerImage::new(self.name())?.env("PATH", SEARCH_PATH);
        match self {
            Self::Pause => {
                Ok(image.layer(builder.pause_layer()?).entrypoint(&["/pause"]).user("65535:65535"))
            }
            Self::Busybox => Ok(image.layer(builder.busybox_layer()?).command(&["sh"])),
            Self::Debian => {
                let packages = builder.packages(
                    &DEBIAN_PACKAGES,
                    &DEBIAN_PACKAGES.recorded(builder.root).unwrap_or_default(),
                )?;
                let own = builder.debian_layer(&packages)?;
                Ok(image.layer(packages).layer(own).command(&["bash"]))
            }
            Self::Other => {
                let packages = builder
                    .packages(&OTHER_PACKAGES, &OTHER_PACKAGES.recorded(builder.root).unwrap_or_default())?;
                let musl = builder.musl_layer(&packages)?;
                Ok(image.layer(builder.busybox_layer()?).layer(packages).layer(musl).command(&["sh"]))
            }
        }
    }
}

impl ImageBuilder<'_> {
    /// Returns a layer with the files of packages.
    pub(super) fn packages(
        &self,
        set: &PackageSet,
        packages: &[FetchedPackage],
    ) -> Result<ImageLayer, MissingPrerequisite> {
        let mut layer = ImageLayer::new();
        let tar = self.debian.work.join("package.tar");
        for package in packages {
            self.debian.files(&set.path(self.root, package), &tar, &package.name)?;
            let file =
                File::open(&tar).map_err(MissingPrerequisite::io(format!("reading {}", tar.display())))?;
            layer.package(BufReader::new(file))?;
        }
        Ok(layer)
    }

    /// Returns a layer with what an installation would have created: users, homes, and the dynamic linker's cache.
    fn debian_layer(&self, packages: &ImageLayer) -> Result<ImageLayer, MissingPrerequisite> {
        let mut own = user_layer()?;
        system_files::add_files(&mut own, system_files::LOGIN_FILES)?;
        own.owner("/etc/shadow", 0, 42)?;
        if packages.contents("/usr/bin/mawk").is_some() {
            own.link("/usr/bin/awk", "mawk")?;
        }
        own.text("/etc/ld.so.cache", 0o644, self.linker_cache(packages)?)?;
        Ok(own)
    }

    /// Runs the image's own `ldconfig` on the image's libraries.
    fn linker_cache(&self, packages: &ImageLayer) -> Result<Vec<u8>, MissingPrerequisite> {
        let doing = || MissingPrerequisite::io("creating the cache of the dynamic linker");
        let (tree, ldconfig) = (self.debian.work.join("tree"), self.debian.work.join("ldconfig"));
        let wanted = |path: &str| {
            path.starts_with("usr/lib") || path.starts_with("etc/ld.so") || path.starts_with("lib")
        };
        packages.unpack(&tree, wanted).map_err(doing())?;
        // On Ubuntu the plain name is a wrapper script.
        let program = ["/usr/sbin/ldconfig.real", "/usr/sbin/ldconfig"];
        let program = program.iter().find_map(|path| packages.contents(path)).ok_or_else(|| {
            MissingPrerequisite::Failed {
                doing: "creating the cache of the dynamic linker".to_string(),
                message: "the packages have no ldconfig".to_string(),
            }
        })?;
        fs::write(&ldconfig, program).map_err(doing())?;
        fs::set_permissions(&ldconfig, fs::Permissions::from_mode(0o755)).map_err(doing())?;
        // The links are in the packages; only the cache is needed.
        self.run(Command::new(&ldconfig).args(["-X", "-r"]).arg(&tree), "ldconfig")?;
        fs::read(tree.join("etc/ld.so.cache")).map_err(doing())
    }

    fn busybox_layer(&self) -> Result<ImageLayer, MissingPrerequisite> {
        let mut layer = user_layer()?;
        layer.file("/usr/bin/busybox", 0o755, self.busybox)?.link("/usr/sbin", "bin")?;
        let applets = self.run(Command::new(self.busybox).arg("--list"), "busybox")?;
        for applet in applets.lines().filter(|applet| *applet != "busybox") {
            layer.link(&format!("/usr/bin/{applet}"), "busybox")?;
        }
        Ok(layer)
    }

    fn pause_layer(&self) -> Result<ImageLayer, MissingPrerequisite> {
        let (source, program) = (self.debian.work.join("pause.c"), self.debian.work.join("pause"));
        fs::write(&source, PAUSE_SOURCE)
            .map_err(MissingPrerequisite::io(format!("writing {}", source.display())))?;
        // Rust links with the same compiler driver.
        let mut compile = Command::new("cc");
        self.run(compile.args(PAUSE_FLAGS).arg("-o").arg(&program).arg(&source), "cc")?;
        let mut layer = ImageLayer::new();
        layer.file("/pause", 0o755, &program)?;
        Ok(layer)
    }

    /// Builds the program for musl, linked with the library in these packages.
    fn musl_layer(&self, packages: &ImageLayer) -> Result<ImageLayer, MissingPrerequisite> {
        let work = |name: &str| self.debian.work.join(name);
        let (tree, source, program) = (work("musl"), work("musl.c"), work("musl-program"));
        packages
            .unpack(&tree, |path| path.contains("musl"))
            .and_then(|()| fs::write(&source, MUSL_SOURCE))
            .map_err(MissingPrerequisite::io(format!("writing {}", source.display())))?;
        let library = tree.join(format!("usr/lib/{}-linux-musl", std::env::consts::ARCH));
        let mut compile = Command::new("cc");
        compile.args(MUSL_FLAGS).arg(format!("-Wl,--dynamic-linker={MUSL_LOADER}"));
        self.run(compile.arg("-L").arg(&library).arg("-o").arg(&program).arg(&source), "cc")?;
        let mut layer = ImageLayer::new();
        layer.file("/usr/bin/musl-program", 0o755, &program)?;
        Ok(layer)
    }

    fn run(&self, command: &mut Command, tool: &str) -> Result<String, MissingPrerequisite> {
        let failed = |message| MissingPrerequisite::Failed { doing: format!("running {tool}"), message };
        match run(command, &self.debian.work.join("image.log"), self.stop, None) {
            Ok(ProcessEnd::Succeeded(message)) => Ok(message),
            Ok(ProcessEnd::Failed(message)) => Err(failed(last_lines(&message))),
            Ok(ProcessEnd::Interrupted | ProcessEnd::TimedOut) => Err((self.debian.interrupted)()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(failed(
                "it is not installed; as root: apt-get install gcc libc6-dev; then try again".to_string(),
            )),
            Err(error) => Err(MissingPrerequisite::io(format!("running {tool}"))(error)),
        }
    }
}

/// Returns a layer with users, groups, homes and `/tmp`.
fn user_layer() -> Result<ImageLayer, MissingPrerequisite> {
    let mut layer = ImageLayer::new();
    system_files::add_files(&mut layer, system_files::USER_FILES)?;
    layer.folder("/root", 0o700)?.folder("/tmp", 0o1777)?;
    layer.folder("/home/user", 0o755)?.owner("/home/user", 1000, 1000)?;
    Ok(layer)
}
