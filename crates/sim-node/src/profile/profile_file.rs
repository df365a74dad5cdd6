//! GPU profiles from JSON files: the nearest known model and the fields that differ from it.

use super::{GpuProfile, ProfileText};
use serde_json::{Map, Value};

/// Why a profile is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProfileError {
    /// No known model has this name.
    #[error("unknown GPU model \"{0}\": use one of {known}, or a JSON file that names one of them as its \"base\"", known = known_models())]
    UnknownCard(String),
    /// The file is not a JSON object.
    #[error(
        "a GPU profile is a JSON object such as {{\"base\": \"T4\", \"model\": \"T4-8GB\", \"memory\": {{\"total\": 8589934592}}}}: {0}"
    )]
    NotAnObject(String),
    /// The file contains an unknown field.
    #[error("unknown field \"{field}\": {here}")]
    UnknownField {
        /// The path of the field.
        field: String,
        /// The fields that are known at this place.
        here: String,
    },
    /// A value is out of range.
    #[error("invalid GPU profile: {0}")]
    InvalidValue(String),
    /// A field has an invalid value.
    #[error("\"{field}\" {what}")]
    InvalidField {
        /// The path of the field.
        field: String,
        /// The problem, as the rest of a sentence about the field.
        what: String,
    },
}

/// Returns the known model names, separated by commas.
fn known_models() -> String {
    GpuProfile::ALL.map(|card| card.model.as_ref()).join(", ")
}

fn invalid_field(field: &str, what: impl Into<String>) -> ProfileError {
    ProfileError::InvalidField { field: field.into(), what: what.into() }
}

