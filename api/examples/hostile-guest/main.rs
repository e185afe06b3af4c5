//! A stand-in for `cube-vmm` and the agent in its guest, for tests of the server against hostile guests. It serves the
//! control socket that the server passes as standard input, and runs no guest. The state file of the template selects
//! how it violates the protocols.
#![expect(
    clippy::unwrap_used,
    reason = "part of the tests: a failure must end them"
)]

mod agent;
mod conduct;
mod vmm;

use std::os::{fd::AsFd, unix::net::UnixListener};

fn main() {
    let control = UnixListener::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut vmm = vmm::Vmm::default();
    for client in control.incoming() {
        vmm.serve(client.unwrap());
    }
}
