//! Checks names and prose against the project's writing rules (`make lint`).
//!
//! | check | applies to |
//! |---|---|
//! | word list: phrases that the project has replaced by standard terms | comments and string literals of Rust, C and protobuf; Markdown, YAML, scripts, Makefile |
//! | sentences that start with a relative pronoun as their subject | comments, Markdown |
//! | doc comments that start with "The same", whose meaning depends on their neighbor | Rust |
//! | doc comments whose first line is three words or fewer: at most 1 % | Rust |
//! | constants whose names do not say what they measure | Rust |
//! | public types that share a name | Rust, without generated code and NVIDIA's own names |
//! | types with names of six letters or fewer: at most 25 % | Rust, as above |
//!
//! `xtask/text-allow.txt` lists the exceptions, each with its reason.

mod allow_list;
mod prose;
mod rust_source;
mod type_names;
mod word_list;

use allow_list::AllowList;
use prose::Offense;
use rust_source::{CommentBlock, RustText};
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use type_names::TypeName;

/// File with the exceptions, relative to the root of the repository.
const ALLOW_LIST: &str = "xtask/text-allow.txt";
/// File with the word list. Its strings are the phrases, which would be found there.
const WORD_LIST: &str = "xtask/src/text_check/word_list.rs";
/// Largest share of doc comments with a first line of three words or fewer, in thousandths.
const MAX_TERSE_DOCS: usize = 10;
/// Largest share of types with a name of six letters or fewer, in thousandths.
const MAX_SHORT_TYPE_NAMES: usize = 250;
/// Constant names that say neither which quantity nor what for.
const VAGUE_CONSTANTS: [&str; 14] = [
    "PATIENCE", "MOST", "LONGEST", "REST", "SOON", "OFTEN", "LATE", "FEW", "MANY", "LONG", "SHORT", "ENOUGH",
    "OLD", "YOUNG",
];

/// Why the text could not be checked.
#[derive(Debug, thiserror::Error)]
pub enum TextCheckError {
    /// Git did not list the files of the repository.
    #[error("cannot list the files of {}: git: {message}; run the check inside a git checkout", root.display())]
    Git {
        /// Root of the repository.
        root: PathBuf,
        /// Standard error of git, or why git could not be started.
        message: String,
    },
    /// A file could not be read.
    #[error("cannot read {}", path.display())]
    Io {
        /// Path of the unreadable file.
        path: PathBuf,
        /// Error of the system.
        #[source]
        source: io::Error,
    },
    /// A line of the list of exceptions is malformed.
    #[error("{ALLOW_LIST}:{line}: expected `PATH: PHRASE # REASON`")]
    AllowList {
        /// Line number, from 1.
        line: usize,
    },
    /// The findings could not be written.
    #[error("cannot write the findings")]
    Output(#[source] io::Error),
}

/// What a run of the check counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TextCheckSummary {
    /// Offenses against the word list, the sentence rules and the constant names.
    pub offenses: usize,
    /// Public type names that more than one type has.
    pub shared_type_names: usize,
    /// Doc comments whose first line is three words or fewer, and all doc comments.
    pub terse_docs: (usize, usize),
    /// Types with names of six letters or fewer, and all types.
    pub short_type_names: (usize, usize),
}

impl TextCheckSummary {
    /// Whether every check passes.
    pub fn is_clean(&self) -> bool {
        let within = |(part, whole): (usize, usize), limit: usize| part * 1000 <= whole * limit;
        self.offenses == 0
            && self.shared_type_names == 0
            && within(self.terse_docs, MAX_TERSE_DOCS)
            && within(self.short_type_names, MAX_SHORT_TYPE_NAMES)
    }
}

/// Checks every file that git tracks below `root`, writes the findings and a summary to `out`, and returns the counts.
///
/// With `only`, findings are restricted to paths that start with one of these prefixes; the summary's ratios still cover everything.
pub fn run(root: &Path, only: &[String], out: &mut dyn Write) -> Result<TextCheckSummary, TextCheckError> {
    let allowed = AllowList::read(&root.join(ALLOW_LIST))?;
    let is_selected =
        |path: &str| only.is_empty() || only.iter().any(|prefix| path.starts_with(prefix.as_str()));
    let mut summary = TextCheckSummary::default();
    let mut findings = Vec::new();
    let mut types: BTreeMap<String, Vec<TypeName>> = BTreeMap::new();
    for path in tracked_files(root)? {
        let Some(kind) = FileKind::of(&path) else { continue };
        let Some(text) = read_text(root.join(&path))? else { continue };
        let mut offenses = Vec::new();
        match kind {
            FileKind::Rust => {
                let mut parsed = RustText::parse(&text);
                if path == WORD_LIST {
                    parsed.strings.clear();
                }
                offenses.extend(check_rust(&parsed));
                summary.terse_docs.0 += parsed.docs().filter(|doc| is_terse(doc)).count();
                summary.terse_docs.1 += parsed.docs().count();
                if !only.is_empty() && is_selected(&path) {
                    offenses.extend(parsed.docs().filter(|doc| is_terse(doc)).map(|doc| Offense {
                        line: doc.line,
                        what: format!("terse doc comment: {:?}", doc.first_line()),
                    }));
                }
                for name in type_names::of_file(&path, &parsed) {
                    types.entry(name.name.clone()).or_default().push(name);
                }
            }
            FileKind::CommentedSource => offenses.extend(check_comments(&RustText::parse(&text))),
            FileKind::Prose => offenses.extend(prose::check_markdown(&text)),
            FileKind::Data => offenses.extend(prose::check_words(&text)),
        }
        offenses.retain(|offense| is_selected(&path) && !allowed.permits(&path, &offense.what));
        offenses.sort_by_key(|offense| offense.line);
        findings.extend(offenses.iter().map(|Offense { line, what }| format!("{path}:{line}: {what}")));
    }
    summary.offenses = findings.len();
    for (name, places) in &types {
        summary.short_type_names.0 += if name.len() <= 6 { places.len() } else { 0 };
        summary.short_type_names.1 += places.len();
        let public: Vec<String> =
            places.iter().filter(|place| place.is_public).map(TypeName::place).collect();
        let selected = public.iter().any(|place| is_selected(place));
        if public.len() > 1 && selected && !allowed.permits("*", &format!("type {name}")) {
            summary.shared_type_names += 1;
            findings.push(format!("{}: public type {name} also in {}", public[0], public[1..].join(", ")));
        }
        if !only.is_empty() && name.len() <= 6 {
            let short = places.iter().map(TypeName::place).filter(|place| is_selected(place));
            findings.extend(short.map(|place| format!("{place}: short type name {name}")));
        }
    }
    report(&findings, &summary, out).map_err(TextCheckError::Output)?;
    Ok(summary)
}

