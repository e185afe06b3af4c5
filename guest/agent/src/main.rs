//! PID 1 of a guest and the server of the data plane, in one small static binary with one thread.
//!
//! As PID 1 it runs two stages in one process: [`boot`] assembles the root file system from the read-only image and
//! the writable layer, and [`server`] then serves requests on vsock until the guest ends. Clones of a snapshot
//! resume inside [`server::Server::run`], so a clone pays for every page that this loop touches. With `--listen
//! unix:PATH` the agent runs as an ordinary program, without the duties of PID 1.
#![cfg_attr(not(test), no_main)]
#![cfg_attr(fuzzing, expect(dead_code, reason = "a fuzz target only parses"))]

#[cfg(not(any(test, fuzzing)))]
#[path = "entry/sys.rs"]
mod entry;

// PID 1: from the initramfs to the server, and the end.
mod boot;
mod server;
mod shutdown;

// What `POST /init` changes.
mod identity;
mod network;
mod trust;

mod console;
#[cfg(fuzzing)]
mod fuzz;
mod sys;
mod users;

use std::path::PathBuf;

use identity::Duties;
use server::Server;
use transport::{Listener, Peers};

/// The role that the arguments select.
enum Mode {
    /// PID 1 of a guest.
    Init,
    /// An ordinary program that listens on a unix socket.
    Listen(PathBuf),
}

fn mode(arguments: &[String]) -> Result<Mode, String> {
    let socket = match arguments {
        [] if std::process::id() == 1 => return Ok(Mode::Init),
        [flag, address] if flag == "--listen" => address.strip_prefix("unix:"),
        _ if std::process::id() == 1 => return Ok(Mode::Init),
        _ => None,
    };
    let usage = || "usage: guest-agent --listen unix:PATH".to_owned();
    socket
        .map(PathBuf::from)
        .map(Mode::Listen)
        .ok_or_else(usage)
}

/// Entry point of the test program; elsewhere it is `entry::main`.
#[cfg(test)]
fn main() {
    std::process::exit(run());
}

/// Runs the program and returns its exit status.
fn run() -> i32 {
    sys::prepare_process();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match mode(&arguments) {
        Ok(Mode::Init) => run_as_init(),
        Ok(Mode::Listen(socket)) => report(listen(&socket)),
        Err(usage) => report(Err(usage)),
    }
}

/// Boots the guest and serves until it ends. Never returns: logs one line to the console if something failed, and
/// powers off.
fn run_as_init() -> i32 {
    let done = boot::run().map_err(|error| model::chain(&error));
    let served = done.and_then(|machine| {
        let port = envd::ENVD_PORT.into();
        let listener = Listener::vsock(port, Peers::Host).map_err(|e| model::chain(&e))?;
        let mut server = Server::new(listener, Duties::Machine(Box::new(machine)))
            .map_err(|e| model::chain(&e))?;
        console::log("ready");
        server.run().map_err(|e| model::chain(&e))?;
        server.end_machine();
        Ok(())
    });
    if let Err(error) = served {
        console::fail(&error);
    }
    shutdown::power_off()
}

fn listen(socket: &std::path::Path) -> Result<(), String> {
    let listener = Listener::unix(socket).map_err(|e| model::chain(&e))?;
    let mut server = Server::new(listener, Duties::None).map_err(|e| model::chain(&e))?;
    server.run().map_err(|e| model::chain(&e))?;
    server.end_processes();
    Ok(())
}

fn report(result: Result<(), String>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(message) => {
            console::stderr(&message);
            2
        }
    }
}
