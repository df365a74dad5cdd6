//! The parts of a Kubernetes pod that matter for GPU sharing, parsed leniently from JSON.
//!
//! Parsing never fails. Each mistake becomes a [`Problem`] with its place and a correction, and the rest of the pod is still
//! parsed, so that all mistakes are reported at once.

mod misplaced;

use crate::model::{ContainerName, ContainerRole};
use crate::quantity::{Quantity, QuantityError};
use crate::truncate;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// A mistake in a pod, described for its author.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The name of the container; `None` if the problem is about the whole pod.
    pub container: Option<String>,
    /// The resource, annotation or path with the mistake.
    pub field: String,
    /// The mistake and how to correct it.
    pub message: String,
}

impl Problem {
    /// Creates a problem of the whole pod.
    pub fn of_pod(field: impl AsRef<str>, message: impl AsRef<str>) -> Problem {
        let (field, message) =
            (truncate::shorten_field(field.as_ref()), truncate::shorten_message(message.as_ref()));
        Problem { container: None, field, message }
    }

    /// Creates a problem of one container.
    pub fn of_container(
        container: &ContainerName,
        field: impl AsRef<str>,
        message: impl AsRef<str>,
    ) -> Problem {
        Problem { container: Some(container.to_string()), ..Problem::of_pod(field, message) }
    }
}

/// A pod or pod template, as far as GPU sharing is concerned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodManifest {
    /// Labels of the pod.
    pub labels: BTreeMap<String, String>,
    /// Annotations of the pod.
    pub annotations: BTreeMap<String, String>,
    /// Containers in the order of the spec: init containers and sidecars first.
    pub containers: Vec<ContainerManifest>,
}

/// A container of a pod or pod template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerManifest {
    /// Name of the container, unique in its pod.
    pub name: ContainerName,
    /// When the container runs.
    pub role: ContainerRole,
    /// Resource limits as written, by resource.
    pub limits: BTreeMap<String, String>,
    /// Resource requests as written, by resource.
    pub requests: BTreeMap<String, String>,
}

impl ContainerManifest {
    /// Returns the amount of an extended resource: the limit or, without a limit, the request.
    pub fn amount(&self, resource: &str) -> Option<&str> {
        self.limits.get(resource).or_else(|| self.requests.get(resource)).map(String::as_str)
    }

    /// Returns the amount of an extended resource as a whole number.
    pub fn count(&self, resource: &str) -> Option<Result<u64, QuantityError>> {
        self.amount(resource).map(|text| text.parse().and_then(Quantity::to_count))
    }

    /// Returns the names of all resources of this container, without duplicates, sorted.
    pub fn resources(&self) -> impl Iterator<Item = &str> {
        let only_requested = self.requests.keys().filter(|name| !self.limits.contains_key(*name));
        let mut names: Vec<&str> = self.limits.keys().chain(only_requested).map(String::as_str).collect();
        names.sort_unstable();
        names.into_iter()
    }
}

impl PodManifest {
    /// Parses a pod from its `metadata` and `spec`.
    pub fn read(metadata: &Value, spec: &Value) -> (PodManifest, Vec<Problem>) {
        let mut problems = Vec::new();
        misplaced::check_pod(metadata, spec, &mut problems);
        let mut pod = PodManifest {
            labels: strings(metadata, "metadata", "labels", "label", &mut problems),
            annotations: strings(metadata, "metadata", "annotations", "annotation", &mut problems),
            containers: Vec::new(),
        };
        for key in ["initContainers", "containers"] {
            let path = format!("spec.{key}");
            match spec.get(key) {
                None | Some(Value::Null) if key == "initContainers" => {}
                Some(Value::Array(items)) if items.is_empty() && key == "containers" => {
                    problems.push(Problem::of_pod(&path, "the pod has no containers: add one"));
                }
                Some(Value::Array(items)) => {
                    for (index, item) in items.iter().enumerate() {
                        let role = match (key, item.get("restartPolicy").and_then(Value::as_str)) {
                            ("containers", _) => ContainerRole::App,
                            (_, Some("Always")) => ContainerRole::Sidecar,
                            _ => ContainerRole::Init,
                        };
                        pod.containers.extend(container(
                            item,
                            role,
                            &format!("{path}[{index}]"),
                            &mut problems,
                        ));
                    }
                }
                other => problems.push(Problem::of_pod(
                    &path,
                    format!("{path} must be a list of containers, but it is {}", kind(other)),
                )),
            }
        }
        let mut seen = std::collections::BTreeSet::new();
        for container in &pod.containers {
            if !seen.insert(container.name.as_str()) {
                problems.push(Problem::of_container(
                    &container.name,
                    "name",
                    format!(
                        "two containers are named \"{}\": give each a unique name",
                        truncate::shorten(container.name.as_str())
                    ),
                ));
            }
        }
        (pod, problems)
    }
}

