//! Who may read metrics: everybody, or those whose token the API server knows and allows.

use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::future::BoxFuture;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// How long an answer of the API server holds: as long as a token that was taken away may still be used.
const HOLDS: Duration = Duration::from_secs(30);
/// Answers that are remembered.
const MOST: usize = 256;
/// Questions to the API server at a time about those who were allowed before, and as many about all others: whoever comes with tokens
/// that it made up does not hold up who scrapes.
const AT_ONCE: usize = 4;
/// Questions in a second about tokens that were never allowed: the agent's own words to the API server wait in the same queue.
const STRANGERS: u32 = 40;
/// Of these, from one address: a pod that makes up tokens leaves the others for a scraper whose token is new.
const FROM_ONE: u32 = 4;
/// How long it is known that a token was allowed: those of pods are replaced within the hour.
const FORGOTTEN: Duration = Duration::from_secs(3600);
const SECOND: Duration = Duration::from_secs(1);
/// How long the API server is waited for.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest token: those of service accounts have less than 2 KiB.
const LONGEST: usize = 8 << 10;

/// Asks the API server whether who has a token may read, or says why it cannot be asked.
pub(crate) type Ask = Arc<dyn Fn(String) -> BoxFuture<'static, Result<bool, String>> + Send + Sync>;

/// Who may read.
#[derive(Clone)]
pub(crate) enum Access {
    /// Everybody who reaches the address.
    Anonymous,
    /// Those whose token is allowed.
    Asks(Ask),
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Access::Anonymous => "Anonymous",
            Access::Asks(_) => "Asks",
        })
    }
}

/// Why somebody may not read, in words.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Denied {
    #[error(
        "metrics are for those with a token of this cluster: send it as `Authorization: Bearer <token>`, or let everybody \
         read them with `metrics.anonymous: true` in the agent's settings"
    )]
    NoToken,
    #[error(
        "this token may not read metrics: it has expired, is of another cluster, or nobody granted its user `get` on the URL \
         /metrics, as the cluster role partage-metrics-reader does"
    )]
    Forbidden,
    #[error("the API server cannot be asked about this token: {0}; try again")]
    NotAsked(String),
    #[error("too many tokens that nobody knows were sent within this second; try again")]
    TooMany,
}

