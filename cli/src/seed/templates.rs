//! `tpl …`

use api_types::rest::{NewBuild, SnapshotInfo, SnapshotRequest, StartBuild, Template};
use clap::{Args, Subcommand};
use serde_json::json;

use super::{
    create::{self, CreateArgs},
    job::{self, Shown},
};
use crate::{
    build::{Build, RegistryArgs, begin, begin_redo},
    failure::Failure,
    output::{Format, print, time},
    program::Context,
    server::{segment, unknown_sandbox},
    template::{UNKNOWN, builds, status, templates},
};

#[derive(Subcommand, Debug)]
pub(super) enum TplCommand {
    /// Build a template from an image
    CreateFromImage(Box<CreateArgs>),
    /// Follow a job to its end
    #[command(visible_alias = "build-watch")]
    Watch(JobArgs),
    /// Show a job
    #[command(visible_alias = "build-status")]
    Status(JobArgs),
    /// List templates
    List {
        /// wide, or json
        #[arg(short, long, value_name = "FORM")]
        output: Option<String>,
    },
    /// Show a template
    Info(TemplateArgs),
    /// Show a template as JSON
    Render(TemplateArgs),
    /// Remove a template
    Delete(TemplateArgs),
    /// Build a template again
    Redo {
        #[command(flatten)]
        of: TemplateArgs,
        /// Not used: there is one node
        #[arg(long, hide = true)]
        node: Vec<String>,
        /// Not used: a failed build is started again as a whole
        #[arg(long, hide = true)]
        failed_only: bool,
    },
    /// Make a template available under another name
    SetAlias {
        #[command(flatten)]
        of: TemplateArgs,
        /// The other name
        #[arg(long)]
        alias: Option<String>,
        /// Not supported
        #[arg(long, hide = true)]
        clear: bool,
    },
    /// Keep the state of a sandbox as a template
    Commit {
        /// Id of the sandbox
        #[arg(long, value_name = "ID")]
        sandbox_id: String,
        /// Name of the template
        #[arg(long)]
        alias: Option<String>,
    },
}

#[derive(Args, Debug)]
pub(super) struct JobArgs {
    /// Id of the job
    #[arg(long = "job-id", value_name = "ID", required_unless_present = "job")]
    job_id: Option<String>,
    #[arg(value_name = "ID", conflicts_with = "job_id")]
    job: Option<String>,
    #[arg(long, hide = true)]
    interval: Option<String>,
}

#[derive(Args, Debug)]
pub(super) struct TemplateArgs {
    /// Id or name of the template
    #[arg(long, value_name = "ID", required_unless_present = "template")]
    template_id: Option<String>,
    #[arg(value_name = "ID", conflicts_with = "template_id")]
    template: Option<String>,
}

impl JobArgs {
    fn id(&self) -> &str {
        let id = self.job_id.as_deref().or(self.job.as_deref());
        id.unwrap_or_default()
    }
}

impl TemplateArgs {
    fn id(&self) -> &str {
        let id = self.template_id.as_deref().or(self.template.as_deref());
        id.unwrap_or_default()
    }
}

pub(super) fn run(context: &Context, command: &TplCommand) -> Result<(), Failure> {
    match command {
        TplCommand::CreateFromImage(args) => create::create(context, args),
        TplCommand::Watch(args) => {
            let mut server = context.server()?;
            let build = job::find(&mut server, args.id())?;
            let shown = match context.format {
                Format::Human => Shown::Lines,
                Format::Json => Shown::Json,
            };
            job::watch(&mut server, &build, shown)
        }
        TplCommand::Status(args) => {
            let mut server = context.server()?;
            let build = job::find(&mut server, args.id())?;
            create::show(context, &job::status(&mut server, &build)?)
        }
        TplCommand::List { output } => list(context, output.as_deref()),
        TplCommand::Info(of) => info(context, of.id()),
        TplCommand::Render(of) => {
            let found = builds(&mut context.server()?, of.id())?;
            Format::Json.properties("template", &found, &[])
        }
        TplCommand::Delete(of) => {
            let id = of.id();
            let removed = context
                .server()?
                .delete(&format!("/templates/{}", segment(id)));
            removed.map_err(|why| why.if_not_found(UNKNOWN))?;
            let item = json!({"template_id": id});
            context
                .format
                .done("template", &item, &format!("template deleted: {id}"))
        }
        TplCommand::Redo { of, .. } => {
            let mut server = context.server()?;
            let registry = RegistryArgs::default().registry()?;
            let build = begin_redo(&mut server, of.id(), false, registry)?;
            create::show(context, &job::settle(&mut server, &build)?)
        }
        TplCommand::SetAlias { of, alias, clear } => {
            set_alias(context, of.id(), alias.as_deref(), *clear)
        }
        TplCommand::Commit { sandbox_id, alias } => commit(context, sandbox_id, alias.clone()),
    }
}

