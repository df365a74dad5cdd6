use super::*;
use std::sync::atomic::{AtomicUsize, Ordering};

const LOCALHOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
const MESSAGES: AuthMessages = AuthMessages { missing_token: "send a token", forbidden: "not allowed" };
const MISSING: AuthError = AuthError::MissingToken("send a token");
const FORBIDDEN: AuthError = AuthError::Forbidden("not allowed");

fn with(authorization: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(header::AUTHORIZATION, authorization.parse().unwrap());
    headers
}

/// An authenticator whose reviewer counts its reviews and allows tokens that begin with `good`.
fn counted() -> (BearerAuth, Arc<AtomicUsize>) {
    let reviews = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&reviews);
    let review = move |token: String| {
        counter.fetch_add(1, Ordering::SeqCst);
        async move {
            match token.as_str() {
                "down" => Err("connection refused"),
                token => Ok(token.starts_with("good")),
            }
        }
    };
    (BearerAuth::new(review, MESSAGES), reviews)
}

#[tokio::test]
async fn decisions_are_reused_and_failures_are_not() {
    let (auth, reviews) = counted();
    for _ in 0..3 {
        assert_eq!(auth.authorize(&with("Bearer good"), LOCALHOST).await, Ok(()));
        assert_eq!(auth.authorize(&with("bearer  bad"), LOCALHOST).await, Err(FORBIDDEN));
    }
    assert_eq!(reviews.load(Ordering::SeqCst), 2);
    for times in 1..3 {
        let error = auth.authorize(&with("Bearer down"), LOCALHOST).await.unwrap_err();
        assert!(error.to_string().contains("connection refused"), "{error}");
        assert_eq!(reviews.load(Ordering::SeqCst), 2 + times);
    }
}

#[tokio::test]
async fn malformed_authorization_is_refused_without_a_review() {
    let (auth, reviews) = counted();
    let long = format!("Bearer {}", "a".repeat(MAX_TOKEN_BYTES + 1));
    for wrong in ["Bearer", "Bearer ", "Basic YTpi", "good", "Bearer a b", &long] {
        assert_eq!(auth.authorize(&with(wrong), LOCALHOST).await, Err(MISSING), "{wrong}");
    }
    assert_eq!(auth.authorize(&HeaderMap::new(), LOCALHOST).await, Err(MISSING));
    assert_eq!(reviews.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn cache_is_bounded_and_decisions_expire() {
    let (auth, reviews) = counted();
    assert_eq!(auth.authorize(&with("Bearer good"), LOCALHOST).await, Ok(()));
    let start = Instant::now();
    for invented in 0..2 * MAX_CACHED_DECISIONS {
        auth.remember(Sha256::digest(invented.to_string()).into(), false, start);
    }
    assert_eq!(auth.decisions().len(), MAX_CACHED_DECISIONS);
    let before = reviews.load(Ordering::SeqCst);
    assert_eq!(auth.authorize(&with("Bearer good"), LOCALHOST).await, Ok(()));
    assert_eq!(reviews.load(Ordering::SeqCst), before, "invented tokens do not evict an allowed one");
    let hash: TokenHash = Sha256::digest(b"good").into();
    let at = auth.decisions()[&hash].at;
    assert_eq!(auth.cached(&hash, at + DECISION_TTL), None);
    assert!(auth.cached(&hash, at + DECISION_TTL - Duration::from_millis(1)).is_some());
}

#[tokio::test]
async fn invented_tokens_are_rate_limited_and_leave_known_clients_alone() {
    let (auth, reviews) = counted();
    let start = Instant::now();
    let from = |last: u8| IpAddr::from([10, 0, 0, last]);
    let granted = |peer: IpAddr| (0..1000).filter(|_| auth.take_from_budget(peer, start)).count();
    assert_eq!(granted(from(1)), MAX_NEW_TOKENS_PER_ADDRESS as usize);
    assert_eq!(granted(from(2)), MAX_NEW_TOKENS_PER_ADDRESS as usize, "one address leaves some to others");
    assert_eq!(
        (3..250).map(|last| granted(from(last))).sum::<usize>(),
        (MAX_NEW_TOKENS_PER_SECOND - 2 * MAX_NEW_TOKENS_PER_ADDRESS) as usize
    );
    assert!(auth.take_from_budget(from(1), start + BUDGET_WINDOW));
    // A token that was allowed before is reviewed although the budget is used up.
    let hash: TokenHash = Sha256::digest(b"good").into();
    let expired = Decision { at: start.checked_sub(DECISION_TTL).unwrap(), allowed: true };
    auth.decisions().insert(hash, expired);
    *auth.budget.lock().unwrap() = NewTokenBudget {
        window_start: Some(start + ALLOWED_TOKEN_RETENTION),
        total: MAX_NEW_TOKENS_PER_SECOND,
        by_address: BTreeMap::new(),
    };
    let invented = auth.authorize(&with("Bearer invented"), LOCALHOST).await;
    assert_eq!(invented, Err(AuthError::TooManyNewTokens));
    assert_eq!(auth.authorize(&with("Bearer good"), LOCALHOST).await, Ok(()));
    assert_eq!(reviews.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn silent_reviewer_is_not_waited_for() {
    let auth = BearerAuth::new(|_| std::future::pending::<Result<bool, String>>(), MESSAGES);
    let error = auth.authorize(&with("Bearer good"), LOCALHOST).await.unwrap_err();
    assert!(matches!(error, AuthError::ReviewFailed(_)), "{error}");
}

#[test]
fn only_loopback_hosts_are_recognized() {
    for host in ["localhost", "localhost:9464", "127.0.0.1", "127.9.9.9:80", "[::1]", "[::1]:9464"] {
        assert!(is_loopback_host(host), "{host}");
    }
    for host in
        ["", "evil.example", "evil.example:80", "localhost.evil.example", "10.0.0.1:80", "127.0.0.1.nip.io"]
    {
        assert!(!is_loopback_host(host), "{host}");
    }
}
