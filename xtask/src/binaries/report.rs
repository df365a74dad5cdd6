//! What is there: looked at, asked, shown.

use super::catalog::{BED, Program, SETS, Set, Source};
use super::go::Go;
use super::store::Store;
use super::{Binaries, Missing, Settings};
use crate::digest;
use crate::process::{End, last_words, run};
use crate::progress::{Progress, mebibytes};
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A program that does not say its version by then hangs.
const PATIENCE: Duration = Duration::from_secs(20);

/// Says what is there, builds nothing. Every program is asked its version; built ones are held against their checksums.
pub fn check(settings: &Settings, out: &mut dyn Write, stop: &AtomicBool) -> Result<Binaries, Missing> {
    let mut progress = Progress::new(out);
    if let Some(folder) = &settings.bin_dir {
        return check_folder(settings, folder, &mut progress, stop);
    }
    let go = Go::find()?;
    let mut damaged = None;
    for set in SETS {
        let wrong = check_set(set, &settings.store(&go, set)?, &mut progress, stop)?;
        damaged = damaged.or(wrong);
    }
    damaged.map_or_else(|| Binaries::ready_in(settings), Err)
}

/// One folder of built programs; the first that is damaged.
fn check_set(
    set: &Set,
    store: &Store,
    progress: &mut Progress<'_>,
    stop: &AtomicBool,
) -> Result<Option<Missing>, Missing> {
    let manifest = store.manifest();
    progress.line(&format!("{}", store.bin().display()));
    let mut damaged = None;
    for program in set.programs {
        let path = store.bin().join(program.name);
        let state = match manifest.entry(program.name) {
            Some(entry) if store.has(&manifest, program.name) => {
                let (sha256, size) =
                    digest::of_file(&path).map_err(Missing::io(format!("reading {}", path.display())))?;
                match (sha256 == entry.sha256).then(|| ask(program, &path, stop)) {
                    Some(Ok(_)) => format!("{:<26} {}", entry.version, mebibytes(size)),
                    other => {
                        let why = match other {
                            Some(Err(why)) => why,
                            _ => "its checksum is not the recorded one".to_string(),
                        };
                        damaged.get_or_insert(Missing::Damaged { path, why: why.clone() });
                        format!("damaged: {why}")
                    }
                }
            }
            _ => "not built".to_string(),
        };
        if stop.load(Ordering::Relaxed) {
            return Err(store.interrupted());
        }
        progress.line(&format!("  {:<24} {state}", program.name));
    }
    Ok(damaged)
}

/// The programs of `PARTAGE_KUBE_BIN_DIR`.
pub(super) fn check_folder(
    settings: &Settings,
    folder: &Path,
    progress: &mut Progress<'_>,
    stop: &AtomicBool,
) -> Result<Binaries, Missing> {
    progress.line(&format!("{} (by {})", folder.display(), super::BIN_DIR));
    let mut broken = Vec::new();
    for (done, program) in BED.programs.iter().enumerate() {
        let path = folder.join(program.name);
        let state = match unusable(&path) {
            Some(why) => why.to_string(),
            None => match ask(program, &path, stop) {
                Ok(version) => match &program.source {
                    Source::Go(source) if source.version().trim_start_matches('v') != version => {
                        format!("{version} (tried with {})", source.version().trim_start_matches('v'))
                    }
                    _ => version,
                },
                Err(why) => {
                    broken.push(format!("{} ({why})", program.name));
                    why
                }
            },
        };
        if stop.load(Ordering::Relaxed) {
            return Err(Missing::Interrupted { done, all: BED.programs.len(), what: "programs" });
        }
        progress.line(&format!("  {:<24} {state}", program.name));
    }
    let binaries = Binaries::ready_in(settings)?;
    match broken.is_empty() {
        true => Ok(binaries),
        false => Err(Missing::NotInFolder { folder: folder.to_path_buf(), absent: broken }),
    }
}

/// Why a file is no program, where it is none.
pub(super) fn unusable(path: &Path) -> Option<&'static str> {
    match fs::metadata(path) {
        Err(_) => Some("not there"),
        Ok(found) if !found.is_file() => Some("not a file"),
        Ok(found) if found.permissions().mode() & 0o111 == 0 => Some("not executable"),
        Ok(_) => None,
    }
}

/// Runs a program and takes its version from what it says.
pub(super) fn ask(program: &Program, path: &Path, stop: &AtomicBool) -> Result<String, String> {
    let log = std::env::temp_dir().join(format!("partage-xtask-{}.log", std::process::id()));
    // A plugin asks its environment for work.
    let mut command = Command::new(path);
    command.args(program.version_arguments).env_remove("CNI_COMMAND");
    let end = run(&mut command, &log, stop, Some(PATIENCE));
    // It is empty or a few lines in the folder for such things.
    let _ = fs::remove_file(log);
    match end {
        // Some say it and then complain that nothing was asked of them.
        Ok(End::Well(said) | End::Badly(said)) => {
            version_in(&said).ok_or_else(|| format!("does not say its version: {}", last_words(&said)))
        }
        Ok(End::Interrupted) => Err("was interrupted".to_string()),
        Ok(End::TooLate) => Err(format!("does not say its version within {} s", PATIENCE.as_secs())),
        Err(error) => Err(format!("does not run: {error}")),
    }
}

/// The first word that is a version: digits and dots after an optional `v`.
fn version_in(said: &str) -> Option<String> {
    said.split_whitespace().find_map(|word| {
        let word = word.trim_start_matches('v').trim_end_matches(',');
        let is_version = word.starts_with(|c: char| c.is_ascii_digit())
            && word.contains('.')
            && !word.contains(['/', ':', '=']);
        is_version.then(|| word.to_string())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_in_what_programs_say() {
        let found = |said| version_in(said).unwrap_or_default();
        assert_eq!(found("Kubernetes v1.36.4\n"), "1.36.4");
        assert_eq!(found("containerd github.com/containerd/containerd/v2 v2.3.7 \n"), "2.3.7");
        assert_eq!(found("etcd Version: 3.6.16\nGit SHA: Not provided\n"), "3.6.16");
        assert_eq!(found("BusyBox v1.35.0 (Debian 1:1.35.0-4+b1) multi-call binary.\n"), "1.35.0");
        assert_eq!(found("/x/bpftool v7.1.0\nusing libbpf v1.1\n"), "7.1.0");
        assert_eq!(version_in("error: cannot open shared object file\n"), None);
    }
}
