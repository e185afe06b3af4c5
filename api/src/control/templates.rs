//! Lists, looks up and removes templates. Templates are installed on the host, built by clients ([`super::builds`]), or
//! snapshots of sandboxes.

use std::collections::HashMap;

use ::builds::{
    owner::BuildsError,
    record::{BuildRecord, BuildState, TemplateRecord},
    request::DEFAULT_TAG,
};
use axum::{extract::State, routing::MethodFilter};
use envd::Timestamp;
use hyper::{HeaderMap, StatusCode};
use model::hex;
use pool::{PoolError, TemplateInfo, TemplateKind};
use rest::{
    BuildStatus, Template, TemplateAlias, TemplateBuild, TemplateTag, TemplateWithBuilds,
    UpdateTemplate, UpdatedTemplate,
};
use sha2::{Digest, Sha256};

use super::{
    app::App,
    body::{Body, Segment},
    builds,
    endpoint::{Access, Endpoint},
    error::ApiError,
    paging::{Page, Position, put_token},
    query::Query,
    spread::{
        Merge, Merging,
        ServedBy::{AnyCopy, Home},
        Spread::{ByTemplate, List},
    },
    wire::{self, ENVD_VERSION},
};
use crate::{auth::Scope, json::Json, uuid::uuid};

const READ: Access = Access::Key(Scope::TemplatesRead);
const WRITE: Access = Access::Key(Scope::TemplatesWrite);

pub(super) fn endpoints() -> Vec<Endpoint> {
    let (get, delete) = (MethodFilter::GET, MethodFilter::DELETE);
    vec![
        List(Merge::Templates).at(get, "/templates", READ, list),
        List(Merge::TemplatePages).at(get, "/v2/templates", READ, list_paged),
        ByTemplate(AnyCopy).at(get, "/templates/{id}", READ, detail),
        ByTemplate(AnyCopy).at(get, "/templates/aliases/{alias}", READ, alias),
        ByTemplate(AnyCopy).at(get, "/templates/{id}/tags", READ, tags),
        ByTemplate(AnyCopy).at(delete, "/templates/{id}", WRITE, remove),
        ByTemplate(Home).at(MethodFilter::PATCH, "/v2/templates/{id}", WRITE, update),
    ]
}

/// The older route: all templates, without paging.
async fn list(State(app): State<App>) -> Json<Vec<Template>> {
    Json(listed(&app).await)
}

/// Latest first. In a cluster, the node that receives the request pages the templates of all nodes.
async fn list_paged(
    State(app): State<App>,
    merging: Merging,
    query: Query,
) -> Result<(HeaderMap, Json<Vec<Template>>), ApiError> {
    let page = Page::of(&query)?;
    let all = listed(&app).await;
    let mut headers = HeaderMap::new();
    if merging.is_wanted() {
        return Ok((headers, Json(all)));
    }
    let (shown, token) = page.cut(all, |template| Position {
        at: template.created_at.unix_ns() / 1_000_000,
        id: template.template_id.clone(),
    });
    put_token(&mut headers, token)?;
    Ok((headers, Json(shown)))
}

/// Templates installed by the host's operator, and built templates.
async fn listed(app: &App) -> Vec<Template> {
    let pool = app.pool.templates().await;
    let installed = pool.iter().filter(|t| t.kind == TemplateKind::Installed);
    let mut all: Vec<_> = installed.map(item).collect();
    let by_id: HashMap<_, _> = pool.iter().map(|t| (t.id.as_str(), t)).collect();
    let catalog = app.builds.catalog();
    all.extend(
        catalog
            .templates
            .values()
            .filter_map(|t| built_item(t, &by_id)),
    );
    for template in &mut all {
        template.nodes = nodes_with(app, &template.template_id);
    }
    all
}

async fn detail(
    State(app): State<App>,
    Segment(id): Segment,
    query: Query,
) -> Result<(HeaderMap, Json<TemplateWithBuilds>), ApiError> {
    let page = Page::of(&query)?;
    let mut headers = HeaderMap::new();
    let Ok(template) = builds::of_builds(&app, &id) else {
        let mut shown = installed_detail(&find(&app, &id).await?);
        shown.nodes = nodes_with(&app, &shown.template_id);
        return Ok((headers, Json(shown)));
    };
    let pool = app.pool.templates().await;
    let by_id: HashMap<_, _> = pool.iter().map(|t| (t.id.as_str(), t)).collect();
    let all = template.builds.iter().collect();
    let (shown, token) = page.cut(all, |build: &&BuildRecord| Position {
        at: build.created_unix_ms,
        id: build.id.clone(),
    });
    put_token(&mut headers, token)?;
    let answer = TemplateWithBuilds {
        template_id: template.id.clone(),
        public: template.public,
        aliases: vec![template.name.clone()],
        names: names(&template),
        created_at: Timestamp::from_unix_ms(template.created_unix_ms),
        updated_at: updated(&template),
        last_spawned_at: None,
        spawn_count: spawned(&template, &by_id),
        builds: shown.into_iter().map(|b| built(b, &by_id)).collect(),
        nodes: nodes_with(&app, &template.id),
        installed: false,
    };
    Ok((headers, Json(answer)))
}

