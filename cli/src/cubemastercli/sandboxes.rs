//! `list`, `info`, `sandbox …`, `cubebox …`, `snapshot …`

use clap::{Args, Subcommand};
use rest::{ListedSandbox, SandboxState, SnapshotInfo};
use serde_json::json;

use super::job;
use crate::{
    context::Context,
    failure::Failure,
    output::time,
    sandbox,
    server::{segment, unknown_sandbox},
    snapshot,
};

#[derive(Args, Debug)]
pub(super) struct ListArgs {
    /// Include paused sandboxes; accepted for compatibility, because they are always included
    #[arg(long)]
    all: bool,
    /// Ids only
    #[arg(short, long)]
    quiet: bool,
    #[arg(long, hide = true)]
    wide: bool,
}

#[derive(Subcommand, Debug)]
pub(super) enum SandboxCommand {
    /// List sandboxes
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Show a sandbox
    Info(SandboxArgs),
    /// End sandboxes
    #[command(
        visible_alias = "destroy",
        visible_alias = "delete",
        visible_alias = "rm"
    )]
    Kill {
        /// Id of the sandbox
        #[arg(
            long,
            visible_alias = "sandboxid",
            value_name = "ID",
            required_unless_present = "sandboxes"
        )]
        sandbox_id: Option<String>,
        #[arg(value_name = "ID", conflicts_with = "sandbox_id")]
        sandboxes: Vec<String>,
    },
}

#[derive(Args, Debug)]
pub(super) struct SandboxArgs {
    /// Id of the sandbox
    #[arg(
        long,
        visible_alias = "sandboxid",
        value_name = "ID",
        required_unless_present = "sandbox"
    )]
    sandbox_id: Option<String>,
    #[arg(value_name = "ID", conflicts_with = "sandbox_id")]
    sandbox: Option<String>,
}

#[derive(Subcommand, Debug)]
pub(super) enum SnapshotCommand {
    /// Snapshot a sandbox
    Create(SandboxArgs),
    /// List snapshots
    #[command(visible_alias = "ls")]
    List,
    /// Show a snapshot
    Info(SnapshotArgs),
    /// Remove a snapshot
    #[command(visible_alias = "rm")]
    Delete(SnapshotArgs),
}

#[derive(Args, Debug)]
pub(super) struct SnapshotArgs {
    /// Id or name of the snapshot
    #[arg(long, value_name = "ID", required_unless_present = "snapshot")]
    snapshot_id: Option<String>,
    #[arg(value_name = "ID", conflicts_with = "snapshot_id")]
    snapshot: Option<String>,
}

impl SandboxArgs {
    fn id(&self) -> &str {
        let id = self.sandbox_id.as_deref().or(self.sandbox.as_deref());
        id.unwrap_or_default()
    }
}

impl SnapshotArgs {
    fn id(&self) -> &str {
        let id = self.snapshot_id.as_deref().or(self.snapshot.as_deref());
        id.unwrap_or_default()
    }
}

const COLUMNS: [&str; 5] = [
    "SANDBOX_ID",
    "STATUS",
    "TEMPLATE_ID",
    "CREATED_AT",
    "END_AT",
];

pub(super) fn run(context: &Context, command: &SandboxCommand) -> Result<(), Failure> {
    match command {
        SandboxCommand::List(args) => list(context, args),
        SandboxCommand::Info(args) => info(context, args.id()),
        SandboxCommand::Kill {
            sandbox_id,
            sandboxes,
        } => kill(context, sandbox_id.iter().chain(sandboxes)),
    }
}

/// Ends all of them, even if one fails. Returns the first failure and prints the others.
fn kill<'a>(context: &Context, ids: impl Iterator<Item = &'a String>) -> Result<(), Failure> {
    let (mut server, mut first) = (context.server()?, Ok(()));
    for id in ids {
        let killed = server.delete(&format!("/sandboxes/{}", segment(id)));
        match killed.map_err(unknown_sandbox) {
            Ok(()) => {
                let item = json!({"sandbox_id": id});
                let line = format!("sandbox killed: {id}");
                context.format.done("sandbox", &item, &line)?;
            }
            Err(why) if first.is_ok() => first = Err(why),
            Err(why) => eprintln!("error: {why}"),
        }
    }
    first
}

pub(super) fn list(context: &Context, args: &ListArgs) -> Result<(), Failure> {
    let found = sandbox::all(&mut context.server()?, "")?;
    if args.quiet {
        return sandbox::print_ids(&found);
    }
    context.format.list("sandbox", &found, &COLUMNS, row)
}

fn row(sandbox: &ListedSandbox) -> Vec<String> {
    let state = match sandbox.state {
        SandboxState::Running => "RUNNING",
        SandboxState::Paused => "PAUSED",
    };
    vec![
        sandbox.sandbox_id.clone(),
        state.to_owned(),
        // The name used by `tpl list`.
        sandbox
            .alias
            .as_ref()
            .unwrap_or(&sandbox.template_id)
            .clone(),
        time(Some(sandbox.started_at)),
        time(Some(sandbox.end_at)),
    ]
}

pub(super) fn info(context: &Context, id: &str) -> Result<(), Failure> {
    sandbox::info(context, id)
}

pub(super) fn snapshots(context: &Context, command: &SnapshotCommand) -> Result<(), Failure> {
    let own = match command {
        SnapshotCommand::Create(args) => snapshot::SnapshotCommand::Create {
            sandbox: args.id().to_owned(),
            name: None,
        },
        SnapshotCommand::List => snapshot::SnapshotCommand::List,
        SnapshotCommand::Info(args) => return snapshot_info(context, args.id()),
        SnapshotCommand::Delete(args) => snapshot::SnapshotCommand::Delete {
            snapshots: vec![args.id().to_owned()],
        },
    };
    snapshot::run(context, &own)
}

fn snapshot_info(context: &Context, id: &str) -> Result<(), Failure> {
    let found = job::snapshots(&mut context.server()?)?;
    let is_it = |snapshot: &&SnapshotInfo| {
        snapshot.snapshot_id == id || snapshot.names.iter().any(|name| name == id)
    };
    let snapshot = found.iter().find(is_it).ok_or_else(|| {
        Failure::refused(format!("snapshot {id} was not found"))
            .with_cure("`cubemastercli snapshot list` shows the snapshots")
    })?;
    let lines = [
        ("snapshot_id", snapshot.snapshot_id.clone()),
        ("names", snapshot.names.join(",")),
    ];
    context.format.properties("snapshot", snapshot, &lines)
}
