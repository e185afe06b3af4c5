//! `cube`: sandboxes of any server that speaks E2B's interface, from the command line.
//!
//! The program is synchronous: a command makes the requests that it needs, one after the other, on one connection
//! ([`server`]). Only an attached command ([`attach`]) has threads: for input, signals and the sandbox's lifetime.

mod attach;
mod build;
mod cluster;
mod command_args;
mod dockerfile;
mod doctor;
mod failure;
mod health;
mod image;
mod key;
mod node;
mod output;
mod pages;
mod program;
mod progress;
mod quickstart;
mod run;
mod sandbox;
mod secret;
mod seed;
mod server;
mod snapshot;
mod template;

use std::process::ExitCode;

fn main() -> ExitCode {
    program::main()
}
