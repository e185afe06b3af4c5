//! `tpl list` and `tpl info`, with the field names of CubeSandbox's responses.

use envd::one_line;
use rest::{BuildOrder, BuildStatus, SnapshotInfo, Template, TemplateBuild, TemplateWithBuilds};
use serde_json::{Value, json};

use super::{
    answer,
    job::{snapshots, template_id},
};
use crate::{
    build::Build,
    context::Context,
    failure::Failure,
    output::{Format, print, print_json, properties, time},
    server::{Server, segment},
    template::{UNKNOWN, builds, status, templates},
};

const INSTANCE_TYPE: &str = "cubebox";
/// The annotation that names a template in CubeSandbox's requests.
pub(super) const TEMPLATE: &str = "cube.master.appsnapshot.template.id";

pub(super) fn list(context: &Context, output: Option<&str>) -> Result<(), Failure> {
    let format = match output {
        Some("json") => Format::Json,
        None | Some("wide") => context.format,
        Some(other) => {
            return Err(Failure::usage(format!("-o {other}: use wide or json")));
        }
    };
    let mut server = context.server()?;
    let found = templates(&mut server)?;
    let committed = snapshots(&mut server)?;
    let rows: Vec<_> = found
        .iter()
        .map(row)
        .chain(committed.iter().map(committed_row))
        .collect();
    let columns = [
        "TEMPLATE_ID",
        "INSTANCE_TYPE",
        "STATUS",
        "CREATED_AT",
        "IMAGE_INFO",
    ];
    match format {
        Format::Human => format.list("template", &rows, &columns, |row| row.clone().into()),
        Format::Json => {
            let data = rows.iter().map(|[id, kind, status, created, image]| {
                json!({
                    "template_id": id, "instance_type": kind, "status": status, "created_at": created,
                    "image_info": image,
                })
            });
            print_json(&answer(json!({"data": data.collect::<Vec<_>>()})))
        }
    }
}

/// The last column has names, because lists do not include the image.
fn row(template: &Template) -> [String; 5] {
    [
        template_id(&template.template_id, &template.aliases).to_owned(),
        INSTANCE_TYPE.to_owned(),
        upper(template.build_status),
        time(Some(template.created_at)),
        template.names.join(","),
    ]
}

/// Lists do not include the time of a snapshot.
fn committed_row(snapshot: &SnapshotInfo) -> [String; 5] {
    [
        template_id(&snapshot.snapshot_id, &snapshot.names).to_owned(),
        INSTANCE_TYPE.to_owned(),
        "READY".to_owned(),
        time(None),
        snapshot.names.join(","),
    ]
}

fn upper(of: BuildStatus) -> String {
    match of {
        BuildStatus::Error => "FAILED".to_owned(),
        BuildStatus::Waiting | BuildStatus::Building | BuildStatus::Ready => {
            status(of).to_uppercase()
        }
    }
}

pub(super) fn info(
    context: &Context,
    template: &str,
    includes_request: bool,
) -> Result<(), Failure> {
    let mut server = context.server()?;
    let found = builds(&mut server, template)?;
    let id = template_id(&found.template_id, &found.aliases);
    let newest = found.builds.first();
    let error = newest.map(|build| error(&mut server, &found, build));
    let error = error.transpose()?.unwrap_or_default();
    let request = if includes_request {
        order(&mut server, template)?
    } else {
        None
    };
    let request = request.map(|order| create_request(id, &order));
    let of_newest = |text: fn(&TemplateBuild) -> String| newest.map_or_else(String::new, text);
    let lines = [
        ("template_id", id.to_owned()),
        ("instance_type", INSTANCE_TYPE.to_owned()),
        ("alias", found.names.join(",")),
        ("status", of_newest(|build| upper(build.status))),
        ("last_error", error),
        ("job_id", of_newest(|build| build.build_id.clone())),
        (
            "cpu",
            of_newest(|build| (u32::from(build.cpu_count) * 1000).to_string()),
        ),
        ("memory", of_newest(|build| build.memory_mb.to_string())),
        ("created_at", time(Some(found.created_at))),
    ];
    match context.format {
        Format::Human => {
            let request = request.map_or_else(String::new, |request| {
                format!("create_request: {}\n", one_line(&request.to_string()))
            });
            print(&format!("{}{request}", properties(&lines)))
        }
        Format::Json => {
            let fields = lines.iter().filter(|(_, value)| !value.is_empty());
            let mut fields: Value = fields
                .map(|(name, value)| (*name, value.as_str()))
                .collect();
            // There is one node.
            fields["replicas"] = json!([{"node_id": "local", "status": lines[3].1}]);
            if let Some(request) = request {
                fields["create_request"] = request;
            }
            print_json(&answer(fields))
        }
    }
}