fn report(findings: &[String], summary: &TextCheckSummary, out: &mut dyn Write) -> io::Result<()> {
    for finding in findings {
        writeln!(out, "{finding}")?;
    }
    let percent = |(part, whole): (usize, usize)| part as f64 * 100.0 / (whole.max(1)) as f64;
    writeln!(
        out,
        "text: {} offenses; {} public type names used more than once; {} of {} doc comments are terse ({:.1} %, at most {:.1} %); \
         {} of {} type names have six letters or fewer ({:.1} %, at most {:.1} %)",
        summary.offenses,
        summary.shared_type_names,
        summary.terse_docs.0,
        summary.terse_docs.1,
        percent(summary.terse_docs),
        MAX_TERSE_DOCS as f64 / 10.0,
        summary.short_type_names.0,
        summary.short_type_names.1,
        percent(summary.short_type_names),
        MAX_SHORT_TYPE_NAMES as f64 / 10.0,
    )
}

/// How the text of a file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileKind {
    Rust,
    /// Source of another language with the comments and string literals of C.
    CommentedSource,
    Prose,
    /// Text that is checked line by line for words.
    Data,
}

impl FileKind {
    /// Returns how to read a file, or `None` if it is not checked: generated code, recorded data and licenses.
    fn of(path: &str) -> Option<FileKind> {
        let skipped = ["/generated/", "/fixtures/", "traces/"];
        if skipped.iter().any(|part| path.contains(part)) {
            return None;
        }
        let is_script = path.starts_with("tools/") || path.ends_with("/NOTES.txt");
        match path.rsplit_once('.').map_or(path, |(_, ending)| ending) {
            "rs" => Some(FileKind::Rust),
            "c" | "h" | "proto" => Some(FileKind::CommentedSource),
            "md" => Some(FileKind::Prose),
            "yaml" | "yml" | "toml" | "tpl" | "sh" | "py" | "Makefile" | "Dockerfile" | "service" => {
                Some(FileKind::Data)
            }
            _ if is_script => Some(FileKind::Data),
            _ => None,
        }
    }
}

/// Reads a file. Returns `None` if it is not UTF-8, or was deleted but is still tracked.
fn read_text(path: PathBuf) -> Result<Option<String>, TextCheckError> {
    match fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::NotFound) => {
            Ok(None)
        }
        Err(source) => Err(TextCheckError::Io { path, source }),
    }
}

fn tracked_files(root: &Path) -> Result<Vec<String>, TextCheckError> {
    let failed = |message: String| TextCheckError::Git { root: root.to_path_buf(), message };
    let listed = Command::new("git")
        .arg("-C")
        .arg(root)
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .output()
        .map_err(|error| failed(error.to_string()))?;
    if !listed.status.success() {
        return Err(failed(String::from_utf8_lossy(&listed.stderr).trim().to_string()));
    }
    let mut files: Vec<String> =
        String::from_utf8_lossy(&listed.stdout).split_terminator('\0').map(str::to_string).collect();
    files.sort();
    files.dedup();
    Ok(files)
}

/// Checks comments and string literals.
fn check_comments(source: &RustText) -> Vec<Offense> {
    let mut offenses = Vec::new();
    for comment in &source.comments {
        let text = comment.text.trim_start_matches("/*").trim_end_matches("*/");
        let found = prose::check_words(text).into_iter().chain(prose::check_sentences(text));
        offenses.extend(found.map(|found| found.below(comment.line)));
    }
    for (line, literal) in &source.strings {
        offenses.extend(prose::check_words(literal).into_iter().map(|found| found.below(*line)));
    }
    offenses
}

fn check_rust(source: &RustText) -> Vec<Offense> {
    let mut offenses = check_comments(source);
    let refers = |doc: &&CommentBlock| doc.text.to_lowercase().starts_with("the same ");
    offenses.extend(source.docs().filter(refers).map(|doc| Offense {
        line: doc.line,
        what: format!("doc comment that depends on its neighbor: {:?}", doc.first_line()),
    }));
    for (line, code) in source.code.lines().enumerate() {
        let mut words = code.split_whitespace();
        if words.any(|word| word == "const" || word == "static") {
            let name = words.next().unwrap_or_default().trim_end_matches(':');
            if VAGUE_CONSTANTS.contains(&name) {
                offenses.push(Offense {
                    line: line + 1,
                    what: format!("constant {name} does not say what it measures"),
                });
            }
        }
    }
    offenses
}

/// Whether the first paragraph of a doc comment has three words or fewer.
fn is_terse(doc: &CommentBlock) -> bool {
    doc.text.split("\n\n").next().unwrap_or_default().split_whitespace().count() <= 3
}

#[cfg(test)]
mod tests;
