//! Template builds: request, file uploads, start, status, logs, and tags.

use std::{collections::BTreeSet, sync::Arc};

use ::builds::{
    catalog::Catalog,
    grant::Grant,
    owner::{BuildsError, RedoSpec, Requested},
    page::{self, Direction, MAX_PAGE},
    plan::At,
    record::{BuildRecord, BuildState, Reason, TemplateRecord},
    request,
};
use axum::{
    body::Body as HttpBody,
    extract::{Path, Request, State},
    routing::MethodFilter,
};
use hyper::{HeaderMap, StatusCode, Uri};
use model::clock;
use pool::TemplateKind;
use rest::{
    AssignTags, AssignedTags, BuildInfo, BuildLogEntry, BuildLogs, BuildOrder, BuildStatus,
    DeleteTags, FileUpload, NewBuild, RedoTemplate, RequestedBuild, StartBuild, StatusReason,
};

use super::{
    app::{App, Control},
    body::{Body, MaybeBody, Segment},
    endpoint::{Access, Endpoint},
    error::ApiError,
    query::Query,
    spread::{
        ServedBy::{AnyCopy, Home},
        Spread::{ByBody, ByTemplate, NewTemplate},
    },
};
use crate::{auth::Scope, json::Json, proxy};

const READ: Access = Access::Key(Scope::TemplatesRead);
const WRITE: Access = Access::Key(Scope::TemplatesWrite);

/// How long an upload URL is valid. The upload must start within this time.
const GRANT_S: u64 = 3600;
/// Number of log entries in the reason of a failure.
const REASON_ENTRIES: usize = 20;

pub(super) fn endpoints() -> Vec<Endpoint> {
    let (get, post) = (MethodFilter::GET, MethodFilter::POST);
    let (put, delete) = (MethodFilter::PUT, MethodFilter::DELETE);
    let (files, build) = (
        "/templates/{id}/files/{hash}",
        "/v2/templates/{id}/builds/{build}",
    );
    vec![
        NewTemplate.at(post, "/v3/templates", WRITE, create),
        ByTemplate(AnyCopy).at(get, files, WRITE, grant),
        // The URL that `grant` returns carries its own authorization.
        ByTemplate(Home).at(put, files, Access::Public, upload),
        ByTemplate(Home).at(post, build, WRITE, start),
        ByTemplate(Home).at(post, "/templates/{id}/redo", WRITE, redo),
        ByTemplate(AnyCopy).at(get, "/templates/{id}/order", READ, order),
        ByTemplate(AnyCopy).at(get, "/templates/{id}/builds/{build}/status", READ, status),
        ByTemplate(AnyCopy).at(get, "/templates/{id}/builds/{build}/logs", READ, logs),
        ByBody.at(post, "/templates/tags", WRITE, assign),
        ByBody.at(delete, "/templates/tags", WRITE, unassign),
    ]
}

async fn create(
    State(app): State<App>,
    Body(body): Body<NewBuild>,
) -> Result<(StatusCode, Json<RequestedBuild>), ApiError> {
    let spec = request::check_new(body)?;
    request::check_disk_limit(spec.min_free_disk, app.disk_limit)?;
    let (name, tags) = (spec.name.clone(), spec.tags.clone());
    let requested = app.builds.create(spec).await?;
    Ok(accepted(&app, requested, name, tags))
}

fn accepted(
    app: &Control,
    requested: Requested,
    name: String,
    tags: BTreeSet<String>,
) -> (StatusCode, Json<RequestedBuild>) {
    let catalog = app.builds.catalog();
    let template = catalog.templates.get(&requested.template_id);
    let answer = RequestedBuild {
        public: template.is_some_and(|template| template.public),
        tags: tags.into_iter().collect(),
        template_id: requested.template_id,
        build_id: requested.build_id,
        aliases: vec![name.clone()],
        names: vec![name],
    };
    (StatusCode::ACCEPTED, Json(answer))
}

