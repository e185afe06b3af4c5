//! `Idempotency-Key` on creates: a repeated request gets the response of the first one and creates no second sandbox.
//!
//! Responses are kept per API key in the memory of the server that received the request. Each create runs in its own
//! task, so a client that loses its connection gets the sandbox with its next attempt. Only responses of successful
//! creates are kept. Any other response means that no sandbox exists, so a repeated request tries again.

use std::{
    collections::{HashMap, VecDeque},
    future::Future,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    body::Body,
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use hyper::{
    HeaderMap,
    header::{HeaderName, HeaderValue},
};
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use super::{
    app::App,
    error::{ApiError, IdempotencyError},
    spread::{Answer, buffered, read},
};
use crate::{peers::Peer, traces};

const FIELD: HeaderName = HeaderName::from_static("idempotency-key");
/// Response header that marks a repeated response.
const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
/// Maximum key length in E2B's specification.
const MAX_KEY: usize = 255;
/// How long a response is kept. Clients repeat a create within minutes.
const WINDOW: Duration = Duration::from_secs(3600);
/// Maximum number of responses kept per API key, each of about 1 KiB. The oldest are dropped first.
const MAX_KEPT: usize = 1000;
/// How long a repetition waits for the first request.
const WAIT: Duration = Duration::from_secs(30);

/// Responses by API key, oldest first.
#[derive(Debug, Default)]
pub(super) struct Table(Mutex<HashMap<Option<String>, VecDeque<Entry>>>);

type Outcome = watch::Receiver<Option<Answer>>;

#[derive(Debug)]
struct Entry {
    key: String,
    request: [u8; 32],
    since: Instant,
    outcome: Outcome,
}

impl Entry {
    fn is_pending(&self) -> bool {
        self.outcome.has_changed().is_ok() && self.outcome.borrow().is_none()
    }
}

/// Identifies a request.
#[derive(Clone, Debug)]
struct Asked {
    /// Identifies the API key. `None` if the server requires none.
    owner: Option<String>,
    key: String,
    /// Digest of path and body.
    request: [u8; 32],
}

enum Entered {
    First(watch::Sender<Option<Answer>>, Outcome),
    Again(Outcome),
}

impl Table {
    fn enter(&self, asked: &Asked, now: Instant) -> Result<Entered, IdempotencyError> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        table.retain(|_, entries| {
            entries.retain(|e| e.is_pending() || now.duration_since(e.since) < WINDOW);
            !entries.is_empty()
        });
        let entries = table.entry(asked.owner.clone()).or_default();
        if let Some(known) = entries.iter().find(|entry| entry.key == asked.key) {
            return if known.request == asked.request {
                Ok(Entered::Again(known.outcome.clone()))
            } else {
                Err(IdempotencyError::Mismatch)
            };
        }
        if entries.len() >= MAX_KEPT {
            let oldest = entries.iter().position(|entry| !entry.is_pending());
            entries.remove(oldest.ok_or(IdempotencyError::TooMany(MAX_KEPT))?);
        }
        let (sender, outcome) = watch::channel(None);
        entries.push_back(Entry {
            key: asked.key.clone(),
            request: asked.request,
            since: now,
            outcome: outcome.clone(),
        });
        Ok(Entered::First(sender, outcome))
    }

    /// Removes the entry of this outcome.
    fn forget(&self, asked: &Asked, outcome: &Outcome) {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entries) = table.get_mut(&asked.owner) {
            entries.retain(|entry| !entry.outcome.same_channel(outcome));
        }
    }
}

/// Serves a create with an idempotency key. If another node forwarded it, that node's table has the entry.
pub(super) async fn layer(
    State((app, table)): State<(App, Arc<Table>)>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let is_forwarded = request.extensions().get::<Arc<Peer>>().is_some();
    let key = key_in(request.headers())?.filter(|_| !is_forwarded);
    let Some(key) = key else {
        return Ok(next.run(request).await);
    };
    let owner = app.authenticator.owner(request.headers());
    let (parts, body) = buffered(request).await?;
    let digest = Sha256::new_with_prefix(parts.uri.path()).chain_update([0_u8]);
    let asked = Asked {
        owner,
        key,
        request: digest.chain_update(&body).finalize().into(),
    };
    let request = Request::from_parts(parts, Body::from(body));
    once(&table, asked, async move { next.run(request).await }).await
}

/// The key of a request: 1 to 255 visible ASCII characters.
fn key_in(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let mut values = headers.get_all(FIELD).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    let key = value.to_str().unwrap_or_default();
    let is_valid = (1..=MAX_KEY).contains(&key.len()) && key.bytes().all(|b| b.is_ascii_graphic());
    if is_valid && values.next().is_none() {
        return Ok(Some(key.to_owned()));
    }
    let wrong = format!("Idempotency-Key is one value of 1 to {MAX_KEY} visible ASCII characters");
    Err(ApiError::BadRequest(wrong))
}

/// Runs the first request with this key. Repetitions wait for its response.
async fn once(
    table: &Arc<Table>,
    asked: Asked,
    run: impl Future<Output = Response> + Send + 'static,
) -> Result<Response, ApiError> {
    match table.enter(&asked, Instant::now())? {
        Entered::First(sender, outcome) => {
            let (table, kept) = (Arc::clone(table), outcome.clone());
            tasks::spawn(traces::carry(async move {
                let Ok(answer) = read(run.await).await else {
                    return;
                };
                if !answer.status.is_success() {
                    table.forget(&asked, &kept);
                }
                sender.send_replace(Some(answer));
            }));
            Ok(answered(outcome).await?.into_response())
        }
        Entered::Again(outcome) => {
            let answer = tokio::time::timeout(WAIT, answered(outcome)).await;
            let answer = answer.map_err(|_| IdempotencyError::InProgress)??;
            let mut response = answer.into_response();
            let replayed = HeaderValue::from_static("true");
            response.headers_mut().insert(REPLAYED, replayed);
            Ok(response)
        }
    }
}

