//! What is there: looked at, run, shown.

use super::catalog::Part;
use super::store::Store;
use super::{Clients, Missing};
use crate::binaries::Settings;
use crate::digest;
use crate::process::{End, last_words, run};
use crate::progress::Progress;
use crate::python::plain;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A client that has said nothing by then hangs. The first start of Python's is slow.
const PATIENCE: Duration = Duration::from_secs(120);

/// Says what is there, fetches nothing. Every client is held against its checksum and run without a driver.
pub fn check(settings: &Settings, out: &mut dyn Write, stop: &AtomicBool) -> Result<Clients, Missing> {
    let mut progress = Progress::new(out);
    let store = Store::new(settings)?;
    progress.line(&format!("{}", store.root().display()));
    let mut damaged = None;
    for part in Part::ALL {
        let (program, sealed) = (store.program(part), store.sealed(part));
        let state = match store.record(part) {
            Some(record) => {
                let reading = Missing::io(format!("reading {}", sealed.display()));
                let whole = digest::of_file(&sealed).map_err(reading)?.0 == record.sha256;
                match whole.then(|| runs(part, &program, stop)) {
                    Some(Ok(())) => record.version,
                    other => {
                        let why = match other {
                            Some(Err(why)) => why,
                            _ => "its checksum is not the recorded one".to_string(),
                        };
                        let folder = store.folder(part);
                        damaged.get_or_insert(Missing::Damaged { path: folder, why: why.clone() });
                        format!("damaged: {why}")
                    }
                }
            }
            None => "not there".to_string(),
        };
        if stop.load(Ordering::Relaxed) {
            return Err(store.interrupted());
        }
        progress.line(&format!("  {:<24} {state}", part.name()));
    }
    damaged.map_or_else(|| Clients::ready_in(settings), Err)
}

/// Runs a client far enough to know that it is whole.
pub(super) fn runs(part: Part, program: &Path, stop: &AtomicBool) -> Result<(), String> {
    let log = std::env::temp_dir().join(format!("partage-clients-{}.log", std::process::id()));
    let end = run(plain(Command::new(program).args(part.question())), &log, stop, Some(PATIENCE));
    // It is empty or a few lines in the folder for such things.
    let _ = fs::remove_file(log);
    match end {
        // Without a driver, nvidia-smi says so and ends badly.
        Ok(End::Well(said) | End::Badly(said)) => {
            match part.answers().iter().any(|answer| said.contains(answer)) {
                true => Ok(()),
                false => Err(format!("does not say {}: {}", part.answers().join(" or "), last_words(&said))),
            }
        }
        Ok(End::Interrupted) => Err("was interrupted".to_string()),
        Ok(End::TooLate) => Err(format!("says nothing within {} s", PATIENCE.as_secs())),
        Err(error) => Err(format!("does not run: {error}")),
    }
}
