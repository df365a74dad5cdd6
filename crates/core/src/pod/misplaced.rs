//! Asks that stand where Kubernetes does not look for them.
//!
//! One wrong indentation, and a pod asks for nothing: the API server drops or refuses the line, and without a word
//! here the check would say that all is fine.

use super::{Problem, kind};
use crate::dialect::asks;
use crate::model::ContainerName;
use crate::quote::short;
use serde_json::Value;

/// What `resources` may hold.
const IN_RESOURCES: [&str; 3] = ["limits", "requests", "claims"];

pub(super) fn check_pod(metadata: &Value, spec: &Value, problems: &mut Vec<Problem>) {
    for (wrong, right) in [("annotation", "annotations"), ("label", "labels")] {
        if present(metadata, wrong).is_some() {
            let message = format!("Kubernetes reads metadata.{right}: add the s");
            problems.push(Problem::of_pod(format!("metadata.{wrong}"), message));
        }
    }
    for key in ["annotations", "labels"] {
        if present(spec, key).is_some() {
            let message =
                format!("stands in the spec, where Kubernetes does not read it: move it to metadata.{key}");
            problems.push(Problem::of_pod(format!("spec.{key}"), message));
        }
    }
    for (key, _) in entries(metadata, "labels").filter(|(key, _)| asks::reads_annotation(key)) {
        let message =
            "is written as a label, and read as an annotation only: move it to metadata.annotations";
        problems.push(Problem::of_pod(key, message));
    }
    for resource in asked_in(spec).into_iter().chain(asked_in(&spec["resources"])) {
        let message =
            "stands on the pod, and GPUs are asked per container: move it to resources.limits of one";
        problems.push(Problem::of_pod(resource, message));
    }
    for item in spec["ephemeralContainers"].as_array().into_iter().flatten() {
        let name = ContainerName::from(item["name"].as_str().unwrap_or("spec.ephemeralContainers"));
        for resource in asked_in(&item["resources"]) {
            let message = "is asked by an ephemeral container, which Kubernetes gives no resources: \
                           ask in a container of the pod";
            problems.push(Problem::of_container(&name, resource, message));
        }
    }
}

pub(super) fn check_container(item: &Value, name: &ContainerName, problems: &mut Vec<Problem>) {
    let mut problem = |field: &str, message: String| {
        problems.push(Problem::of_container(name, field, message));
    };
    for key in ["limits", "requests"] {
        if present(item, key).is_some() {
            let message =
                format!("stands on the container itself: indent it under resources, as resources.{key}");
            problem(key, message);
        }
    }
    match item.get("resources") {
        None | Some(Value::Null) => {}
        Some(Value::Object(resources)) => {
            for key in resources.keys().filter(|key| !IN_RESOURCES.contains(&key.as_str())) {
                let message = if asks::is_or_resembles_ask(key) {
                    "stands in resources itself: indent it under limits, as resources.limits".to_string()
                } else {
                    format!("resources has no \"{}\": write limits or requests", short(key))
                };
                problem(&format!("resources.{key}"), message);
            }
        }
        other => problem("resources", format!("must be a map with limits, it is {}", kind(other))),
    }
}

/// The GPU resources that limits or requests of this name, each once.
fn asked_in(resources: &Value) -> Vec<&str> {
    let both = ["limits", "requests"].into_iter().flat_map(|key| entries(resources, key));
    let mut asked: Vec<&str> =
        both.map(|(resource, _)| resource.as_str()).filter(|r| asks::is_or_resembles_ask(r)).collect();
    asked.sort_unstable();
    asked.dedup();
    asked
}

fn entries<'a>(parent: &'a Value, key: &str) -> impl Iterator<Item = (&'a String, &'a Value)> + use<'a> {
    parent.get(key).and_then(Value::as_object).into_iter().flatten()
}

fn present<'a>(parent: &'a Value, key: &str) -> Option<&'a Value> {
    parent.get(key).filter(|value| !value.is_null())
}

#[cfg(test)]
mod tests {
    use crate::pod::Pod;
    use serde_json::{Value, json};

    fn said(metadata: Value, spec: Value) -> Vec<String> {
        let (_, problems) = Pod::read(&metadata, &spec);
        problems.into_iter().map(|problem| format!("{}: {}", problem.field, problem.message)).collect()
    }

    fn of_container(container: Value) -> Vec<String> {
        let mut container = container;
        container["name"] = "main".into();
        said(json!({}), json!({"containers": [container]}))
    }

    #[test]
    fn wrong_indentation_is_seen() {
        let gpu = json!({"partage.dev/gpu": 1});
        for (container, expected) in [
            (
                json!({"limits": gpu}),
                "limits: stands on the container itself: indent it under resources, as resources.limits",
            ),
            (json!({"resources": [gpu]}), "resources: must be a map with limits, it is a list"),
            (
                json!({"resources": {"limit": gpu}}),
                "resources.limit: resources has no \"limit\": write limits or requests",
            ),
            (
                json!({"resources": gpu}),
                "resources.partage.dev/gpu: stands in resources itself: indent it under limits, as resources.limits",
            ),
        ] {
            assert_eq!(of_container(container), [expected]);
        }
        assert_eq!(of_container(json!({"resources": {"limits": gpu, "claims": []}, "env": []})), [""; 0]);
    }

    #[test]
    fn asks_beside_the_containers_are_seen() {
        let containers = json!([{"name": "main"}]);
        let gpu = json!({"limits": {"nvidia.com/gpu": 1, "cpu": 1}});
        let fields = |metadata: Value, spec: Value| -> Vec<String> {
            said(metadata, spec).iter().filter_map(|s| Some(s.split_once(": ")?.0.to_string())).collect()
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
