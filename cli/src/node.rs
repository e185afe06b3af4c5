//! `cube node`: the nodes of a server, and whether they accept new sandboxes.

use std::{
    thread,
    time::{Duration, Instant},
};

use clap::Subcommand;
use rest::{LostSandbox, Node, NodeStatus, NodeStatusChange, Secret, StuckSandbox};
use serde_json::json;

use crate::{
    context::Context,
    failure::{Failure, Kind},
    output::{Format, print, time},
    server::{Server, segment},
};

/// Interval at which a drain polls its node.
const LOOK: Duration = Duration::from_secs(1);

#[derive(Subcommand, Debug)]
pub(crate) enum NodeCommand {
    /// List the nodes
    #[command(visible_alias = "ls")]
    List,
    /// Show a node, its metrics, its lost sandboxes, and sandboxes that cannot move
    Info {
        /// Name of the node
        node: String,
    },
    /// Accept no new sandboxes on a node; existing ones continue (status standby)
    Cordon {
        /// Name of the node
        node: String,
    },
    /// Accept new sandboxes on a node again
    Uncordon {
        /// Name of the node
        node: String,
    },
    /// Accept no new sandboxes on a node that will be shut down (status draining), and print what is left on it
    Drain {
        /// Name of the node
        node: String,
        /// Return when no sandbox is running there and no build is in progress
        #[arg(long, conflicts_with = "moves")]
        wait: bool,
        /// Move the sandboxes to other nodes, where they continue, and return when none is left; running ones are
        /// paused for the move
        #[arg(long = "move")]
        moves: bool,
        /// With --wait or --move: fail if the node has not drained within this time
        #[arg(long, value_name = "TIME", value_parser = crate::command_args::duration)]
        timeout: Option<Duration>,
    },
    /// Remove an unreachable node from its cluster; its running sandboxes are lost
    Remove {
        /// Name of the node
        node: String,
    },
}

const COLUMNS: [&str; 8] = [
    "NAME", "STATUS", "SINCE", "RUNNING", "PAUSED", "CPU", "MEMORY", "VERSION",
];

pub(crate) fn run(context: &Context, command: &NodeCommand) -> Result<(), Failure> {
    let mut server = context.server()?;
    match command {
        NodeCommand::List => {
            let nodes: Vec<Node> = server.get("/nodes")?;
            context.format.list("node", &nodes, &COLUMNS, row)
        }
        NodeCommand::Info { node } => {
            let found = get(&mut server, node)?;
            let lines = properties(&found);
            context.format.properties("node", &found, &lines)?;
            match context.format {
                Format::Human => print(&(lost(&found.lost) + &stuck(&found.stuck))),
                Format::Json => Ok(()),
            }
        }
        NodeCommand::Cordon { node } => set(context, &mut server, node, NodeStatus::Standby),
        NodeCommand::Uncordon { node } => set(context, &mut server, node, NodeStatus::Ready),
        NodeCommand::Remove { node } => {
            server.delete(&path(node)).map_err(unknown)?;
            // A key without the scope for secrets cannot list their names.
            let secrets: Vec<Secret> = server.get("/secrets").unwrap_or_default();
            eprint!("{}", to_replace(node, &secrets));
            let item = json!({"id": node, "removed": true});
            context
                .format
                .done("node", &item, &format!("{node} removed"))
        }
        NodeCommand::Drain {
            node,
            wait,
            moves,
            timeout,
        } => {
            let way = if *moves { Way::Move } else { Way::Wait };
            change(context, &mut server, node, NodeStatus::Draining, *moves)?;
            if *wait || *moves {
                drained(context, &mut server, node, way, *timeout)
            } else {
                let left = Left::of(&get(&mut server, node)?, way);
                context.format.done("drain", &left.json(node), &left.text())
            }
        }
    }
}

fn path(node: &str) -> String {
    format!("/nodes/{}", segment(node))
}

fn get(server: &mut Server, node: &str) -> Result<Node, Failure> {
    server.get(&path(node)).map_err(unknown)
}

fn unknown(why: Failure) -> Failure {
    why.if_not_found("`cube node list` shows the nodes")
}

fn set(
    context: &Context,
    server: &mut Server,
    node: &str,
    status: NodeStatus,
) -> Result<(), Failure> {
    change(context, server, node, status, false)
}

