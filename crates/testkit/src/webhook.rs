//! A small admission webhook for tests, which shows how kube-apiserver calls a webhook and uses the answers.
//!
//! One server accepts mutating and validating calls on any path; a function of the test answers. A request does not say
//! which of the two it is, and a validating one must not be answered with a change: use different paths.

use crate::bed::Certificate;
use crate::test_server::{ServeError, TestServer};
use axum::Router;
use axum::extract::State;
use axum::http::Uri;
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview};
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// The request of kube-apiserver.
pub type ReviewRequest = AdmissionRequest<DynamicObject>;
/// The answer to kube-apiserver.
pub type ReviewResponse = AdmissionResponse;

type AnswerFn = dyn Fn(&str, &ReviewRequest) -> ReviewResponse + Send + Sync;

/// A webhook that runs until it is stopped or dropped.
pub struct TestWebhook {
    server: TestServer,
    requests: Arc<Mutex<Vec<ReviewRequest>>>,
}

impl TestWebhook {
    /// Starts a webhook on this address with this certificate. `answer` gets the path and the request.
    pub async fn start(
        address: SocketAddr,
        certificate: &Certificate,
        answer: impl Fn(&str, &ReviewRequest) -> ReviewResponse + Send + Sync + 'static,
    ) -> Result<TestWebhook, ServeError> {
        let requests = Arc::new(Mutex::new(Vec::new()));
        let state = Arc::new(WebhookState { answer: Box::new(answer), requests: Arc::clone(&requests) });
        let router = Router::new().fallback(review).with_state(state);
        Ok(TestWebhook { server: TestServer::tls(address, certificate, router).await?, requests })
    }

    /// Returns the address that the webhook listens on.
    pub fn address(&self) -> SocketAddr {
        self.server.address
    }

    /// Returns every request so far, in order of arrival.
    pub fn requests(&self) -> Vec<ReviewRequest> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stops the webhook; its port is free afterwards.
    pub async fn stop(self) {
        self.server.stop().await;
    }
}

/// Allows the request, with the object changed by `change`, which gets it as JSON.
pub fn allow_with_change(request: &ReviewRequest, change: impl FnOnce(&mut Value)) -> ReviewResponse {
    let response = ReviewResponse::from(request);
    let Ok(before) = serde_json::to_value(&request.object) else {
        return response.deny("the object cannot be serialized");
    };
    let mut after = before.clone();
    change(&mut after);
    let difference = json_patch::diff(&before, &after);
    if difference.is_empty() {
        return response;
    }
    match response.with_patch(difference) {
        Ok(response) => response,
        Err(error) => ReviewResponse::from(request).deny(error),
    }
}

struct WebhookState {
    answer: Box<AnswerFn>,
    requests: Arc<Mutex<Vec<ReviewRequest>>>,
}

async fn review(
    State(state): State<Arc<WebhookState>>,
    uri: Uri,
    axum::Json(review): axum::Json<AdmissionReview<DynamicObject>>,
) -> axum::Json<AdmissionReview<DynamicObject>> {
    let response = match TryInto::<ReviewRequest>::try_into(review) {
        Ok(request) => {
            let response = (state.answer)(uri.path(), &request);
            state.requests.lock().unwrap_or_else(PoisonError::into_inner).push(request);
            response
        }
        Err(error) => ReviewResponse::invalid(error),
    };
    axum::Json(response.into_review())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_server::tests::{certificate, connect, post_json};
    use serde_json::json;

    #[tokio::test]
    async fn webhook_answers_reviews_over_tls() {
        let certificate = certificate();
        let webhook = TestWebhook::start("127.0.0.1:0".parse().unwrap(), &certificate, |path, request| {
            if path == "/validate" {
                return ReviewResponse::from(request).deny("partage.dev/memory is 0: request at least 1Mi");
            }
            allow_with_change(request, |object| object["metadata"]["annotations"] = json!({"seen": "yes"}))
        })
        .await
        .unwrap();
        let review = |name: &str| {
            json!({
                "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
                "request": {
                    "uid": "u-1", "operation": "CREATE", "name": name, "namespace": "default", "userInfo": {},
                    "kind": {"group": "", "version": "v1", "kind": "Pod"},
                    "resource": {"group": "", "version": "v1", "resource": "pods"},
                    "object": {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": []}},
                },
            })
        };
        let stream = connect(webhook.address(), &certificate).await.unwrap();
        let answer = post_json(stream, "/mutate", &review("good")).await;
        assert_eq!(answer["response"]["uid"], "u-1");
        assert_eq!(answer["response"]["allowed"], true);
        let patch: Vec<u8> = serde_json::from_value(answer["response"]["patch"].clone()).unwrap();
        let patch: Value = serde_json::from_slice(&patch).unwrap();
        assert_eq!(patch, json!([{"op": "add", "path": "/metadata/annotations", "value": {"seen": "yes"}}]));
        let stream = connect(webhook.address(), &certificate).await.unwrap();
        let answer = post_json(stream, "/validate", &review("bad")).await;
        assert_eq!(answer["response"]["allowed"], false);
        assert_eq!(answer["response"]["status"]["message"], "partage.dev/memory is 0: request at least 1Mi");
        assert_eq!(webhook.requests().iter().map(|r| r.name.as_str()).collect::<Vec<_>>(), ["good", "bad"]);
    }
}
