//! Where the images of the bed are kept: one folder per key, in the user's cache folder.

use super::bed::{BedImage, Bench};
use super::packages::Package;
use crate::binaries::{Binaries, Settings};
use crate::debian::Debian;
use crate::missing::Missing;
use crate::progress::{Progress, mebibytes};
use crate::work::{self, Building};
use crate::{digest, space};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Packages, trees and archives, measured and rounded up.
const NEEDED_MIB: u64 = 200;
/// What to do where there is no Debian.
pub(super) const WITHOUT_DEBIAN: &str = "build on Debian or on a system made from it";

/// What is known of a finished image: `image.json` beside it.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    image: String,
    /// Of the manifest in the archive.
    digest: String,
    /// Of the archive.
    sha256: String,
    size: u64,
    packages: Vec<Package>,
}

/// The folder of all images.
pub(super) fn root(settings: &Settings) -> Result<PathBuf, Missing> {
    Ok(settings.cache.as_deref().ok_or(Missing::NoCacheFolder)?.join("partage/images"))
}

impl BedImage {
    /// The same as [`ready`](Self::ready), with the places given.
    pub fn ready_in(self, settings: &Settings) -> Result<PathBuf, Missing> {
        let root = root(settings)?;
        let folder = self.folder(&root, settings)?;
        match folder.as_ref().filter(|folder| self.record(folder).is_some()) {
            Some(folder) => Ok(folder.join(self.file())),
            None => Err(Missing::NoImage { image: self.name(), folder: folder.unwrap_or(root) }),
        }
    }

    fn folder(self, root: &Path, settings: &Settings) -> Result<Option<PathBuf>, Missing> {
        let busybox = || Ok(Binaries::ready_in(settings)?.path("busybox"));
        Ok(self.key(root, busybox)?.map(|key| root.join(key)))
    }

    /// What is written down, where the archive is whole by its size. Its checksum is looked at by `--check`.
    fn record(self, folder: &Path) -> Option<Record> {
        let record: Record = serde_json::from_slice(&fs::read(folder.join("image.json")).ok()?).ok()?;
        let size = fs::metadata(folder.join(self.file())).ok()?.len();
        (size == record.size).then_some(record)
    }
}

/// Builds every image of the bed that is not there. The programs of the bed must be.
///
/// `fresh` asks Debian for newer packages first. `stop` interrupts: finished images stay, half ones go.
pub fn build(
    settings: &Settings,
    fresh: bool,
    out: &mut dyn Write,
    stop: &AtomicBool,
) -> Result<Vec<PathBuf>, Missing> {
    let mut progress = Progress::new(out);
    let root = root(settings)?;
    let busybox = Binaries::ready_in(settings)?.path("busybox");
    let start = Instant::now();
    let mut made = 0;
    if fresh || ready(settings).len() < BedImage::ALL.len() {
        space::enough(&root, NEEDED_MIB, "XDG_CACHE_HOME")?;
        let interrupted = || interrupted(settings);
        let building = Building::begin(&root, "images", &mut progress, stop)?.ok_or_else(interrupted)?;
        let debian = Debian {
            work: work::folder(&root),
            stop,
            interrupted: &interrupted,
            instead: WITHOUT_DEBIAN,
            private: None,
        };
        let bench = Bench { root: &root, busybox: &busybox, debian: &debian, stop };
        for image in BedImage::ALL {
            // Another run may have built it while we waited.
            let asks = fresh && image.packages().is_some();
            if asks || image.ready_in(settings).is_err() {
                made += usize::from(one(image, settings, &bench, fresh, &mut progress)?);
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

/// Makes one image; false where newer packages were asked for and there were none.
fn one(
    image: BedImage,
    settings: &Settings,
    bench: &Bench<'_>,
    fresh: bool,
    progress: &mut Progress<'_>,
) -> Result<bool, Missing> {
    if let Some(packages) = image.packages()
        && (fresh || packages.kept_whole(bench.root).is_none())
    {
        let fetch = || match packages.elsewhere {
            None => packages.fetch(bench.root, bench.debian),
            Some(suites) => {
                let Debian { work, stop, interrupted, instead, .. } = bench.debian;
                let work = work.join("suites");
                let elsewhere = Debian { work, stop, interrupted: *interrupted, instead, private: None };
                packages.fetch(bench.root, &elsewhere.with_suites(suites)?)
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
        || take_in(image, settings, bench),
        |record| format!("{}  {}", mebibytes(record.size), record.digest),
    )?;
    Ok(true)
}

/// Makes an image in the work folder; then its folder appears whole.
fn take_in(image: BedImage, settings: &Settings, bench: &Bench<'_>) -> Result<Record, Missing> {
    let missing = || Missing::NoImage { image: image.name(), folder: bench.root.to_path_buf() };
    let folder = image.folder(bench.root, settings)?.ok_or_else(missing)?;
    let failed = || Missing::io(format!("keeping {} in {}", image.name(), folder.display()));
    let half = bench.debian.work.join(image.file()).with_extension("folder");
    let archive = half.join(image.file());
    let written = image.make(bench)?.write(&archive)?;
    let (sha256, size) = digest::of_file(&archive).map_err(failed())?;
    let packages = image.packages().and_then(|packages| packages.kept(bench.root)).unwrap_or_default();
    let record = Record { image: image.name().to_string(), digest: written.digest, sha256, size, packages };
    let text = serde_json::to_string_pretty(&record).map_err(io::Error::other).map_err(failed())?;
    fs::write(half.join("image.json"), text + "\n").map_err(failed())?;
    if bench.stop.load(Ordering::Relaxed) {
        return Err(interrupted(settings));
    }
    if folder.exists() {
        // A damaged one: a whole one would have been used.
        fs::remove_dir_all(&folder).map_err(failed())?;
    }
    fs::rename(&half, &folder).map_err(failed())?;
    Ok(record)
}

/// Says which images are there, each held against its checksum; builds nothing.
pub fn check(settings: &Settings, out: &mut dyn Write, stop: &AtomicBool) -> Result<Vec<PathBuf>, Missing> {
    let mut progress = Progress::new(out);
    let root = root(settings)?;
    progress.line(&format!("{}", root.display()));
    let mut damaged = None;
    for image in BedImage::ALL {
        let folder = image.folder(&root, settings)?;
        let state = match folder.and_then(|folder| Some((image.record(&folder)?, folder.join(image.file()))))
        {
            Some((record, path)) => {
                let reading = Missing::io(format!("reading {}", path.display()));
                match digest::of_file(&path).map_err(reading)?.0 == record.sha256 {
                    true => format!("{}  {}", mebibytes(record.size), record.digest),
                    false => {
                        let why = "its checksum is not the recorded one".to_string();
                        damaged.get_or_insert(Missing::Damaged { path, why: why.clone() });
                        format!("damaged: {why}")
                    }
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

/// The images that are there.
fn ready(settings: &Settings) -> Vec<PathBuf> {
    BedImage::ALL.iter().filter_map(|image| image.ready_in(settings).ok()).collect()
}

fn interrupted(settings: &Settings) -> Missing {
    Missing::Interrupted { done: ready(settings).len(), all: BedImage::ALL.len(), what: "images" }
}
