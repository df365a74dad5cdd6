//! What the real kube-apiserver does with admission webhooks, and with a policy on the node of a token.
//! The design leans on each of these.

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
use partage_testkit::bed::{Bed, Profile};
use partage_testkit::eventually;
use partage_testkit::fake_nodes::{self, FakeNodes, Plan, Template};
use partage_testkit::webhook::{self, Request, Response, Webhook};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fmt::Debug;
use std::net::SocketAddr;

const GPU: &str = "partage.dev/gpu";
const MEMORY: &str = "partage.dev/memory";
const CARRIER: &str = "partage.dev/carrier";
const SENTENCE: &str = "partage.dev/memory is 900Gi, the largest GPU has 80Gi: ask for 80Gi or less";

fn made<K: DeserializeOwned>(object: Value) -> K {
    serde_json::from_value(object).unwrap()
}

async fn create<K>(api: &Api<K>, object: Value) -> K
where
    K: Resource + Clone + Debug + Serialize + DeserializeOwned,
{
    api.create(&PostParams::default(), &made(object)).await.unwrap()
}

fn pod(name: &str, limits: &Value) -> Pod {
    made(json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [{"name": "main", "image": "none", "resources": {"limits": limits}}]},
    }))
}

fn amounts(pod: &Pod, resource: &str) -> [Option<String>; 2] {
    let resources = pod.spec.as_ref().unwrap().containers[0].resources.clone().unwrap_or_default();
    [resources.limits, resources.requests].map(|all| all?.get(resource).map(|quantity| quantity.0.clone()))
}

/// The webhooks of a pod that asks for memory, and of no other.
fn configuration(name: &str, address: SocketAddr, path: &str, ca: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "webhooks": [{
            "name": format!("{name}.partage.dev"),
            "clientConfig": {"url": format!("https://{address}/{path}"), "caBundle": ByteString(ca.into())},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
            "matchConditions": [{
                "name": "asks-for-memory",
                "expression": format!("object.spec.containers.exists(c, has(c.resources.limits) && '{MEMORY}' in c.resources.limits)"),
            }],
            "failurePolicy": "Fail",
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
        }],
    })
}

/// A memory-only ask gets the count that a device plugin serves; an ask no GPU can meet is refused.
fn answer(path: &str, request: &Request) -> Response {
    let object = serde_json::to_value(&request.object).unwrap();
    let memory = &object["spec"]["containers"][0]["resources"]["limits"][MEMORY];
    match path {
        "/check" if memory == "900Gi" => Response::from(request).deny(SENTENCE),
        "/check" => Response::from(request),
        _ => webhook::changed(request, |object| {
            object["spec"]["containers"][0]["resources"]["limits"][GPU] = json!("1");
            object["metadata"]["annotations"] = json!({CARRIER: "added"});
        }),
    }
}

#[test]
fn webhooks_change_refuse_and_are_missed() {
    let Some(bed) = Bed::for_test(Profile::control_plane()) else { return };
    let certificate = bed.server_certificate(&["10.200.0.1"]).unwrap();
    let (address, ca) = (SocketAddr::new(bed.address(), 9443), bed.authority());
    let client = bed.client();
    bed.block_on(async {
        let webhook = Webhook::start(address, &certificate, answer).await.unwrap();
        let mutating: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
        create(&mutating, configuration("change", address, "change", &ca)).await;
        let validating: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
        create(&validating, configuration("check", address, "check", &ca)).await;
        let pods: Api<Pod> = Api::default_namespaced(client);
        // A dry run asks webhooks too, and leaves nothing.
        let dry = PostParams { dry_run: true, ..PostParams::default() };
        eventually("both webhooks are asked", async || {
            let before = webhook.requests().len();
            pods.create(&dry, &pod("probe", &json!({MEMORY: "8Gi"}))).await.map_err(|e| e.to_string())?;
            if webhook.requests().len() == before + 2 { Ok(()) } else { Err("not yet") }.map_err(String::from)
        })
        .await;

        let changed =
            pods.create(&PostParams::default(), &pod("by-memory", &json!({MEMORY: "8Gi"}))).await.unwrap();
        assert_eq!(changed.annotations()[CARRIER], "added");
        let one = Some("1".to_string());
        assert_eq!(
            amounts(&changed, GPU),
            [one.clone(), one],
            "the server itself makes the request of the limit"
        );
        // The second webhook sees what the first one made.
        let last = webhook.requests().into_iter().rfind(|request| request.name == "by-memory").unwrap();
        assert_eq!(last.object.unwrap().annotations()[CARRIER], "added");

        pods.create(&PostParams::default(), &pod("plain", &json!({"cpu": "1"}))).await.unwrap();
        assert!(webhook.requests().iter().all(|request| request.name != "plain"));

        let manifest = serde_json::to_string(&pod("too-large", &json!({MEMORY: "900Gi"}))).unwrap();
        // As a person sees it. The webhook answers on the bed's own threads.
        let said = bed.kubectl_with(&["create", "-f", "-"], &manifest).unwrap_err().to_string();
        assert!(said.contains(SENTENCE), "{said}");
        assert!(said.contains("admission webhook \"check.partage.dev\" denied the request"), "{said}");

        webhook.stop().await;
        let missed = pods.create(&dry, &pod("late", &json!({MEMORY: "8Gi"}))).await.unwrap_err().to_string();
        assert!(missed.contains("failed calling webhook \"change.partage.dev\""), "{missed}");
        pods.create(&dry, &pod("still-plain", &json!({"cpu": "1"}))).await.unwrap();
    });
}

