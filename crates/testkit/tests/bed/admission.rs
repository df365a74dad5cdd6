//! How the real kube-apiserver treats admission webhooks, and a policy on the node of a token. The design relies on
//! each of these behaviors.

use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
    ValidatingWebhookConfiguration,
};
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource, ResourceExt};
use partage_testkit::bed::{BedProfile, TestBed};
use partage_testkit::eventually;
use partage_testkit::fake_nodes::{self, FakeNodes, FakeNodesOptions, NodeTemplate};
use partage_testkit::webhook::{self, ReviewRequest, ReviewResponse, TestWebhook};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fmt::Debug;
use std::net::SocketAddr;

const GPU_RESOURCE: &str = "partage.dev/gpu";
const MEMORY_RESOURCE: &str = "partage.dev/memory";
const CARRIER_ANNOTATION: &str = "partage.dev/carrier";
const DENIAL_MESSAGE: &str = "partage.dev/memory is 900Gi, the largest GPU has 80Gi: request at most 80Gi";

fn from_json<K: DeserializeOwned>(object: Value) -> K {
    serde_json::from_value(object).unwrap()
}

async fn create<K>(api: &Api<K>, object: Value) -> K
where
    K: Resource + Clone + Debug + Serialize + DeserializeOwned,
{
    api.create(&PostParams::default(), &from_json(object)).await.unwrap()
}

fn pod(name: &str, limits: &Value) -> Pod {
    from_json(json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [{"name": "main", "image": "none", "resources": {"limits": limits}}]},
    }))
}

fn resource_amounts(pod: &Pod, resource: &str) -> [Option<String>; 2] {
    let resources = pod.spec.as_ref().unwrap().containers[0].resources.clone().unwrap_or_default();
    [resources.limits, resources.requests].map(|all| all?.get(resource).map(|quantity| quantity.0.clone()))
}

/// Returns a webhook configuration for pods that request memory, and for no others.
fn webhook_configuration(name: &str, address: SocketAddr, path: &str, ca: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "webhooks": [{
            "name": format!("{name}.partage.dev"),
            "clientConfig": {"url": format!("https://{address}/{path}"), "caBundle": ByteString(ca.into())},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
            "matchConditions": [{
                "name": "requests-memory",
                "expression": format!("object.spec.containers.exists(c, has(c.resources.limits) && '{MEMORY_RESOURCE}' in c.resources.limits)"),
            }],
            "failurePolicy": "Fail",
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
        }],
    })
}

/// Adds the device count to a memory-only request, and denies a request that no GPU can satisfy.
fn answer(path: &str, request: &ReviewRequest) -> ReviewResponse {
    let object = serde_json::to_value(&request.object).unwrap();
    let memory = &object["spec"]["containers"][0]["resources"]["limits"][MEMORY_RESOURCE];
    match path {
        "/check" if memory == "900Gi" => ReviewResponse::from(request).deny(DENIAL_MESSAGE),
        "/check" => ReviewResponse::from(request),
        _ => webhook::allow_with_change(request, |object| {
            object["spec"]["containers"][0]["resources"]["limits"][GPU_RESOURCE] = json!("1");
            object["metadata"]["annotations"] = json!({CARRIER_ANNOTATION: "added"});
        }),
    }
}

