//! The generic watch cache, with a resource and a view that this crate does not know.

use crate::control_plane::{ControlPlane, NODE};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use partage_cluster::{ApiClient, NodeCache, Projection, WatchSelector, watch};
use partage_testkit::eventually;
use serde_json::json;
use std::time::Duration;

/// Keeps one entry of each ConfigMap, and leaves out those without it.
struct ConfigMapColors;

impl Projection for ConfigMapColors {
    type Object = ConfigMap;
    type View = String;
    const RESOURCE: &'static str = "configmaps";

    fn api(client: Client, namespace: Option<&str>) -> Api<ConfigMap> {
        match namespace {
            Some(namespace) => Api::namespaced(client, namespace),
            None => Api::all(client),
        }
    }

    fn view(map: ConfigMap) -> Option<String> {
        map.data?.remove("color")
    }
}

#[test]
fn any_resource_is_cached_by_selector_and_projection() {
    let Some(plane) = ControlPlane::start() else { return };
    let client = plane.administrator();
    let create = |name: &str, namespace: &str, app: &str, data: serde_json::Value| {
        plane.apply(json!({
            "apiVersion": "v1", "kind": "ConfigMap", "data": data,
            "metadata": {"name": name, "namespace": namespace, "labels": {"app": app}},
        }));
    };
    // More than one page of the list.
    for number in 0..9 {
        create(&format!("map-{number}"), "default", "paint", json!({"color": format!("color {number}")}));
    }
    create("without-color", "default", "paint", json!({"size": "large"}));
    create("other-app", "default", "other", json!({"color": "red"}));
    create("other-namespace", "kube-system", "paint", json!({"color": "red"}));
    let selector = WatchSelector::in_namespace("default").labels("app=paint");
    let colors = plane.bed.block_on(async {
        let colors = watch::<ConfigMapColors>(&client, &selector);
        colors.synced().await;
        colors
    });
    let seen = || {
        let mut seen: Vec<String> = colors.all().iter().map(|color| color.to_string()).collect();
        seen.sort();
        seen
    };
    let expected: Vec<String> = (0..9).map(|number| format!("color {number}")).collect();
    assert_eq!(seen(), expected);
    assert_eq!(colors.by_name("default", "map-3").unwrap().as_str(), "color 3");

    let mut changed = colors.changed();
    let before = *changed.borrow_and_update();
    let patch = |name: &str, patch: &str| {
        plane.bed.kubectl(&["patch", "configmap", name, "--type=merge", "-p", patch]).unwrap();
    };
    // What the view does not show changes nothing.
    patch("map-0", r#"{"data": {"size": "small"}}"#);
    patch("map-1", r#"{"data": {"color": "blue"}}"#);
    plane.bed.block_on(async {
        tokio::time::timeout(Duration::from_secs(120), changed.changed()).await.unwrap().unwrap();
    });
    assert_eq!(*changed.borrow_and_update(), before + 1);
    assert_eq!(colors.by_name("default", "map-1").unwrap().as_str(), "blue");

    // An object leaves the cache when its view or the selector no longer includes it, also while the server is away.
    patch("map-2", r#"{"data": {"color": null}}"#);
    plane.bed.kubectl(&["label", "configmap", "map-3", "app=other", "--overwrite"]).unwrap();
    plane.without_server(|| assert!(colors.all().len() >= 7, "the last known content stays"));
    plane.bed.kubectl(&["delete", "configmap", "map-4"]).unwrap();
    create("late", "default", "paint", json!({"color": "green"}));
    let mut expected = vec!["color 0", "blue", "color 5", "color 6", "color 7", "color 8", "green"];
    expected.sort_unstable();
    plane.bed.block_on(eventually("the cache has caught up", async || {
        let seen = seen();
        if seen == expected { Ok(()) } else { Err(format!("{seen:?}")) }
    }));

    nodes_are_cached_by_name(&plane, &client);
}

fn nodes_are_cached_by_name(plane: &ControlPlane, client: &ApiClient) {
    plane.apply(json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": "n2", "labels": {"gpushare": "true"}, "annotations": {"a": "b"}},
    }));
    plane.bed.block_on(async {
        let all = client.watch_nodes(&WatchSelector::all());
        let labeled = client.watch_nodes(&WatchSelector::all().labels("gpushare=true"));
        all.synced().await;
        labeled.synced().await;
        let names = |nodes: &NodeCache| -> Vec<String> {
            let mut names: Vec<_> = nodes.entries().iter().map(|(key, _)| key.name.to_string()).collect();
            names.sort();
            names
        };
        assert_eq!((names(&all), names(&labeled)), (vec![NODE.into(), "n2".into()], vec!["n2".into()]));
        assert_eq!(all.by_name("", "n2").unwrap().annotations["a"], "b");
    });
}