/// What an agent may write: the status of its own node, and pods on it. RBAC cannot say this.
fn own_node_only() -> Value {
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
fn an_agent_writes_to_its_own_node_only() {
    let Some(bed) = Bed::for_test(Profile::control_plane()) else { return };
    let client = bed.client();
    let tokens = bed.block_on(async {
        let snapshot = fake_nodes::inventory(2, &Template::default()).unwrap();
        // Their heartbeats may end: nothing here asks whether they are Ready.
        FakeNodes::start(client.clone(), &snapshot, Plan::default()).await.unwrap().stop().await;
        rules(&client).await;
        let pods: Api<Pod> = Api::namespaced(client.clone(), "partage");
        for (number, node) in ["fake-00000", "fake-00001"].into_iter().enumerate() {
            for (name, account) in
                [(format!("agent-{number}"), "agent"), (format!("tenant-{number}"), "default")]
            {
                // No scheduler and no kubelet: the node is set by hand, and the pod stays Pending.
                let mut pod = pod(&name, &json!({}));
                let spec = pod.spec.as_mut().unwrap();
                (spec.node_name, spec.service_account_name) = (Some(node.into()), Some(account.into()));
                pods.create(&PostParams::default(), &pod).await.unwrap();
            }
        }
        [
            token(&client, Some("agent-0")).await,
            token(&client, Some("agent-1")).await,
            token(&client, None).await,
        ]
    });
    let [first, second, unbound] = tokens.map(|token| bed.client_with_token(&token).unwrap());
    bed.block_on(async {
        eventually("the policy is in force", async || match status(&first, "fake-00001").await {
            Err(said) if said.contains("may not write") => Ok(()),
            seen => Err(format!("{seen:?}")),
        })
        .await;
        for (agent, own, other) in [(&first, 0, 1), (&second, 1, 0)] {
            status(agent, &format!("fake-0000{own}")).await.unwrap();
            annotate(agent, &format!("tenant-{own}")).await.unwrap();
            let sentence =
                format!("the agent of node 'fake-0000{own}' may not write to node 'fake-0000{other}'");
            for refused in [
                status(agent, &format!("fake-0000{other}")).await,
                annotate(agent, &format!("tenant-{other}")).await,
            ] {
                let said = refused.unwrap_err();
                assert!(said.contains(&sentence), "{said}");
            }
        }
        // A token that no pod holds has no node.
        let said = status(&unbound, "fake-00000").await.unwrap_err();
        assert!(said.contains("the agent of node '' may not write to node 'fake-00000'"), "{said}");
        // The rest is RBAC's.
        let nodes: Api<Node> = Api::all(first.clone());
        let said = nodes.delete("fake-00000", &DeleteParams::default()).await.unwrap_err().to_string();
        assert!(said.contains("cannot delete resource \"nodes\""), "{said}");
        let said = label(&first, "fake-00000").await.unwrap_err();
        assert!(said.contains("cannot patch resource \"nodes\""), "{said}");
        // A token ends with its pod.
        let pods: Api<Pod> = Api::namespaced(client.clone(), "partage");
        pods.delete("agent-0", &DeleteParams::default().grace_period(0)).await.unwrap();
        eventually("the token of a deleted pod is worth nothing", async || {
            match status(&first, "fake-00000").await {
                Err(said) if said.contains("Unauthorized") => Ok(()),
                seen => Err(format!("{seen:?}")),
            }
        })
        .await;
    });
}

async fn rules(client: &Client) {
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
    create::<ValidatingAdmissionPolicy>(&Api::all(client.clone()), own_node_only()).await;
    let binding = json!({
        "metadata": {"name": "partage-agent-own-node"},
        "spec": {"policyName": "partage-agent-own-node", "validationActions": ["Deny"]},
    });
    create::<ValidatingAdmissionPolicyBinding>(&Api::all(client.clone()), binding).await;
}

/// A token of the agents' account, as kubelet asks for it: bound to a pod, and so to its node.
async fn token(client: &Client, pod: Option<&str>) -> String {
    let pods: Api<Pod> = Api::namespaced(client.clone(), "partage");
    let bound = match pod {
        Some(name) => {
            let uid = pods.get(name).await.unwrap().uid();
            json!({"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid})
        }
        None => Value::Null,
    };
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "partage");
    let asked: TokenRequest = made(json!({"spec": {"audiences": [], "boundObjectRef": bound}}));
    let made = accounts.create_token_request("agent", &PostParams::default(), &asked).await.unwrap();
    made.status.unwrap().token.unwrap()
}

async fn status(agent: &Client, node: &str) -> Result<(), String> {
    let change = json!({"status": {"capacity": {"partage.dev/memory": "640Gi"}}});
    let nodes: Api<Node> = Api::all(agent.clone());
    let patched = nodes.patch_status(node, &PatchParams::default(), &Patch::Merge(change)).await;
    patched.map(drop).map_err(|e| e.to_string())
}

async fn label(agent: &Client, node: &str) -> Result<(), String> {
    let change = json!({"metadata": {"labels": {"partage.dev/mine": "yes"}}});
    let nodes: Api<Node> = Api::all(agent.clone());
    nodes
        .patch(node, &PatchParams::default(), &Patch::Merge(change))
        .await
        .map(drop)
        .map_err(|e| e.to_string())
}

async fn annotate(agent: &Client, pod: &str) -> Result<(), String> {
    let change = json!({"metadata": {"annotations": {"partage.dev/grant": "x"}}});
    let pods: Api<Pod> = Api::namespaced(agent.clone(), "partage");
    pods.patch(pod, &PatchParams::default(), &Patch::Merge(change)).await.map(drop).map_err(|e| e.to_string())
}
