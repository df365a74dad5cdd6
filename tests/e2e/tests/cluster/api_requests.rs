//! Sends raw requests to an API server, for requests that no client library would send.

use kube::Client;
use serde_json::{Value, json};

/// Sends a request; `Err` has the server's message.
pub(crate) async fn send(
    client: &Client,
    method: &str,
    path: &str,
    body: Option<Value>,
) -> Result<Value, String> {
    let kind = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
    let body = body.map_or_else(Vec::new, |body| body.to_string().into_bytes());
    let request =
        http::Request::builder().method(method).uri(path).header("Content-Type", kind).body(body).unwrap();
    let answer = client.request_text(request).await.map_err(|error| error.to_string())?;
    Ok(serde_json::from_str(&answer).unwrap_or(Value::Null))
}

/// Returns a pod without requests; with `node` it is already bound to that node.
pub(crate) fn pod(name: &str, annotations: &Value, node: Option<&str>) -> Value {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"containers": [{"name": "main", "image": "none"}]},
    });
    if let Some(node) = node {
        pod["spec"]["nodeName"] = json!(node);
    }
    pod
}
