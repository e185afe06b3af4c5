//! A stand-in for `cube-vmm` and the agent of its guest, for tests of the server against hostile guests. It listens
//! where a VMM listens and runs no guest. A file of its template selects how it violates the protocols.
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