#[test]
fn webhooks_mutate_deny_and_block_when_unreachable() {
    let Some(bed) = TestBed::for_test(BedProfile::control_plane()) else { return };
    let certificate = bed.server_certificate(&["10.200.0.1"]).unwrap();
    let (address, ca) = (SocketAddr::new(bed.address(), 9443), bed.ca_certificate());
    let client = bed.client();
    bed.block_on(async {
        let webhook = TestWebhook::start(address, &certificate, answer).await.unwrap();
        let mutating: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
        create(&mutating, webhook_configuration("change", address, "change", &ca)).await;
        let validating: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
        create(&validating, webhook_configuration("check", address, "check", &ca)).await;
        let pods: Api<Pod> = Api::default_namespaced(client);
        // A dry run calls webhooks too, and creates nothing.
        let dry = PostParams { dry_run: true, ..PostParams::default() };
        eventually("both webhooks are called", async || {
            let before = webhook.requests().len();
            pods.create(&dry, &pod("probe", &json!({MEMORY_RESOURCE: "8Gi"})))
                .await
                .map_err(|e| e.to_string())?;
            if webhook.requests().len() == before + 2 { Ok(()) } else { Err("not yet") }.map_err(String::from)
        })
        .await;

        let changed = pods
            .create(&PostParams::default(), &pod("by-memory", &json!({MEMORY_RESOURCE: "8Gi"})))
            .await
            .unwrap();
        assert_eq!(changed.annotations()[CARRIER_ANNOTATION], "added");
        let one = Some("1".to_string());
        assert_eq!(
            resource_amounts(&changed, GPU_RESOURCE),
            [one.clone(), one],
            "the API server copies the limit to the request"
        );
        // The second webhook sees the object that the first one has changed.
        let last = webhook.requests().into_iter().rfind(|request| request.name == "by-memory").unwrap();
        assert_eq!(last.object.unwrap().annotations()[CARRIER_ANNOTATION], "added");

        pods.create(&PostParams::default(), &pod("plain", &json!({"cpu": "1"}))).await.unwrap();
        assert!(webhook.requests().iter().all(|request| request.name != "plain"));

        let manifest = serde_json::to_string(&pod("too-large", &json!({MEMORY_RESOURCE: "900Gi"}))).unwrap();
        // The message that a user sees. The webhook answers on the bed's own threads.
        let message = bed.kubectl_with(&["create", "-f", "-"], &manifest).unwrap_err().to_string();
        assert!(message.contains(DENIAL_MESSAGE), "{message}");
        assert!(message.contains("admission webhook \"check.partage.dev\" denied the request"), "{message}");

        webhook.stop().await;
        let missed =
            pods.create(&dry, &pod("late", &json!({MEMORY_RESOURCE: "8Gi"}))).await.unwrap_err().to_string();
        assert!(missed.contains("failed calling webhook \"change.partage.dev\""), "{missed}");
        pods.create(&dry, &pod("still-plain", &json!({"cpu": "1"}))).await.unwrap();
    });
}

/// A policy that lets an agent write the status of its own node, and pods on it. RBAC cannot express this.
fn own_node_policy() -> Value {
    json!({
        "metadata": {"name": "partage-agent-own-node"},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [{
                "apiGroups": [""], "apiVersions": ["v1"], "operations": ["UPDATE"],
                "resources": ["nodes/status", "pods"],
            }]},
            "matchConditions": [{
                "name": "is-an-agent",
                "expression": "request.userInfo.username == 'system:serviceaccount:partage:agent'",
            }],
            "variables": [
                {
                    "name": "own",
                    "expression": "request.userInfo.extra[?'authentication.kubernetes.io/node-name'][?0].orValue('')",
                },
                {
                    "name": "touched",
                    "expression": "request.resource.resource == 'nodes' ? request.name : oldObject.spec.?nodeName.orValue('')",
                },
            ],
            "validations": [{
                "expression": "variables.own != '' && variables.touched == variables.own",
                "messageExpression": "\"the agent of node '\" + variables.own + \"' may not write to node '\" + variables.touched + \"'\"",
            }],
        },
    })
}

#[test]
fn agent_token_can_write_only_its_own_node() {
    let Some(bed) = TestBed::for_test(BedProfile::control_plane()) else { return };
    let client = bed.client();
    let tokens = bed.block_on(async {
        let snapshot = fake_nodes::generate_snapshot(2, &NodeTemplate::default()).unwrap();
        // Heartbeats can stop: nothing here depends on the Ready condition.
        FakeNodes::start(client.clone(), &snapshot, FakeNodesOptions::default()).await.unwrap().stop().await;
        create_agent_rules(&client).await;
        let pods: Api<Pod> = Api::namespaced(client.clone(), "partage");
        for (number, node) in ["fake-00000", "fake-00001"].into_iter().enumerate() {
            for (name, account) in
                [(format!("agent-{number}"), "agent"), (format!("tenant-{number}"), "default")]
            {
                // There is no scheduler and no kubelet: the node is set explicitly, and the pod stays Pending.
                let mut pod = pod(&name, &json!({}));
                let spec = pod.spec.as_mut().unwrap();
                (spec.node_name, spec.service_account_name) = (Some(node.into()), Some(account.into()));
                pods.create(&PostParams::default(), &pod).await.unwrap();
            }
        }
        [
            create_token(&client, Some("agent-0")).await,
            create_token(&client, Some("agent-1")).await,
            create_token(&client, None).await,
        ]
    });
    let [first, second, unbound] = tokens.map(|token| bed.client_with_token(&token).unwrap());
    bed.block_on(async {
        eventually("the policy is in force", async || match patch_node_status(&first, "fake-00001").await {
            Err(message) if message.contains("may not write") => Ok(()),
            seen => Err(format!("{seen:?}")),
        })
        .await;
        for (agent, own, other) in [(&first, 0, 1), (&second, 1, 0)] {
            patch_node_status(agent, &format!("fake-0000{own}")).await.unwrap();
            patch_pod_annotation(agent, &format!("tenant-{own}")).await.unwrap();
            let sentence =
                format!("the agent of node 'fake-0000{own}' may not write to node 'fake-0000{other}'");
            for refused in [
                patch_node_status(agent, &format!("fake-0000{other}")).await,
                patch_pod_annotation(agent, &format!("tenant-{other}")).await,
            ] {
                let message = refused.unwrap_err();
                assert!(message.contains(&sentence), "{message}");
            }
        }
        // A token that is not bound to a pod has no node.
        let message = patch_node_status(&unbound, "fake-00000").await.unwrap_err();
        assert!(message.contains("the agent of node '' may not write to node 'fake-00000'"), "{message}");
        // All other requests are denied by RBAC.
        let nodes: Api<Node> = Api::all(first.clone());
        let message = nodes.delete("fake-00000", &DeleteParams::default()).await.unwrap_err().to_string();
        assert!(message.contains("cannot delete resource \"nodes\""), "{message}");
        let message = patch_node_label(&first, "fake-00000").await.unwrap_err();
        assert!(message.contains("cannot patch resource \"nodes\""), "{message}");
        // A token becomes invalid with its pod.
        let pods: Api<Pod> = Api::namespaced(client.clone(), "partage");
        pods.delete("agent-0", &DeleteParams::default().grace_period(0)).await.unwrap();
        eventually("the token of a deleted pod is rejected", async || {
            match patch_node_status(&first, "fake-00000").await {
                Err(message) if message.contains("Unauthorized") => Ok(()),
                seen => Err(format!("{seen:?}")),
            }
        })
        .await;
    });
}

