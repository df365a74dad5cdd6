//! The API server, as the agent of one node uses it.

use partage_cluster::{
    ApiClient, ClientOptions, ClusterError, NodeWriter, PodCache, Recorder, Severity, WatchSelector,
    node_reference, pod_reference,
};
use partage_core::model::{NodeName, PodId};
use std::path::Path;
use tokio::time::Instant;

/// The component in the `User-Agent` header.
const COMPONENT: &str = "partage-node";
/// The reporting controller of events.
const CONTROLLER: &str = "partage.dev/node";

/// A connection to the API server, with what belongs to this node. Cloning it is cheap.
#[derive(Clone, Debug)]
pub(crate) struct ApiServer {
    /// Requests about any object.
    pub(crate) client: ApiClient,
    /// This node's own object.
    pub(crate) node: NodeWriter,
    /// Events of this agent.
    pub(crate) recorder: Recorder,
}

impl ApiServer {
    /// Reads the configuration; no request is sent yet.
    pub(crate) async fn connect(
        kubeconfig: Option<&Path>,
        node: &NodeName,
    ) -> Result<ApiServer, ClusterError> {
        let options = ClientOptions { kubeconfig, component: COMPONENT, instance: node.as_str() };
        let client = ApiClient::connect(&options).await?;
        Ok(ApiServer {
            node: NodeWriter::new(&client, node),
            recorder: Recorder::start(&client, CONTROLLER, node.as_str()),
            client,
        })
    }

    /// Watches the pods that are bound to this node.
    pub(crate) fn watch_pods(&self) -> PodCache {
        self.client.watch_pods(&WatchSelector::on_node(self.node.name()))
    }

    /// Waits until all recorded events are written, at most until the deadline.
    pub(crate) async fn flush_events(&self, deadline: Instant) {
        self.recorder.flush(deadline.saturating_duration_since(Instant::now())).await;
    }

    /// Records an event about a pod.
    pub(crate) fn pod_event(&self, pod: &PodId, severity: Severity, reason: &'static str, note: &str) {
        self.recorder.record(&pod_reference(pod), severity, reason, note);
    }

    /// Records an event about this node.
    pub(crate) fn node_event(&self, severity: Severity, reason: &'static str, note: &str) {
        self.recorder.record(&node_reference(self.node.name()), severity, reason, note);
    }
}
