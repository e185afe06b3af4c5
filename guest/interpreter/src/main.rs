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
mod body;
mod clone_state;
mod conn;
mod context;
mod event;
#[cfg(any(test, fuzzing))]
mod fuzz;
mod host;
mod http;
mod kernel;
mod language;
mod listener;
mod message;
mod server;
mod supervisor;
mod sys;
mod text;
mod zygote;

use std::{net::SocketAddr, path::PathBuf, process::ExitCode};

use server::Server;

/// Where the template installs the hosts.
const HOSTS: &str = "/usr/local/lib/cube-interpreter";
/// Where the agent of a guest keeps what differs between clones.
const STATE: &str = "/run/cube";
const USAGE: &str = "usage: cube-interpreter [--supervise] [--warm] [--listen ADDRESS] [--vsock PORT] [--hosts DIR] [--state DIR]";

/// How the program was called.
#[derive(Debug)]
pub(crate) struct Config {
    supervise: bool,
    /// The first hosts do ahead what users do first, for a snapshot.
    warm: bool,
    listen: SocketAddr,
    /// Where the host reaches the server directly, in guests.
    vsock: Option<u32>,
    hosts: PathBuf,
    state: PathBuf,
    /// Directory of a kernelspec: be the host of that kernel and nothing else.
    kernel: Option<PathBuf>,
}

impl Config {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Option<Self> {
        let mut config = Self {
            supervise: false,
            warm: false,
            listen: SocketAddr::from(([127, 0, 0, 1], 49_999)),
            vsock: None,
            hosts: HOSTS.into(),
            state: STATE.into(),
            kernel: None,
        };
        while let Some(flag) = arguments.next() {
            match flag.as_str() {
                "--supervise" => config.supervise = true,
                "--warm" => config.warm = true,
                "--listen" => config.listen = arguments.next()?.parse().ok()?,
                "--vsock" => config.vsock = Some(arguments.next()?.parse().ok()?),
                "--hosts" => config.hosts = arguments.next()?.into(),
                "--kernel" => config.kernel = Some(arguments.next()?.into()),
                "--state" => config.state = arguments.next()?.into(),
                _ => return None,
            }
        }
        Some(config)
    }
}

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
    exit_code(Server::bind(config).and_then(|mut server| server.run()))
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