fn change(
    context: &Context,
    server: &mut Server,
    node: &str,
    status: NodeStatus,
    moves: bool,
) -> Result<(), Failure> {
    let body = NodeStatusChange {
        cluster_id: None,
        status,
        moves,
    };
    server.send("POST", &path(node), &body).map_err(unknown)?;
    let item = json!({"id": node, "status": status.name()});
    let line = format!("{node} {}", status.name());
    context.format.done("node", &item, &line)
}

/// Credentials that the host of a removed node may have copied.
fn to_replace(node: &str, secrets: &[Secret]) -> String {
    let names: Vec<&str> = secrets.iter().map(|secret| secret.name.as_str()).collect();
    let names = if names.is_empty() {
        String::new()
    } else {
        format!(" ({})", names.join(", "))
    };
    format!(
        "The host of {node} keeps what it has seen. If you do not trust it any more, replace:\n\
         - the values of all secrets{names}, at the services that they are for, and here: `cube secret update`\n\
         - API keys that clients have sent to {node}: `cube key revoke`\n\
         - passwords of `egressProxy` and webhook secrets\n\
         - the private keys in the files tls.key and server.secrets_key, if the nodes share them\n"
    )
}

/// Treatment of the sandboxes of a draining node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// They end there.
    Wait,
    /// They move to other nodes.
    Move,
}

/// Sandboxes and jobs left on a draining node.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Left {
    way: Way,
    /// Sandboxes that cannot move, with the reasons.
    stuck: Vec<StuckSandbox>,
    running: u32,
    starting: u32,
    paused: u32,
    builds: u32,
    last_end: String,
}

impl Left {
    fn of(node: &Node, way: Way) -> Self {
        Self {
            way,
            stuck: node.stuck.clone(),
            running: node.sandbox_count,
            starting: node.sandbox_starting_count,
            paused: node.paused_count,
            builds: node.build_count,
            last_end: time(node.last_end_at),
        }
    }

    /// Paused sandboxes are on disk and do not prevent a shutdown, unless they are to move.
    fn is_drained(&self) -> bool {
        let stays = self.way == Way::Wait || self.paused == 0;
        stays && self.running == 0 && self.starting == 0 && self.builds == 0
    }

    fn text(&self) -> String {
        let paused = match self.paused {
            0 => String::new(),
            n if self.way == Way::Move => format!(", {n} paused"),
            n => format!("; {n} paused stay on its disk"),
        };
        if self.is_drained() {
            return format!("drained{paused}");
        }
        let mut waits = Vec::new();
        if self.way == Way::Move {
            let moving = format!("the moves of {} running{paused} sandboxes", self.running);
            waits.push(moving);
        } else if self.running > 0 {
            let (n, end) = (self.running, &self.last_end);
            waits.push(format!("{n} running sandboxes, the last ends at {end}"));
        }
        if self.starting > 0 {
            waits.push(format!("{} creates in progress", self.starting));
        }
        if self.builds > 0 {
            waits.push(format!("{} builds", self.builds));
        }
        if self.way == Way::Move {
            let stuck = stuck(&self.stuck);
            return format!("waits for {}\n{stuck}", waits.join(", "))
                .trim_end()
                .to_owned();
        }
        format!("waits for {}{paused}", waits.join(", "))
    }

    fn json(&self, node: &str) -> serde_json::Value {
        json!({
            "id": node, "drained": self.is_drained(), "running": self.running, "starting": self.starting,
            "paused": self.paused, "builds": self.builds,
            "lastEndAt": (self.running > 0).then_some(&self.last_end),
        })
    }
}

/// Waits until a node has drained, and prints what is left whenever that changes.
fn drained(
    context: &Context,
    server: &mut Server,
    node: &str,
    way: Way,
    timeout: Option<Duration>,
) -> Result<(), Failure> {
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    let mut shown = None;
    loop {
        let found = get(server, node)?;
        if found.status == NodeStatus::Ready {
            let text = format!("{node} accepts new sandboxes again: the drain was cancelled");
            return Err(Failure::refused(text));
        }
        let left = Left::of(&found, way);
        if left.is_drained() {
            return context.format.done("drain", &left.json(node), &left.text());
        }
        if shown.as_ref() != Some(&left) {
            eprintln!("{node} {}", left.text());
            shown = Some(left.clone());
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            let text = format!("{node} has not drained: it {}", left.text());
            return Err(Failure::new(Kind::Refused, text).with_cure(
                "kill or pause its sandboxes, or wait longer; `cube node uncordon` cancels the drain",
            ));
        }
        thread::sleep(LOOK);
    }
}

