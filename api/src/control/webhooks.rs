//! Events in the lives of sandboxes, and the webhooks that get them.
//!
//! A webhook sends the metadata of every sandbox to a URL, so the scopes of sandboxes apply.

use api_types::rest::{LifecycleEvent, NewWebhook, Webhook, WebhookUpdate};
use axum::{Json, extract::State, routing::MethodFilter};
use hyper::StatusCode;

use super::{
    Access, ApiError, App, Endpoint,
    body::{OfSandbox, SecretBody, Segment},
    on_thread,
    query::Query,
};
use crate::{
    auth::Scope,
    events::{Events, HookError, Kind, MAX_LISTED, Wanted},
};

const READ: Access = Access::Key(Scope::SandboxesRead);
const WRITE: Access = Access::Key(Scope::SandboxesWrite);
/// Events of an answer if the client names no number.
const LISTED: usize = 10;

pub(super) fn endpoints() -> Vec<Endpoint> {
    let (get, post, patch) = (MethodFilter::GET, MethodFilter::POST, MethodFilter::PATCH);
    let (all, one) = ("/events/webhooks", "/events/webhooks/{id}");
    vec![
        Endpoint::new(get, "/events/sandboxes", READ, list),
        Endpoint::new(get, "/events/sandboxes/{id}", READ, list_of_sandbox),
        Endpoint::new(get, all, READ, webhooks),
        Endpoint::new(post, all, WRITE, create),
        Endpoint::new(get, one, READ, webhook),
        Endpoint::new(patch, one, WRITE, update),
        Endpoint::new(MethodFilter::DELETE, one, WRITE, remove),
    ]
}

type Listed = Result<Json<Vec<LifecycleEvent>>, ApiError>;

async fn list(State(app): State<App>, query: Query) -> Listed {
    listed(&app.events, None, &query).await
}

/// Also of a sandbox that has ended.
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
    let kinds = query.list("types");
    if let Some(unknown) = kinds.iter().find(|name| Kind::of(name).is_none()) {
        let shown: String = unknown.chars().take(64).collect();
        let why = format!("{shown:?} is not a type of events");
        return Err(ApiError::BadRequest(why));
    }
    Ok(Wanted {
        sandbox,
        kinds: kinds.into_iter().map(str::to_owned).collect(),
        offset: query.number("offset")?.unwrap_or(0),
        limit,
        is_ascending: query.get("orderAsc") == Some("true"),
    })
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

/// Runs a change on a thread, because it waits for the disk.
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
        for wrong in ["limit=0", "limit=101", "types=x", "offset=-1"] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
    }
}
