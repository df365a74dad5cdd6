//! Reports GPU requests in places where Kubernetes ignores them.
//!
//! With one wrong indentation, a pod requests nothing: the API server drops or rejects the line. Without these checks,
//! `partage check` would report no problem.

use super::{Problem, kind};
use crate::dialect::asks;
use crate::model::ContainerName;
use crate::truncate::shorten;
use serde_json::Value;

/// Valid fields of `resources`.
const IN_RESOURCES: [&str; 3] = ["limits", "requests", "claims"];

/// Reports misplaced requests in a pod.
pub(super) fn check_pod(metadata: &Value, spec: &Value, problems: &mut Vec<Problem>) {
    for (wrong, right) in [("annotation", "annotations"), ("label", "labels")] {
        if present(metadata, wrong).is_some() {
            let message = format!("unknown field: did you mean metadata.{right}?");
            problems.push(Problem::of_pod(format!("metadata.{wrong}"), message));
        }
    }
    for key in ["annotations", "labels"] {
        if present(spec, key).is_some() {
            let message = format!("is in the spec, where Kubernetes ignores it: move it to metadata.{key}");
            problems.push(Problem::of_pod(format!("spec.{key}"), message));
        }
    }
    for (key, _) in entries(metadata, "labels").filter(|(key, _)| asks::reads_annotation(key)) {
        let message = "is a label but must be an annotation: move it to metadata.annotations";
        problems.push(Problem::of_pod(key, message));
    }
    for resource in gpu_resources(spec).into_iter().chain(gpu_resources(&spec["resources"])) {
        let message = "is set on the pod, but GPUs are requested per container: move it to resources.limits of a container";
        problems.push(Problem::of_pod(resource, message));
    }
    for item in spec["ephemeralContainers"].as_array().into_iter().flatten() {
        let name = ContainerName::from(item["name"].as_str().unwrap_or("spec.ephemeralContainers"));
        for resource in gpu_resources(&item["resources"]) {
            let message = "is requested by an ephemeral container, which cannot have resources: request it in a container of the pod";
            problems.push(Problem::of_container(&name, resource, message));
        }
    }
}

/// Reports misplaced requests in a container.
pub(super) fn check_container(item: &Value, name: &ContainerName, problems: &mut Vec<Problem>) {
    let mut problem = |field: &str, message: String| {
        problems.push(Problem::of_container(name, field, message));
    };
    for key in ["limits", "requests"] {
        if present(item, key).is_some() {
            let message =
                format!("is set on the container itself: indent it under resources, as resources.{key}");
            problem(key, message);
        }
    }
    match item.get("resources") {
        None | Some(Value::Null) => {}
        Some(Value::Object(resources)) => {
            for key in resources.keys().filter(|key| !IN_RESOURCES.contains(&key.as_str())) {
                let message = if asks::is_or_resembles_ask(key) {
                    "is set directly in resources: indent it under limits, as resources.limits".to_string()
                } else {
                    format!("unknown field \"{}\" in resources: write limits or requests", shorten(key))
                };
                problem(&format!("resources.{key}"), message);
            }
        }
        other => problem("resources", format!("must be a map with limits, but it is {}", kind(other))),
    }
}

/// Returns the GPU resources in `limits` and `requests`, without duplicates.
fn gpu_resources(resources: &Value) -> Vec<&str> {
    let both = ["limits", "requests"].into_iter().flat_map(|key| entries(resources, key));
    let mut names: Vec<&str> =
        both.map(|(resource, _)| resource.as_str()).filter(|r| asks::is_or_resembles_ask(r)).collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn entries<'a>(parent: &'a Value, key: &str) -> impl Iterator<Item = (&'a String, &'a Value)> + use<'a> {
    parent.get(key).and_then(Value::as_object).into_iter().flatten()
}

fn present<'a>(parent: &'a Value, key: &str) -> Option<&'a Value> {
    parent.get(key).filter(|value| !value.is_null())
}

#[cfg(test)]
mod tests {
    use crate::pod::PodManifest;
    use serde_json::{Value, json};

    fn problems_of_pod(metadata: Value, spec: Value) -> Vec<String> {
        let (_, problems) = PodManifest::read(&metadata, &spec);
        problems.into_iter().map(|problem| format!("{}: {}", problem.field, problem.message)).collect()
    }

    fn problems_of_container(container: Value) -> Vec<String> {
        let mut container = container;
        container["name"] = "main".into();
        problems_of_pod(json!({}), json!({"containers": [container]}))
    }

    #[test]
    fn wrong_indentation_is_a_problem() {
        let gpu = json!({"partage.dev/gpu": 1});
        for (container, expected) in [
            (
                json!({"limits": gpu}),
                "limits: is set on the container itself: indent it under resources, as resources.limits",
            ),
            (json!({"resources": [gpu]}), "resources: must be a map with limits, but it is a list"),
            (
                json!({"resources": {"limit": gpu}}),
                "resources.limit: unknown field \"limit\" in resources: write limits or requests",
            ),
            (
                json!({"resources": gpu}),
                "resources.partage.dev/gpu: is set directly in resources: indent it under limits, as resources.limits",
            ),
        ] {
            assert_eq!(problems_of_container(container), [expected]);
        }
        assert_eq!(
            problems_of_container(json!({"resources": {"limits": gpu, "claims": []}, "env": []})),
            [""; 0]
        );
    }

    #[test]
    fn requests_outside_containers_are_problems() {
        let containers = json!([{"name": "main"}]);
        let gpu = json!({"limits": {"nvidia.com/gpu": 1, "cpu": 1}});
        let fields = |metadata: Value, spec: Value| -> Vec<String> {
            problems_of_pod(metadata, spec)
                .iter()
                .filter_map(|s| Some(s.split_once(": ")?.0.to_string()))
                .collect()
        };
        assert_eq!(
            fields(json!({}), json!({"containers": containers, "resources": gpu})),
            ["nvidia.com/gpu"]
        );
        let ephemeral = json!([{"name": "debug", "resources": gpu}]);
        assert_eq!(
            fields(json!({}), json!({"containers": containers, "ephemeralContainers": ephemeral})),
            ["nvidia.com/gpu"]
        );
        assert_eq!(
            fields(json!({"annotation": {"a": "b"}}), json!({"containers": containers, "annotations": {}})),
            ["metadata.annotation", "spec.annotations"]
        );
        let labels = json!({"labels": {"partage.dev/models": "A100", "aliyun.com/gpu-count": "2"}});
        assert_eq!(fields(labels, json!({"containers": containers})), ["partage.dev/models"]);
        assert_eq!(fields(json!({}), json!({"containers": []})), ["spec.containers"]);
        let host = json!({"limits": {"cpu": 1, "memory": "1Gi"}});
        assert_eq!(fields(json!({}), json!({"containers": containers, "resources": host})), [""; 0]);
    }
}
