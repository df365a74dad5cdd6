//! Authentication of requests: bearer tokens that another party reviews, and loopback-only access.
//!
//! Any client that reaches the port can send any number of invented tokens, and each new token costs a review (for
//! Kubernetes tokens: two requests to the API server). Reviews of unknown tokens are therefore limited in total and
//! per address, decisions are cached, and tokens that were allowed before keep a budget of their own.

use crate::listener::PeerAddress;
use axum::Router;
use axum::extract::{Extension, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// How long a decision is reused, and so for how long a revoked token still works.
const DECISION_TTL: Duration = Duration::from_secs(30);
/// Decisions in the cache.
const MAX_CACHED_DECISIONS: usize = 256;
/// Reviews at a time of tokens that were allowed before, and as many of all others, so that invented tokens do not
/// delay a known client.
const MAX_CONCURRENT_REVIEWS: usize = 4;
/// Reviews per second of tokens that were never allowed: the daemon's own requests share the reviewer's queue.
const MAX_NEW_TOKENS_PER_SECOND: u32 = 40;
/// Part of [`MAX_NEW_TOKENS_PER_SECOND`] that one address may use, so that the rest is left for a new client.
const MAX_NEW_TOKENS_PER_ADDRESS: u32 = 4;
/// How long a token that was allowed is remembered as such: the tokens of pods are replaced within the hour.
const ALLOWED_TOKEN_RETENTION: Duration = Duration::from_secs(3600);
/// The window of [`MAX_NEW_TOKENS_PER_SECOND`].
const BUDGET_WINDOW: Duration = Duration::from_secs(1);
/// Time for one review.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(5);
/// Tokens of service accounts have less than 2 KiB.
const MAX_TOKEN_BYTES: usize = 8 << 10;

type ReviewFuture = Pin<Box<dyn Future<Output = Result<bool, String>> + Send>>;
type ReviewToken = dyn Fn(String) -> ReviewFuture + Send + Sync;

/// The sentences that refused clients receive: what the endpoint requires, and how to get it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthMessages {
    /// For a request without a usable bearer token (401).
    pub missing_token: &'static str,
    /// For a token that the reviewer did not allow (403).
    pub forbidden: &'static str,
}

