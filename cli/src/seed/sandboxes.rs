//! `list`, `info`, `sandbox …`, `cubebox …`, `snapshot …`

use api_types::rest::{ListedSandbox, SandboxState};
use clap::{Args, Subcommand};
use serde_json::json;

use crate::{
    failure::Failure,
    output::time,
    program::Context,
    sandbox,
    server::{segment, unknown_sandbox},
    snapshot,
};

#[derive(Args, Debug)]
pub(super) struct ListArgs {
    /// Paused ones too, as always here
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
    List(ListArgs),
    /// Show a sandbox
    Info(SandboxArgs),
    /// End a sandbox
    #[command(visible_alias = "destroy", visible_alias = "delete")]
    Kill(SandboxArgs),
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
    /// Keep the state of a sandbox
    Create(SandboxArgs),
    /// List snapshots
    List,
    /// Remove a snapshot
    Delete {
        /// Id of the snapshot
        #[arg(long, value_name = "ID", required_unless_present = "snapshot")]
        snapshot_id: Option<String>,
        #[arg(value_name = "ID", conflicts_with = "snapshot_id")]
        snapshot: Option<String>,
    },
}

impl SandboxArgs {
    fn id(&self) -> &str {
        let id = self.sandbox_id.as_deref().or(self.sandbox.as_deref());
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
        SandboxCommand::Kill(args) => {
            let id = args.id();
            let killed = context
                .server()?
                .delete(&format!("/sandboxes/{}", segment(id)));
            killed.map_err(unknown_sandbox)?;
            let item = json!({"sandbox_id": id});
            context
                .format
                .done("sandbox", &item, &format!("sandbox killed: {id}"))
        }
    }
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
        sandbox.template_id.clone(),
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
        SnapshotCommand::Delete {
            snapshot_id,
            snapshot,
        } => snapshot::SnapshotCommand::Delete {
            snapshots: snapshot_id.iter().chain(snapshot).cloned().collect(),
        },
    };
    snapshot::run(context, &own)
}
