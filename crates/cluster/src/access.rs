//! Who may read metrics: whose token the API server knows, and whom RBAC lets.

use crate::connection::Cluster;
use crate::error::ClusterError;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::Api;
use kube::api::PostParams;

/// No token of Kubernetes is longer.
const LONGEST: usize = 16 << 10;
const PATH: &str = "/metrics";

impl Cluster {
    /// Whether who has this token may `get /metrics`. Costs the API server two requests: remember the answer for a while.
    pub async fn may_read_metrics(&self, token: &str) -> Result<bool, ClusterError> {
        if token.is_empty() || token.len() > LONGEST {
            return Ok(false);
        }
        match self.who(token).await? {
            Some(user) => self.lets(user).await,
            None => Ok(false),
        }
    }

    async fn who(&self, token: &str) -> Result<Option<UserInfo>, ClusterError> {
        let spec = TokenReviewSpec { token: token.to_string(), ..TokenReviewSpec::default() };
        let review = TokenReview { spec, ..TokenReview::default() };
        let reviews: Api<TokenReview> = Api::all(self.client.clone());
        let doing = || "asking whose token it is".to_string();
        let review = self.ask(doing, reviews.create(&PostParams::default(), &review)).await?;
        let status = review.status.unwrap_or_default();
        Ok(status.user.filter(|_| status.authenticated == Some(true)))
    }

    async fn lets(&self, user: UserInfo) -> Result<bool, ClusterError> {
        let doing =
            || format!("asking whether {} may get {PATH}", user.username.as_deref().unwrap_or("nobody"));
        let attributes = NonResourceAttributes { path: Some(PATH.into()), verb: Some("get".into()) };
        let spec = SubjectAccessReviewSpec {
            non_resource_attributes: Some(attributes),
            user: user.username.clone(),
            uid: user.uid.clone(),
            groups: user.groups.clone(),
            extra: user.extra.clone(),
            ..SubjectAccessReviewSpec::default()
        };
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let reviews: Api<SubjectAccessReview> = Api::all(self.client.clone());
        let review = self.ask(doing, reviews.create(&PostParams::default(), &review)).await?;
        Ok(review.status.is_some_and(|status| status.allowed))
    }
}
