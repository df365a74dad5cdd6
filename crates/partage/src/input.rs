//! Manifests from files and standard input, in YAML or JSON.

use crate::documents::{self, Documents};
use partage_core::manifest;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

/// What the named files hold.
#[derive(Debug, Default)]
pub(crate) struct Input {
    /// The workloads of all of them, in order.
    pub(crate) workloads: Vec<manifest::Workload>,
    /// How many objects of which other kinds were passed over.
    pub(crate) others: BTreeMap<String, usize>,
    /// Those of them that ask for GPUs all the same, with the file they are in.
    pub(crate) unread: Vec<String>,
    /// What could not be read, with the file it is about.
    pub(crate) unreadable: Vec<String>,
}

/// Reads manifests; `-` is standard input. One that cannot be read does not hide the others.
pub(crate) fn read(files: &[PathBuf]) -> Input {
    let mut input = Input::default();
    for file in files {
        let name = if file.as_os_str() == "-" { "standard input".into() } else { file.display().to_string() };
        let text = match text(file) {
            Ok(text) => text,
            Err(what) => {
                input.unreadable.push(format!("{name}: {what}"));
                continue;
            }
        };
        let Documents { values, errors } = documents::read(&text);
        let contents = manifest::read(&values);
        input.workloads.extend(contents.workloads);
        input.unreadable.extend(contents.unreadable.into_iter().map(|what| format!("{name}: {what}")));
        input.unreadable.extend(errors.into_iter().map(|what| format!("{name}{what}")));
        input.unread.extend(contents.unread.into_iter().map(|what| format!("{name}: {what}")));
        for (kind, count) in contents.others {
            *input.others.entry(kind).or_default() += count;
        }
    }
    if input.workloads.is_empty() && input.unreadable.is_empty() {
        let found = match input.others.values().sum() {
            0 => "the input is empty".to_string(),
            1 => "the input holds one object of another kind".to_string(),
            others => format!("the input holds {others} objects of other kinds"),
        };
        let kinds = manifest::KINDS.join(", ");
        input
            .unreadable
            .push(format!("{found}: there is no workload to read, which is one of {kinds} or Volcano's Job"));
    }
    input
}

/// A whole text file; `-` is standard input.
pub(crate) fn text(file: &Path) -> Result<String, String> {
    let mut bytes = Vec::new();
    let read = if file.as_os_str() == "-" {
        std::io::stdin().lock().read_to_end(&mut bytes)
    } else {
        std::fs::File::open(file).and_then(|mut file| file.read_to_end(&mut bytes))
    };
    read.map_err(|error| format!("cannot be read: {error}"))?;
    if bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]) {
        return Err("is UTF-16: save it as UTF-8".into());
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        format!("is not text: byte {} is not UTF-8", at + 1)
    })
}
