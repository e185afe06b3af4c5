//! Deliveries: one batch at a time per webhook, with concurrent deliveries in a batch, and at most [`AT_ONCE`] for all
//! webhooks. The webhook's progress is recorded after each batch.

use std::{
    io::ErrorKind,
    sync::Arc,
    time::{Duration, Instant},
};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use envd::Timestamp;
use model::hex;
use netisolation::ForbiddenAddresses;
use pool::UnixMs;
use rest::{DeliveryError, DeliveryStatus, LifecycleEvent, WebhookDelivery};
use ring::hmac;
use sha2::{Digest, Sha256};
use tasks::{boxed, on_thread};
use tokio::{sync::Semaphore, task::JoinSet};
use tracing::{debug, warn};

use super::{Entry, Events, drawn_uuid, hooks::Hook};
use crate::{
    registry::note::now,
    uuid::uuid,
    webhook::{JSON, PostError, Webhook},
};

const BATCH: usize = 16;
const AT_ONCE: usize = 16;
/// Number of entries that do not concern a webhook after which its progress is recorded nevertheless.
const SKIPPED: u64 = 256;

/// Pauses between the tries of a delivery.
#[derive(Clone, Debug)]
pub(super) struct Pauses(pub(super) Vec<Duration>);

impl Default for Pauses {
    /// As E2B: three tries, 10 s apart.
    fn default() -> Self {
        Self(vec![Duration::from_secs(10); 2])
    }
}

/// A completed batch: the webhook, and the last entry of the batch.
struct Done {
    hook: String,
    number: u64,
}

/// Delivers events until aborted.
pub(super) async fn run(events: Events, forbidden: ForbiddenAddresses, pauses: Pauses) {
    let permits = Arc::new(Semaphore::new(AT_ONCE));
    let mut batches: JoinSet<Done> = JoinSet::new();
    let mut busy: Vec<String> = Vec::new();
    loop {
        for (hook, batch, number) in due(&events, &busy) {
            if batch.is_empty() {
                events.hooks().done(&hook.id, number);
                continue;
            }
            busy.push(hook.id.clone());
            let (events, permits) = (events.clone(), Arc::clone(&permits));
            let (forbidden, pauses) = (forbidden.clone(), pauses.clone());
            batches.spawn(boxed(async move {
                let mut posts = JoinSet::new();
                for entry in batch {
                    let delivery = Delivery {
                        events: events.clone(),
                        hook: hook.clone(),
                        forbidden: forbidden.clone(),
                    };
                    let post = deliver(delivery, entry, Arc::clone(&permits), pauses.clone());
                    posts.spawn(boxed(post));
                }
                posts.join_all().await;
                Done {
                    hook: hook.id,
                    number,
                }
            }));
        }
        tokio::select! {
            () = events.0.news.notified() => {}
            Some(ended) = batches.join_next() => match ended {
                Ok(Done { hook, number }) => {
                    busy.retain(|id| *id != hook);
                    events.hooks().done(&hook, number);
                }
                // Only if this task is aborted, or because of a bug.
                Err(error) => warn!(%error, "a batch of deliveries failed"),
            },
        }
    }
}

/// For each webhook that is behind and not busy: the entries to deliver now, and the number of the last entry that is
/// then done.
fn due(events: &Events, busy: &[String]) -> Vec<(Hook, Vec<Arc<Entry>>, u64)> {
    let latest = events.latest();
    let hooks = events.hooks();
    let behind = hooks
        .all()
        .filter(|hook| hook.enabled && hook.done < latest && !busy.contains(&hook.id));
    let ring = events.ring();
    let mut due = Vec::new();
    for hook in behind {
        let first = ring.front().map_or(latest + 1, |entry| entry.number);
        let missed = first.saturating_sub(hook.done + 1);
        if missed > 0 {
            warn!(
                webhook = hook.id,
                missed, "a webhook is too far behind: skipping the oldest events"
            );
            let counts = &events.0.counts.missed;
            counts.fetch_add(missed, std::sync::atomic::Ordering::Relaxed);
        }
        let (mut batch, mut number) = (Vec::new(), hook.done.max(first - 1));
        for entry in ring.iter().filter(|entry| entry.number > hook.done) {
            if hook.wants(&entry.event.kind) {
                if batch.len() == BATCH {
                    break;
                }
                batch.push(Arc::clone(entry));
            }
            number = entry.number;
        }
        if !batch.is_empty() || missed > 0 || number - hook.done >= SKIPPED {
            due.push((hook.clone(), batch, number));
        }
    }
    due
}

struct Delivery {
    events: Events,
    hook: Hook,
    forbidden: ForbiddenAddresses,
}

