//! Command line: what each command does, and how each error ends the program.

mod ca;
mod ceiling;
mod exit;
mod key;
mod network;
mod serve;
mod template;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use exit::Failure;

/// Where a server keeps what outlives it.
const STATE: &str = "/var/lib/cube";

#[derive(Parser)]
#[command(
    version,
    about = "Serves microVM sandboxes through an E2B-compatible API"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve until SIGTERM or SIGINT; sandboxes go on for the next server
    Serve(Box<serve::ServeConfig>),
    /// Make, show and revoke API keys; a running server notices
    #[command(subcommand)]
    Key(key::KeyCommand),
    /// Ask a running server about its templates
    #[command(subcommand)]
    Template(template::TemplateCommand),
    /// Make a private certificate authority and a server certificate
    #[command(subcommand)]
    Ca(ca::CaCommand),
}

pub(crate) fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match arguments.command {
        Command::Serve(config) => serve::run(*config),
        Command::Key(command) => key::run(command),
        Command::Template(command) => template::run(command),
        Command::Ca(command) => ca::run(&command),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("cube-api: {failure}");
            ExitCode::from(failure.code())
        }
    }
}

/// What went wrong, as the one line that ends the program.
fn failure(kind: fn(String) -> Failure, error: &dyn std::error::Error) -> Failure {
    kind(model::chain(error))
}
