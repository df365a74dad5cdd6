//! The file as it is written: everything may be left out, and some nodes may differ.

use super::{DriverChoice, Metrics, OnBypass, Resize, Settings, SettingsError, SimulatedGpus};
use partage_core::dialect::{Dialect, MemoryUnit};
use partage_core::model::{NodeName, Overcommit, Oversubscription, Policy};
use serde::{Deserialize, Deserializer, de};
use std::collections::BTreeMap;

/// The whole file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct File {
    #[serde(deserialize_with = "dialects")]
    dialects: Option<Vec<Dialect>>,
    vcuda_domains: Option<Vec<String>>,
    shares_per_gpu: Option<u32>,
    aws_slots: Option<u32>,
    #[serde(deserialize_with = "unit")]
    gpushare_unit: Option<MemoryUnit>,
    volcano_memory_factor: Option<u32>,
    memory_overcommit_percent: Option<Overcommit>,
    labels: Option<BTreeMap<String, String>>,
    #[serde(deserialize_with = "policy")]
    policy: Option<Policy>,
    extender: Option<bool>,
    resize: Option<Resize>,
    oversubscribe: Option<Oversubscription>,
    on_bypass: Option<OnBypass>,
    driver: Option<DriverChoice>,
    simulated: Option<SimulatedGpus>,
    metrics: Option<Metrics>,
    nodes: Vec<Exception>,
}

/// What is different on some nodes: the same keys, but for `nodes` itself.
///
/// Written out, and not the keys above flattened in: then an unknown key would be refused nowhere.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Exception {
    /// Names of nodes; `*` stands for any letters.
    names: Vec<String>,
    #[serde(default, deserialize_with = "dialects")]
    dialects: Option<Vec<Dialect>>,
    #[serde(default)]
    vcuda_domains: Option<Vec<String>>,
    #[serde(default)]
    shares_per_gpu: Option<u32>,
    #[serde(default)]
    aws_slots: Option<u32>,
    #[serde(default, deserialize_with = "unit")]
    gpushare_unit: Option<MemoryUnit>,
    #[serde(default)]
    volcano_memory_factor: Option<u32>,
    #[serde(default)]
    memory_overcommit_percent: Option<Overcommit>,
    #[serde(default)]
    labels: Option<BTreeMap<String, String>>,
    #[serde(default, deserialize_with = "policy")]
    policy: Option<Policy>,
    #[serde(default)]
    extender: Option<bool>,
    #[serde(default)]
    resize: Option<Resize>,
    #[serde(default)]
    oversubscribe: Option<Oversubscription>,
    #[serde(default)]
    on_bypass: Option<OnBypass>,
    #[serde(default)]
    driver: Option<DriverChoice>,
    #[serde(default)]
    simulated: Option<SimulatedGpus>,
    #[serde(default)]
    metrics: Option<Metrics>,
}

impl File {
    pub(super) fn parse(text: &str) -> Result<File, SettingsError> {
        let says_nothing = |line: &str| line.trim().is_empty() || line.trim_start().starts_with('#');
        if text.lines().all(says_nothing) {
            return Ok(File::default());
        }
        // On one line: it becomes an event.
        serde_saphyr::from_str(text)
            .map_err(|error| SettingsError::Unreadable(error.without_snippet().to_string()))
    }

    /// What holds on a node: the first exception that names it wins, key by key.
    pub(super) fn settings(&self, node: &NodeName) -> Settings {
        let names = |one: &&Exception| one.names.iter().any(|name| matches(name, node.as_str()));
        self.with(self.nodes.iter().find(names))
    }

    /// What holds where an exception does, or none.
    fn with(&self, exception: Option<&Exception>) -> Settings {
        let mut settings = Settings::default();
        macro_rules! take {
            ($from:expr, $($key:ident),*) => { $( if let Some(value) = &$from.$key { settings.$key = value.clone(); } )* };
        }
        macro_rules! take_all {
            ($from:expr) => {
                take!(
                    $from,
                    dialects,
                    vcuda_domains,
                    shares_per_gpu,
                    aws_slots,
                    gpushare_unit,
                    volcano_memory_factor,
                    labels,
                    policy,
                    extender,
                    resize,
                    oversubscribe,
                    on_bypass,
                    driver,
                    simulated,
                    metrics
                );
                if let Some(overcommit) = $from.memory_overcommit_percent {
                    settings.memory_overcommit = overcommit;
                }
            };
        }
        take_all!(self);
        if let Some(exception) = exception {
            take_all!(exception);
        }
        settings
    }

    /// What cannot be on any node: the file is one for all, and who looks at it before it is used must learn everything.
    pub(super) fn check(&self) -> Result<(), SettingsError> {
        self.with(None).check()?;
        for (at, exception) in self.nodes.iter().enumerate() {
            let there =
                |key: &str, why: String| SettingsError::Wrong { key: format!("nodes[{at}].{key}"), why };
            if exception.names.is_empty() {
                let why = "names no node: write names of nodes, * stands for any letters";
                return Err(there("names", why.into()));
            }
            self.with(Some(exception)).check().map_err(|error| match error {
                SettingsError::Wrong { key, why } => there(&key, why),
                other => other,
            })?;
        }
        Ok(())
    }
}

/// Whether a name fits a pattern in which `*` stands for any letters, none too.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else { return false };
    let mut parts = parts.peekable();
    if parts.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    true
}

fn dialects<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<Dialect>>, D::Error> {
    let Some(names) = Option::<Vec<String>>::deserialize(from)? else { return Ok(None) };
    let one = |name: &String| {
        Dialect::ALL.into_iter().find(|dialect| dialect.name() == name).ok_or_else(|| {
            let known: Vec<&str> = Dialect::ALL.iter().map(|dialect| dialect.name()).collect();
            de::Error::custom(format!("\"{name}\" is no dialect: write some of {}", known.join(", ")))
        })
    };
    names.iter().map(one).collect::<Result<_, _>>().map(Some)
}

fn unit<'de, D: Deserializer<'de>>(from: D) -> Result<Option<MemoryUnit>, D::Error> {
    match Option::<String>::deserialize(from)?.as_deref() {
        None => Ok(None),
        Some("GiB") => Ok(Some(MemoryUnit::Gib)),
        Some("MiB") => Ok(Some(MemoryUnit::Mib)),
        Some(other) => Err(de::Error::custom(format!("\"{other}\" is no unit of memory: write GiB or MiB"))),
    }
}

fn policy<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Policy>, D::Error> {
    let Some(name) = Option::<String>::deserialize(from)? else { return Ok(None) };
    name.parse().map(Some).map_err(de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn stars_stand_for_any_letters() {
        for (pattern, name) in [
            ("a", "a"),
            ("*", ""),
            ("*", "gpu"),
            ("gpu-*", "gpu-1"),
            ("*-a100-*", "x-a100-3"),
            ("a*b*c", "abbc"),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("a", "ab"), ("gpu-*", "cpu-1"), ("a*b*c", "acb"), ("", "a"), ("a*a", "a")] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }
}
