//! Checks the clients that are there: checksums and a test run.

use super::catalog::ClientBundle;
use super::store::ClientStore;
use super::{Clients, MissingPrerequisite};
use crate::binaries::BuildPaths;
use crate::digest;
use crate::process::{ProcessEnd, last_lines, run};
use crate::progress::ProgressLines;
use crate::python::clear_python_variables;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Time limit for a test run. The first start of Python is slow.
const PROBE_TIMEOUT: Duration = Duration::from_secs(120);

/// Lists the clients and fetches nothing. Every client must match its checksum and run without a driver.
pub fn check(
    settings: &BuildPaths,
    out: &mut dyn Write,
    stop: &AtomicBool,
) -> Result<Clients, MissingPrerequisite> {
    let mut progress = ProgressLines::new(out);
    let store = ClientStore::new(settings)?;
    progress.line(&format!("{}", store.root().display()));
    let mut damaged = None;
    for bundle in ClientBundle::ALL {
        let (program, checksummed_file) = (store.program(bundle), store.checksummed_file(bundle));
        let state = match store.record(bundle) {
            Some(record) => {
                let reading = MissingPrerequisite::io(format!("reading {}", checksummed_file.display()));
                let whole = digest::of_file(&checksummed_file).map_err(reading)?.0 == record.sha256;
                match whole.then(|| check_runs(bundle, &program, stop)) {
                    Some(Ok(())) => record.version,
                    other => {
                        let why = match other {
                            Some(Err(why)) => why,
                            _ => "checksum mismatch".to_string(),
                        };
                        let folder = store.folder(bundle);
                        damaged
                            .get_or_insert(MissingPrerequisite::Damaged { path: folder, why: why.clone() });
                        format!("damaged: {why}")
                    }
                }
            }
            None => "missing".to_string(),
        };
        if stop.load(Ordering::Relaxed) {
            return Err(store.interrupted());
        }
        progress.line(&format!("  {:<24} {state}", bundle.name()));
    }
    damaged.map_or_else(|| Clients::ready_in(settings), Err)
}

/// Runs a client far enough to know that it is complete.
pub(super) fn check_runs(bundle: ClientBundle, program: &Path, stop: &AtomicBool) -> Result<(), String> {
    let log = std::env::temp_dir().join(format!("partage-clients-{}.log", std::process::id()));
    let end = run(
        clear_python_variables(Command::new(program).args(bundle.probe_arguments())),
        &log,
        stop,
        Some(PROBE_TIMEOUT),
    );
    // A few lines in the directory for temporary files may stay.
    let _ = fs::remove_file(log);
    match end {
        // Without a driver, nvidia-smi prints an error and fails.
        Ok(ProcessEnd::Succeeded(message) | ProcessEnd::Failed(message)) => {
            if bundle.probe_outputs().iter().any(|answer| message.contains(answer)) {
                Ok(())
            } else {
                Err(format!(
                    "does not print {}: {}",
                    bundle.probe_outputs().join(" or "),
                    last_lines(&message)
                ))
            }
        }
        Ok(ProcessEnd::Interrupted) => Err("was interrupted".to_string()),
        Ok(ProcessEnd::TimedOut) => Err(format!("does not exit within {} s", PROBE_TIMEOUT.as_secs())),
        Err(error) => Err(format!("does not run: {error}")),
    }
}
