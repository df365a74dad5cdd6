//! A small scheduler extender for tests: it shows what kube-scheduler asks and does with the answers.
//!
//! Not the product's extender: that one decides. This one does what the test says and writes down every call.

use crate::serving::{ServeError, Serving};
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

/// What the extender answers. The default takes every node, scores none, and binds without annotations.
pub struct Rules {
    filter: Box<Filter>,
    score: Box<Score>,
    annotations: Box<Annotations>,
}

type Filter = dyn Fn(&Pod, &str) -> Result<(), String> + Send + Sync;
type Score = dyn Fn(&Pod, &str) -> i64 + Send + Sync;
type Annotations = dyn Fn(&Bind) -> BTreeMap<String, String> + Send + Sync;

impl Default for Rules {
    fn default() -> Rules {
        Rules {
            filter: Box::new(|_, _| Ok(())),
            score: Box::new(|_, _| 0),
            annotations: Box::new(|_| BTreeMap::new()),
        }
    }
}

impl Rules {
    /// Whether a pod fits a node, and why not.
    #[must_use]
    pub fn filter(
        mut self,
        fits: impl Fn(&Pod, &str) -> Result<(), String> + Send + Sync + 'static,
    ) -> Rules {
        self.filter = Box::new(fits);
        self
    }

    /// How well a node suits a pod, 0 to 10.
    #[must_use]
    pub fn score(mut self, score: impl Fn(&Pod, &str) -> i64 + Send + Sync + 'static) -> Rules {
        self.score = Box::new(score);
        self
    }

    /// The annotations a Binding carries into its pod.
    #[must_use]
    pub fn annotations(
        mut self,
        annotations: impl Fn(&Bind) -> BTreeMap<String, String> + Send + Sync + 'static,
    ) -> Rules {
        self.annotations = Box::new(annotations);
        self
    }
}

/// One call of kube-scheduler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// Which of these nodes fit.
    Filter {
        /// The pod's name.
        pod: String,
        /// The nodes that passed the scheduler's own filters.
        nodes: Vec<String>,
    },
    /// How well each of these nodes suits.
    Prioritize {
        /// The pod's name.
        pod: String,
        /// The nodes that are left.
        nodes: Vec<String>,
    },
    /// Bind the pod to this node.
    Bind(Bind),
}

impl Call {
    /// The name of the pod it is about.
    pub fn pod(&self) -> &str {
        match self {
            Call::Filter { pod, .. } | Call::Prioritize { pod, .. } => pod,
            Call::Bind(bind) => &bind.pod_name,
        }
    }
}

/// What kube-scheduler says of a binding.
// Names on the wire are those of Go's fields.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Bind {
    /// The pod's name.
    pub pod_name: String,
    /// Its namespace.
    pub pod_namespace: String,
    /// Its UID.
    #[serde(rename = "PodUID")]
    pub pod_uid: String,
    /// The node chosen.
    pub node: String,
}

/// An extender that runs until it is stopped or dropped.
pub struct Extender {
    serving: Serving,
    calls: Arc<Mutex<Vec<Call>>>,
}

impl Extender {
    /// Listens on this address and binds with this client.
    pub async fn start(client: Client, address: SocketAddr, rules: Rules) -> Result<Extender, ServeError> {
        let calls = Arc::new(Mutex::new(Vec::new()));
        let at_work = Arc::new(AtWork { client, rules, calls: Arc::clone(&calls) });
        let router = Router::new()
            .route("/filter", post(filter))
            .route("/prioritize", post(prioritize))
            .route("/bind", post(bind))
            .layer(axum::extract::DefaultBodyLimit::disable())
            .with_state(at_work);
        Ok(Extender { serving: Serving::plain(address, router).await?, calls })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.serving.address
    }

    /// Every call so far, in order of arrival.
    pub fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends it; the port is free afterwards.
    pub async fn stop(self) {
        self.serving.stop().await;
    }
}

/// A resource that sends a pod to the extender.
#[derive(Clone, Debug)]
pub struct Managed {
    /// Its name (`partage.dev/gpu`).
    pub name: String,
    /// Whether kube-scheduler leaves counting it to the extender.
    pub ignored_by_scheduler: bool,
}

impl Managed {
    /// A resource that kube-scheduler counts against the node's allocatable too.
    pub fn counted(name: impl Into<String>) -> Managed {
        Managed { name: name.into(), ignored_by_scheduler: false }
    }

    /// A resource that only the extender looks at; nodes need not have it.
    pub fn ignored(name: impl Into<String>) -> Managed {
        Managed { name: name.into(), ignored_by_scheduler: true }
    }
}

