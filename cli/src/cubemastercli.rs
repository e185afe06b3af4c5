//! `cubemastercli`: the command line of CubeSandbox's guides, for readers who follow them. It is this program under
//! that name (a link), or `cube cubemastercli …`. Flags without meaning here are accepted and reported.

mod create;
mod info;
mod job;
mod probe;
mod render;
mod sandboxes;
mod templates;

use std::{ffi::OsString, process::ExitCode};

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use serde_json::{Value, json};

use crate::{context::Context, failure::Failure, output::Format, server::ServerArgs};

/// Name of the program that selects this command line.
pub(crate) const NAME: &str = "cubemastercli";

/// Templates and sandboxes, with the commands of CubeSandbox's guides
#[derive(Parser, Debug)]
#[command(name = NAME, version)]
struct Cubemastercli {
    /// Host of the server [default: from --url or E2B_API_URL]
    #[arg(
        short,
        long,
        global = true,
        env = "CUBEMASTER_ADDR",
        hide_env_values = true
    )]
    address: Option<String>,
    /// Port of the server, with --address
    #[arg(short, long, global = true, default_value_t = 3000)]
    port: u16,
    #[arg(long, global = true, hide = true)]
    timeout: Option<String>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(flatten)]
    server: ServerArgs,
    #[command(subcommand)]
    command: CubemastercliCommand,
}

#[derive(Subcommand, Debug)]
enum CubemastercliCommand {
    /// Templates
    #[command(subcommand, visible_alias = "template")]
    Tpl(templates::TplCommand),
    /// List sandboxes
    #[command(visible_alias = "ls")]
    List(sandboxes::ListArgs),
    /// Show a sandbox
    Info {
        /// Id of the sandbox
        #[arg(
            short = 's',
            long = "sandboxid",
            visible_alias = "sandbox-id",
            value_name = "ID"
        )]
        sandbox_id: String,
    },
    /// Sandboxes
    #[command(subcommand)]
    Sandbox(sandboxes::SandboxCommand),
    /// Sandboxes (older name of `sandbox`)
    #[command(subcommand)]
    Cubebox(sandboxes::SandboxCommand),
    /// Snapshots
    #[command(subcommand)]
    Snapshot(sandboxes::SnapshotCommand),
}

/// Runs this command line, given without the program's name. Usage lines show the name from the guides.
pub(crate) fn main(words: impl Iterator<Item = OsString>) -> ExitCode {
    let words = std::iter::once(NAME.into()).chain(words);
    let matches = Cubemastercli::command().get_matches_from(words);
    let mut cli = Cubemastercli::from_arg_matches(&matches).unwrap_or_else(|why| why.exit());
    cli.server = cli.server.of_one_server(&matches);
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::from(failure.kind.code())
        }
    }
}

fn run(cli: &Cubemastercli) -> Result<(), Failure> {
    let mut args = cli.server.clone();
    if let Some(address) = cli.address.as_deref().filter(|address| !address.is_empty()) {
        args.url = Some(url_of(address, cli.port));
    }
    let format = if cli.json {
        Format::Json
    } else {
        Format::Human
    };
    let context = Context { args, format };
    match &cli.command {
        CubemastercliCommand::Tpl(command) => templates::run(&context, command),
        CubemastercliCommand::List(args) => sandboxes::list(&context, args),
        CubemastercliCommand::Info { sandbox_id } => sandboxes::info(&context, sandbox_id),
        CubemastercliCommand::Sandbox(command) | CubemastercliCommand::Cubebox(command) => {
            sandboxes::run(&context, command)
        }
        CubemastercliCommand::Snapshot(command) => sandboxes::snapshots(&context, command),
    }
}

/// A response of these commands as JSON: its fields, and the result in the form of CubeSandbox's server.
fn answer(mut fields: Value) -> Value {
    if let Some(fields) = fields.as_object_mut() {
        let result = json!({"ret_code": 200, "ret_msg": "success"});
        fields.insert("ret".to_owned(), result);
    }
    fields
}

/// Accepts `HOST`, `HOST:PORT` or a URL. Uses the first entry of a comma-separated list.
fn url_of(address: &str, port: u16) -> String {
    let address = address.split(',').next().unwrap_or_default().trim();
    if address.contains("://") {
        return address.to_owned();
    }
    let has_port = address.rsplit_once(':').is_some_and(|(host, port)| {
        !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()) && !host.contains(':')
    });
    if has_port {
        format!("http://{address}")
    } else {
        format!("http://{address}:{port}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn addresses_have_the_port_unless_they_name_one() {
        assert_eq!(url_of("a", 8089), "http://a:8089");
        assert_eq!(url_of("a:1", 8089), "http://a:1");
        assert_eq!(url_of("https://a", 8089), "https://a");
        assert_eq!(url_of("a,b", 8089), "http://a:8089");
    }

    #[test]
    fn the_commands_of_the_guides_are_accepted() {
        Cubemastercli::command().debug_assert();
        for line in [
            "tpl create-from-image --image x --writable-layer-size 1G --expose-port 49999 --expose-port 49983 --probe 49999",
            "template create-from-image --image x --writable-layer-size 1G --cpu 2000 --memory 2000 --cmd a --arg b \
             --env A=B --dns 1.1.1.1 --with-cube-ca --allow-internet-access --no-wait --json",
            "tpl watch --job-id j",
            "tpl list -o wide",
            "tpl info t",
            "tpl status j",
            "tpl delete --template-id t",
            "tpl delete t",
            "tpl redo --template-id t --failed-only",
            "tpl set-alias --template-id t --alias a",
            "tpl commit --sandbox-id s",
            "tpl render t",
            "tpl render -f req.json --template-id t --json",
            "tpl render req.json",
            "tpl info --template-id t --json --include-request",
            "tpl create-from-image --template-id t --image x --writable-layer-size 20Gi --allow-internet-access=false \
             --with-cube-ca=false",
            "tpl redo --template-id t --wait --interval 2s",
            "tpl commit --sandbox-id s --template-id t -f req.json",
            "tpl build-watch --build-id b",
            "tpl ls",
            "ls -q",
            "cubebox rm s t",
            "snapshot info s",
            "-a h -p 8089 --timeout 35s list",
            "sandbox list",
            "sandbox kill --sandbox-id s",
            "cubebox destroy s",
            "list --all -q --wide",
            "info --sandboxid s",
            "snapshot create --sandbox-id s",
            "--address h --port 8089 list",
        ] {
            let words = [NAME].into_iter().chain(line.split_whitespace());
            let parsed = Cubemastercli::try_parse_from(words);
            assert!(parsed.is_ok(), "{line}: {parsed:?}");
        }
    }
}
