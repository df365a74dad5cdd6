//! A small scheduler extender for tests, which shows how kube-scheduler calls an extender and uses the answers.
//!
//! It is not the product's extender, which decides. This one answers as the test requests, and records every call.

use crate::test_server::{ServeError, TestServer};
use axum::Router;
use axum::extract::State;
use axum::routing::post;
use k8s_openapi::api::core::v1::{Binding, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client, ResourceExt};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// The answers of the extender. The default accepts every node, scores all 0, and binds without annotations.
pub struct ExtenderRules {
    filter: Box<FilterFn>,
    score: Box<ScoreFn>,
    annotations: Box<AnnotationsFn>,
}

type FilterFn = dyn Fn(&Pod, &str) -> Result<(), String> + Send + Sync;
type ScoreFn = dyn Fn(&Pod, &str) -> i64 + Send + Sync;
type AnnotationsFn = dyn Fn(&BindArgs) -> BTreeMap<String, String> + Send + Sync;

impl Default for ExtenderRules {
    fn default() -> ExtenderRules {
        ExtenderRules {
            filter: Box::new(|_, _| Ok(())),
            score: Box::new(|_, _| 0),
            annotations: Box::new(|_| BTreeMap::new()),
        }
    }
}

impl ExtenderRules {
    /// Sets the filter: whether a pod fits a node, or why not.
    #[must_use]
    pub fn filter(
        mut self,
        fits: impl Fn(&Pod, &str) -> Result<(), String> + Send + Sync + 'static,
    ) -> ExtenderRules {
        self.filter = Box::new(fits);
        self
    }

    /// Sets the score of a node for a pod, 0 to 10.
    #[must_use]
    pub fn score(mut self, score: impl Fn(&Pod, &str) -> i64 + Send + Sync + 'static) -> ExtenderRules {
        self.score = Box::new(score);
        self
    }

    /// Sets the annotations that a Binding copies to its pod.
    #[must_use]
    pub fn annotations(
        mut self,
        annotations: impl Fn(&BindArgs) -> BTreeMap<String, String> + Send + Sync + 'static,
    ) -> ExtenderRules {
        self.annotations = Box::new(annotations);
        self
    }
}

/// One call of kube-scheduler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtenderCall {
    /// The scheduler asks which of these nodes fit.
    Filter {
        /// Name of the pod.
        pod: String,
        /// The nodes that passed the scheduler's own filters.
        nodes: Vec<String>,
    },
    /// The scheduler asks for a score of each of these nodes.
    Prioritize {
        /// Name of the pod.
        pod: String,
        /// The nodes that passed all filters.
        nodes: Vec<String>,
    },
    /// The scheduler asks to bind the pod to this node.
    Bind(BindArgs),
}

impl ExtenderCall {
    /// Returns the name of the pod that the call is about.
    pub fn pod(&self) -> &str {
        match self {
            ExtenderCall::Filter { pod, .. } | ExtenderCall::Prioritize { pod, .. } => pod,
            ExtenderCall::Bind(bind) => &bind.pod_name,
        }
    }
}

/// The arguments of a bind call.
// Field names on the wire are those of the Go structs.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct BindArgs {
    /// Name of the pod.
    pub pod_name: String,
    /// Namespace of the pod.
    pub pod_namespace: String,
    /// UID of the pod.
    #[serde(rename = "PodUID")]
    pub pod_uid: String,
    /// Name of the selected node.
    pub node: String,
}

/// An extender that runs until it is stopped or dropped.
pub struct TestExtender {
    server: TestServer,
    calls: Arc<Mutex<Vec<ExtenderCall>>>,
}

impl TestExtender {
    /// Starts an extender that listens on this address and binds pods with this client.
    pub async fn start(
        client: Client,
        address: SocketAddr,
        rules: ExtenderRules,
    ) -> Result<TestExtender, ServeError> {
        let calls = Arc::new(Mutex::new(Vec::new()));
        let state = Arc::new(ExtenderState { client, rules, calls: Arc::clone(&calls) });
        let router = Router::new()
            .route("/filter", post(handle_filter))
            .route("/prioritize", post(handle_prioritize))
            .route("/bind", post(handle_bind))
            .layer(axum::extract::DefaultBodyLimit::disable())
            .with_state(state);
        Ok(TestExtender { server: TestServer::plain(address, router).await?, calls })
    }

    /// Returns the address that the extender listens on.
    pub fn address(&self) -> SocketAddr {
        self.server.address
    }

    /// Returns every call so far, in order of arrival.
    pub fn calls(&self) -> Vec<ExtenderCall> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stops the extender; its port is free afterwards.
    pub async fn stop(self) {
        self.server.stop().await;
    }
}

/// A resource whose pods the scheduler passes to the extender.
#[derive(Clone, Debug)]
pub struct ManagedResource {
    /// The resource name, `partage.dev/gpu`.
    pub name: String,
    /// Whether kube-scheduler leaves the accounting of this resource to the extender.
    pub ignored_by_scheduler: bool,
}

impl ManagedResource {
    /// Returns a resource that kube-scheduler also counts against the node's allocatable.
    pub fn counted(name: impl Into<String>) -> ManagedResource {
        ManagedResource { name: name.into(), ignored_by_scheduler: false }
    }

    /// Returns a resource that only the extender checks; nodes need not have it.
    pub fn ignored(name: impl Into<String>) -> ManagedResource {
        ManagedResource { name: name.into(), ignored_by_scheduler: true }
    }
}

