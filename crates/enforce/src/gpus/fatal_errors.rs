//! Errors that make a GPU unusable until it is reset, kept for the next daemon: the driver reports each of them once.

use crate::error_chain::describe;
use crate::records::{RecordDir, RecordError, VersionedRecord};
use partage_host::gpus::FatalGpuError;
use serde::{Deserialize, Serialize};

/// The name of the record.
const NAME: &str = "health";

/// The record: the errors of one boot. A boot resets every GPU.
#[derive(Serialize, Deserialize)]
struct FatalErrors {
    boot: String,
    gpus: Vec<FatalGpuError>,
}

impl VersionedRecord for FatalErrors {
    const VERSION: u32 = 1;
}

/// Keeps fatal errors across restarts of the daemon, and writes only what changed.
#[derive(Debug, Default)]
pub struct FatalErrorLog {
    /// The errors in the record, without the energy, which changes constantly; unknown at first.
    written: Option<Vec<FatalGpuError>>,
    /// Why the last write failed, so that a disk that stays full is reported once.
    failure: Option<String>,
}

impl FatalErrorLog {
    /// Returns the errors that an earlier daemon of this boot recorded.
    pub fn load(records: &RecordDir, boot_id: &str) -> Result<Vec<FatalGpuError>, RecordError> {
        let kept: Option<FatalErrors> = records.load(NAME)?;
        Ok(kept.filter(|kept| kept.boot == boot_id).map(|kept| kept.gpus).unwrap_or_default())
    }

    /// Records the errors. They are written when this returns; a failed write is retried with the next call.
    pub fn store(&mut self, records: &RecordDir, boot_id: &str, errors: Vec<FatalGpuError>) {
        let without_energy: Vec<FatalGpuError> =
            errors.iter().map(|error| FatalGpuError { energy: None, ..error.clone() }).collect();
        if self.written.as_ref() == Some(&without_energy) {
            return;
        }
        match records.store(NAME, &FatalErrors { boot: boot_id.into(), gpus: errors }) {
            Ok(()) => {
                self.written = Some(without_energy);
                self.failure = None;
            }
            Err(error) => {
                let failure = describe(&error);
                if self.failure.as_ref() != Some(&failure) {
                    tracing::warn!(error = failure, "cannot record fatal GPU errors");
                    self.failure = Some(failure);
                }
            }
        }
    }
}
