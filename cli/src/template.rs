//! `cube template`: templates, from which sandboxes are created.

mod list;
mod make;
mod tags;

use clap::{Args, Subcommand};
use serde_json::json;

use crate::{
    build::{Build, RegistryArgs, begin_redo, until_ready},
    context::Context,
    failure::Failure,
    progress::Style,
    server::segment,
};

pub(crate) use list::{builds, status, templates};

/// The remedy for an unknown template.
pub(crate) const UNKNOWN: &str = "`cube template list` shows the templates";

#[derive(Subcommand, Debug)]
pub(crate) enum TemplateCommand {
    /// List templates
    #[command(visible_alias = "ls")]
    List,
    /// Show a template and its builds
    Info(Template),
    /// Build a template from an image, another template, or a Dockerfile
    Build(Box<make::BuildArgs>),
    /// Remove templates; their sandboxes continue
    #[command(visible_alias = "rm")]
    Delete {
        /// Names or ids
        #[arg(value_name = "TEMPLATE", required = true)]
        templates: Vec<String>,
    },
    /// Build a template again as it was built, for example after an upgrade of the server
    Redo(RedoArgs),
    /// Show the log of a build
    Logs(list::LogsArgs),
    /// Add tags to a build
    Tag(tags::TagArgs),
    /// Remove tags from a template
    Untag(tags::UntagArgs),
    /// List the tags of a template
    Tags(Template),
}

/// A template.
#[derive(Args, Debug)]
pub(crate) struct Template {
    /// Name or id
    #[arg(value_name = "TEMPLATE")]
    pub(crate) template: String,
}

#[derive(Args, Debug)]
pub(crate) struct RedoArgs {
    /// Name, name:tag or id
    #[arg(value_name = "TEMPLATE")]
    template: String,
    /// Run all steps, even those in the cache
    #[arg(long)]
    no_cache: bool,
    /// Do not wait for the end of the build
    #[arg(long)]
    detach: bool,
    #[command(flatten)]
    registry: RegistryArgs,
}

pub(crate) fn run(context: &Context, command: &TemplateCommand) -> Result<(), Failure> {
    match command {
        TemplateCommand::List => list::list(context),
        TemplateCommand::Info(of) => list::info(context, &of.template),
        TemplateCommand::Build(args) => make::build(context, args),
        TemplateCommand::Delete { templates } => delete(context, templates),
        TemplateCommand::Redo(args) => redo(context, args),
        TemplateCommand::Logs(args) => list::logs(context, args),
        TemplateCommand::Tag(args) => tags::tag(context, args),
        TemplateCommand::Untag(args) => tags::untag(context, args),
        TemplateCommand::Tags(of) => tags::list(context, &of.template),
    }
}

fn delete(context: &Context, templates: &[String]) -> Result<(), Failure> {
    let mut server = context.server()?;
    for template in templates {
        let removed = server.delete(&format!("/templates/{}", segment(template)));
        removed.map_err(|why| why.if_not_found(UNKNOWN))?;
        let item = json!({"template": template, "deleted": true});
        context.format.done("template", &item, template)?;
    }
    Ok(())
}

fn redo(context: &Context, args: &RedoArgs) -> Result<(), Failure> {
    let mut server = context.server()?;
    let registry = args.registry.registry()?;
    let build = begin_redo(&mut server, &args.template, args.no_cache, registry)?;
    if !args.detach {
        until_ready(&mut server, &build, &args.template, Style::of_stderr())?;
    }
    built(context, &build, args.detach)
}

/// Prints the ids of a build that is ready, or that was started.
fn built(context: &Context, build: &Build, is_detached: bool) -> Result<(), Failure> {
    let status = if is_detached { "building" } else { "ready" };
    let item = json!({
        "templateID": build.template_id, "buildID": build.build_id, "status": status,
    });
    let line = format!("{}  {}  {status}", build.template_id, build.build_id);
    context.format.done("build", &item, &line)
}
