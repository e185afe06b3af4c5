//! The command line: all commands, and what each failure exits with.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::{
    doctor,
    failure::Failure,
    health,
    output::Format,
    quickstart,
    server::{Server, ServerArgs},
};

/// MicroVM sandboxes from the command line
#[derive(Parser, Debug)]
#[command(name = "cube", version, propagate_version = true, after_help = AFTER)]
pub struct Cube {
    #[command(flatten)]
    pub server: ServerArgs,
    /// Print JSON: one object with format, kind and items
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Command,
}

const AFTER: &str = "\
Exit codes: 0 success · 1 the server refused the request, or the action failed · 2 usage · 6 this host lacks something · \
7 no server answers. `run`, `exec` and `shell` exit with the command's code: 128+n if signal n ended it, 124 after \
--timeout, 126 if it cannot be run, 127 if it is not found, and 125 if cube itself failed.";

#[derive(Subcommand, Debug)]
pub enum Command {
    /// The server itself: version of its interface, health, counts
    #[command(subcommand)]
    Server(health::ServerCommand),
    /// What this host lacks for a server, each with its cure
    Doctor(doctor::DoctorArgs),
    /// From an installed package to a first sandbox, with the variables for clients
    Quickstart(quickstart::QuickstartArgs),
}

/// What every command gets.
pub struct Context {
    pub args: ServerArgs,
    pub format: Format,
}

impl Context {
    pub fn server(&self) -> Result<Server, Failure> {
        self.args.server()
    }
}

pub fn main() -> ExitCode {
    let cube = Cube::parse();
    let context = Context {
        args: cube.server,
        format: if cube.json {
            Format::Json
        } else {
            Format::Human
        },
    };
    let result = match cube.command {
        Command::Server(command) => health::run(&context, &command),
        Command::Doctor(args) => doctor::run(&context, &args),
        Command::Quickstart(args) => quickstart::run(&context, &args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => report(&context, &failure, failure.kind.code()),
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
