//! Reads manifests from files and standard input, in YAML or JSON.

use crate::yaml::{self, ParsedDocuments};
use partage_core::manifest;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The contents of all files given on the command line.
#[derive(Debug, Default)]
pub(crate) struct ManifestInput {
    /// Workloads of all files, in order.
    pub(crate) workloads: Vec<manifest::WorkloadManifest>,
    /// Number of skipped objects, by kind.
    pub(crate) others: BTreeMap<String, usize>,
    /// Messages about skipped objects that request GPUs, each with its file.
    pub(crate) unread_gpu_requests: Vec<String>,
    /// Messages about files and documents that could not be read, each with its file.
    pub(crate) unreadable: Vec<String>,
}

/// Reads manifests; `-` is standard input. A file that cannot be read does not stop the others from being read.
pub(crate) fn read_manifests(files: &[PathBuf]) -> ManifestInput {
    let mut input = ManifestInput::default();
    for file in files {
        let name = if file.as_os_str() == "-" { "standard input".into() } else { file.display().to_string() };
        let text = match read_text(file) {
            Ok(text) => text,
            Err(error) => {
                input.unreadable.push(format!("{name}: {error}"));
                continue;
            }
        };
        let ParsedDocuments { values, errors } = yaml::parse_documents(&text);
        let contents = manifest::read(&values);
        input.workloads.extend(contents.workloads);
        input.unreadable.extend(contents.unreadable.into_iter().map(|what| format!("{name}: {what}")));
        input.unreadable.extend(errors.into_iter().map(|what| format!("{name}{what}")));
        input.unread_gpu_requests.extend(contents.unread.into_iter().map(|what| format!("{name}: {what}")));
        for (kind, count) in contents.others {
            *input.others.entry(kind).or_default() += count;
        }
    }
    if input.workloads.is_empty() && input.unreadable.is_empty() {
        let found = match input.others.values().sum() {
            0 => "the input is empty".to_string(),
            1 => "the input has one object of another kind and no workload".to_string(),
            others => format!("the input has {others} objects of other kinds and no workload"),
        };
        let kinds = manifest::KINDS.join(", ");
        input.unreadable.push(format!("{found}: expected {kinds} or a Volcano Job"));
    }
    input
}

/// The reason why a text file could not be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadTextError {
    /// The file could not be opened or read.
    #[error("cannot read the file: {0}")]
    Io(#[from] std::io::Error),
    /// The file starts with a UTF-16 byte order mark.
    #[error("the file is UTF-16: save it as UTF-8")]
    Utf16,
    /// The file is not UTF-8; the number is the first wrong byte, counted from 1.
    #[error("not a text file: byte {0} is not UTF-8")]
    NotUtf8(usize),
}

/// Reads a whole text file; `-` is standard input.
pub(crate) fn read_text(file: &Path) -> Result<String, ReadTextError> {
    let mut bytes = Vec::new();
    if file.as_os_str() == "-" {
        std::io::stdin().lock().read_to_end(&mut bytes)?;
    } else {
        std::fs::File::open(file)?.read_to_end(&mut bytes)?;
    }
    if bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]) {
        return Err(ReadTextError::Utf16);
    }
    String::from_utf8(bytes).map_err(|error| ReadTextError::NotUtf8(error.utf8_error().valid_up_to() + 1))
}