/// A built template has an alias as soon as a build is ready. Programs use this to decide whether they can create
/// sandboxes.
async fn alias(
    State(app): State<App>,
    Segment(alias): Segment,
) -> Result<Json<TemplateAlias>, ApiError> {
    let reference = app.pool_reference(alias)?;
    let template = find(&app, &reference).await?;
    let catalog = app.builds.catalog();
    let id = catalog.id_for_clients(&template.id);
    Ok(Json(TemplateAlias {
        template_id: id.to_owned(),
        public: catalog.templates.get(id).is_some_and(|t| t.public),
    }))
}

async fn tags(
    State(app): State<App>,
    Segment(id): Segment,
) -> Result<Json<Vec<TemplateTag>>, ApiError> {
    if let Ok(template) = builds::of_builds(&app, &id) {
        let tags = template.tags.iter().map(|(tag, named)| TemplateTag {
            tag: tag.clone(),
            build_id: named.build.clone(),
            created_at: Timestamp::from_unix_ms(named.assigned_unix_ms),
        });
        return Ok(Json(tags.collect()));
    }
    let template = find(&app, &id).await?;
    let tags = template.names.iter().map(|name| TemplateTag {
        tag: wire::split_tag(name).1.unwrap_or("default").to_owned(),
        build_id: build_id(&template.id),
        created_at: created(&template),
    });
    Ok(Json(tags.collect()))
}

async fn remove(State(app): State<App>, Segment(id): Segment) -> Result<StatusCode, ApiError> {
    if let Ok(template) = builds::of_builds(&app, &id) {
        if let Some(peers) = &app.peers {
            peers.delete_template(&template.id).await?;
        }
        app.builds.remove(template.id.clone()).await?;
        return Ok(StatusCode::NO_CONTENT);
    }
    let found = find(&app, &id).await?;
    match found.kind {
        TemplateKind::Snapshot => {}
        TemplateKind::Installed => return Err(BuildsError::Kept(id).into()),
        // The builds own them.
        TemplateKind::Built | TemplateKind::Disk => return Err(ApiError::no_template(&id)),
    }
    // By id, because another template may have got the name since.
    match app.pool.remove_template(&found.id).await {
        Ok(()) => Ok(StatusCode::NO_CONTENT),
        Err(PoolError::NoTemplate(name)) => Err(ApiError::NoTemplate(name)),
        Err(why) => Err(why.into()),
    }
}

async fn update(
    State(app): State<App>,
    Segment(id): Segment,
    Body(body): Body<UpdateTemplate>,
) -> Result<Json<UpdatedTemplate>, ApiError> {
    let template = builds::changeable(&app, &id).await?;
    if let Some(public) = body.public {
        app.builds.publish(template.id.clone(), public).await?;
    }
    let names = names(&template);
    Ok(Json(UpdatedTemplate { names }))
}

async fn find(app: &App, reference: &str) -> Result<TemplateInfo, ApiError> {
    let found = app.pool.template(reference).await;
    found.ok_or_else(|| ApiError::no_template(reference))
}

/// The nodes of a cluster that have a template. Empty outside a cluster.
fn nodes_with(app: &App, template: &str) -> Vec<String> {
    let peers = app.peers.as_ref();
    peers.map_or_else(Vec::new, |peers| peers.nodes_with(template))
}

pub(super) fn created(template: &TemplateInfo) -> Timestamp {
    Timestamp::from_unix_ns(template.created_unix_s.saturating_mul(1_000_000_000))
}

type Pool<'a> = HashMap<&'a str, &'a TemplateInfo>;

/// The names with their tags.
fn names(template: &TemplateRecord) -> Vec<String> {
    template.pool_names().into_keys().collect()
}

fn updated(template: &TemplateRecord) -> Timestamp {
    let changed = template.builds.iter().map(|build| build.changed_unix_ms);
    Timestamp::from_unix_ms(changed.max().unwrap_or(template.created_unix_ms))
}

fn spawned(template: &TemplateRecord, pool: &Pool) -> u64 {
    let ids = template.pool_ids();
    let found = ids.iter().filter_map(|id| pool.get(id.as_str()));
    found.map(|t| t.spawned).sum()
}

