//! Fetches missing clients, in one run at a time.

use super::catalog::{ClientBundle, PackagedClient, REQUIREMENTS};
use super::check::check_runs;
use super::debian_archive::{DebianArchive, FetchedClient, NO_DEBIAN_HINT};
use super::store::ClientStore;
use super::{Clients, MissingPrerequisite};
use crate::binaries::BuildPaths;
use crate::debian::DebianTools;
use crate::disk_space;
use crate::progress::{ProgressLines, format_mebibytes};
use crate::python::PythonEnv;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Required disk space, pip's temporary files included, measured and rounded up.
const REQUIRED_MIB: u64 = 2048;

/// Fetches every missing client. `stop` interrupts: finished clients are kept, unfinished ones removed.
pub fn fetch_all(
    settings: &BuildPaths,
    out: &mut dyn Write,
    stop: &AtomicBool,
) -> Result<Clients, MissingPrerequisite> {
    let mut progress = ProgressLines::new(out);
    let store = ClientStore::new(settings)?;
    let start = Instant::now();
    let mut made = 0;
    if !store.missing().is_empty() {
        disk_space::check_free(store.root(), REQUIRED_MIB, "XDG_CACHE_HOME")?;
        let building = store.lock_for_fetch(&mut progress, stop)?;
        // Another run may have fetched them while this one waited.
        let missing = store.missing();
        made = missing.len();
        if made > 0 {
            progress.line(&format!(
                "fetching {made} of {} clients of the simulated driver, once",
                ClientBundle::ALL.len()
            ));
        }
        let interrupted = || store.interrupted();
        let work = FetchRun { store: &store, stop, interrupted: &interrupted };
        work.fetch(&missing, &mut progress)?;
        drop(building);
    }
    let clients = Clients::ready_in(settings)?;
    let made = match made {
        0 => String::new(),
        made => format!(", {made} fetched in {} s", start.elapsed().as_secs()),
    };
    progress.line(&format!("{} clients in {}{made}", ClientBundle::ALL.len(), clients.folder().display()));
    Ok(clients)
}

struct FetchRun<'a> {
    store: &'a ClientStore,
    stop: &'a AtomicBool,
    interrupted: &'a dyn Fn() -> MissingPrerequisite,
}

impl FetchRun<'_> {
    fn fetch(
        &self,
        missing: &[ClientBundle],
        progress: &mut ProgressLines<'_>,
    ) -> Result<(), MissingPrerequisite> {
        let mut opened = None;
        for bundle in missing.iter().copied() {
            let Some(packaged) = bundle.packaged() else {
                progress.step(
                    &format!("  {:<24} from pip", bundle.name()),
                    || self.python(bundle),
                    |size| format_mebibytes(*size),
                )?;
                continue;
            };
            let archive = match &opened {
                Some(archive) => archive,
                None => opened.insert(progress.step(
                    "  Debian's package lists",
                    || DebianArchive::open(&self.store.work_dir(), self.stop, self.interrupted),
                    |_| String::new(),
                )?),
            };
            let (version, _) = progress.step(
                &format!("  {:<24} {}", bundle.name(), packaged.version),
                || self.packaged(bundle, packaged, archive),
                |(_, size)| format_mebibytes(*size),
            )?;
            if version != packaged.version {
                let (name, pinned) = (bundle.name(), packaged.version);
                progress.line(&format!("  {name}: Debian no longer has {pinned}; using {version}"));
            }
        }
        Ok(())
    }

    /// Fetches a program from Debian into the work directory and stores it. Returns its version and size.
    fn packaged(
        &self,
        bundle: ClientBundle,
        packaged: &PackagedClient,
        archive: &DebianArchive<'_>,
    ) -> Result<(String, u64), MissingPrerequisite> {
        let unfinished = self.store.work_dir().join(bundle.name());
        let fetched = archive.fetch(packaged, &unfinished.join("fetched"))?;
        let failed = || MissingPrerequisite::io(format!("storing {}", bundle.name()));
        if packaged.libraries {
            install_with_libraries(&fetched, &unfinished, bundle)
        } else {
            fs::rename(&fetched.program, unfinished.join(bundle.program()))
        }
        .map_err(failed())?;
        fs::remove_dir_all(unfinished.join("fetched")).map_err(failed())?;
        self.check_runs(bundle, &unfinished)?;
        self.store.write_record(&unfinished, bundle, &fetched.version)?;
        let size = directory_size(&unfinished).map_err(failed())?;
        self.store.move_into_place(&unfinished, bundle)?;
        Ok((fetched.version, size))
    }

    /// Installs the Python clients. A virtual environment contains its own path, so it is created in place.
    fn python(&self, bundle: ClientBundle) -> Result<u64, MissingPrerequisite> {
        self.store.clear(bundle)?;
        let folder = self.store.folder(bundle);
        let (work, stop, interrupted) = (self.store.work_dir(), self.stop, self.interrupted);
        let debian = DebianTools {
            work: work.clone(),
            stop,
            interrupted,
            alternative: NO_DEBIAN_HINT,
            private_config: None,
        };
        let python = PythonEnv { what: "the Python clients", work, stop, interrupted };
        let made = python.find(&debian).and_then(|found| python.create(&found, &folder, REQUIREMENTS));
        let made = made.and_then(|()| self.check_runs(bundle, &folder));
        if let Err(missing) = made {
            // The next run removes what cannot be removed now.
            let _ = self.store.clear(bundle);
            return Err(missing);
        }
        let size = directory_size(&folder)
            .map_err(MissingPrerequisite::io(format!("reading {}", folder.display())))?;
        self.store.write_record(&folder, bundle, "as required")?;
        Ok(size)
    }

    fn check_runs(&self, bundle: ClientBundle, folder: &Path) -> Result<(), MissingPrerequisite> {
        match check_runs(bundle, &folder.join(bundle.program()), self.stop) {
            Ok(()) => Ok(()),
            Err(_) if self.stop.load(Ordering::Relaxed) => Err((self.interrupted)()),
            Err(message) => Err(MissingPrerequisite::Failed {
                doing: format!("running the new {}", bundle.name()),
                message,
            }),
        }
    }
}

/// Puts the libraries beside the program, and a script under its name that adds them to the loader's path after the
/// caller's.
fn install_with_libraries(
    fetched: &FetchedClient,
    unfinished: &Path,
    bundle: ClientBundle,
) -> io::Result<()> {
    let libraries = unfinished.join("lib");
    fs::create_dir_all(&libraries)?;
    move_libraries(&fetched.tree, &libraries)?;
    fs::rename(&fetched.program, unfinished.join("program"))?;
    let script = "#!/bin/sh\n\
                  here=$(dirname \"$(readlink -f \"$0\")\")\n\
                  export LD_LIBRARY_PATH=\"${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$here/lib\"\n\
                  exec \"$here/program\" \"$@\"\n";
    let program = unfinished.join(bundle.program());
    fs::write(&program, script)?;
    fs::set_permissions(program, fs::Permissions::from_mode(0o755))
}

/// Moves all shared libraries below a directory, and the links to them, into one directory.
fn move_libraries(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            move_libraries(&path, to)?;
        } else if entry.file_name().to_string_lossy().contains(".so") {
            // Links point to files beside them, which are moved too.
            fs::rename(&path, to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

fn directory_size(folder: &Path) -> io::Result<u64> {
    let mut size = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        size += if entry.file_type()?.is_dir() {
            directory_size(&entry.path())?
        } else {
            entry.metadata()?.len()
        };
    }
    Ok(size)
}
