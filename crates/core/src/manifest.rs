//! From the documents of a manifest to the workloads in it.

use crate::dialect::asks;
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
    let version = object.get("apiVersion").and_then(Value::as_str).unwrap_or("v1");
    let group = version.split_once('/').map_or("", |(group, _)| group);
    // Other groups have objects of the same kind and another shape.
    match (group, kind) {
        ("batch.volcano.sh", "Job") => {
            let tasks = object["spec"]["tasks"].as_array().into_iter().flatten().enumerate();
            contents.workloads.extend(tasks.map(|(index, task)| volcano_task(object, index, task)));
        }
        ("" | "apps" | "batch" | "extensions", _) if let Some(path) = template_path(kind) => {
            let template =
                path.split('.').filter(|key| !key.is_empty()).fold(object, |value, key| &value[key]);
            contents.workloads.push(workload(kind, object, path, template));
        }
        _ => contents.others += 1,
    }
}

/// Where an object of this kind keeps what its pods are made from.
fn template_path(kind: &str) -> Option<&'static str> {
    Some(match kind {
        "Pod" => "",
        "Deployment" | "StatefulSet" | "DaemonSet" | "ReplicaSet" | "ReplicationController" | "Job" => {
            "spec.template"
        }
        "CronJob" => "spec.jobTemplate.spec.template",
        "PodTemplate" => "template",
        _ => return None,
    })
}

fn workload(kind: &str, object: &Value, path: &str, template: &Value) -> Workload {
    let metadata = &object["metadata"];
    let text = |key: &str| metadata[key].as_str().filter(|text| !text.is_empty()).map(String::from);
    let name = text("name").or_else(|| text("generateName"));
    let mut problems = Vec::new();
    if name.is_none() {
        problems.push(Problem::of_pod("metadata.name", format!("the {kind} has no name: add one")));
    }
    let (pod, more) = match template {
        Value::Object(_) => Pod::read(&template["metadata"], &template["spec"]),
        _ => {
            let message = format!("the {kind} does not say what its pods are: add {path}");
            (Pod::default(), vec![Problem::of_pod(path, message)])
        }
    };
    problems.extend(more);
    // On the object around the pods an annotation is read by nobody, which is easily overlooked.
    let outer = metadata["annotations"].as_object().filter(|_| !path.is_empty()).into_iter().flatten();
    for (key, _) in
        outer.filter(|(key, _)| asks::reads_annotation(key) && !pod.annotations.contains_key(*key))
    {
        let message =
            format!("stands on the {kind}, its pods do not have it: move it to {path}.metadata.annotations");
        problems.push(Problem::of_pod(key, message));
    }
    Workload { kind: kind.into(), namespace: text("namespace"), name, pod, problems }
}

/// One task of Volcano's own Job, which has a template for each.
fn volcano_task(job: &Value, index: usize, task: &Value) -> Workload {
    let path = format!("spec.tasks[{index}].template");
    let mut workload = workload("Job", job, &path, &task["template"]);
    let task = task["name"].as_str().map_or_else(|| index.to_string(), String::from);
    workload.name = workload.name.map(|job| format!("{job}/{task}"));
    workload
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
        let foreign = json!({"apiVersion": "serving.example/v1", "kind": "Deployment"});
        let contents = read(&[
            json!({"kind": "List", "items": [pod, {"kind": "Service"}, {"kind": "List", "items": [pod]}]}),
            json!({"kind": "PodList", "items": [bare]}),
            foreign,
            Value::Null,
        ]);
        assert_eq!(names(&contents), [("Pod", "w-"), ("Pod", "w-"), ("Pod", "b")]);
        assert_eq!(contents.others, 2);
        assert_eq!(contents.unreadable, [""; 0]);
    }

    #[test]
    fn reads_the_tasks_of_a_volcano_job() {
        let template = json!({"spec": spec()});
        let job = json!({
            "apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": {"name": "train"},
            "spec": {"tasks": [{"name": "worker", "template": template}, {"template": template}]},
        });
        let contents = read(&[job]);
        assert_eq!(names(&contents), [("Job", "train/worker"), ("Job", "train/1")]);
        assert!(contents.workloads.iter().all(|w| w.problems.is_empty() && w.pod.containers.len() == 1));
    }

    #[test]
    fn annotations_must_be_on_the_pods() {
        let annotations = json!({"partage.dev/policy": "spread", "a.com/vcuda-core-limit": "5", "note": "x"});
        let deployment = |inner: &Value| {
            json!({"kind": "Deployment", "metadata": {"name": "d", "annotations": annotations},
                "spec": {"template": {"metadata": {"annotations": inner}, "spec": spec()}}})
        };
        let contents = read(&[deployment(&json!({})), deployment(&annotations)]);
        let fields: Vec<_> = contents.workloads[0].problems.iter().map(|p| p.field.as_str()).collect();
        assert_eq!(fields, ["a.com/vcuda-core-limit", "partage.dev/policy"]);
        assert_eq!(
            contents.workloads[0].problems[1].message,
            "stands on the Deployment, its pods do not have it: move it to spec.template.metadata.annotations"
        );
        assert_eq!(contents.workloads[1].problems, []);
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
