//! `cube sandbox create`, `kill`, `pause`, `resume`, `fork`, `timeout`.

use std::{collections::BTreeMap, time::Duration};

use clap::Args;
use rest::{
    AutoResume, ConnectSandbox, ForkRequest, ForkResult, NewSandbox, PauseRequest, Sandbox,
    TimeoutRequest,
};
use serde_json::json;

use super::list::all;
use crate::{
    command_args::{EgressArgs, duration, pairs, variables},
    context::Context,
    failure::Failure,
    run::{DEFAULT_TEMPLATE, unknown_template},
    server::{Server, segment, unknown_sandbox},
};

/// Default lifetime of a sandbox, as in the SDKs.
const USUAL_LIFE: &str = "5m";

#[derive(Args, Debug)]
pub(crate) struct CreateArgs {
    /// Template or snapshot: name, name:tag or id
    #[arg(long, value_name = "T", default_value = DEFAULT_TEMPLATE)]
    template: String,
    /// Time until the sandbox ends, for example 1h
    #[arg(long, value_name = "TIME", default_value = USUAL_LIFE, value_parser = duration)]
    timeout: Duration,
    /// Pause the sandbox at its deadline instead of killing it; a request to it resumes it
    #[arg(long)]
    auto_pause: bool,
    /// Environment variable of all processes; may be repeated
    #[arg(short, long = "env", value_name = "NAME=VALUE")]
    envs: Vec<String>,
    /// Label of the sandbox, shown in lists; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    metadata: Vec<String>,
    #[command(flatten)]
    egress: EgressArgs,
}

#[derive(Args, Debug)]
pub(crate) struct KillArgs {
    /// Ids of the sandboxes
    #[arg(value_name = "ID", required_unless_present = "all")]
    ids: Vec<String>,
    /// Kill all sandboxes of the server
    #[arg(long, conflicts_with = "ids")]
    all: bool,
}

#[derive(Args, Debug)]
pub(crate) struct PauseArgs {
    /// Id of the sandbox
    #[arg(value_name = "ID")]
    id: String,
    /// Keep only the disk: processes are lost, and the sandbox boots when it is resumed
    #[arg(long)]
    disk_only: bool,
}

#[derive(Args, Debug)]
pub(crate) struct ResumeArgs {
    /// Id of the sandbox
    #[arg(value_name = "ID")]
    id: String,
    /// Minimum time until the sandbox ends
    #[arg(long, value_name = "TIME", default_value = USUAL_LIFE, value_parser = duration)]
    timeout: Duration,
}

#[derive(Args, Debug)]
pub(crate) struct ForkArgs {
    /// Id of the running sandbox
    #[arg(value_name = "ID")]
    id: String,
    /// Number of forks
    #[arg(short = 'n', long, default_value_t = 1)]
    count: u32,
    /// Time until the forks end
    #[arg(long, value_name = "TIME", default_value = USUAL_LIFE, value_parser = duration)]
    timeout: Duration,
}

#[derive(Args, Debug)]
pub(crate) struct TimeoutArgs {
    /// Id of the sandbox
    #[arg(value_name = "ID")]
    id: String,
    /// Time from now, for example 1h; may be shorter than the remaining time
    #[arg(value_name = "TIME", value_parser = duration)]
    time: Duration,
}

fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}

fn path(id: &str, action: &str) -> String {
    format!("/sandboxes/{}{action}", segment(id))
}

pub(super) fn create(context: &Context, args: &CreateArgs) -> Result<(), Failure> {
    let given = |map: BTreeMap<_, _>| Some(map).filter(|map| !map.is_empty());
    let mut request = NewSandbox {
        template_id: args.template.clone(),
        timeout: Some(seconds(args.timeout)),
        auto_pause: args.auto_pause.then_some(true),
        auto_resume: args.auto_pause.then_some(AutoResume { enabled: true }),
        env_vars: given(variables(&args.envs)?),
        metadata: given(pairs("--metadata", &args.metadata)?),
        ..NewSandbox::default()
    };
    args.egress.apply(&mut request)?;
    let created = context.server()?.post("/v2/sandboxes", &request);
    let sandbox: Sandbox = created.map_err(unknown_template)?;
    show(context, &sandbox)
}

