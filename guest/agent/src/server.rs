//! The server of the data plane: HTTP/1.1 on vsock, on the event loop of [`transport`].
//!
//! ```text
//! poller ─► ready flags (connection, pipe, signal) ─► work queue ─► connection   request ─► route ─► handler
//!                                                            └────► process      pipes ─► followers' output
//! ```
//! Functions that are not needed to start a command are kept apart from those that are (`#[cold]`, `#[inline(never)]`):
//! a clone pays for whole pages of code, including the code on them that it does not execute.
//!
//! A handler gets [`core::Core`], the state that all requests share, and its own connection. It reaches other
//! connections only through the work queue. A new service is a route ([`route`]), its handler in [`dispatch`], and
//! a [`transport::Exchange`] if a response outlives its handler.
//!
//! Invariants: the thread waits only in the poller; a process's output is not read while one of its followers has
//! no room; only `/health` and `/init` are served before the guest has its identity.

mod answer;
mod call;
mod codec;
mod core;
mod dispatch;
mod envelope;
mod files;
mod filesystem;
mod freeze;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod head;
mod init;
mod message;
mod metrics;
mod process;
mod route;
mod secret;
mod tunnel;
mod watch;

use nix::sys::signal::Signal;
use transport::{Key, Listener, ServerError};

use crate::{identity::Duties, shutdown};
use core::Core;

/// The server.
pub(crate) struct Server(transport::Server<Core>);

impl Server {
    /// Prepares the process (signals, orphans, limits) and the poller.
    pub(crate) fn new(listener: Listener, duties: Duties) -> Result<Self, ServerError> {
        let core = Core::new(duties)?;
        transport::Server::new(vec![listener], core).map(Self)
    }

    /// Serves until SIGTERM or SIGINT.
    pub(crate) fn run(&mut self) -> Result<(), ServerError> {
        self.0.run()
    }

    /// Kills all processes that callers have started.
    pub(crate) fn end_processes(&mut self) {
        let core = self.0.service();
        let keys: Vec<Key> = core.processes.iter().map(|(key, _)| key).collect();
        for key in keys {
            if let Some(process) = core.processes.get_mut(key) {
                // Fails only if the process has ended.
                let _ = process.signal(Signal::SIGKILL);
            }
        }
    }

    /// Ends all other processes of the guest, writes back its layer and freezes it, but does not power off. Does
    /// nothing outside a guest.
    pub(crate) fn end_machine(&mut self) {
        if let Duties::Machine(machine) = &self.0.service().duties {
            shutdown::end_machine(machine.layer());
        }
    }
}
