//! Nodes: this host, and the other nodes of its cluster.

use ::builds::record::BuildState;
use axum::{extract::State, routing::MethodFilter};
use cluster::{NodeId, NodeState};
use envd::Timestamp;
use hyper::StatusCode;
use pool::SandboxState;
use rest::{Node, NodeMetrics, NodeStatus, NodeStatusChange, StuckSandbox};

use super::{
    app::{App, on_thread},
    body::{Body, Segment},
    endpoint::{Access, Endpoint},
    error::ApiError,
    spread::Spread,
};
use crate::{
    auth::Scope,
    json::Json,
    node::{self, settable},
    peers::{Peers, state_of, status_of},
};

const ADMIN: Access = Access::Key(Scope::NodesAdmin);
/// Maximum number of sandboxes listed as stuck.
const MAX_STUCK: usize = 100;
/// Cluster id of a server without a cluster, because clients require a UUID.
const ALONE: &str = "00000000-0000-8000-a000-000000000002";

pub(super) fn endpoints() -> Vec<Endpoint> {
    let (get, post, delete) = (MethodFilter::GET, MethodFilter::POST, MethodFilter::DELETE);
    vec![
        Spread::Own.at(get, "/nodes", ADMIN, list),
        Spread::Own.at(get, "/nodes/{id}", ADMIN, detail),
        Spread::Own.at(post, "/nodes/{id}", ADMIN, change),
        Spread::Own.at(delete, "/nodes/{id}", ADMIN, remove),
    ]
}

async fn list(State(app): State<App>) -> Result<Json<Vec<Node>>, ApiError> {
    let mut nodes = vec![own(&app).await?];
    if let Some(peers) = &app.peers {
        let view = peers.cluster().view();
        let others = view.members.keys().filter(|node| *node != peers.this());
        nodes.extend(others.map(|node| other(&app, peers, node)));
        nodes.sort_by(|a, b| a.id.cmp(&b.id));
    }
    Ok(Json(nodes))
}

async fn detail(State(app): State<App>, Segment(id): Segment) -> Result<Json<Node>, ApiError> {
    match member(&app, &id)? {
        Member::Own => own(&app).await.map(Json),
        Member::Other(peers, node) => Ok(Json(other(&app, peers, &node))),
    }
}

/// An invalid status change is a conflict, as in E2B.
async fn change(
    State(app): State<App>,
    Segment(id): Segment,
    Body(body): Body<NodeStatusChange>,
) -> Result<StatusCode, ApiError> {
    let member = member(&app, &id)?;
    let status = settable(body.status)?;
    if body.moves && (status != NodeStatus::Draining || app.peers.is_none()) {
        let why = "move is for the status draining, and for a node of a cluster";
        return Err(ApiError::BadRequest(why.to_owned()));
    }
    let state = state_of(status);
    let state = state.map(|state| if body.moves { NodeState::Moving } else { state });
    if let (Some(peers), Some(state)) = (&app.peers, state) {
        let node = match &member {
            Member::Own => peers.this(),
            Member::Other(_, node) => node,
        };
        peers.cluster().set_node_state(node, state).await?;
    }
    if let Member::Own = member {
        let node = app.node.clone();
        // The file is synced.
        on_thread(move || node.set(status)).await??;
    }
    Ok(StatusCode::NO_CONTENT)
}

/// Removes an unreachable node from the cluster. Its name and its certificate become invalid.
async fn remove(State(app): State<App>, Segment(id): Segment) -> Result<StatusCode, ApiError> {
    match member(&app, &id)? {
        Member::Other(peers, node) => peers.remove(&node).await?,
        Member::Own => {
            let own = cluster::ClusterError::Alone;
            let lives = |peers: &Peers| cluster::ClusterError::NodeLives(peers.this().clone());
            return Err(app.peers.as_ref().map_or(own, lives).into());
        }
    }
    Ok(StatusCode::NO_CONTENT)
}

enum Member<'a> {
    Own,
    Other(&'a Peers, NodeId),
}

fn member<'a>(app: &'a App, id: &str) -> Result<Member<'a>, ApiError> {
    if id == app.node.name() {
        return Ok(Member::Own);
    }
    let node = id.parse::<NodeId>().ok();
    let peers = app.peers.as_ref();
    let found = peers.zip(node).filter(|(peers, node)| {
        let view = peers.cluster().view();
        view.members.contains_key(node)
    });
    match found {
        Some((peers, node)) => Ok(Member::Other(peers, node)),
        None => Err(ApiError::NoNode(id.chars().take(64).collect())),
    }
}

/// The last known state of another node, with its status from the current view.
fn other(app: &App, peers: &Peers, node: &NodeId) -> Node {
    let view = peers.cluster().view();
    let is_there = view.nodes.contains_key(node);
    let seen = peers.roster().node(node, is_there);
    let mut shown = seen.unwrap_or_else(|| unseen(app, node, is_there));
    if is_there {
        shown.status = status_of(view.state(node));
    }
    shown
}

/// A node of which only the name is known.
fn unseen(app: &App, node: &NodeId, is_there: bool) -> Node {
    Node {
        version: "unknown".to_owned(),
        commit: "unknown".to_owned(),
        id: node.to_string(),
        service_instance_id: String::new(),
        cluster_id: cluster_id(app),
        machine_info: rest::MachineInfo::default(),
        status: if is_there {
            NodeStatus::Connecting
        } else {
            NodeStatus::Unhealthy
        },
        status_changed_at: Timestamp::from_unix_ms(0),
        sandbox_count: 0,
        metrics: NodeMetrics::default(),
        create_successes: 0,
        create_fails: 0,
        sandbox_starting_count: 0,
        paused_count: 0,
        build_count: 0,
        last_end_at: None,
        lost: Vec::new(),
        stuck: Vec::new(),
    }
}

fn cluster_id(app: &App) -> String {
    let peers = app.peers.as_ref();
    peers.map_or_else(
        || ALONE.to_owned(),
        |peers| peers.settings().cluster.clone(),
    )
}

/// This node.
pub(crate) async fn own(app: &App) -> Result<Node, ApiError> {
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
    let measured = on_thread(move || {
        let scratch = std::path::Path::new(pool::SCRATCH);
        (
            node::info(),
            node::memory(),
            node::disks(&[&state, scratch]),
        )
    });
    let (machine_info, host, disks) = measured.await?;
    Ok(Node {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: option_env!("CUBE_COMMIT").unwrap_or("unknown").to_owned(),
        id: node.name().to_owned(),
        service_instance_id: node.instance().to_owned(),
        cluster_id: cluster_id(app),
        machine_info,
        status: chosen.status,
        status_changed_at: Timestamp::from_unix_ms(chosen.changed_unix_ms),
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
        last_end_at: last_end.map(Timestamp::from_unix_ms),
        lost: Vec::new(),
        stuck: stuck(app),
    })
}

fn stuck(app: &App) -> Vec<StuckSandbox> {
    let stuck = app.moves.as_ref().map(|moves| moves.stuck());
    let stuck = stuck.into_iter().flatten().take(MAX_STUCK);
    let named = stuck.map(|(id, reason)| StuckSandbox {
        sandbox_id: id.to_string(),
        reason,
    });
    named.collect()
}

/// Number of queued and running builds.
fn builds(app: &App) -> u32 {
    let catalog = app.builds.catalog();
    let all = catalog.templates.values().flat_map(|t| t.builds.iter());
    let active = all.filter(|build| matches!(build.state, BuildState::Started));
    u32::try_from(active.count()).unwrap_or(u32::MAX)
}
