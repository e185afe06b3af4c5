//! The code interpreter of a guest: a server on port 49999 that runs cells of code and streams what they
//! print and show.
//!
//! ```text
//! supervisor ─► server ─┬─ control socket, stdout, stderr ─► host process of a context (python: forks of a zygote)
//!                       ├─ …                                                           (javascript)
//!                       └─ …                                              more on first use
//! ```
//! The server is one thread around one `poll`, as the guest agent is one around epoll, and for the same
//! reason: each page that a first request touches is a page of each clone. The hosts run the code; each is a
//! process of one thread that reads requests from its control socket (see [`message`]).
//!
//! What must never happen: a cell that runs with the random state of the template; a blank line in an
//! answer, on which clients break; a host that outlives its server.
#![cfg_attr(fuzzing, no_main)]
#![cfg_attr(
    fuzzing,
    expect(dead_code, reason = "a fuzz target reads and does nothing")
)]

mod api;
mod clone_state;
mod config;
mod context;
mod event;
#[cfg(any(test, fuzzing))]
mod fuzz;
mod host;
mod kernel;
mod language;
mod message;
mod server;
mod supervisor;
mod sys;
mod text;
mod zygote;

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
