//! The settings' file over time: what it says, and what was good the last time it could be used.

use super::{Settings, SettingsError};
use crate::store::Store;
use partage_core::model::NodeName;
use partage_enforce::records::VersionedRecord;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;

/// What the last good text is called among the agent's records.
const SETTINGS: &str = "settings";

#[derive(Serialize, Deserialize)]
struct Kept {
    text: String,
}

impl VersionedRecord for Kept {
    const VERSION: u32 = 1;
}

/// A file that is followed.
pub(crate) struct Followed {
    /// Absent = all as by default, for ever.
    path: Option<PathBuf>,
    node: NodeName,
    store: Store,
    /// What it said when it was last read, whether that can be used or not; absent where it could not be read.
    last: Option<String>,
    /// Why it could not be read the last time.
    unreadable: Option<String>,
}

impl Followed {
    pub(crate) fn new(path: Option<PathBuf>, node: &NodeName, store: &Store) -> Followed {
        Followed { path, node: node.clone(), store: store.clone(), last: None, unreadable: None }
    }

    /// What it says now.
    pub(crate) fn read(&mut self) -> Result<Settings, SettingsError> {
        let Some(path) = &self.path else { return Ok(Settings::default()) };
        (self.last, self.unreadable) = (None, None);
        let text = Settings::text(path).inspect_err(|error| self.unreadable = Some(error.to_string()))?;
        // The very text that is judged: what is written meanwhile is news.
        Settings::parse(self.last.insert(text), &self.node)
    }

    /// What it says where that is something else than the last time. One that is away for a moment says nothing; why one that is there
    /// cannot be read is said once.
    pub(crate) fn news(&mut self) -> Option<Result<Settings, SettingsError>> {
        let text = match Settings::text(self.path.as_ref()?) {
            Ok(text) => text,
            Err(SettingsError::Io { error, .. }) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                let why = Some(error.to_string());
                let is_news = self.unreadable != why;
                self.unreadable = why;
                return is_news.then_some(Err(error));
            }
        };
        self.unreadable = None;
        if self.last.as_ref() == Some(&text) {
            return None;
        }
        Some(Settings::parse(self.last.insert(text), &self.node))
    }

    /// These are in force: where they are what it last said, the next agent can start with them, whatever the file says then.
    pub(crate) fn keep(&self, settings: &Settings) {
        let Some(text) = &self.last else { return };
        let is_that = Settings::parse(text, &self.node).is_ok_and(|last| last == *settings);
        if !is_that || self.kept().as_ref() == Some(text) {
            return;
        }
        if let Err(error) = self.store.put_one(SETTINGS, &Kept { text: text.clone() }) {
            tracing::warn!("the settings cannot be recorded: {error}");
        }
    }

    /// What was last in force, unless the file says just that.
    pub(crate) fn earlier(&self) -> Option<Settings> {
        let text = self.kept().filter(|text| self.last.as_ref() != Some(text))?;
        Settings::parse(&text, &self.node).ok()
    }

    fn kept(&self) -> Option<String> {
        self.path.as_ref()?;
        // Where they cannot be read, there are none to start with.
        let kept = self.store.one::<Kept>(SETTINGS).inspect_err(|error| tracing::warn!("{error}"));
        kept.ok()?.map(|kept| kept.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn what_was_good_is_there_when_the_file_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path(), folder.path()).unwrap();
        let path = folder.path().join("node.yaml");
        let begun = || Followed::new(Some(path.clone()), &"gpu-1".into(), &store);
        let mut followed = begun();
        assert!(followed.read().is_err() && followed.earlier().is_none(), "there is no file");
        fs::write(&path, "sharesPerGpu: 7").unwrap();
        let seven = followed.news().unwrap().unwrap();
        assert_eq!(seven.shares_per_gpu, 7);
        assert!(followed.news().is_none());
        followed.keep(&seven);
        fs::write(&path, "sharesPerGpu: 0").unwrap();
        assert!(followed.news().unwrap().is_err());
        assert!(followed.news().is_none(), "the same is not judged twice");
        // The agent is started anew, with a file that cannot be used; then without one.
        let mut later = begun();
        assert!(later.read().is_err());
        assert_eq!(later.earlier().unwrap().shares_per_gpu, 7);
        later.keep(&seven);
        assert!(later.earlier().is_some(), "what cannot be used is never kept");
        fs::remove_file(&path).unwrap();
        let mut later = begun();
        assert!(later.read().is_err() && later.news().is_none());
        assert_eq!(later.earlier().unwrap().shares_per_gpu, 7);
        // It is mended.
        fs::write(&path, "sharesPerGpu: 8").unwrap();
        let eight = later.news().unwrap().unwrap();
        assert_eq!(eight.shares_per_gpu, 8);
        later.keep(&eight);
        assert!(later.earlier().is_none(), "nothing else was ever good");
    }

    #[test]
    fn what_changes_after_it_was_read_is_news() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path(), folder.path()).unwrap();
        let path = folder.path().join("node.yaml");
        fs::write(&path, "sharesPerGpu: 7").unwrap();
        let mut followed = Followed::new(Some(path.clone()), &"gpu-1".into(), &store);
        assert_eq!(followed.read().unwrap().shares_per_gpu, 7);
        fs::write(&path, "sharesPerGpu: 8").unwrap();
        assert_eq!(followed.news().unwrap().unwrap().shares_per_gpu, 8);
        // What cannot be read is told once, and what is away for a moment not at all.
        fs::write(&path, b"sharesPerGpu: \xff").unwrap();
        assert!(followed.news().unwrap().is_err() && followed.news().is_none());
        fs::remove_file(&path).unwrap();
        assert!(followed.news().is_none());
        fs::write(&path, "sharesPerGpu: 9").unwrap();
        assert_eq!(followed.news().unwrap().unwrap().shares_per_gpu, 9);
    }

    #[test]
    fn without_a_file_all_is_as_by_default() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path(), folder.path()).unwrap();
        let mut followed = Followed::new(None, &"gpu-1".into(), &store);
        assert_eq!(followed.read().unwrap(), Settings::default());
        followed.keep(&Settings::default());
        assert!(followed.news().is_none() && followed.earlier().is_none());
    }
}
