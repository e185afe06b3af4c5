//! `cube template list`, `info` and `logs`.

use clap::Args;
use envd::{Timestamp, guest_text};
use rest::{BuildLogEntry, BuildStatus, Template, TemplateBuild, TemplateWithBuilds};

use super::UNKNOWN;
use crate::{
    build::Build,
    context::Context,
    failure::Failure,
    output::{Format, print, time},
    server::{Server, segment},
};

const COLUMNS: [&str; 7] = ["ID", "NAMES", "STATUS", "CPUS", "MEMORY", "DISK", "UPDATED"];

#[derive(Args, Debug)]
pub(crate) struct LogsArgs {
    /// Name or id
    #[arg(value_name = "TEMPLATE")]
    template: String,
    /// Id of the build [default: the newest one]
    #[arg(value_name = "BUILD")]
    build: Option<String>,
}

/// All templates of a server.
pub(crate) fn templates(server: &mut Server) -> Result<Vec<Template>, Failure> {
    server.get("/templates")
}

pub(super) fn list(context: &Context) -> Result<(), Failure> {
    let found = templates(&mut context.server()?)?;
    context
        .format
        .list("template", &found, &COLUMNS, |template| {
            vec![
                template.template_id.clone(),
                first_name(template),
                status(template.build_status).to_owned(),
                template.cpu_count.to_string(),
                format!("{} MiB", template.memory_mb),
                format!("{} MiB", template.disk_size_mb),
                time(Some(template.updated_at)),
            ]
        })
}

/// The first name, and how many more there are. A template without a finished build has only aliases.
fn first_name(template: &Template) -> String {
    let names = if template.names.is_empty() {
        &template.aliases
    } else {
        &template.names
    };
    match names.as_slice() {
        [] => "-".to_owned(),
        [only] => only.clone(),
        [first, others @ ..] => format!("{first} +{}", others.len()),
    }
}

pub(crate) fn status(status: BuildStatus) -> &'static str {
    match status {
        BuildStatus::Waiting => "waiting",
        BuildStatus::Building => "building",
        BuildStatus::Ready => "ready",
        BuildStatus::Error => "error",
    }
}

/// A template with its builds, newest first.
pub(crate) fn builds(server: &mut Server, template: &str) -> Result<TemplateWithBuilds, Failure> {
    let path = format!("/templates/{}?limit=100", segment(template));
    server.get(&path).map_err(|why| why.if_not_found(UNKNOWN))
}

pub(super) fn info(context: &Context, template: &str) -> Result<(), Failure> {
    let found = builds(&mut context.server()?, template)?;
    let mut lines = vec![
        ("id", found.template_id.clone()),
        ("names", found.names.join(", ")),
        ("created", time(Some(found.created_at))),
        ("updated", time(Some(found.updated_at))),
        ("sandboxes started", found.spawn_count.to_string()),
    ];
    if !found.nodes.is_empty() {
        lines.push(("nodes", found.nodes.join(", ")));
    }
    context.format.properties("template", &found, &lines)?;
    if context.format == Format::Json {
        return Ok(());
    }
    print("\n")?;
    let columns = [
        "BUILD", "STATUS", "CPUS", "MEMORY", "DISK", "CREATED", "FINISHED",
    ];
    context.format.list("build", &found.builds, &columns, row)
}

fn row(build: &TemplateBuild) -> Vec<String> {
    let disk = build
        .disk_size_mb
        .map_or("-".to_owned(), |mb| format!("{mb} MiB"));
    vec![
        build.build_id.clone(),
        status(build.status).to_owned(),
        build.cpu_count.to_string(),
        format!("{} MiB", build.memory_mb),
        disk,
        time(Some(build.created_at)),
        time(build.finished_at),
    ]
}

pub(super) fn logs(context: &Context, args: &LogsArgs) -> Result<(), Failure> {
    let mut server = context.server()?;
    let found = builds(&mut server, &args.template)?;
    let newest = found.builds.first().map(|build| build.build_id.clone());
    let build_id = args.build.clone().or(newest);
    let build = Build {
        template_id: found.template_id,
        build_id: build_id.ok_or_else(|| Failure::refused("the template has no build"))?,
    };
    let entries = all_entries(&mut server, &build)?;
    match context.format {
        Format::Json => context.format.list("log", &entries, &[], |_| Vec::new()),
        Format::Human => {
            let lines: String = entries.iter().map(line).collect();
            print(&lines)
        }
    }
}

fn all_entries(server: &mut Server, build: &Build) -> Result<Vec<BuildLogEntry>, Failure> {
    let mut all: Vec<BuildLogEntry> = Vec::new();
    loop {
        let page = build.status(server, all.len())?.log_entries;
        if page.is_empty() {
            return Ok(all);
        }
        all.extend(page);
    }
}

fn line(entry: &BuildLogEntry) -> String {
    let at: Timestamp = entry.timestamp;
    let step = entry.step.as_deref().unwrap_or("-");
    format!(
        "{}  {:<8}  {}\n",
        time(Some(at)),
        guest_text(step),
        guest_text(&entry.message)
    )
}
