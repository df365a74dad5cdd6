//! Builds what is not there yet, in one run at a time.

use super::catalog::{Program, SETS, Set, Source};
use super::go::Go;
use super::report::{ask, check_folder};
use super::store::Store;
use super::{Binaries, Missing, Settings, space};
use crate::debian::{self, Debian};
use crate::progress::{Progress, mebibytes};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Builds every program that is not there. What can be known to be wrong is said before anything is built.
///
/// `stop` interrupts: finished programs stay, half ones go.
pub fn build(settings: &Settings, out: &mut dyn Write, stop: &AtomicBool) -> Result<Binaries, Missing> {
    let mut progress = Progress::new(out);
    if let Some(folder) = &settings.bin_dir {
        return check_folder(settings, folder, &mut progress, stop);
    }
    let go = Go::find()?;
    for set in SETS {
        possible(&go, &settings.store(&go, set)?, set)?;
    }
    for set in SETS {
        build_set(set, &go, &settings.store(&go, set)?, &mut progress, stop)?;
    }
    Binaries::ready_in(settings)
}

fn build_set(
    set: &Set,
    go: &Go,
    store: &Store,
    progress: &mut Progress<'_>,
    stop: &AtomicBool,
) -> Result<(), Missing> {
    let start = Instant::now();
    let building = store.begin(progress, stop)?;
    // Another run may have built while we waited.
    let left = left(store, set);
    let interrupted = || store.interrupted();
    let debian = Debian {
        work: store.work(),
        stop,
        interrupted: &interrupted,
        instead: WITHOUT_DEBIAN,
        private: None,
    };
    let work = Work { go, store, stop, debian };
    work.install(BEDS, &bed_needs(), progress)?;
    let (all, what) = (set.programs.len(), set.what);
    if !left.is_empty() {
        work.install(LINKING, &link_needs(&left), progress)?;
        progress.line(&format!("building {} of {all} {what} with {}, once", left.len(), go.version));
        work.programs(&left, progress)?;
    }
    drop(building);
    let made = match left.len() {
        0 => String::new(),
        count => format!(", {count} built in {} s", start.elapsed().as_secs()),
    };
    progress.line(&format!("{all} {what} in {}{made}", store.bin().display()));
    Ok(())
}

/// The programs that are not there.
fn left<'a>(store: &Store, set: &'a Set) -> Vec<&'a Program> {
    let manifest = store.manifest();
    set.programs.iter().filter(|program| !store.has(&manifest, program.name)).collect()
}

/// Says what would fail for certain, before anything is touched.
fn possible(go: &Go, store: &Store, set: &Set) -> Result<(), Missing> {
    let left = left(store, set);
    space::enough(&[&store.bin(), &go.cache, &go.modules], &left)?;
    debian::may_install(LINKING, &link_needs(&left))
}

/// What to do where there is no Debian.
const WITHOUT_DEBIAN: &str = "set PARTAGE_KUBE_BIN_DIR to a folder with the programs";

/// What has needs on the system.
const LINKING: &str = "linking runc";
const BEDS: &str = "a bed";

/// The packages that beds need and that are not there. Only root has beds.
fn bed_needs() -> Vec<&'static str> {
    if rustix::process::geteuid().is_root() { debian::absent_bed_needs() } else { Vec::new() }
}

/// The packages that linking C needs and that are not there.
fn link_needs(left: &[&Program]) -> Vec<&'static str> {
    let links_c = |program: &&Program| matches!(&program.source, Source::Go(source) if source.links_c);
    if left.iter().any(links_c) { debian::absent_build_needs() } else { Vec::new() }
}

struct Work<'a> {
    go: &'a Go,
    store: &'a Store,
    stop: &'a AtomicBool,
    debian: Debian<'a>,
}

impl Work<'_> {
    /// What must be on the system for something.
    fn install(&self, what: &str, absent: &[&str], progress: &mut Progress<'_>) -> Result<(), Missing> {
        if absent.is_empty() {
            return Ok(());
        }
        progress.step(
            &format!("installing {}", absent.join(" ")),
            || self.debian.install(what, absent),
            |()| String::new(),
        )
    }

    fn programs(&self, left: &[&Program], progress: &mut Progress<'_>) -> Result<(), Missing> {
        let mut fetched = BTreeSet::new();
        for program in left {
            if let Source::Go(source) = &program.source
                && fetched.insert(source.module.name)
            {
                progress.step(
                    &format!("  downloading the modules of {}", source.module.name),
                    || self.go.download(source.module, self.store, self.stop),
                    |()| String::new(),
                )?;
            }
            let version = match &program.source {
                Source::Go(source) => source.version(),
                Source::Debian { .. } => "from Debian",
            };
            progress.step(
                &format!("  {:<24} {version}", program.name),
                || self.one(program),
                |size| mebibytes(*size),
            )?;
        }
        Ok(())
    }

    /// Makes one program under another name, sees that it runs, and takes it in.
    fn one(&self, program: &Program) -> Result<u64, Missing> {
        let (half, version) = match &program.source {
            Source::Go(source) => {
                let half = self.store.work().join(program.name);
                self.go.build(source, &half, self.store, self.stop)?;
                (half, source.version().to_string())
            }
            Source::Debian { package, files } => self.debian.unpack(package, files)?,
        };
        self.runs(program, &half)?;
        Ok(self.store.take_in(&half, program.name, &version)?.size)
    }

    fn runs(&self, program: &Program, half: &Path) -> Result<(), Missing> {
        let said = match (ask(program, half, self.stop), &program.source) {
            (Ok(version), Source::Go(source)) if version != source.version().trim_start_matches('v') => {
                format!("it says that it is {version}, and {} is pinned", source.version())
            }
            (Ok(_), _) => return Ok(()),
            (Err(said), _) => said,
        };
        if self.stop.load(Ordering::Relaxed) {
            return Err(self.store.interrupted());
        }
        // An unpacked program may lack a library: its package says which.
        if let Source::Debian { package, .. } = &program.source {
            let libraries = self.debian.dependencies(package)?;
            let libraries: Vec<_> = libraries.iter().map(String::as_str).collect();
            if !libraries.is_empty() {
                self.debian.install(program.name, &libraries)?;
                if ask(program, half, self.stop).is_ok() {
                    return Ok(());
                }
            }
        }
        Err(Missing::Failed { doing: format!("running the new {}", program.name), said })
    }
}
