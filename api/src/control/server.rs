//! Routes of the server itself: health, metrics, OpenAPI document, team.

use axum::{extract::State, response::IntoResponse, routing::MethodFilter};
use envd::Timestamp;
use hyper::{
    HeaderMap, StatusCode,
    header::{AUTHORIZATION, CONTENT_TYPE},
};
use rest::{ApiKey, Team};

use super::{
    app::App,
    endpoint::{Access, Endpoint},
    error::ApiError,
    openapi,
    spread::Spread,
};
use crate::{
    auth::Scope,
    json::Json,
    telemetry::{EgressStats, Tables},
};

/// Id of the only team.
pub(crate) const TEAM: &str = "00000000-0000-8000-a000-000000000001";

pub(super) fn endpoints() -> Vec<Endpoint> {
    let get = MethodFilter::GET;
    vec![
        Spread::Own.at(get, "/health", Access::Public, health),
        Spread::Own.at(get, "/openapi.json", Access::Public, document),
        Spread::Own.at(get, "/metrics", Access::Key(Scope::MetricsRead), metrics),
        Spread::Own.at(get, "/teams", Access::Key(Scope::SandboxesRead), teams),
        Spread::Own.at(get, "/api-keys", Access::Key(Scope::SandboxesRead), keys),
    ]
}

async fn health() -> StatusCode {
    StatusCode::OK
}

async fn document() -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/json")], openapi::TEXT.as_str())
}

async fn metrics(State(app): State<App>) -> Result<impl IntoResponse, ApiError> {
    let mut stats = app.pool.stats().await;
    if let Some(network) = &app.network {
        stats.network.events_lost += network.log.lost();
    }
    let egress = app.egress.as_ref().map(|egress| EgressStats {
        starts: egress.starts(),
        calls_lost: egress.calls.log.lost(),
        calls: egress.calls.counts(),
    });
    let mut tables = Tables::default();
    tables.pool(&stats);
    if let Some(egress) = &egress {
        tables.egress(egress);
    }
    tables.webhooks(&app.events.counts().named());
    if let Some(peers) = &app.peers {
        crate::peers::metrics::add(peers, &mut tables);
    }
    if let Some(moves) = &app.moves {
        moves.add_metrics(&mut tables);
    }
    let text = app.telemetry.render(tables);
    let openmetrics = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(CONTENT_TYPE, openmetrics)], text))
}

/// The only team. Its `api_key` is the key from the request.
async fn teams(headers: HeaderMap) -> Json<Vec<Team>> {
    let bearer = headers
        .get(AUTHORIZATION)
        .and_then(|value| value.to_str().ok());
    let bearer = bearer
        .and_then(|text| text.split_once(' '))
        .map(|(_, key)| key);
    let key = headers
        .get("x-api-key")
        .and_then(|value| value.to_str().ok());
    Json(vec![Team {
        team_id: TEAM.to_owned(),
        name: "cube".to_owned(),
        api_key: key.or(bearer).unwrap_or_default().trim().to_owned(),
        is_default: true,
    }])
}

/// The API keys that the server accepts, by name. Empty if it accepts requests without a key.
async fn keys(State(app): State<App>) -> Json<Vec<ApiKey>> {
    let mut keys = app.authenticator.live_keys();
    keys.sort_by(|a, b| (&a.name, &a.id).cmp(&(&b.name, &b.id)));
    let shown = keys.into_iter().map(|key| ApiKey {
        scopes: key.scopes().map(|s| s.name().to_owned()).collect(),
        id: key.id,
        name: key.name,
        created_at: Timestamp::from_unix_ns(key.created_unix_s.saturating_mul(1_000_000_000)),
    });
    Json(shown.collect())
}
