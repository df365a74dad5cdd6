//! Reviews of tokens by the real API server.

use crate::control_plane::{ControlPlane, connect};
use partage_cluster::{ApiClient, ClusterError};
use partage_testkit::eventually;
use serde_json::json;

#[test]
fn token_may_read_what_rbac_allows_its_user() {
    let Some(plane) = ControlPlane::start() else { return };
    let may = json!([{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]);
    let (scraper, other) = (plane.account("scraper", may), plane.account("other", json!([])));
    let agent = plane.account(
        "agent",
        json!([
            {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]},
            {"apiGroups": ["authorization.k8s.io"], "resources": ["subjectaccessreviews"], "verbs": ["create"]},
        ]),
    );
    let client = plane.with_token(&agent);
    let ask = |client: &ApiClient, token: &str| plane.bed.block_on(client.token_may_get(token, "/metrics"));
    let path = plane.kubeconfig_with_token(&agent);
    plane.bed.block_on(eventually("the permission is in force", async || {
        let fresh = connect(&path).await.unwrap();
        match fresh.token_may_get(&scraper, "/metrics").await {
            Ok(true) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    }));
    assert_eq!(ask(&client, &scraper), Ok(true));
    assert_eq!(plane.bed.block_on(client.token_may_get(&scraper, "/other")), Ok(false));
    for refused in [other.as_str(), "made-up", "", &"x".repeat(20 << 10)] {
        assert_eq!(ask(&client, refused), Ok(false), "{refused:.20}");
    }
    let user = plane.bed.block_on(client.review_token(&scraper)).unwrap().unwrap();
    assert_eq!(user.username.as_deref(), Some("system:serviceaccount:default:scraper"));
    let error = ask(&plane.with_token(&other), &scraper).unwrap_err();
    assert!(matches!(error, ClusterError::Forbidden { .. }), "{error}");
    assert!(error.to_string().starts_with("reviewing a token: forbidden ("), "{error}");

    plane.bed.apiserver().kill();
    let error = ask(&client, &other[1..]).unwrap_err();
    assert!(error.is_transient(), "{error}");
}
