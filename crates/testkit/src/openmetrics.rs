//! A strict parser of OpenMetrics text. It rejects deviations that Prometheus tolerates.

use std::collections::{BTreeMap, BTreeSet};

/// The contents of an OpenMetrics text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Exposition {
    /// The type of each family, by the family's name.
    pub families: BTreeMap<String, String>,
    /// All samples, in order.
    pub samples: Vec<MetricSample>,
}

/// One sample of a metric.
#[derive(Clone, Debug, PartialEq)]
pub struct MetricSample {
    /// The name of the metric.
    pub name: String,
    /// Labels of the sample, by name.
    pub labels: BTreeMap<String, String>,
    /// Value of the sample.
    pub value: f64,
}

impl Exposition {
    /// Parses a text. The error names the invalid line and the reason.
    pub fn parse(text: &str) -> Result<Exposition, String> {
        let body = text.strip_suffix("# EOF\n").ok_or("the text does not end with `# EOF`")?;
        let (mut all, mut family) = (Exposition::default(), FamilyParser::default());
        let mut series = BTreeSet::new();
        for line in body.lines() {
            let wrong = |why: &str| format!("{why}: {line}");
            if let Some(description) = line.strip_prefix("# ") {
                let mut parts = description.splitn(3, ' ');
                let (Some(what), Some(name), Some(rest)) = (parts.next(), parts.next(), parts.next()) else {
                    return Err(wrong("malformed metadata line"));
                };
                if family.name != name {
                    if all.families.contains_key(name) {
                        return Err(wrong("family is not contiguous"));
                    }
                    family.finish()?;
                    family = FamilyParser { name: name.into(), ..FamilyParser::default() };
                }
                match what {
                    "TYPE" if family.kind.is_empty() && !family.has_samples => {
                        family.kind = rest.into();
                        all.families.insert(name.into(), rest.into());
                    }
                    "UNIT" if name.ends_with(&format!("_{rest}")) => {}
                    "HELP" if !rest.is_empty() => {}
                    _ => return Err(wrong("misplaced metadata")),
                }
                continue;
            }
            let sample = parse_sample(line).ok_or_else(|| wrong("malformed sample"))?;
            family.accept(&sample).map_err(|why| wrong(&why))?;
            if !series.insert((sample.name.clone(), sample.labels.clone())) {
                return Err(wrong("duplicate sample"));
            }
            all.samples.push(sample);
        }
        family.finish()?;
        Ok(all)
    }

    /// Returns the sample of this name that has all these labels; `None` unless there is exactly one.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let has = |sample: &&MetricSample| {
            let one = |(key, value): &(&str, &str)| sample.labels.get(*key).is_some_and(|is| is == value);
            sample.name == name && labels.iter().all(one)
        };
        let mut found = self.samples.iter().filter(has);
        let first = found.next()?;
        found.next().is_none().then_some(first.value)
    }
}

/// The state of the family that is being parsed.
#[derive(Default)]
struct FamilyParser {
    name: String,
    kind: String,
    has_samples: bool,
    /// Bound and count of the last bucket, for a histogram.
    bucket: Option<(f64, f64)>,
    count: Option<f64>,
}

impl FamilyParser {
    fn accept(&mut self, sample: &MetricSample) -> Result<(), String> {
        self.has_samples = true;
        let suffix = sample.name.strip_prefix(&self.name).ok_or("sample of another family")?;
        let counted = sample.value >= 0.0;
        match (self.kind.as_str(), suffix) {
            ("gauge", "") => Ok(()),
            ("info", "_info") if sample.value == 1.0 => Ok(()),
            ("counter", "_total") | ("histogram", "_sum") if counted => Ok(()),
            ("histogram", "_count") => {
                self.count = Some(sample.value);
                Ok(())
            }
            ("histogram", "_bucket") => {
                let bound = sample.labels.get("le").ok_or("bucket without a bound")?;
                let bound: f64 = bound.parse().map_err(|_| "invalid bound")?;
                let (last, before) = self.bucket.unwrap_or((f64::NEG_INFINITY, 0.0));
                if bound <= last || sample.value < before {
                    return Err("buckets are not ascending".into());
                }
                self.bucket = Some((bound, sample.value));
                Ok(())
            }
            (kind, _) => Err(format!("not a valid sample of a {kind}")),
        }
    }

    fn finish(&self) -> Result<(), String> {
        if self.kind == "histogram" && self.bucket != self.count.map(|count| (f64::INFINITY, count)) {
            return Err(format!("{}: the last bucket does not match the count", self.name));
        }
        Ok(())
    }
}

fn parse_sample(line: &str) -> Option<MetricSample> {
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = BTreeMap::new();
    if let Some(mut inner) = rest.strip_prefix('{') {
        while !inner.starts_with('}') {
            let (key, after) = inner.split_once("=\"")?;
            let (value, after) = parse_quoted(after)?;
            if !is_name(key) || labels.insert(key.to_string(), value).is_some() {
                return None;
            }
            // Commas are allowed only between labels.
            inner = match after.strip_prefix(',') {
                Some(after) if !after.starts_with('}') => after,
                None if after.starts_with('}') => after,
                _ => return None,
            };
        }
        rest = inner.strip_prefix('}')?;
    }
    let value = rest.strip_prefix(' ')?.parse().ok()?;
    is_name(name).then(|| MetricSample { name: name.into(), labels, value })
}

fn is_name(name: &str) -> bool {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_') && name.chars().all(plain)
}

/// Returns a value up to its closing quote, and the rest.
fn parse_quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut letters = text.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => value.push(match letters.next()?.1 {
                'n' => '\n',
                letter @ ('\\' | '"') => letter,
                _ => return None,
            }),
            letter => value.push(letter),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALID: &str = "# HELP a_seconds Time.\n# TYPE a_seconds histogram\n# UNIT a_seconds seconds\na_seconds_sum 1.5\n\
        a_seconds_count 3\na_seconds_bucket{le=\"1.0\"} 2\na_seconds_bucket{le=\"+Inf\"} 3\n# TYPE b counter\n\
        b_total{x=\"a\\\"}\\n\\\\\"} 4\n# TYPE C_d gauge\nC_d 1\n# EOF\n";

    #[test]
    fn valid_exposition_is_parsed() {
        let all = Exposition::parse(VALID).unwrap();
        assert_eq!(all.families.len(), 3);
        assert_eq!(all.value("b_total", &[("x", "a\"}\n\\")]), Some(4.0));
        assert_eq!(all.value("a_seconds_bucket", &[]), None, "there are two");
    }

    #[test]
    fn invalid_exposition_is_refused() {
        for (from, to) in [
            ("# EOF\n", ""),
            ("b_total", "b"),
            ("C_d 1", "C_d 1\nC_d 1"),
            ("C_d 1", "C-d 1"),
            ("C_d 1", "C_d one"),
            ("C_d 1", "C_d{x=\"a\",} 1"),
            ("C_d 1", "C_d{x=\"a\",x=\"b\"} 1"),
            ("# TYPE C_d gauge", "# TYPE b gauge"),
            ("UNIT a_seconds seconds", "UNIT a_seconds bytes"),
            ("le=\"+Inf\"} 3", "le=\"+Inf\"} 1"),
            ("le=\"+Inf\"} 3", "le=\"2.0\"} 3"),
            ("\\n", "\\t"),
        ] {
            let text = VALID.replacen(from, to, 1);
            assert_ne!(text, VALID);
            assert!(Exposition::parse(&text).is_err(), "{text}");
        }
    }
}
