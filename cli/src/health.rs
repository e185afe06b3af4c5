//! `cube server`: health and properties of a server.

use clap::Subcommand;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{context::Context, failure::Failure};

#[derive(Subcommand, Debug)]
pub(crate) enum ServerCommand {
    /// Whether the server responds; needs no key
    Health,
    /// Address, interface, and number of sandboxes and templates
    Info,
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
    let mut server = context.server()?;
    server.succeed("GET", "/health", b"")?;
    let url = server.url();
    match command {
        ServerCommand::Health => {
            let item = json!({"url": url, "healthy": true});
            context
                .format
                .done("health", &item, &format!("{url} is healthy"))
        }
        ServerCommand::Info => {
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
    }
}