fn show(context: &Context, sandbox: &Sandbox) -> Result<(), Failure> {
    let item = json!({
        "sandboxID": sandbox.sandbox_id, "templateID": sandbox.template_id, "alias": sandbox.alias,
        "domain": sandbox.domain,
    });
    context.format.done("sandbox", &item, &sandbox.sandbox_id)
}

pub(super) fn kill(context: &Context, args: &KillArgs) -> Result<(), Failure> {
    let mut server = context.server()?;
    let ids = if args.all {
        let found = all(&mut server, "")?;
        found.into_iter().map(|s| s.sandbox_id).collect()
    } else {
        args.ids.clone()
    };
    let mut first_failure = None;
    for id in &ids {
        match kill_one(&mut server, id) {
            Ok(()) => {
                let item = json!({"sandboxID": id, "killed": true});
                context.format.done("sandbox", &item, id)?;
            }
            // It may have ended since the list was read.
            Err(why) if args.all && why.kind == crate::failure::Kind::NotFound => {}
            Err(why) => {
                if let Some(former) = first_failure.replace(why) {
                    eprintln!("cube: {former}");
                }
            }
        }
    }
    first_failure.map_or(Ok(()), Err)
}

/// Ends a sandbox.
fn kill_one(server: &mut Server, id: &str) -> Result<(), Failure> {
    server.delete(&path(id, "")).map_err(unknown_sandbox)
}

pub(super) fn pause(context: &Context, args: &PauseArgs) -> Result<(), Failure> {
    let request = PauseRequest {
        memory: args.disk_only.then_some(false),
        require_healthy_guest: None,
    };
    let sent = context
        .server()?
        .send("POST", &path(&args.id, "/pause"), &request);
    sent.map_err(unknown_sandbox)?;
    let item = json!({"sandboxID": args.id, "state": "paused"});
    context.format.done("sandbox", &item, &args.id)
}

pub(super) fn resume(context: &Context, args: &ResumeArgs) -> Result<(), Failure> {
    let request = ConnectSandbox {
        timeout: Some(seconds(args.timeout)),
        memory: None,
    };
    let path = format!("/v2{}", path(&args.id, "/connect"));
    let sandbox: Sandbox = context
        .server()?
        .post(&path, &request)
        .map_err(unknown_sandbox)?;
    show(context, &sandbox)
}

pub(super) fn fork(context: &Context, args: &ForkArgs) -> Result<(), Failure> {
    let request = ForkRequest {
        timeout: Some(seconds(args.timeout)),
        count: Some(i64::from(args.count)),
    };
    let forked = context.server()?.post(&path(&args.id, "/fork"), &request);
    let forks: Vec<ForkResult> = forked.map_err(unknown_sandbox)?;
    let mut failures = Vec::new();
    for fork in forks {
        match (fork.sandbox, fork.error) {
            (Some(sandbox), _) => show(context, &sandbox)?,
            (None, Some(error)) => failures.push(envd::guest_text(&error.message)),
            (None, None) => failures.push("the server names no reason".to_owned()),
        }
    }
    match failures.first() {
        None => Ok(()),
        Some(why) => {
            let count = failures.len();
            Err(Failure::refused(format!(
                "{count} of {} forks failed: {why}",
                args.count
            )))
        }
    }
}

pub(super) fn timeout(context: &Context, args: &TimeoutArgs) -> Result<(), Failure> {
    let request = TimeoutRequest {
        timeout: seconds(args.time),
    };
    let sent = context
        .server()?
        .send("POST", &path(&args.id, "/timeout"), &request);
    sent.map_err(unknown_sandbox)?;
    let item = json!({"sandboxID": args.id, "timeout": request.timeout});
    context.format.done("sandbox", &item, &args.id)
}
