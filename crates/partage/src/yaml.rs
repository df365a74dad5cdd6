//! Parses untrusted YAML and JSON texts with several documents, with limits on depth and alias expansion.

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use serde_saphyr::options::{DuplicateKeyPolicy, Options};
use serde_saphyr::{Error, Location};
use std::borrow::Cow;
use std::fmt;

/// Maximum number of errors reported for one text.
const MAX_ERRORS: usize = 20;
/// Maximum size that alias expansion may add to a text, in bytes.
const MAX_ALIAS_BYTES: usize = 16 << 20;

/// Estimated memory of one YAML node. Written without aliases, every node takes at least two characters of text.
const NODE_BYTES: usize = 32;
const TOO_LARGE: &str = "too deeply nested, or aliases expand too far: write the manifest without aliases";

const TEMPLATE_FOUND: &str =
    "this is a template, not a manifest: render it first (helm template … | partage check -f -)";

/// The result of parsing a text.
#[derive(Debug, Default)]
pub(crate) struct ParsedDocuments {
    /// Documents that could be parsed, in order.
    pub(crate) values: Vec<Value>,
    /// Errors, each starting with its line and column, as in `:3:5: …`.
    pub(crate) errors: Vec<String>,
}

/// Parses a text. An invalid document does not hide the ones before it.
pub(crate) fn parse_documents(text: &str) -> ParsedDocuments {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut documents = parse_yaml_or_json(text);
    // A template is not YAML: the parser's own error would be misleading.
    if !documents.errors.is_empty()
        && let Some(line) = template_line(text)
    {
        documents.errors = vec![format!(":{line}:1: {TEMPLATE_FOUND}")];
    }
    documents
}

/// Returns the first line with template braces in the place of a value, outside quotes.
fn template_line(text: &str) -> Option<usize> {
    let is_template = |line: &str| {
        let line = line.trim_start();
        line.contains("}}") && (line.starts_with("{{") || line.contains(": {{") || line.contains("- {{"))
    };
    text.lines().position(is_template).map(|index| index + 1)
}

fn parse_yaml_or_json(text: &str) -> ParsedDocuments {
    if !text.trim_start().starts_with(['{', '[']) {
        return parse_yaml(text);
    }
    // JSON is almost a subset of YAML, but YAML allows no DEL, no long keys and no second document after a line break.
    let json = parse_json(text);
    if json.errors.is_empty() {
        return json;
    }
    let yaml = parse_yaml(text);
    if yaml.errors.is_empty() || yaml.values.len() >= json.values.len() { yaml } else { json }
}

fn parse_json(text: &str) -> ParsedDocuments {
    let text = replace_lone_surrogates(text);
    let mut documents = ParsedDocuments::default();
    for document in serde_json::Deserializer::from_str(&text).into_iter::<UniqueKeysValue>() {
        match document {
            Ok(UniqueKeysValue(value)) => documents.values.push(value),
            Err(error) => {
                let text = error.to_string();
                let place = format!(" at line {} column {}", error.line(), error.column());
                let text = text.strip_suffix(&place).unwrap_or(&text);
                documents.errors.push(format!(":{}:{}: {text}", error.line(), error.column()));
                break;
            }
        }
    }
    documents
}

fn parse_yaml(text: &str) -> ParsedDocuments {
    let mut documents = ParsedDocuments::default();
    let mut reader = text.as_bytes();
    // The parser limits each document separately: this limits the sum of many small alias bombs.
    let mut budget = text.len().saturating_mul(NODE_BYTES).saturating_add(MAX_ALIAS_BYTES);
    for document in serde_saphyr::read_with_options::<_, Value>(&mut reader, parser_options(text.len())) {
        match document.map(|value| (budget.checked_sub(estimated_bytes(&value)), value)) {
            Ok((Some(left), value)) => {
                budget = left;
                documents.values.push(value);
            }
            Ok((None, _)) => {
                documents.errors.push(format!(": {TOO_LARGE}"));
                break;
            }
            Err(error) => documents.errors.push(locate_error(&error)),
        }
        if documents.errors.len() == MAX_ERRORS {
            break;
        }
    }
    documents
}

