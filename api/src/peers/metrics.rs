//! Metrics of the cluster in this node's view, and log lines of its events.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use cluster::ClusterEvent;
use tokio::sync::broadcast::error::RecvError;

use super::Peers;
use crate::telemetry::Tables;

/// Adds the metrics of the cluster.
pub(crate) fn add(peers: &Peers, tables: &mut Tables) {
    let view = peers.cluster().view();
    let health = peers.health();
    let away = view
        .members
        .keys()
        .filter(|node| !view.nodes.contains_key(*node));
    let away: Vec<_> = away.collect();
    let lost = away.iter().filter_map(|node| peers.roster().get(node));
    let lost: usize = lost.map(|seen| seen.state.sandboxes.len()).sum();
    let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    let mut gauge = |name: &str, help: &str, value: u64| tables.gauge(name, help, value);
    let joined = "Nodes that have joined";
    gauge("cluster_members", joined, count(view.members.len()));
    let reachable = "Nodes that are reachable";
    gauge("cluster_nodes", reachable, count(view.nodes.len()));
    let help = "Sandboxes last seen on nodes that are now unreachable";
    gauge("cluster_lost_sandboxes", help, count(lost));
    let help = "Whether this node's lease holds";
    gauge("cluster_registered", help, health.registered.into());
    if let Some(age) = health.last_contact {
        let help = "Time since etcd last responded";
        tables.seconds("cluster_etcd_silence_seconds", help, age.as_secs_f64());
    }
    let counters = peers.templates().counters();
    let help = "Builds of other nodes that this node still has to copy";
    let missing = counters.missing.load(Relaxed);
    tables.gauge("cluster_template_builds_missing", help, missing);
    let mut counter = |name: &str, help: &str, value: &AtomicU64| {
        tables.counter(name, help, value.load(Relaxed));
    };
    let help = "Builds copied from other nodes";
    counter("cluster_template_copies", help, &counters.copied);
    let help = "Failed copies of builds";
    counter("cluster_template_copy_failures", help, &counters.failed);
    let help = "Bytes of builds received from other nodes";
    counter("cluster_template_copy_bytes", help, &counters.bytes);
}

/// Logs what happens to the other nodes; never returns.
pub(crate) async fn log_events(peers: Peers) {
    let mut events = peers.cluster().events();
    loop {
        match events.recv().await {
            Ok(event) => log(&event),
            Err(RecvError::Lagged(lost)) => {
                tracing::warn!(lost, "lost cluster events: the log is incomplete")
            }
            Err(RecvError::Closed) => return std::future::pending().await,
        }
    }
}

fn log(event: &ClusterEvent) {
    match event {
        ClusterEvent::Joined(node) => tracing::info!(%node, "a node is reachable"),
        // `roster` reports the lost sandboxes.
        ClusterEvent::Away { node, .. } => tracing::warn!(%node, "a node is unreachable"),
        ClusterEvent::Rebooted(node) => {
            tracing::warn!(%node, "a node has rebooted: its running sandboxes have ended");
        }
        ClusterEvent::Moved { sandbox, owner } => {
            tracing::info!(%sandbox, node = %owner.owner.node, "a sandbox has moved");
        }
        // `moves` handles these. After a move from this node, the first is expected.
        ClusterEvent::Superseded { .. } | ClusterEvent::Forgotten { .. } => {}
        ClusterEvent::Detached => {
            tracing::warn!(
                "etcd does not respond: creates and streams continue with the last view"
            );
        }
        ClusterEvent::Attached => tracing::info!("etcd responds again"),
        ClusterEvent::HistoryLost { had, found } => {
            tracing::error!(
                had,
                found,
                "etcd is older than before: it was restored from a backup"
            );
        }
    }
}
