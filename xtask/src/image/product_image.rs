//! Builds Partage's own image: the program, its libraries, the shim, the simulated driver, and little else.

use super::bed_images::ImageBuilder;
use super::packages::PackageSet;
use super::{ContainerImage, ImageLayer, WrittenImage, image_store, system_files};
use crate::binaries::BuildPaths;
use crate::debian::DebianTools;
use crate::disk_space;
use crate::prerequisites::MissingPrerequisite;
use crate::progress::{ProgressLines, format_mebibytes};
use crate::work_dir::{self, BuildLock};
use partage_elf_rewrite::elf;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// The libraries come from the release on which the program was linked: an older glibc would not load it.
const RUNTIME_PACKAGES: PackageSet = PackageSet {
    wanted: &["base-files", "libc6", "libgcc-s1"],
    without: &["mawk", "original-awk", "gawk"],
    elsewhere: None,
};

/// Required disk space for packages, the program and the archive, measured and rounded up.
const REQUIRED_MIB: u64 = 100;
/// The glibc of the oldest images that are supported.
const MAX_GLIBC_VERSION: [u32; 2] = [2, 17];
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The inputs of Partage's own image.
#[derive(Clone, Debug)]
pub struct ProductImage {
    /// Path of the program. Cargo puts the simulated driver beside it.
    pub program: PathBuf,
    /// Path of the portable shim, which `make shim` builds.
    pub shim: PathBuf,
    /// Path of the archive to write.
    pub archive: PathBuf,
    /// Whether to fetch newer packages from Debian first.
    pub fresh: bool,
}

/// Builds Partage's own image and prints how to load it.
pub fn build_product_image(
    product: &ProductImage,
    settings: &BuildPaths,
    out: &mut dyn Write,
    stop: &AtomicBool,
) -> Result<WrittenImage, MissingPrerequisite> {
    let mut progress = ProgressLines::new(out);
    check_executable(&product.program)?;
    let simulated = find_simulated_driver(&product.program)?;
    check_portable(&product.shim)?;
    let root = image_store::images_dir(settings)?;
    disk_space::check_free(&root, REQUIRED_MIB, "XDG_CACHE_HOME")?;
    let interrupted = || MissingPrerequisite::Interrupted { done: 0, all: 1, what: "images" };
    let building = BuildLock::acquire(&root, "images", &mut progress, stop)?.ok_or_else(interrupted)?;
    let debian = DebianTools {
        work: work_dir::path(&root),
        stop,
        interrupted: &interrupted,
        alternative: image_store::NO_DEBIAN_HINT,
        private_config: None,
    };
    let builder = ImageBuilder { root: &root, busybox: Path::new(""), debian: &debian, stop };
    let packages = match RUNTIME_PACKAGES.verified(&root).filter(|_| !product.fresh) {
        Some(packages) => packages,
        None => progress.step(
            "fetching the libraries",
            || RUNTIME_PACKAGES.fetch(&root, &debian),
            |packages| format!("{:>4} packages", packages.len()),
        )?,
    };
    let name = format!("localhost/partage:{VERSION}");
    let written = progress.step(
        &format!("packing {name}"),
        || {
            let image = ContainerImage::new(&name)?
                .layer(builder.packages(&RUNTIME_PACKAGES, &packages)?)
                .layer(product_layer(&product.program, &product.shim, &simulated)?)
                .entrypoint(&["/usr/bin/partage"])
                .env("PATH", "/usr/bin:/bin")
                .working_folder("/")
                .label("org.opencontainers.image.title", "partage")
                .label("org.opencontainers.image.version", VERSION)
                .label("org.opencontainers.image.licenses", env!("CARGO_PKG_LICENSE"))
                .gzip();
            image.write(&product.archive)
        },
        |written| format_mebibytes(written.size),
    )?;
    drop(building);
    let archive = product.archive.display();
    for line in [
        format!("{archive}: {} MiB, {}", written.size.div_ceil(1 << 20), written.digest),
        "load it with:".to_string(),
        format!("  containerd  ctr --namespace k8s.io images import {archive}"),
        format!("  docker      docker load --input {archive}"),
        format!("  kind        kind load image-archive {archive}"),
        format!("  registry    skopeo copy oci-archive:{archive} docker://REGISTRY/partage:{VERSION}"),
    ] {
        progress.line(&line);
    }
    Ok(written)
}

fn check_executable(program: &Path) -> Result<(), MissingPrerequisite> {
    let why = match fs::metadata(program) {
        Err(_) => "it does not exist; build it: cargo build --release --package partage",
        Ok(found) if !found.is_file() => "it is not a file",
        Ok(found) if found.permissions().mode() & 0o111 == 0 => "it is not executable",
        Ok(_) => return Ok(()),
    };
    Err(MissingPrerequisite::Refused { path: program.display().to_string(), why: why.to_string() })
}

/// Finds the object from which `partage sim` makes the driver's libraries, as cargo leaves it beside the program.
fn find_simulated_driver(program: &Path) -> Result<PathBuf, MissingPrerequisite> {
    let places = ["deps/libpartage_sim.so", "libpartage_sim.so"].map(|place| program.with_file_name(place));
    match places.iter().find(|place| place.is_file()) {
        Some(place) => Ok(place.clone()),
        None => Err(MissingPrerequisite::Refused {
            path: places[0].display().to_string(),
            why: "it does not exist; build it: cargo build --release --package partage".to_string(),
        }),
    }
}

/// Checks that the shim, which containers load, works with the C library of every supported image.
fn check_portable(shim: &Path) -> Result<(), MissingPrerequisite> {
    let refused = |why: String| Err(MissingPrerequisite::Refused { path: shim.display().to_string(), why });
    let Ok(bytes) = fs::read(shim) else {
        return refused("it does not exist; build it: make shim".to_string());
    };
    let versions = match elf::needed_versions(&bytes) {
        Ok(versions) => versions,
        Err(error) => return refused(format!("it is not a shared object: {error}")),
    };
    let newer = |version: &str| {
        let numbers =
            version.strip_prefix("GLIBC_").map(|rest| rest.split('.').map(str::parse::<u32>).collect());
        let Some(Ok::<Vec<_>, _>(numbers)) = numbers else { return true };
        numbers > MAX_GLIBC_VERSION.to_vec()
    };
    match versions.into_iter().find(|(_, version)| newer(version)) {
        Some((file, version)) => {
            refused(format!("it requires {version} of {file}, which older images lack; build it: make shim"))
        }
        None => Ok(()),
    }
}

/// Returns the layer with the program, above its libraries: a new build is a small new layer.
fn product_layer(program: &Path, shim: &Path, simulated: &Path) -> Result<ImageLayer, MissingPrerequisite> {
    let mut layer = ImageLayer::new();
    layer
        .file("/usr/bin/partage", 0o755, program)?
        .file("/usr/lib/partage/libpartage_shim.so", 0o644, shim)?
        .file("/usr/lib/partage/libpartage_sim.so", 0o644, simulated)?
        .text("/usr/share/doc/partage/LICENSE", 0o644, include_str!("../../../LICENSE"))?
        .folder("/tmp", 0o1777)?;
    system_files::add_files(&mut layer, system_files::NO_LOGIN_FILES)?;
    Ok(layer)
}
