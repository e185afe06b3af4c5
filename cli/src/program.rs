//! The command line: all commands, and the exit code of each failure.

use std::{path::Path, process::ExitCode};

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::{
    cluster,
    context::Context,
    cubemastercli, doctor,
    failure::{ATTACHED, Failure, Kind},
    health, key, mcp, node,
    output::Format,
    pages, quickstart, run, sandbox, secret,
    server::ServerArgs,
    snapshot, template,
};

/// MicroVM sandboxes from the command line
#[derive(Parser, Debug)]
#[command(name = "cube", version, propagate_version = true, after_help = AFTER)]
pub(crate) struct Cube {
    /// Print JSON: one object with format, kind and items
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    #[command(subcommand)]
    pub(crate) command: Command,
}

const AFTER: &str = "\
Exit codes: 0 success, 1 the server refused the request, or the action failed, 2 usage,
6 this host lacks something, 7 no server responds. `run`, `exec` and `shell` exit with the
command's code: 128+n if signal n ended it, 124 after --timeout, 126 if it cannot be run,
127 if it is not found, and 125 if cube itself failed.";

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Run a command in a fresh sandbox, which is removed at the end
    Run(run::RunArgs),
    /// Sandboxes that live until they are killed or reach their deadline
    #[command(subcommand, visible_alias = "sbx")]
    Sandbox(Box<sandbox::SandboxCommand>),
    /// Snapshots of sandboxes, from which others are created
    #[command(subcommand)]
    Snapshot(snapshot::SnapshotCommand),
    /// Templates, from which sandboxes are created
    #[command(subcommand, visible_alias = "tpl")]
    Template(template::TemplateCommand),
    /// Values that the server adds to outbound requests of sandboxes
    #[command(subcommand)]
    Secret(secret::SecretCommand),
    /// Nodes of a cluster, and whether they accept new sandboxes
    #[command(subcommand)]
    Node(node::NodeCommand),
    /// Make this host a node of a cluster: init, token, join
    Cluster(cluster::ClusterArgs),
    /// API keys, on the server's host
    #[command(subcommand)]
    Key(key::KeyCommand),
    /// The server itself: health, version, configuration file
    #[command(subcommand)]
    Server(health::ServerCommand),
    /// Serve sandboxes as tools of AI agents, over the Model Context Protocol
    Mcp(Box<mcp::McpArgs>),
    /// Check this host, and print the remedy for everything that is missing
    Doctor(doctor::DoctorArgs),
    /// Create a key, run a first sandbox, and print the environment variables for clients
    Quickstart(quickstart::QuickstartArgs),
    /// Completions and manual pages
    #[command(subcommand)]
    Generate(pages::PagesCommand),
}

pub(crate) fn main() -> ExitCode {
    let mut words = std::env::args_os();
    let name = words.next().unwrap_or_default();
    if Path::new(&name)
        .file_name()
        .is_some_and(|name| name == cubemastercli::NAME)
    {
        return cubemastercli::main(words);
    }
    if words
        .next()
        .is_some_and(|first| first == cubemastercli::NAME)
    {
        return cubemastercli::main(words);
    }
    let matches = match Cube::command().try_get_matches() {
        Ok(matches) => matches,
        Err(why) if why.use_stderr() => without_variables().get_matches(),
        Err(why) => why.exit(),
    };
    let cube = Cube::from_arg_matches(&matches).unwrap_or_else(|why| why.exit());
    let context = Context {
        args: cube.server.of_one_server(&matches),
        format: if cube.json {
            Format::Json
        } else {
            Format::Human
        },
    };
    match cube.command {
        Command::Run(args) => attached(&context, run::run(&context, &args)),
        Command::Sandbox(command) => {
            let result = sandbox::run(&context, &command);
            if command.is_attached() {
                attached(&context, result)
            } else {
                finished(&context, result.map(drop))
            }
        }
        Command::Snapshot(command) => finished(&context, snapshot::run(&context, &command)),
        Command::Template(command) => finished(&context, template::run(&context, &command)),
        Command::Secret(command) => finished(&context, secret::run(&context, &command)),
        Command::Node(command) => finished(&context, node::run(&context, &command)),
        Command::Cluster(args) => finished(&context, cluster::run(&args)),
        Command::Key(command) => finished(&context, key::run(&context, &command)),
        Command::Generate(command) => finished(&context, pages::run(&command, Cube::command())),
        Command::Server(command) => finished(&context, health::run(&context, &command)),
        Command::Mcp(args) => finished(&context, mcp::run(&context, &args)),
        Command::Doctor(args) => finished(&context, doctor::run(&context, &args)),
        Command::Quickstart(args) => finished(&context, quickstart::run(&context, &args)),
    }
}

