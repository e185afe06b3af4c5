//! Resource usage of sandboxes. It is measured on the host, so that measuring does not wake an idle guest.

use axum::{extract::State, routing::MethodFilter};
use rest::{SandboxMetric, SandboxesWithMetrics};

use super::{
    app::App,
    body::OfSandbox,
    endpoint::{Access, Endpoint},
    error::ApiError,
    query::Query,
    spread::{
        Merge,
        Spread::{BySandbox, List},
    },
};
use crate::{auth::Scope, json::Json};

const READ: Access = Access::Key(Scope::SandboxesRead);
/// Maximum number of sandbox ids in one request.
const MAX_IDS: usize = 100;

pub(super) fn endpoints() -> Vec<Endpoint> {
    let get = MethodFilter::GET;
    vec![
        BySandbox.at(get, "/sandboxes/{id}/metrics", READ, of_one),
        List(Merge::Metrics).at(get, "/sandboxes/metrics", READ, of_several),
    ]
}

async fn of_one(
    State(app): State<App>,
    OfSandbox(id): OfSandbox,
    query: Query,
) -> Result<Json<Vec<SandboxMetric>>, ApiError> {
    let start = query.number::<u64>("start")?.unwrap_or(0);
    let end = query.number::<u64>("end")?.unwrap_or(u64::MAX);
    if start > end {
        let wrong = format!("start {start} is later than end {end}");
        return Err(ApiError::BadRequest(wrong));
    }
    let history = app.registry.history(&id).await?;
    let samples = history.samples.into_iter();
    let within = samples.filter(|sample| (start..=end).contains(&(sample.at / 1000)));
    let metrics = within.map(|sample| sample.to_wire(&history.view.sandbox.template));
    Ok(Json(metrics.collect()))
}

/// The latest sample of each requested sandbox. Unknown sandboxes and sandboxes without samples are omitted.
async fn of_several(
    State(app): State<App>,
    query: Query,
) -> Result<Json<SandboxesWithMetrics>, ApiError> {
    let ids = query.list("sandbox_ids");
    if ids.len() > MAX_IDS {
        let wrong = format!(
            "sandbox_ids contains {} ids: at most {MAX_IDS} are allowed",
            ids.len()
        );
        return Err(ApiError::BadRequest(wrong));
    }
    let mut answer = SandboxesWithMetrics::default();
    for id in ids.into_iter().filter_map(|id| id.parse().ok()) {
        let Ok(history) = app.registry.history(&id).await else {
            continue;
        };
        if let Some(newest) = history.samples.last() {
            let metric = newest.to_wire(&history.view.sandbox.template);
            answer.sandboxes.insert(id.to_string(), metric);
        }
    }
    Ok(Json(answer))
}
