//! `cube snapshot`: snapshots of running sandboxes, from which others are created.

use clap::Subcommand;
use rest::{SnapshotInfo, SnapshotRequest};
use serde_json::json;

use crate::{
    context::Context,
    failure::Failure,
    server::{segment, unknown_sandbox},
};

#[derive(Subcommand, Debug)]
pub(crate) enum SnapshotCommand {
    /// Save the memory and disk of a sandbox that keeps running, and print the snapshot's id
    Create {
        /// Id of the sandbox
        #[arg(value_name = "ID")]
        sandbox: String,
        /// Name of the snapshot: name or name:tag
        #[arg(long)]
        name: Option<String>,
    },
    /// List snapshots, newest first
    #[command(visible_alias = "ls")]
    List,
    /// Remove snapshots; their sandboxes continue
    #[command(visible_alias = "rm")]
    Delete {
        /// Ids or names
        #[arg(value_name = "SNAPSHOT", required = true)]
        snapshots: Vec<String>,
    },
}

const COLUMNS: [&str; 2] = ["ID", "NAMES"];

pub(crate) fn run(context: &Context, command: &SnapshotCommand) -> Result<(), Failure> {
    let mut server = context.server()?;
    match command {
        SnapshotCommand::Create { sandbox, name } => {
            let request = SnapshotRequest {
                name: name.clone(),
                memory: None,
            };
            let path = format!("/sandboxes/{}/snapshots", segment(sandbox));
            let made: SnapshotInfo = server.post(&path, &request).map_err(unknown_sandbox)?;
            let item = json!({"snapshotID": made.snapshot_id, "names": made.names});
            context.format.done("snapshot", &item, &made.snapshot_id)
        }
        SnapshotCommand::List => {
            let found: Vec<SnapshotInfo> = server.pages("/snapshots?limit=100")?;
            context
                .format
                .list("snapshot", &found, &COLUMNS, |snapshot| {
                    vec![snapshot.snapshot_id.clone(), snapshot.names.join(",")]
                })
        }
        SnapshotCommand::Delete { snapshots } => {
            for snapshot in snapshots {
                let removed = server.delete(&format!("/templates/{}", segment(snapshot)));
                removed
                    .map_err(|why| why.if_not_found("`cube snapshot list` shows the snapshots"))?;
                let item = json!({"snapshotID": snapshot, "deleted": true});
                context.format.done("snapshot", &item, snapshot)?;
            }
            Ok(())
        }
    }
}
