//! Snapshots and forks of sandboxes.

use ::builds::owner::BuildsError;
use axum::{extract::State, routing::MethodFilter};
use hyper::{HeaderMap, StatusCode};
use pool::{TemplateInfo, TemplateKind};
use rest::{ForkRequest, ForkResult, SnapshotInfo, SnapshotRequest};

use super::{
    app::App,
    body::{MaybeBody, OfSandbox},
    endpoint::{Access, Endpoint},
    error::ApiError,
    paging::{Page, Position, put_token},
    query::Query,
    spread::{
        Merge, Merging,
        Spread::{BySandbox, List},
    },
    templates,
    timeout::timeout,
    wire,
};
use crate::{auth::Scope, json::Json};

const WRITE: Access = Access::Key(Scope::SandboxesWrite);
const READ: Access = Access::Key(Scope::TemplatesRead);

/// Maximum number of forks in one request.
const MAX_FORKS: i64 = 100;
/// Default timeout of a fork in seconds.
const FORK_TIMEOUT_S: u32 = 15;

pub(super) fn endpoints() -> Vec<Endpoint> {
    let (get, post) = (MethodFilter::GET, MethodFilter::POST);
    vec![
        BySandbox.at(post, "/sandboxes/{id}/snapshots", WRITE, snapshot),
        BySandbox.at(post, "/sandboxes/{id}/fork", WRITE, fork),
        List(Merge::Pages).at(get, "/snapshots", READ, list),
    ]
}

fn info(template: &TemplateInfo) -> SnapshotInfo {
    SnapshotInfo {
        snapshot_id: template.id.clone(),
        names: template.names.clone(),
        source_sandbox_id: template.source.as_ref().map(ToString::to_string),
        created_at: Some(templates::created(template)),
        stored_bytes: wire::stored_bytes(template),
    }
}

async fn snapshot(
    State(app): State<App>,
    OfSandbox(id): OfSandbox,
    MaybeBody(body): MaybeBody<SnapshotRequest>,
) -> Result<(StatusCode, Json<SnapshotInfo>), ApiError> {
    if body.memory == Some(false) {
        let what = "memory: false: this server takes snapshots with memory only";
        return Err(ApiError::NotImplemented(what.into()));
    }
    let names = body.name.filter(|name| !name.is_empty());
    if let Some(name) = &names
        && app.builds.catalog().find_untagged(name).is_some()
    {
        return Err(BuildsError::Taken(name.clone()).into());
    }
    let names = names.into_iter().collect();
    let template = app.pool.snapshot(&id, names).await?;
    Ok((StatusCode::CREATED, Json(info(&template))))
}

async fn fork(
    State(app): State<App>,
    OfSandbox(id): OfSandbox,
    MaybeBody(body): MaybeBody<ForkRequest>,
) -> Result<(StatusCode, Json<Vec<ForkResult>>), ApiError> {
    app.check_open()?;
    let timeout_s = timeout(&app, body.timeout)?.unwrap_or(FORK_TIMEOUT_S);
    let count = fork_count(body.count)?;
    let forks = app.registry.fork(&id, count, timeout_s).await?;
    let results = forks.into_iter().map(|fork| match fork {
        Ok(view) => ForkResult {
            sandbox: Some(wire::sandbox(&app, &view)),
            error: None,
        },
        Err(error) => ForkResult {
            sandbox: None,
            error: Some(ApiError::of_create(error).body()),
        },
    });
    Ok((StatusCode::CREATED, Json(results.collect())))
}

fn fork_count(asked: Option<i64>) -> Result<u32, ApiError> {
    let asked = asked.unwrap_or(1);
    match u32::try_from(asked) {
        Ok(count) if (1..=MAX_FORKS).contains(&asked) => Ok(count),
        Ok(_) | Err(_) => Err(ApiError::BadRequest(format!(
            "count is {asked}: use 1 to {MAX_FORKS}"
        ))),
    }
}

async fn list(
    State(app): State<App>,
    merging: Merging,
    query: Query,
) -> Result<(HeaderMap, Json<Vec<SnapshotInfo>>), ApiError> {
    let page = Page::of(&query)?;
    let name = query.get("name");
    let source = query.get("sandboxID");
    let mut snapshots = app.pool.templates().await;
    snapshots.retain(|template| {
        let named = |wanted| {
            let mut names = template.names.iter();
            names.any(|n| n == wanted || wire::split_tag(n).0 == wanted)
        };
        let made_of = |wanted| {
            let source = template.source.as_ref();
            source.is_some_and(|source| source.as_str() == wanted)
        };
        template.kind == TemplateKind::Snapshot
            && name.is_none_or(named)
            && source.is_none_or(made_of)
    });
    let (snapshots, token) = page.cut(snapshots, position);
    let mut headers = HeaderMap::new();
    put_token(&mut headers, token)?;
    merging.put(&mut headers, || snapshots.iter().map(position).collect());
    Ok((headers, Json(snapshots.iter().map(info).collect())))
}

fn position(template: &TemplateInfo) -> Position {
    Position {
        at: template.created_unix_s,
        id: template.id.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_request_forks_a_sandbox_1_to_100_times() {
        assert_eq!(fork_count(None).unwrap(), 1);
        assert_eq!(fork_count(Some(100)).unwrap(), 100);
        for wrong in [0, 101, -1, i64::MAX] {
            assert!(fork_count(Some(wrong)).is_err(), "{wrong}");
        }
    }
}
