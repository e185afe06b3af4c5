//! Life-cycle events of sandboxes, and the webhooks that receive them.
//!
//! A webhook sends the metadata of every sandbox to a URL, so the scopes of sandboxes apply.

use axum::{extract::State, routing::MethodFilter};
use envd::Timestamp;
use hyper::StatusCode;
use model::clock;
use rest::{
    DeliveryStats, DeliveryStatus, LifecycleEvent, NewWebhook, Webhook, WebhookDeliveries,
    WebhookUpdate,
};

use super::{
    app::{App, on_thread},
    body::{OfSandbox, SecretBody, Segment},
    endpoint::{Access, Endpoint},
    error::ApiError,
    paging::{Order, Page, Position},
    query::Query,
    spread::Spread::{BySandbox, Own},
};
use crate::{
    auth::Scope,
    events::{Events, HookError, Kind, MAX_LISTED, Wanted, WantedAttempts},
    json::Json,
};

const READ: Access = Access::Key(Scope::SandboxesRead);
const WRITE: Access = Access::Key(Scope::SandboxesWrite);
/// Default number of events in a response.
const LISTED: usize = 10;
/// Default number of events with deliveries in a response.
const DELIVERIES: usize = 25;
const DAY_NS: u64 = 24 * 3600 * 1_000_000_000;

pub(super) fn endpoints() -> Vec<Endpoint> {
    let (get, post, patch) = (MethodFilter::GET, MethodFilter::POST, MethodFilter::PATCH);
    let (all, one) = ("/events/webhooks", "/events/webhooks/{id}");
    vec![
        Own.at(get, "/events/sandboxes", READ, list),
        BySandbox.at(get, "/events/sandboxes/{id}", READ, list_of_sandbox),
        Own.at(get, all, READ, webhooks),
        Own.at(post, all, WRITE, create),
        Own.at(get, one, READ, webhook),
        Own.at(patch, one, WRITE, update),
        Own.at(MethodFilter::DELETE, one, WRITE, remove),
        Own.at(get, "/events/webhooks/{id}/deliveries", READ, deliveries),
        Own.at(get, "/events/webhooks/{id}/stats", READ, stats),
    ]
}

type Listed = Result<Json<Vec<LifecycleEvent>>, ApiError>;

async fn list(State(app): State<App>, query: Query) -> Listed {
    listed(&app.events, None, &query).await
}

/// Also works for sandboxes that have ended.
async fn list_of_sandbox(State(app): State<App>, OfSandbox(id): OfSandbox, query: Query) -> Listed {
    listed(&app.events, Some(id.to_string()), &query).await
}

async fn listed(events: &Events, sandbox: Option<String>, query: &Query) -> Listed {
    let wanted = wanted(sandbox, query)?;
    let events = events.list(wanted).await;
    Ok(Json(events.map_err(ApiError::Events)?))
}

fn wanted(sandbox: Option<String>, query: &Query) -> Result<Wanted, ApiError> {
    let limit = query.number("limit")?.unwrap_or(LISTED);
    if !(1..=MAX_LISTED).contains(&limit) {
        let why = format!("limit is 1 to {MAX_LISTED}");
        return Err(ApiError::BadRequest(why));
    }
    Ok(Wanted {
        sandbox,
        kinds: kinds(query, "types")?,
        offset: query.number("offset")?.unwrap_or(0),
        limit,
        is_ascending: query.flag("orderAsc")?,
    })
}

/// The event types in a parameter.
fn kinds(query: &Query, key: &str) -> Result<Vec<String>, ApiError> {
    let kinds = query.list(key);
    if let Some(unknown) = kinds.iter().find(|name| Kind::of(name).is_none()) {
        let shown: String = unknown.chars().take(64).collect();
        let why = format!("{shown:?} is not a type of events");
        return Err(ApiError::BadRequest(why));
    }
    Ok(kinds.into_iter().map(str::to_owned).collect())
}

async fn webhooks(State(app): State<App>) -> Json<Vec<Webhook>> {
    Json(app.events.webhooks())
}