fn list(context: &Context, output: Option<&str>) -> Result<(), Failure> {
    let format = match output {
        Some("json") => Format::Json,
        None | Some("wide") => context.format,
        Some(other) => {
            return Err(Failure::usage(format!("-o {other}: use wide or json")));
        }
    };
    let found = templates(&mut context.server()?)?;
    let columns = [
        "TEMPLATE_ID",
        "INSTANCE_TYPE",
        "STATUS",
        "CREATED_AT",
        "IMAGE_INFO",
    ];
    format.list("template", &found, &columns, row)
}

fn row(template: &Template) -> Vec<String> {
    vec![
        template.template_id.clone(),
        "cubebox".to_owned(),
        status(template.build_status).to_uppercase(),
        time(Some(template.created_at)),
        template.names.join(","),
    ]
}

fn info(context: &Context, template: &str) -> Result<(), Failure> {
    let found = builds(&mut context.server()?, template)?;
    let newest = found.builds.first();
    let lines = [
        ("template_id", found.template_id.clone()),
        ("alias", found.names.join(",")),
        (
            "status",
            newest.map_or_else(String::new, |build| status(build.status).to_uppercase()),
        ),
        (
            "job_id",
            newest.map_or_else(String::new, |build| build.build_id.clone()),
        ),
        (
            "cpu",
            newest.map_or_else(String::new, |build| {
                format!("{}", u32::from(build.cpu_count) * 1000)
            }),
        ),
        (
            "memory",
            newest.map_or_else(String::new, |build| build.memory_mb.to_string()),
        ),
        ("created_at", time(Some(found.created_at))),
    ];
    context.format.properties("template", &found, &lines)
}

/// A template has one name here, so another name is a build that begins and ends with it.
fn set_alias(
    context: &Context,
    template: &str,
    alias: Option<&str>,
    clear: bool,
) -> Result<(), Failure> {
    let alias = alias.filter(|_| !clear).ok_or_else(|| {
        Failure::usage("a template cannot lose its name here")
            .with_cure("give it another one: --alias NAME")
    })?;
    let mut server = context.server()?;
    let new = NewBuild {
        name: Some(alias.to_owned()),
        ..NewBuild::default()
    };
    let order = StartBuild {
        from_template: Some(template.to_owned()),
        ..StartBuild::default()
    };
    let build: Build = begin(&mut server, &new, &order)?;
    eprintln!("note: {alias} is a template of its own, made of {template}");
    create::show(context, &job::settle(&mut server, &build)?)
}

fn commit(context: &Context, sandbox: &str, alias: Option<String>) -> Result<(), Failure> {
    let request = SnapshotRequest {
        name: alias,
        memory: None,
    };
    let path = format!("/sandboxes/{}/snapshots", segment(sandbox));
    let made: SnapshotInfo = context
        .server()?
        .post(&path, &request)
        .map_err(unknown_sandbox)?;
    match context.format {
        Format::Human => print(&format!(
            "template_id: {}\nstatus:      READY\n",
            api_types::one_line(&made.snapshot_id)
        )),
        Format::Json => Format::Json.properties("template", &made, &[]),
    }
}