impl IntoResponse for Denied {
    fn into_response(self) -> Response {
        let code = match self {
            Denied::NoToken => StatusCode::UNAUTHORIZED,
            Denied::Forbidden => StatusCode::FORBIDDEN,
            Denied::NotAsked(_) => StatusCode::SERVICE_UNAVAILABLE,
            Denied::TooMany => StatusCode::TOO_MANY_REQUESTS,
        };
        let mut response = (code, format!("{self}\n")).into_response();
        if code == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// A token is not kept, only what tells it from others.
type Print = [u8; 32];

/// Lets in who may read, and remembers for a while who may.
pub(super) struct Door {
    access: Access,
    known: Mutex<BTreeMap<Print, (Instant, bool)>>,
    asking: Semaphore,
    asking_strangers: Semaphore,
    strangers: Mutex<Second>,
}

/// Who was asked about in the last second, or since it began.
#[derive(Default)]
struct Second {
    began: Option<Instant>,
    all: u32,
    from: BTreeMap<IpAddr, u32>,
}

impl Door {
    pub(super) fn new(access: Access) -> Door {
        let [asking, asking_strangers] = [(); 2].map(|()| Semaphore::new(AT_ONCE));
        Door { access, known: Mutex::default(), asking, asking_strangers, strangers: Mutex::default() }
    }

    /// Whether who sends these headers, from this address, may read.
    pub(super) async fn admit(&self, headers: &HeaderMap, peer: IpAddr) -> Result<(), Denied> {
        let Access::Asks(ask) = &self.access else { return Ok(()) };
        let token = token(headers).ok_or(Denied::NoToken)?;
        let print: Print = Sha256::digest(token.as_bytes()).into();
        let now = Instant::now();
        if let Some(may) = self.remembered(&print, now) {
            return if may { Ok(()) } else { Err(Denied::Forbidden) };
        }
        let was_allowed = self.was_allowed(&print);
        if !was_allowed && !self.may_ask(peer, now) {
            return Err(Denied::TooMany);
        }
        let asking = if was_allowed { &self.asking } else { &self.asking_strangers };
        let asked = async {
            // Never closed.
            let _turn = asking.acquire().await;
            ask(token.to_string()).await
        };
        let may = match tokio::time::timeout(PATIENCE, asked).await {
            Ok(answer) => answer.map_err(Denied::NotAsked)?,
            Err(_) => return Err(Denied::NotAsked(format!("no answer within {} s", PATIENCE.as_secs()))),
        };
        self.remember(print, may, Instant::now());
        if may { Ok(()) } else { Err(Denied::Forbidden) }
    }

    fn remembered(&self, print: &Print, now: Instant) -> Option<bool> {
        let known = self.known();
        let (since, may) = known.get(print)?;
        (now.duration_since(*since) < HOLDS).then_some(*may)
    }

    /// Whether a token was allowed when it was last asked about.
    fn was_allowed(&self, print: &Print) -> bool {
        self.known().get(print).is_some_and(|(_, may)| *may)
    }

    /// Whether the API server may be asked about one more stranger, from this address.
    fn may_ask(&self, peer: IpAddr, now: Instant) -> bool {
        let mut second = self.strangers.lock().unwrap_or_else(PoisonError::into_inner);
        if second.began.is_none_or(|began| now.duration_since(began) >= SECOND) {
            *second = Second { began: Some(now), ..Second::default() };
        }
        let Second { all, from, .. } = &mut *second;
        if *all >= STRANGERS {
            return false;
        }
        let own = from.entry(peer).or_default();
        if *own >= FROM_ONE {
            return false;
        }
        (*all, *own) = (*all + 1, *own + 1);
        true
    }

    fn remember(&self, print: Print, may: bool, now: Instant) {
        let mut known = self.known();
        known.retain(|_, (since, may)| now.duration_since(*since) < if *may { FORGOTTEN } else { HOLDS });
        if known.len() >= MOST {
            // Who is allowed stays longest: others come with any number of tokens.
            let oldest = known.iter().min_by_key(|(_, (since, may))| (*may, *since));
            if let Some(oldest) = oldest.map(|(print, _)| *print) {
                known.remove(&oldest);
            }
        }
        known.insert(print, (now, may));
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<Print, (Instant, bool)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn token(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let token = token.trim();
    let sound =
        !token.is_empty() && token.len() <= LONGEST && token.bytes().all(|byte| byte.is_ascii_graphic());
    (scheme.eq_ignore_ascii_case("bearer") && sound).then_some(token)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn with(authorization: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, authorization.parse().unwrap());
        headers
    }

    /// A door whose API server counts how often it is asked, and allows tokens that begin with `good`.
    fn door() -> (Arc<Door>, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        let ask: Ask = Arc::new(move |token| {
            counted.fetch_add(1, Ordering::SeqCst);
            Box::pin(async move {
                match token.as_str() {
                    "down" => Err("connection refused".into()),
                    token => Ok(token.starts_with("good")),
                }
            })
        });
        (Arc::new(Door::new(Access::Asks(ask))), asked)
    }

    #[tokio::test]
    async fn the_api_server_decides_and_is_asked_once_for_a_while() {
        let (door, asked) = door();
        for _ in 0..3 {
            assert_eq!(door.admit(&with("Bearer good"), HERE).await, Ok(()));
            assert_eq!(door.admit(&with("bearer  bad"), HERE).await, Err(Denied::Forbidden));
        }
        assert_eq!(asked.load(Ordering::SeqCst), 2);
        // An answer that there was not is not remembered.
        for times in 1..3 {
            let away = door.admit(&with("Bearer down"), HERE).await.unwrap_err();
            assert!(away.to_string().contains("connection refused"), "{away}");
            assert_eq!(asked.load(Ordering::SeqCst), 2 + times);
        }
    }

    #[tokio::test]
    async fn without_a_token_nobody_is_asked() {
        let (door, asked) = door();
        let long = format!("Bearer {}", "a".repeat(LONGEST + 1));
        for wrong in ["Bearer", "Bearer ", "Basic YTpi", "good", "Bearer a b", &long] {
            assert_eq!(door.admit(&with(wrong), HERE).await, Err(Denied::NoToken), "{wrong}");
        }
        assert_eq!(door.admit(&HeaderMap::new(), HERE).await, Err(Denied::NoToken));
        assert_eq!(asked.load(Ordering::SeqCst), 0);
        assert_eq!(Door::new(Access::Anonymous).admit(&HeaderMap::new(), HERE).await, Ok(()));
    }

    #[tokio::test]
    async fn answers_are_few_and_do_not_hold_for_ever() {
        let (door, asked) = door();
        assert_eq!(door.admit(&with("Bearer good"), HERE).await, Ok(()));
        let start = Instant::now();
        for made_up in 0..2 * MOST {
            door.remember(Sha256::digest(made_up.to_string()).into(), false, start);
        }
        assert_eq!(door.known().len(), MOST);
        let before = asked.load(Ordering::SeqCst);
        assert_eq!(door.admit(&with("Bearer good"), HERE).await, Ok(()));
        assert_eq!(asked.load(Ordering::SeqCst), before, "made-up tokens do not crowd it out");
        let print: Print = Sha256::digest(b"good").into();
        let since = door.known()[&print].0;
        assert_eq!(door.remembered(&print, since + HOLDS), None);
        assert!(door.remembered(&print, since + HOLDS - Duration::from_millis(1)).is_some());
    }

    #[tokio::test]
    async fn tokens_that_are_made_up_cost_the_api_server_little() {
        let (door, asked) = door();
        let start = Instant::now();
        let from = |last: u8| IpAddr::from([10, 0, 0, last]);
        let questions = |peer: IpAddr| (0..1000).filter(|_| door.may_ask(peer, start)).count();
        assert_eq!(questions(from(1)), FROM_ONE as usize);
        assert_eq!(questions(from(2)), FROM_ONE as usize, "the one before has left some");
        assert_eq!(
            (3..250).map(|last| questions(from(last))).sum::<usize>(),
            (STRANGERS - 2 * FROM_ONE) as usize
        );
        assert!(door.may_ask(from(1), start + SECOND));
        // Who was allowed before is asked about, whoever else comes.
        let print: Print = Sha256::digest(b"good").into();
        door.known().insert(print, (start.checked_sub(HOLDS).unwrap(), true));
        *door.strangers.lock().unwrap() =
            Second { began: Some(start + FORGOTTEN), all: STRANGERS, from: BTreeMap::new() };
        assert_eq!(door.admit(&with("Bearer made-up"), HERE).await, Err(Denied::TooMany));
        assert_eq!(door.admit(&with("Bearer good"), HERE).await, Ok(()));
        assert_eq!(asked.load(Ordering::SeqCst), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn an_api_server_that_is_silent_is_not_waited_for() {
        let ask: Ask = Arc::new(|_| Box::pin(std::future::pending()));
        let door = Door::new(Access::Asks(ask));
        let denied = door.admit(&with("Bearer good"), HERE).await.unwrap_err();
        assert!(matches!(denied, Denied::NotAsked(_)), "{denied}");
    }
}
