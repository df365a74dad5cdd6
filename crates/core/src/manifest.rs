//! From the documents of a manifest to the workloads in it.

use crate::pod::{Pod, Problem};
use serde_json::Value;

/// The kinds whose pods are read.
pub const KINDS: [&str; 9] = [
    "Pod",
    "Deployment",
    "StatefulSet",
    "DaemonSet",
    "Job",
    "CronJob",
    "ReplicaSet",
    "ReplicationController",
    "PodTemplate",
];

/// Something that runs pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Its kind.
    pub kind: String,
    /// Its namespace, where it says one.
    pub namespace: Option<String>,
    /// Its name, or the start of it where Kubernetes shall generate the rest.
    pub name: Option<String>,
    /// Its pod, or the template of its pods.
    pub pod: Pod,
    /// What is wrong with its form.
    pub problems: Vec<Problem>,
}

/// What the documents of a manifest hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// The workloads, in the order of the documents.
    pub workloads: Vec<Workload>,
    /// How many objects are of other kinds.
    pub others: usize,
    /// Documents that are no Kubernetes objects, in words.
    pub unreadable: Vec<String>,
}

/// Reads the workloads from parsed documents.
pub fn read(documents: &[Value]) -> Contents {
    let mut contents = Contents::default();
    for (index, document) in documents.iter().enumerate() {
        // "---" before or after everything leaves an empty document, which kubectl skips as well.
        if !document.is_null() {
            object(document, None, &format!("document {}", index + 1), &mut contents);
        }
    }
    contents
}

/// Reads one object; `implied` is its kind where it stands in a typed list and does not repeat it.
fn object(object: &Value, implied: Option<&str>, place: &str, contents: &mut Contents) {
    if !object.is_object() {
        contents.unreadable.push(format!("{place} is no Kubernetes object: it must be a map with a kind"));
        return;
    }
    let Some(kind) = object.get("kind").and_then(Value::as_str).or(implied) else {
        contents.unreadable.push(format!("{place} says no kind: add one, like \"kind: Pod\""));
        return;
    };
    if let Some(of) = kind.strip_suffix("List")
        && let Some(items) = object.get("items").and_then(Value::as_array)
    {
        let implied = (!of.is_empty()).then_some(of);
        for (index, item) in items.iter().enumerate() {
            self::object(item, implied, &format!("{place}, item {}", index + 1), contents);
        }
        return;
    }
    match template(kind, object) {
        Some(template) => contents.workloads.push(workload(kind, object, template)),
        None => contents.others += 1,
    }
}

/// Where an object keeps what its pods are made from.
struct Template<'a> {
    path: &'static str,
    object: &'a Value,
}

fn template<'a>(kind: &str, object: &'a Value) -> Option<Template<'a>> {
    // Other groups have objects of the same kind and another shape, such as Volcano's Job.
    let version = object.get("apiVersion").and_then(Value::as_str).unwrap_or("v1");
    let group = version.split_once('/').map_or("", |(group, _)| group);
    if !matches!(group, "" | "apps" | "batch" | "extensions") {
        return None;
    }
    let path = match kind {
        "Pod" => "",
        "Deployment" | "StatefulSet" | "DaemonSet" | "ReplicaSet" | "ReplicationController" | "Job" => {
            "spec.template"
        }
        "CronJob" => "spec.jobTemplate.spec.template",
        "PodTemplate" => "template",
        _ => return None,
    };
    let object = path.split('.').filter(|key| !key.is_empty()).fold(object, |value, key| &value[key]);
    Some(Template { path, object })
}

fn workload(kind: &str, object: &Value, template: Template<'_>) -> Workload {
    let text = |key: &str| object["metadata"][key].as_str().filter(|text| !text.is_empty()).map(String::from);
    let name = text("name").or_else(|| text("generateName"));
    let mut problems = Vec::new();
    if name.is_none() {
        problems.push(Problem::of_pod("metadata.name", format!("the {kind} has no name: add one")));
    }
    let (pod, more) = match template.object {
        Value::Object(_) => Pod::read(&template.object["metadata"], &template.object["spec"]),
        _ => {
            let message = format!("the {kind} does not say what its pods are: add {}", template.path);
            (Pod::default(), vec![Problem::of_pod(template.path, message)])
        }
    };
    problems.extend(more);
    Workload { kind: kind.into(), namespace: text("namespace"), name, pod, problems }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn spec() -> Value {
        json!({"containers": [{"name": "main"}]})
    }

    fn names(contents: &Contents) -> Vec<(&str, &str)> {
        contents.workloads.iter().map(|w| (w.kind.as_str(), w.name.as_deref().unwrap_or("-"))).collect()
    }

    #[test]
    fn reads_every_kind() {
        for kind in KINDS {
            let template = json!({"spec": spec()});
            let mut object = json!({"kind": kind, "metadata": {"name": "w", "namespace": "ml"}});
            match kind {
                "Pod" => object["spec"] = spec(),
                "CronJob" => object["spec"] = json!({"jobTemplate": {"spec": {"template": template}}}),
                "PodTemplate" => object["template"] = template,
                _ => object["spec"] = json!({"template": template}),
            }
            let contents = read(&[object]);
            assert_eq!(names(&contents), [(kind, "w")]);
            let workload = &contents.workloads[0];
            assert_eq!(workload.problems, [], "{kind}");
            assert_eq!(workload.namespace.as_deref(), Some("ml"));
            assert_eq!(workload.pod.containers.len(), 1, "{kind}");
        }
    }

    #[test]
    fn reads_lists_and_counts_the_rest() {
        let pod = json!({"kind": "Pod", "metadata": {"generateName": "w-"}, "spec": spec()});
        let bare = json!({"metadata": {"name": "b"}, "spec": spec()});
        let volcano =
            json!({"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": {"name": "v"}});
        let contents = read(&[
            json!({"kind": "List", "items": [pod, {"kind": "Service"}, {"kind": "List", "items": [pod]}]}),
            json!({"kind": "PodList", "items": [bare]}),
            volcano,
            Value::Null,
        ]);
        assert_eq!(names(&contents), [("Pod", "w-"), ("Pod", "w-"), ("Pod", "b")]);
        assert_eq!(contents.others, 2);
        assert_eq!(contents.unreadable, [""; 0]);
    }

    #[test]
    fn names_what_is_no_object() {
        let contents = read(&[json!("text"), json!({"metadata": {}}), json!({"kind": "List", "items": [3]})]);
        assert_eq!(
            contents.unreadable,
            [
                "document 1 is no Kubernetes object: it must be a map with a kind",
                "document 2 says no kind: add one, like \"kind: Pod\"",
                "document 3, item 1 is no Kubernetes object: it must be a map with a kind",
            ]
        );
    }

    #[test]
    fn missing_parts_are_problems() {
        let contents =
            read(&[json!({"kind": "Deployment"}), json!({"kind": "Pod", "metadata": {"name": "p"}})]);
        let messages: Vec<_> =
            contents.workloads.iter().flat_map(|w| w.problems.iter().map(|p| p.message.as_str())).collect();
        assert_eq!(
            messages,
            [
                "the Deployment has no name: add one",
                "the Deployment does not say what its pods are: add spec.template",
                "spec.containers must be a list of containers, it is missing",
            ]
        );
    }
}