/// Why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// There is no usable bearer token in the request: 401.
    #[error("{0}")]
    MissingToken(&'static str),
    /// The token is not allowed: 403.
    #[error("{0}")]
    Forbidden(&'static str),
    /// The reviewer could not be reached: 503.
    #[error("the token cannot be reviewed: {0}; try again")]
    ReviewFailed(String),
    /// Too many new tokens arrived: 429.
    #[error("too many unknown tokens arrived within one second; try again")]
    TooManyNewTokens,
}

impl IntoResponse for AuthError {
    fn into_response(self) -> Response {
        let code = match self {
            AuthError::MissingToken(_) => StatusCode::UNAUTHORIZED,
            AuthError::Forbidden(_) => StatusCode::FORBIDDEN,
            AuthError::ReviewFailed(_) => StatusCode::SERVICE_UNAVAILABLE,
            AuthError::TooManyNewTokens => StatusCode::TOO_MANY_REQUESTS,
        };
        let mut response = (code, format!("{self}\n")).into_response();
        if code == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// The hash of a token: tokens themselves are not kept.
type TokenHash = [u8; 32];

#[derive(Clone, Copy)]
struct Decision {
    at: Instant,
    allowed: bool,
}

/// Authorizes requests by their bearer token.
///
/// ```
/// use axum::Router;
/// use axum::routing::get;
/// use partage_serve::{AuthMessages, BearerAuth};
/// use std::sync::Arc;
///
/// let auth = BearerAuth::new(
///     // A real reviewer asks the API server.
///     |token| async move { Ok::<_, std::io::Error>(token == "secret") },
///     AuthMessages { missing_token: "send a bearer token", forbidden: "this token may not read this" },
/// );
/// let router = Arc::new(auth).protect(Router::new().route("/", get(async || "for readers\n")));
/// # let _: Router = router;
/// ```
pub struct BearerAuth {
    review: Box<ReviewToken>,
    messages: AuthMessages,
    decisions: Mutex<BTreeMap<TokenHash, Decision>>,
    known_reviews: Semaphore,
    new_reviews: Semaphore,
    budget: Mutex<NewTokenBudget>,
}

impl fmt::Debug for BearerAuth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BearerAuth").field("messages", &self.messages).finish_non_exhaustive()
    }
}

/// Reviews of unknown tokens in the current window.
#[derive(Default)]
struct NewTokenBudget {
    window_start: Option<Instant>,
    total: u32,
    by_address: BTreeMap<IpAddr, u32>,
}

impl BearerAuth {
    /// Uses a function that decides whether the holder of a token is allowed, or returns why it cannot decide.
    pub fn new<F, E>(
        review: impl Fn(String) -> F + Send + Sync + 'static,
        messages: AuthMessages,
    ) -> BearerAuth
    where
        F: Future<Output = Result<bool, E>> + Send + 'static,
        E: fmt::Display,
    {
        let review = move |token| -> ReviewFuture {
            let reviewed = review(token);
            Box::pin(async move { reviewed.await.map_err(|error| error.to_string()) })
        };
        BearerAuth {
            review: Box::new(review),
            messages,
            decisions: Mutex::default(),
            known_reviews: Semaphore::new(MAX_CONCURRENT_REVIEWS),
            new_reviews: Semaphore::new(MAX_CONCURRENT_REVIEWS),
            budget: Mutex::default(),
        }
    }

    /// Adds authorization to all routes of a router that an [`HttpServer`](crate::HttpServer) serves.
    pub fn protect(self: Arc<Self>, router: Router) -> Router {
        router.layer(middleware::from_fn_with_state(self, require_token))
    }

    /// Decides about a request with these headers, from this address.
    pub async fn authorize(&self, headers: &HeaderMap, peer: IpAddr) -> Result<(), AuthError> {
        let token = bearer_token(headers).ok_or(AuthError::MissingToken(self.messages.missing_token))?;
        let hash: TokenHash = Sha256::digest(token.as_bytes()).into();
        let now = Instant::now();
        if let Some(allowed) = self.cached(&hash, now) {
            return self.verdict(allowed);
        }
        let was_allowed = self.was_allowed(&hash);
        if !was_allowed && !self.take_from_budget(peer, now) {
            return Err(AuthError::TooManyNewTokens);
        }
        let reviews = if was_allowed { &self.known_reviews } else { &self.new_reviews };
        let reviewed = async {
            // The semaphore is never closed.
            let _permit = reviews.acquire().await;
            (self.review)(token.to_string()).await
        };
        let allowed = match tokio::time::timeout(REVIEW_TIMEOUT, reviewed).await {
            Ok(reviewed) => reviewed.map_err(AuthError::ReviewFailed)?,
            Err(_) => {
                let reason = format!("no response within {} s", REVIEW_TIMEOUT.as_secs());
                return Err(AuthError::ReviewFailed(reason));
            }
        };
        self.remember(hash, allowed, Instant::now());
        self.verdict(allowed)
    }

    fn verdict(&self, allowed: bool) -> Result<(), AuthError> {
        if allowed { Ok(()) } else { Err(AuthError::Forbidden(self.messages.forbidden)) }
    }

    fn cached(&self, hash: &TokenHash, now: Instant) -> Option<bool> {
        let decision = *self.decisions().get(hash)?;
        (now.duration_since(decision.at) < DECISION_TTL).then_some(decision.allowed)
    }

    /// Returns whether the last review of a token allowed it, however long ago.
    fn was_allowed(&self, hash: &TokenHash) -> bool {
        self.decisions().get(hash).is_some_and(|decision| decision.allowed)
    }

    /// Counts one review of an unknown token, unless the budget of this window is used up.
    fn take_from_budget(&self, peer: IpAddr, now: Instant) -> bool {
        let mut budget = self.budget.lock().unwrap_or_else(PoisonError::into_inner);
        if budget.window_start.is_none_or(|start| now.duration_since(start) >= BUDGET_WINDOW) {
            *budget = NewTokenBudget { window_start: Some(now), ..NewTokenBudget::default() };
        }
        let NewTokenBudget { total, by_address, .. } = &mut *budget;
        if *total >= MAX_NEW_TOKENS_PER_SECOND {
            return false;
        }
        let of_address = by_address.entry(peer).or_default();
        if *of_address >= MAX_NEW_TOKENS_PER_ADDRESS {
            return false;
        }
        *total += 1;
        *of_address += 1;
        true
    }

    fn remember(&self, hash: TokenHash, allowed: bool, now: Instant) {
        let mut decisions = self.decisions();
        decisions.retain(|_, decision| {
            let retention = if decision.allowed { ALLOWED_TOKEN_RETENTION } else { DECISION_TTL };
            now.duration_since(decision.at) < retention
        });
        if decisions.len() >= MAX_CACHED_DECISIONS {
            // Refused tokens are evicted first: any client can send any number of them.
            let oldest = decisions.iter().min_by_key(|(_, decision)| (decision.allowed, decision.at));
            if let Some(oldest) = oldest.map(|(hash, _)| *hash) {
                decisions.remove(&oldest);
            }
        }
        decisions.insert(hash, Decision { at: now, allowed });
    }

    fn decisions(&self) -> MutexGuard<'_, BTreeMap<TokenHash, Decision>> {
        self.decisions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn require_token(
    State(auth): State<Arc<BearerAuth>>,
    Extension(PeerAddress(peer)): Extension<PeerAddress>,
    request: Request,
    next: Next,
) -> Response {
    match auth.authorize(request.headers(), peer).await {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let token = token.trim();
    let well_formed = !token.is_empty()
        && token.len() <= MAX_TOKEN_BYTES
        && token.bytes().all(|byte| byte.is_ascii_graphic());
    (scheme.eq_ignore_ascii_case("bearer") && well_formed).then_some(token)
}

/// Answers only requests whose `Host` header names this machine's loopback.
///
/// A web page can point a DNS name of its own at 127.0.0.1 and make a browser on this machine send requests there (DNS
/// rebinding). Such requests carry the page's name.
///
/// ```
/// let router: axum::Router = partage_serve::restrict_to_loopback_host(axum::Router::new());
/// ```
pub fn restrict_to_loopback_host(router: Router) -> Router {
    router.layer(middleware::from_fn(require_loopback_host))
}

async fn require_loopback_host(request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    if host.is_some_and(is_loopback_host) {
        return next.run(request).await;
    }
    (StatusCode::FORBIDDEN, "use 127.0.0.1 or localhost in the URL\n").into_response()
}

fn is_loopback_host(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    name == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests;
