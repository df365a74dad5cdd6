//! Watches the settings file, and persists the last text that could be used.

use super::{AgentSettings, AgentSettingsError};
use crate::store::AgentStore;
use partage_core::model::NodeName;
use partage_enforce::error_chain::describe;
use partage_enforce::records::VersionedRecord;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;

/// The name of the record with the last settings that were in force.
const RECORD_NAME: &str = "settings";

/// The text of the settings that were last in force.
#[derive(Serialize, Deserialize)]
struct SettingsRecord {
    text: String,
}

impl VersionedRecord for SettingsRecord {
    const VERSION: u32 = 1;
}

/// The settings file, and what was last read from it.
pub(crate) struct SettingsWatcher {
    /// Absent if all settings have their defaults.
    path: Option<PathBuf>,
    node: NodeName,
    store: AgentStore,
    /// The text that was last read, whether it is valid or not; absent if the file could not be read.
    last: Option<String>,
    /// Why the file could not be read the last time.
    unreadable: Option<String>,
}

impl SettingsWatcher {
    pub(crate) fn new(path: Option<PathBuf>, node: &NodeName, store: &AgentStore) -> SettingsWatcher {
        SettingsWatcher { path, node: node.clone(), store: store.clone(), last: None, unreadable: None }
    }

    /// Reads and parses the settings, and keeps the text for [`SettingsWatcher::poll`]. Without a path, returns the
    /// defaults.
    pub(crate) fn read(&mut self) -> Result<AgentSettings, AgentSettingsError> {
        let Some(path) = &self.path else { return Ok(AgentSettings::default()) };
        (self.last, self.unreadable) = (None, None);
        let text = AgentSettings::text(path).inspect_err(|error| self.unreadable = Some(describe(error)))?;
        // The text that is parsed is the one that is kept: a later change is noticed by the next poll.
        AgentSettings::parse_file(path, self.last.insert(text), &self.node)
    }

    /// Returns the settings if the file has changed since it was last read. A file that is missing for a moment is not a change; why a
    /// file cannot be read is returned once.
    pub(crate) fn poll(&mut self) -> Option<Result<AgentSettings, AgentSettingsError>> {
        let path = self.path.as_ref()?;
        let text = match AgentSettings::text(path) {
            Ok(text) => text,
            Err(AgentSettingsError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return None;
            }
            Err(error) => {
                let text = Some(describe(&error));
                let is_new = self.unreadable != text;
                self.unreadable = text;
                return is_new.then_some(Err(error));
            }
        };
        self.unreadable = None;
        if self.last.as_ref() == Some(&text) {
            return None;
        }
        Some(AgentSettings::parse_file(path, self.last.insert(text), &self.node))
    }

    /// Persists the text of the settings in force, so that the next agent can start with them if the file is invalid then. Does
    /// nothing if they are not what was last read from the file.
    pub(crate) fn persist(&self, settings: &AgentSettings) {
        let Some(text) = &self.last else { return };
        let is_current = AgentSettings::parse(text, &self.node).is_ok_and(|last| last == *settings);
        if !is_current || self.persisted().as_ref() == Some(text) {
            return;
        }
        if let Err(error) = self.store.put_singleton(RECORD_NAME, &SettingsRecord { text: text.clone() }) {
            tracing::warn!(error = %describe(&error), "cannot record the settings in force");
        }
    }

    /// Returns the settings that were last in force, unless the file has the same text.
    pub(crate) fn earlier(&self) -> Option<AgentSettings> {
        let text = self.persisted().filter(|text| self.last.as_ref() != Some(text))?;
        AgentSettings::parse(&text, &self.node).ok()
    }

