//! Events: deduplicated, kept over an absence of the server, and about any object.

use crate::control_plane::{ControlPlane, NODE, WATCH_TIMEOUT};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::{Api, Resource};
use partage_cluster::{Recorder, Severity, node_reference, pod_reference};
use partage_testkit::eventually;
use serde_json::{Value, json};

/// The events about an object, as `kubectl get events` lists them, with their counts.
fn events(plane: &ControlPlane, controller: &str, subject: &str) -> Vec<(String, i64)> {
    let selector = format!("involvedObject.name={subject}");
    let list = plane.get(&["events", "--all-namespaces", "--field-selector", &selector]);
    let ours = |event: &&Value| event["reportingComponent"] == controller;
    let mut seen: Vec<_> = list["items"]
        .as_array()
        .unwrap()
        .iter()
        .filter(ours)
        .map(|event| {
            let count = event["series"]["count"].as_i64().unwrap_or(1);
            (format!("{} {}: {}", event["type"], event["reason"], event["message"]), count)
        })
        .collect();
    seen.sort();
    seen
}

fn expect(plane: &ControlPlane, controller: &str, subject: &str, expected: &[(&str, i64)]) {
    let expected: Vec<(String, i64)> =
        expected.iter().map(|(text, count)| (text.to_string(), *count)).collect();
    plane.bed.block_on(eventually("the events are listed", async || {
        let seen = events(plane, controller, subject);
        if seen == expected { Ok(()) } else { Err(format!("{seen:?}")) }
    }));
}

#[test]
fn events_are_counted_and_outlive_an_absence_of_the_server() {
    let Some(plane) = ControlPlane::start() else { return };
    let token = plane.account(
        "agent",
        json!([{"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch"]}]),
    );
    let client = plane.with_token(&token);
    let pod = plane.pod("greedy", Some(NODE), json!({}));
    let recorder = plane.bed.block_on(async { Recorder::start(&client, "partage.dev/node", NODE) });
    plane.without_server(|| {
        for _ in 0..3 {
            let note = "uses more than its region says";
            recorder.record(&pod_reference(&pod), Severity::Warning, "Bypass", note);
            recorder.record(
                &node_reference(&NODE.into()),
                Severity::Normal,
                "GpuBack",
                "GPU 0 responds again",
            );
        }
        recorder.record(&pod_reference(&pod), Severity::Normal, "Resized", &"é".repeat(600));
    });
    let cut = format!("\"Normal\" \"Resized\": \"{}\"", "é".repeat(512));
    let expected = [(cut.as_str(), 1), ("\"Warning\" \"Bypass\": \"uses more than its region says\"", 3)];
    expect(&plane, "partage.dev/node", "greedy", &expected);
    expect(&plane, "partage.dev/node", NODE, &[("\"Normal\" \"GpuBack\": \"GPU 0 responds again\"", 3)]);
    let described = plane.bed.kubectl(&["describe", "node", NODE]).unwrap();
    assert!(described.contains("GPU 0 responds again"), "{described}");
    let described = plane.bed.kubectl(&["describe", "pod", "greedy"]).unwrap();
    assert!(described.contains("uses more than its region says"), "{described}");
}

#[test]
fn another_component_records_events_about_any_object() {
    let Some(plane) = ControlPlane::start() else { return };
    let client = plane.administrator();
    plane.apply(json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "quota"}}));
    let (map, namespace) = plane.bed.block_on(async {
        let maps: Api<ConfigMap> = Api::namespaced(client.kube().clone(), "default");
        let namespaces: Api<Namespace> = Api::all(client.kube().clone());
        (maps.get("quota").await.unwrap(), namespaces.get("kube-system").await.unwrap())
    });
    plane.bed.block_on(async {
        let recorder = Recorder::start(&client, "partage.dev/control", "control-0");
        recorder.record(&map.object_ref(&()), Severity::Warning, "QuotaExceeded", "4 GiB requested");
        recorder.record(&namespace.object_ref(&()), Severity::Normal, "QuotaChecked", "within its quota");
        recorder.flush(WATCH_TIMEOUT).await;
    });
    let controller = "partage.dev/control";
    let expected = [("\"Warning\" \"QuotaExceeded\": \"4 GiB requested\"", 1)];
    assert_eq!(events(&plane, controller, "quota"), expected.map(|(text, count)| (text.to_string(), count)));
    // Events about cluster-scoped objects are in the namespace `default`.
    let list = plane.get(&["events", "--field-selector", "involvedObject.name=kube-system"]);
    let event = &list["items"][0];
    assert_eq!(
        (&event["reason"], &event["reportingInstance"]),
        (&json!("QuotaChecked"), &json!("control-0"))
    );
    assert_eq!(event["involvedObject"]["kind"], "Namespace");
    let described = plane.bed.kubectl(&["describe", "configmap", "quota"]).unwrap();
    assert!(described.contains("4 GiB requested"), "{described}");
}