/// Why a build failed; empty if it did not.
fn error(
    server: &mut Server,
    template: &TemplateWithBuilds,
    build: &TemplateBuild,
) -> Result<String, Failure> {
    if build.status != BuildStatus::Error {
        return Ok(String::new());
    }
    let build = Build {
        template_id: template.template_id.clone(),
        build_id: build.build_id.clone(),
    };
    let reason = build.status(server, 0)?.reason;
    Ok(reason.map_or_else(String::new, |reason| reason.message))
}

/// The order of the template's build. `None`, with a message on standard error: the server has no such order.
fn order(server: &mut Server, template: &str) -> Result<Option<BuildOrder>, Failure> {
    let order = server.get(&format!("/templates/{}/order", segment(template)));
    match order {
        Ok(order) => Ok(Some(order)),
        Err(why) if why.kind == crate::failure::Kind::Refused => {
            eprintln!("note: no create_request: {}", one_line(&why.message));
            Ok(None)
        }
        Err(why) => Err(why.if_not_found(UNKNOWN)),
    }
}

/// An order in CubeSandbox's field names where its requests have an equivalent; the other fields are below `build`.
fn create_request(template: &str, order: &BuildOrder) -> Value {
    let start = &order.start;
    let mut build = json!({
        "fromTemplate": start.from_template, "imageConfig": start.image_config, "startCmd": start.start_cmd,
        "readyCmd": start.ready_cmd, "steps": start.steps, "hadCredentials": order.had_credentials,
    });
    if let Some(build) = build.as_object_mut() {
        build.retain(|_, value| !value.is_null());
    }
    let mut request = json!({
        "template_id": template, "instance_type": INSTANCE_TYPE, "annotations": {TEMPLATE: template},
        "container_overrides": {"resources": {
            "cpu": format!("{}m", u32::from(order.cpu_count) * 1000), "mem": format!("{}Mi", order.memory_mb),
        }},
        "build": build,
    });
    if let Some(image) = &start.from_image {
        request["source_image_ref"] = json!(image);
    }
    if order.min_free_disk_mb > 0 {
        request["writable_layer_size"] = json!(format!("{}Mi", order.min_free_disk_mb));
    }
    request
}

#[cfg(test)]
mod tests {
    use rest::StartBuild;

    use super::*;

    #[test]
    fn an_order_is_shown_with_the_names_of_the_guides() {
        let order = BuildOrder {
            template_id: "0123".to_owned(),
            build_id: "b".to_owned(),
            cpu_count: 2,
            memory_mb: 512,
            min_free_disk_mb: 8192,
            had_credentials: true,
            start: StartBuild {
                from_image: Some("x:1".to_owned()),
                start_cmd: Some("serve".to_owned()),
                steps: Some(Vec::new()),
                ..StartBuild::default()
            },
        };
        let expected = json!({
            "template_id": "t", "instance_type": "cubebox",
            "annotations": {"cube.master.appsnapshot.template.id": "t"},
            "source_image_ref": "x:1", "writable_layer_size": "8192Mi",
            "container_overrides": {"resources": {"cpu": "2000m", "mem": "512Mi"}},
            "build": {"startCmd": "serve", "steps": [], "hadCredentials": true},
        });
        assert_eq!(create_request("t", &order), expected);
    }
}