/// Rebuilds a template from the stored order of its build. The path may contain a tag.
async fn redo(
    State(app): State<App>,
    Segment(reference): Segment,
    headers: HeaderMap,
    MaybeBody(body): MaybeBody<RedoTemplate>,
) -> Result<(StatusCode, Json<RequestedBuild>), ApiError> {
    let (word, tag) = request::split(&reference)?;
    let Ok(template) = of_builds(&app, word) else {
        return Err(match app.pool.template(&reference).await.map(|t| t.kind) {
            Some(TemplateKind::Installed) => BuildsError::OnHost(word.to_owned()).into(),
            Some(TemplateKind::Snapshot) => BuildsError::OfSandbox(word.to_owned()).into(),
            Some(TemplateKind::Built | TemplateKind::Disk) | None => {
                ApiError::no_template(&reference)
            }
        });
    };
    let registry = body.from_image_registry;
    let tag = tag.unwrap_or(request::DEFAULT_TAG);
    if let Some((former, _)) = template.tagged(tag) {
        request::check_disk_limit(former.min_free_disk, app.disk_limit)?;
    }
    let spec = RedoSpec {
        template_id: template.id.clone(),
        tag: tag.to_owned(),
        skip_cache: body.skip_cache,
        credentials: registry.map(request::credentials).transpose()?,
        owner: app.authenticator.owner(&headers),
    };
    let requested = app.builds.redo(spec).await?;
    let tags = template
        .tagged(tag)
        .map(|(former, _)| template.tags_of(&former.id));
    Ok(accepted(
        &app,
        requested,
        template.name.clone(),
        tags.unwrap_or_default(),
    ))
}

/// Returns the order that a template was built from: of the build with the tag in the path, or without a tag, of the
/// newest build if none has the default tag.
async fn order(
    State(app): State<App>,
    Segment(reference): Segment,
) -> Result<Json<BuildOrder>, ApiError> {
    let (word, tag) = request::split(&reference)?;
    let Ok(template) = of_builds(&app, word) else {
        return Err(match app.pool.template(&reference).await {
            Some(_) => BuildsError::NotBuilt(reference).into(),
            None => ApiError::no_template(&reference),
        });
    };
    let named = template.tagged(tag.unwrap_or(request::DEFAULT_TAG));
    let build = match (named, tag) {
        (Some((build, _)), _) => Some(build),
        (None, None) => template.builds.last(),
        (None, Some(_)) => None,
    };
    let build = build.ok_or_else(|| ApiError::no_template(&reference))?;
    let id = Requested {
        template_id: template.id.clone(),
        build_id: build.id.clone(),
    };
    let kept = app.builds.order(&id).await.map_err(BuildsError::Store)?;
    let kept = kept.ok_or_else(|| no_order(&build.state, reference))?;
    Ok(Json(BuildOrder {
        template_id: id.template_id,
        build_id: id.build_id,
        cpu_count: build.vcpus,
        memory_mb: build.memory.0 >> 20,
        min_free_disk_mb: build.min_free_disk.0 >> 20,
        had_credentials: kept.had_credentials,
        start: kept.request(),
    }))
}

/// The reason why a build in this state has no order.
fn no_order(state: &BuildState, reference: String) -> BuildsError {
    let why = match state {
        BuildState::Waiting => "it was not started",
        BuildState::Failed(_) => "it has failed",
        BuildState::Ready { template: None } => "a newer build has replaced it",
        BuildState::Started | BuildState::Ready { template: Some(_) } => {
            return BuildsError::NoOrder(reference);
        }
    };
    BuildsError::OrderGone(reference, why)
}

/// Finds a built template by the id or name in a path or a body.
pub(super) fn of_builds(app: &Control, word: &str) -> Result<Arc<TemplateRecord>, ApiError> {
    let catalog = app.builds.catalog();
    let found = catalog.find(word).cloned();
    found.ok_or_else(|| ApiError::no_template(word))
}