fn row(node: &Node) -> Vec<String> {
    let metrics = &node.metrics;
    vec![
        node.id.clone(),
        node.status.name().to_owned(),
        time(Some(node.status_changed_at)),
        node.sandbox_count.to_string(),
        node.paused_count.to_string(),
        format!("{}%", metrics.cpu_percent),
        share(metrics.memory_used_bytes, metrics.memory_total_bytes),
        node.version.clone(),
    ]
}

fn share(used: u64, total: u64) -> String {
    let percent = (used.saturating_mul(100)).checked_div(total).unwrap_or(0);
    format!("{percent}%")
}

fn properties(node: &Node) -> Vec<(&'static str, String)> {
    let (machine, metrics) = (&node.machine_info, &node.metrics);
    let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
    let mut lines = vec![
        ("name", node.id.clone()),
        ("status", node.status.name().to_owned()),
        ("since", time(Some(node.status_changed_at))),
        ("cluster", node.cluster_id.clone()),
        ("version", node.version.clone()),
        ("processor", machine.cpu_model_name.clone()),
        ("CPUs", metrics.cpu_count.to_string()),
        ("CPU used", format!("{}%", metrics.cpu_percent)),
        (
            "memory used",
            format!(
                "{} of {}",
                mib(metrics.memory_used_bytes),
                mib(metrics.memory_total_bytes)
            ),
        ),
        ("running", node.sandbox_count.to_string()),
        ("paused", node.paused_count.to_string()),
        ("builds", node.build_count.to_string()),
        ("allocated vCPUs", metrics.allocated_cpu.to_string()),
        ("allocated memory", mib(metrics.allocated_memory_bytes)),
        ("creates", node.create_successes.to_string()),
        ("failed creates", node.create_fails.to_string()),
    ];
    for disk in &metrics.disks {
        let (used, total) = (mib(disk.used_bytes), mib(disk.total_bytes));
        let (point, kind) = (&disk.mount_point, &disk.filesystem_type);
        lines.push(("disk", format!("{point} ({kind}): {used} of {total}")));
    }
    lines
}

fn lost(sandboxes: &[LostSandbox]) -> String {
    let lines = sandboxes.iter().map(|s| {
        let state = match s.state {
            rest::SandboxState::Running => "running",
            rest::SandboxState::Paused => "paused",
        };
        let (id, template, seen) = (&s.sandbox_id, &s.template_id, time(Some(s.seen_at)));
        format!("lost: {id} of {template}, {state} at {seen}\n")
    });
    lines.collect()
}

/// Why sandboxes of a draining node have not moved.
fn stuck(sandboxes: &[StuckSandbox]) -> String {
    let lines = sandboxes
        .iter()
        .map(|s| format!("  {} stays: {}\n", s.sandbox_id, s.reason));
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drain_names_what_it_waits_for() {
        let mut left = Left {
            way: Way::Wait,
            stuck: Vec::new(),
            running: 2,
            starting: 1,
            paused: 3,
            builds: 1,
            last_end: "T".to_owned(),
        };
        assert_eq!(
            left.text(),
            "waits for 2 running sandboxes, the last ends at T, 1 creates in progress, 1 builds; 3 paused stay on its disk"
        );
        (left.running, left.starting, left.builds) = (0, 0, 0);
        assert_eq!(left.text(), "drained; 3 paused stay on its disk");
        assert!(left.is_drained() && left.json("a")["drained"] == true);
        left.way = Way::Move;
        left.running = 1;
        left.stuck.push(StuckSandbox {
            sandbox_id: "i".to_owned(),
            reason: "no node".to_owned(),
        });
        let moving = "waits for the moves of 1 running, 3 paused sandboxes\n  i stays: no node";
        assert_eq!(left.text(), moving);
        assert!(!left.is_drained());
    }

    #[test]
    fn shares_of_nothing_are_zero() {
        assert_eq!(share(5, 0), "0%");
        assert_eq!(share(1, 4), "25%");
    }
}
