//! Nodes: this host, and its peers in a cluster.

use api_types::rest::{Node, NodeMetrics, NodeStatusChange};
use axum::{Json, extract::State, routing::MethodFilter};
use hyper::StatusCode;
use pool::SandboxState;

use super::{
    Access, ApiError, App, Endpoint,
    body::{Body, Segment},
};
use crate::{
    auth::Scope,
    builds::record::BuildState,
    node::{self, settable},
    registry::timestamp,
};

const ADMIN: Access = Access::Key(Scope::NodesAdmin);
/// The id of the cluster of a node that is alone: clients require a UUID.
pub(super) const ALONE: &str = "00000000-0000-8000-a000-000000000002";

pub(super) fn endpoints() -> Vec<Endpoint> {
    let (get, post) = (MethodFilter::GET, MethodFilter::POST);
    vec![
        Endpoint::new(get, "/nodes", ADMIN, list),
        Endpoint::new(get, "/nodes/{id}", ADMIN, detail),
        Endpoint::new(post, "/nodes/{id}", ADMIN, change),
    ]
}

async fn list(State(app): State<App>) -> Result<Json<Vec<Node>>, ApiError> {
    Ok(Json(vec![own(&app).await?]))
}

async fn detail(State(app): State<App>, Segment(id): Segment) -> Result<Json<Node>, ApiError> {
    check_name(&app, &id)?;
    Ok(Json(own(&app).await?))
}

/// A status that cannot be set is a conflict, as with E2B.
async fn change(
    State(app): State<App>,
    Segment(id): Segment,
    Body(body): Body<NodeStatusChange>,
) -> Result<StatusCode, ApiError> {
    check_name(&app, &id)?;
    let status = settable(body.status)?;
    let node = app.node.clone();
    // The file is synced.
    let set = tokio::task::spawn_blocking(move || node.set(status)).await;
    set.map_err(|why| ApiError::Interrupted(why.to_string()))??;
    Ok(StatusCode::NO_CONTENT)
}

fn check_name(app: &App, id: &str) -> Result<(), ApiError> {
    if id == app.node.name() {
        Ok(())
    } else {
        Err(ApiError::NoNode(id.chars().take(64).collect()))
    }
}

/// This node.
pub(super) async fn own(app: &App) -> Result<Node, ApiError> {
    let sandboxes = app.pool.list().await?;
    let running = sandboxes
        .iter()
        .filter(|s| s.state == SandboxState::Running);
    let (mut count, mut vcpus, mut memory, mut last_end) = (0, 0, 0, None);
    for sandbox in running {
        count += 1;
        vcpus += u32::from(sandbox.template.vcpus);
        memory += sandbox.template.memory.0;
        last_end = last_end.max(Some(sandbox.lifetime.end_at));
    }
    let paused = sandboxes
        .iter()
        .filter(|s| s.state != SandboxState::Running);
    let paused_count = u32::try_from(paused.count()).unwrap_or(u32::MAX);
    let node = &app.node;
    let chosen = node.chosen();
    let (create_successes, create_fails, sandbox_starting_count) = node.creates();
    let state = app.state_dir.clone();
    let measured = tokio::task::spawn_blocking(move || {
        let scratch = std::path::Path::new(pool::SCRATCH);
        (
            node::info(),
            node::memory(),
            node::disks(&[&state, scratch]),
        )
    });
    let measured = measured.await;
    let (machine_info, host, disks) =
        measured.map_err(|why| ApiError::Interrupted(why.to_string()))?;
    Ok(Node {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: option_env!("CUBE_COMMIT").unwrap_or("unknown").to_owned(),
        id: node.name().to_owned(),
        service_instance_id: node.instance().to_owned(),
        cluster_id: ALONE.to_owned(),
        machine_info,
        status: chosen.status,
        status_changed_at: timestamp(chosen.changed_unix_ms),
        sandbox_count: count,
        metrics: NodeMetrics {
            allocated_cpu: vcpus,
            cpu_percent: node.cpu_percent(),
            allocated_memory_bytes: memory,
            disks,
            ..host
        },
        create_successes,
        create_fails,
        sandbox_starting_count,
        paused_count,
        build_count: builds(app),
        last_end_at: last_end.map(timestamp),
        lost: Vec::new(),
    })
}

/// Builds that are queued or run.
fn builds(app: &App) -> u32 {
    let catalog = app.builds.catalog();
    let all = catalog.templates.values().flat_map(|t| t.builds.iter());
    let active = all.filter(|build| matches!(build.state, BuildState::Started));
    u32::try_from(active.count()).unwrap_or(u32::MAX)
}
