//! The command line of `cube-api`, and the exit code for each failure.

// The server.
mod serve;

mod config;
mod reload;

// Before its first start.
mod ca;
mod cluster;
mod key;
mod prepare;

mod exit;

use std::{ffi::OsString, process::ExitCode};

use clap::{Parser, Subcommand};

use config::{
    ServeArgs, StateDir, earlier,
    show::{self, ConfigCommand},
};
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
    Serve(Box<ServeArgs>),
    /// Link the installed files of the guest below the state directory, and create the template `base` unless it
    /// exists; takes the options of `serve`
    Prepare(Box<ServeArgs>),
    /// End all sandboxes that a stopped server has left running, and remove their network and cgroups; takes the options
    /// of `serve`
    End(Box<ServeArgs>),
    /// Replace the running server with a new process of the installed program, and print its process id
    Reload(StateDir),
    /// The configuration file of the server
    #[command(subcommand)]
    Config(ConfigCommand),
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
    match parse(std::env::args_os()).and_then(run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => report(&failure),
    }
}

fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Command, Failure> {
    let (words, taken) = earlier::take(words)?;
    let mut command = Arguments::parse_from(words).command;
    if let Command::Serve(args) | Command::Prepare(args) | Command::End(args) = &mut command {
        args.earlier = taken;
    }
    Ok(command)
}

fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Serve(args) => serve::run(*args),
        Command::Prepare(args) => prepare::run(*args),
        Command::End(args) => serve::end(*args),
        Command::Reload(state) => reload::run(state),
        Command::Config(command) => show::run(&command),
        Command::Key(command) => key::run(command),
        Command::Cluster(command) => cluster::run(command),
        Command::Ca(command) => ca::run(&command),
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