/// The entry of kube-scheduler's `extenders` list for an extender at this address.
///
/// A scheduler reads it when it starts, so tests choose the port beforehand.
pub fn entry(address: SocketAddr, managed: &[Managed]) -> Value {
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

struct AtWork {
    client: Client,
    rules: Rules,
    calls: Arc<Mutex<Vec<Call>>>,
}

impl AtWork {
    fn record(&self, call: Call) {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).push(call);
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Arguments {
    pod: Pod,
    #[serde(default)]
    node_names: Option<Vec<String>>,
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct Fitting {
    node_names: Vec<String>,
    failed_nodes: BTreeMap<String, String>,
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct Scored {
    host: String,
    score: i64,
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct Bound {
    error: String,
}

type Json<T> = axum::Json<T>;

async fn filter(State(at_work): State<Arc<AtWork>>, axum::Json(asked): Json<Arguments>) -> Json<Fitting> {
    let nodes = asked.node_names.unwrap_or_default();
    at_work.record(Call::Filter { pod: asked.pod.name_any(), nodes: nodes.clone() });
    let (mut node_names, mut failed_nodes) = (Vec::new(), BTreeMap::new());
    for node in nodes {
        match (at_work.rules.filter)(&asked.pod, &node) {
            Ok(()) => node_names.push(node),
            Err(why) => drop(failed_nodes.insert(node, why)),
        }
    }
    axum::Json(Fitting { node_names, failed_nodes })
}

async fn prioritize(
    State(at_work): State<Arc<AtWork>>,
    axum::Json(asked): Json<Arguments>,
) -> Json<Vec<Scored>> {
    let nodes = asked.node_names.unwrap_or_default();
    at_work.record(Call::Prioritize { pod: asked.pod.name_any(), nodes: nodes.clone() });
    let scored =
        nodes.into_iter().map(|host| Scored { score: (at_work.rules.score)(&asked.pod, &host), host });
    axum::Json(scored.collect())
}

async fn bind(State(at_work): State<Arc<AtWork>>, axum::Json(asked): Json<Bind>) -> Json<Bound> {
    at_work.record(Call::Bind(asked.clone()));
    let binding = Binding {
        metadata: ObjectMeta {
            name: Some(asked.pod_name.clone()),
            namespace: Some(asked.pod_namespace.clone()),
            // A pod of the same name that came later is not bound by mistake.
            uid: Some(asked.pod_uid.clone()),
            annotations: Some((at_work.rules.annotations)(&asked))
                .filter(|annotations| !annotations.is_empty()),
            ..ObjectMeta::default()
        },
        target: ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Node".into()),
            name: Some(asked.node.clone()),
            ..ObjectReference::default()
        },
    };
    let pods: Api<Pod> = Api::namespaced(at_work.client.clone(), &asked.pod_namespace);
    let posted: Result<Status, _> =
        pods.create_subresource("binding", &asked.pod_name, &PostParams::default(), &binding).await;
    axum::Json(Bound { error: posted.err().map(|e| e.to_string()).unwrap_or_default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serving::tests::ask;
    use tokio::net::TcpStream;

    #[tokio::test]
    async fn filters_scores_and_writes_down() {
        let rules = Rules::default()
            .filter(|_, node| if node == "b" { Err("no room on b".into()) } else { Ok(()) })
            .score(|_, node| if node == "c" { 10 } else { 1 });
        // Nothing is bound here, so no API server is called.
        let client = Client::try_from(kube::Config::new("http://127.0.0.1:1".parse().unwrap())).unwrap();
        let extender = Extender::start(client, "127.0.0.1:0".parse().unwrap(), rules).await.unwrap();
        let connect = async || TcpStream::connect(extender.address()).await.unwrap();
        let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": []}});
        let asked = json!({"Pod": pod, "Nodes": null, "NodeNames": ["a", "b", "c"]});
        let fitting = ask(connect().await, "/filter", &asked).await;
        assert_eq!(fitting, json!({"NodeNames": ["a", "c"], "FailedNodes": {"b": "no room on b"}}));
        let asked = json!({"Pod": pod, "NodeNames": ["a", "c"]});
        let scored = ask(connect().await, "/prioritize", &asked).await;
        assert_eq!(scored, json!([{"Host": "a", "Score": 1}, {"Host": "c", "Score": 10}]));
        let names = |list: &[&str]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
        let calls = [
            Call::Filter { pod: "p".into(), nodes: names(&["a", "b", "c"]) },
            Call::Prioritize { pod: "p".into(), nodes: names(&["a", "c"]) },
        ];
        assert_eq!(extender.calls(), calls);
    }

    #[test]
    fn an_entry_names_its_resources() {
        let entry = entry(
            "10.200.0.1:9998".parse().unwrap(),
            &[Managed::counted("partage.dev/gpu"), Managed::ignored("partage.dev/memory")],
        );
        assert_eq!(entry["urlPrefix"], "http://10.200.0.1:9998");
        let managed = json!([
            {"name": "partage.dev/gpu", "ignoredByScheduler": false},
            {"name": "partage.dev/memory", "ignoredByScheduler": true},
        ]);
        assert_eq!(entry["managedResources"], managed);
    }
}
