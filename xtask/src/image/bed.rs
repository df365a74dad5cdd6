//! The images of the bed: what is in each, and what decides it.

use super::packages::{Package, Packages};
use super::{Image, Layer, files};
use crate::binaries::Settings;
use crate::debian::{Debian, Suites};
use crate::missing::Missing;
use crate::process::{End, last_words, run};
use crate::{digest, machine};
use std::fs::{self, File};
use std::io::{self, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;

/// Goes up with every change of this module, or of what it calls, that changes an image.
const FORMAT: &str = "1";

/// The search path of the images.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

const PAUSE: &str = include_str!("pause.c");
/// No build id: it would be the same for the same compiler only.
const PAUSE_FLAGS: &[&str] = &["-static", "-Os", "-s", "-Wl,--build-id=none"];

/// A small Debian with shells, `su`, `ldconfig` and `ps`; glibc and no CUDA.
const DEBIAN: Packages = Packages {
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

/// The C library of a newer release, and where it can be had in the folders that Fedora's and its relatives' has it in: as what
/// a 32-bit Debian runs 64-bit programs with. And musl.
const OTHER: Packages = Packages {
    wanted: match cfg!(target_arch = "x86_64") {
        true => &["libc6-amd64:i386", "lib64gcc-s1:i386", "musl"],
        false => &["libc6", "libgcc-s1", "musl"],
    },
    without: &[],
    elsewhere: Some(Suites {
        suites: &[("trixie", "main")],
        foreign: if cfg!(target_arch = "x86_64") { &["i386"] } else { &[] },
    }),
};

/// A program for musl. It has no start files, which would be glibc's.
const MUSL: &str = include_str!("musl.c");
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
    /// Busybox with the C libraries of others: a newer glibc in `/usr/lib64`, and musl with a program for it, `musl-program`.
    Other,
}

/// What an image is made from and with.
pub(super) struct Bench<'a> {
    pub(super) root: &'a Path,
    pub(super) busybox: &'a Path,
    pub(super) debian: &'a Debian<'a>,
    pub(super) stop: &'a AtomicBool,
}

impl BedImage {
    /// All of them, the quick ones first.
    pub const ALL: [Self; 4] = [Self::Pause, Self::Busybox, Self::Debian, Self::Other];

    /// The name that a pod asks for.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pause => "localhost/pause:bed",
            Self::Busybox => "localhost/busybox:bed",
            Self::Debian => "localhost/debian:bed",
            Self::Other => "localhost/other:bed",
        }
    }

    /// The archive, where it is built. Looks, and builds nothing.
    pub fn ready(self) -> Result<PathBuf, Missing> {
        self.ready_in(&Settings::from_environment())
    }

    /// The file name of the archive.
    pub(super) fn file(self) -> &'static str {
        match self {
            Self::Pause => "pause.oci.tar",
            Self::Busybox => "busybox.oci.tar",
            Self::Debian => "debian.oci.tar",
            Self::Other => "other.oci.tar",
        }
    }

    /// The packages in it, where it is made of packages.
    pub(super) fn packages(self) -> Option<&'static Packages> {
        match self {
            Self::Pause | Self::Busybox => None,
            Self::Debian => Some(&DEBIAN),
            Self::Other => Some(&OTHER),
        }
    }

    /// A name for all that decides what is in it; none while its packages are not chosen.
    pub(super) fn key(
        self,
        root: &Path,
        busybox: impl FnOnce() -> Result<PathBuf, Missing>,
    ) -> Result<Option<String>, Missing> {
        let mut parts =
            vec![self.name().to_string(), FORMAT.to_string(), machine::architecture().to_string()];
        if let Some(packages) = self.packages() {
            let Some(packages) = packages.kept(root) else { return Ok(None) };
            parts.extend(packages.into_iter().flat_map(|one| [one.name, one.version, one.sha256]));
        }
        match self {
            Self::Pause => {
                // The release stands for the compiler and its library.
                parts.extend([PAUSE.to_string(), PAUSE_FLAGS.join(" "), machine::release()]);
            }
            Self::Busybox | Self::Other => {
                let busybox = busybox()?;
                let reading = Missing::io(format!("reading {}", busybox.display()));
                parts.push(digest::of_file(&busybox).map_err(reading)?.0);
                parts.extend(files::parts(files::PEOPLE));
                if self == Self::Other {
                    parts.extend([MUSL.to_string(), MUSL_FLAGS.join(" "), machine::release()]);
                }
            }
            Self::Debian => {
                parts.extend(files::parts(files::PEOPLE));
                parts.extend(files::parts(files::LOGIN));
            }
        }
        Ok(Some(digest::key(parts)))
    }

    /// Its files and how it starts.
    pub(super) fn make(self, bench: &Bench<'_>) -> Result<Image, Missing> {
        let image = Image::new(self.name())?.env("PATH", PATH);
        match self {
            Self::Pause => Ok(image.layer(bench.pause()?).entrypoint(&["/pause"]).user("65535:65535")),
            Self::Busybox => Ok(image.layer(bench.busybox()?).command(&["sh"])),
            Self::Debian => {
                let packages = bench.packages(&DEBIAN, &DEBIAN.kept(bench.root).unwrap_or_default())?;
                let own = bench.debian(&packages)?;
                Ok(image.layer(packages).layer(own).command(&["bash"]))
            }
            Self::Other => {
                let packages = bench.packages(&OTHER, &OTHER.kept(bench.root).unwrap_or_default())?;
                let musl = bench.musl(&packages)?;
                Ok(image.layer(bench.busybox()?).layer(packages).layer(musl).command(&["sh"]))
            }
        }
    }
}

