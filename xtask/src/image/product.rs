//! Partage's own image: the program, what it links, what it makes stand-ins and the simulated driver from, and little else.

use super::bed::Bench;
use super::packages::Packages;
use super::{Image, Layer, Written, files, store};
use crate::binaries::Settings;
use crate::debian::Debian;
use crate::missing::Missing;
use crate::progress::{Progress, mebibytes};
use crate::space;
use crate::work::{self, Building};
use partage_elf_rewrite::elf;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// The libraries come from the release the program was linked on: an older glibc would not start it.
const LINKED: Packages = Packages {
    wanted: &["base-files", "libc6", "libgcc-s1"],
    without: &["mawk", "original-awk", "gawk"],
    elsewhere: None,
};

/// Packages, the program and the archive, measured and rounded up.
const NEEDED_MIB: u64 = 100;
/// That of the oldest images that anybody still runs.
const OLDEST_GLIBC: [u32; 2] = [2, 17];
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Partage's own image, to be built.
#[derive(Clone, Debug)]
pub struct Product {
    /// The program. Cargo puts what the simulated driver is made from beside it.
    pub program: PathBuf,
    /// The shim for every image, as `make shim` builds it.
    pub shim: PathBuf,
    /// Where the archive goes.
    pub archive: PathBuf,
    /// Ask Debian for newer packages first.
    pub fresh: bool,
}

/// Builds Partage's own image and says how it is loaded.
pub fn product(
    product: &Product,
    settings: &Settings,
    out: &mut dyn Write,
    stop: &AtomicBool,
) -> Result<Written, Missing> {
    let mut progress = Progress::new(out);
    executable(&product.program)?;
    let simulated = simulated_driver(&product.program)?;
    portable(&product.shim)?;
    let root = store::root(settings)?;
    space::enough(&root, NEEDED_MIB, "XDG_CACHE_HOME")?;
    let interrupted = || Missing::Interrupted { done: 0, all: 1, what: "images" };
    let building = Building::begin(&root, "images", &mut progress, stop)?.ok_or_else(interrupted)?;
    let debian = Debian {
        work: work::folder(&root),
        stop,
        interrupted: &interrupted,
        instead: store::WITHOUT_DEBIAN,
        private: None,
    };
    let bench = Bench { root: &root, busybox: Path::new(""), debian: &debian, stop };
    let packages = match LINKED.kept_whole(&root).filter(|_| !product.fresh) {
        Some(packages) => packages,
        None => progress.step(
            "fetching the libraries",
            || LINKED.fetch(&root, &debian),
            |packages| format!("{:>4} packages", packages.len()),
        )?,
    };
    let name = format!("localhost/partage:{VERSION}");
    let written = progress.step(
        &format!("packing {name}"),
        || {
            let image = Image::new(&name)?
                .layer(bench.packages(&LINKED, &packages)?)
                .layer(own(&product.program, &product.shim, &simulated)?)
                .entrypoint(&["/usr/bin/partage"])
                .env("PATH", "/usr/bin:/bin")
                .working_folder("/")
                .label("org.opencontainers.image.title", "partage")
                .label("org.opencontainers.image.version", VERSION)
                .label("org.opencontainers.image.licenses", env!("CARGO_PKG_LICENSE"))
                .gzip();
            image.write(&product.archive)
        },
        |written| mebibytes(written.size),
    )?;
    drop(building);
    let archive = product.archive.display();
    for line in [
        format!("{archive}: {} MiB, {}", written.size.div_ceil(1 << 20), written.digest),
        "load it:".to_string(),
        format!("  containerd  ctr --namespace k8s.io images import {archive}"),
        format!("  docker      docker load --input {archive}"),
        format!("  kind        kind load image-archive {archive}"),
        format!("  registry    skopeo copy oci-archive:{archive} docker://REGISTRY/partage:{VERSION}"),
    ] {
        progress.line(&line);
    }
    Ok(written)
}

fn executable(program: &Path) -> Result<(), Missing> {
    let why = match fs::metadata(program) {
        Err(_) => "it is not there; build it: cargo build --release --package partage",
        Ok(found) if !found.is_file() => "it is no file",
        Ok(found) if found.permissions().mode() & 0o111 == 0 => "it is not executable",
        Ok(_) => return Ok(()),
    };
    Err(Missing::Refused { path: program.display().to_string(), why: why.to_string() })
}

/// What `partage sim` makes the driver's libraries from, as cargo leaves it beside the program.
fn simulated_driver(program: &Path) -> Result<PathBuf, Missing> {
    let places = ["deps/libpartage_sim.so", "libpartage_sim.so"].map(|place| program.with_file_name(place));
    match places.iter().find(|place| place.is_file()) {
        Some(place) => Ok(place.clone()),
        None => Err(Missing::Refused {
            path: places[0].display().to_string(),
            why: "it is not there; build it: cargo build --release --package partage".to_string(),
        }),
    }
}

/// What containers load must run with the C library of every image.
fn portable(shim: &Path) -> Result<(), Missing> {
    let refused = |why: String| Err(Missing::Refused { path: shim.display().to_string(), why });
    let Ok(bytes) = fs::read(shim) else {
        return refused("it is not there; build it: make shim".to_string());
    };
    let versions = match elf::versions(&bytes) {
        Ok(versions) => versions,
        Err(error) => return refused(format!("it is no shared object: {error}")),
    };
    let newer = |version: &str| {
        let numbers =
            version.strip_prefix("GLIBC_").map(|rest| rest.split('.').map(str::parse::<u32>).collect());
        let Some(Ok::<Vec<_>, _>(numbers)) = numbers else { return true };
        numbers > OLDEST_GLIBC.to_vec()
    };
    match versions.into_iter().find(|(_, version)| newer(version)) {
        Some((file, version)) => {
            refused(format!("it needs {version} of {file}, which older images have not; build it: make shim"))
        }
        None => Ok(()),
    }
}

/// The program above its libraries: a new build is a small new layer.
fn own(program: &Path, shim: &Path, simulated: &Path) -> Result<Layer, Missing> {
    let mut layer = Layer::new();
    layer
        .file("/usr/bin/partage", 0o755, program)?
        .file("/usr/lib/partage/libpartage_shim.so", 0o644, shim)?
        .file("/usr/lib/partage/libpartage_sim.so", 0o644, simulated)?
        .text("/usr/share/doc/partage/LICENSE", 0o644, include_str!("../../../LICENSE"))?
        .folder("/tmp", 0o1777)?;
    files::put(&mut layer, files::SYSTEM)?;
    Ok(layer)
}