impl GpuProfile {
    /// Like [`GpuProfile::named`], with an error that lists the known models.
    pub fn find(text: &str) -> Result<&'static GpuProfile, ProfileError> {
        GpuProfile::named(text).ok_or_else(|| ProfileError::UnknownCard(text.into()))
    }

    /// Parses a profile: `{"base": "T4", …}`, where all fields but `base` override those of the base.
    ///
    /// Without a `model`, the model name is that of the base followed by `*`.
    pub fn from_json(text: &str) -> Result<GpuProfile, ProfileError> {
        let value: Value =
            serde_json::from_str(text).map_err(|e| ProfileError::NotAnObject(e.to_string()))?;
        let Value::Object(mut changes) = value else {
            return Err(ProfileError::NotAnObject("the top-level value is not an object".into()));
        };
        let base = match changes.remove("base") {
            Some(Value::String(base)) => GpuProfile::find(&base)?,
            Some(_) => {
                return Err(invalid_field("base", "must be the model name of a known GPU, as a string"));
            }
            None => {
                return Err(invalid_field(
                    "base",
                    format!("is missing: name the nearest GPU model, one of {}", known_models()),
                ));
            }
        };
        let mut card = base.clone();
        card.model = ProfileText::Owned(format!("{}*", base.model));
        let mut all = serde_json::to_value(&card).map_err(|e| ProfileError::NotAnObject(e.to_string()))?;
        // Optional fields that the base lacks may be set, too.
        for (group, field) in [("", "nvlink"), ("temperature", "memoryMax")] {
            let group = if group.is_empty() { Some(&mut all) } else { all.get_mut(group) };
            if let Some(Value::Object(fields)) = group {
                fields.entry(field).or_insert(Value::Null);
            }
        }
        if let Value::Object(fields) = &mut all {
            apply_overrides(fields, changes, "")?;
        }
        let card: GpuProfile =
            serde_json::from_value(all).map_err(|e| ProfileError::InvalidValue(e.to_string()))?;
        card.validate()?;
        Ok(card)
    }

    /// Checks that a GPU with this profile can be simulated.
    pub fn validate(&self) -> Result<(), ProfileError> {
        let named = |text: &str| {
            !text.is_empty() && text.len() < 64 && text.bytes().all(|b| (b' '..=b'~').contains(&b))
        };
        for (field, text) in [("model", &self.model), ("name", &self.name)] {
            if !named(text) {
                return Err(invalid_field(field, "must be 1 to 63 printable ASCII characters"));
            }
        }
        for (field, text) in [
            ("board.part", &self.board.part),
            ("board.chip", &self.board.chip),
            ("board.vbios", &self.board.vbios),
            ("board.inforom", &self.board.inforom),
            ("board.inforomOem", &self.board.inforom_oem),
            ("board.inforomEcc", &self.board.inforom_ecc),
        ] {
            // The size of NVML's shortest buffer for these strings.
            if !named(text) || text.len() > 31 {
                return Err(invalid_field(field, "must be 1 to 31 printable ASCII characters"));
            }
        }
        let compute = &self.compute;
        for (field, number) in [
            ("compute.capability", compute.capability),
            ("compute.multiprocessors", compute.multiprocessors),
            ("compute.coresPerMultiprocessor", compute.cores_per_multiprocessor),
            ("compute.threadsPerMultiprocessor", compute.threads_per_multiprocessor),
            ("compute.blocksPerMultiprocessor", compute.blocks_per_multiprocessor),
            ("compute.threadsPerBlock", compute.threads_per_block),
            ("compute.warp", compute.warp),
            ("samplePeriodMicros", self.sample_period_micros),
        ] {
            if number == 0 {
                return Err(invalid_field(field, "must be 1 or more"));
            }
        }
        let memory = &self.memory;
        let taken = memory.reserved.saturating_add(memory.context);
        if taken >= memory.total {
            let total = memory.total;
            let what = format!(
                "is {total}: use more than the {taken} bytes of the driver's reservation and one context"
            );
            return Err(invalid_field("memory.total", what));
        }
        // The simulated driver reserves an address range of this size per GPU.
        if memory.total > 1 << 40 {
            return Err(invalid_field("memory.total", format!("is {}: use at most 1 TiB", memory.total)));
        }
        let power = &self.power;
        if !(power.min_limit..=power.max_limit).contains(&power.default_limit) {
            return Err(invalid_field("power.defaultLimit", "must be between minLimit and maxLimit"));
        }
        if self.idle_state > 15 {
            return Err(invalid_field("idleState", "must be a performance state, 0 to 15"));
        }
        match &self.nvlink {
            // NVML's maximum number of links.
            Some(nvlink) if !(1..=18).contains(&nvlink.links) => {
                Err(invalid_field("nvlink.links", "must be 1 to 18"))
            }
            _ => Ok(()),
        }
    }
}

/// Applies the changes to the fields. Unknown fields are refused.
fn apply_overrides(
    fields: &mut Map<String, Value>,
    changes: Map<String, Value>,
    path: &str,
) -> Result<(), ProfileError> {
    for (name, change) in changes {
        let field = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        let Some(old) = fields.get_mut(&name) else {
            let there: Vec<&str> = fields.keys().map(String::as_str).collect();
            let place = if path.is_empty() {
                "the known fields are".into()
            } else {
                format!("the known fields of \"{path}\" are")
            };
            return Err(ProfileError::UnknownField { field, here: format!("{place} {}", there.join(", ")) });
        };
        match (old, change) {
            (Value::Object(fields), Value::Object(changes)) => apply_overrides(fields, changes, &field)?,
            (old, change) if is_same_type(old, &change) => *old = change,
            (old, change) => {
                let (was, is) = (type_name(old), type_name(&change));
                return Err(invalid_field(&field, format!("must be {was}, not {is}")));
            }
        }
    }
    Ok(())
}

/// Optional fields may have any type here; serde checks them afterwards.
fn is_same_type(old: &Value, new: &Value) -> bool {
    old.is_null() || new.is_null() || type_name(old) == type_name(new)
}

fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_card_is_valid_and_round_trips() {
        for card in GpuProfile::ALL {
            card.validate().unwrap_or_else(|e| panic!("{}: {e}", card.model));
            let text = serde_json::to_string(card).unwrap();
            assert_eq!(serde_json::from_str::<GpuProfile>(&text).unwrap(), *card);
            assert_eq!(GpuProfile::find(&card.model.to_lowercase()).unwrap(), card);
            assert_eq!(GpuProfile::find(&card.name).unwrap(), card);
        }
    }

    #[test]
    fn models_and_device_ids_are_unique() {
        let mut models: Vec<_> = GpuProfile::ALL.iter().map(|card| (&card.model, &card.name)).collect();
        models.sort();
        models.dedup();
        let mut ids: Vec<u32> = GpuProfile::ALL.iter().map(|card| card.pci.device).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!((models.len(), ids.len()), (GpuProfile::ALL.len(), GpuProfile::ALL.len()));
        assert!(GpuProfile::ALL.is_sorted_by_key(|card| card.memory.total));
    }

    #[test]
    fn usable_memory_matches_published_figures() {
        // In GiB with two decimals, as in PyTorch's out-of-memory message.
        for (card, gib) in [
            (&super::super::T4, "14.57"),
            (&super::super::V100_SXM2_16GB, "15.77"),
            (&super::super::V100_SXM2_32GB, "31.74"),
            (&super::super::A10, "21.99"),
            (&super::super::L4, "21.99"),
            (&super::super::A100_SXM4_40GB, "39.39"),
            (&super::super::L40S, "44.31"),
            (&super::super::A100_SXM4_80GB, "79.15"),
            (&super::super::H100_SXM5_80GB, "79.11"),
        ] {
            let usable = card.memory.usable() as f64 / f64::from(1 << 30);
            assert_eq!(format!("{usable:.2}"), gib, "{}", card.model);
        }
    }

    #[test]
    fn profile_file_overrides_the_fields_it_names() {
        let card = GpuProfile::from_json(
            r#"{"base": "t4", "memory": {"total": 8589934592}, "nvlink": {"version": 2, "links": 2, "megabytesPerSecond": 25781}}"#,
        )
        .unwrap();
        assert_eq!((card.model.as_ref(), card.memory.total), ("T4*", 8 << 30));
        assert_eq!(card.memory.reserved, super::super::T4.memory.reserved);
        assert_eq!(card.nvlink.unwrap().links, 2);
    }

    #[test]
    fn invalid_profile_files_are_refused_with_a_reason() {
        for (text, words) in [
            ("", "a GPU profile is a JSON object"),
            ("[]", "the top-level value is not an object"),
            ("{}", "\"base\" is missing: name the nearest GPU model, one of T4, V100-SXM2-16GB"),
            (r#"{"base": 4}"#, "\"base\" must be the model name"),
            (r#"{"base": "B200"}"#, "unknown GPU model \"B200\": use one of T4"),
            (r#"{"base": "T4", "memry": 1}"#, "unknown field \"memry\": the known fields are "),
            (
                r#"{"base": "T4", "memory": {"totl": 1}}"#,
                "unknown field \"memory.totl\": the known fields of \"memory\" are bar1",
            ),
            (r#"{"base": "T4", "memory": 8}"#, "\"memory\" must be an object, not a number"),
            (
                r#"{"base": "T4", "memory": {"total": "8Gi"}}"#,
                "\"memory.total\" must be a number, not a string",
            ),
            (r#"{"base": "T4", "memory": {"total": 1}}"#, "use more than the"),
            (
                r#"{"base": "T4", "memory": {"total": -1}}"#,
                "invalid GPU profile: invalid value: integer `-1`",
            ),
            (r#"{"base": "T4", "memory": {"total": 1099511627777}}"#, "at most 1 TiB"),
            (r#"{"base": "T4", "nvlink": {"links": 2, "lanes": 3}}"#, "unknown field `lanes`"),
            (r#"{"base": "T4", "name": ""}"#, "\"name\" must be 1 to 63"),
            (r#"{"base": "T4", "compute": {"warp": 0}}"#, "\"compute.warp\" must be 1 or more"),
        ] {
            let error = GpuProfile::from_json(text).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
