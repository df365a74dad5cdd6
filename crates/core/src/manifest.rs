//! Extracts the workloads from the documents of a manifest.

use crate::dialect::{asks, grants};
use crate::pod::{PodManifest, Problem, not_a_string};
use crate::truncate::shorten;
use serde_json::Value;
use std::collections::BTreeMap;

/// Kinds whose pods are checked.
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

/// An object that creates pods, or a pod itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadManifest {
    /// Kind of the object.
    pub kind: String,
    /// Namespace, if the manifest names one.
    pub namespace: Option<String>,
    /// Name, or the prefix (`generateName`) from which Kubernetes generates it.
    pub name: Option<String>,
    /// The pod, or the template of the pods.
    pub pod: PodManifest,
    /// Problems with the structure of the object.
    pub problems: Vec<Problem>,
}

/// The objects in the documents of a manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ManifestContents {
    /// The workloads, in the order of the documents.
    pub workloads: Vec<WorkloadManifest>,
    /// Number of objects of each other kind.
    pub others: BTreeMap<String, usize>,
    /// Messages about objects of other kinds that request GPUs.
    pub unread: Vec<String>,
    /// Messages about documents that are not Kubernetes objects.
    pub unreadable: Vec<String>,
}

/// Extracts the workloads from parsed documents.
pub fn read(documents: &[Value]) -> ManifestContents {
    let mut contents = ManifestContents::default();
    for (index, document) in documents.iter().enumerate() {
        // A leading or trailing "---" makes an empty document, which kubectl skips, too.
        if !document.is_null() {
            read_object(document, None, &format!("document {}", index + 1), &mut contents);
        }
    }
    contents
}

/// Reads one object. `implied` is the kind of a typed list, whose items may omit it.
fn read_object(object: &Value, implied: Option<&str>, place: &str, contents: &mut ManifestContents) {
    if !object.is_object() {
        contents.unreadable.push(format!("{place} is not a Kubernetes object: it must be a map with a kind"));
        return;
    }
    let Some(kind) = object.get("kind").and_then(Value::as_str).or(implied) else {
        contents.unreadable.push(format!("{place} has no kind: add one, like \"kind: Pod\""));
        return;
    };
    if let Some(of) = kind.strip_suffix("List")
        && let Some(items) = object.get("items").and_then(Value::as_array)
    {
        let implied = (!of.is_empty()).then_some(of);
        for (index, item) in items.iter().enumerate() {
            read_object(item, implied, &format!("{place}, item {}", index + 1), contents);
        }
        return;
    }
    let version = object.get("apiVersion").and_then(Value::as_str).unwrap_or("v1");
    let group = version.split_once('/').map_or("", |(group, _)| group);
    // Objects of other API groups may have the same kind and another structure. Their groups are domains; the groups of
    // Kubernetes itself that matter here contain no dot.
    let is_builtin = !group.contains('.');
    match (group, kind) {
        ("batch.volcano.sh", "Job") => {
            let tasks = object["spec"]["tasks"].as_array().map(Vec::as_slice).unwrap_or_default();
            if tasks.is_empty() {
                contents.workloads.push(workload(kind, object, "spec.tasks", &Value::Null));
            }
            let tasks = tasks.iter().enumerate();
            contents.workloads.extend(tasks.map(|(index, task)| volcano_task(object, index, task)));
        }
        _ if is_builtin && let Some(path) = template_path(kind) => {
            let template =
                path.split('.').filter(|key| !key.is_empty()).fold(object, |value, key| &value[key]);
            let mut workload = workload(kind, object, path, template);
            workload.problems.extend(check_version(object, kind));
            contents.workloads.push(workload);
        }
        _ => match KINDS.iter().find(|known| is_builtin && known.eq_ignore_ascii_case(kind)) {
            Some(known) => {
                let kind = shorten(kind);
                contents.unreadable.push(format!("{place} is of kind \"{kind}\": did you mean \"{known}\"?"));
            }
            None => {
                *contents.others.entry(shorten(kind)).or_default() += 1;
                if requests_gpus(object) {
                    contents.unread.push(unread_message(kind, object));
                }
            }
        },
    }
}

/// Returns whether any container in an object of any structure requests GPUs.
fn requests_gpus(value: &Value) -> bool {
    let amounts = ["limits", "requests"].into_iter().filter_map(|key| value["resources"][key].as_object());
    amounts.flatten().any(|(resource, _)| asks::is_or_resembles_ask(resource))
        || match value {
            Value::Array(items) => items.iter().any(requests_gpus),
            Value::Object(fields) => fields.values().any(requests_gpus),
            _ => false,
        }
}

/// Returns the message about an object of another kind that requests GPUs.
fn unread_message(kind: &str, object: &Value) -> String {
    let name = object["metadata"]["name"].as_str().unwrap_or("(no name)");
    format!(
        "{} \"{}\" requests GPUs but was not checked: only {} and Volcano's Job are supported; check the pods that it creates, as in `kubectl get pods -o json | partage check -f -`",
        shorten(kind),
        shorten(name),
        KINDS.join(", ")
    )
}

