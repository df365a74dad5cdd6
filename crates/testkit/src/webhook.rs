//! A small admission webhook for tests: it shows what kube-apiserver asks and does with the answers.
//!
//! One server takes mutating and validating calls on any path; the test's own function answers. A request does not say
//! which of the two it is, and a validating one may not be answered with a change: tell them apart by the path.

use crate::bed::Certificate;
use crate::serving::{ServeError, Serving};
use axum::Router;
use axum::extract::State;
use axum::http::Uri;
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview};
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// What kube-apiserver asks.
pub type Request = AdmissionRequest<DynamicObject>;
/// What it is told.
pub type Response = AdmissionResponse;

type Answer = dyn Fn(&str, &Request) -> Response + Send + Sync;

/// A webhook that runs until it is stopped or dropped.
pub struct Webhook {
    serving: Serving,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Webhook {
    /// Listens on this address with this certificate and answers with this function of the path and the request.
    pub async fn start(
        address: SocketAddr,
        certificate: &Certificate,
        answer: impl Fn(&str, &Request) -> Response + Send + Sync + 'static,
    ) -> Result<Webhook, ServeError> {
        let requests = Arc::new(Mutex::new(Vec::new()));
        let at_work = Arc::new(AtWork { answer: Box::new(answer), requests: Arc::clone(&requests) });
        let router = Router::new().fallback(review).with_state(at_work);
        Ok(Webhook { serving: Serving::tls(address, certificate, router).await?, requests })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.serving.address
    }

    /// Every request so far, in order of arrival.
    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends it; the port is free afterwards.
    pub async fn stop(self) {
        self.serving.stop().await;
    }
}

/// Allows the request with the object changed by `change`, which sees it as JSON.
pub fn changed(request: &Request, change: impl FnOnce(&mut Value)) -> Response {
    let response = Response::from(request);
    let Ok(before) = serde_json::to_value(&request.object) else {
        return response.deny("the object cannot be written as JSON again");
    };
    let mut after = before.clone();
    change(&mut after);
    let difference = json_patch::diff(&before, &after);
    if difference.is_empty() {
        return response;
    }
    match response.with_patch(difference) {
        Ok(response) => response,
        Err(error) => Response::from(request).deny(error),
    }
}

struct AtWork {
    answer: Box<Answer>,
    requests: Arc<Mutex<Vec<Request>>>,
}

async fn review(
    State(at_work): State<Arc<AtWork>>,
    uri: Uri,
    axum::Json(review): axum::Json<AdmissionReview<DynamicObject>>,
) -> axum::Json<AdmissionReview<DynamicObject>> {
    let response = match TryInto::<Request>::try_into(review) {
        Ok(request) => {
            let response = (at_work.answer)(uri.path(), &request);
            at_work.requests.lock().unwrap_or_else(PoisonError::into_inner).push(request);
            response
        }
        Err(error) => Response::invalid(error),
    };
    axum::Json(response.into_review())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serving::tests::{ask, certificate, connect};
    use serde_json::json;

    #[tokio::test]
    async fn a_review_is_answered_over_tls() {
        let certificate = certificate();
        let webhook = Webhook::start("127.0.0.1:0".parse().unwrap(), &certificate, |path, request| {
            if path == "/validate" {
                return Response::from(request).deny("partage.dev/memory is 0: ask for some");
            }
            changed(request, |object| object["metadata"]["annotations"] = json!({"seen": "yes"}))
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
        let answer = ask(stream, "/mutate", &review("good")).await;
        assert_eq!(answer["response"]["uid"], "u-1");
        assert_eq!(answer["response"]["allowed"], true);
        let patch: Vec<u8> = serde_json::from_value(answer["response"]["patch"].clone()).unwrap();
        let patch: Value = serde_json::from_slice(&patch).unwrap();
        assert_eq!(patch, json!([{"op": "add", "path": "/metadata/annotations", "value": {"seen": "yes"}}]));
        let stream = connect(webhook.address(), &certificate).await.unwrap();
        let answer = ask(stream, "/validate", &review("bad")).await;
        assert_eq!(answer["response"]["allowed"], false);
        assert_eq!(answer["response"]["status"]["message"], "partage.dev/memory is 0: ask for some");
        assert_eq!(webhook.requests().iter().map(|r| r.name.as_str()).collect::<Vec<_>>(), ["good", "bad"]);
    }
}