/// The template of a build in the pool.
fn in_pool<'a>(build: &BuildRecord, pool: &Pool<'a>) -> Option<&'a TemplateInfo> {
    match &build.state {
        BuildState::Ready { template } => pool.get(template.as_deref()?).copied(),
        _ => None,
    }
}

/// The requested size of a build, or the actual one once it is ready.
fn size(build: &BuildRecord, pool: &Pool) -> (u8, u64, Option<u64>) {
    match in_pool(build, pool).map(wire::size) {
        Some((vcpus, memory_mb, disk_mb)) => (vcpus, memory_mb, Some(disk_mb)),
        None => (build.vcpus, build.memory.0 >> 20, None),
    }
}

fn built(build: &BuildRecord, pool: &Pool) -> TemplateBuild {
    let (cpu_count, memory_mb, disk_size_mb) = size(build, pool);
    let changed = Timestamp::from_unix_ms(build.changed_unix_ms);
    TemplateBuild {
        build_id: build.id.clone(),
        status: builds::status_of(&build.state),
        created_at: Timestamp::from_unix_ms(build.created_unix_ms),
        updated_at: changed,
        finished_at: build.state.is_final().then_some(changed),
        cpu_count,
        memory_mb,
        disk_size_mb,
        envd_version: ENVD_VERSION.to_owned(),
    }
}

/// `None` if it has no build, which is a short-lived state.
fn built_item(template: &TemplateRecord, pool: &Pool) -> Option<Template> {
    let last = template.builds.last()?;
    let named = template
        .tagged(DEFAULT_TAG)
        .map_or(last, |(build, _)| build);
    let (cpu_count, memory_mb, disk_size_mb) = size(named, pool);
    Some(Template {
        template_id: template.id.clone(),
        build_id: named.id.clone(),
        cpu_count,
        memory_mb,
        disk_size_mb: disk_size_mb.unwrap_or(0),
        public: template.public,
        aliases: vec![template.name.clone()],
        names: names(template),
        created_at: Timestamp::from_unix_ms(template.created_unix_ms),
        updated_at: updated(template),
        created_by: None,
        last_spawned_at: None,
        spawn_count: spawned(template, pool),
        build_count: template.builds.len(),
        envd_version: ENVD_VERSION.to_owned(),
        build_status: builds::status_of(&last.state),
        stored_bytes: in_pool(named, pool).and_then(wire::stored_bytes),
        nodes: Vec::new(),
        installed: false,
    })
}

fn installed_detail(template: &TemplateInfo) -> TemplateWithBuilds {
    let item = item(template);
    TemplateWithBuilds {
        template_id: item.template_id,
        public: false,
        aliases: item.aliases,
        names: item.names,
        created_at: item.created_at,
        updated_at: item.updated_at,
        last_spawned_at: None,
        spawn_count: item.spawn_count,
        builds: vec![TemplateBuild {
            build_id: item.build_id,
            status: item.build_status,
            created_at: item.created_at,
            updated_at: item.updated_at,
            finished_at: Some(item.updated_at),
            cpu_count: item.cpu_count,
            memory_mb: item.memory_mb,
            disk_size_mb: Some(item.disk_size_mb),
            envd_version: item.envd_version,
        }],
        nodes: item.nodes,
        installed: item.installed,
    }
}

/// A template that was not built by a client.
fn item(template: &TemplateInfo) -> Template {
    let (cpu_count, memory_mb, disk_size_mb) = wire::size(template);
    let names = template.names.iter();
    let mut aliases: Vec<_> = names.map(|n| wire::split_tag(n).0.to_owned()).collect();
    aliases.dedup();
    Template {
        template_id: template.id.clone(),
        build_id: build_id(&template.id),
        cpu_count,
        memory_mb,
        disk_size_mb,
        public: false,
        aliases,
        names: template.names.clone(),
        created_at: created(template),
        updated_at: created(template),
        created_by: None,
        last_spawned_at: None,
        spawn_count: template.spawned,
        build_count: 1,
        envd_version: ENVD_VERSION.to_owned(),
        build_status: BuildStatus::Ready,
        stored_bytes: wire::stored_bytes(template),
        nodes: Vec::new(),
        installed: template.kind == TemplateKind::Installed,
    }
}

/// The build id of a template: a UUID (RFC 9562, version 8) derived from the template's id. Each template has one
/// build, and clients require an id for it.
pub(crate) fn build_id(template_id: &str) -> String {
    uuid(&hex(&Sha256::digest(template_id.as_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn build_ids_are_distinct_uuids() {
        let id = build_id("a");
        let lengths: Vec<_> = id.split('-').map(str::len).collect();
        assert_eq!(lengths, [8, 4, 4, 4, 12]);
        assert_eq!((&id[14..15], &id[19..20]), ("8", "a"));
        assert_ne!(id, build_id("b"));
    }
}