async fn answered(mut outcome: Outcome) -> Result<Answer, IdempotencyError> {
    let answer = outcome.wait_for(Option::is_some).await;
    let answer = answer.ok().and_then(|answer| answer.clone());
    answer.ok_or(IdempotencyError::OutcomeUnknown)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use hyper::StatusCode;
    use tokio::sync::oneshot;

    use super::*;

    fn asked(owner: &str, key: &str, request: u8) -> Asked {
        Asked {
            owner: Some(owner.to_owned()),
            key: key.to_owned(),
            request: [request; 32],
        }
    }

    /// A handler of creates that responds with the number of creates so far.
    #[derive(Clone, Default)]
    struct Creates(Arc<Table>, Arc<AtomicUsize>);

    impl Creates {
        async fn create(&self, asked: Asked, status: u16) -> Result<String, u16> {
            let count = Arc::clone(&self.1);
            let run = async move {
                let number = count.fetch_add(1, Ordering::SeqCst) + 1;
                (StatusCode::from_u16(status).unwrap(), number.to_string()).into_response()
            };
            text(once(&self.0, asked, run).await).await
        }
    }

    async fn text(answered: Result<Response, ApiError>) -> Result<String, u16> {
        let response = answered.map_err(|why| why.status().as_u16())?;
        let answer = read(response).await.unwrap();
        Ok(String::from_utf8(answer.body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn a_repeated_create_is_answered_as_the_first_one() {
        let creates = Creates::default();
        for _ in 0..3 {
            assert_eq!(creates.create(asked("a", "k", 1), 201).await.unwrap(), "1");
        }
        assert_eq!(creates.create(asked("a", "k", 2), 201).await, Err(409));
        assert_eq!(creates.create(asked("a", "l", 1), 201).await.unwrap(), "2");
        // With another API key.
        assert_eq!(creates.create(asked("b", "k", 2), 201).await.unwrap(), "3");
    }

    #[tokio::test]
    async fn only_creates_that_succeeded_are_kept() {
        let creates = Creates::default();
        for expected in ["1", "2"] {
            let failed = creates.create(asked("a", "k", 1), 429).await;
            assert_eq!(failed.unwrap(), expected);
        }
        assert_eq!(creates.create(asked("a", "k", 2), 201).await.unwrap(), "3");
        assert_eq!(creates.create(asked("a", "k", 2), 429).await.unwrap(), "3");
    }

    #[tokio::test]
    async fn a_repetition_waits_for_a_create_whose_client_has_left() {
        let table = Arc::new(Table::default());
        let (finish, finished) = oneshot::channel::<()>();
        let first = once(&table, asked("a", "k", 1), async move {
            finished.await.unwrap();
            "first".into_response()
        });
        // The first client disconnects after the create has started.
        tokio::select! {
            biased;
            _ = first => panic!("it was not finished"),
            () = tokio::task::yield_now() => {}
        }
        let again = once(&table, asked("a", "k", 1), async {
            "second".into_response()
        });
        let (again, sent) = tokio::join!(again, async { finish.send(()) });
        sent.unwrap();
        assert_eq!(text(again).await.unwrap(), "first");
    }

    #[tokio::test]
    async fn the_outcome_of_a_create_without_an_answer_is_unknown() {
        let table = Arc::new(Table::default());
        for _ in 0..2 {
            let answer = once(&table, asked("a", "k", 1), bug()).await;
            assert_eq!(text(answer).await, Err(422));
        }
    }

    async fn bug() -> Response {
        panic!("a bug")
    }

    #[test]
    fn answers_expire_and_the_oldest_make_room() {
        let (table, start) = (Table::default(), Instant::now());
        let is_first = |key: &str, now| {
            matches!(
                table.enter(&asked("a", key, 1), now),
                Ok(Entered::First(..))
            )
        };
        assert!(is_first("0", start));
        // The match dropped the sender, so no request is in progress.
        assert!(!is_first("0", start + WINDOW - Duration::from_secs(1)));
        assert!(is_first("0", start + WINDOW));
        for key in 1..MAX_KEPT {
            assert!(is_first(&key.to_string(), start + WINDOW));
        }
        assert!(!is_first("0", start + WINDOW));
        assert!(is_first("new", start + WINDOW));
        assert!(is_first("0", start + WINDOW), "the oldest one is gone");
        assert!(!is_first("2", start + WINDOW));
    }

    #[test]
    fn creates_in_progress_make_no_room() {
        let (table, now) = (Table::default(), Instant::now());
        let enter = |key: usize| table.enter(&asked("a", &key.to_string(), 1), now);
        let held: Vec<_> = (0..MAX_KEPT).map(|key| enter(key).ok()).collect();
        assert!(matches!(enter(MAX_KEPT), Err(IdempotencyError::TooMany(_))));
        drop(held);
        assert!(enter(MAX_KEPT).is_ok());
    }

    #[test]
    fn keys_are_short_visible_text() {
        let key = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(FIELD, HeaderValue::from_str(value).unwrap());
            }
            key_in(&headers)
        };
        assert_eq!(key(&[]).unwrap(), None);
        let longest = "k".repeat(MAX_KEY);
        assert_eq!(key(&[&longest]).unwrap(), Some(longest.clone()));
        let too_long = format!("{longest}k");
        for wrong in [&[""][..], &["a b"], &[&*too_long], &["a", "a"]] {
            assert!(key(wrong).is_err(), "{wrong:?}");
        }
    }
}