/// Estimates the memory of a value.
fn estimated_bytes(value: &Value) -> usize {
    let inside = match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(estimated_bytes).sum(),
        Value::Object(entries) => {
            entries.iter().map(|(key, value)| NODE_BYTES + key.len() + estimated_bytes(value)).sum()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    };
    NODE_BYTES + inside
}

fn locate_error(error: &Error) -> String {
    let error = error.without_snippet();
    match error.location().filter(|at| at.line() > 0) {
        Some(at) => format!(":{}:{}: {}", at.line(), at.column(), describe_error(error, at)),
        None => format!(": {error}"),
    }
}

/// Replaces every unpaired surrogate by U+FFFD, as Kubernetes' JSON decoder does: one tenant's string must not make the dump of a
/// whole cluster unreadable.
fn replace_lone_surrogates(text: &str) -> Cow<'_, str> {
    let unit = |at: usize| -> Option<u16> {
        let digits = text.get(at..at + 6)?.strip_prefix("\\u")?;
        u16::from_str_radix(digits, 16).ok()
    };
    let (high, low) = (0xd800..=0xdbff, 0xdc00..=0xdfff);
    let mut replaced = String::new();
    let (mut copied, mut at) = (0, 0);
    // In JSON a backslash occurs only in strings, and escapes the next character.
    while let Some(found) = text[at..].find('\\') {
        at += found;
        match unit(at) {
            Some(first)
                if high.contains(&first) && unit(at + 6).is_some_and(|second| low.contains(&second)) =>
            {
                at += 12;
            }
            Some(half) if high.contains(&half) || low.contains(&half) => {
                replaced.push_str(&text[copied..at]);
                replaced.push_str("\\ufffd");
                at += 6;
                copied = at;
            }
            // Skips the backslash and the character after it, which may have several bytes.
            _ => at += 1 + text[at + 1..].chars().next().map_or(0, char::len_utf8),
        }
    }
    if copied == 0 { Cow::Borrowed(text) } else { Cow::Owned(replaced + &text[copied..]) }
}

/// A JSON value whose objects have unique keys; deserialization fails otherwise.
struct UniqueKeysValue(Value);

impl<'de> Deserialize<'de> for UniqueKeysValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<UniqueKeysValue, D::Error> {
        deserializer.deserialize_any(UniqueKeysVisitor).map(UniqueKeysValue)
    }
}

struct UniqueKeysVisitor;

impl<'de> Visitor<'de> for UniqueKeysVisitor {
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
        while let Some(UniqueKeysValue(item)) = items.next_element()? {
            read.push(item);
        }
        Ok(Value::Array(read))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut read = Map::new();
        while let Some((key, UniqueKeysValue(value))) = entries.next_entry::<String, UniqueKeysValue>()? {
            if read.contains_key(&key) {
                return Err(A::Error::custom(duplicate_key(&key)));
            }
            read.insert(key, value);
        }
        Ok(Value::Object(read))
    }
}

fn duplicate_key(key: &str) -> String {
    let short: String = key.chars().take(60).collect();
    let cut = if short.len() < key.len() { "…" } else { "" };
    format!("duplicate key \"{short}{cut}\": keep one")
}

/// Describes an error without the parser's own terms.
fn describe_error(error: &Error, at: Location) -> String {
    match error {
        Error::DuplicateMappingKey { key: Some(key), .. } => duplicate_key(key),
        Error::NonFiniteFloat { value, .. } => {
            format!("{value} is not a number that Kubernetes accepts: put it in quotes if it is text")
        }
        Error::RecursiveReferencesRequireWeakTypes { .. } => {
            "an alias refers to a node that contains it: write the value without the alias".to_string()
        }
        Error::AliasError { error, .. } => describe_error(error, at),
        Error::Budget { .. } => TOO_LARGE.to_string(),
        other => {
            let text = other.to_string();
            let place = format!(" at line {}, column {}", at.line(), at.column());
            text.strip_suffix(&place).map(String::from).unwrap_or(text)
        }
    }
}

