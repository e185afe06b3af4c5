//! `cube sandbox list` and `info`.

use clap::{Args, ValueEnum};
use envd::one_line;
use rest::{ListedSandbox, OnTimeout, SandboxDetail, SandboxState};

use crate::{
    context::Context,
    failure::Failure,
    output::{print, time},
    server::{Server, segment, unknown_sandbox},
};

#[derive(Args, Debug)]
pub(crate) struct ListArgs {
    /// Only sandboxes in this state
    #[arg(long, value_enum)]
    state: Option<State>,
    /// Only sandboxes with this label; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    metadata: Vec<String>,
    /// Print ids only
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum State {
    Running,
    Paused,
}

const COLUMNS: [&str; 8] = [
    "ID", "STATE", "TEMPLATE", "CPUS", "MEMORY", "STARTED", "ENDS", "METADATA",
];

/// All sandboxes that match a query.
pub(crate) fn all(server: &mut Server, query: &str) -> Result<Vec<ListedSandbox>, Failure> {
    server.pages(&format!("/v2/sandboxes?limit=100{query}"))
}

/// Prints the ids, one per line.
pub(crate) fn print_ids(found: &[ListedSandbox]) -> Result<(), Failure> {
    let ids = found
        .iter()
        .map(|s| format!("{}\n", one_line(&s.sandbox_id)));
    print(&ids.collect::<String>())
}

pub(super) fn list(context: &Context, args: &ListArgs) -> Result<(), Failure> {
    let mut server = context.server()?;
    let found = all(&mut server, &args.query()?)?;
    if args.quiet {
        return print_ids(&found);
    }
    context.format.list("sandbox", &found, &COLUMNS, row)
}

impl ListArgs {
    fn query(&self) -> Result<String, Failure> {
        let mut query = match self.state {
            None => String::new(),
            Some(State::Running) => "&state=running".to_owned(),
            Some(State::Paused) => "&state=paused".to_owned(),
        };
        let pairs = self.metadata.iter().map(|pair| match pair.split_once('=') {
            // Names and values are encoded once more than other query values.
            Some((name, value)) => Ok(format!("{}={}", segment(name), segment(value))),
            None => Err(Failure::usage(format!(
                "--metadata {pair}: write NAME=VALUE"
            ))),
        });
        let pairs = pairs.collect::<Result<Vec<_>, _>>()?;
        if !pairs.is_empty() {
            query.push_str(&format!("&metadata={}", segment(&pairs.join("&"))));
        }
        Ok(query)
    }
}

fn row(sandbox: &ListedSandbox) -> Vec<String> {
    let labels = sandbox.metadata.iter();
    let labels: Vec<_> = labels
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    vec![
        sandbox.sandbox_id.clone(),
        state(sandbox.state).to_owned(),
        sandbox
            .alias
            .clone()
            .unwrap_or_else(|| sandbox.template_id.clone()),
        sandbox.cpu_count.to_string(),
        format!("{} MiB", sandbox.memory_mb),
        time(Some(sandbox.started_at)),
        time(Some(sandbox.end_at)),
        envd::guest_text(&labels.join(",")),
    ]
}

fn state(state: SandboxState) -> &'static str {
    match state {
        SandboxState::Running => "running",
        SandboxState::Paused => "paused",
    }
}

pub(crate) fn info(context: &Context, id: &str) -> Result<(), Failure> {
    let mut server = context.server()?;
    let path = format!("/sandboxes/{}", segment(id));
    let mut found: SandboxDetail = server.get(&path).map_err(unknown_sandbox)?;
    // Secrets are not for terminals and logs.
    found.envd_access_token = None;
    let end = match found.lifecycle.on_timeout {
        OnTimeout::Kill => "killed",
        OnTimeout::Pause => "paused",
    };
    let labels = found.metadata.iter();
    let labels: Vec<_> = labels
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    let egress = match (found.allow_internet_access, &found.network) {
        (_, Some(network)) => network.allow_out.clone().unwrap_or_default().join(", "),
        (Some(true), None) => "internet".to_owned(),
        (Some(false), None) => "none".to_owned(),
        (None, None) => "as the server is configured".to_owned(),
    };
    let lines = [
        ("id", found.sandbox_id.clone()),
        ("state", state(found.state).to_owned()),
        ("template", found.template_id.clone()),
        (
            "name of the template",
            found.alias.clone().unwrap_or_default(),
        ),
        ("cpus", found.cpu_count.to_string()),
        ("memory", format!("{} MiB", found.memory_mb)),
        ("disk", format!("{} MiB", found.disk_size_mb)),
        ("started", time(Some(found.started_at))),
        ("ends", time(Some(found.end_at))),
        ("at its end", end.to_owned()),
        ("egress", egress),
        ("domain", found.domain.clone().unwrap_or_default()),
        ("metadata", envd::guest_text(&labels.join(","))),
    ];
    context.format.properties("sandbox", &found, &lines)
}