    fn persisted(&self) -> Option<String> {
        self.path.as_ref()?;
        // If the record cannot be read, there are no earlier settings.
        let kept = self.store.singleton::<SettingsRecord>(RECORD_NAME).inspect_err(|error| {
            tracing::warn!(error = %describe(error), "cannot read the settings that were last in force");
        });
        kept.ok()?.map(|kept| kept.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn settings_last_in_force_are_restored_when_the_file_is_invalid() {
        let folder = tempfile::tempdir().unwrap();
        let store = AgentStore::open(folder.path(), folder.path()).unwrap();
        let path = folder.path().join("node.yaml");
        let begun = || SettingsWatcher::new(Some(path.clone()), &"gpu-1".into(), &store);
        let mut watcher = begun();
        assert!(watcher.read().is_err() && watcher.earlier().is_none(), "there is no file");
        fs::write(&path, "sharesPerGpu: 7").unwrap();
        let seven = watcher.poll().unwrap().unwrap();
        assert_eq!(seven.shares_per_gpu, 7);
        assert!(watcher.poll().is_none());
        watcher.persist(&seven);
        fs::write(&path, "sharesPerGpu: 0").unwrap();
        assert!(watcher.poll().unwrap().is_err());
        assert!(watcher.poll().is_none(), "the same is not judged twice");
        // The agent is started again, with a file that cannot be used; then without one.
        let mut later = begun();
        assert!(later.read().is_err());
        assert_eq!(later.earlier().unwrap().shares_per_gpu, 7);
        later.persist(&seven);
        assert!(later.earlier().is_some(), "what cannot be used is never kept");
        fs::remove_file(&path).unwrap();
        let mut later = begun();
        assert!(later.read().is_err() && later.poll().is_none());
        assert_eq!(later.earlier().unwrap().shares_per_gpu, 7);
        // It is mended.
        fs::write(&path, "sharesPerGpu: 8").unwrap();
        let eight = later.poll().unwrap().unwrap();
        assert_eq!(eight.shares_per_gpu, 8);
        later.persist(&eight);
        assert!(later.earlier().is_none(), "nothing else was ever good");
    }

    #[test]
    fn error_of_invalid_settings_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let store = AgentStore::open(folder.path(), folder.path()).unwrap();
        let path = folder.path().join("node.yaml");
        let mut watcher = SettingsWatcher::new(Some(path.clone()), &"gpu-1".into(), &store);
        for (text, problem) in
            [("sharesPerGpu: 0", "sharesPerGpu: 0 shares"), ("sharesPerGPU: 1", "sharesPerGPU")]
        {
            fs::write(&path, text).unwrap();
            let polled = describe(&watcher.poll().unwrap().unwrap_err());
            assert_eq!(polled, describe(&watcher.read().unwrap_err()));
            let named = polled.strip_prefix(&format!("{}: ", path.display()));
            assert!(named.is_some_and(|rest| rest.contains(problem)), "{polled}");
        }
    }

    #[test]
    fn change_after_reading_is_detected() {
        let folder = tempfile::tempdir().unwrap();
        let store = AgentStore::open(folder.path(), folder.path()).unwrap();
        let path = folder.path().join("node.yaml");
        fs::write(&path, "sharesPerGpu: 7").unwrap();
        let mut watcher = SettingsWatcher::new(Some(path.clone()), &"gpu-1".into(), &store);
        assert_eq!(watcher.read().unwrap().shares_per_gpu, 7);
        fs::write(&path, "sharesPerGpu: 8").unwrap();
        assert_eq!(watcher.poll().unwrap().unwrap().shares_per_gpu, 8);
        // A file that cannot be read is reported once, and one that is missing for a moment not at all.
        fs::write(&path, b"sharesPerGpu: \xff").unwrap();
        assert!(watcher.poll().unwrap().is_err() && watcher.poll().is_none());
        fs::remove_file(&path).unwrap();
        assert!(watcher.poll().is_none());
        fs::write(&path, "sharesPerGpu: 9").unwrap();
        assert_eq!(watcher.poll().unwrap().unwrap().shares_per_gpu, 9);
    }

    #[test]
    fn without_a_file_all_settings_have_their_defaults() {
        let folder = tempfile::tempdir().unwrap();
        let store = AgentStore::open(folder.path(), folder.path()).unwrap();
        let mut watcher = SettingsWatcher::new(None, &"gpu-1".into(), &store);
        assert_eq!(watcher.read().unwrap(), AgentSettings::default());
        watcher.persist(&AgentSettings::default());
        assert!(watcher.poll().is_none() && watcher.earlier().is_none());
    }
}
