//! The parts of a Kubernetes pod that matter for sharing GPUs, read leniently from JSON.
//!
//! Reading never fails: what cannot be understood becomes a [`Problem`] that says where and what to write
//! instead, and the rest of the pod is read all the same, so that a person sees every mistake at once.

mod misplaced;

use crate::model::{ContainerName, ContainerRole};
use crate::quantity::{Quantity, QuantityError};
use crate::quote;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// Something wrong with a pod, in words its author understands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The container it concerns; absent for the whole pod.
    pub container: Option<String>,
    /// The resource, annotation or path it is about.
    pub field: String,
    /// What is wrong and what to do.
    pub message: String,
}

impl Problem {
    /// A problem of the whole pod.
    pub fn of_pod(field: impl AsRef<str>, message: impl AsRef<str>) -> Problem {
        let (field, message) = (quote::field(field.as_ref()), quote::message(message.as_ref()));
        Problem { container: None, field, message }
    }

    /// A problem of one container.
    pub fn of_container(
        container: &ContainerName,
        field: impl AsRef<str>,
        message: impl AsRef<str>,
    ) -> Problem {
        Problem { container: Some(container.to_string()), ..Problem::of_pod(field, message) }
    }
}

/// A pod, or the template of one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pod {
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its annotations.
    pub annotations: BTreeMap<String, String>,
    /// Its containers in the order of the spec: init containers and sidecars first.
    pub containers: Vec<Container>,
}

/// A container of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// Its name.
    pub name: ContainerName,
    /// When it runs.
    pub role: ContainerRole,
    /// Resource limits, as written.
    pub limits: BTreeMap<String, String>,
    /// Resource requests, as written.
    pub requests: BTreeMap<String, String>,
}

impl Container {
    /// The amount of an extended resource: the limit, or the request where no limit is written.
    pub fn amount(&self, resource: &str) -> Option<&str> {
        self.limits.get(resource).or_else(|| self.requests.get(resource)).map(String::as_str)
    }

    /// The same as a whole number.
    pub fn count(&self, resource: &str) -> Option<Result<u64, QuantityError>> {
        self.amount(resource).map(|text| text.parse().and_then(Quantity::to_count))
    }

    /// Every resource this container names, each once, in order.
    pub fn resources(&self) -> impl Iterator<Item = &str> {
        let only_requested = self.requests.keys().filter(|name| !self.limits.contains_key(*name));
        let mut names: Vec<&str> = self.limits.keys().chain(only_requested).map(String::as_str).collect();
        names.sort_unstable();
        names.into_iter()
    }
}

impl Pod {
    /// Reads a pod from its `metadata` and `spec`.
    pub fn read(metadata: &Value, spec: &Value) -> (Pod, Vec<Problem>) {
        let mut problems = Vec::new();
        misplaced::check_pod(metadata, spec, &mut problems);
        let mut pod = Pod {
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
                    format!("{path} must be a list of containers, it is {}", kind(other)),
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
                        "two containers are called \"{}\": give each a name of its own",
                        quote::short(container.name.as_str())
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
) -> Option<Container> {
    if !item.is_object() {
        let message = format!("{path} must be a container, it is {}", kind(Some(item)));
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
            // Its place in the spec is the only name left to report further problems under.
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
                let message = format!("{field} must map resources to amounts, it is {}", kind(other));
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
                        "the amount must be a number or a quantity like \"8Gi\", it is {}",
                        kind(Some(amount))
                    ),
                )),
            }
        }
        read
    };
    let (limits, requests) = (amounts("limits"), amounts("requests"));
    Some(Container { name, role, limits, requests })
}

/// Labels or annotations. Kubernetes takes only strings there; a number is reported and still understood.
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
            let message = format!("{field} must map names to strings, it is {}", kind(other));
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
                format!("{noun} values are strings, this is {}", kind(Some(other))),
            )),
        }
    }
    read
}

/// For a number where Kubernetes takes a string only.
pub(crate) fn not_a_string(what: &str, text: &str) -> String {
    format!("{what} are strings: write \"{}\"", quote::short(text))
}

/// A scalar as the text Kubernetes would see.
fn quantity_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(match number.as_f64() {
            // YAML reads 1e3 as a float; Kubernetes then sees 1000.
            Some(float) if number.is_f64() && float.fract() == 0.0 && float.abs() < 1e15 => {
                format!("{}", float as i64)
            }
            _ => number.to_string(),
        }),
        _ => None,
    }
}

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
    fn reads_containers_in_order_with_roles() {
        let spec = json!({
            "initContainers": [
                {"name": "fetch"},
                {"name": "proxy", "restartPolicy": "Always"},
            ],
            "containers": [{"name": "main", "resources": {"limits": {"partage.dev/gpu": 1}}}],
        });
        let (pod, problems) = Pod::read(&json!({}), &spec);
        assert_eq!(problems, []);
        let roles: Vec<_> = pod.containers.iter().map(|c| (c.name.as_str(), c.role)).collect();
        assert_eq!(
            roles,
            [("fetch", ContainerRole::Init), ("proxy", ContainerRole::Sidecar), ("main", ContainerRole::App)]
        );
        assert_eq!(pod.containers[2].amount("partage.dev/gpu"), Some("1"));
    }

    #[test]
    fn unquoted_annotation_is_a_problem_and_still_understood() {
        let metadata = json!({"annotations": {"tencent.com/vcuda-core-limit": 50}});
        let (pod, problems) = Pod::read(&metadata, &json!({"containers": []}));
        assert_eq!(pod.annotations["tencent.com/vcuda-core-limit"], "50");
        assert_eq!(problems[0].field, "tencent.com/vcuda-core-limit");
        assert_eq!(problems[0].message, "annotation values are strings: write \"50\"");
    }

    #[test]
    fn names_what_is_missing() {
        let (_, problems) = Pod::read(&json!({}), &json!({}));
        assert_eq!(problems[0].message, "spec.containers must be a list of containers, it is missing");
        let (_, problems) = Pod::read(&json!({}), &json!({"containers": [{"image": "x"}, 3]}));
        assert_eq!(problems.len(), 2);
    }
}
