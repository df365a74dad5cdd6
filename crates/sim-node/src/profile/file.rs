//! Cards from a file: the nearest known one and what differs from it.

use super::{Profile, Text};
use serde_json::{Map, Value};

/// Why a text is no card.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProfileError {
    /// No card is called so.
    #[error("no card is called \"{0}\": use one of {known}, or a JSON file that names one of them as its \"base\"", known = known())]
    Unknown(String),
    /// It is not JSON, or not an object.
    #[error(
        "a card is a JSON object like {{\"base\": \"T4\", \"model\": \"T4-8GB\", \"memory\": {{\"total\": 8589934592}}}}: {0}"
    )]
    NoObject(String),
    /// It has a field that cards do not have.
    #[error("a card has no field \"{field}\": {here}")]
    UnknownField {
        /// Where it stands.
        field: String,
        /// What may stand there.
        here: String,
    },
    /// A number is none that fits.
    #[error("the card is wrong: {0}")]
    Value(String),
    /// A field has a value of another kind than the base's.
    #[error("\"{field}\" {what}")]
    Wrong {
        /// Where it stands.
        field: String,
        /// What is wrong.
        what: String,
    },
}

/// The names people may use.
fn known() -> String {
    Profile::ALL.map(|card| card.model.as_ref()).join(", ")
}

fn wrong(field: &str, what: impl Into<String>) -> ProfileError {
    ProfileError::Wrong { field: field.into(), what: what.into() }
}

impl Profile {
    /// The card that people or the driver call so, or words.
    pub fn find(text: &str) -> Result<&'static Profile, ProfileError> {
        Profile::named(text).ok_or_else(|| ProfileError::Unknown(text.into()))
    }

    /// Reads a card: `{"base": "T4", …}`, where everything but `base` overrides what the base has.
    ///
    /// A card that says nothing about its `model` is called like its base with `*` behind it.
    pub fn from_json(text: &str) -> Result<Profile, ProfileError> {
        let value: Value = serde_json::from_str(text).map_err(|e| ProfileError::NoObject(e.to_string()))?;
        let Value::Object(mut changes) = value else {
            return Err(ProfileError::NoObject("this is JSON, but no object".into()));
        };
        let base = match changes.remove("base") {
            Some(Value::String(base)) => Profile::find(&base)?,
            Some(_) => return Err(wrong("base", "is the name of a card, in quotes")),
            None => {
                return Err(wrong("base", format!("is missing: name the nearest card, one of {}", known())));
            }
        };
        let mut card = base.clone();
        card.model = Text::Owned(format!("{}*", base.model));
        let mut all = serde_json::to_value(&card).map_err(|e| ProfileError::NoObject(e.to_string()))?;
        // What the base lacks can still be given.
        for (group, field) in [("", "nvlink"), ("temperature", "memoryMax")] {
            let group = if group.is_empty() { Some(&mut all) } else { all.get_mut(group) };
            if let Some(Value::Object(fields)) = group {
                fields.entry(field).or_insert(Value::Null);
            }
        }
        if let Value::Object(fields) = &mut all {
            merge(fields, changes, "")?;
        }
        let card: Profile = serde_json::from_value(all).map_err(|e| ProfileError::Value(e.to_string()))?;
        card.validate()?;
        Ok(card)
    }

    /// Whether a card is one that can be simulated.
    pub fn validate(&self) -> Result<(), ProfileError> {
        let named = |text: &str| {
            !text.is_empty() && text.len() < 64 && text.bytes().all(|b| (b' '..=b'~').contains(&b))
        };
        for (field, text) in [("model", &self.model), ("name", &self.name)] {
            if !named(text) {
                return Err(wrong(field, "must be 1 to 63 printable ASCII letters"));
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
            // NVML's shortest buffer for such texts.
            if !named(text) || text.len() > 31 {
                return Err(wrong(field, "must be 1 to 31 printable ASCII letters"));
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
                return Err(wrong(field, "must be 1 or more"));
            }
        }
        let memory = &self.memory;
        let taken = memory.reserved.saturating_add(memory.context);
        if taken >= memory.total {
            let total = memory.total;
            let what =
                format!("is {total}: the driver's {taken} (reserved and one context) leave nothing of it");
            return Err(wrong("memory.total", what));
        }
        // Addresses of a card's memory lie in a window of this size.
        if memory.total > 1 << 40 {
            return Err(wrong(
                "memory.total",
                format!("is {}: at most 1 TiB can be simulated", memory.total),
            ));
        }
        let power = &self.power;
        if !(power.min_limit..=power.max_limit).contains(&power.default_limit) {
            return Err(wrong("power.defaultLimit", "must lie between minLimit and maxLimit"));
        }
        if self.idle_state > 15 {
            return Err(wrong("idleState", "must be a performance state, 0 to 15"));
        }
        match &self.nvlink {
            // What NVML has room for.
            Some(nvlink) if !(1..=18).contains(&nvlink.links) => {
                Err(wrong("nvlink.links", "must be 1 to 18"))
            }
            _ => Ok(()),
        }
    }
}