/// Parses as kubectl does: `yes` is a boolean and 010 is eight. Duplicate keys are errors. The budget is enough for the dump of a large
/// cluster and stops alias bombs.
fn parser_options(length: usize) -> Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_events: 50_000_000,
            max_nodes: 20_000_000,
            max_documents: 1_000_000,
            // No YAML escape is shorter than half of the text that it stands for.
            max_total_scalar_bytes: length.saturating_mul(2).saturating_add(MAX_ALIAS_BYTES),
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
        let ParsedDocuments { values, errors } = parse_documents(text);
        errors.into_iter().next().map_or(Ok(values), Err)
    }

    fn one(text: &str) -> Value {
        let mut documents = documents(text).unwrap();
        assert_eq!(documents.len(), 1, "{text}");
        documents.remove(0)
    }

    #[test]
    fn yaml_and_json_are_parsed_as_kubectl_does() {
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
    fn template_is_reported_with_its_line() {
        for text in [
            "kind: Pod\nmetadata:\n  name: {{ .Release.Name }}-x\n",
            "kind: Pod\n\n{{- if .Values.gpu }}\na: 1\n{{- end }}\n",
            "kind: Pod\nargs:\n- {{ .Values.a }}\n",
            "{{- if .Values.gpu }}\na: 1\n{{- end }}\n",
        ] {
            let ParsedDocuments { errors, .. } = parse_documents(text);
            assert_eq!(errors.len(), 1, "{text}");
            assert!(errors[0].ends_with(TEMPLATE_FOUND), "{}", errors[0]);
        }
        // Quoted text may contain braces: alerts, workflows.
        assert!(documents("a: '{{ $labels.x }}'\nb: |\n  {{ x }}\n").is_ok());
        assert!(!documents("a: 'x {{ y }}'\nb: [\n").unwrap_err().ends_with(TEMPLATE_FOUND));
    }

    #[test]
    fn error_has_line_and_column() {
        let wrong = |text: &str| documents(text).unwrap_err();
        for (text, place) in [("a: 1\nb: [1\n", ":"), ("a: 1\na: 2\n", ":2:1:"), ("a:\n\tb: 1\n", ":2:")] {
            let error = wrong(text);
            assert!(error.starts_with(place), "{text:?}: {error}");
            assert!(!error.contains("at line"), "{text:?}: {error}");
        }
    }

    #[test]
    fn alias_bombs_and_garbage_do_not_panic() {
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
    fn json_that_is_not_yaml_is_parsed() {
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
        // Flow style is YAML but not JSON.
        assert_eq!(one("{a: b}"), json!({"a": "b"}));
        assert_eq!(documents("{\"a\": 1}\n---\nb: 2\n").unwrap().len(), 2);
        assert_eq!(documents("{\"a\": 1, \"a\": 2}").unwrap_err(), ":1:10: duplicate key \"a\": keep one");
        assert!(documents("{\"a\": \"\\").is_err() && documents("{\"é\": \"\\é").is_err());
    }

    #[test]
    fn invalid_document_does_not_hide_documents_before_it() {
        for text in ["a: 1\n---\nb: [1\n", "a: 1\n---\nb: 1\nb: 2\n", "{\"a\": 1}\n{\"b\": }\n"] {
            let ParsedDocuments { values, errors } = parse_documents(text);
            assert_eq!((values, errors.len()), (vec![json!({"a": 1})], 1), "{text:?}");
        }
        let ParsedDocuments { values, errors } = parse_documents("a: 1\n---\nb: 1\nb: 2\n---\nc: 3\n");
        assert_eq!((values.len(), errors.len()), (2, 1));
    }

    #[test]
    fn alias_expansion_is_limited() {
        let aliases = vec!["*x"; 900].join(", ");
        let bomb = format!("a: &x {}\nb: [{aliases}]\n", "y".repeat(700_000));
        let error = documents(&bomb).unwrap_err();
        assert!(error.ends_with(TOO_LARGE), "{error}");
        let small = format!("a: &x {}\nb: [{}]\n", "y".repeat(5000), vec!["*x"; 1000].join(", "));
        assert!(documents(&small).is_ok());
        assert!(documents(&vec![small.as_str(); 60].join("---\n")).unwrap_err().ends_with(TOO_LARGE));
        // Text without aliases is never refused for its size.
        for plain in ["- [1,1,1,1,1,1,1,1,1,1]\n", "- 1\n- 1\n", "a: {b: {c: 1}}\n---\n"] {
            assert!(documents(&plain.repeat(1 << 12)).is_ok(), "{plain}");
        }
    }
}
