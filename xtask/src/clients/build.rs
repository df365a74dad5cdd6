//! Fetches what is not there yet, in one run at a time.

use super::archive::{Archive, Fetched, WITHOUT_DEBIAN};
use super::catalog::{Packaged, Part, REQUIREMENTS};
use super::report::runs;
use super::store::Store;
use super::{Clients, Missing};
use crate::binaries::Settings;
use crate::debian::Debian;
use crate::progress::{Progress, mebibytes};
use crate::python::Python;
use crate::space;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// With what pip needs on the way, measured and rounded up.
const NEEDED_MIB: u64 = 2048;

/// Fetches every client that is not there. `stop` interrupts: finished clients stay, half ones go.
pub fn build(settings: &Settings, out: &mut dyn Write, stop: &AtomicBool) -> Result<Clients, Missing> {
    let mut progress = Progress::new(out);
    let store = Store::new(settings)?;
    let start = Instant::now();
    let mut made = 0;
    if !store.left().is_empty() {
        space::enough(store.root(), NEEDED_MIB, "XDG_CACHE_HOME")?;
        let building = store.begin(&mut progress, stop)?;
        // Another run may have fetched while we waited.
        let left = store.left();
        made = left.len();
        if made > 0 {
            progress.line(&format!(
                "fetching {made} of {} clients of the simulated driver, once",
                Part::ALL.len()
            ));
        }
        let interrupted = || store.interrupted();
        let work = Work { store: &store, stop, interrupted: &interrupted };
        work.fetch(&left, &mut progress)?;
        drop(building);
    }
    let clients = Clients::ready_in(settings)?;
    let made = match made {
        0 => String::new(),
        made => format!(", {made} fetched in {} s", start.elapsed().as_secs()),
    };
    progress.line(&format!("{} clients in {}{made}", Part::ALL.len(), clients.folder().display()));
    Ok(clients)
}

struct Work<'a> {
    store: &'a Store,
    stop: &'a AtomicBool,
    interrupted: &'a dyn Fn() -> Missing,
}

impl Work<'_> {
    fn fetch(&self, left: &[Part], progress: &mut Progress<'_>) -> Result<(), Missing> {
        let mut opened = None;
        for part in left.iter().copied() {
            let Some(packaged) = part.packaged() else {
                progress.step(
                    &format!("  {:<24} from pip", part.name()),
                    || self.python(part),
                    |size| mebibytes(*size),
                )?;
                continue;
            };
            let archive = match &opened {
                Some(archive) => archive,
                None => opened.insert(progress.step(
                    "  Debian's package lists",
                    || Archive::open(&self.store.work(), self.stop, self.interrupted),
                    |_| String::new(),
                )?),
            };
            let (version, _) = progress.step(
                &format!("  {:<24} {}", part.name(), packaged.version),
                || self.packaged(part, packaged, archive),
                |(_, size)| mebibytes(*size),
            )?;
            if version != packaged.version {
                let (name, pinned) = (part.name(), packaged.version);
                progress.line(&format!("  {name}: Debian no longer has {pinned}; {version} does as well"));
            }
        }
        Ok(())
    }

    /// A program from Debian, made in the work folder; its version and its size.
    fn packaged(
        &self,
        part: Part,
        packaged: &Packaged,
        archive: &Archive<'_>,
    ) -> Result<(String, u64), Missing> {
        let half = self.store.work().join(part.name());
        let fetched = archive.fetch(packaged, &half.join("fetched"))?;
        let failed = || Missing::io(format!("keeping {}", part.name()));
        match packaged.libraries {
            true => with_libraries(&fetched, &half, part),
            false => fs::rename(&fetched.program, half.join(part.program())),
        }
        .map_err(failed())?;
        fs::remove_dir_all(half.join("fetched")).map_err(failed())?;
        self.runs(part, &half)?;
        self.store.finish(&half, part, &fetched.version)?;
        let size = size_of(&half).map_err(failed())?;
        self.store.take_in(&half, part)?;
        Ok((fetched.version, size))
    }

    /// The Python clients. An environment knows where it stands, so it is made in its place.
    fn python(&self, part: Part) -> Result<u64, Missing> {
        self.store.clear(part)?;
        let folder = self.store.folder(part);
        let (work, stop, interrupted) = (self.store.work(), self.stop, self.interrupted);
        let debian = Debian { work: work.clone(), stop, interrupted, instead: WITHOUT_DEBIAN, private: None };
        let python = Python { what: "the Python clients", work, stop, interrupted };
        let made = python.find(&debian).and_then(|found| python.make(&found, &folder, REQUIREMENTS));
        let made = made.and_then(|()| self.runs(part, &folder));
        if let Err(missing) = made {
            // What cannot be removed now is removed by the next run.
            let _ = self.store.clear(part);
            return Err(missing);
        }
        let size = size_of(&folder).map_err(Missing::io(format!("reading {}", folder.display())))?;
        self.store.finish(&folder, part, "as required")?;
        Ok(size)
    }

    fn runs(&self, part: Part, folder: &Path) -> Result<(), Missing> {
        match runs(part, &folder.join(part.program()), self.stop) {
            Ok(()) => Ok(()),
            Err(_) if self.stop.load(Ordering::Relaxed) => Err((self.interrupted)()),
            Err(said) => Err(Missing::Failed { doing: format!("running the new {}", part.name()), said }),
        }
    }
}

/// The libraries stand beside the program, and a script with its name says so to the loader: after what the caller says.
fn with_libraries(fetched: &Fetched, half: &Path, part: Part) -> io::Result<()> {
    let libraries = half.join("lib");
    fs::create_dir_all(&libraries)?;
    take_libraries(&fetched.tree, &libraries)?;
    fs::rename(&fetched.program, half.join("program"))?;
    let script = "#!/bin/sh\n\
                  here=$(dirname \"$(readlink -f \"$0\")\")\n\
                  export LD_LIBRARY_PATH=\"${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$here/lib\"\n\
                  exec \"$here/program\" \"$@\"\n";
    let program = half.join(part.program());
    fs::write(&program, script)?;
    fs::set_permissions(program, fs::Permissions::from_mode(0o755))
}

/// All shared libraries under a folder, and the links to them, into one.
fn take_libraries(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            take_libraries(&path, to)?;
        } else if entry.file_name().to_string_lossy().contains(".so") {
            // Links lead to their neighbours, which come along.
            fs::rename(&path, to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

fn size_of(folder: &Path) -> io::Result<u64> {
    let mut size = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        size += if entry.file_type()?.is_dir() { size_of(&entry.path())? } else { entry.metadata()?.len() };
    }
    Ok(size)
}
