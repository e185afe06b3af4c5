//! `cube template tag`, `untag` and `tags`.

use clap::Args;
use rest::{AssignTags, AssignedTags, DeleteTags, TemplateTag};
use serde_json::json;

use super::UNKNOWN;
use crate::{context::Context, failure::Failure, output::time, server::segment};

#[derive(Args, Debug)]
pub(crate) struct TagArgs {
    /// Build to tag: name, or name:tag
    #[arg(value_name = "TEMPLATE")]
    target: String,
    /// Tags to add; each is removed from the build of this template that has it
    #[arg(value_name = "TAG", required = true)]
    tags: Vec<String>,
}

#[derive(Args, Debug)]
pub(crate) struct UntagArgs {
    /// Name of the template, without a tag
    #[arg(value_name = "TEMPLATE")]
    name: String,
    /// Tags to remove; a build that loses its last tag is detached from its template
    #[arg(value_name = "TAG", required = true)]
    tags: Vec<String>,
}

pub(super) fn tag(context: &Context, args: &TagArgs) -> Result<(), Failure> {
    let request = AssignTags {
        target: args.target.clone(),
        tags: args.tags.clone(),
    };
    let assigned: AssignedTags = context
        .server()?
        .post("/templates/tags", &request)
        .map_err(|why| why.if_not_found(UNKNOWN))?;
    let item = json!({"buildID": assigned.build_id, "tags": assigned.tags});
    let text = format!("{}  {}", assigned.build_id, assigned.tags.join(","));
    context.format.done("tag", &item, &text)
}

pub(super) fn untag(context: &Context, args: &UntagArgs) -> Result<(), Failure> {
    let request = DeleteTags {
        name: args.name.clone(),
        tags: args.tags.clone(),
    };
    let sent = context
        .server()?
        .send("DELETE", "/templates/tags", &request);
    sent.map_err(|why| why.if_not_found(UNKNOWN))?;
    let item = json!({"template": args.name, "removed": args.tags});
    let lines: Vec<_> = args.tags.iter().map(String::as_str).collect();
    context.format.lines("tag", &item, &lines)
}

pub(super) fn list(context: &Context, template: &str) -> Result<(), Failure> {
    let path = format!("/templates/{}/tags", segment(template));
    let found = context.server()?.get(&path);
    let found: Vec<TemplateTag> = found.map_err(|why: Failure| why.if_not_found(UNKNOWN))?;
    context
        .format
        .list("tag", &found, &["TAG", "BUILD", "CREATED"], |tag| {
            vec![
                tag.tag.clone(),
                tag.build_id.clone(),
                time(Some(tag.created_at)),
            ]
        })
}
