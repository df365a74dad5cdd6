//! The store of bed images: one directory per cache key, in the user's cache directory.

use super::bed_images::{BedImage, ImageBuilder};
use super::packages::FetchedPackage;
use crate::binaries::{Binaries, BuildPaths};
use crate::debian::DebianTools;
use crate::prerequisites::MissingPrerequisite;
use crate::progress::{ProgressLines, format_mebibytes};
use crate::work_dir::{self, BuildLock};
use crate::{digest, disk_space};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Required disk space for packages, trees and archives, measured and rounded up.
const REQUIRED_MIB: u64 = 200;
/// What to do on a machine without Debian's tools.
pub(super) const NO_DEBIAN_HINT: &str = "build on Debian or a derivative";

/// The record of a finished image: `image.json` beside it.
#[derive(Debug, Serialize, Deserialize)]
struct ImageRecord {
    image: String,
    /// Digest of the manifest in the archive.
    digest: String,
    /// SHA-256 of the archive.
    sha256: String,
    size: u64,
    packages: Vec<FetchedPackage>,
}

/// Returns the directory of all images.
pub(super) fn images_dir(settings: &BuildPaths) -> Result<PathBuf, MissingPrerequisite> {
    Ok(settings.cache.as_deref().ok_or(MissingPrerequisite::NoCacheDir)?.join("partage/images"))
}

impl BedImage {
    /// Returns the archive as [`ready`](Self::ready) does, with explicit paths.
    pub fn ready_in(self, settings: &BuildPaths) -> Result<PathBuf, MissingPrerequisite> {
        let root = images_dir(settings)?;
        let folder = self.folder(&root, settings)?;
        match folder.as_ref().filter(|folder| self.record(folder).is_some()) {
            Some(folder) => Ok(folder.join(self.file())),
            None => Err(MissingPrerequisite::NoImage { image: self.name(), folder: folder.unwrap_or(root) }),
        }
    }

    fn folder(self, root: &Path, settings: &BuildPaths) -> Result<Option<PathBuf>, MissingPrerequisite> {
        let busybox = || Ok(Binaries::ready_in(settings)?.path("busybox"));
        Ok(self.key(root, busybox)?.map(|key| root.join(key)))
    }

    /// Returns the record if the archive has the right size. `--check` also verifies its checksum.
    fn record(self, folder: &Path) -> Option<ImageRecord> {
        let record: ImageRecord = serde_json::from_slice(&fs::read(folder.join("image.json")).ok()?).ok()?;
        let size = fs::metadata(folder.join(self.file())).ok()?.len();
        (size == record.size).then_some(record)
    }
}

/// Builds every missing image of the bed. Requires the programs of the bed.
///
/// `fresh` fetches newer packages from Debian first. `stop` interrupts: finished images are kept, unfinished ones
/// removed.
pub fn build(
    settings: &BuildPaths,
    fresh: bool,
    out: &mut dyn Write,
    stop: &AtomicBool,
) -> Result<Vec<PathBuf>, MissingPrerequisite> {
    let mut progress = ProgressLines::new(out);
    let root = images_dir(settings)?;
    let busybox = Binaries::ready_in(settings)?.path("busybox");
    let start = Instant::now();
    let mut made = 0;
    if fresh || ready_images(settings).len() < BedImage::ALL.len() {
        disk_space::check_free(&root, REQUIRED_MIB, "XDG_CACHE_HOME")?;
        let interrupted = || interrupted(settings);
        let building = BuildLock::acquire(&root, "images", &mut progress, stop)?.ok_or_else(interrupted)?;
        let debian = DebianTools {
            work: work_dir::path(&root),
            stop,
            interrupted: &interrupted,
            alternative: NO_DEBIAN_HINT,
            private_config: None,
        };
        let builder = ImageBuilder { root: &root, busybox: &busybox, debian: &debian, stop };
        for image in BedImage::ALL {
            // Another run may have built it while this one waited.
            let refreshes = fresh && image.packages().is_some();
            if refreshes || image.ready_in(settings).is_err() {
                made += usize::from(build_image(image, settings, &builder, fresh, &mut progress)?);
            }
        }
        drop(building);
    }
    let images = BedImage::ALL.iter().map(|image| image.ready_in(settings)).collect::<Result<Vec<_>, _>>()?;
    let made = match made {
        0 => String::new(),
        made => format!(", {made} built in {} s", start.elapsed().as_secs()),
    };
    progress.line(&format!("{} images in {}{made}", images.len(), root.display()));
    Ok(images)
}