fn container(
    item: &Value,
    role: ContainerRole,
    path: &str,
    problems: &mut Vec<Problem>,
) -> Option<ContainerManifest> {
    if !item.is_object() {
        let message = format!("{path} must be a container, but it is {}", kind(Some(item)));
        problems.push(Problem::of_pod(path, message));
        return None;
    }
    let name = match item.get("name") {
        Some(Value::String(name)) if !name.is_empty() => ContainerName::from(name.as_str()),
        Some(value @ (Value::Number(_) | Value::Bool(_))) => {
            let text = value.to_string();
            problems.push(Problem::of_pod(format!("{path}.name"), not_a_string("names", &text)));
            ContainerName::from(text)
        }
        _ => {
            problems.push(Problem::of_pod(format!("{path}.name"), "the container has no name: add one"));
            // Further problems are reported under its place in the spec.
            ContainerName::from(path)
        }
    };
    misplaced::check_container(item, &name, problems);
    let mut amounts = |key: &str| -> BTreeMap<String, String> {
        let field = format!("resources.{key}");
        let amounts = match item.get("resources").and_then(|resources| resources.get(key)) {
            None | Some(Value::Null) => return BTreeMap::new(),
            Some(Value::Object(amounts)) => amounts,
            other => {
                let message = format!("{field} must map resources to amounts, but it is {}", kind(other));
                problems.push(Problem::of_container(&name, &field, message));
                return BTreeMap::new();
            }
        };
        let mut read = BTreeMap::new();
        for (resource, amount) in amounts {
            match quantity_text(amount) {
                Some(text) => {
                    read.insert(resource.clone(), text);
                }
                None => problems.push(Problem::of_container(
                    &name,
                    resource,
                    format!(
                        "the amount must be a number or a quantity like \"8Gi\", but it is {}",
                        kind(Some(amount))
                    ),
                )),
            }
        }
        read
    };
    let (limits, requests) = (amounts("limits"), amounts("requests"));
    Some(ContainerManifest { name, role, limits, requests })
}

/// Parses labels or annotations. Kubernetes accepts only strings; numbers and booleans are reported and converted.
fn strings(
    metadata: &Value,
    parent: &str,
    key: &str,
    noun: &str,
    problems: &mut Vec<Problem>,
) -> BTreeMap<String, String> {
    let entries = match metadata.get(key) {
        None | Some(Value::Null) => return BTreeMap::new(),
        Some(Value::Object(entries)) => entries,
        other => {
            let field = format!("{parent}.{key}");
            let message = format!("{field} must map names to strings, but it is {}", kind(other));
            problems.push(Problem::of_pod(field, message));
            return BTreeMap::new();
        }
    };
    let mut read = BTreeMap::new();
    for (name, value) in entries {
        match value {
            Value::String(text) => {
                read.insert(name.clone(), text.clone());
            }
            Value::Number(_) | Value::Bool(_) => {
                let text = quantity_text(value).unwrap_or_else(|| value.to_string());
                let message = not_a_string(&format!("{noun} values"), &text);
                problems.push(Problem::of_pod(name, message));
                read.insert(name.clone(), text);
            }
            other => problems.push(Problem::of_pod(
                name,
                format!("{noun} values are strings, but this is {}", kind(Some(other))),
            )),
        }
    }
    read
}

/// Returns the message for a value that must be a string.
pub(crate) fn not_a_string(what: &str, text: &str) -> String {
    format!("{what} are strings: write \"{}\"", truncate::shorten(text))
}

/// Returns a scalar as the text that Kubernetes would see.
fn quantity_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(match number.as_f64() {
            // In YAML, 1e3 is a float, and Kubernetes then receives 1000.
            Some(float) if number.is_f64() && float.fract() == 0.0 && float.abs() < 1e15 => {
                format!("{}", float as i64)
            }
            _ => number.to_string(),
        }),
        _ => None,
    }
}

/// Returns the JSON type of a value for messages.
pub(crate) fn kind(value: Option<&Value>) -> &'static str {
    match value {
        None => "missing",
        Some(Value::Null) => "null",
        Some(Value::Bool(_)) => "a boolean",
        Some(Value::Number(_)) => "a number",
        Some(Value::String(_)) => "a string",
        Some(Value::Array(_)) => "a list",
        Some(Value::Object(_)) => "a map",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn containers_are_in_order_with_roles() {
        let spec = json!({
            "initContainers": [
                {"name": "fetch"},
                {"name": "proxy", "restartPolicy": "Always"},
            ],
            "containers": [{"name": "main", "resources": {"limits": {"partage.dev/gpu": 1}}}],
        });
        let (pod, problems) = PodManifest::read(&json!({}), &spec);
        assert_eq!(problems, []);
        let roles: Vec<_> = pod.containers.iter().map(|c| (c.name.as_str(), c.role)).collect();
        assert_eq!(
            roles,
            [("fetch", ContainerRole::Init), ("proxy", ContainerRole::Sidecar), ("main", ContainerRole::App)]
        );
        assert_eq!(pod.containers[2].amount("partage.dev/gpu"), Some("1"));
    }

    #[test]
    fn unquoted_annotation_is_a_problem_and_is_converted() {
        let metadata = json!({"annotations": {"tencent.com/vcuda-core-limit": 50}});
        let (pod, problems) = PodManifest::read(&metadata, &json!({"containers": []}));
        assert_eq!(pod.annotations["tencent.com/vcuda-core-limit"], "50");
        assert_eq!(problems[0].field, "tencent.com/vcuda-core-limit");
        assert_eq!(problems[0].message, "annotation values are strings: write \"50\"");
    }

    #[test]
    fn missing_fields_are_problems() {
        let (_, problems) = PodManifest::read(&json!({}), &json!({}));
        assert_eq!(problems[0].message, "spec.containers must be a list of containers, but it is missing");
        let (_, problems) = PodManifest::read(&json!({}), &json!({"containers": [{"image": "x"}, 3]}));
        assert_eq!(problems.len(), 2);
    }
}
