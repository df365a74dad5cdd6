//! The manifests of `deploy/` on a real API server: they apply, restrict agents to their own nodes, and keep tenants
//! from writing grants.

use crate::api_requests::{pod, send};
use kube::Client;
use partage_core::dialect::grants::RECORD_ANNOTATIONS;
use partage_core::dialect::{Dialect, DialectSettings, asks};
use partage_core::pod::PodManifest;
use partage_testkit::bed::{BedProfile, TestBed};
use partage_testkit::eventually;
use partage_testkit::fake_nodes::{self, FakeNodes, FakeNodesOptions, NodeTemplate};
use partage_testkit::manifests::{DeployManifest, NAMESPACE};
use serde_json::{Value, json};
use std::collections::BTreeSet;

const AGENT_USER: &str = "system:serviceaccount:partage-system:partage-node";

#[test]
fn manifests_apply_over_each_other_and_delete_cleanly() {
    let Some(bed) = TestBed::for_test(BedProfile::control_plane()) else { return };
    for manifest in [DeployManifest::Real, DeployManifest::Simulated, DeployManifest::Cleanup] {
        bed.kubectl(&["apply", "-f", manifest.path().to_str().unwrap()]).unwrap();
    }
    bed.block_on(async {
        let client = bed.client();
        for policy in ["partage-node", "partage-grants"] {
            let path = format!("/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/{policy}");
            let status = eventually("the policy was type-checked", async || {
                let policy = send(&client, "GET", &path, None).await?;
                let status = policy["status"].clone();
                if status["observedGeneration"].is_number() { Ok(status) } else { Err(policy.to_string()) }
            })
            .await;
            assert_eq!(status["typeChecking"]["expressionWarnings"], Value::Null, "{status:#}");
        }
    });
    bed.kubectl(&[
        "delete",
        "-f",
        DeployManifest::Simulated.path().to_str().unwrap(),
        "--wait",
        "--timeout=300s",
    ])
    .unwrap();
    let kinds = "namespaces,clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings";
    let left = bed.kubectl(&["get", kinds, "-l", "app.kubernetes.io/name=partage", "-o", "name"]).unwrap();
    assert_eq!(left, "");
}

/// Two nodes with a tenant's pod on each, and clients with different permissions.
struct PolicyFixture {
    bed: TestBed,
    admin: Client,
    /// Client of the agent of fake-00000.
    agent: Client,
    /// Client with a token of the agents' account that is bound to no pod and no node.
    unbound: Client,
    /// Client with all permissions in its own namespace.
    tenant: Client,
}

const TENANT_PATH: &str = "/api/v1/namespaces/research";

impl PolicyFixture {
    fn new() -> Option<Self> {
        let bed = TestBed::for_test(BedProfile::control_plane())?;
        let admin = bed.client();
        bed.block_on(async {
            let snapshot = fake_nodes::generate_snapshot(2, &NodeTemplate::default()).unwrap();
            // Heartbeats can stop: nothing here depends on the Ready condition.
            FakeNodes::start(admin.clone(), &snapshot, FakeNodesOptions::default())
                .await
                .unwrap()
                .stop()
                .await;
        });
        bed.install_agent_rights().unwrap();
        let agent = bed.client_with_token(&bed.agent_token("fake-00000").unwrap()).unwrap();
        let unbound = bed.kubectl(&["create", "token", "partage-node", "--namespace", NAMESPACE]).unwrap();
        let unbound = bed.client_with_token(unbound.trim()).unwrap();
        bed.kubectl(&["create", "namespace", "research"]).unwrap();
        bed.kubectl(&[
            "create",
            "rolebinding",
            "tenant",
            "--namespace=research",
            "--clusterrole=cluster-admin",
            "--user=tenant",
        ])
        .unwrap();
        let tenant = bed.client_as("tenant", None).unwrap();
        let fixture = PolicyFixture { bed, admin, agent, unbound, tenant };
        fixture.bed.block_on(async {
            let account = format!("{TENANT_PATH}/serviceaccounts/default");
            eventually("the namespace has its service account", async || {
                send(&fixture.admin, "GET", &account, None).await
            })
            .await;
            for (name, node) in [("here", "fake-00000"), ("there", "fake-00001")] {
                let pod = pod(name, &json!({"team": "a"}), Some(node));
                send(&fixture.admin, "POST", &format!("{TENANT_PATH}/pods"), Some(pod)).await.unwrap();
            }
            let other = Some(json!({"metadata": {"annotations": {"partage.dev/inventory": "{}"}}}));
            eventually("the policies are in force", async || {
                match (
                    send(
                        &fixture.agent,
                        "PATCH",
                        "/api/v1/nodes/fake-00001/status?dryRun=All",
                        other.clone(),
                    )
                    .await,
                    send(
                        &fixture.tenant,
                        "PATCH",
                        &format!("{TENANT_PATH}/pods/here?dryRun=All"),
                        Some(grant_patch("x")),
                    )
                    .await,
                ) {
                    (Err(agent), Err(tenant))
                        if tenant.contains("partage-grants")
                            && agent.contains("may not write to node 'fake-00001'") =>
                    {
                        Ok(())
                    }
                    seen => Err(format!("{seen:?}")),
                }
            })
            .await;
        });
        Some(fixture)
    }
}

