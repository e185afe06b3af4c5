//! `cube`: sandboxes of any server that speaks E2B's interface, from the command line.
//!
//! The program is synchronous: a command makes the requests that it needs, one after the other, on one connection
//! ([`server`]).

mod doctor;
mod failure;
mod health;
mod output;
mod program;
mod quickstart;
mod server;

use std::process::ExitCode;

fn main() -> ExitCode {
    program::main()
}
