//! Builds missing programs, in one run at a time.

use super::catalog::{PROGRAM_SETS, ProgramSet, ProgramSource, ProgramSpec};
use super::check::{check_folder, query_version};
use super::go::GoToolchain;
use super::store::BinaryStore;
use super::{Binaries, BuildPaths, MissingPrerequisite, disk_space};
use crate::debian::{self, DebianTools};
use crate::progress::{ProgressLines, format_mebibytes};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Builds every missing program. Checks known preconditions before anything is built.
///
/// `stop` interrupts: finished programs are kept, unfinished ones removed.
pub fn build(
    settings: &BuildPaths,
    out: &mut dyn Write,
    stop: &AtomicBool,
) -> Result<Binaries, MissingPrerequisite> {
    let mut progress = ProgressLines::new(out);
    if let Some(folder) = &settings.bin_dir {
        return check_folder(settings, folder, &mut progress, stop);
    }
    let go = GoToolchain::find()?;
    for set in PROGRAM_SETS {
        check_preconditions(&go, &settings.store(&go, set)?, set)?;
    }
    for set in PROGRAM_SETS {
        build_set(set, &go, &settings.store(&go, set)?, &mut progress, stop)?;
    }
    Binaries::ready_in(settings)
}

fn build_set(
    set: &ProgramSet,
    go: &GoToolchain,
    store: &BinaryStore,
    progress: &mut ProgressLines<'_>,
    stop: &AtomicBool,
) -> Result<(), MissingPrerequisite> {
    let start = Instant::now();
    let building = store.lock_for_build(progress, stop)?;
    // Another run may have built them while this one waited.
    let missing = missing_programs(store, set);
    let interrupted = || store.interrupted();
    let debian = DebianTools {
        work: store.work_dir(),
        stop,
        interrupted: &interrupted,
        alternative: NO_DEBIAN_HINT,
        private_config: None,
    };
    let work = BuildRun { go, store, stop, debian };
    work.install(BED_PURPOSE, &missing_bed_requirements(), progress)?;
    let (all, what) = (set.programs.len(), set.what);
    if !missing.is_empty() {
        work.install(LINKING_PURPOSE, &missing_link_requirements(&missing), progress)?;
        progress.line(&format!("building {} of {all} {what} with {}, once", missing.len(), go.version));
        work.build_programs(&missing, progress)?;
    }
    drop(building);
    let made = match missing.len() {
        0 => String::new(),
        count => format!(", {count} built in {} s", start.elapsed().as_secs()),
    };
    progress.line(&format!("{all} {what} in {}{made}", store.bin_dir().display()));
    Ok(())
}

/// Returns the programs that are missing.
fn missing_programs<'a>(store: &BinaryStore, set: &'a ProgramSet) -> Vec<&'a ProgramSpec> {
    let manifest = store.manifest();
    set.programs.iter().filter(|program| !store.has_program(&manifest, program.name)).collect()
}

/// Checks for certain failures before anything is changed.
fn check_preconditions(
    go: &GoToolchain,
    store: &BinaryStore,
    set: &ProgramSet,
) -> Result<(), MissingPrerequisite> {
    let missing = missing_programs(store, set);
    disk_space::check_free(&[&store.bin_dir(), &go.cache, &go.modules], &missing)?;
    debian::check_can_install(LINKING_PURPOSE, &missing_link_requirements(&missing))
}

/// What to do on a machine without Debian's tools.
const NO_DEBIAN_HINT: &str = "set PARTAGE_KUBE_BIN_DIR to a directory with the programs";

/// Purposes for which system packages are installed.
const LINKING_PURPOSE: &str = "linking runc";
const BED_PURPOSE: &str = "a bed";

/// Returns the missing packages that beds need. Only root can start beds.
fn missing_bed_requirements() -> Vec<&'static str> {
    if rustix::process::geteuid().is_root() { debian::missing_bed_packages() } else { Vec::new() }
}

/// Returns the missing packages that linking C code needs.
fn missing_link_requirements(missing: &[&ProgramSpec]) -> Vec<&'static str> {
    let links_c =
        |program: &&ProgramSpec| matches!(&program.source, ProgramSource::Go(source) if source.links_c);
    if missing.iter().any(links_c) { debian::missing_build_packages() } else { Vec::new() }
}

struct BuildRun<'a> {
    go: &'a GoToolchain,
    store: &'a BinaryStore,
    stop: &'a AtomicBool,
    debian: DebianTools<'a>,
}

impl BuildRun<'_> {
    /// Installs system packages for a purpose.
    fn install(
        &self,
        what: &str,
        absent: &[&str],
        progress: &mut ProgressLines<'_>,
    ) -> Result<(), MissingPrerequisite> {
        if absent.is_empty() {
            return Ok(());
        }
        progress.step(
            &format!("installing {}", absent.join(" ")),
            || self.debian.install(what, absent),
            |()| String::new(),
        )
    }

    fn build_programs(
        &self,
        missing: &[&ProgramSpec],
        progress: &mut ProgressLines<'_>,
    ) -> Result<(), MissingPrerequisite> {
        let mut fetched = BTreeSet::new();
        for program in missing {
            if let ProgramSource::Go(source) = &program.source
                && fetched.insert(source.module.name)
            {
                progress.step(
                    &format!("  downloading the modules of {}", source.module.name),
                    || self.go.download(source.module, self.store, self.stop),
                    |()| String::new(),
                )?;
            }
            let version = match &program.source {
                ProgramSource::Go(source) => source.version(),
                ProgramSource::Debian { .. } => "from Debian",
            };
            progress.step(
                &format!("  {:<24} {version}", program.name),
                || self.build_program(program),
                |size| format_mebibytes(*size),
            )?;
        }
        Ok(())
    }

    /// Builds one program under a temporary name, checks that it runs, and adds it to the store.
    fn build_program(&self, program: &ProgramSpec) -> Result<u64, MissingPrerequisite> {
        let (unfinished, version) = match &program.source {
            ProgramSource::Go(source) => {
                let unfinished = self.store.work_dir().join(program.name);
                self.go.build(source, &unfinished, self.store, self.stop)?;
                (unfinished, source.version().to_string())
            }
            ProgramSource::Debian { package, files } => self.debian.unpack(package, files)?,
        };
        self.check_runs(program, &unfinished)?;
        Ok(self.store.add_program(&unfinished, program.name, &version)?.size)
    }

    fn check_runs(&self, program: &ProgramSpec, unfinished: &Path) -> Result<(), MissingPrerequisite> {
        let message = match (query_version(program, unfinished, self.stop), &program.source) {
            (Ok(version), ProgramSource::Go(source))
                if version != source.version().trim_start_matches('v') =>
            {
                format!("it reports version {version}, but {} is pinned", source.version())
            }
            (Ok(_), _) => return Ok(()),
            (Err(message), _) => message,
        };
        if self.stop.load(Ordering::Relaxed) {
            return Err(self.store.interrupted());
        }
        // An unpacked program may lack a library, which its package depends on.
        if let ProgramSource::Debian { package, .. } = &program.source {
            let libraries = self.debian.dependencies(package)?;
            let libraries: Vec<_> = libraries.iter().map(String::as_str).collect();
            if !libraries.is_empty() {
                self.debian.install(program.name, &libraries)?;
                if query_version(program, unfinished, self.stop).is_ok() {
                    return Ok(());
                }
            }
        }
        Err(MissingPrerequisite::Failed { doing: format!("running the new {}", program.name), message })
    }
}