impl Bench<'_> {
    /// The files of packages.
    pub(super) fn packages(&self, set: &Packages, packages: &[Package]) -> Result<Layer, Missing> {
        let mut layer = Layer::new();
        let tar = self.debian.work.join("package.tar");
        for package in packages {
            self.debian.files(&set.path(self.root, package), &tar, &package.name)?;
            let file = File::open(&tar).map_err(Missing::io(format!("reading {}", tar.display())))?;
            layer.package(BufReader::new(file))?;
        }
        Ok(layer)
    }

    /// What an installation would have made: people, a home, and the cache of the dynamic linker.
    fn debian(&self, packages: &Layer) -> Result<Layer, Missing> {
        let mut own = people()?;
        files::put(&mut own, files::LOGIN)?;
        own.owner("/etc/shadow", 0, 42)?;
        if packages.contents("/usr/bin/mawk").is_some() {
            own.link("/usr/bin/awk", "mawk")?;
        }
        own.text("/etc/ld.so.cache", 0o644, self.linker_cache(packages)?)?;
        Ok(own)
    }

    /// Has the image's own `ldconfig` look at the image's libraries.
    fn linker_cache(&self, packages: &Layer) -> Result<Vec<u8>, Missing> {
        let doing = || Missing::io("making the cache of the dynamic linker");
        let (tree, ldconfig) = (self.debian.work.join("tree"), self.debian.work.join("ldconfig"));
        let wanted = |path: &str| {
            path.starts_with("usr/lib") || path.starts_with("etc/ld.so") || path.starts_with("lib")
        };
        packages.unpack(&tree, wanted).map_err(doing())?;
        // On Ubuntu the plain name is a script around it.
        let program = ["/usr/sbin/ldconfig.real", "/usr/sbin/ldconfig"];
        let program =
            program.iter().find_map(|path| packages.contents(path)).ok_or_else(|| Missing::Failed {
                doing: "making the cache of the dynamic linker".to_string(),
                said: "the packages have no ldconfig".to_string(),
            })?;
        fs::write(&ldconfig, program).map_err(doing())?;
        fs::set_permissions(&ldconfig, fs::Permissions::from_mode(0o755)).map_err(doing())?;
        // The links are in the packages; only the cache is wanted.
        self.run(Command::new(&ldconfig).args(["-X", "-r"]).arg(&tree), "ldconfig")?;
        fs::read(tree.join("etc/ld.so.cache")).map_err(doing())
    }

    fn busybox(&self) -> Result<Layer, Missing> {
        let mut layer = people()?;
        layer.file("/usr/bin/busybox", 0o755, self.busybox)?.link("/usr/sbin", "bin")?;
        let applets = self.run(Command::new(self.busybox).arg("--list"), "busybox")?;
        for applet in applets.lines().filter(|applet| *applet != "busybox") {
            layer.link(&format!("/usr/bin/{applet}"), "busybox")?;
        }
        Ok(layer)
    }

    fn pause(&self) -> Result<Layer, Missing> {
        let (source, program) = (self.debian.work.join("pause.c"), self.debian.work.join("pause"));
        fs::write(&source, PAUSE).map_err(Missing::io(format!("writing {}", source.display())))?;
        // Rust links with the same one.
        let mut compile = Command::new("cc");
        self.run(compile.args(PAUSE_FLAGS).arg("-o").arg(&program).arg(&source), "cc")?;
        let mut layer = Layer::new();
        layer.file("/pause", 0o755, &program)?;
        Ok(layer)
    }

    /// The program for musl, linked with the library in these packages.
    fn musl(&self, packages: &Layer) -> Result<Layer, Missing> {
        let work = |name: &str| self.debian.work.join(name);
        let (tree, source, program) = (work("musl"), work("musl.c"), work("musl-program"));
        packages
            .unpack(&tree, |path| path.contains("musl"))
            .and_then(|()| fs::write(&source, MUSL))
            .map_err(Missing::io(format!("writing {}", source.display())))?;
        let library = tree.join(format!("usr/lib/{}-linux-musl", std::env::consts::ARCH));
        let mut compile = Command::new("cc");
        compile.args(MUSL_FLAGS).arg(format!("-Wl,--dynamic-linker={MUSL_LOADER}"));
        self.run(compile.arg("-L").arg(&library).arg("-o").arg(&program).arg(&source), "cc")?;
        let mut layer = Layer::new();
        layer.file("/usr/bin/musl-program", 0o755, &program)?;
        Ok(layer)
    }

    fn run(&self, command: &mut Command, tool: &str) -> Result<String, Missing> {
        let failed = |said| Missing::Failed { doing: format!("running {tool}"), said };
        match run(command, &self.debian.work.join("image.log"), self.stop, None) {
            Ok(End::Well(said)) => Ok(said),
            Ok(End::Badly(said)) => Err(failed(last_words(&said))),
            Ok(End::Interrupted | End::TooLate) => Err((self.debian.interrupted)()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(failed(
                "it is not there; as root: apt-get install gcc libc6-dev; then repeat".to_string(),
            )),
            Err(error) => Err(Missing::io(format!("running {tool}"))(error)),
        }
    }
}

/// Users, groups, their homes and a place for all.
fn people() -> Result<Layer, Missing> {
    let mut layer = Layer::new();
    files::put(&mut layer, files::PEOPLE)?;
    layer.folder("/root", 0o700)?.folder("/tmp", 0o1777)?;
    layer.folder("/home/user", 0o755)?.owner("/home/user", 1000, 1000)?;
    Ok(layer)
}
