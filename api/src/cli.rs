//! The command line of `cube-api`, and the exit code for each failure.

// The server.
mod serve;

mod ceiling;
mod images;
mod network;
mod options_file;
mod reload;

// Before its first start.
mod ca;
mod cluster;
mod key;
mod prepare;

mod exit;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use exit::Failure;

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
    /// Serve until SIGTERM or SIGINT; by default, sandboxes keep running for the next server
    Serve(Box<serve::ServeConfig>),
    /// Link the installed files of the guest below the state directory, and create the template `base` unless it
    /// exists; takes the options of `serve`
    Prepare(Box<serve::ServeConfig>),
    /// End all sandboxes that a stopped server has left running, and remove their network and cgroups; takes the options
    /// of `serve`
    End(Box<serve::ServeConfig>),
    /// Replace the running server with a new process of the program that is installed now; prints its process id
    Reload(options_file::StateDir),
    /// Create, list and revoke API keys; a running server picks up changes
    #[command(subcommand)]
    Key(key::KeyCommand),
    /// Make this host a node of a cluster
    #[command(subcommand)]
    Cluster(cluster::ClusterCommand),
    /// Create a private certificate authority and a server certificate
    #[command(subcommand)]
    Ca(ca::CaCommand),
}

pub(crate) fn main() -> ExitCode {
    let arguments = match options_file::expand(std::env::args_os()) {
        Ok(arguments) => Arguments::parse_from(arguments),
        Err(failure) => return report(&failure),
    };
    let result = match arguments.command {
        Command::Serve(config) => serve::run(*config),
        Command::Prepare(config) => prepare::run(&config),
        Command::End(config) => serve::end(*config),
        Command::Reload(state) => reload::run(state),
        Command::Key(command) => key::run(command),
        Command::Cluster(command) => cluster::run(command),
        Command::Ca(command) => ca::run(&command),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => report(&failure),
    }
}

fn report(failure: &Failure) -> ExitCode {
    eprintln!("cube-api: {failure}");
    ExitCode::from(failure.code())
}

/// A failure whose message consists of the error and its causes.
fn failure(kind: fn(String) -> Failure, error: &dyn std::error::Error) -> Failure {
    kind(model::chain(error))
}
