//! Exceptions from the text check: `PATH: PHRASE # REASON` lines.
//!
//! An exception applies to every file whose path starts with `PATH` (`*` means all), and to findings that contain `PHRASE`.

use super::TextCheckError;
use std::fs;
use std::io;
use std::path::Path;

/// The exceptions.
#[derive(Debug, Default)]
pub(super) struct AllowList {
    entries: Vec<(String, String)>,
}

impl AllowList {
    /// Reads the list. A missing file is an empty list.
    pub(super) fn read(path: &Path) -> Result<AllowList, TextCheckError> {
        match fs::read_to_string(path) {
            Ok(text) => AllowList::parse(&text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(AllowList::default()),
            Err(source) => Err(TextCheckError::Io { path: path.to_path_buf(), source }),
        }
    }

    /// Parses the list. Every entry needs a reason.
    pub(super) fn parse(text: &str) -> Result<AllowList, TextCheckError> {
        let mut entries = Vec::new();
        for (number, line) in text.lines().enumerate() {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let entry = line.split_once(" # ").and_then(|(entry, _reason)| entry.split_once(": "));
            let Some((path, phrase)) = entry else {
                return Err(TextCheckError::AllowList { line: number + 1 });
            };
            entries.push((path.trim().to_string(), phrase.trim().to_string()));
        }
        Ok(AllowList { entries })
    }

    /// Whether a finding in a file is an exception.
    pub(super) fn permits(&self, path: &str, finding: &str) -> bool {
        self.entries.iter().any(|(prefix, phrase)| {
            (prefix == "*" || path.starts_with(prefix.as_str())) && finding.contains(phrase.as_str())
        })
    }
}
