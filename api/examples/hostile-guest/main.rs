//! A stand-in for `cube-vmm` and its guest's agent that keeps to no protocol, for the tests of how the server bears
//! that: it listens where a VMM does, runs no guest, and behaves as a file of its template says.
#![expect(
    clippy::unwrap_used,
    reason = "part of the tests: a broken stand-in should stop them"
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
