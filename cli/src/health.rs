//! `cube server`: health and properties of a server, and its configuration file.

use std::{os::unix::process::CommandExt, path::PathBuf, process::Command};

use clap::Subcommand;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    context::Context,
    failure::Failure,
    key::{PROGRAM, program},
    output::Format,
};

#[derive(Subcommand, Debug)]
pub(crate) enum ServerCommand {
    /// Check that the server responds; needs no key
    Health,
    /// Show address, interface version, and number of sandboxes and templates
    Info,
    /// The configuration file, on the server's host
    #[command(subcommand)]
    Config(ConfigCommand),
}

#[derive(Subcommand, Debug)]
pub(crate) enum ConfigCommand {
    /// Check the configuration file, and print all mistakes, or each value with its source
    Check {
        /// Configuration file [default: /etc/cube/cube.toml if it exists]
        file: Option<PathBuf>,
    },
}

/// The part of the OpenAPI document that is shown.
#[derive(Deserialize)]
struct Document {
    info: Info,
}

#[derive(Deserialize)]
struct Info {
    #[serde(default)]
    title: String,
    #[serde(default)]
    version: String,
}

pub(crate) fn run(context: &Context, command: &ServerCommand) -> Result<(), Failure> {
    match command {
        ServerCommand::Health => health(context),
        ServerCommand::Info => info(context),
        ServerCommand::Config(ConfigCommand::Check { file }) => {
            let mut check = Command::new(program());
            check.args(["config", "check"]).args(file);
            if context.format == Format::Json {
                check.args(["--format", "json"]);
            }
            let why = check.exec();
            Err(Failure::host(format!("cannot run {PROGRAM}: {why}"))
                .with_cure("the file is on the server's host: run `cube-api config check` there"))
        }
    }
}

fn health(context: &Context) -> Result<(), Failure> {
    let mut server = context.server()?;
    server.succeed("GET", "/health", b"")?;
    let url = server.url();
    let item = json!({"url": url, "healthy": true});
    let line = format!("{url} is healthy");
    context.format.done("health", &item, &line)
}

fn info(context: &Context) -> Result<(), Failure> {
    let mut server = context.server()?;
    server.succeed("GET", "/health", b"")?;
    let url = server.url();
    let document: Document = server.get("/openapi.json")?;
    let sandboxes: Vec<Value> = server.pages("/v2/sandboxes?limit=100")?;
    let templates: Vec<Value> = server.get("/templates")?;
    let running = sandboxes.iter().filter(|s| s["state"] == "running").count();
    let Info { title, version } = document.info;
    let item = json!({
        "url": url, "title": title, "version": version, "running": running,
        "paused": sandboxes.len() - running, "templates": templates.len(),
    });
    let lines = [
        ("url", url),
        ("interface", format!("{title} {version}")),
        ("running sandboxes", running.to_string()),
        ("paused sandboxes", (sandboxes.len() - running).to_string()),
        ("templates", templates.len().to_string()),
    ];
    context.format.properties("server", &item, &lines)
}
