//! The code interpreter of a guest: a server on port 49999 that runs cells of code and streams their output and
//! results.
//!
//! ```text
//! supervisor ─► server ─┬─ control socket, stdout, stderr ─► host process of a context (python: forks of a zygote)
//!                       ├─ …                                                           (javascript)
//!                       └─ …                                              more on first use
//! ```
//! The server has one thread and runs on [`transport`], because every clone pays for each page that its first request
//! touches. The hosts run the code; each is a process that reads requests from its control socket ([`message`]).
//!
//! Invariants: no cell runs with the random state of the template; no answer contains a blank line, which clients
//! cannot parse; no host outlives its server.
#![cfg_attr(fuzzing, no_main)]
#![cfg_attr(fuzzing, expect(dead_code, reason = "a fuzz target only parses"))]

// The process, and its server.
mod config;
mod supervisor;

mod server;

mod api;

// A context and the host that runs its cells.
mod context;
mod host;

mod event;
mod message;
mod setup;

mod kernel;
mod language;
mod zygote;

mod clone_state;

#[cfg(any(test, fuzzing))]
mod fuzz;
mod sys;
mod text;

use std::process::ExitCode;

use config::{Config, USAGE};

fn main() -> ExitCode {
    let Some(config) = Config::parse(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    if config.supervise {
        return supervisor::run(&config);
    }
    if let Some(dir) = &config.kernel {
        return exit_code(kernel::run(dir));
    }
    exit_code(server::run(config))
}

fn exit_code<E: std::error::Error>(done: Result<(), E>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cube-interpreter: {}", model::chain(&error));
            ExitCode::FAILURE
        }
    }
}
