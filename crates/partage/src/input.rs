//! Manifests from files and standard input, in YAML or JSON.

use partage_core::manifest::{self, Contents};
use serde_json::Value;
use serde_saphyr::options::{DuplicateKeyPolicy, Options};
use serde_saphyr::{Error, Location};
use std::io::Read;
use std::path::{Path, PathBuf};

/// What the named files hold.
#[derive(Debug, Default)]
pub(crate) struct Input {
    /// The workloads of all of them, in order.
    pub(crate) workloads: Vec<manifest::Workload>,
    /// What could not be read, with the file it is about.
    pub(crate) unreadable: Vec<String>,
}

/// Reads manifests; `-` is standard input. One that cannot be read does not hide the others.
pub(crate) fn read(files: &[PathBuf]) -> Input {
    let mut input = Input::default();
    let mut others = 0;
    for file in files {
        let name = if file.as_os_str() == "-" { "standard input".into() } else { file.display().to_string() };
        match contents(file) {
            Ok(contents) => {
                input.workloads.extend(contents.workloads);
                input
                    .unreadable
                    .extend(contents.unreadable.into_iter().map(|what| format!("{name}: {what}")));
                others += contents.others;
            }
            Err(what) => input.unreadable.push(format!("{name}{what}")),
        }
    }
    if input.workloads.is_empty() && input.unreadable.is_empty() {
        let found = match others {
            0 => "the input is empty".to_string(),
            1 => "the input holds one object of another kind".to_string(),
            _ => format!("the input holds {others} objects of other kinds"),
        };
        let kinds = manifest::KINDS.join(", ");
        input.unreadable.push(format!("{found}: there is no workload to read, which is one of {kinds}"));
    }
    input
}

fn contents(file: &Path) -> Result<Contents, String> {
    let text = text(file).map_err(|what| format!(": {what}"))?;
    Ok(manifest::read(&documents(&text)?))
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

/// The documents of a YAML or JSON text; the error starts with the place, as in `:3:5: …`.
fn documents(text: &str) -> Result<Vec<Value>, String> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    serde_saphyr::from_multiple_with_options(text, options()).map_err(|error| {
        let error = error.without_snippet();
        match error.location().filter(|at| at.line() > 0) {
            Some(at) => format!(":{}:{}: {}", at.line(), at.column(), words(error, at)),
            None => format!(": {error}"),
        }
    })
}

/// What is wrong, for someone who never heard of this parser.
fn words(error: &Error, at: Location) -> String {
    match error {
        Error::DuplicateMappingKey { key: Some(key), .. } => {
            format!("the key \"{key}\" is written twice: keep one")
        }
        Error::NonFiniteFloat { value, .. } => {
            format!("{value} is no number Kubernetes takes: put it in quotes if it is text")
        }
        Error::RecursiveReferencesRequireWeakTypes { .. } => {
            "an alias stands inside what it names: write it out plainly".to_string()
        }
        Error::AliasError { error, .. } => words(error, at),
        Error::Budget { .. } => {
            "nested, aliased or repeated beyond what a manifest needs: write it out plainly".to_string()
        }
        other => {
            let what = other.to_string();
            let place = format!(" at line {}, column {}", at.line(), at.column());
            what.strip_suffix(&place).map(String::from).unwrap_or(what)
        }
    }
}

/// As kubectl reads: `yes` is a boolean and 010 is eight. A key written twice is a mistake. The budget fits
/// the dump of a large cluster and ends a bomb of aliases.
fn options() -> Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_events: 50_000_000,
            max_nodes: 20_000_000,
            max_documents: 1_000_000,
            max_total_scalar_bytes: 1 << 30,
            max_depth: 64,
            max_recorded_anchor_events: 100_000,
            enforce_alias_anchor_ratio: false,
        },
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: 100_000 },
        duplicate_keys: DuplicateKeyPolicy::Error,
        legacy_octal_numbers: true,
        with_snippet: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn one(text: &str) -> Value {
        let mut documents = documents(text).unwrap();
        assert_eq!(documents.len(), 1, "{text}");
        documents.remove(0)
    }

    #[test]
    fn reads_yaml_and_json_as_kubectl_does() {
        assert_eq!(one("{\"a\": [1, \"b\", null]}"), json!({"a": [1, "b", null]}));
        assert_eq!(one("\u{feff}a: yes\r\nb: 'yes'\r\n"), json!({"a": true, "b": "yes"}));
        assert_eq!(
            one("a: 1e3\nb: 18446744073709551615\nc: -1"),
            json!({"a": 1000.0, "b": u64::MAX, "c": -1})
        );
        assert_eq!(one("a: 010\nb: 1_0x"), json!({"a": 8, "b": "1_0x"}));
        assert_eq!(one("a: &x {b: 1}\nc: *x"), json!({"a": {"b": 1}, "c": {"b": 1}}));
        assert_eq!(one("a: &x {b: 1}\nc:\n  <<: *x\n  d: 2"), json!({"a": {"b": 1}, "c": {"b": 1, "d": 2}}));
        assert_eq!(documents("---\na: 1\n---\n---\nb: 2\n...\n").unwrap().len(), 2);
        assert_eq!(documents("").unwrap().len(), 0);
    }

    #[test]
    fn says_where_it_is_wrong() {
        let wrong = |text: &str| documents(text).unwrap_err();
        for (text, place) in [("a: 1\nb: [1\n", ":"), ("a: 1\na: 2\n", ":2:1:"), ("a:\n\tb: 1\n", ":2:")] {
            let error = wrong(text);
            assert!(error.starts_with(place), "{text:?}: {error}");
            assert!(!error.contains("at line"), "{text:?}: {error}");
        }
    }

    #[test]
    fn never_panics_on_bombs_and_rubbish() {
        let mut laughs = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x]\n");
        for level in 1..12 {
            let alias = format!("*a{}", level - 1);
            laughs += &format!("a{level}: &a{level} [{}]\n", vec![alias; 9].join(", "));
        }
        assert!(documents(&laughs).is_err());
        assert!(documents(&"[".repeat(100_000)).is_err());
        assert!(documents(&"{a: ".repeat(100_000)).is_err());
        assert!(documents(&(0..2000).map(|n| " ".repeat(n) + "a:\n").collect::<String>()).is_err());
        assert!(documents("a: &a [*a]").is_err());
        let _ = documents("a: \0");
        let _ = documents("? [a, b]\n: c");
        let _ = documents("!!binary x: !foo y");
    }
}
