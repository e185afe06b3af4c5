//! Secrets: values that sandbox rules add to outbound requests. No response contains a value.
//!
//! A key that may create sandboxes can use every secret in a rule, and can thereby send it to any server that the
//! secret's hosts allow. Listing or changing secrets requires additional scopes.
//!
//! The response to a change is sent when the other nodes of the cluster have it, or after three seconds
//! ([`crate::peers`]).

use axum::{extract::State, routing::MethodFilter};
use envd::Timestamp;
use hyper::{HeaderMap, StatusCode};
use rest::{NewSecret, Secret as OnWire, SecretUpdate};
use zeroize::Zeroizing;

use super::{
    app::{App, on_thread},
    body::{SecretBody, Segment},
    endpoint::{Access, Endpoint},
    error::ApiError,
    paging::{Page, Position, put_token},
    query::Query,
    spread::Spread,
};
use crate::{
    auth::Scope,
    json::Json,
    registry::note::now,
    secrets::{Secret, SecretError, Secrets},
};

const READ: Access = Access::Key(Scope::SecretsRead);
const WRITE: Access = Access::Key(Scope::SecretsWrite);

pub(super) fn endpoints() -> Vec<Endpoint> {
    let (get, post, delete) = (MethodFilter::GET, MethodFilter::POST, MethodFilter::DELETE);
    vec![
        Spread::Own.at(get, "/secrets", READ, list),
        Spread::Own.at(post, "/secrets", WRITE, create),
        Spread::Own.at(get, "/secrets/{id}", READ, info),
        Spread::Own.at(post, "/secrets/{id}", WRITE, update),
        Spread::Own.at(delete, "/secrets/{id}", WRITE, remove),
    ]
}

async fn list(
    State(app): State<App>,
    query: Query,
) -> Result<(HeaderMap, Json<Vec<OnWire>>), ApiError> {
    let page = Page::of(&query)?;
    let (secrets, token) = page.cut(app.secrets.list(), |secret| Position {
        at: secret.created_at_ms,
        id: secret.id.clone(),
    });
    let mut headers = HeaderMap::new();
    put_token(&mut headers, token)?;
    Ok((headers, Json(secrets.into_iter().map(on_wire).collect())))
}

async fn create(
    State(app): State<App>,
    SecretBody(body): SecretBody<NewSecret>,
) -> Result<(StatusCode, Json<OnWire>), ApiError> {
    let value = Zeroizing::new(body.value);
    let made = change(&app, move |secrets| {
        secrets.create(
            &body.name,
            &value,
            body.metadata.unwrap_or_default(),
            body.hosts.unwrap_or_default(),
            now(),
        )
    });
    let made = made.await?;
    share(&app, &made.id).await;
    Ok((StatusCode::CREATED, Json(on_wire(made))))
}

async fn info(
    State(app): State<App>,
    Segment(reference): Segment,
) -> Result<Json<OnWire>, ApiError> {
    Ok(Json(on_wire(app.secrets.get(&reference)?)))
}

async fn update(
    State(app): State<App>,
    Segment(reference): Segment,
    SecretBody(body): SecretBody<SecretUpdate>,
) -> Result<Json<OnWire>, ApiError> {
    let value = Zeroizing::new(body.value);
    let updated = change(&app, move |secrets| {
        secrets.update(&reference, &value, body.metadata, body.hosts, now())
    });
    let updated = updated.await?;
    share(&app, &updated.id).await;
    Ok(Json(on_wire(updated)))
}

async fn remove(
    State(app): State<App>,
    Segment(reference): Segment,
) -> Result<StatusCode, ApiError> {
    let removed = reference.clone();
    change(&app, move |secrets| secrets.delete(&removed, now())).await?;
    share(&app, &reference).await;
    Ok(StatusCode::NO_CONTENT)
}

/// Runs a change on a blocking thread, because it waits for the disk.
async fn change<T: Send + 'static>(
    app: &App,
    change: impl FnOnce(&Secrets) -> Result<T, SecretError> + Send + 'static,
) -> Result<T, ApiError> {
    let secrets = app.secrets.clone();
    Ok(on_thread(move || change(&secrets)).await??)
}

/// Sends a changed secret and all deletions to the other nodes.
async fn share(app: &App, id: &str) {
    if let Some(peers) = &app.peers {
        peers.push_secrets(&app.secrets.changed(id)).await;
    }
}

fn on_wire(secret: Secret) -> OnWire {
    OnWire {
        secret_id: secret.id,
        name: secret.name,
        current_version: secret.version,
        metadata: secret.metadata,
        hosts: secret.hosts,
        created_at: Timestamp::from_unix_ms(secret.created_at_ms),
        updated_at: Timestamp::from_unix_ms(secret.updated_at_ms),
    }
}