fn grant_patch(value: &str) -> Value {
    json!({"metadata": {"annotations": {"partage.dev/grant": value}}})
}

fn annotation_patch(key: &str) -> Value {
    json!({"metadata": {"annotations": {key: "x"}}})
}

#[test]
fn agent_can_write_only_its_own_node_and_pods() {
    let Some(fixture) = PolicyFixture::new() else { return };
    let (pods, nodes) = (format!("{TENANT_PATH}/pods"), "/api/v1/nodes");
    let own_pod = format!("{pods}/here");
    let own_node = format!("{nodes}/fake-00000");
    let own_status = format!("{own_node}/status");
    fixture.bed.block_on(async {
        let agent = async |method: &str, path: &str, body: Value| {
                        send(&fixture.agent, method, path, Some(body)).await
        };
        // Everything that the agent's work requires is allowed.
        let capacity = json!({"partage.dev/memory": "80Gi", "volcano.sh/vgpu-memory": "89424", "aliyun.com/gpu-count": "2",
            "tencent.com/vcuda-memory": "300", "nvidia.com/gpumem": "81920"});
        for (path, body) in [
            (&own_pod, grant_patch("{}")),
            (&own_pod, grant_patch("{\"version\":1}")),
            (&own_pod, annotation_patch("ALIYUN_COM_GPU_MEM_IDX")),
            (&own_pod, annotation_patch("tencent.com/predicate-gpu-idx-0")),
            (&own_pod, annotation_patch("partage.dev/resized")),
            (&own_pod, json!({"metadata": {"annotations": {"ALIYUN_COM_GPU_MEM_IDX": null}}})),
            (&own_status, annotation_patch("partage.dev/inventory")),
            (&own_status, annotation_patch("volcano.sh/node-vgpu-register")),
            (&own_status, json!({"metadata": {"labels": {"partage.dev/gpu": "yes"}}})),
            (&own_status, json!({"metadata": {"labels": {"partage.dev/gpu": null}}})),
            (&own_status, json!({"status": {"capacity": capacity, "allocatable": capacity}})),
            (&own_status, json!({"status": {"capacity": {"volcano.sh/vgpu-memory": null}, "allocatable": {"volcano.sh/vgpu-memory": null}}})),
        ] {
            agent("PATCH", path, body.clone()).await.unwrap_or_else(|message| panic!("{path} {body}: {message}"));
        }
        let news = "/apis/events.k8s.io/v1/namespaces/research/events";
        let more = json!({"series": {"count": 2, "lastObservedTime": "2026-01-01T00:00:00.000000Z"}});
        for (group, name, event) in [
            ("/api/v1", "one", core_event("one", "fake-00000")),
            ("/apis/events.k8s.io/v1", "two", event("two", "fake-00000")),
        ] {
            let events = format!("{group}/namespaces/research/events");
            agent("POST", &events, event).await.unwrap();
            agent("PATCH", &format!("{events}/{name}"), more.clone()).await.unwrap();
        }

        // Everything else is denied by the policy.
        let (other_pod, other_status) = (format!("{pods}/there"), format!("{nodes}/fake-00001/status"));
        for (path, body, expected) in [
            (other_pod.clone(), grant_patch("x"), "the agent of node 'fake-00000' may not write to a pod of node 'fake-00001'"),
            (other_status.clone(), annotation_patch("partage.dev/inventory"), "the agent of node 'fake-00000' may not write to node 'fake-00001'"),
            (other_status.clone(), json!({"status": {"capacity": {"partage.dev/memory": "1"}}}), "may not write to node 'fake-00001'"),
            (own_pod.clone(), annotation_patch("example.com/mine"), "annotation example.com/mine of a pod does not belong to Partage"),
            (own_pod.clone(), annotation_patch("kubernetes.io/psp"), "does not belong to Partage"),
            (own_pod.clone(), json!({"metadata": {"annotations": {"team": null}}}), "annotation team of a pod does not belong to Partage"),
            (own_pod.clone(), json!({"metadata": {"labels": {"partage.dev/mine": "yes"}}}), "may not change labels of pods"),
            (own_pod.clone(), json!({"metadata": {"finalizers": ["partage.dev/mine"]}}), "may not change metadata.finalizers"),
            (own_pod.clone(), json!({"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "b"}]}}), "may not change metadata.ownerReferences"),
            (own_pod.clone(), json!({"spec": {"activeDeadlineSeconds": 1}}), "may not change the spec of pods"),
            (own_status.clone(), json!({"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}}), "label node-role.kubernetes.io/control-plane of a node does not belong to Partage: add it to settings.labels"),
            (own_status.clone(), annotation_patch("node.alpha.kubernetes.io/ttl"), "of a node does not belong to Partage"),
            (own_status.clone(), json!({"metadata": {"finalizers": ["a.b/c"]}}), "may not change metadata.finalizers"),
            (own_status.clone(), json!({"status": {"capacity": {"cpu": "1000"}}}), "may change only their own resources"),
            (own_status.clone(), json!({"status": {"allocatable": {"memory": "1"}}}), "may change only their own resources"),
            (own_status.clone(), json!({"status": {"capacity": {"example.com/fpga": "1"}}}), "may change only their own resources"),
            (own_status.clone(), json!({"status": {"conditions": []}}), "may not change status.conditions"),
            (own_status.clone(), json!({"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}]}}), "may not change status.addresses"),
            (own_status.clone(), json!({"status": {"nodeInfo": {"bootID": "other"}}}), "may not change status.nodeInfo"),
            (own_status.clone(), annotation_patch("example.com/mine"), "of a node does not belong to Partage"),
            (own_status.clone(), json!({"metadata": {"labels": {"example.com/mine": "yes"}}}), "of a node does not belong to Partage"),
        ] {
            let message = agent("PATCH", &path, body.clone()).await.map(|seen| panic!("{path} {body}: {seen}")).unwrap_err();
            assert!(message.contains(expected), "{path} {body}: {message}");
        }

        // RBAC denies these.
        let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "there", "namespace": "research"}});
        for (method, path, body) in [
            ("POST", format!("{other_pod}/eviction"), eviction),
            ("PATCH", format!("{own_pod}/status"), json!({"status": {"phase": "Failed"}})),
            ("PATCH", format!("{own_pod}/ephemeralcontainers"), json!({"spec": {"ephemeralContainers": []}})),
            ("PATCH", format!("{own_pod}/resize"), grant_patch("x")),
            ("POST", pods.clone(), pod("mine", &json!({}), None)),
            ("PATCH", own_node.clone(), annotation_patch("partage.dev/inventory")),
            ("PATCH", own_node.clone(), json!({"spec": {"unschedulable": true}})),
            ("PATCH", own_node.clone(), json!({"metadata": {"labels": {"partage.dev/gpu": "yes"}}})),
            ("PUT", own_node.clone(), json!({})),
            ("DELETE", own_node.clone(), json!({})),
            ("DELETE", own_pod.clone(), json!({})),
            ("GET", "/api/v1/secrets".to_string(), json!({})),
            ("GET", "/api/v1/namespaces/partage-system/configmaps".to_string(), json!({})),
            ("POST", "/api/v1/namespaces/partage-system/serviceaccounts/partage-node/token".to_string(), json!({})),
        ] {
            let message = agent(method, &path, body).await.unwrap_err();
            assert!(message.contains("is forbidden") && message.contains("cannot"), "{method} {path}: {message}");
        }

        let expected = "the agent of node 'fake-00000' may not write events of another agent";
        let message = agent("POST", &format!("{TENANT_PATH}/events"), core_event("three", "fake-00001")).await.unwrap_err();
        assert!(message.contains(expected), "{message}");
        let message = agent("POST", news, event("three", "fake-00001")).await.unwrap_err();
        assert!(message.contains(expected), "{message}");
        send(&fixture.admin, "POST", news, Some(event("three", "fake-00001"))).await.unwrap();
        let message = agent("PATCH", &format!("{news}/three"), more.clone()).await.unwrap_err();
        assert!(message.contains(expected), "{message}");
        // Events in the name of another component of the same node.
        for (path, word, other) in [
            (format!("{TENANT_PATH}/events"), "reportingComponent", json!("kubelet")),
            (format!("{TENANT_PATH}/events"), "source", json!({"component": "kubelet"})),
            (format!("{TENANT_PATH}/events"), "source", json!({"component": "partage.dev/node", "host": "fake-00001"})),
            (news.to_string(), "reportingController", json!("kubelet")),
        ] {
            let mut told = if path == news { event("four", "fake-00000") } else { core_event("four", "fake-00000") };
            told[word] = other;
            let message = agent("POST", &path, told.clone()).await.unwrap_err();
            assert!(message.contains(expected), "{told}: {message}");
        }
        let mut kubelets = core_event("five", "fake-00000");
        kubelets["reportingComponent"] = json!("kubelet");
        send(&fixture.admin, "POST", &format!("{TENANT_PATH}/events"), Some(kubelets)).await.unwrap();
        let mine = json!({"reportingComponent": "partage.dev/node"});
        let message = agent("PATCH", &format!("{TENANT_PATH}/events/five"), mine).await.unwrap_err();
        assert!(message.contains(expected), "{message}");

        // A token that is bound to no node cannot write anything.
        for (method, path, body) in [
            ("PATCH", own_pod.clone(), Some(grant_patch("x"))),
            ("PATCH", own_status.clone(), Some(annotation_patch("partage.dev/inventory"))),
            ("PATCH", own_status.clone(), Some(json!({"status": {"capacity": {"partage.dev/memory": "1"}}}))),
            ("POST", news.to_string(), Some(event("four", "fake-00000"))),
        ] {
            let message = send(&fixture.unbound, method, &path, body).await.unwrap_err();
            assert!(message.contains("is not bound to a node, so it may write nothing"), "{path}: {message}");
        }
    });
}

/// The settings had a label and no longer have it, so the policy in force does not name it.
#[test]
fn agent_can_remove_labels_it_published() {
    let Some(fixture) = PolicyFixture::new() else { return };
    let status = "/api/v1/nodes/fake-00000/status";
    let published =
        |labels: &[&str]| json!({"amounts": ["labels"], "annotations": [], "labels": labels}).to_string();
    let saying = |text: String, label: &str, value: Option<&str>| json!({"metadata": {"annotations": {"partage.dev/published": text}, "labels": {label: value}}});
    fixture.bed.block_on(async {
        let given = saying(published(&["gpushare", "zone"]), "gpushare", Some("true"));
        let given = [given, json!({"metadata": {"labels": {"zone": "a", "share": "b", "labels": "c"}}})];
        for given in given {
            send(&fixture.admin, "PATCH", status, Some(given)).await.unwrap();
        }
        for (body, expected) in [
            (
                saying(published(&["zone"]), "gpushare", Some("false")),
                "label gpushare of a node does not belong to Partage",
            ),
            (saying(published(&["zone"]), "share", None), "label share of a node does not belong to Partage"),
            (
                saying(published(&["zone"]), "labels", None),
                "label labels of a node does not belong to Partage",
            ),
            // Claiming the label first does not help.
            (
                saying(published(&["share", "zone"]), "partage.dev/a", None),
                "label \"share\" of a node does not belong to Partage",
            ),
            (saying(r#"{"labels":{"share":1}}"#.into(), "partage.dev/a", None), "must not claim it"),
            (
                saying(published(&["share"]), "share", None),
                "label share of a node does not belong to Partage",
            ),
        ] {
            let message = send(&fixture.agent, "PATCH", status, Some(body.clone())).await.unwrap_err();
            assert!(message.contains(expected), "{body}: {message}");
        }
        let gone = saying(published(&["zone"]), "gpushare", None);
        send(&fixture.agent, "PATCH", status, Some(gone)).await.unwrap();
        let all =
            json!({"metadata": {"annotations": {"partage.dev/published": null}, "labels": {"zone": null}}});
        let left = send(&fixture.agent, "PATCH", status, Some(all)).await.unwrap();
        assert_eq!(left["metadata"]["labels"].get("gpushare"), None, "{left}");
        assert_eq!(left["metadata"]["labels"].get("zone"), None, "{left}");
        assert_eq!(left["metadata"]["labels"]["share"], "b", "{left}");
    });
}

#[test]
fn agent_can_delete_only_gpu_pods_on_its_node() {
    let Some(fixture) = PolicyFixture::new() else { return };
    // As with `settings.onBypass: evict`.
    let verbs = json!([{"op": "add", "path": "/rules/0/verbs/-", "value": "delete"}]).to_string();
    fixture.bed.kubectl(&["patch", "clusterrole", "partage-node", "--type=json", "--patch", &verbs]).unwrap();
    let expected = "may delete only pods that request GPUs";
    fixture.bed.block_on(async {
        let delete = async |name: &str, body: Value| {
            send(&fixture.agent, "DELETE", &format!("{TENANT_PATH}/pods/{name}"), Some(body)).await
        };
        eventually("the permission is in force", async || match delete("here?dryRun=All", json!({})).await {
            Err(message) if message.contains(expected) => Ok(()),
            seen => Err(format!("{seen:?}")),
        })
        .await;
        // The agent writes grants itself: a grant does not make a pod deletable.
        send(&fixture.agent, "PATCH", &format!("{TENANT_PATH}/pods/here"), Some(grant_patch("{}")))
            .await
            .unwrap();
        let message = delete("here", json!({})).await.unwrap_err();
        assert!(message.contains(expected), "{message}");
        let message = delete("there", json!({})).await.unwrap_err();
        assert!(message.contains("may not write to a pod of node 'fake-00001'"), "{message}");
        for (number, resource) in DIALECT_RESOURCES.iter().enumerate() {
            let name = format!("asks-{number}");
            let mut asks = pod(&name, &json!({}), Some("fake-00000"));
            let main = &mut asks["spec"]["containers"][0];
            main["resources"] = json!({"limits": {*resource: "1"}});
            if number == 0 {
                let mut first = main.clone();
                first["name"] = json!("first");
                main["resources"] = json!({});
                asks["spec"]["initContainers"] = json!([first]);
            }
            send(&fixture.admin, "POST", &format!("{TENANT_PATH}/pods"), Some(asks)).await.unwrap();
            let message = delete(&name, json!({"gracePeriodSeconds": 0})).await.unwrap_err();
            assert!(message.contains("with a grace period"), "{message}");
            delete(&name, json!({})).await.unwrap_or_else(|message| panic!("{resource}: {message}"));
        }
    });
}

/// One resource of each dialect.
const DIALECT_RESOURCES: [&str; 7] = [
    "partage.dev/gpu",
    "aliyun.com/gpu-mem",
    "volcano.sh/vgpu-number",
    "tencent.com/vcuda-core",
    "inspur.com/vcuda-core",
    "k8s.amazonaws.com/vgpu",
    "nvidia.com/gpu",
];

#[test]
fn resource_of_every_dialect_is_tried() {
    let dialect_of = |resource: &&str| {
        let spec = json!({"containers": [{"name": "main", "resources": {"limits": {*resource: "1"}}}]});
        let (pod, _) = PodManifest::read(&json!({}), &spec);
        asks::read(&pod, &DialectSettings::default()).containers[0].dialect
    };
    let dialects: BTreeSet<Dialect> = DIALECT_RESOURCES.iter().filter_map(dialect_of).collect();
    assert_eq!(dialects, BTreeSet::from(Dialect::ALL));
}

fn event(name: &str, instance: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "research"},
        "action": "Granted", "reason": "Granted", "type": "Normal", "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": "partage.dev/node", "reportingInstance": instance,
        "regarding": {"kind": "Pod", "namespace": "research", "name": "here"},
    })
}

/// Returns the event in the format of the core API group.
fn core_event(name: &str, instance: &str) -> Value {
    let mut event = event(name, instance);
    for (new, old) in [("reportingController", "reportingComponent"), ("regarding", "involvedObject")] {
        event[old] = event[new].take();
        event.as_object_mut().unwrap().remove(new);
    }
    event
}

#[test]
fn tenant_cannot_write_grant_annotations() {
    let Some(fixture) = PolicyFixture::new() else { return };
    let pods = format!("{TENANT_PATH}/pods");
    let forged = grant_annotations();
    assert!(forged.len() > 20, "{forged:?}");
    fixture.bed.block_on(async {
        let refused = |message: &str, key: &str| {
            let expected = format!("annotation {key} records the grant of the pod: only Partage may write it");
            assert!(message.contains(&expected), "{key}: {message}");
        };
        for key in &forged {
            let tenant = pod("forged", &json!({key: "x"}), None);
            refused(&send(&fixture.tenant, "POST", &pods, Some(tenant)).await.unwrap_err(), key);
            let message = send(&fixture.tenant, "PATCH", &format!("{pods}/here"), Some(annotation_patch(key))).await.unwrap_err();
            refused(&message, key);
            let message = send(&fixture.tenant, "PATCH", &format!("{pods}/here/status"), Some(annotation_patch(key))).await.unwrap_err();
            refused(&message, key);
        }
        // The administrator is denied too: grants are never written manually.
        refused(&send(&fixture.admin, "PATCH", &format!("{pods}/here"), Some(grant_patch("x"))).await.unwrap_err(), "partage.dev/grant");

        // A binding copies its annotations to the pod.
        send(&fixture.tenant, "POST", &pods, Some(pod("unbound", &json!({}), None))).await.unwrap();
        for path in [format!("{pods}/unbound/binding"), format!("{TENANT_PATH}/bindings")] {
            let binding = json!({"metadata": {"name": "unbound", "annotations": {"partage.dev/grant": "x"}},
                "target": {"kind": "Node", "name": "fake-00000"}});
            refused(&send(&fixture.tenant, "POST", &path, Some(binding)).await.unwrap_err(), "partage.dev/grant");
        }
        // For these subresources the API server ignores annotations: the rest of the request is applied, the grant is
        // not.
        let ephemeral = json!({"metadata": {"annotations": {"partage.dev/grant": "x"}}, "spec": {"ephemeralContainers":
            [{"name": "debug", "image": "none", "terminationMessagePolicy": "File", "imagePullPolicy": "Never"}]}});
        let mut resized = pod("resized", &json!({"team": "a"}), Some("fake-00000"));
        resized["spec"]["containers"][0]["resources"] = json!({"limits": {"cpu": "1", "memory": "1Gi"}});
        let resized = send(&fixture.tenant, "POST", &pods, Some(resized)).await.unwrap();
        let mut container = resized["spec"]["containers"][0].clone();
        container["resources"] = json!({"limits": {"cpu": "2", "memory": "1Gi"}, "requests": {"cpu": "2", "memory": "1Gi"}});
        let resize = json!({"metadata": {"annotations": {"partage.dev/grant": "x"}}, "spec": {"containers": [container]}});
        for (name, part, body) in [("here", "ephemeralcontainers", ephemeral), ("resized", "resize", resize)] {
            let changed = send(&fixture.tenant, "PATCH", &format!("{pods}/{name}/{part}"), Some(body)).await.unwrap();
            assert!(changed["spec"]["ephemeralContainers"][0]["name"] == "debug"
                || changed["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "2", "{part}: {changed:#}");
            let there = send(&fixture.admin, "GET", &format!("{pods}/{name}"), None).await.unwrap();
            assert_eq!(there["metadata"]["annotations"], json!({"team": "a"}), "{part}: {there:#}");
        }

        // Pods of a controller: the message appears in the controller's condition.
        let template = json!({"metadata": {"labels": {"app": "a"}, "annotations": {"volcano.sh/vgpu-ids-new": "x"}},
            "spec": pod("a", &json!({}), None)["spec"]});
        let deployment = json!({"metadata": {"name": "a"}, "spec": {"selector": {"matchLabels": {"app": "a"}}, "template": template}});
        send(&fixture.tenant, "POST", "/apis/apps/v1/namespaces/research/deployments", Some(deployment)).await.unwrap();
        let message = eventually("the controller reports the failure", async || {
            let sets = send(&fixture.admin, "GET", "/apis/apps/v1/namespaces/research/replicasets", None).await?;
            let condition = &sets["items"][0]["status"]["conditions"][0];
            if condition["reason"] == "FailedCreate" { Ok(condition.to_string()) } else { Err(sets.to_string()) }
        })
        .await;
        refused(&message, "volcano.sh/vgpu-ids-new");
    });
}

/// Returns every annotation that a grant writes, in every dialect, and those that the replaced systems read.
fn grant_annotations() -> Vec<String> {
    let mut keys: Vec<String> = [
        "partage.dev/grant",
        "scheduler.framework.gpushare.allocation",
        "ALIYUN_COM_GPU_MEM_IDX",
        "ALIYUN_COM_GPU_MEM_DEV",
        "ALIYUN_COM_GPU_MEM_POD",
        "ALIYUN_COM_GPU_MEM_ASSIGNED",
        "ALIYUN_COM_GPU_MEM_ASSUME_TIME",
        "ALIYUN_COM_GPU_MEM_CONTAINER",
        "volcano.sh/vgpu-node",
        "volcano.sh/vgpu-time",
        "volcano.sh/vgpu-ids-new",
        "volcano.sh/devices-to-allocate",
        "volcano.sh/bind-phase",
        "volcano.sh/bind-time",
        "hami.io/vgpu-devices-allocated",
        "hami.io/vgpu-node",
    ]
    .map(String::from)
    .to_vec();
    for domain in ["tencent.com", "inspur.com"] {
        let names = [
            "predicate-gpu-idx-0",
            "predicate-gpu-idx-12",
            "predicate-node",
            "predicate-time",
            "gpu-assigned",
        ];
        keys.extend(names.map(|name| format!("{domain}/{name}")));
    }
    keys
}

#[test]
fn record_of_every_dialect_is_tried() {
    let tried = grant_annotations();
    let untried: Vec<&str> =
        RECORD_ANNOTATIONS.into_iter().filter(|record| !tried.iter().any(|key| key == record)).collect();
    assert!(untried.is_empty(), "add to grant_annotations: {untried:?}");
}

#[test]
fn other_annotations_and_updates_stay_allowed() {
    let Some(fixture) = PolicyFixture::new() else { return };
    let pods = format!("{TENANT_PATH}/pods");
    let here = format!("{pods}/here");
    fixture.bed.block_on(async {
        let tenant = async |method: &str, path: &str, body: Value| {
                        send(&fixture.tenant, method, path, Some(body)).await
        };
        let asks = json!({"partage.dev/models": "A100", "partage.dev/resize": "{}", "volcano.sh/vgpu-mode": "hami-core",
            "volcano.sh/job-name": "a", "tencent.com/vcuda-core-limit": "50", "nvidia.com/use-gputype": "A100"});
        tenant("POST", &pods, pod("asks", &asks, None)).await.unwrap();
        send(&fixture.agent, "PATCH", &here, Some(grant_patch("{\"version\":1}"))).await.unwrap();
        // Also on a pod with a grant.
        tenant("PATCH", &here, json!({"metadata": {"annotations": {"team": "b"}, "labels": {"a": "b"}}})).await.unwrap();
        tenant("PATCH", &here, json!({"spec": {"activeDeadlineSeconds": 100000}})).await.unwrap();
        let message = tenant("PATCH", &here, grant_patch("{\"version\":2}")).await.unwrap_err();
        assert!(message.contains("only Partage may write it"), "{message}");
        let message = tenant("PATCH", &here, json!({"metadata": {"annotations": null}})).await.unwrap_err();
        assert!(message.contains("annotation partage.dev/grant records the grant of the pod and stays"), "{message}");
        // Status updates of a kubelet.
        let kubelet = fixture.bed.client_as("system:node:fake-00000", Some("system:nodes")).unwrap();
        let phase = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
        send(&kubelet, "PATCH", &format!("{here}/status"), Some(phase)).await.unwrap();
        // A scheduler's binding without a grant.
        let binding = json!({"metadata": {"name": "asks"}, "target": {"kind": "Node", "name": "fake-00000"}});
        let scheduler = fixture.bed.client_as("system:kube-scheduler", None).unwrap();
        let bound = send(&scheduler, "POST", &format!("{pods}/asks/binding"), Some(binding)).await;
        // The bed's own scheduler may have bound it first.
        assert!(bound.as_ref().err().is_none_or(|message| message.contains("already assigned")), "{bound:?}");
        tenant("DELETE", &here, json!({})).await.unwrap();
    });
}

/// A token as kubelet gives it to the DaemonSet's pod.
#[test]
fn pod_bound_token_carries_the_pods_node() {
    let Some(fixture) = PolicyFixture::new() else { return };
    let mut agent = pod("agent", &json!({}), Some("fake-00001"));
    agent["spec"]["serviceAccountName"] = json!("partage-node");
    fixture.bed.block_on(async {
        send(&fixture.admin, "POST", "/api/v1/namespaces/partage-system/pods", Some(agent)).await.unwrap();
    });
    let bound = ["--bound-object-kind", "Pod", "--bound-object-name", "agent"];
    let arguments = [&["create", "token", "partage-node", "--namespace", NAMESPACE][..], &bound].concat();
    let token = fixture.bed.kubectl(&arguments).unwrap();
    let agent = fixture.bed.client_with_token(token.trim()).unwrap();
    fixture.bed.block_on(async {
        send(&agent, "PATCH", &format!("{TENANT_PATH}/pods/there"), Some(grant_patch("{}"))).await.unwrap();
        let message = send(&agent, "PATCH", &format!("{TENANT_PATH}/pods/here"), Some(grant_patch("{}")))
            .await
            .unwrap_err();
        assert!(
            message.contains("the agent of node 'fake-00001' may not write to a pod of node 'fake-00000'"),
            "{message}"
        );
    });
}

#[test]
fn agent_account_has_minimal_permissions() {
    let Some(bed) = TestBed::for_test(BedProfile::control_plane()) else { return };
    bed.install_agent_rights().unwrap();
    // The API server applies RBAC changes a moment later.
    let listed = bed.block_on(eventually("the account has permissions", async || {
        let listed = bed.kubectl(&["auth", "can-i", "--list", "--no-headers", "--as", AGENT_USER]);
        let listed = listed.map_err(|error| error.to_string())?;
        if listed.contains("nodes/status") { Ok(listed) } else { Err(listed) }
    }));
    let mut rights: Vec<_> = listed
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        // Permissions of every user are left out: self reviews and non-resource URLs.
        .filter(|line| !line.starts_with("self") && !line.starts_with("[/"))
        .collect();
    rights.sort();
    assert_eq!(
        rights,
        [
            "events [] [] [create patch]",
            "events.events.k8s.io [] [] [create patch]",
            "nodes [] [] [get list watch]",
            "nodes/status [] [] [patch]",
            "pods [] [] [get list watch patch]",
            "subjectaccessreviews.authorization.k8s.io [] [] [create]",
            "tokenreviews.authentication.k8s.io [] [] [create]",
        ]
    );
}
