//! What makes GPUs unusable until they are reset, kept for the agent that comes next: the driver says it once.

use crate::checkpoint::{Checkpoint, CheckpointError};
use partage_enforce::records::VersionedRecord;
use partage_host::gpus::Fatal;
use serde::{Deserialize, Serialize};

/// What it is called among the agent's records.
const HEALTH: &str = "health";

/// What is on disk.
#[derive(Serialize, Deserialize)]
struct Kept {
    /// A boot resets every GPU.
    boot: String,
    gpus: Vec<Fatal>,
}

impl VersionedRecord for Kept {
    const VERSION: u32 = 1;
}

/// What an earlier agent of this boot knew.
pub(crate) fn recall(checkpoint: &Checkpoint, boot: &str) -> Result<Vec<Fatal>, CheckpointError> {
    let kept: Option<Kept> = checkpoint.one(HEALTH)?;
    Ok(kept.filter(|kept| kept.boot == boot).map(|kept| kept.gpus).unwrap_or_default())
}

/// Keeps it, and writes only what is new.
#[derive(Default)]
pub(crate) struct Memory {
    /// What is on disk, without the energy, which changes all the time; not known at the beginning.
    written: Option<Vec<Fatal>>,
}

impl Memory {
    /// On disk when this returns; where the disk refuses, tried again with the next call.
    pub(crate) fn keep(&mut self, checkpoint: &Checkpoint, boot: &str, fatal: Vec<Fatal>) {
        let plain: Vec<Fatal> = fatal.iter().map(|one| Fatal { energy: None, ..one.clone() }).collect();
        if self.written.as_ref() == Some(&plain) {
            return;
        }
        match checkpoint.put_one(HEALTH, &Kept { boot: boot.into(), gpus: fatal }) {
            Ok(()) => self.written = Some(plain),
            Err(error) => tracing::warn!("what is wrong with GPUs cannot be recorded: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_fatal_is_known_until_the_next_boot() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::open(folder.path(), folder.path()).unwrap();
        assert_eq!(recall(&checkpoint, "boot-1").unwrap(), []);
        let fatal = |energy| vec![Fatal { uuid: "GPU-1".into(), xid: 62, gone: false, energy: Some(energy) }];
        let mut memory = Memory::default();
        memory.keep(&checkpoint, "boot-1", fatal(5));
        // More energy alone is no news.
        memory.keep(&checkpoint, "boot-1", fatal(6));
        assert_eq!(recall(&checkpoint, "boot-1").unwrap(), fatal(5));
        assert_eq!(recall(&checkpoint, "boot-2").unwrap(), []);
        // It was reset.
        memory.keep(&checkpoint, "boot-1", Vec::new());
        assert_eq!(recall(&checkpoint, "boot-1").unwrap(), []);
        // Of an agent that starts without any, what an earlier one left goes.
        memory.keep(&checkpoint, "boot-1", fatal(7));
        Memory::default().keep(&checkpoint, "boot-1", Vec::new());
        assert_eq!(recall(&checkpoint, "boot-1").unwrap(), []);
    }
}
