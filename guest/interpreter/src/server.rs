//! The server: contexts and their hosts on the event loop of [`transport`].
//!
//! ```text
//! connection ─► route ─► job ─► queue of a context ─► host
//!      ▲                                               │ events, end of the cell, standard output and error
//!      └───────────────────────────────────────────────┘
//! ```
//! A handler gets [`Interpreter`] and its own connection. Messages for other connections (for example, if a restart
//! ends another client's cell) go through [`notice`].
//!
//! Invariants: the thread waits only in the poller; a host is not read while its client has no room; no cell begins
//! before the clone's state has been read (`Context::dispatch`).

mod contexts;
mod deliver;
mod notice;
mod pump;
mod requests;
mod service;
mod state;
mod stream;

use transport::{ListenError, Listener, Peers, Server, ServerError};

use crate::config::Config;
use state::Interpreter;

/// The server cannot start or continue.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(transparent)]
    Server(#[from] ServerError),
}

/// Listens, starts the contexts that exist from the start, and serves until the process is killed.
pub(crate) fn run(config: Config) -> Result<(), RunError> {
    let mut listeners = vec![Listener::tcp(config.listen)?];
    if let Some(port) = config.vsock {
        listeners.push(Listener::vsock(port, Peers::Any)?);
    }
    let interpreter = Interpreter::new(config)?;
    Ok(Server::new(listeners, interpreter)?.run()?)
}