async fn grant(
    State(app): State<App>,
    Path((id, hash)): Path<(String, String)>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<(StatusCode, Json<FileUpload>), ApiError> {
    let template = of_builds(&app, &id)?;
    let grant = Grant {
        template_id: template.id.clone(),
        hash: request::check_hash(hash)?,
        expires_unix_s: now_s() + GRANT_S,
        max_bytes: app.builds.uploads.max_archive(),
    };
    let host = proxy::host(&uri, &headers).map_err(|why| ApiError::BadRequest(why.to_string()))?;
    let forwarded = headers.get("x-forwarded-proto");
    let is_https = app.is_tls || forwarded.is_some_and(|scheme| scheme == "https");
    let scheme = if is_https { "https" } else { "http" };
    let (id, hash) = (&grant.template_id, &grant.hash);
    let query = app.builds.authority.query(&grant);
    let answer = FileUpload {
        present: app.builds.uploads.has(id, hash),
        url: format!("{scheme}://{host}/templates/{id}/files/{hash}?{query}"),
    };
    Ok((StatusCode::CREATED, Json(answer)))
}

async fn upload(
    State(app): State<App>,
    Path((id, hash)): Path<(String, String)>,
    request: Request<HttpBody>,
) -> Result<StatusCode, ApiError> {
    let query = request.uri().query().unwrap_or_default();
    let grant = app.builds.authority.verify(&id, &hash, query, now_s())?;
    // It was deleted in the meantime.
    of_builds(&app, &grant.template_id)?;
    app.builds
        .uploads
        .receive(&grant, request.into_body())
        .await?;
    Ok(StatusCode::OK)
}

async fn start(
    State(app): State<App>,
    Path((template_id, build_id)): Path<(String, String)>,
    headers: HeaderMap,
    Body(body): Body<StartBuild>,
) -> Result<StatusCode, ApiError> {
    let mut spec = request::check_start(body)?;
    spec.owner = app.authenticator.owner(&headers);
    let build = Requested {
        template_id,
        build_id,
    };
    app.builds.start(build, spec).await?;
    Ok(StatusCode::ACCEPTED)
}

/// A build as the catalog has it.
struct Found {
    catalog: Arc<Catalog>,
    template: Arc<TemplateRecord>,
    id: String,
}

impl Found {
    fn of(app: &Control, template: &str, build: String) -> Result<Self, ApiError> {
        let catalog = app.builds.catalog();
        let template = catalog.find(template).cloned();
        let template = template.ok_or_else(|| BuildsError::NoBuild(build.clone()))?;
        if template.build(&build).is_none() {
            return Err(BuildsError::NoBuild(build.chars().take(64).collect()).into());
        }
        Ok(Self {
            catalog,
            template,
            id: build,
        })
    }

    fn record(&self) -> Option<&BuildRecord> {
        self.template.build(&self.id)
    }

    /// Reads the current log. It is at least as new as the record, so the log of an ended build is complete.
    async fn entries<T>(
        &self,
        app: &Control,
        read: impl FnOnce(&::builds::log::BuildLog) -> T,
    ) -> Result<T, ApiError> {
        let build = Requested {
            template_id: self.template.id.clone(),
            build_id: self.id.clone(),
        };
        let log = app.builds.log(&self.catalog, &build).await;
        Ok(read(&log.map_err(BuildsError::Store)?))
    }
}

async fn status(
    State(app): State<App>,
    Path((template, build)): Path<(String, String)>,
    query: Query,
) -> Result<Json<BuildInfo>, ApiError> {
    let offset = query.number("logsOffset")?.unwrap_or(0);
    let (limit, level) = (limit(&query)?, query.level()?);
    let found = Found::of(&app, &template, build)?;
    let state = found.record().map(|record| record.state.clone());
    let reason = match &state {
        Some(BuildState::Failed(reason)) => Some(reason),
        _ => None,
    };
    let (log_entries, reason) = found
        .entries(&app, |log| {
            let page = log.read(|all| page::from_offset(all, offset, limit, level));
            let shown = reason.map(|reason| StatusReason {
                message: reason.message.clone(),
                step: reason.step.clone(),
                log_entries: of_failure(log, reason),
            });
            (page, shown)
        })
        .await?;
    Ok(Json(BuildInfo {
        template_id: found.template.id.clone(),
        build_id: found.id.clone(),
        status: state.as_ref().map_or(BuildStatus::Error, status_of),
        logs: log_entries.iter().map(|e| e.message.clone()).collect(),
        log_entries,
        reason,
    }))
}

/// The last log entries of the failed part of a build.
fn of_failure(log: &::builds::log::BuildLog, reason: &Reason) -> Vec<BuildLogEntry> {
    let at = reason.step.as_deref().and_then(|step| match step {
        "base" => Some(At::Base),
        "finalize" => Some(At::Finalize),
        number => number.parse().ok().map(At::Step),
    });
    at.map_or_else(Vec::new, |at| log.last_of(at, REASON_ENTRIES))
}

pub(super) fn status_of(state: &BuildState) -> BuildStatus {
    match state {
        BuildState::Waiting => BuildStatus::Waiting,
        BuildState::Started => BuildStatus::Building,
        BuildState::Ready { .. } => BuildStatus::Ready,
        BuildState::Failed(_) => BuildStatus::Error,
    }
}

async fn logs(
    State(app): State<App>,
    Path((template, build)): Path<(String, String)>,
    query: Query,
) -> Result<Json<BuildLogs>, ApiError> {
    let cursor = query.number("cursor")?;
    let (limit, level) = (limit(&query)?, query.level()?);
    let direction = match query.get("direction") {
        None | Some("forward") => Direction::Forward,
        Some("backward") => Direction::Backward,
        Some(other) => {
            let wrong = format!("direction is {other:?}: use forward or backward");
            return Err(ApiError::BadRequest(wrong));
        }
    };
    let found = Found::of(&app, &template, build)?;
    let logs = found
        .entries(&app, |log| {
            log.read(|all| page::from_time(all, cursor, direction, limit, level))
        })
        .await?;
    Ok(Json(BuildLogs { logs }))
}

fn limit(query: &Query) -> Result<usize, ApiError> {
    Ok(query.number("limit")?.unwrap_or(MAX_PAGE))
}

async fn assign(
    State(app): State<App>,
    Body(body): Body<AssignTags>,
) -> Result<(StatusCode, Json<AssignedTags>), ApiError> {
    let (name, tag) = request::split(&body.target)?;
    let tag = tag.unwrap_or(request::DEFAULT_TAG);
    let template = changeable(&app, name).await?;
    let tags = request::check_tags(&template.name, body.tags)?;
    let names = tags.iter().cloned().collect();
    let assigned = app
        .builds
        .assign(template.id.clone(), tag.to_owned(), tags)
        .await;
    let assigned = assigned.map_err(|why| match why {
        BuildsError::NoTemplate(_) => ApiError::no_template(&body.target),
        other => other.into(),
    });
    let answer = AssignedTags {
        tags: names,
        build_id: assigned?,
    };
    Ok((StatusCode::CREATED, Json(answer)))
}

async fn unassign(
    State(app): State<App>,
    Body(body): Body<DeleteTags>,
) -> Result<StatusCode, ApiError> {
    let (name, tag) = request::split(&body.name)?;
    if let Some(tag) = tag {
        let wrong = format!("name has the tag {tag:?}: list it in tags");
        return Err(ApiError::BadRequest(wrong));
    }
    let template = changeable(&app, name).await?;
    let tags = request::check_tags(&template.name, body.tags)?;
    if tags.contains(request::DEFAULT_TAG) {
        let wrong = "the tag default cannot be removed: delete the template".to_owned();
        return Err(ApiError::BadRequest(wrong));
    }
    app.builds.unassign(template.id.clone(), tags).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Finds a built template by id or name. Refuses installed templates with a specific error.
pub(super) async fn changeable(app: &Control, word: &str) -> Result<Arc<TemplateRecord>, ApiError> {
    match of_builds(app, word) {
        Ok(template) => Ok(template),
        Err(unknown) => match app.pool.template(word).await {
            Some(found) if found.kind == TemplateKind::Installed => {
                Err(BuildsError::Installed(word.to_owned()).into())
            }
            Some(_) | None => Err(unknown),
        },
    }
}

fn now_s() -> u64 {
    clock::unix_ns() / 1_000_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_order_is_explained_by_the_state_of_its_build() {
        let failed = BuildState::Failed(Reason {
            message: String::new(),
            step: None,
        });
        let text = |state: &BuildState| no_order(state, "n".into()).to_string();
        assert!(text(&failed).contains("it has failed"));
        assert!(text(&BuildState::Waiting).contains("was not started"));
        let template = Some("p".to_owned());
        assert!(text(&BuildState::Ready { template }).contains("an older server"));
    }
}
