//! `tpl …`

use std::path::PathBuf;

use clap::{Args, Subcommand};
use envd::one_line;
use rest::{NewBuild, SnapshotInfo, SnapshotRequest, StartBuild};
use serde_json::json;

use super::{
    answer,
    create::{self, CreateArgs},
    info,
    job::{self, Build, Found, Job, Shown, template_id},
    render,
};
use crate::{
    build::{RegistryArgs, begin, begin_redo},
    context::Context,
    failure::Failure,
    output::{Format, print, print_json},
    server::{segment, unknown_sandbox},
    template::UNKNOWN,
};

#[derive(Subcommand, Debug)]
pub(super) enum TplCommand {
    /// Build a template from an image
    CreateFromImage(Box<CreateArgs>),
    /// Follow a job until it ends
    #[command(visible_alias = "build-watch")]
    Watch(JobArgs),
    /// Show a job
    #[command(visible_alias = "build-status")]
    Status(JobArgs),
    /// List templates
    #[command(visible_alias = "ls")]
    List {
        /// wide, or json
        #[arg(short, long, value_name = "FORM")]
        output: Option<String>,
    },
    /// Show a template
    Info {
        #[command(flatten)]
        of: TemplateArgs,
        /// Also show the request of its build
        #[arg(long)]
        include_request: bool,
    },
    /// Convert a request file to a request for a sandbox, as JSON
    Render(render::RenderArgs),
    /// Remove a template
    Delete(TemplateArgs),
    /// Repeat the build of a template
    Redo {
        #[command(flatten)]
        of: TemplateArgs,
        /// Not used: there is only one node
        #[arg(long, hide = true)]
        node: Vec<String>,
        /// Not used: a failed build is always repeated as a whole
        #[arg(long, hide = true)]
        failed_only: bool,
        /// Follow the job until it ends
        #[arg(long)]
        wait: bool,
        #[arg(long, hide = true)]
        interval: Option<String>,
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
    /// Snapshot a sandbox as a template
    Commit {
        /// Id of the sandbox
        #[arg(long, value_name = "ID")]
        sandbox_id: String,
        /// Id of the template, which is its name
        #[arg(long, visible_alias = "alias", value_name = "ID")]
        template_id: Option<String>,
        /// Not used: the sandbox keeps the options it was created with
        #[arg(short, long, hide = true)]
        file: Option<PathBuf>,
    },
}

#[derive(Args, Debug)]
pub(super) struct JobArgs {
    /// Id of the job
    #[arg(
        long = "job-id",
        visible_alias = "build-id",
        value_name = "ID",
        required_unless_present = "job"
    )]
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
            match job::find(&mut server, args.id())? {
                Found::Build(build) => job::watch(&mut server, &build, Shown::of(context.format)),
                Found::Snapshot(made) => create::show(context, &Job::committed(&made)),
            }
        }
        TplCommand::Status(args) => {
            let mut server = context.server()?;
            let job = match job::find(&mut server, args.id())? {
                Found::Build(build) => job::status(&mut server, &build)?,
                Found::Snapshot(made) => Job::committed(&made),
            };
            create::show(context, &job)
        }
        TplCommand::List { output } => info::list(context, output.as_deref()),
        TplCommand::Info {
            of,
            include_request,
        } => info::info(context, of.id(), *include_request),
        TplCommand::Render(args) => render::render(context, args),
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
        TplCommand::Redo { of, wait, .. } => redo(context, of.id(), *wait),
        TplCommand::SetAlias { of, alias, clear } => {
            set_alias(context, of.id(), alias.as_deref(), *clear)
        }
        TplCommand::Commit {
            sandbox_id,
            template_id,
            ..
        } => commit(context, sandbox_id, template_id.clone()),
    }
}

fn redo(context: &Context, template: &str, waits: bool) -> Result<(), Failure> {
    let mut server = context.server()?;
    let registry = RegistryArgs::default().registry()?;
    let build = Build {
        build: begin_redo(&mut server, template, false, registry)?,
        template: template.to_owned(),
    };
    let job = job::settle(&mut server, &build)?;
    match (waits, context.format) {
        (true, Format::Json) => job::watch(&mut server, &build, Shown::Json),
        (true, Format::Human) if !job.is_ready() => {
            create::show(context, &job)?;
            job::watch(&mut server, &build, Shown::Lines)
        }
        (true, Format::Human) | (false, _) => create::show(context, &job),
    }
}

/// A template has one name here, so setting another name is a build that adds only the name.
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
    let build = Build {
        build: begin(&mut server, &new, &order)?,
        template: alias.to_owned(),
    };
    eprintln!("note: {alias} is a separate template, built from {template}");
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
    let (id, job) = (
        template_id(&made.snapshot_id, &made.names),
        &made.snapshot_id,
    );
    match context.format {
        Format::Human => print(&format!(
            "template_id: {}\nbuild_id:    {}\nstatus:      READY\n",
            one_line(id),
            one_line(job)
        )),
        Format::Json => {
            let fields = json!({"template_id": id, "build_id": job, "status": "READY"});
            print_json(&answer(fields))
        }
    }
}