async fn deliver(delivery: Delivery, entry: Arc<Entry>, permits: Arc<Semaphore>, pauses: Pauses) {
    use std::sync::atomic::Ordering::Relaxed;
    let Delivery {
        events,
        hook,
        forbidden,
    } = delivery;
    let counts = &events.0.counts;
    let (Ok(body), Ok(url)) = (
        serde_json::to_vec(&entry.event),
        hook.url.parse::<Webhook>(),
    ) else {
        return;
    };
    let (body, url) = (Arc::new(body), Arc::new(url));
    let shown = String::from_utf8_lossy(&body).into_owned();
    let mut pauses = pauses.0.into_iter();
    loop {
        let Ok(permit) = permits.acquire().await else {
            return;
        };
        let (url, body, forbidden) = (Arc::clone(&url), Arc::clone(&body), forbidden.clone());
        let headers = headers(&hook, &entry.event.id, now() / 1000, &body);
        let (at, began) = (now(), Instant::now());
        let posted =
            on_thread(move || url.post(JSON, &headers, &body, |to| forbidden.check_connection(to)));
        let posted = posted.await;
        if let Ok(posted) = &posted {
            let took = began.elapsed();
            let attempt = attempt(&hook, &entry.event, &shown, posted, (at, took));
            events.attempted(entry.number, attempt);
        }
        let why = match posted {
            Ok(Ok(_)) => {
                debug!(webhook = hook.id, event = entry.event.id, "delivered");
                counts.delivered.fetch_add(1, Relaxed);
                return;
            }
            Ok(Err(PostError::Refused(why))) => {
                counts.given_up.fetch_add(1, Relaxed);
                warn!(
                    webhook = hook.id,
                    why = model::chain(&why),
                    "cannot deliver an event to a webhook: unless network.denied contains its address, the operator can open it in network.webhook_exceptions"
                );
                return;
            }
            Ok(Err(why)) => why.to_string(),
            Err(why) => why.to_string(),
        };
        drop(permit);
        counts.failed.fetch_add(1, Relaxed);
        let Some(pause) = pauses.next() else {
            counts.given_up.fetch_add(1, Relaxed);
            warn!(
                webhook = hook.id,
                event = entry.event.id,
                why,
                "cannot deliver an event to a webhook: giving up"
            );
            return;
        };
        tokio::time::sleep(pause).await;
    }
}

/// An attempt with its start and duration. Does not contain addresses that a client's host name resolves to.
fn attempt(
    hook: &Hook,
    event: &LifecycleEvent,
    body: &str,
    posted: &Result<u16, PostError>,
    (at, took): (UnixMs, Duration),
) -> WebhookDelivery {
    let (class, message) = match posted {
        Ok(_) => (None, None),
        Err(PostError::Refused(_)) => (
            Some(DeliveryError::RequestError),
            Some("an address of the host is in a denied range".to_owned()),
        ),
        Err(why @ PostError::Answered(_)) => {
            (Some(DeliveryError::HttpError), Some(why.to_string()))
        }
        Err(PostError::Io(why)) => {
            let is_late = matches!(why.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock);
            let (class, what) = if is_late {
                (
                    DeliveryError::Timeout,
                    "the receiver did not respond in time",
                )
            } else {
                (DeliveryError::TransportError, "the connection failed")
            };
            (Some(class), Some(what.to_owned()))
        }
    };
    let headers = serde_json::json!({
        "Content-Type": JSON,
        "e2b-webhook-id": hook.id,
        "e2b-delivery-id": delivery_id(&hook.id, &event.id),
        "e2b-signature-version": "v1",
    });
    WebhookDelivery {
        id: drawn_uuid(),
        team_id: event.sandbox_team_id.clone(),
        webhook_id: hook.id.clone(),
        event_id: event.id.clone(),
        sandbox_id: event.sandbox_id.clone(),
        event_type: event.kind.clone(),
        status: match posted {
            Ok(_) => DeliveryStatus::Success,
            Err(_) => DeliveryStatus::Failed,
        },
        duration_ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
        request_body: body.to_owned(),
        request_headers: headers.to_string(),
        request_url: hook.url.clone(),
        response_http_status_code: match posted {
            Ok(status) => Some(*status),
            Err(why) => why.status(),
        },
        error_class: class,
        error_message: message,
        timestamp: Timestamp::from_unix_ms(at),
    }
}

/// The same in repeated deliveries, also after a restart.
fn delivery_id(hook: &str, event: &str) -> String {
    let hash = Sha256::new_with_prefix(hook).chain_update(event);
    uuid(&hex(&hash.finalize()))
}

/// The header lines of a delivery.
pub(super) fn headers(hook: &Hook, event: &str, unix_s: u64, body: &[u8]) -> String {
    let (id, secret) = (&hook.id, hook.secret.as_bytes());
    let sum = |parts: [&[u8]; 2]| {
        let mut hash = Sha256::new();
        parts.into_iter().for_each(|part| hash.update(part));
        hash.finalize()
    };
    let delivery = delivery_id(id, event);
    let signature = URL_SAFE_NO_PAD.encode(sum([secret, body]));
    let mut signed = format!("{unix_s}.").into_bytes();
    signed.extend_from_slice(body);
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
    let mac = hex(hmac::sign(&key, &signed).as_ref());
    format!(
        "e2b-webhook-id: {id}\r\ne2b-delivery-id: {delivery}\r\ne2b-signature-version: v1\r\n\
         e2b-signature: {signature}\r\nX-Cube-Webhook-Id: {id}\r\nX-Cube-Webhook-Timestamp: {unix_s}\r\n\
         X-Cube-Webhook-Signature: sha256={mac}\r\n"
    )
}
