//! A strict reader of OpenMetrics text: what Prometheus would let pass with a shrug is an error here.

use std::collections::{BTreeMap, BTreeSet};

/// What a text tells.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Exposition {
    /// The type of each family, by the family's name.
    pub families: BTreeMap<String, String>,
    /// All figures, in order.
    pub samples: Vec<Sample>,
}

/// One figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Its name.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its value.
    pub value: f64,
}

impl Exposition {
    /// Reads a text, or says which line is wrong and why.
    pub fn parse(text: &str) -> Result<Exposition, String> {
        let body = text.strip_suffix("# EOF\n").ok_or("the text does not end with `# EOF`")?;
        let (mut all, mut family) = (Exposition::default(), Family::default());
        let mut series = BTreeSet::new();
        for line in body.lines() {
            let wrong = |why: &str| format!("{why}: {line}");
            if let Some(told) = line.strip_prefix("# ") {
                let mut parts = told.splitn(3, ' ');
                let (Some(what), Some(name), Some(rest)) = (parts.next(), parts.next(), parts.next()) else {
                    return Err(wrong("no description"));
                };
                if family.name != name {
                    if all.families.contains_key(name) {
                        return Err(wrong("a family in two places"));
                    }
                    family.end()?;
                    family = Family { name: name.into(), ..Family::default() };
                }
                match what {
                    "TYPE" if family.kind.is_empty() && !family.has_samples => {
                        family.kind = rest.into();
                        all.families.insert(name.into(), rest.into());
                    }
                    "UNIT" if name.ends_with(&format!("_{rest}")) => {}
                    "HELP" if !rest.is_empty() => {}
                    _ => return Err(wrong("no description that may be here")),
                }
                continue;
            }
            let sample = sample(line).ok_or_else(|| wrong("no figure"))?;
            family.take(&sample).map_err(|why| wrong(&why))?;
            if !series.insert((sample.name.clone(), sample.labels.clone())) {
                return Err(wrong("told twice"));
            }
            all.samples.push(sample);
        }
        family.end()?;
        Ok(all)
    }

    /// The figure of this name that has all these labels; `None` unless there is exactly one.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let has = |sample: &&Sample| {
            let one = |(key, value): &(&str, &str)| sample.labels.get(*key).is_some_and(|is| is == value);
            sample.name == name && labels.iter().all(one)
        };
        let mut found = self.samples.iter().filter(has);
        let first = found.next()?;
        found.next().is_none().then_some(first.value)
    }
}

/// What is known of the family that is being read.
#[derive(Default)]
struct Family {
    name: String,
    kind: String,
    has_samples: bool,
    /// Of a histogram: its last bucket's bound and count.
    bucket: Option<(f64, f64)>,
    count: Option<f64>,
}

impl Family {
    fn take(&mut self, sample: &Sample) -> Result<(), String> {
        self.has_samples = true;
        let suffix = sample.name.strip_prefix(&self.name).ok_or("of another family")?;
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
                let bound = sample.labels.get("le").ok_or("a bucket without a bound")?;
                let bound: f64 = bound.parse().map_err(|_| "no bound")?;
                let (last, before) = self.bucket.unwrap_or((f64::NEG_INFINITY, 0.0));
                if bound <= last || sample.value < before {
                    return Err("buckets do not rise".into());
                }
                self.bucket = Some((bound, sample.value));
                Ok(())
            }
            (kind, _) => Err(format!("no figure of a {kind}")),
        }
    }

    fn end(&self) -> Result<(), String> {
        if self.kind == "histogram" && self.bucket != self.count.map(|count| (f64::INFINITY, count)) {
            return Err(format!("{}: the last bucket does not hold everything", self.name));
        }
        Ok(())
    }
}

fn sample(line: &str) -> Option<Sample> {
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = BTreeMap::new();
    if let Some(mut inner) = rest.strip_prefix('{') {
        while !inner.starts_with('}') {
            let (key, after) = inner.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            if !is_name(key) || labels.insert(key.to_string(), value).is_some() {
                return None;
            }
            // A comma stands between labels and nowhere else.
            inner = match after.strip_prefix(',') {
                Some(after) if !after.starts_with('}') => after,
                None if after.starts_with('}') => after,
                _ => return None,
            };
        }
        rest = inner.strip_prefix('}')?;
    }
    let value = rest.strip_prefix(' ')?.parse().ok()?;
    is_name(name).then(|| Sample { name: name.into(), labels, value })
}

fn is_name(name: &str) -> bool {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_') && name.chars().all(plain)
}

/// A value up to its closing quote, and what follows.
fn quoted(text: &str) -> Option<(String, &str)> {
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

    const SOUND: &str = "# HELP a_seconds Time.\n# TYPE a_seconds histogram\n# UNIT a_seconds seconds\na_seconds_sum 1.5\n\
        a_seconds_count 3\na_seconds_bucket{le=\"1.0\"} 2\na_seconds_bucket{le=\"+Inf\"} 3\n# TYPE b counter\n\
        b_total{x=\"a\\\"}\\n\\\\\"} 4\n# TYPE C_d gauge\nC_d 1\n# EOF\n";

    #[test]
    fn what_is_sound_is_read() {
        let all = Exposition::parse(SOUND).unwrap();
        assert_eq!(all.families.len(), 3);
        assert_eq!(all.value("b_total", &[("x", "a\"}\n\\")]), Some(4.0));
        assert_eq!(all.value("a_seconds_bucket", &[]), None, "there are two");
    }

    #[test]
    fn what_is_not_is_refused() {
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
            let text = SOUND.replacen(from, to, 1);
            assert_ne!(text, SOUND);
            assert!(Exposition::parse(&text).is_err(), "{text}");
        }
    }
}
