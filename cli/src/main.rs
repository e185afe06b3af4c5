//! `cube`: sandboxes of any server that speaks E2B's interface, from the command line.
//!
//! The program is synchronous: a command makes its requests one after the other on one connection ([`server`]).
//! Only an attached command ([`attach`]) has threads, for input, signals and the sandbox's lifetime. [`program`]
//! has the list of commands; each is a module. [`cubemastercli`] is a second command line with the same requests.

mod program;

// The commands.
mod cluster;
mod doctor;
mod health;
mod key;
mod mcp;
mod node;
mod pages;
mod quickstart;
mod run;
mod sandbox;
mod secret;
mod snapshot;
mod template;

mod cubemastercli;

// Commands with the streams and the exit code of a program in a sandbox.
mod attach;
mod command_args;

// Templates from images and Dockerfiles.
mod build;
mod dockerfile;
mod image;
mod progress;

// Shared by all commands: options, requests, output.
mod context;
mod failure;
mod output;
mod server;

use std::process::ExitCode;

fn main() -> ExitCode {
    program::main()
}