/// Reports an API version that does not have this kind.
fn check_version(object: &Value, kind: &str) -> Option<Problem> {
    let group = match kind {
        "Deployment" | "StatefulSet" | "DaemonSet" | "ReplicaSet" => "apps",
        "Job" | "CronJob" => "batch",
        _ => "",
    };
    let right = if group.is_empty() { "v1".to_string() } else { format!("{group}/v1") };
    let written = match object.get("apiVersion") {
        // The API server reports a missing version. The requests of the pods are clear without it.
        None | Some(Value::Null) => return None,
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    let (of, version) = written.split_once('/').unwrap_or(("", &written));
    // Old beta versions are in these groups, too, and have the same structure.
    let known = (of == group || (of == "extensions" && group == "apps")) && version.starts_with('v');
    (!known).then(|| {
        let message = format!("\"{}\" has no kind {kind}: write \"{right}\"", shorten(&written));
        Problem::of_pod("apiVersion", message)
    })
}

/// Returns the path of the pod template in an object of this kind.
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

fn workload(kind: &str, object: &Value, path: &str, template: &Value) -> WorkloadManifest {
    let metadata = &object["metadata"];
    let mut problems = Vec::new();
    let mut text = |key: &str| match &metadata[key] {
        Value::String(text) if !text.is_empty() => Some(text.clone()),
        value @ (Value::Number(_) | Value::Bool(_)) => {
            let message = not_a_string("names", &value.to_string());
            problems.push(Problem::of_pod(format!("metadata.{key}"), message));
            Some(value.to_string())
        }
        _ => None,
    };
    let namespace = text("namespace");
    let name = text("name").or_else(|| text("generateName"));
    if name.is_none() {
        problems.push(Problem::of_pod("metadata.name", format!("the {kind} has no name: add one")));
    }
    let (pod, more) = match template {
        Value::Object(_) => PodManifest::read(&template["metadata"], &template["spec"]),
        _ => {
            let message = format!("the {kind} has no pod template: add {path}");
            (PodManifest::default(), vec![Problem::of_pod(path, message)])
        }
    };
    problems.extend(more);
    // An annotation on the outer object has no effect, which is easy to overlook.
    let outer = metadata["annotations"].as_object().filter(|_| !path.is_empty()).into_iter().flatten();
    let is_misplaced = |key: &str| asks::reads_annotation(key) && !grants::is_record(key);
    for (key, _) in outer.filter(|(key, _)| is_misplaced(key) && !pod.annotations.contains_key(*key)) {
        let message = format!(
            "is set on the {kind}, but its pods do not have it: move it to {path}.metadata.annotations"
        );
        problems.push(Problem::of_pod(key, message));
    }
    // A running pod has its scheduler's record. In a template, the record would be forged for every pod.
    let records = pod.annotations.keys().filter(|key| !path.is_empty() && grants::is_record(key));
    problems.extend(
        records.map(|key| {
            Problem::of_pod(key, "is set by the scheduler and must not be in a manifest: remove it")
        }),
    );
    WorkloadManifest { kind: kind.into(), namespace, name, pod, problems }
}

/// Reads one task of Volcano's Job, which has a template for each task.
fn volcano_task(job: &Value, index: usize, task: &Value) -> WorkloadManifest {
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

    fn names(contents: &ManifestContents) -> Vec<(&str, &str)> {
        contents.workloads.iter().map(|w| (w.kind.as_str(), w.name.as_deref().unwrap_or("-"))).collect()
    }

    #[test]
    fn pods_of_every_kind_are_read() {
        for kind in KINDS {
            let template = json!({"spec": spec()});
            let version = match kind {
                "Pod" | "ReplicationController" | "PodTemplate" => "v1",
                "Job" | "CronJob" => "batch/v1",
                _ => "apps/v1",
            };
            let mut object =
                json!({"apiVersion": version, "kind": kind, "metadata": {"name": "w", "namespace": "ml"}});
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
    fn lists_are_read_and_other_kinds_are_counted() {
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
        assert_eq!(contents.others, BTreeMap::from([("Deployment".into(), 1), ("Service".into(), 1)]));
        assert_eq!(contents.unread, [""; 0]);
        assert_eq!(contents.unreadable, [""; 0]);
    }

    #[test]
    fn tasks_of_a_volcano_job_are_read() {
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
    fn annotations_outside_the_pod_template_are_problems() {
        let annotations = json!({"partage.dev/policy": "spread", "a.com/vcuda-core-limit": "5", "note": "x"});
        let deployment = |inner: &Value| {
            json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d", "annotations": annotations},
                "spec": {"template": {"metadata": {"annotations": inner}, "spec": spec()}}})
        };
        let contents = read(&[deployment(&json!({})), deployment(&annotations)]);
        let fields: Vec<_> = contents.workloads[0].problems.iter().map(|p| p.field.as_str()).collect();
        assert_eq!(fields, ["a.com/vcuda-core-limit", "partage.dev/policy"]);
        assert_eq!(
            contents.workloads[0].problems[1].message,
            "is set on the Deployment, but its pods do not have it: move it to spec.template.metadata.annotations"
        );
        assert_eq!(contents.workloads[1].problems, []);
    }

    #[test]
    fn numeric_names_are_converted() {
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": 123, "namespace": 456}, "spec": spec()});
        let contents = read(&[pod]);
        assert_eq!(names(&contents), [("Pod", "123")]);
        assert_eq!(contents.workloads[0].namespace.as_deref(), Some("456"));
        let found: Vec<_> = contents.workloads[0].problems.iter().map(|p| p.message.as_str()).collect();
        assert_eq!(found, ["names are strings: write \"456\"", "names are strings: write \"123\""]);
    }

    #[test]
    fn unknown_kinds_and_versions_are_reported() {
        let object = |version: &str, kind: &str| {
            let template = json!({"spec": spec()});
            json!({"apiVersion": version, "kind": kind, "metadata": {"name": "x"}, "spec": {
                "containers": [{"name": "main"}], "template": template,
            }})
        };
        for (version, kind, problems) in [
            ("v1", "Pod", 0),
            ("apps/v1", "Deployment", 0),
            ("extensions/v1beta1", "Deployment", 0),
            ("batch/v1", "Job", 0),
            ("v1", "Deployment", 1),
            ("apps/v1", "Pod", 1),
            ("apps/v1", "Job", 1),
            ("apps/1", "Deployment", 1),
            ("app/v1", "Deployment", 1),
        ] {
            let contents = read(&[object(version, kind)]);
            assert_eq!(contents.workloads[0].problems.len(), problems, "{version} {kind}");
        }
        let contents = read(&[object("v1", "Deployment"), object("v1", "pod")]);
        assert_eq!(
            contents.workloads[0].problems[0].message,
            "\"v1\" has no kind Deployment: write \"apps/v1\""
        );
        assert_eq!(contents.unreadable, ["document 2 is of kind \"pod\": did you mean \"Pod\"?"]);
        let foreign = read(&[object("serving.example/v1", "pod"), object("serving.example/v1", "Pod")]);
        assert_eq!((foreign.others.len(), foreign.unreadable.len()), (2, 0));
    }

    #[test]
    fn scheduler_records_in_templates_are_problems() {
        let annotations = json!({
            "partage.dev/grant": "{}", "ALIYUN_COM_GPU_MEM_IDX": "0", "a.com/predicate-gpu-idx-0": "0", "x": "y",
        });
        let template = json!({"metadata": {"annotations": annotations}, "spec": spec()});
        let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": {"template": template}});
        let mut pod = template.clone();
        pod["apiVersion"] = "v1".into();
        pod["kind"] = "Pod".into();
        pod["metadata"]["name"] = "p".into();
        let contents = read(&[deployment, pod]);
        let problems = &contents.workloads[0].problems;
        assert_eq!(problems.len(), 3);
        assert_eq!(problems[0].message, "is set by the scheduler and must not be in a manifest: remove it");
        assert_eq!(contents.workloads[1].problems, []);
    }

    #[test]
    fn volcano_job_without_tasks_is_a_problem() {
        let job = json!({
            "apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": {"name": "train"},
            "spec": {"tasks": []},
        });
        let contents = read(&[job]);
        assert_eq!(contents.workloads[0].problems[0].message, "the Job has no pod template: add spec.tasks");
    }

    #[test]
    fn other_kinds_that_request_gpus_are_reported() {
        let container = json!({"name": "c", "resources": {"limits": {"nvidia.com/gpu": 1}}});
        let object = |kind: &str, spec: Value| json!({"apiVersion": "example.com/v1", "kind": kind, "metadata": {"name": "x"}, "spec": spec});
        let template = json!({"spec": {"containers": [container]}});
        let contents = read(&[
            object("RayJob", json!({"rayClusterSpec": {"headGroupSpec": {"template": template}}})),
            object("Workflow", json!({"templates": [{"container": container}]})),
            object("Quota", json!({"limits": {"nvidia.com/gpu": 1}, "containers": [{"name": "c"}]})),
        ]);
        assert_eq!(contents.unread.len(), 2);
        assert!(contents.unread[0].starts_with("RayJob \"x\" requests GPUs but was not checked: only Pod, "));
        assert_eq!(contents.others.len(), 3);
    }

    #[test]
    fn documents_that_are_not_objects_are_reported() {
        let contents = read(&[json!("text"), json!({"metadata": {}}), json!({"kind": "List", "items": [3]})]);
        assert_eq!(
            contents.unreadable,
            [
                "document 1 is not a Kubernetes object: it must be a map with a kind",
                "document 2 has no kind: add one, like \"kind: Pod\"",
                "document 3, item 1 is not a Kubernetes object: it must be a map with a kind",
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
                "the Deployment has no pod template: add spec.template",
                "spec.containers must be a list of containers, but it is missing",
            ]
        );
    }
}
