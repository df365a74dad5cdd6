//! The documents of a YAML or JSON text, from anybody: bounded in depth and in what aliases make of it.

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use serde_saphyr::options::{DuplicateKeyPolicy, Options};
use serde_saphyr::{Error, Location};
use std::borrow::Cow;
use std::fmt;

/// The most errors told of one text: after these nobody reads on.
const MOST_ERRORS: usize = 20;
/// What aliases may add to a text, in bytes.
const MOST_REPEATED: usize = 16 << 20;

/// What a node takes in memory, roughly. Written out, none is shorter than two letters.
const NODE: usize = 32;
const BOMB: &str = "nested, aliased or repeated beyond what a manifest needs: write it out plainly";

const TEMPLATE: &str = "a template, not a manifest: render it first (helm template … | partage check -f -)";

/// What a text holds.
#[derive(Debug, Default)]
pub(crate) struct Documents {
    /// The documents that could be read, in order.
    pub(crate) values: Vec<Value>,
    /// What could not, each starting with its place, as in `:3:5: …`.
    pub(crate) errors: Vec<String>,
}

/// Reads a text. A document that cannot be read does not hide the ones before it.
pub(crate) fn read(text: &str) -> Documents {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut documents = yaml_or_json(text);
    // What a parser says about a template helps nobody.
    if !documents.errors.is_empty()
        && let Some(line) = template_line(text)
    {
        documents.errors = vec![format!(":{line}:1: {TEMPLATE}")];
    }
    documents
}

/// The first line that a template engine would replace: its braces stand where a value does, outside quotes.
fn template_line(text: &str) -> Option<usize> {
    let is_template = |line: &str| {
        let line = line.trim_start();
        line.contains("}}") && (line.starts_with("{{") || line.contains(": {{") || line.contains("- {{"))
    };
    text.lines().position(is_template).map(|index| index + 1)
}

fn yaml_or_json(text: &str) -> Documents {
    if !text.trim_start().starts_with(['{', '[']) {
        return yaml(text);
    }
    // JSON is nearly YAML, but YAML takes no DEL, no long keys and no second document after a line break.
    let json = json(text);
    if json.errors.is_empty() {
        return json;
    }
    let yaml = yaml(text);
    if yaml.errors.is_empty() || yaml.values.len() >= json.values.len() { yaml } else { json }
}

fn json(text: &str) -> Documents {
    let text = without_lone_surrogates(text);
    let mut documents = Documents::default();
    for document in serde_json::Deserializer::from_str(&text).into_iter::<Strict>() {
        match document {
            Ok(Strict(value)) => documents.values.push(value),
            Err(error) => {
                let what = error.to_string();
                let place = format!(" at line {} column {}", error.line(), error.column());
                let what = what.strip_suffix(&place).unwrap_or(&what);
                documents.errors.push(format!(":{}:{}: {what}", error.line(), error.column()));
                break;
            }
        }
    }
    documents
}

fn yaml(text: &str) -> Documents {
    let mut documents = Documents::default();
    let mut reader = text.as_bytes();
    // The parser counts each document by itself: many small bombs are one.
    let mut room = text.len().saturating_mul(NODE).saturating_add(MOST_REPEATED);
    for document in serde_saphyr::read_with_options::<_, Value>(&mut reader, options(text.len())) {
        match document.map(|value| (room.checked_sub(size(&value)), value)) {
            Ok((Some(left), value)) => {
                room = left;
                documents.values.push(value);
            }
            Ok((None, _)) => {
                documents.errors.push(format!(": {BOMB}"));
                break;
            }
            Err(error) => documents.errors.push(located(&error)),
        }
        if documents.errors.len() == MOST_ERRORS {
            break;
        }
    }
    documents
}

/// What a value takes, roughly.
fn size(value: &Value) -> usize {
    let inside = match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(size).sum(),
        Value::Object(entries) => entries.iter().map(|(key, value)| NODE + key.len() + size(value)).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    };
    NODE + inside
}

