//! Metrics of the cluster in this node's view, and log lines of its events.

use std::{
    fmt::Write,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use cluster::ClusterEvent;
use tokio::sync::broadcast::error::RecvError;

use super::Peers;

/// Gauges in OpenMetrics text format, without an end mark.
#[must_use]
pub(crate) fn render(peers: &Peers) -> String {
    let view = peers.cluster().view();
    let health = peers.health();
    let away = view
        .members
        .keys()
        .filter(|node| !view.nodes.contains_key(*node));
    let away: Vec<_> = away.collect();
    let lost = away.iter().filter_map(|node| peers.roster().get(node));
    let lost: usize = lost.map(|seen| seen.state.sandboxes.len()).sum();
    let mut text = String::new();
    let mut gauge = |name: &str, help: &str, value: &dyn std::fmt::Display| {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "# HELP cube_cluster_{name} {help}.\n# TYPE cube_cluster_{name} gauge\ncube_cluster_{name} {value}"
        );
    };
    gauge("members", "Nodes that have joined", &view.members.len());
    gauge("nodes", "Nodes that are reachable", &view.nodes.len());
    gauge(
        "lost_sandboxes",
        "Sandboxes last seen on nodes that are now unreachable",
        &lost,
    );
    gauge(
        "registered",
        "Whether this node's lease holds",
        &u8::from(health.registered),
    );
    if let Some(age) = health.last_contact {
        let help = "Time since etcd last responded";
        gauge("etcd_silence_seconds", help, &age.as_secs_f64());
    }
    let counters = peers.templates().counters();
    let help = "Builds of other nodes that this node still has to copy";
    gauge(
        "template_builds_missing",
        help,
        &counters.missing.load(Relaxed),
    );
    let mut counter = |name: &str, help: &str, value: &AtomicU64| {
        let value = value.load(Relaxed);
        let _ = writeln!(
            text,
            "# HELP cube_cluster_{name} {help}.\n# TYPE cube_cluster_{name} counter\ncube_cluster_{name}_total {value}"
        );
    };
    counter(
        "template_copies",
        "Builds copied from other nodes",
        &counters.copied,
    );
    counter(
        "template_copy_failures",
        "Failed copies of builds",
        &counters.failed,
    );
    let help = "Bytes of builds received from other nodes";
    counter("template_copy_bytes", help, &counters.bytes);
    text
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
