//! Checks the programs that are there: checksums and versions.

use super::catalog::{BED_PROGRAMS, PROGRAM_SETS, ProgramSet, ProgramSource, ProgramSpec};
use super::go::GoToolchain;
use super::store::BinaryStore;
use super::{Binaries, BuildPaths, MissingPrerequisite};
use crate::digest;
use crate::process::{ProcessEnd, last_lines, run};
use crate::progress::{ProgressLines, format_mebibytes};
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Time limit for a program to print its version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(20);

/// Lists the programs and builds nothing. Every program must print its version; built ones must match their checksums.
pub fn check(
    settings: &BuildPaths,
    out: &mut dyn Write,
    stop: &AtomicBool,
) -> Result<Binaries, MissingPrerequisite> {
    let mut progress = ProgressLines::new(out);
    if let Some(folder) = &settings.bin_dir {
        return check_folder(settings, folder, &mut progress, stop);
    }
    let go = GoToolchain::find()?;
    let mut damaged = None;
    for set in PROGRAM_SETS {
        let wrong = check_set(set, &settings.store(&go, set)?, &mut progress, stop)?;
        damaged = damaged.or(wrong);
    }
    damaged.map_or_else(|| Binaries::ready_in(settings), Err)
}

/// Checks one directory of built programs and returns the first damaged one.
fn check_set(
    set: &ProgramSet,
    store: &BinaryStore,
    progress: &mut ProgressLines<'_>,
    stop: &AtomicBool,
) -> Result<Option<MissingPrerequisite>, MissingPrerequisite> {
    let manifest = store.manifest();
    progress.line(&format!("{}", store.bin_dir().display()));
    let mut damaged = None;
    for program in set.programs {
        let path = store.bin_dir().join(program.name);
        let state = match manifest.entry(program.name) {
            Some(entry) if store.has_program(&manifest, program.name) => {
                let (sha256, size) = digest::of_file(&path)
                    .map_err(MissingPrerequisite::io(format!("reading {}", path.display())))?;
                match (sha256 == entry.sha256).then(|| query_version(program, &path, stop)) {
                    Some(Ok(_)) => format!("{:<26} {}", entry.version, format_mebibytes(size)),
                    other => {
                        let why = match other {
                            Some(Err(why)) => why,
                            _ => "checksum mismatch".to_string(),
                        };
                        damaged.get_or_insert(MissingPrerequisite::Damaged { path, why: why.clone() });
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

/// Checks the programs of `PARTAGE_KUBE_BIN_DIR`.
pub(super) fn check_folder(
    settings: &BuildPaths,
    folder: &Path,
    progress: &mut ProgressLines<'_>,
    stop: &AtomicBool,
) -> Result<Binaries, MissingPrerequisite> {
    progress.line(&format!("{} (from {})", folder.display(), super::BIN_DIR_VARIABLE));
    let mut broken = Vec::new();
    for (done, program) in BED_PROGRAMS.programs.iter().enumerate() {
        let path = folder.join(program.name);
        let state = match why_unusable(&path) {
            Some(why) => why.to_string(),
            None => match query_version(program, &path, stop) {
                Ok(version) => match &program.source {
                    ProgramSource::Go(source) if source.version().trim_start_matches('v') != version => {
                        format!("{version} (tested with {})", source.version().trim_start_matches('v'))
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
            return Err(MissingPrerequisite::Interrupted {
                done,
                all: BED_PROGRAMS.programs.len(),
                what: "programs",
            });
        }
        progress.line(&format!("  {:<24} {state}", program.name));
    }
    let binaries = Binaries::ready_in(settings)?;
    if broken.is_empty() {
        Ok(binaries)
    } else {
        Err(MissingPrerequisite::NotInBinDir { folder: folder.to_path_buf(), absent: broken })
    }
}

/// Returns why a file is not usable as a program, if it is not.
pub(super) fn why_unusable(path: &Path) -> Option<&'static str> {
    match fs::metadata(path) {
        Err(_) => Some("missing"),
        Ok(found) if !found.is_file() => Some("not a file"),
        Ok(found) if found.permissions().mode() & 0o111 == 0 => Some("not executable"),
        Ok(_) => None,
    }
}

/// Runs a program and parses its version from its output.
pub(super) fn query_version(program: &ProgramSpec, path: &Path, stop: &AtomicBool) -> Result<String, String> {
    let log = std::env::temp_dir().join(format!("partage-xtask-{}.log", std::process::id()));
    // A CNI plugin reads its command from the environment.
    let mut command = Command::new(path);
    command.args(program.version_arguments).env_remove("CNI_COMMAND");
    let end = run(&mut command, &log, stop, Some(VERSION_TIMEOUT));
    // A few lines in the directory for temporary files may stay.
    let _ = fs::remove_file(log);
    match end {
        // Some print it and then fail because of missing arguments.
        Ok(ProcessEnd::Succeeded(message) | ProcessEnd::Failed(message)) => parse_version(&message)
            .ok_or_else(|| format!("does not print its version: {}", last_lines(&message))),
        Ok(ProcessEnd::Interrupted) => Err("was interrupted".to_string()),
        Ok(ProcessEnd::TimedOut) => {
            Err(format!("does not print its version within {} s", VERSION_TIMEOUT.as_secs()))
        }
        Err(error) => Err(format!("does not run: {error}")),
    }
}

/// Returns the first word that is a version: digits and dots after an optional `v`.
fn parse_version(message: &str) -> Option<String> {
    message.split_whitespace().find_map(|word| {
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
    fn version_is_parsed_from_program_output() {
        let found = |message| parse_version(message).unwrap_or_default();
        assert_eq!(found("Kubernetes v1.36.4\n"), "1.36.4");
        assert_eq!(found("containerd github.com/containerd/containerd/v2 v2.3.7 \n"), "2.3.7");
        assert_eq!(found("etcd Version: 3.6.16\nGit SHA: Not provided\n"), "3.6.16");
        assert_eq!(found("BusyBox v1.35.0 (Debian 1:1.35.0-4+b1) multi-call binary.\n"), "1.35.0");
        assert_eq!(found("/x/bpftool v7.1.0\nusing libbpf v1.1\n"), "7.1.0");
        assert_eq!(parse_version("error: cannot open shared object file\n"), None);
    }
}