fn located(error: &Error) -> String {
    let error = error.without_snippet();
    match error.location().filter(|at| at.line() > 0) {
        Some(at) => format!(":{}:{}: {}", at.line(), at.column(), words(error, at)),
        None => format!(": {error}"),
    }
}

/// The same text with every half of a surrogate pair replaced by U+FFFD, as Kubernetes' own reader does: one
/// tenant's string must not make the dump of a whole cluster unreadable.
fn without_lone_surrogates(text: &str) -> Cow<'_, str> {
    let unit = |at: usize| -> Option<u16> {
        let digits = text.get(at..at + 6)?.strip_prefix("\\u")?;
        u16::from_str_radix(digits, 16).ok()
    };
    let (high, low) = (0xd800..=0xdbff, 0xdc00..=0xdfff);
    let mut mended = String::new();
    let (mut kept, mut at) = (0, 0);
    // In JSON a backslash is only in strings, and escapes what follows it.
    while let Some(found) = text[at..].find('\\') {
        at += found;
        match unit(at) {
            Some(first)
                if high.contains(&first) && unit(at + 6).is_some_and(|second| low.contains(&second)) =>
            {
                at += 12;
            }
            Some(half) if high.contains(&half) || low.contains(&half) => {
                mended.push_str(&text[kept..at]);
                mended.push_str("\\ufffd");
                at += 6;
                kept = at;
            }
            // The backslash and the character after it, which may be of several bytes.
            _ => at += 1 + text[at + 1..].chars().next().map_or(0, char::len_utf8),
        }
    }
    if kept == 0 { Cow::Borrowed(text) } else { Cow::Owned(mended + &text[kept..]) }
}

/// A JSON value in which no key is written twice.
struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Strict, D::Error> {
        deserializer.deserialize_any(StrictVisitor).map(Strict)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut read = Vec::new();
        while let Some(Strict(item)) = items.next_element()? {
            read.push(item);
        }
        Ok(Value::Array(read))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut read = Map::new();
        while let Some((key, Strict(value))) = entries.next_entry::<String, Strict>()? {
            if read.contains_key(&key) {
                return Err(A::Error::custom(twice(&key)));
            }
            read.insert(key, value);
        }
        Ok(Value::Object(read))
    }
}

fn twice(key: &str) -> String {
    let short: String = key.chars().take(60).collect();
    let cut = if short.len() < key.len() { "…" } else { "" };
    format!("the key \"{short}{cut}\" is written twice: keep one")
}

/// What is wrong, for someone who never heard of this parser.
fn words(error: &Error, at: Location) -> String {
    match error {
        Error::DuplicateMappingKey { key: Some(key), .. } => twice(key),
        Error::NonFiniteFloat { value, .. } => {
            format!("{value} is no number Kubernetes takes: put it in quotes if it is text")
        }
        Error::RecursiveReferencesRequireWeakTypes { .. } => {
            "an alias stands inside what it names: write it out plainly".to_string()
        }
        Error::AliasError { error, .. } => words(error, at),
        Error::Budget { .. } => BOMB.to_string(),
        other => {
            let what = other.to_string();
            let place = format!(" at line {}, column {}", at.line(), at.column());
            what.strip_suffix(&place).map(String::from).unwrap_or(what)
        }
    }
}

