//! The format of the settings file: every key is optional, and `nodes` overrides keys on some nodes.

use super::{
    AgentSettings, BypassAction, DriverSetting, InvalidAgentSettings, MetricsSettings, ResizePolicy,
    SimulatedGpus,
};
use partage_core::dialect::{Dialect, MemoryUnit};
use partage_core::model::{NodeName, Overcommit, Oversubscription, PlacementPolicy};
use serde::{Deserialize, Deserializer, de};
use std::collections::BTreeMap;

/// The settings file as written: a key that is absent keeps its default, and unknown keys are refused.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct SettingsDocument {
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
    policy: Option<PlacementPolicy>,
    extender: Option<bool>,
    resize: Option<ResizePolicy>,
    oversubscribe: Option<Oversubscription>,
    max_priority: Option<u32>,
    throttle_copies: Option<bool>,
    on_bypass: Option<BypassAction>,
    driver: Option<DriverSetting>,
    simulated: Option<SimulatedGpus>,
    metrics: Option<MetricsSettings>,
    nodes: Vec<NodeOverride>,
}

/// Overrides on some nodes: the same keys except `nodes`.
///
/// The keys are repeated here instead of flattened: with `#[serde(flatten)]` unknown keys would not be refused.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct NodeOverride {
    /// Names of nodes; `*` matches any characters.
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
    policy: Option<PlacementPolicy>,
    #[serde(default)]
    extender: Option<bool>,
    #[serde(default)]
    resize: Option<ResizePolicy>,
    #[serde(default)]
    oversubscribe: Option<Oversubscription>,
    #[serde(default)]
    max_priority: Option<u32>,
    #[serde(default)]
    throttle_copies: Option<bool>,
    #[serde(default)]
    on_bypass: Option<BypassAction>,
    #[serde(default)]
    driver: Option<DriverSetting>,
    #[serde(default)]
    simulated: Option<SimulatedGpus>,
    #[serde(default)]
    metrics: Option<MetricsSettings>,
}

impl SettingsDocument {
    /// Parses the text of a file; a file without keys has the defaults.
    pub(super) fn parse(text: &str) -> Result<SettingsDocument, InvalidAgentSettings> {
        let is_empty = |line: &str| line.trim().is_empty() || line.trim_start().starts_with('#');
        if text.lines().all(is_empty) {
            return Ok(SettingsDocument::default());
        }
        // On one line, because it becomes the message of an event.
        serde_saphyr::from_str(text)
            .map_err(|error| InvalidAgentSettings::Malformed(error.without_snippet().to_string()))
    }

    /// Returns the settings of a node: those of the first override that names it, and of the file if the override has none.
    pub(super) fn settings(&self, node: &NodeName) -> AgentSettings {
        let names = |one: &&NodeOverride| one.names.iter().any(|name| matches(name, node.as_str()));
        self.with(self.nodes.iter().find(names))
    }

    /// Returns the settings of the file with an override applied.
    fn with(&self, node_override: Option<&NodeOverride>) -> AgentSettings {
        let mut settings = AgentSettings::default();
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
                    max_priority,
                    throttle_copies,
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
        if let Some(node_override) = node_override {
            take_all!(node_override);
        }
        settings
    }

    /// Checks the settings of all nodes: one file holds for all of them, and `--check` must find every error.
    pub(super) fn check(&self) -> Result<(), InvalidAgentSettings> {
        self.with(None).check()?;
        for (at, node_override) in self.nodes.iter().enumerate() {
            let invalid = |key: &str, message: String| InvalidAgentSettings::Value {
                key: format!("nodes[{at}].{key}"),
                message,
            };
            if node_override.names.is_empty() {
                let message = "the list is empty: name nodes, * matches any characters";
                return Err(invalid("names", message.into()));
            }
            self.with(Some(node_override)).check().map_err(|error| match error {
                InvalidAgentSettings::Value { key, message } => invalid(&key, message),
                other => other,
            })?;
        }
        Ok(())
    }
}

/// Returns whether a name matches a pattern, in which `*` matches any number of characters.
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
            de::Error::custom(format!("\"{name}\" is not a dialect: use some of {}", known.join(", ")))
        })
    };
    names.iter().map(one).collect::<Result<_, _>>().map(Some)
}

fn unit<'de, D: Deserializer<'de>>(from: D) -> Result<Option<MemoryUnit>, D::Error> {
    match Option::<String>::deserialize(from)?.as_deref() {
        None => Ok(None),
        Some("GiB") => Ok(Some(MemoryUnit::Gib)),
        Some("MiB") => Ok(Some(MemoryUnit::Mib)),
        Some(other) => {
            Err(de::Error::custom(format!("\"{other}\" is not a unit of memory: write GiB or MiB")))
        }
    }
}

fn policy<'de, D: Deserializer<'de>>(from: D) -> Result<Option<PlacementPolicy>, D::Error> {
    let Some(name) = Option::<String>::deserialize(from)? else { return Ok(None) };
    name.parse().map(Some).map_err(de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn star_matches_any_characters() {
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