/// The command line without environment variables: clap's usage lines name as required what a variable has set.
fn without_variables() -> clap::Command {
    Cube::command().mut_args(|argument| argument.env(None))
}

fn finished(context: &Context, result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => report(context, &failure, failure.kind.code()),
    }
}

/// For commands that exit with another command's exit code.
fn attached(context: &Context, result: Result<u8, Failure>) -> ExitCode {
    match result {
        Ok(code) => ExitCode::from(code),
        Err(failure) if failure.kind == Kind::Usage => {
            report(context, &failure, failure.kind.code())
        }
        Err(failure) => report(context, &failure, ATTACHED),
    }
}

/// Prints a failure to standard error.
fn report(context: &Context, failure: &Failure, code: u8) -> ExitCode {
    match context.format {
        Format::Human => eprintln!("cube: {failure}"),
        Format::Json => eprintln!("{}", failure.to_json(code)),
    }
    ExitCode::from(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_shows_only_what_exists() {
        Cube::command().debug_assert();
        let help = Cube::command().render_help().to_string();
        let shown = help.lines().skip_while(|line| *line != "Commands:").skip(1);
        let shown = shown.take_while(|line| !line.is_empty());
        let shown: Vec<_> = shown
            .filter_map(|line| line.split_whitespace().next())
            .collect();
        for hidden in ["cubemastercli", "volume", "policy"] {
            assert!(!shown.contains(&hidden), "{hidden}");
        }
        for command in [
            "run", "sandbox", "snapshot", "template", "secret", "node", "key", "server", "mcp",
            "generate",
        ] {
            assert!(shown.contains(&command), "{command}");
        }
    }

    #[test]
    fn usage_lines_leave_out_what_variables_have_set() {
        let mut command = without_variables();
        command.build();
        let set = command
            .get_arguments()
            .filter(|argument| argument.get_env().is_some());
        assert_eq!(set.count(), 0);
        let why = command
            .try_get_matches_from(["cube", "sandbox", "info"])
            .unwrap_err();
        assert!(
            why.to_string().contains("Usage: cube sandbox info <ID>"),
            "{why}"
        );
    }

    #[test]
    fn the_words_of_a_command_need_no_separator() {
        for (line, tail) in [
            (
                "cube run -it --image python:3.12 -- python -V",
                &["python", "-V"][..],
            ),
            ("cube run python -V --json", &["python", "-V", "--json"]),
            ("cube sandbox exec -i id cat -n", &["cat", "-n"]),
        ] {
            let cube = Cube::try_parse_from(line.split_whitespace()).unwrap();
            let debug = format!("{:?}", cube.command);
            assert!(debug.contains(&format!("command: {tail:?}")), "{debug}");
        }
    }

    #[test]
    fn pages_are_made_of_all_commands() {
        let dir = tempfile::tempdir().unwrap();
        let command = pages::PagesCommand::Man {
            dir: dir.path().to_owned(),
        };
        pages::run(&command, Cube::command()).unwrap();
        for page in ["cube.1", "cube-run.1", "cube-sandbox-cp.1"] {
            assert!(dir.path().join(page).exists(), "{page}");
        }
    }
}
