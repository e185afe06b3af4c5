//! Listing, lookup and removal of templates. Templates are created by `cargo xtask` and by snapshots of sandboxes.

use api_types::{
    envd::Timestamp,
    rest::{Template, TemplateAlias, TemplateTag},
};
use axum::{Json, extract::State, routing::MethodFilter};
use hyper::StatusCode;
use pool::{PoolError, TemplateInfo, TemplateKind};
use sha2::{Digest, Sha256};

use super::{Access, ApiError, App, ENVD_VERSION, Endpoint, body::Segment, query::Query, wire};
use crate::auth::Scope;

const READ: Access = Access::Key(Scope::TemplatesRead);
const WRITE: Access = Access::Key(Scope::TemplatesWrite);

pub(super) fn endpoints() -> Vec<Endpoint> {
    let (get, delete) = (MethodFilter::GET, MethodFilter::DELETE);
    vec![
        Endpoint::new(get, "/templates", READ, list),
        Endpoint::new(get, "/v2/templates", READ, list),
        Endpoint::new(get, "/templates/aliases/{alias}", READ, alias),
        Endpoint::new(get, "/templates/{id}/tags", READ, tags),
        Endpoint::new(delete, "/templates/{id}", WRITE, remove),
    ]
}

async fn list(State(app): State<App>, _query: Query) -> Json<Vec<Template>> {
    let mut templates = app.pool.templates().await;
    templates.retain(|template| match template.kind {
        TemplateKind::Installed | TemplateKind::Built => true,
        TemplateKind::Snapshot | TemplateKind::Disk => false,
    });
    Json(templates.iter().map(item).collect())
}

async fn alias(
    State(app): State<App>,
    Segment(alias): Segment,
) -> Result<Json<TemplateAlias>, ApiError> {
    let template = find(&app, &alias).await?;
    Ok(Json(TemplateAlias {
        template_id: template.id,
        public: false,
    }))
}

async fn tags(
    State(app): State<App>,
    Segment(id): Segment,
) -> Result<Json<Vec<TemplateTag>>, ApiError> {
    let template = find(&app, &id).await?;
    let tags = template.names.iter().map(|name| TemplateTag {
        tag: wire::split_tag(name).1.unwrap_or("default").to_owned(),
        build_id: build_id(&template.id),
        created_at: created(&template),
    });
    Ok(Json(tags.collect()))
}

async fn remove(State(app): State<App>, Segment(id): Segment) -> Result<StatusCode, ApiError> {
    match app.pool.remove_template(&id).await {
        Ok(()) => Ok(StatusCode::NO_CONTENT),
        Err(PoolError::NoTemplate(name)) => Err(ApiError::NoTemplate(name)),
        Err(why) => Err(why.into()),
    }
}

async fn find(app: &App, reference: &str) -> Result<TemplateInfo, ApiError> {
    let found = app.pool.template(reference).await;
    found.ok_or_else(|| ApiError::NoTemplate(reference.chars().take(200).collect()))
}

fn created(template: &TemplateInfo) -> Timestamp {
    Timestamp::from_unix_ns(template.created_unix_s.saturating_mul(1_000_000_000))
}

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
        build_status: "ready".to_owned(),
    }
}

/// The build id of a template: a UUID (RFC 9562, version 8) derived from the template's id. Each template has one
/// build, and clients require an id for it.
fn build_id(template_id: &str) -> String {
    let hash = Sha256::digest(template_id.as_bytes());
    let hex: String = hash
        .iter()
        .take(16)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!(
        "{}-{}-8{}-a{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[13..16],
        &hex[17..20],
        &hex[20..32]
    )
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
