//! `tpl render`: converts a file in CubeSandbox's form to the request for a sandbox. Nothing is sent.

use std::{
    collections::BTreeMap,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use clap::{ArgGroup, Args};
use rest::{NetworkConfig, NewSandbox};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{answer, info::TEMPLATE};
use crate::{context::Context, failure::Failure, output::print_json, template::builds};

/// Longest file in bytes.
const MAX_FILE: u64 = 4 << 20;
/// Default timeout in seconds, as in CubeSandbox.
const USUAL_TIMEOUT: i64 = 60;

#[derive(Args, Debug)]
#[command(group = ArgGroup::new("what").required(true).multiple(true).args(["file", "template_id", "word"]))]
pub(super) struct RenderArgs {
    /// JSON file with a request for a sandbox; no server is contacted
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Id of the template, instead of the one in the file
    #[arg(long, value_name = "ID")]
    template_id: Option<String>,
    /// The file, or the id of a template
    #[arg(value_name = "FILE|ID", conflicts_with = "file")]
    word: Option<String>,
}

/// The parts of a CubeSandbox request that have an equivalent on this server.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Request {
    annotations: BTreeMap<String, String>,
    timeout: Option<i64>,
    labels: BTreeMap<String, String>,
    containers: Vec<Container>,
    /// Older name of the field.
    cubevs_context: Option<Network>,
    cube_network_config: Option<Network>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Container {
    envs: Vec<Variable>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Variable {
    key: String,
    value: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Network {
    allow_internet_access: Option<bool>,
    allow_out: Vec<String>,
    deny_out: Vec<String>,
}

/// Keys of a request that have an effect.
const USED: [&str; 6] = [
    "annotations",
    "timeout",
    "labels",
    "containers",
    "cubevs_context",
    "cube_network_config",
];

pub(super) fn render(context: &Context, args: &RenderArgs) -> Result<(), Failure> {
    let word = args.word.as_deref();
    let of_word = word.map(Path::new).filter(|path| path.is_file());
    let file = args.file.as_deref().or(of_word);
    let template = args.template_id.as_deref().or(match of_word {
        Some(_) => None,
        None => word,
    });
    let given = match file {
        Some(file) => read(file)?,
        None => Map::new(),
    };
    let (api, merged, ignored) = merge(given, template)?;
    for key in &ignored {
        eprintln!("note: {key} has no effect here");
    }
    let mut fields = json!({"api_request": api, "merged_request": merged, "ignored": ignored});
    if file.is_none() {
        // The template must exist; its own settings are not part of a request.
        fields["template"] = json!(builds(&mut context.server()?, &merged.template_id)?);
    }
    print_json(&answer(fields))
}

fn read(file: &Path) -> Result<Map<String, Value>, Failure> {
    let mut bytes = Vec::new();
    File::open(file)
        .and_then(|open| open.take(MAX_FILE + 1).read_to_end(&mut bytes))
        .map_err(|why| Failure::host(format!("{}: {why}", file.display())))?;
    let shown = file.display();
    if bytes.len() as u64 > MAX_FILE {
        return Err(Failure::usage(format!(
            "{shown} has more than {MAX_FILE} bytes"
        )));
    }
    serde_json::from_slice(&bytes).map_err(|why| {
        Failure::usage(format!("{shown} is not a request for a sandbox: {why}"))
            .with_cure("write a JSON object with annotations, containers, labels or timeout")
    })
}

/// The request with its template, the equivalent request of this server, and the keys without effect.
fn merge(
    mut given: Map<String, Value>,
    template: Option<&str>,
) -> Result<(Value, NewSandbox, Vec<String>), Failure> {
    // Treat null like an absent key.
    given.retain(|_, value| !value.is_null());
    let request: Request = serde_json::from_value(Value::Object(given.clone()))
        .map_err(|why| Failure::usage(format!("the request cannot be read: {why}")))?;
    let template = template.or(request.annotations.get(TEMPLATE).map(String::as_str));
    let template = template.filter(|id| !id.is_empty()).ok_or_else(|| {
        Failure::usage("the request names no template").with_cure(format!(
            "give --template-id ID, or the annotation {TEMPLATE}"
        ))
    })?;
    let template = template.to_owned();
    let ignored = ignored(&given, &request);
    let annotations = given.entry("annotations").or_insert_with(|| json!({}));
    annotations[TEMPLATE] = json!(template);
    let network = request.cube_network_config.or(request.cubevs_context);
    let network = network.unwrap_or_default();
    let filled = |list: Vec<String>| Some(list).filter(|list| !list.is_empty());
    let (allow_out, deny_out) = (filled(network.allow_out), filled(network.deny_out));
    let has_rules = allow_out.is_some() || deny_out.is_some();
    let envs = request.containers.into_iter().flat_map(|one| one.envs);
    let envs: BTreeMap<_, _> = envs.map(|env| (env.key, env.value)).collect();
    let sandbox = NewSandbox {
        template_id: template,
        timeout: request.timeout.filter(|s| *s > 0).or(Some(USUAL_TIMEOUT)),
        allow_internet_access: network.allow_internet_access,
        network: has_rules.then(|| NetworkConfig {
            allow_out,
            deny_out,
            ..NetworkConfig::default()
        }),
        metadata: Some(request.labels).filter(|labels| !labels.is_empty()),
        env_vars: Some(envs).filter(|envs| !envs.is_empty()),
        ..NewSandbox::default()
    };
    Ok((Value::Object(given), sandbox, ignored))
}

fn ignored(given: &Map<String, Value>, request: &Request) -> Vec<String> {
    let is_empty = |value: &Value| match value {
        Value::Null => true,
        Value::Array(all) => all.is_empty(),
        Value::Object(all) => all.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    };
    let keys = given
        .iter()
        .filter(|(key, value)| !USED.contains(&key.as_str()) && !is_empty(value));
    let annotations = request.annotations.keys().filter(|key| *key != TEMPLATE);
    let annotations = annotations.map(|key| format!("annotations.{key}"));
    let containers = given.get("containers").and_then(Value::as_array);
    let of_containers = containers
        .into_iter()
        .flatten()
        .filter_map(Value::as_object)
        .flatten();
    let of_containers = of_containers
        .filter(|(key, value)| key.as_str() != "envs" && !is_empty(value))
        .map(|(key, _)| format!("containers[].{key}"));
    let keys = keys.map(|(key, _)| key.clone());
    let mut all: Vec<_> = keys.chain(annotations).chain(of_containers).collect();
    all.sort();
    all.dedup();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged(
        request: Value,
        template: Option<&str>,
    ) -> Result<(Value, Value, Vec<String>), String> {
        let Value::Object(request) = request else {
            panic!("{request}");
        };
        let (api, sandbox, ignored) = merge(request, template).map_err(|why| why.to_string())?;
        Ok((api, json!(sandbox), ignored))
    }

    #[test]
    fn a_request_in_the_form_of_the_guides_becomes_one_of_this_server() {
        let request = json!({
            "annotations": {"cube.master.appsnapshot.template.id": "a", "other": "x"},
            "labels": {"app": "demo"}, "timeout": 300, "volumes": [], "network_type": "tap",
            "containers": [{"name": "main", "envs": [{"key": "A", "value": "b=c"}]}],
            "cubevs_context": {"allowInternetAccess": false, "allowOut": ["10.0.0.0/8"]},
        });
        let (api, sandbox, ignored) = merged(request, Some("t")).unwrap();
        assert_eq!(
            api["annotations"]["cube.master.appsnapshot.template.id"],
            "t"
        );
        assert_eq!(
            sandbox,
            json!({
                "templateID": "t", "timeout": 300, "allow_internet_access": false,
                "network": {"allowOut": ["10.0.0.0/8"]}, "metadata": {"app": "demo"}, "envVars": {"A": "b=c"},
            })
        );
        assert_eq!(
            ignored,
            ["annotations.other", "containers[].name", "network_type"]
        );
        let (api, sandbox, ignored) = merged(json!({"labels": null}), Some("t")).unwrap();
        assert_eq!(
            api,
            json!({"annotations": {"cube.master.appsnapshot.template.id": "t"}})
        );
        assert_eq!(sandbox, json!({"templateID": "t", "timeout": 60}));
        assert!(ignored.is_empty());
    }

    #[test]
    fn what_is_no_request_is_refused() {
        for wrong in [
            json!({}),
            json!({"annotations": {"cube.master.appsnapshot.template.id": ""}}),
            json!({"annotations": 1}),
            json!({"annotations": null, "timeout": "1m"}),
            json!({"containers": [{"envs": {"A": "b"}}]}),
        ] {
            assert!(merged(wrong.clone(), None).is_err(), "{wrong}");
        }
    }
}