/// Returns the entry of kube-scheduler's `extenders` list for an extender at this address.
///
/// A scheduler reads it when it starts, so tests choose the port beforehand.
pub fn config_entry(address: SocketAddr, managed: &[ManagedResource]) -> Value {
    let managed: Vec<Value> = managed
        .iter()
        .map(|resource| json!({"name": resource.name, "ignoredByScheduler": resource.ignored_by_scheduler}))
        .collect();
    json!({
        "urlPrefix": format!("http://{address}"),
        "filterVerb": "filter",
        "prioritizeVerb": "prioritize",
        "bindVerb": "bind",
        "weight": 1,
        "enableHTTPS": false,
        "nodeCacheCapable": true,
        "httpTimeout": "30s",
        "ignorable": false,
        "managedResources": managed,
    })
}

struct ExtenderState {
    client: Client,
    rules: ExtenderRules,
    calls: Arc<Mutex<Vec<ExtenderCall>>>,
}

impl ExtenderState {
    fn record(&self, call: ExtenderCall) {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).push(call);
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ExtenderArgs {
    pod: Pod,
    #[serde(default)]
    node_names: Option<Vec<String>>,
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct FilterResult {
    node_names: Vec<String>,
    failed_nodes: BTreeMap<String, String>,
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct HostPriority {
    host: String,
    score: i64,
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct BindResult {
    error: String,
}

async fn handle_filter(
    State(state): State<Arc<ExtenderState>>,
    axum::Json(args): axum::Json<ExtenderArgs>,
) -> axum::Json<FilterResult> {
    let nodes = args.node_names.unwrap_or_default();
    state.record(ExtenderCall::Filter { pod: args.pod.name_any(), nodes: nodes.clone() });
    let (mut node_names, mut failed_nodes) = (Vec::new(), BTreeMap::new());
    for node in nodes {
        match (state.rules.filter)(&args.pod, &node) {
            Ok(()) => node_names.push(node),
            Err(why) => drop(failed_nodes.insert(node, why)),
        }
    }
    axum::Json(FilterResult { node_names, failed_nodes })
}

async fn handle_prioritize(
    State(state): State<Arc<ExtenderState>>,
    axum::Json(args): axum::Json<ExtenderArgs>,
) -> axum::Json<Vec<HostPriority>> {
    let nodes = args.node_names.unwrap_or_default();
    state.record(ExtenderCall::Prioritize { pod: args.pod.name_any(), nodes: nodes.clone() });
    let scored =
        nodes.into_iter().map(|host| HostPriority { score: (state.rules.score)(&args.pod, &host), host });
    axum::Json(scored.collect())
}

async fn handle_bind(
    State(state): State<Arc<ExtenderState>>,
    axum::Json(args): axum::Json<BindArgs>,
) -> axum::Json<BindResult> {
    state.record(ExtenderCall::Bind(args.clone()));
    let binding = Binding {
        metadata: ObjectMeta {
            name: Some(args.pod_name.clone()),
            namespace: Some(args.pod_namespace.clone()),
            // The UID prevents binding a newer pod of the same name.
            uid: Some(args.pod_uid.clone()),
            annotations: Some((state.rules.annotations)(&args)).filter(|annotations| !annotations.is_empty()),
            ..ObjectMeta::default()
        },
        target: ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Node".into()),
            name: Some(args.node.clone()),
            ..ObjectReference::default()
        },
    };
    let pods: Api<Pod> = Api::namespaced(state.client.clone(), &args.pod_namespace);
    let posted: Result<Status, _> =
        pods.create_subresource("binding", &args.pod_name, &PostParams::default(), &binding).await;
    axum::Json(BindResult { error: posted.err().map(|e| e.to_string()).unwrap_or_default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_server::tests::post_json;
    use tokio::net::TcpStream;

    #[tokio::test]
    async fn extender_filters_scores_and_records_calls() {
        let rules = ExtenderRules::default()
            .filter(|_, node| if node == "b" { Err("b is full".into()) } else { Ok(()) })
            .score(|_, node| if node == "c" { 10 } else { 1 });
        // Nothing is bound here, so no API server is called.
        let client = Client::try_from(kube::Config::new("http://127.0.0.1:1".parse().unwrap())).unwrap();
        let extender = TestExtender::start(client, "127.0.0.1:0".parse().unwrap(), rules).await.unwrap();
        let connect = async || TcpStream::connect(extender.address()).await.unwrap();
        let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": []}});
        let args = json!({"Pod": pod, "Nodes": null, "NodeNames": ["a", "b", "c"]});
        let fitting = post_json(connect().await, "/filter", &args).await;
        assert_eq!(fitting, json!({"NodeNames": ["a", "c"], "FailedNodes": {"b": "b is full"}}));
        let args = json!({"Pod": pod, "NodeNames": ["a", "c"]});
        let scored = post_json(connect().await, "/prioritize", &args).await;
        assert_eq!(scored, json!([{"Host": "a", "Score": 1}, {"Host": "c", "Score": 10}]));
        let names = |list: &[&str]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
        let calls = [
            ExtenderCall::Filter { pod: "p".into(), nodes: names(&["a", "b", "c"]) },
            ExtenderCall::Prioritize { pod: "p".into(), nodes: names(&["a", "c"]) },
        ];
        assert_eq!(extender.calls(), calls);
    }

    #[test]
    fn config_entry_lists_managed_resources() {
        let entry = config_entry(
            "10.200.0.1:9998".parse().unwrap(),
            &[ManagedResource::counted("partage.dev/gpu"), ManagedResource::ignored("partage.dev/memory")],
        );
        assert_eq!(entry["urlPrefix"], "http://10.200.0.1:9998");
        let managed = json!([
            {"name": "partage.dev/gpu", "ignoredByScheduler": false},
            {"name": "partage.dev/memory", "ignoredByScheduler": true},
        ]);
        assert_eq!(entry["managedResources"], managed);
    }
}