/// As kubectl reads: `yes` is a boolean and 010 is eight. A key written twice is a mistake. The budget fits
/// the dump of a large cluster and ends a bomb of aliases.
fn options(length: usize) -> Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_events: 50_000_000,
            max_nodes: 20_000_000,
            max_documents: 1_000_000,
            // No escape of YAML is shorter than half of what it stands for.
            max_total_scalar_bytes: length.saturating_mul(2).saturating_add(MOST_REPEATED),
            max_reader_input_bytes: None,
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

    fn documents(text: &str) -> Result<Vec<Value>, String> {
        let Documents { values, errors } = read(text);
        errors.into_iter().next().map_or(Ok(values), Err)
    }

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
    fn templates_are_named() {
        for text in [
            "kind: Pod\nmetadata:\n  name: {{ .Release.Name }}-x\n",
            "kind: Pod\n\n{{- if .Values.gpu }}\na: 1\n{{- end }}\n",
            "kind: Pod\nargs:\n- {{ .Values.a }}\n",
            "{{- if .Values.gpu }}\na: 1\n{{- end }}\n",
        ] {
            let Documents { errors, .. } = read(text);
            assert_eq!(errors.len(), 1, "{text}");
            assert!(errors[0].ends_with(TEMPLATE), "{}", errors[0]);
        }
        // Text of others may hold braces: alerts, workflows.
        assert!(documents("a: '{{ $labels.x }}'\nb: |\n  {{ x }}\n").is_ok());
        assert!(!documents("a: 'x {{ y }}'\nb: [\n").unwrap_err().ends_with(TEMPLATE));
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

    #[test]
    fn reads_json_that_is_no_yaml() {
        assert_eq!(one("{\"a\": \"x\u{7f}y\"}"), json!({"a": "x\u{7f}y"}));
        let key = "k".repeat(2000);
        assert_eq!(one(&format!("{{\"{key}\": 1}}")), json!({key: 1}));
        assert_eq!(documents("{\"a\": 1}\n{\"a\": 2}\n").unwrap().len(), 2);
        assert_eq!(
            one(
                r#"{"a": "\ud800", "b": "\udc00x", "c": "\ud83d\ude00", "d": "\\ud800", "e": "\ud800\ud800"}"#
            ),
            json!({"a": "\u{fffd}", "b": "\u{fffd}x", "c": "😀", "d": "\\ud800", "e": "\u{fffd}\u{fffd}"})
        );
        // Flow style is no JSON, and YAML all the same.
        assert_eq!(one("{a: b}"), json!({"a": "b"}));
        assert_eq!(documents("{\"a\": 1}\n---\nb: 2\n").unwrap().len(), 2);
        assert_eq!(
            documents("{\"a\": 1, \"a\": 2}").unwrap_err(),
            ":1:10: the key \"a\" is written twice: keep one"
        );
        assert!(documents("{\"a\": \"\\").is_err() && documents("{\"é\": \"\\é").is_err());
    }

    #[test]
    fn a_bad_document_hides_no_good_one_before_it() {
        for text in ["a: 1\n---\nb: [1\n", "a: 1\n---\nb: 1\nb: 2\n", "{\"a\": 1}\n{\"b\": }\n"] {
            let Documents { values, errors } = read(text);
            assert_eq!((values, errors.len()), (vec![json!({"a": 1})], 1), "{text:?}");
        }
        let Documents { values, errors } = read("a: 1\n---\nb: 1\nb: 2\n---\nc: 3\n");
        assert_eq!((values.len(), errors.len()), (2, 1));
    }

    #[test]
    fn repeated_text_is_bounded() {
        let aliases = vec!["*x"; 900].join(", ");
        let bomb = format!("a: &x {}\nb: [{aliases}]\n", "y".repeat(700_000));
        let error = documents(&bomb).unwrap_err();
        assert!(error.ends_with(BOMB), "{error}");
        let small = format!("a: &x {}\nb: [{}]\n", "y".repeat(5000), vec!["*x"; 1000].join(", "));
        assert!(documents(&small).is_ok());
        assert!(documents(&vec![small.as_str(); 60].join("---\n")).unwrap_err().ends_with(BOMB));
        // Nothing that is written out is a bomb.
        for plain in ["- [1,1,1,1,1,1,1,1,1,1]\n", "- 1\n- 1\n", "a: {b: {c: 1}}\n---\n"] {
            assert!(documents(&plain.repeat(1 << 12)).is_ok(), "{plain}");
        }
    }
}