/// Builds one image. Returns false if newer packages were requested and there were none.
fn build_image(
    image: BedImage,
    settings: &BuildPaths,
    builder: &ImageBuilder<'_>,
    fresh: bool,
    progress: &mut ProgressLines<'_>,
) -> Result<bool, MissingPrerequisite> {
    if let Some(packages) = image.packages()
        && (fresh || packages.verified(builder.root).is_none())
    {
        let fetch = || match packages.elsewhere {
            None => packages.fetch(builder.root, builder.debian),
            Some(suites) => {
                let DebianTools { work, stop, interrupted, alternative, .. } = builder.debian;
                let work = work.join("suites");
                let elsewhere =
                    DebianTools { work, stop, interrupted: *interrupted, alternative, private_config: None };
                packages.fetch(builder.root, &elsewhere.with_suites(suites)?)
            }
        };
        progress.step(&format!("  fetching the packages of {}", image.name()), fetch, |fetched| {
            format!("{:>4} packages", fetched.len())
        })?;
        if image.ready_in(settings).is_ok() {
            return Ok(false);
        }
    }
    progress.step(
        &format!("  {}", image.name()),
        || build_and_store(image, settings, builder),
        |record| format!("{}  {}", format_mebibytes(record.size), record.digest),
    )?;
    Ok(true)
}

/// Builds an image in the work directory; then its directory appears atomically.
fn build_and_store(
    image: BedImage,
    settings: &BuildPaths,
    builder: &ImageBuilder<'_>,
) -> Result<ImageRecord, MissingPrerequisite> {
    let missing = || MissingPrerequisite::NoImage { image: image.name(), folder: builder.root.to_path_buf() };
    let folder = image.folder(builder.root, settings)?.ok_or_else(missing)?;
    let failed = || MissingPrerequisite::io(format!("storing {} in {}", image.name(), folder.display()));
    let unfinished = builder.debian.work.join(image.file()).with_extension("folder");
    let archive = unfinished.join(image.file());
    let written = image.make(builder)?.write(&archive)?;
    let (sha256, size) = digest::of_file(&archive).map_err(failed())?;
    let packages = image.packages().and_then(|packages| packages.recorded(builder.root)).unwrap_or_default();
    let record =
        ImageRecord { image: image.name().to_string(), digest: written.digest, sha256, size, packages };
    let text = serde_json::to_string_pretty(&record).map_err(io::Error::other).map_err(failed())?;
    fs::write(unfinished.join("image.json"), text + "\n").map_err(failed())?;
    if builder.stop.load(Ordering::Relaxed) {
        return Err(interrupted(settings));
    }
    if folder.exists() {
        // It is damaged: a complete one would have been used.
        fs::remove_dir_all(&folder).map_err(failed())?;
    }
    fs::rename(&unfinished, &folder).map_err(failed())?;
    Ok(record)
}

/// Lists the images and verifies their checksums; builds nothing.
pub fn check(
    settings: &BuildPaths,
    out: &mut dyn Write,
    stop: &AtomicBool,
) -> Result<Vec<PathBuf>, MissingPrerequisite> {
    let mut progress = ProgressLines::new(out);
    let root = images_dir(settings)?;
    progress.line(&format!("{}", root.display()));
    let mut damaged = None;
    for image in BedImage::ALL {
        let folder = image.folder(&root, settings)?;
        let state = match folder.and_then(|folder| Some((image.record(&folder)?, folder.join(image.file()))))
        {
            Some((record, path)) => {
                let reading = MissingPrerequisite::io(format!("reading {}", path.display()));
                if digest::of_file(&path).map_err(reading)?.0 == record.sha256 {
                    format!("{}  {}", format_mebibytes(record.size), record.digest)
                } else {
                    let why = "checksum mismatch".to_string();
                    damaged.get_or_insert(MissingPrerequisite::Damaged { path, why: why.clone() });
                    format!("damaged: {why}")
                }
            }
            None => "not built".to_string(),
        };
        if stop.load(Ordering::Relaxed) {
            return Err(interrupted(settings));
        }
        progress.line(&format!("  {:<24} {state}", image.name()));
    }
    let images = || BedImage::ALL.iter().map(|image| image.ready_in(settings)).collect();
    damaged.map_or_else(images, Err)
}

/// Returns the archives of the images that are built.
fn ready_images(settings: &BuildPaths) -> Vec<PathBuf> {
    BedImage::ALL.iter().filter_map(|image| image.ready_in(settings).ok()).collect()
}

fn interrupted(settings: &BuildPaths) -> MissingPrerequisite {
    MissingPrerequisite::Interrupted {
        done: ready_images(settings).len(),
        all: BedImage::ALL.len(),
        what: "images",
    }
}
