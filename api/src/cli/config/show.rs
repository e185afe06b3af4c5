//! `cube-api config check`: the effective configuration, each value with its source.

use std::{
    fmt::Write,
    path::{Path, PathBuf},
};

use clap::{Subcommand, ValueEnum};
use model::CONFIG_FILE;
use serde_json::{Value, json};

use super::{
    super::{Failure, failure},
    layers::Layers,
    schema,
    spec::spec,
};

/// Keys whose values are not shown: the URL of an alert can contain a token.
const MASKED: [&str; 1] = ["alerts.to"];
/// Version of the JSON document.
const FORMAT: u32 = 1;

#[derive(Subcommand)]
pub(in super::super) enum ConfigCommand {
    /// Check the configuration file, and print all mistakes, or each value with its source
    Check {
        /// Configuration file [default: /etc/cube/cube.toml if it exists]
        file: Option<PathBuf>,
        #[arg(long, value_enum, default_value = "human")]
        format: Format,
    },
}

#[derive(Clone, Copy, ValueEnum)]
pub(in super::super) enum Format {
    Human,
    Json,
}

pub(in super::super) fn run(command: &ConfigCommand) -> Result<(), Failure> {
    let ConfigCommand::Check { file, format } = command;
    let layers = Layers::load(file.as_deref(), Path::new(CONFIG_FILE), Vec::new());
    let config = layers.config()?;
    let program = std::env::current_exe().map_err(|why| failure(Failure::UnsuitableHost, &why))?;
    spec(&config, &layers, &program, Vec::new())?;
    if let Some(warning) = layers.deprecation() {
        eprintln!("cube-api: {warning}");
    }
    match format {
        Format::Human => print!("{}", text(&layers)),
        Format::Json => println!("{}", document(&layers)),
    }
    Ok(())
}

/// The value of a key, which is masked if it can be secret, and its source.
fn effective(layers: &Layers, key: &str, default: &Value) -> (Value, Option<String>) {
    let Some(setting) = layers.setting(key) else {
        return (default.clone(), None);
    };
    let value = if MASKED.contains(&key) {
        "***".into()
    } else {
        serde_json::to_value(&setting.value).unwrap_or_default()
    };
    (value, Some(setting.source.to_string()))
}

/// A configuration file: values that are set, and the defaults as comments.
pub(super) fn text(layers: &Layers) -> String {
    let (mut text, mut current) = (String::new(), "");
    for (section, name, default) in schema::keys() {
        if section != current {
            let gap = if current.is_empty() { "" } else { "\n" };
            let _infallible = writeln!(text, "{gap}[{section}]");
            current = section;
        }
        let (value, source) = effective(layers, &format!("{section}.{name}"), default);
        let _infallible = match source {
            Some(source) => writeln!(text, "{name} = {value}  # {source}"),
            None if value.is_null() => writeln!(text, "#{name} is not set"),
            None => writeln!(text, "#{name} = {value}  # default"),
        };
    }
    text
}

fn document(layers: &Layers) -> Value {
    let items = schema::keys().map(|(section, name, default)| {
        let key = format!("{section}.{name}");
        let (value, source) = effective(layers, &key, default);
        json!({"key": key, "value": value, "source": source.unwrap_or_else(|| "default".to_owned())})
    });
    let items: Vec<_> = items.collect();
    json!({"format": FORMAT, "kind": "config", "items": items})
}