/// Puts the changes over what is there; a field that is not there is refused.
fn merge(
    fields: &mut Map<String, Value>,
    changes: Map<String, Value>,
    path: &str,
) -> Result<(), ProfileError> {
    for (name, change) in changes {
        let field = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        let Some(old) = fields.get_mut(&name) else {
            let there: Vec<&str> = fields.keys().map(String::as_str).collect();
            let place = if path.is_empty() { "a card has".into() } else { format!("\"{path}\" has") };
            return Err(ProfileError::UnknownField { field, here: format!("{place} {}", there.join(", ")) });
        };
        match (old, change) {
            (Value::Object(fields), Value::Object(changes)) => merge(fields, changes, &field)?,
            (old, change) if same_kind(old, &change) => *old = change,
            (old, change) => {
                let (was, is) = (kind(old), kind(&change));
                return Err(wrong(&field, format!("is {was} in every card, here it is {is}")));
            }
        }
    }
    Ok(())
}

/// What a card may lack can be anything; serde looks at it afterwards.
fn same_kind(old: &Value, new: &Value) -> bool {
    old.is_null() || new.is_null() || kind(old) == kind(new)
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "a group of fields",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_card_is_valid_and_survives_a_file() {
        for card in Profile::ALL {
            card.validate().unwrap_or_else(|e| panic!("{}: {e}", card.model));
            let text = serde_json::to_string(card).unwrap();
            assert_eq!(serde_json::from_str::<Profile>(&text).unwrap(), *card);
            assert_eq!(Profile::find(&card.model.to_lowercase()).unwrap(), card);
            assert_eq!(Profile::find(&card.name).unwrap(), card);
        }
    }

    #[test]
    fn models_and_device_ids_are_all_different() {
        let mut models: Vec<_> = Profile::ALL.iter().map(|card| (&card.model, &card.name)).collect();
        models.sort();
        models.dedup();
        let mut ids: Vec<u32> = Profile::ALL.iter().map(|card| card.pci.device).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!((models.len(), ids.len()), (Profile::ALL.len(), Profile::ALL.len()));
        assert!(Profile::ALL.is_sorted_by_key(|card| card.memory.total));
    }

    #[test]
    fn cards_look_as_cuda_programs_print_them() {
        // In GiB with two decimals, as PyTorch's out-of-memory message has them.
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
    fn a_file_changes_what_it_names() {
        let card = Profile::from_json(
            r#"{"base": "t4", "memory": {"total": 8589934592}, "nvlink": {"version": 2, "links": 2, "megabytesPerSecond": 25781}}"#,
        )
        .unwrap();
        assert_eq!((card.model.as_ref(), card.memory.total), ("T4*", 8 << 30));
        assert_eq!(card.memory.reserved, super::super::T4.memory.reserved);
        assert_eq!(card.nvlink.unwrap().links, 2);
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, words) in [
            ("", "a card is a JSON object"),
            ("[]", "this is JSON, but no object"),
            ("{}", "\"base\" is missing: name the nearest card, one of T4, V100-SXM2-16GB"),
            (r#"{"base": 4}"#, "\"base\" is the name of a card"),
            (r#"{"base": "B200"}"#, "no card is called \"B200\": use one of T4"),
            (r#"{"base": "T4", "memry": 1}"#, "a card has no field \"memry\": a card has "),
            (
                r#"{"base": "T4", "memory": {"totl": 1}}"#,
                "a card has no field \"memory.totl\": \"memory\" has bar1",
            ),
            (
                r#"{"base": "T4", "memory": 8}"#,
                "\"memory\" is a group of fields in every card, here it is a number",
            ),
            (r#"{"base": "T4", "memory": {"total": "8Gi"}}"#, "\"memory.total\" is a number in every card"),
            (r#"{"base": "T4", "memory": {"total": 1}}"#, "leave nothing of it"),
            (r#"{"base": "T4", "memory": {"total": -1}}"#, "the card is wrong: invalid value: integer `-1`"),
            (r#"{"base": "T4", "memory": {"total": 1099511627777}}"#, "at most 1 TiB"),
            (r#"{"base": "T4", "nvlink": {"links": 2, "lanes": 3}}"#, "unknown field `lanes`"),
            (r#"{"base": "T4", "name": ""}"#, "\"name\" must be 1 to 63"),
            (r#"{"base": "T4", "compute": {"warp": 0}}"#, "\"compute.warp\" must be 1 or more"),
        ] {
            let error = Profile::from_json(text).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
