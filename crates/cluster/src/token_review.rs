//! Reviews of bearer tokens: which user sent a request, and whether RBAC allows it.
//!
//! Each review costs the API server a request. Callers that are reachable by unauthenticated clients must cache decisions and limit
//! how many unknown tokens they review, as `partage_serve::BearerAuth` does.

use crate::client::ApiClient;
use crate::error::ClusterError;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::Api;
use kube::api::PostParams;

/// No Kubernetes token is longer.
const MAX_TOKEN_BYTES: usize = 16 << 10;

impl ApiClient {
    /// Returns the user that a token belongs to; `None` if the API server does not accept it.
    pub async fn review_token(&self, token: &str) -> Result<Option<UserInfo>, ClusterError> {
        if token.is_empty() || token.len() > MAX_TOKEN_BYTES {
            return Ok(None);
        }
        let spec = TokenReviewSpec { token: token.to_string(), ..TokenReviewSpec::default() };
        let review = TokenReview { spec, ..TokenReview::default() };
        let reviews: Api<TokenReview> = Api::all(self.kube().clone());
        let operation = || "reviewing a token".to_string();
        let review = self.request(operation, reviews.create(&PostParams::default(), &review)).await?;
        let status = review.status.unwrap_or_default();
        Ok(status.user.filter(|_| status.authenticated == Some(true)))
    }

    /// Returns whether RBAC allows a user a verb on a path that is not a resource, such as `get` on `/metrics`.
    pub async fn is_path_allowed(
        &self,
        user: &UserInfo,
        verb: &str,
        path: &str,
    ) -> Result<bool, ClusterError> {
        let attributes = NonResourceAttributes { path: Some(path.into()), verb: Some(verb.into()) };
        let spec = SubjectAccessReviewSpec {
            non_resource_attributes: Some(attributes),
            user: user.username.clone(),
            uid: user.uid.clone(),
            groups: user.groups.clone(),
            extra: user.extra.clone(),
            ..SubjectAccessReviewSpec::default()
        };
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let reviews: Api<SubjectAccessReview> = Api::all(self.kube().clone());
        let operation = || {
            let name = user.username.as_deref().unwrap_or("a user without a name");
            format!("reviewing whether {name} may {verb} {path}")
        };
        let review = self.request(operation, reviews.create(&PostParams::default(), &review)).await?;
        Ok(review.status.is_some_and(|status| status.allowed))
    }

    /// Returns whether the holder of a token may `get` a path. Costs the API server two requests.
    ///
    /// ```no_run
    /// # async fn review(client: partage_cluster::ApiClient, token: &str) -> Result<(), partage_cluster::ClusterError> {
    /// if !client.token_may_get(token, "/metrics").await? {
    ///     // 403
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn token_may_get(&self, token: &str, path: &str) -> Result<bool, ClusterError> {
        match self.review_token(token).await? {
            Some(user) => self.is_path_allowed(&user, "get", path).await,
            None => Ok(false),
        }
    }
}