async fn create_agent_rules(client: &Client) {
    create::<Namespace>(&Api::all(client.clone()), json!({"metadata": {"name": "partage"}})).await;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "partage");
    create(&accounts, json!({"metadata": {"name": "agent"}})).await;
    eventually("the namespace has its default account", async || accounts.get("default").await).await;
    let role = json!({
        "metadata": {"name": "partage-agent"},
        "rules": [
            {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "patch"]},
        ],
    });
    create::<ClusterRole>(&Api::all(client.clone()), role).await;
    let binding = json!({
        "metadata": {"name": "partage-agent"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "partage-agent"},
        "subjects": [{"kind": "ServiceAccount", "name": "agent", "namespace": "partage"}],
    });
    create::<ClusterRoleBinding>(&Api::all(client.clone()), binding).await;
    create::<ValidatingAdmissionPolicy>(&Api::all(client.clone()), own_node_policy()).await;
    let binding = json!({
        "metadata": {"name": "partage-agent-own-node"},
        "spec": {"policyName": "partage-agent-own-node", "validationActions": ["Deny"]},
    });
    create::<ValidatingAdmissionPolicyBinding>(&Api::all(client.clone()), binding).await;
}

/// Creates a token of the agents' account as kubelet requests it: bound to a pod, and so to its node.
async fn create_token(client: &Client, pod: Option<&str>) -> String {
    let pods: Api<Pod> = Api::namespaced(client.clone(), "partage");
    let bound = match pod {
        Some(name) => {
            let uid = pods.get(name).await.unwrap().uid();
            json!({"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid})
        }
        None => Value::Null,
    };
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "partage");
    let asked: TokenRequest = from_json(json!({"spec": {"audiences": [], "boundObjectRef": bound}}));
    let created = accounts.create_token_request("agent", &PostParams::default(), &asked).await.unwrap();
    created.status.unwrap().token.unwrap()
}

async fn patch_node_status(agent: &Client, node: &str) -> Result<(), String> {
    let change = json!({"status": {"capacity": {"partage.dev/memory": "640Gi"}}});
    let nodes: Api<Node> = Api::all(agent.clone());
    let patched = nodes.patch_status(node, &PatchParams::default(), &Patch::Merge(change)).await;
    patched.map(drop).map_err(|e| e.to_string())
}

async fn patch_node_label(agent: &Client, node: &str) -> Result<(), String> {
    let change = json!({"metadata": {"labels": {"partage.dev/mine": "yes"}}});
    let nodes: Api<Node> = Api::all(agent.clone());
    nodes
        .patch(node, &PatchParams::default(), &Patch::Merge(change))
        .await
        .map(drop)
        .map_err(|e| e.to_string())
}

async fn patch_pod_annotation(agent: &Client, pod: &str) -> Result<(), String> {
    let change = json!({"metadata": {"annotations": {"partage.dev/grant": "x"}}});
    let pods: Api<Pod> = Api::namespaced(agent.clone(), "partage");
    pods.patch(pod, &PatchParams::default(), &Patch::Merge(change)).await.map(drop).map_err(|e| e.to_string())
}