async fn webhook(State(app): State<App>, Segment(id): Segment) -> Result<Json<Webhook>, ApiError> {
    Ok(Json(app.events.webhook(&id)?))
}

async fn create(
    State(app): State<App>,
    SecretBody(body): SecretBody<NewWebhook>,
) -> Result<(StatusCode, Json<Webhook>), ApiError> {
    let made = change(&app, move |events| events.create(body)).await?;
    Ok((StatusCode::CREATED, Json(made)))
}

async fn update(
    State(app): State<App>,
    Segment(id): Segment,
    SecretBody(body): SecretBody<WebhookUpdate>,
) -> Result<Json<Webhook>, ApiError> {
    let updated = change(&app, move |events| events.update(&id, body));
    Ok(Json(updated.await?))
}

async fn remove(State(app): State<App>, Segment(id): Segment) -> Result<StatusCode, ApiError> {
    change(&app, move |events| events.delete(&id)).await?;
    Ok(StatusCode::OK)
}

async fn deliveries(
    State(app): State<App>,
    Segment(id): Segment,
    query: Query,
) -> Result<Json<WebhookDeliveries>, ApiError> {
    let order = if query.flag("orderAsc")? {
        Order::Asc
    } else {
        Order::Desc
    };
    let page = Page::with(&query, DELIVERIES, order, "cursor")?;
    let wanted = WantedAttempts {
        statuses: statuses(&query)?,
        kinds: kinds(&query, "eventType")?,
        ..range(&query)?
    };
    let groups = app.events.deliveries(&id, &wanted)?.into_iter();
    let (shown, next_cursor) = page.cut(groups.collect(), |(number, group)| Position {
        at: *number,
        id: group.event_id.clone(),
    });
    Ok(Json(WebhookDeliveries {
        data: shown.into_iter().map(|(_, group)| group).collect(),
        next_cursor,
    }))
}

/// Covers the last day, unless the query sets another range.
async fn stats(
    State(app): State<App>,
    Segment(id): Segment,
    query: Query,
) -> Result<Json<DeliveryStats>, ApiError> {
    let mut wanted = range(&query)?;
    let yesterday = clock::unix_ns().saturating_sub(DAY_NS);
    wanted.start_ns = wanted.start_ns.or(Some(yesterday));
    Ok(Json(app.events.stats(&id, &wanted)?))
}

fn range(query: &Query) -> Result<WantedAttempts, ApiError> {
    Ok(WantedAttempts {
        start_ns: query.time("start")?.map(Timestamp::unix_ns),
        end_ns: query.time("end")?.map(Timestamp::unix_ns),
        ..WantedAttempts::default()
    })
}

fn statuses(query: &Query) -> Result<Vec<DeliveryStatus>, ApiError> {
    let names = query.list("deliveryStatus").into_iter();
    let statuses = names.map(|name| match name {
        "success" => Ok(DeliveryStatus::Success),
        "failed" => Ok(DeliveryStatus::Failed),
        other => Err(ApiError::BadRequest(format!(
            "deliveryStatus contains {other:?}: use success or failed"
        ))),
    });
    statuses.collect()
}

/// Runs a change on a blocking thread, because it waits for the disk.
async fn change<T: Send + 'static>(
    app: &App,
    change: impl FnOnce(&Events) -> Result<T, HookError> + Send + 'static,
) -> Result<T, ApiError> {
    let events = app.events.clone();
    Ok(on_thread(move || change(&events)).await??)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_and_types_of_a_listing_are_checked() {
        let of = |query: &str| wanted(None, &Query::parse(query));
        let default = of("").unwrap();
        assert_eq!((default.limit, default.offset), (10, 0));
        assert!(!default.is_ascending && default.kinds.is_empty());
        let some = of(
            "types=sandbox.lifecycle.killed&types=sandbox.network.refused&limit=100&offset=3&orderAsc=true",
        );
        let some = some.unwrap();
        assert_eq!((some.kinds.len(), some.limit, some.offset), (2, 100, 3));
        assert!(some.is_ascending);
        for wrong in [
            "limit=0",
            "limit=101",
            "types=x",
            "offset=-1",
            "orderAsc=yes",
        ] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
    }
}
